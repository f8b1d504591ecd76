"""The bytes of ``torch.save`` with its CRC-32s put in afterwards, so that a tensor's memory is read once and not twice.

``torch.save`` makes a zip archive and runs over the payload for the archive's own CRC-32; we run over it for the sums
of its blocks, from which the same CRC-32 follows. So torch writes the archive without sums (a mode of its writer), and
they are filled in here: in the data descriptor and the directory entry of every record (APPNOTE.TXT 4.3.9 and 4.3.12),
and in the record that identifies the archive, which torch derives from the names and sums of the others. What comes
out is the same byte for byte. :func:`can_seal` tries that once in each process; where this torch does it in another
way, ``torch.save`` does it all.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import serialization

from dcp_storage.crc import crc32

__all__ = ["Seal", "Sink", "UnlikeError", "alignment", "can_seal", "write_unsummed"]

_ID_RECORD = b"/.data/serialization_id"
_ID_NAMES = 20  # digits that stand for the names of the records; as many follow for their sums
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_IN_EXTRA = 0xFFFFFFFF  # the number stands in the ZIP64 extra field (4.5.3)
_WORD = (1 << 64) - 1


class UnlikeError(Exception):
    """The archive is not laid out as expected."""


class Sink(Protocol):
    """The file-like object that torch writes to."""

    def write(self, data: memoryview | bytes) -> int:
        """Takes bytes; returns how many."""

    def flush(self) -> None:
        """Nothing need happen."""


def alignment() -> int:
    """Bytes to whose multiple torch aligns a payload in its archive, by its settings of now."""
    inside: Any = serialization
    return int(inside._get_storage_alignment())


def write_unsummed(tensor: torch.Tensor, sink: Sink) -> None:
    """Writes what ``torch.save(tensor, sink)`` writes, every CRC-32 left 0."""
    # What torch.save does (torch/serialization.py), with a writer that makes no sums.
    inside: Any = serialization
    writer = inside.torch._C.PyTorchFileWriter(sink, False, alignment())
    inside._save(tensor, writer, pickle, serialization.DEFAULT_PROTOCOL, False)
    writer.write_end_of_file()


class _Archive:
    """An archive without its payload, addressed as if it were there."""

    def __init__(self, before: bytes, length: int, after: bytes) -> None:
        self.before = bytearray(before)
        self.after = bytearray(after)
        self.stop = len(before)  # where the payload begins
        self.resume = len(before) + length
        self.size = self.resume + len(after)

    def place(self, at: int, count: int) -> tuple[int, int]:
        """In which half these bytes are, 0 or 1, and where there."""
        if at >= 0 and at + count <= self.stop:
            return 0, at
        if self.resume <= at and at + count <= self.size:
            return 1, at - self.resume
        raise UnlikeError

    def read(self, at: int, count: int) -> bytes:
        half, place = self.place(at, count)
        return bytes((self.before, self.after)[half][place : place + count])

    def write(self, at: int, data: bytes) -> None:
        half, place = self.place(at, len(data))
        (self.before, self.after)[half][place : place + len(data)] = data

    def unpack(self, form: struct.Struct, at: int, signature: bytes) -> tuple[Any, ...]:
        fields = form.unpack(self.read(at, form.size))
        if fields[0] != signature:
            raise UnlikeError
        return fields


def _directory(archive: _Archive) -> tuple[int, int]:
    """Where the central directory begins, and its entries."""
    end = archive.unpack(_END, archive.size - _END.size, b"PK\x05\x06")
    if end[4] != 0xFFFF and end[6] != _IN_EXTRA:
        return end[6], end[4]
    locator = archive.unpack(struct.Struct("<4sIQI"), archive.size - _END.size - 20, b"PK\x06\x07")
    end64 = archive.unpack(_END64, locator[2], b"PK\x06\x06")
    return end64[9], end64[7]


def _wide(fields: tuple[Any, ...], extra: bytes) -> tuple[int, int]:
    """Bytes of the record and where it begins, also where they are too large for the entry itself."""
    size, packed, start = fields[9], fields[8], fields[16]
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(numbers) if size == _IN_EXTRA else size
            packed = next(numbers) if packed == _IN_EXTRA else packed
            start = next(numbers) if start == _IN_EXTRA else start
        at += 4 + length
    if size != packed:
        raise UnlikeError
    return size, start


def _combined(seed: int, value: int) -> int:
    """Torch's ``hash_combine`` on 64 bits."""
    return (seed ^ (value + 0x9E3779B9 + (seed << 6 & _WORD) + (seed >> 2))) & _WORD


