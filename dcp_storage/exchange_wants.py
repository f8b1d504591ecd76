"""What a rank wants of the segments of a shared load: which bytes of which segment go into which item."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dcp_storage.errors import CheckpointError
from dcp_storage.exchange_memory import Held
from dcp_storage.exchange_plan import Segment
from dcp_storage.load import Wanted
from dcp_storage.placing import dtype_of, product
from dcp_storage.scattering import Box, extents

__all__ = ["Item", "Portion", "item_of", "spread"]


@dataclass
class Item:
    """A wanted item while its bytes come in.

    Attributes:
        wanted: what the planner wants.
        box: what is filled as the bytes come; None for an item that is of no use before all of it is here.
        needed: bytes that are wanted of it.
        left: bytes that are still to come.
        whole: those that have come, without a box.
    """

    wanted: Wanted
    box: Box | None
    needed: int
    left: int = 0
    whole: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Portion:
    """What one item wants of one segment: its bytes from ``start`` to ``stop`` in the file."""

    item: Item
    start: int
    stop: int


def item_of(wanted: Wanted) -> Item:
    """An item of which nothing has come; asks the planner for its target."""
    record = wanted.item
    if wanted.target is None or wanted.offsets is None or wanted.lengths is None or record.shape is None:
        return Item(wanted, None, record.payload_length)
    box = Box(record, wanted.target(), wanted.offsets, wanted.lengths)
    return Item(wanted, box, product(wanted.lengths) * dtype_of(record).itemsize)


def spread(
    items: Sequence[Item], segments: Iterable[Segment], files: Sequence[str], *, max_gap: int, path: str
) -> tuple[dict[int, list[Portion]], list[Held]]:
    """Notes for each segment who wants what of it, and for each item how much is to come.

    Args:
        items: what is wanted.
        segments: those that this rank reads or receives.
        files: names, by the segments' ``file``.
        max_gap: bytes thrown away to save a request, at most.
        path: for errors.

    Returns:
        The portions by the number of the segment, and the items that have to be held until they are whole.

    Raises:
        CheckpointError: of kind ``"planner"``: the segments do not hold what is wanted.
    """
    names = {name: number for number, name in enumerate(files)}
    portions: dict[int, list[Portion]] = {}
    rows: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda s: (s.file, s.start)):
        portions[segment.number] = []
        rows.setdefault(segment.file, []).append(segment)
    starts = {file: [segment.start for segment in row] for file, row in rows.items()}
    held: list[Held] = []
    for item in items:
        offsets = None if item.box is None else item.wanted.offsets
        file = names[item.wanted.file]
        row = rows.get(file, [])
        numbers: list[int] = []
        for start, stop in extents(item.wanted.item, offsets, item.wanted.lengths, max_gap):
            item.left += stop - start
            at = start
            for segment in row[max(bisect.bisect_right(starts.get(file, []), start) - 1, 0) :]:
                if segment.start > at or at >= stop:
                    break
                if segment.stop > at:
                    portion = Portion(item, at, min(stop, segment.stop))
                    portions[segment.number].append(portion)
                    numbers.append(segment.number)
                    at = portion.stop
            if at < stop:
                raise CheckpointError(
                    f"{path}: the shared plan gives this rank no bytes from {at} on of {item.wanted.file}, which its "
                    "own plan wants: a planner changed it after it was shared.",
                    path=path,
                    key=item.wanted.item.key,
                    kind="planner",
                )
        if item.box is None and numbers:
            held.append(Held(numbers[0], numbers[-1], item.left))
    return portions, held
