"""Planning against brute force: every byte counted one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dcp_storage.plan import Extent, align, coalesce, cut, even_part_size, pack, part_size_for, strips

GIB = 1 << 30


@given(
    total=st.integers(1, 2**42),
    most=st.integers(64 * 1024, 64 * 2**20),
    in_flight=st.integers(1, 64),
)
@example(total=566 * 10**6, most=16 * 2**20, in_flight=16)  # 34 parts in three rounds, the last of two
@example(total=64 * 2**20, most=16 * 2**20, in_flight=16)  # four parts, twelve connections idle
def test_even_parts_take_no_more_rounds(total: int, most: int, in_flight: int) -> None:
    """Even parts are sent in as few rounds as the largest, none is below 8 MiB, and no two rounds could be one."""
    size = even_part_size(total, most, in_flight)
    assert min(most, 8 * 2**20) <= size <= most
    rounds, fewest = (math.ceil(math.ceil(total / one) / in_flight) for one in (size, most))
    assert rounds == fewest
    if total > most > size > 8 * 2**20:  # a mebibyte less would need one round more
        assert math.ceil(total / (size - 2**20)) > fewest * in_flight


def test_even_parts_of_known_saves() -> None:
    """Sizes worked out by hand: 0.57 GB in 48 parts and not 34, 64 MiB in 8 and not 4, 10 MiB in one."""
    mib = 2**20
    assert even_part_size(566_000_000, 16 * mib, 16) == 12 * mib
    assert even_part_size(64 * mib, 16 * mib, 16) == 8 * mib
    assert even_part_size(10 * mib, 16 * mib, 16) == 16 * mib
    assert even_part_size(10**12, 16 * mib, 16) == 16 * mib


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_packing_keeps_order_and_size(sizes: list[int], shard_size: int) -> None:
    """Every item is in one file, in order; a file passes the size only with a single item; none could be merged."""
    files = pack(sizes, shard_size)
    assert list(itertools.chain(*files)) == list(range(len(sizes)))
    assert all(files)
    totals = [sum(sizes[k] for k in file) for file in files]
    for file, filled in zip(files, totals, strict=True):
        assert filled <= shard_size or len(file) == 1
    for number in range(1, len(files)):
        assert totals[number - 1] + sizes[files[number][0]] > shard_size


@given(st.integers(1, 20 << 20), st.integers(16, 10_000))
def test_parts_never_shrink_and_reach_far(base: int, most: int) -> None:
    """Part sizes begin at the base, never shrink, and all allowed parts hold much more than parts of one size."""
    sizes = [part_size_for(number, base, most) for number in range(1, most + 1)]
    assert sizes[0] == base
    assert all(one <= other <= 2 * one for one, other in itertools.pairwise(sizes))
    assert all(size == base for size in sizes[: most // 2])
    assert sum(sizes) >= 20 * base * most


def test_ten_thousand_parts_hold_a_file_of_terabytes() -> None:
    """S3's 10,000 parts from 16 MiB on hold more than 4 TiB, and the largest stays below S3's 5 GiB."""
    sizes = [part_size_for(number, 16 << 20, 10_000) for number in range(1, 10_001)]
    assert sum(sizes) > 4 << 40
    assert max(sizes) < 5 * GIB


extents = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 200), st.integers(1, 40)).map(
        lambda found: Extent(found[0], found[1], found[1] + found[2], None)
    ),
    max_size=25,
)


@given(extents, st.integers(0, 30), st.integers(1, 100))
def test_requests_cover_what_is_wanted(wanted: list[Extent[None]], gap: int, most: int) -> None:
    """Each extent is in one request, in order, without overlaps; gaps and sizes keep to their limits."""
    requests = coalesce(wanted, gap, most)
    inside = [extent for request in requests for extent in request.extents]
    assert sorted(map(repr, inside)) == sorted(map(repr, wanted))
    for request in requests:
        assert {extent.file for extent in request.extents} == {request.file}
        assert request.start == min(extent.start for extent in request.extents)
        assert request.stop == max(extent.stop for extent in request.extents)
        assert request.stop - request.start <= most or len(request.extents) == 1
        for one, other in itertools.pairwise(request.extents):
            assert 0 <= other.start - one.stop <= gap


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=20), st.integers(0, 6))
def test_requests_are_as_few_as_the_gaps_allow(steps: list[tuple[int, int]], gap: int) -> None:
    """Without a limit on size there is one request more than there are gaps that are too wide."""
    at, row = 0, []
    for skip, size in steps:
        row.append(Extent("a", at + skip, at + skip + size, None))
        at += skip + size
    wide = sum(skip > gap for skip, _ in steps[1:])
    assert len(coalesce(reversed(row), gap, 1 << 60)) == 1 + wide


@given(st.integers(1, 40), st.integers(1, 200), st.data())
def test_aligned_runs_are_the_blocks_they_touch(block: int, length: int, data: st.DataObject) -> None:
    """Widening gives exactly the bytes of every block that has a wanted byte."""
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    touched = {byte // block for byte in range(start, stop)}
    wanted = [byte for byte in range(length) if byte // block in touched]
    low, high = align(start, stop, block, length)
    assert list(range(low, high)) == wanted


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 300), st.integers(1, 100))
def test_cuts_lie_on_borders_of_blocks(block: int, first: int, span: int, size: int) -> None:
    """The pieces are the run, one behind the other, cut only between blocks, none larger than it must be."""
    start, stop = first * block, first * block + span
    pieces = list(cut(start, stop, block, size))
    assert [byte for low, high in pieces for byte in range(low, high)] == list(range(start, stop))
    for low, high in pieces:
        assert low % block == 0
        assert high % block == 0 or high == stop
        assert high - low <= max(size, block)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Shape, element strides of some order of dimensions, a box in it, and an item size."""
    dims = draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims))
    order = draw(st.permutations(range(dims)))
    stride = [0] * dims
    step = 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    offsets = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, stride, offsets, lengths, draw(st.sampled_from([1, 2, 8]))


