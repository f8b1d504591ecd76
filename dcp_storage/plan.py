"""Planning, apart from all I/O (pure): which item goes into which file, which bytes a read needs, in which requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "Coalescer",
    "Extent",
    "Request",
    "Strip",
    "align",
    "coalesce",
    "cut",
    "even_part_size",
    "pack",
    "part_size_for",
    "strips",
]

T = TypeVar("T")

_BETWEEN = 4096
_SHARE = 32
_MIB = 1024 * 1024
_LEAST = 8 * _MIB


def pack(sizes: Sequence[int], shard_size: int) -> list[list[int]]:
    """Which item goes into which file: in the plan's order, a new file where the next item would pass ``shard_size``.

    Args:
        sizes: bytes of each item, about.
        shard_size: bytes of a file, about; an item larger than that has a file of its own.

    Returns:
        For each file the numbers of its items; no file is empty.
    """
    files: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not files or (filled + size > shard_size):
            files.append([])
            filled = 0
        files[-1].append(number)
        filled += size
    return files


def even_part_size(total: int, most: int, in_flight: int) -> int:
    """Bytes of a part, so that every connection has as much to send as the others.

    With parts of ``most`` bytes the last ones leave connections idle, and a small save may have fewer parts than there
    are connections: each of them then takes as long as its link does for ``most`` bytes. Parts below 8 MiB cost more
    in requests than that gains, and what goes into one part is one request instead of three.

    Args:
        total: bytes to be sent, about.
        most: bytes of a part, at most.
        in_flight: connections.

    Returns:
        Whole mebibytes from 8 MiB to ``most``; ``most`` where it is not larger than that, or one part is enough.
    """
    if total <= most:
        return most
    rounds = max(1, -(-total // (most * in_flight)))
    each = -(-total // (rounds * in_flight))
    return min(most, max(_LEAST, -(-each // _MIB) * _MIB))


def part_size_for(number: int, base: int, max_parts: int) -> int:
    """Bytes of part ``number`` (from 1) of an upload whose length is not known beforehand.

    The first half of the allowed parts have ``base`` bytes each; then the size doubles with every further sixteenth, so
    that 10,000 parts from 16 MiB on reach 4.9 TiB instead of 156 GiB.
    """
    step = max(max_parts // 16, 1)
    return int(base << max(0, -(-(number - max_parts // 2) // step)))


@dataclass(frozen=True)
class Extent(Generic[T]):
    """A run of bytes of one file that somebody wants.

    Attributes:
        file: the file.
        start: its first byte.
        stop: one past its last byte; never equal to ``start``.
        owner: whatever the caller wants back with the bytes.
    """

    file: str
    start: int
    stop: int
    owner: T


@dataclass(frozen=True)
class Request(Generic[T]):
    """One ranged read: from the first extent's first byte to the last one's end; gaps between them are thrown away."""

    extents: tuple[Extent[T], ...]

    @property
    def file(self) -> str:
        """The file that is read."""
        return self.extents[0].file

    @property
    def start(self) -> int:
        """First byte."""
        return self.extents[0].start

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.extents[-1].stop


class Coalescer(Generic[T]):
    """Joins extents that come in file order into requests, without knowing what comes later.

    An extent joins the request before it if it is of the same file, begins at or after that request's end, leaves a
    gap of at most ``max_gap`` bytes, and the whole stays within ``max_size`` bytes. However few bytes a request more
    would cost, no more than 4 KiB and a 32nd of what is wanted are read for nothing in one gap: the 4 KiB are what
    ``torch.save`` puts between two tensors, the rest keeps the sum within what was asked for.
    """

    def __init__(self, max_gap: int, max_size: int) -> None:
        self._max_gap = max_gap
        self._max_size = max_size
        self._pending: list[Extent[T]] = []
        self._useful = 0

    def add(self, extent: Extent[T]) -> Request[T] | None:
        """Takes the next extent; returns the request that is complete now, if one is."""
        if self._pending:
            first, last = self._pending[0], self._pending[-1]
            if (
                extent.file == last.file
                and last.stop <= extent.start <= last.stop + min(self._max_gap, self._spare(extent))
                and extent.stop - first.start <= self._max_size
            ):
                self._pending.append(extent)
                self._useful += extent.stop - extent.start
                return None
        done = self.flush()
        self._pending = [extent]
        self._useful = extent.stop - extent.start
        return done

    def _spare(self, extent: Extent[T]) -> int:
        return _BETWEEN + (self._useful + extent.stop - extent.start) // _SHARE

    def flush(self) -> Request[T] | None:
        """The request that is still open, if there is one."""
        if not self._pending:
            return None
        done = Request(tuple(self._pending))
        self._pending = []
        return done


def coalesce(extents: Iterable[Extent[T]], max_gap: int, max_size: int) -> list[Request[T]]:
    """Sorts extents by file and place and joins them into requests (see :class:`Coalescer`)."""
    joiner: Coalescer[T] = Coalescer(max_gap, max_size)
    ordered = sorted(extents, key=lambda e: (e.file, e.start, e.stop))
    found = [joiner.add(extent) for extent in ordered]
    return [request for request in (*found, joiner.flush()) if request is not None]


def align(start: int, stop: int, block: int, length: int) -> tuple[int, int]:
    """``[start, stop)`` widened to the borders of blocks of ``block`` bytes in a payload of ``length`` bytes."""
    return start // block * block, min(-(-stop // block) * block, length)


def cut(start: int, stop: int, block: int, size: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)``, aligned to ``block``, cut into runs of about ``size`` bytes at the borders of blocks."""
    step = max(size // block, 1) * block
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


@dataclass(frozen=True)
class Strip:
    """A part of a wanted box whose bytes lie close together in the payload.

    Attributes:
        start: first byte of the covering run, from the payload's start.
        stop: one past its last byte.
        at: where the part begins within the box, per dimension.
        lengths: its size, per dimension.
        run: whether every byte of the covering run belongs to it.
    """

    start: int
    stop: int
    at: tuple[int, ...]
    lengths: tuple[int, ...]
    run: bool


def strips(
    stride: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int], limit: int
) -> list[Strip]:
    """A box of a dense tensor as strips of at most ``limit`` bytes each, in order; a single element may be more.

    Args:
        stride: element strides of the saved tensor.
        itemsize: bytes of an element.
        offsets: where the box begins, per dimension.
        lengths: its size, per dimension.
        limit: most bytes that a strip's covering run should have.

    Returns:
        Strips that cover the box exactly once; empty where the box is empty.
    """
    if any(n == 0 for n in lengths):
        return []
    start = sum(o * s for o, s in zip(offsets, stride, strict=True)) * itemsize
    span = (sum((n - 1) * s for n, s in zip(lengths, stride, strict=True)) + 1) * itemsize
    run = span == math.prod(lengths) * itemsize
    zero = (0,) * len(lengths)
    if span <= limit or all(n == 1 for n in lengths):
        return [Strip(start, start + span, zero, tuple(lengths), run)]
    # Cut along the dimension whose steps are widest: its slices lie apart, or one behind the other.
    dim = max((d for d in range(len(lengths)) if lengths[d] > 1), key=lambda d: stride[d])
    inner = span - (lengths[dim] - 1) * stride[dim] * itemsize
    rows = max(1, (limit - inner) // (stride[dim] * itemsize) + 1) if limit > inner else 1
    out = []
    for first in range(0, lengths[dim], rows):
        count = min(rows, lengths[dim] - first)
        part_offsets = [*offsets]
        part_offsets[dim] += first
        part_lengths = [*lengths]
        part_lengths[dim] = count
        for strip in strips(stride, itemsize, part_offsets, part_lengths, limit):
            at = tuple(a + (first if d == dim else 0) for d, a in enumerate(strip.at))
            out.append(Strip(strip.start, strip.stop, at, strip.lengths, strip.run))
    return out
