"""Chunks that fill their tensor, held against counting its elements one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.coverage import fills
from dcp_storage.records import Chunk

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that fill it, made by cutting it again and again."""
    size = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 8)) if size else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for first, count in ((0, at), (at, sizes[dim] - at)):
            where = (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :])
            boxes.append((where, (*sizes[:dim], count, *sizes[dim + 1 :])))
    return size, draw(st.permutations(boxes))


def chunks_of(boxes: list[Box]) -> list[Chunk]:
    return [Chunk(offsets=offsets, sizes=sizes) for offsets, sizes in boxes]


@given(tilings())
def test_tilings(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    """Whatever a tensor was cut into fills it, in any order, with empty chunks among it."""
    size, boxes = tiling
    assert fills(size, chunks_of(boxes))


@given(tilings(), st.data())
def test_moved_chunks(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """With one chunk moved within the tensor the answer is that of counting how often each element is covered."""
    size, boxes = tiling
    which = data.draw(st.integers(0, len(boxes) - 1))
    sizes = boxes[which][1]
    moved = tuple(data.draw(st.integers(0, whole - count)) for whole, count in zip(size, sizes, strict=True))
    boxes[which] = (moved, sizes)
    covered = np.zeros(size, dtype=int)
    for offsets, lengths in boxes:
        covered[tuple(slice(at, at + count) for at, count in zip(offsets, lengths, strict=True))] += 1
    assert fills(size, chunks_of(boxes)) == bool((covered == 1).all())


def test_a_million_chunks_end_soon() -> None:
    """Chunks cut along more dimensions than any mesh has are refused, and not looked at corner by corner."""
    boxes = [Chunk(offsets=(at, *(0,) * 30), sizes=(1, *(1,) * 30)) for at in range(1000)]
    assert not fills((1000, *(2,) * 30), boxes)
