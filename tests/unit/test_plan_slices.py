"""The rule for slices against brute force: every byte counted one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.plan_slices import LOCAL_GAP, REMOTE_GAP, gap_of, merged, runs, slices

KIB = 1024
MIB = 1024 * KIB


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Shape, element strides of some order of dimensions, and a box in it."""
    dims = draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(1, 6), min_size=dims, max_size=dims))
    stride, step = [0] * dims, 1
    for dim in draw(st.permutations(range(dims))):
        stride[dim] = step
        step *= shape[dim]
    offsets = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, stride, offsets, lengths


def places(stride: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int]) -> set[int]:
    """The bytes of a box, one by one."""
    out: set[int] = set()
    for index in itertools.product(*(range(n) for n in lengths)):
        element = sum((o + k) * s for o, k, s in zip(offsets, index, stride, strict=True))
        out.update(range(element * itemsize, (element + 1) * itemsize))
    return out


@given(boxes(), st.sampled_from([1, 2, 8]), st.integers(1, 60), st.integers(0, 200))
def test_slices_cover_the_box_once(
    box: tuple[list[int], list[int], list[int], list[int]], itemsize: int, block: int, gap: int
) -> None:
    """Each byte of the box is in exactly one strip, and each strip says rightly where it lies and what is a run."""
    _, stride, offsets, lengths = box
    covered: list[int] = []
    for strip in slices(stride, itemsize, offsets, lengths, block=block, gap=gap):
        inner = places(stride, itemsize, [o + a for o, a in zip(offsets, strip.at, strict=True)], strip.lengths)
        covered += inner
        assert (strip.start, strip.stop) == (min(inner), max(inner) + 1)
        assert strip.run is (len(inner) == strip.stop - strip.start)
    assert sorted(covered) == sorted(places(stride, itemsize, offsets, lengths))


@given(boxes(), st.sampled_from([1, 4]), st.integers(1, 40), st.integers(0, 100))
def test_runs_are_apart_and_leave_out_what_is_dear(
    box: tuple[list[int], list[int], list[int], list[int]], itemsize: int, block: int, gap: int
) -> None:
    """Ranges begin and end at blocks, share none, hold the box, and throw away no hole longer than gap and block."""
    shape, stride, offsets, lengths = box
    length = math.prod(shape) * itemsize
    found = runs(stride, itemsize, offsets, lengths, block=block, gap=gap, length=length)
    wanted = places(stride, itemsize, offsets, lengths)
    read = [byte for start, stop in found for byte in range(start, stop)]
    assert len(read) == len(set(read))
    assert wanted <= set(read)
    for start, stop in found:
        assert start % block == 0
        assert stop % block == 0 or stop == length
        inside = sorted(byte for byte in wanted if start <= byte < stop)
        assert inside[0] - start < block
        assert stop - inside[-1] <= block
        assert all(b - a - 1 <= gap + block for a, b in itertools.pairwise(inside))


@pytest.mark.parametrize(
    ("columns", "wanted", "gap", "ranges"),
    [
        (1 << 20, 1 << 18, LOCAL_GAP, 16),  # 3 MiB are left out of each row of 4 MiB
        (1 << 20, 1 << 18, REMOTE_GAP, 16),
        (1 << 18, 1 << 16, LOCAL_GAP, 16),  # 768 KiB: more than a request to a disk is worth
        (1 << 18, 1 << 16, REMOTE_GAP, 1),  # and less than one over a network
        (1 << 12, 1 << 10, LOCAL_GAP, 1),
    ],
)
def test_columns_are_one_range_or_several_by_what_is_cheaper(columns: int, wanted: int, gap: int, ranges: int) -> None:
    """A quarter of the columns of 16 rows is a range for each row where the rest costs more than requests do."""
    length = 16 * columns * 4
    block = min(max(-(-length // 128), 16 * KIB), MIB)
    found = runs([columns, 1], 4, [0, wanted], [16, wanted], block=block, gap=gap, length=length)
    assert len(found) == ranges
    if ranges > 1:
        assert sum(stop - start for start, stop in found) <= 16 * (wanted * 4 + 2 * block)


@pytest.mark.parametrize(("start", "count"), [(0, 20), (1, 20), (7, 20), (3, 21), (100, 28), (0, 128)])
def test_rows_of_twenty_blocks_cost_a_tenth_more_at_most(start: int, count: int) -> None:
    """Contiguous slices cost their bytes and two blocks at most; of twenty blocks and more, a tenth at most."""
    block, length = 64 * KIB, 128 * 64 * KIB
    for shift in (0, 1, 777, block - 1):
        first, size = min(start * block + shift, length - count * block), count * block
        ((low, high),) = runs([1], 1, [first], [size], block=block, gap=LOCAL_GAP, length=length)
        assert high - low <= size + 2 * block
        assert high - low <= 1.1 * size


@pytest.mark.parametrize(
    ("remote", "given", "wanted"), [(True, None, REMOTE_GAP), (False, None, LOCAL_GAP), (True, 0, 0), (False, 7, 7)]
)
def test_what_the_user_says_goes(remote: bool, given: int | None, wanted: int) -> None:
    """The worth of a request follows the kind of store unless the user names it, 0 included."""
    assert gap_of(remote=remote, max_gap=given) == wanted


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 60)), max_size=12), st.integers(0, 9))
def test_merged_ranges_are_apart(ranges: list[tuple[int, int, int]], gap: int) -> None:
    """Merging keeps every byte, adds only gaps that may be read, and leaves no two ranges closer than that."""
    given_ = [(file, min(a, b), max(a, b)) for file, a, b in ranges]
    found = merged(given_, gap)
    wanted = {(file, byte) for file, start, stop in given_ for byte in range(start, stop)}
    read = [(file, byte) for file, start, stop in found for byte in range(start, stop)]
    assert len(read) == len(set(read))
    assert wanted <= set(read)
    assert found == sorted(found)
    assert all(a[0] != b[0] or b[1] - a[2] > gap for a, b in itertools.pairwise(found))
    assert len(set(read) - wanted) <= gap * max(len(wanted) - 1, 0)
