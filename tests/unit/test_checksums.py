"""The sums of items and blocks from the pieces of parts, against zlib over the whole bytes."""

from __future__ import annotations

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.checksums import PartSums, cells_of, piece_sums, sums_of_items
from dcp_storage.codec import Encoded
from dcp_storage.records import block_size

KIB = 1024


def item(data: bytes, head: int, tail: int) -> Encoded:
    """An item of these bytes, its payload between a head and a tail."""
    return Encoded([memoryview(data)], len(data), payload_offset=head, payload_length=len(data) - head - tail)


@st.composite
def rows(draw: st.DrawFn) -> list[Encoded]:
    out = []
    for number in range(draw(st.integers(1, 4))):
        head, payload, tail = draw(st.tuples(st.integers(0, 99), st.integers(0, 70 * KIB), st.integers(0, 99)))
        out.append(item(random.Random(number).randbytes(head + payload + tail), head, tail))
    return out


def blocks_of(payload: bytes) -> tuple[int, tuple[int, ...]]:
    """The rule of format 1, written down once more: a 128th of the payload, within 16 KiB and 1 MiB."""
    block = min(max((len(payload) + 127) // 128, 16 * KIB), KIB * KIB)
    return block, tuple(zlib.crc32(payload[at : at + block]) for at in range(0, len(payload), block))


@given(rows(), st.lists(st.integers(1, 40 * KIB), max_size=12))
def test_sums_do_not_depend_on_the_parts(items: list[Encoded], sizes: list[int]) -> None:
    """However a file is cut into parts, items, payloads and blocks get zlib's own sums, and so do the parts."""
    whole = b"".join(bytes(buffer) for each in items for buffer in each.buffers)
    cells = [length for each in items for length in cells_of(each)]
    parts: list[PartSums] = []
    at = 0
    for size in (*sizes, len(whole)):
        taken = min(size, len(whole) - at)
        lengths = []
        missing = taken
        while missing:
            step = min(cells[0], missing)
            lengths.append(step)
            missing -= step
            cells[0] -= step
            if not cells[0]:
                cells.pop(0)
        data = memoryview(whole)[at : at + taken]
        parts.append(piece_sums([data[:7], data[7:7], data[7:]], lengths))
        assert parts[-1].crc32 == zlib.crc32(data)
        at += taken
    for each, found in zip(items, sums_of_items(items, parts), strict=True):
        data_ = bytes(each.buffers[0])
        payload = data_[each.payload_offset : each.payload_offset + each.payload_length]
        assert found.crc32 == zlib.crc32(data_)
        assert found.payload_crc32 == zlib.crc32(payload)
        assert (found.block, found.blocks) == blocks_of(payload)


@given(st.integers(0, 1 << 40))
def test_blocks_are_within_their_limits(payload: int) -> None:
    """A block is a 128th of the payload, at least 16 KiB and at most 1 MiB."""
    block = block_size(payload)
    assert 16 * KIB <= block <= KIB * KIB
    if 16 * KIB * 128 <= payload <= 128 * KIB * KIB:
        assert (block - 1) * 128 < payload <= block * 128


def test_cells_are_the_whole_item() -> None:
    """Head, blocks and tail add up to the item, also where some are empty."""
    for head, payload, tail in ((0, 0, 0), (5, 0, 0), (0, 16 * KIB, 0), (3, 16 * KIB + 1, 4), (1, 1, 1)):
        lengths = list(cells_of(item(bytes(head + payload + tail), head, tail)))
        assert (lengths[0], lengths[-1]) == (head, tail)
        assert sum(lengths) == head + payload + tail
        assert all(0 < length <= 16 * KIB for length in lengths[1:-1])
