"""What a rank offers to read for others, against brute force: nothing that it would not check itself."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_storage.plan_slices import REMOTE_GAP
from dcp_storage.reader_plans import ranges_of
from dcp_storage.records import ItemRecord

FRAME = 7  # bytes before and after the numbers of each item


def item(number: int, first: int, count: int) -> ReadItem:
    index = MetadataIndex(str(number), torch.Size((0,)))
    at, size = torch.Size((first,)), torch.Size((count,))
    return ReadItem(LoadItemType.TENSOR, index, torch.Size((0,)), index, at, size)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.floats(0, 1), st.floats(0, 1)), max_size=8),
    st.sampled_from([REMOTE_GAP, FRAME, 0]),
)
def test_an_offer_holds_what_is_wanted_and_frames(saved: list[tuple[int, bool, float, float]], gap: int) -> None:
    """The blocks of what is wanted, what lies between the numbers of two neighbours, and no byte of other tensors."""
    records, items, wanted, frames, at = [], [], set(), set(), 0
    for number, (size, wants, begins, ends) in enumerate(saved):
        start = at + FRAME
        block = 4
        records.append(
            ItemRecord(
                key=str(number), offsets=(0,), file=0, offset=at, length=size + 2 * FRAME, payload_offset=FRAME,
                payload_length=size, dtype="uint8", shape=(size,), block=block, blocks=(0,) * -(-size // block),
            )
        )  # fmt: skip
        first = int(begins * (size - 1))
        last = first + 1 + int(ends * (size - first - 1))
        if wants:
            items.append(item(number, first, last - first))
            wanted |= set(range(start + first // block * block, start + min(-(-last // block) * block, size)))
        frames |= set(range(at, start)) | set(range(start + size, start + size + FRAME))
        at = start + size + FRAME
    found = ranges_of(items, lambda one: records[int(one.storage_index.fqn)], gap)
    offered = {byte for _, start, stop in found for byte in range(start, stop)}
    assert wanted <= offered <= wanted | frames
    assert all(stop < start for (_, _, stop), (_, start, _) in itertools.pairwise(found))
    if gap == REMOTE_GAP and all(wants and begins == 0 and ends == 1 for _, wants, begins, ends in saved):
        assert len(found) == bool(saved)  # one long run
