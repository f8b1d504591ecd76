"""Mutations of what ``torch.save`` writes: records changed and packed again with right sums, or the zip's bytes."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from tests.fuzz import opcodes, raw
from tests.fuzz.choices import Choices

__all__ = ["mutated", "packed"]

_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<4sHHHHIIH")
_ORDERS: Final = (b"little", b"big", b"", b"middle", b"BIG")


def packed(records: Mapping[str, bytes], *, lie: Choices | None = None) -> bytes:
    """A zip of stored records; with ``lie``, one number of its directory is another."""
    body, directory = bytearray(), bytearray()
    liar = -1 if lie is None else lie.below(len(records) + 1)
    for number, (name, data) in enumerate(records.items()):
        title, crc, size, at = name.encode(), zlib.crc32(data), len(data), len(body)
        body += _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0, crc, size, size, len(title), 0) + title + data
        facts = [b"PK\1\2", 20, 20, 0, 0, 0, 0, crc, size, size, len(title), 0, 0, 0, 0, 0, at]
        if lie is not None and number == liar:
            wide = lie.pick((0, 1, size + 1, len(body), 2**16, 2**31, 2**32 - 1))
            field = lie.pick((3, 4, 7, 8, 9, 16))
            facts[field] = wide & (0xFFFF if field < 7 else 0xFFFFFFFF)
        directory += _CENTRAL.pack(*facts) + title
    end = [b"PK\5\6", 0, 0, len(records), len(records), len(directory), len(body), 0]
    if lie is not None and liar == len(records):
        field = lie.pick((3, 4, 5, 6, 7))
        end[field] = lie.pick((0, 1, 0xFFFF, 2**16, 2**31, 2**32 - 1)) & (0xFFFF if field in (3, 4, 7) else 0xFFFFFFFF)
    return bytes(body + directory + _END.pack(*end))


@functools.lru_cache(maxsize=64)
def _records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def mutated(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    """The archive after one change: mostly of its pickle, else of its records or of its own bytes.

    Args:
        choices: decides.
        data: a valid archive.
        others: valid ones, to take pickles and records from.
    """
    way = choices.below(8)
    if way == 0:
        return raw.mutated(choices, data, others)
    records = dict(_records(data))
    pickled = next(name for name in records if name.endswith("/data.pkl"))
    folder = pickled.partition("/")[0]
    if way == 1:
        return packed(records, lie=choices)
    if way == 2:
        records[f"{folder}/byteorder"] = choices.pick(_ORDERS)
    elif way == 3:
        name = choices.pick(list(records))
        records[name] = raw.mutated(choices, records[name][:4096], [records[name]])
    elif way == 4:
        other = _records(choices.pick(others))
        records.update(
            {f"{folder}/{name.partition('/')[2]}": body for name, body in other.items() if choices.one_in(2)}
        )
    elif way == 5 and choices.one_in(3):
        records[pickled] = opcodes.invented(choices)
    else:
        rows = [body for other in others for name, body in _records(other).items() if name.endswith("/data.pkl")]
        records[pickled] = opcodes.mutated(choices, records[pickled], rows)
    if choices.one_in(12):
        records.pop(choices.pick(list(records)))
    return packed(records) if records else data
