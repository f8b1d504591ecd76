"""Which ranges hold a part of a saved tensor: one covering range, or several (pure). docs/design/005 has the rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dcp_storage.options import KIB, MIB
from dcp_storage.plan import Coalescer, Extent, Strip, align, strips

__all__ = ["LOCAL_GAP", "REMOTE_GAP", "gap_of", "merged", "runs", "slices"]

LOCAL_GAP = 64 * KIB
"""What a request to a local disk costs, in bytes that could be read instead."""

REMOTE_GAP = MIB
"""The same over a network: some 20 ms of a connection that carries 60 MB/s."""


def gap_of(*, remote: bool, max_gap: int | None) -> int:
    """Bytes that are as dear as one more request: what the user said, else by the kind of store.

    Args:
        remote: ``Store.remote``.
        max_gap: ``LoadOptions.max_gap``.
    """
    if max_gap is not None:
        return max_gap
    return REMOTE_GAP if remote else LOCAL_GAP


def slices(
    stride: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int], *, block: int, gap: int
) -> list[Strip]:
    """A box of a dense tensor as strips, each of which one range covers, in order.

    Between two neighbours of the box along a dimension lie bytes that nobody wants. Each end of a range widens to a
    block's border, by half a block on average, so of such a gap a block less than its length is saved by leaving it
    out. It is left out if that is more than ``gap`` bytes, else read and thrown away. The widest gaps are those of the
    dimension with the widest steps, so that the box is split from there inwards. Two ranges never share a block.

    Args:
        stride: element strides of the saved tensor.
        itemsize: bytes of an element.
        offsets: where the box begins, per dimension.
        lengths: its size, per dimension.
        block: bytes of a checksum block; 1 where there are none.
        gap: bytes that are as dear as one more request; see :func:`gap_of`.

    Returns:
        Strips that cover the box exactly once; empty where the box is empty.
    """
    whole = strips(stride, itemsize, offsets, lengths, 1 << 62)
    if not whole or whole[0].run:
        return whole
    dim = max((d for d in range(len(lengths)) if lengths[d] > 1), key=lambda d: stride[d])
    step = stride[dim] * itemsize
    inner = [1 if d == dim else n for d, n in enumerate(lengths)]
    first = slices(stride, itemsize, offsets, inner, block=block, gap=gap)
    if step - (first[-1].stop - first[0].start) - block <= gap:
        return whole
    # Every slice along the dimension is cut as the first one is, a step further on.
    return [
        Strip(
            strip.start + number * step,
            strip.stop + number * step,
            tuple(number if d == dim else a for d, a in enumerate(strip.at)),
            strip.lengths,
            strip.run,
        )
        for number in range(lengths[dim])
        for strip in first
    ]


def runs(
    stride: Sequence[int],
    itemsize: int,
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    block: int,
    gap: int,
    length: int,
) -> list[tuple[int, int]]:
    """The ranges of the payload that hold a box, widened to whole blocks, in order and apart from each other.

    Args:
        stride: as in :func:`slices`, like the arguments up to ``gap``.
        itemsize: see there.
        offsets: see there.
        lengths: see there.
        block: see there.
        gap: see there.
        length: bytes of the payload.
    """
    found = slices(stride, itemsize, offsets, lengths, block=block, gap=gap)
    return [align(strip.start, strip.stop, block, length) for strip in found]


def merged(ranges: Iterable[tuple[int, int, int]], max_gap: int) -> list[tuple[int, int, int]]:
    """Ranges ``(file, start, stop)``, overlaps united and joined over the gaps that a single request would read.

    Args:
        ranges: in any order.
        max_gap: as for :class:`~dcp_storage.plan.Coalescer`.

    Returns:
        The ranges in order, none touching another.
    """
    apart: list[tuple[int, int, int]] = []
    for file, start, stop in sorted(ranges):
        if apart and apart[-1][0] == file and start <= apart[-1][2]:
            apart[-1] = (file, apart[-1][1], max(apart[-1][2], stop))
        elif start < stop:
            apart.append((file, start, stop))
    joiner: Coalescer[int] = Coalescer(max_gap, 1 << 62)
    found = [joiner.add(Extent(str(file), start, stop, file)) for file, start, stop in apart]
    return [(r.extents[0].owner, r.start, r.stop) for r in (*found, joiner.flush()) if r is not None]
