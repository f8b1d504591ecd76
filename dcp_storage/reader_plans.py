"""What the ranks of a load tell the coordinator in their plans, and what it answers."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_storage.errors import CheckpointError, CheckpointReplacedError
from dcp_storage.exchange_plan import Ranges, Segment, share, totals
from dcp_storage.options import KIB, MIB
from dcp_storage.plan_slices import merged
from dcp_storage.reading import Checkpoint
from dcp_storage.records import ItemRecord, Manifest
from dcp_storage.scattering import extents

__all__ = ["Answer", "Offer", "Seen", "answered", "box_of", "files_of", "ranges_of"]

_FRAME = 8 * KIB  # bytes that torch.save puts between the numbers of two tensors, at most
_LONGEST = 4 * MIB  # long enough for its request not to matter, short enough for many of them to be on their way
_SHORTEST = 256 * KIB
_EACH = 4  # segments for each rank, at least, so that all have something to read


@dataclass(frozen=True)
class Offer:
    """What a rank that shares its reads wants.

    Attributes:
        token: the name of the load, by which the ranks of the reader's group know each other.
        rank: its rank in that group.
        size: how many ranks the group has.
        ranges: the bytes that it would read alone.
    """

    token: str
    rank: int
    size: int
    ranges: Ranges


@dataclass(frozen=True)
class Seen:
    """What a rank tells the coordinator in its plan: which commit it read, and what it will read.

    Attributes:
        number: the commit's number; None for a checkpoint without one.
        identity: CRC-32 of the manifest, so that ranks that read different saves are found out.
        files: names of the files that it will read from.
        offer: None where it shares nothing.
    """

    number: int | None
    identity: int
    files: tuple[str, ...]
    offer: Offer | None = None


@dataclass(frozen=True)
class Answer:
    """What the coordinator answers to a rank that offered to share.

    Attributes:
        token: the load's.
        rank: whom it is for.
        segments: those that the rank reads or receives; None where nothing is shared.
        reason: why not.
    """

    token: str
    rank: int
    segments: tuple[Segment, ...] | None
    reason: str = ""


def files_of(plans: Sequence[LoadPlan], checkpoint: Checkpoint, path: str) -> set[str]:
    """The files that any rank wants to read from.

    Raises:
        CheckpointReplacedError: the ranks read different commits.
    """
    wanted: set[str] = set()
    for plan in plans:
        seen = plan.storage_data
        if not isinstance(seen, Seen):  # a planner made its own plan: all files, to be sure
            wanted.update(record.name for record in checkpoint.manifest.files)
            continue
        if (seen.number, seen.identity) != (checkpoint.number, checkpoint.identity):
            raise CheckpointReplacedError(
                f"{path}: another save committed while the ranks were beginning to load: they read commit "
                f"{checkpoint.number} and commit {seen.number}. Load again.",
                path=path,
            )
        wanted.update(seen.files)
    return wanted


def box_of(item: ReadItem) -> tuple[tuple[int, ...], tuple[int, ...]] | tuple[None, None]:
    """Where the wanted box begins in the saved chunk, and its size; twice None for an object."""
    if item.type == LoadItemType.BYTE_IO:
        return None, None
    return tuple(item.storage_offsets), tuple(item.lengths)


def ranges_of(items: Sequence[ReadItem], record_of: Callable[[ReadItem], ItemRecord], gap: int) -> Ranges:
    """The bytes that a rank reads for what it wants, and what ``torch.save`` puts between two neighbours of them.

    There is nothing else in them: whoever reads a segment checks what it wants of it, so what it does not want must
    not be in it, or another rank would get that unchecked.

    Args:
        items: what it wants.
        record_of: finds the saved item.
        gap: bytes that are as dear as one more request.
    """
    found: list[tuple[int, int, int]] = []
    begun: dict[tuple[int, int], int] = {}  # file and beginning of an item → the first byte that is wanted of it
    ended: dict[tuple[int, int], int] = {}  # file and end of an item → one past the last
    for item in items:
        record = record_of(item)
        offsets, lengths = box_of(item)
        wanted = extents(record, offsets, lengths, gap)
        if not wanted:
            continue
        found += [(record.file, start, stop) for start, stop in wanted]
        start = record.offset + record.payload_offset
        if wanted[0][0] == start:
            begun[record.file, record.offset] = start
        if wanted[-1][1] == start + record.payload_length:
            ended[record.file, record.offset + record.length] = wanted[-1][1]
    between = [(file, ended[file, at], begun[file, at]) for file, at in begun.keys() & ended.keys()]
    found += [frame for frame in between if frame[2] - frame[1] <= min(gap, _FRAME)]
    return merged(found, 0)


def answered(plans: list[LoadPlan], checkpoint: Checkpoint, *, path: str, budget: int) -> list[LoadPlan]:
    """The plans with an :class:`Answer` for every rank that offered to share.

    Args:
        plans: of all ranks.
        checkpoint: what is loaded.
        path: for errors.
        budget: bytes of memory that a rank has.

    Raises:
        CheckpointError: of kind ``"group"``: the ranks of this load are not those of the readers' process group.
    """
    seen = [plan.storage_data for plan in plans]
    offers = [s.offer for s in seen if isinstance(s, Seen) and s.offer is not None]
    if not offers:
        return plans
    if len(offers) < len(plans):
        why = "a planner replaced what this package had put into the plans"
        return [_refused(plan, why) for plan in plans]
    ranks = sorted(offer.rank for offer in offers)
    if ranks != list(range(offers[0].size)) or len({offer.token for offer in offers}) > 1:
        raise CheckpointError(
            f"{path}: the {len(plans)} ranks of this load are not the {offers[0].size} ranks of the reader's "
            "process_group. Give the reader the process group that dcp.load gets.",
            path=path,
            kind="group",
        )
    by_rank = sorted(offers, key=lambda offer: offer.rank)
    wants = [offer.ranges for offer in by_rank]
    fair = max(totals(wants)[1] // (_EACH * len(wants)), _SHORTEST)
    size = max(min(_LONGEST, fair, budget // 16), 64 * KIB)
    segments = share(wants, size=size, border=_borders(checkpoint.manifest))
    mine: list[list[Segment]] = [[] for _ in by_rank]
    for segment in segments:
        for rank in (segment.owner, *segment.takers):
            mine[rank].append(segment)
    return [_with(p, Answer(o.token, o.rank, tuple(mine[o.rank]))) for p, o in zip(plans, offers, strict=True)]


def _refused(plan: LoadPlan, why: str) -> LoadPlan:
    seen = plan.storage_data
    if isinstance(seen, Seen) and seen.offer is not None:
        return _with(plan, Answer(seen.offer.token, seen.offer.rank, None, why))
    return plan


def _with(plan: LoadPlan, data: object) -> LoadPlan:
    return dataclasses.replace(plan, storage_data=data)


def _borders(manifest: Manifest) -> Callable[[int, int], int]:
    """Where the files of a manifest may be cut: between the blocks of a payload, and anywhere outside of payloads."""
    rows: dict[int, list[tuple[int, int, int]]] = {}

    def row_of(file: int) -> list[tuple[int, int, int]]:
        if not rows:
            for item in manifest.items:
                start = item.offset + item.payload_offset
                block = item.block if item.blocks else 1
                rows.setdefault(item.file, []).append((start, start + item.payload_length, block))
            for row in rows.values():
                row.sort()
        return rows.get(file, [])

    def border(file: int, at: int) -> int:
        row = row_of(file)
        number = bisect.bisect_right(row, (at, 1 << 62, 0)) - 1
        if number < 0 or at >= row[number][1]:
            return at
        start, _, block = row[number]
        return start + (at - start) // block * block

    return border