def places(stride: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The bytes of a box, one by one."""
    out: list[int] = []
    for index in itertools.product(*(range(n) for n in lengths)):
        element = sum((o + k) * s for o, k, s in zip(offsets, index, stride, strict=True))
        out += range(element * itemsize, (element + 1) * itemsize)
    return out


@given(boxes(), st.integers(1, 400))
@example(([1], [1], [0], [1], 8), 1)
@example(([], [], [], [], 4), 1)
def test_strips_cover_the_box_once(box: tuple[list[int], list[int], list[int], list[int], int], limit: int) -> None:
    """Strips hold each byte of the box once, within the limit, and say rightly where they are and what is a run."""
    _, stride, offsets, lengths, itemsize = box
    found = strips(stride, itemsize, offsets, lengths, limit)
    covered: list[int] = []
    for strip in found:
        inner = places(stride, itemsize, [o + a for o, a in zip(offsets, strip.at, strict=True)], strip.lengths)
        covered += inner
        assert (strip.start, strip.stop) == (min(inner), max(inner) + 1)
        assert strip.run is (sorted(inner) == list(range(strip.start, strip.stop)))
        assert strip.stop - strip.start <= limit or math.prod(strip.lengths) == 1
        assert all(a >= 0 and a + n <= m for a, n, m in zip(strip.at, strip.lengths, lengths, strict=True))
    assert sorted(covered) == sorted(places(stride, itemsize, offsets, lengths))


@given(boxes())
def test_a_box_within_the_limit_is_one_strip(box: tuple[list[int], list[int], list[int], list[int], int]) -> None:
    """What the limit allows is not cut, and an empty box is nothing."""
    _, stride, offsets, lengths, itemsize = box
    found = strips(stride, itemsize, offsets, lengths, 1 << 62)
    assert len(found) == (0 in lengths) ^ 1


@given(st.integers(1, 40), st.integers(1, 10), st.integers(1, 10), st.integers(1, 500))
def test_rows_are_cut_into_as_few_strips_as_the_limit_allows(rows: int, columns: int, wanted: int, limit: int) -> None:
    """Of a matrix, as many rows go into one strip as fit with what lies between them."""
    assume(wanted <= columns)
    assume(wanted <= limit)
    found = strips([columns, 1], 1, [0, columns - wanted], [rows, wanted], limit)
    fit = max(1, (limit - wanted) // columns + 1)
    assert [strip.lengths[0] for strip in found[:-1]] == [fit] * (math.ceil(rows / fit) - 1)


@pytest.mark.parametrize("limit", [1, 100])
def test_a_single_element_larger_than_the_limit_goes_through(limit: int) -> None:
    """An element is never cut."""
    (strip,) = strips([1], 128, [3], [1], limit)
    assert (strip.start, strip.stop, strip.run) == (384, 512, True)
