"""Who reads which bytes when the ranks of a load share their reads (pure). docs/design/006 has the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_storage.options import MIB

__all__ = ["SHARING_PAYS", "Ranges", "Segment", "members", "share", "totals", "worth_sharing"]

Ranges = Sequence[tuple[int, int, int]]
"""What one rank reads: ``(file, first byte, one past the last)``, in order and apart from each other."""

SHARING_PAYS = 16 * MIB
"""Bytes that have to be saved for sharing to pay; measured, see docs/design/006."""


@dataclass(frozen=True)
class Segment:
    """A run of bytes of one file that is read once.

    Attributes:
        number: unlike any other's of the load; in the order of files and places.
        file: index of the file in the manifest.
        start: first byte.
        stop: one past the last byte.
        owner: the rank that reads it, which wants it itself.
        takers: the other ranks that want it, sorted; empty where the owner is alone.
    """

    number: int
    file: int
    start: int
    stop: int
    owner: int
    takers: tuple[int, ...] = ()


def worth_sharing(*, wanted: int, distinct: int, ranks: int, remote: bool, threshold: int = SHARING_PAYS) -> bool:
    """Whether sharing reads makes a load faster.

    It costs two rounds between all ranks and a copy of each shared byte over the network between them; it saves what
    the store does not send again. A disk of this machine, whose bytes come out of the page cache at the second time,
    is always faster than the exchange.

    Args:
        wanted: bytes that the ranks would read alone, all together.
        distinct: of these, each byte counted once; ``totals`` gives both.
        ranks: how many ranks load.
        remote: ``Store.remote``.
        threshold: bytes that have to be saved.
    """
    return remote and ranks > 1 and wanted - distinct >= threshold


def totals(wants: Sequence[Ranges]) -> tuple[int, int]:
    """The bytes that ranks would read alone, and those that they would read once, sharing.

    Args:
        wants: what each rank reads.
    """
    wanted = sum(stop - start for ranges in wants for _, start, stop in ranges)
    return wanted, sum(stop - start for _, start, stop, _ in _pieces(wants))


def share(wants: Sequence[Ranges], *, size: int, border: Callable[[int, int], int]) -> list[Segment]:
    """Cuts what the ranks want into segments, and gives each to one of the ranks that want it.

    Every segment is wanted as a whole by the same ranks. The borders of what ranks want are borders of blocks, and so
    is where a long segment is cut, so that whoever reads a segment can check it. The rank with the fewest bytes so far
    reads the next one, but a reader keeps going until it has read ``size`` bytes in a row, so that its reads can be
    joined. What only one rank wants counts from the start.

    Args:
        wants: what each rank reads.
        size: bytes of a segment, about.
        border: file and offset → the last place at or before the offset where a segment may be cut.

    Returns:
        The segments in the order of files and places.
    """
    pieces = [cut for piece in _pieces(wants) for cut in _cut(piece, size, border)]
    load = [0] * len(wants)
    for _, start, stop, mask in pieces:
        if not mask & (mask - 1):
            load[mask.bit_length() - 1] += stop - start
    out: list[Segment] = []
    last, row = -1, 0
    for number, (file, start, stop, mask) in enumerate(pieces):
        ranks = members(mask)
        if last in ranks and row + stop - start <= size:
            owner = last
        else:
            owner = min(ranks, key=lambda rank: (load[rank], rank))
            row = 0
        last = owner
        row += stop - start
        if len(ranks) > 1:
            load[owner] += stop - start
        out.append(Segment(number, file, start, stop, owner, tuple(rank for rank in ranks if rank != owner)))
    return out


def members(mask: int) -> list[int]:
    """The numbers of the bits that are set, lowest first."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


def _pieces(wants: Sequence[Ranges]) -> list[tuple[int, int, int, int]]:
    """The longest runs that the same ranks want, in order; the last of the four is a bit for each rank."""
    borders: dict[tuple[int, int], int] = {}
    for rank, ranges in enumerate(wants):
        bit = 1 << rank
        for file, start, stop in ranges:
            for place in ((file, start), (file, stop)):
                borders[place] = borders.get(place, 0) ^ bit  # a rank that ends a range where it begins one goes on
    out: list[tuple[int, int, int, int]] = []
    mask, at = 0, (0, 0)
    for place in sorted(borders):
        if mask and borders[place]:
            out.append((at[0], at[1], place[1], mask))
        if borders[place]:
            mask ^= borders[place]
            at = place
    return out


def _cut(
    piece: tuple[int, int, int, int], size: int, border: Callable[[int, int], int]
) -> list[tuple[int, int, int, int]]:
    """A piece in cuts of about ``size`` bytes; longer where no border lies in so many."""
    file, start, stop, mask = piece
    out = []
    while stop - start > size:
        at, step = border(file, start + size), size
        while at <= start and start + step < stop:
            step *= 2
            at = border(file, min(start + step, stop))
        if not start < at < stop:
            break
        out.append((file, start, at, mask))
        start = at
    return [*out, (file, start, stop, mask)]
