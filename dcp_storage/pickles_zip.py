"""The zip that ``torch.save`` writes, as records in memory: stored, never compressed, none larger than the whole."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from dcp_storage.errors import CorruptCheckpointError

__all__ = ["Record", "records"]

_ENCRYPTED = 0x1
_HEADER = struct.Struct("<4s22xHH")


class Record(NamedTuple):
    """A record of an archive: where its bytes begin in the archive, and a view of them."""

    start: int
    content: memoryview


def records(
    data: bytes, *, path: str | None = None, key: str | None = None, file: str | None = None, offset: int | None = None
) -> Mapping[str, Record]:
    """The records of a ``torch.save`` archive by name, without the archive's own leading folder; views of ``data``.

    Args:
        data: the whole archive.
        path: the checkpoint, for errors.
        key: the state-dict key, for errors.
        file: the file it is in, for errors.
        offset: its first byte there, for errors.

    Raises:
        CorruptCheckpointError: it is no such archive, or a record's CRC-32 does not match.
    """

    def wrong(what: str, cause: BaseException | None = None, at: int = 0, **sums: int) -> CorruptCheckpointError:
        begin = None if offset is None else offset + at
        where = "An object entry" if file is None else f"{file}: what was saved of {key!r:.200} at offset {begin}"
        return CorruptCheckpointError(
            f"{where} is damaged: {what}.", path=path, key=key, file=file, offset=begin, cause=cause, **sums
        )

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    # What zipfile raises on bytes that only look like a zip; NotImplementedError is its word for newer features.
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, LookupError, OverflowError) as error:
        raise wrong("it is not a zip as torch.save writes it", error) from error
    found: dict[str, Record] = {}
    view, left = memoryview(data), len(data)
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise wrong(f"the record {entry.filename!r:.200} is compressed, which torch.save never does")
        left -= entry.file_size
        if left < 0:
            raise wrong(f"its records are larger than its {len(data)} bytes")
        header = view[entry.header_offset : entry.header_offset + _HEADER.size]
        if entry.flag_bits & _ENCRYPTED or entry.header_offset < 0 or len(header) != _HEADER.size:
            raise wrong(f"the record {entry.filename!r:.200} is encrypted or not there")
        signature, name_size, extra_size = _HEADER.unpack(header)
        start = entry.header_offset + _HEADER.size + name_size + extra_size
        content = view[start : start + entry.file_size]
        if signature != b"PK\x03\x04" or len(content) != entry.file_size:
            raise wrong(f"the record {entry.filename!r:.200} is cut short")
        if entry.CRC and (crc := zlib.crc32(content)) != entry.CRC:  # 0: saved with torch's CRCs switched off
            raise wrong(
                f"the CRC-32 of the record {entry.filename!r:.200} does not match: {entry.CRC:#010x} was saved, "
                f"{crc:#010x} was read",
                at=start,
                wanted=entry.CRC,
                found=crc,
            )
        name = entry.filename.partition("/")[2]
        if name in found:
            raise wrong(f"it has two records {name!r:.200}")
        found[name] = Record(start, content)
    return found
