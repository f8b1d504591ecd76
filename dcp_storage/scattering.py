"""From a run of a payload's bytes, cut anywhere, into a box of a target: what is wanted of it, converted on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from dcp_storage.codec import contiguous_stride
from dcp_storage.placing import dtype_of, fill, narrowed, product, view_of
from dcp_storage.plan_slices import runs
from dcp_storage.records import ItemRecord

__all__ = ["Box", "extents", "tiles"]

Tile = tuple[tuple[int, ...], tuple[int, ...]]


class Box:
    """The wanted box of a saved tensor, filled from runs of the payload that come in any order, each byte once.

    No memory is held between runs but for an element that two of them share.

    Args:
        record: what was saved, with ``dtype`` and ``shape``.
        target: what is filled, of the box's shape and any dtype.
        offsets: where the box begins in the saved chunk.
        lengths: its size.
    """

    def __init__(
        self, record: ItemRecord, target: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self.target = target
        self._key = record.key
        self._dtype = dtype_of(record)
        shape = record.shape or ()
        stride = record.stride or contiguous_stride(shape)
        # In the order of their steps the dimensions of any dense tensor lie in memory like those of a contiguous one.
        order = sorted(range(len(shape)), key=lambda d: (-stride[d], -shape[d], d))
        self._shape = tuple(shape[d] for d in order)
        self._stride = contiguous_stride(self._shape)
        self._offsets = tuple(offsets[d] for d in order)
        self._lengths = tuple(lengths[d] for d in order)
        self._turned = target.permute(order)
        self._seams: dict[int, tuple[bytearray, int]] = {}
        self._lock = threading.Lock()

    def place(self, start: int, run: memoryview) -> None:
        """Puts what is wanted of a run into the target.

        Args:
            start: the run's first byte, from the payload's start.
            run: its bytes.

        Raises:
            IncompatibleCheckpointError: the target cannot take them.
        """
        size = self._dtype.itemsize
        stop = start + run.nbytes
        first, last = -(-start // size), stop // size
        if first < last:
            self._place(first, last, run[first * size - start : last * size - start])
        for element in {start // size, last} if first <= last else {start // size}:
            low, high = max(start, element * size), min(stop, (element + 1) * size)
            if low < high < low + size:
                self._seam(element, low - element * size, run[low - start : high - start])

    def _seam(self, element: int, at: int, part: memoryview) -> None:
        size = self._dtype.itemsize
        with self._lock:
            held, count = self._seams.pop(element, (bytearray(size), 0))
            held[at : at + part.nbytes] = part
            count += part.nbytes
            if count < size:
                self._seams[element] = held, count
                return
        self._place(element, element + 1, memoryview(held))

    def _place(self, first: int, last: int, run: memoryview) -> None:
        for at, lengths in tiles(self._shape, first, last):
            low = [max(a, o) for a, o in zip(at, self._offsets, strict=True)]
            high = [min(a + n, o + m) for a, n, o, m in zip(at, lengths, self._offsets, self._lengths, strict=True)]
            count = [b - a for a, b in zip(low, high, strict=True)]
            if any(n <= 0 for n in count):
                continue
            skip = (sum(a * s for a, s in zip(low, self._stride, strict=True)) - first) * self._dtype.itemsize
            value = view_of(run, skip, self._dtype, tuple(count), self._stride)
            place = narrowed(self._turned, [a - o for a, o in zip(low, self._offsets, strict=True)], count)
            fill(place, value, self._key)


def extents(
    record: ItemRecord, offsets: Sequence[int] | None, lengths: Sequence[int] | None, gap: int
) -> list[tuple[int, int]]:
    """The byte ranges of an item's file that hold a wanted box, or all of the payload where no box can be cut out.

    Args:
        record: the item.
        offsets: where the box begins in the saved chunk; None for the whole item.
        lengths: its size, with ``offsets``.
        gap: as for :func:`~dcp_storage.plan_slices.slices`.
    """
    base = record.offset + record.payload_offset
    if offsets is None or lengths is None or record.shape is None:
        return [(base, base + record.payload_length)] if record.payload_length else []
    found = runs(
        record.stride or contiguous_stride(record.shape),
        dtype_of(record).itemsize,
        offsets,
        lengths,
        block=record.block if record.blocks else 1,
        gap=gap,
        length=record.payload_length,
    )
    return [(base + start, base + stop) for start, stop in found]


def tiles(shape: Sequence[int], first: int, last: int) -> Iterator[Tile]:
    """The elements ``first`` to ``last`` of a contiguous tensor as boxes, in order: at most two for each dimension.

    Args:
        shape: the tensor's.
        first: the first element, counted through.
        last: one past the last; more than ``first``.

    Yields:
        Where a box begins, and its size.
    """
    if not shape:
        yield (), ()
        return
    inner = product(shape[1:])
    (row, head), (end, tail) = divmod(first, inner), divmod(last, inner)
    if row == end:
        yield from _in_row(row, shape, head, tail)
        return
    if head:
        yield from _in_row(row, shape, head, inner)
        row += 1
    if row < end:
        yield (row, *(0 for _ in shape[1:])), (end - row, *shape[1:])
    if tail:
        yield from _in_row(end, shape, 0, tail)


def _in_row(row: int, shape: Sequence[int], first: int, last: int) -> Iterator[Tile]:
    for at, lengths in tiles(shape[1:], first, last):
        yield (row, *at), (1, *lengths)