@dataclass(frozen=True)
class _Record:
    """A record whose sum depends on the payload: the payload itself, or the one that identifies the archive.

    Attributes:
        sums: where its CRC-32 stands, twice; each a half of the archive (0 before the payload, 1 after it) and a place.
        names: of the identifying record: what stands before its last digits; None for the payload.
        digits: where those are, and how many.
    """

    sums: tuple[tuple[int, int], tuple[int, int]]
    names: bytes | None = None
    digits: tuple[int, int, int] = (0, 0, 0)


class Seal:
    """Where an archive's CRC-32s go; those that do not depend on the payload are in place already.

    Args:
        before: the archive's bytes before the payload.
        length: bytes of the payload.
        after: the archive's bytes after the payload.

    Raises:
        UnlikeError: the archive is not laid out as expected.
    """

    def __init__(self, before: bytes, length: int, after: bytes) -> None:
        archive = _Archive(before, length, after)
        self._records: list[int | _Record] = []  # in the directory's order; of the others their CRC-32
        at, count = _directory(archive)
        for _ in range(count):
            fields = archive.unpack(_CENTRAL, at, b"PK\x01\x02")
            name_size, extra_size, comment_size = fields[10:13]
            name = archive.read(at + _CENTRAL.size, name_size)
            size, start = _wide(fields, archive.read(at + _CENTRAL.size + name_size, extra_size))
            local = archive.unpack(_LOCAL, start, b"PK\x03\x04")
            begin = start + _LOCAL.size + local[9] + local[10]
            if archive.read(begin + size, 4) != b"PK\x07\x08":
                raise UnlikeError
            places = begin + size + 4, at + 16
            sums = archive.place(places[0], 4), archive.place(places[1], 4)
            if name.endswith(_ID_RECORD):
                rest = size - _ID_NAMES
                names = archive.read(begin, _ID_NAMES)
                self._records.append(_Record(sums, names, (*archive.place(begin + _ID_NAMES, rest), rest)))
            elif begin == archive.stop and size == length:
                self._records.append(_Record(sums))
            else:
                crc = crc32(archive.read(begin, size))
                for place in places:
                    archive.write(place, struct.pack("<I", crc))
                self._records.append(crc)
            at += _CENTRAL.size + name_size + extra_size + comment_size
        self._halves = bytes(archive.before), bytes(archive.after)

    def fill(self, payload_crc: int) -> tuple[bytes, bytes]:
        """What ``torch.save`` puts before and after a payload with this CRC-32."""
        halves = tuple(bytearray(half) for half in self._halves)
        combined = 0
        for record in self._records:
            if isinstance(record, int):
                crc = record
            else:
                crc = payload_crc
                if record.names is not None:
                    half, place, count = record.digits
                    digits = str(combined).zfill(count).encode()
                    halves[half][place : place + count] = digits
                    crc = crc32(record.names + digits)
                for half, place in record.sums:
                    halves[half][place : place + 4] = struct.pack("<I", crc)
            combined = _combined(combined, crc)
        return bytes(halves[0]), bytes(halves[1])


class _Halves:
    """Keeps what comes before and after one long write."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.parts = [bytearray(), bytearray()]
        self.payload = b""

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data)
        if view.nbytes == self.length:
            self.payload = bytes(view)
        else:
            self.parts[bool(self.payload)] += view
        return view.nbytes

    def flush(self) -> None:
        """Nothing is held back."""


def can_seal() -> bool:
    """Whether an archive sealed here is, byte for byte, what this torch saves with the settings of now."""
    return bool(serialization.get_crc32_options()) and _seals_alike()


@functools.lru_cache(maxsize=1)
def _seals_alike() -> bool:
    here = torch.device("cpu")  # whatever torch.set_default_device says
    for sample in (
        torch.arange(2503, dtype=torch.int32, device=here).view(-1, 2503),
        torch.ones(7919, dtype=torch.bfloat16, device=here)[None],
    ):
        wanted = io.BytesIO()
        torch.save(sample, wanted)
        halves = _Halves(sample.numel() * sample.element_size())
        try:
            write_unsummed(sample, halves)
            before, after = (bytes(part) for part in halves.parts)
            before, after = Seal(before, len(halves.payload), after).fill(crc32(halves.payload))
        except (UnlikeError, TypeError, AttributeError, RuntimeError):  # what another torch's inside may say
            return False
        if before + halves.payload + after != wanted.getvalue():
            return False
    return True
