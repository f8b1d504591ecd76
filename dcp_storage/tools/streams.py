"""The bytes of a committed file as they go by in parts, held against every CRC-32 that the manifest has of them.

A file is a row of *cells*: each item's head, the blocks of its payload, its tail, and what lies between items. It is
read in *parts*, whose borders fall on borders of cells wherever a cell is not larger than a part, so that a part can
be judged alone, and asked for once more before anybody believes that it is damaged. The CRC-32s of items and of the
file are then put together from those of the cells.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from dcp_storage.crc import combine_all, crc32
from dcp_storage.records import FileRecord, ItemRecord, Manifest
from dcp_storage.store import Store

__all__ = ["Cell", "Damage", "FileSums", "Layout", "Part", "layouts", "read_part"]


class Cell(msgspec.Struct, frozen=True):
    """A run of bytes of a file.

    Attributes:
        start: its first byte.
        stop: one past its last.
        crc32: what was committed; None where only the item's or the file's sum covers it.
        item: whose bytes they are; None between items.
    """

    start: int
    stop: int
    crc32: int | None
    item: ItemRecord | None


@dataclass(frozen=True)
class Damage:
    """Bytes that are not those that were committed.

    Attributes:
        what: ``"block"``; ``"item"``, of one without blocks; ``"frame"``: what ``torch.save`` puts around the blocks of
            an item; ``"file"``: what lies between items.
        start: the first byte in the file.
        stop: one past the last.
        key: the state-dict key, None for a file.
        wanted: the CRC-32 that was committed.
        found: the CRC-32 of what is there.
    """

    what: str
    start: int
    stop: int
    key: str | None
    wanted: int
    found: int


@dataclass(frozen=True)
class Part:
    """A run of bytes that is read in one request."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass
class Layout:
    """A file and its cells.

    Attributes:
        record: the file.
        cells: in order, without gaps.
        items: the file's items, in the order of their places.
    """

    record: FileRecord
    cells: list[Cell]
    items: list[ItemRecord]
    _borders: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._borders = [cell.stop for cell in self.cells]

    def parts(self, size: int, least: int = 1) -> Iterator[Part]:
        """The file cut into parts of at most ``size`` bytes and (but the last) at least ``least``."""
        start = 0
        while start < self.record.size:
            stop = min(start + size, self.record.size)
            if stop < self.record.size:
                place = bisect.bisect_right(self._borders, stop) - 1
                border = self._borders[place] if place >= 0 else 0
                # Not too short: a file of many large cells would otherwise be read in crumbs.
                if border - start >= max(size // 2, least):
                    stop = border
            yield Part(start, stop)
            start = stop

    def between(self, start: int, stop: int) -> Sequence[Cell]:
        """The cells that have bytes in ``[start, stop)``."""
        return self.cells[bisect.bisect_right(self._borders, start) : bisect.bisect_left(self._borders, stop) + 1]


def layouts(manifest: Manifest) -> list[Layout]:
    """The layout of every file, in the manifest's order."""
    items: list[list[ItemRecord]] = [[] for _ in manifest.files]
    for item in manifest.items:
        items[item.file].append(item)
    out = []
    for record, found in zip(manifest.files, items, strict=True):
        found.sort(key=lambda i: (i.offset, i.offset + i.length))
        # Tied weights have one place under several names: its bytes are looked at once.
        distinct = {(i.offset, i.length): i for i in reversed(found)}
        out.append(Layout(record, list(_cells(record.size, [*reversed(distinct.values())])), found))
    return out


def _cells(size: int, items: Sequence[ItemRecord]) -> list[Cell]:
    out: list[Cell] = []
    at = 0
    for item in items:
        if item.offset > at:
            out.append(Cell(at, item.offset, None, None))
        out += [cell for cell in _cells_of(item) if cell.stop > cell.start]
        at = item.offset + item.length
    if at < size:
        out.append(Cell(at, size, None, None))
    return out


def _cells_of(item: ItemRecord) -> list[Cell]:
    if not item.blocks:
        return [Cell(item.offset, item.offset + item.length, item.crc32, item)]
    first, block = item.offset + item.payload_offset, item.block
    last = first + item.payload_length
    starts = range(first, first + block * len(item.blocks), block)
    blocks = [Cell(at, at + block, crc, item) for at, crc in zip(starts, item.blocks, strict=True)]
    blocks[-1] = Cell(starts[-1], last, item.blocks[-1], item)  # which may be shorter
    return [Cell(item.offset, first, None, item), *blocks, Cell(last, item.offset + item.length, None, item)]


class _Span(msgspec.Struct):
    """A run of bytes that is checksummed at once: whole cells of one item that have sums, or one share of a cell.

    Attributes:
        start: its first byte.
        stop: one past its last.
        item: whose bytes they are; None between items.
        cells: CRC-32 and bytes of each whole cell, as committed; empty for a share that has no sum of its own.
        crc32: of what is there.
    """

    start: int
    stop: int
    item: ItemRecord | None
    cells: list[tuple[int, int]]
    crc32: int = 0


class _Look(msgspec.Struct):
    """What one part turned out to be.

    Attributes:
        spans: in order.
        pieces: CRC-32 and bytes of each cell's share.
        crc32: of the part.
        right: whether every cell that lies in it whole is as committed.
        cuts: whether a cell with a sum of its own lies in it in part only.
    """

    spans: list[_Span]
    pieces: list[tuple[int, int]]
    crc32: int
    right: bool
    cuts: bool


class FileSums:
    """Gathers the CRC-32s of a file's parts, in any order, and says what is damaged when all are there.

    Args:
        layout: the file.
        known: False where the layout has cells, but no sums of them yet: then nothing is compared. Default True.
    """

    def __init__(self, layout: Layout, *, known: bool = True) -> None:
        self.layout = layout
        self._known = known
        self._looks: dict[int, _Look] = {}  # by the part's start

    def look(self, part: Part, data: memoryview) -> bool:
        """Checksums a part; whether every cell that lies in it whole is as committed. A later look replaces this."""
        spans, cuts = self._spans(part)
        pieces: list[tuple[int, int]] = []
        right = True
        for span in spans:
            run = data[span.start - part.start : span.stop - part.start]
            span.crc32 = crc32(run)
            if not span.cells:
                pieces.append((span.crc32, span.stop - span.start))
            elif span.crc32 == combine_all(span.cells):  # one sum for all of them: a call for each would cost as much
                pieces += span.cells
            else:
                right, at = False, 0
                for _, size in span.cells:
                    pieces.append((crc32(run[at : at + size]), size))
                    at += size
        whole = combine_all([(span.crc32, span.stop - span.start) for span in spans])
        self._looks[part.start] = _Look(spans, pieces, whole, right, cuts)
        return right

    def _spans(self, part: Part) -> tuple[list[_Span], bool]:
        spans: list[_Span] = []
        cuts = False
        run: list[tuple[int, int]] | None = None  # the cells of the last span, where more of its item may follow
        for cell in self.layout.between(part.start, part.stop):
            crc = cell.crc32 if self._known else None
            if crc is None or cell.start < part.start or cell.stop > part.stop:
                cuts = cuts or crc is not None
                spans.append(_Span(max(cell.start, part.start), min(cell.stop, part.stop), cell.item, []))
                run = None
            elif run is not None and spans[-1].item is cell.item:
                run.append((crc, cell.stop - cell.start))
                spans[-1].stop = cell.stop
            else:
                run = [(crc, cell.stop - cell.start)]
                spans.append(_Span(cell.start, cell.stop, cell.item, run))
        return spans, cuts

    def crc32_of(self, part: Part) -> int:
        """The CRC-32 of a part that was looked at."""
        return self._looks[part.start].crc32

    def _in_order(self) -> list[_Look]:
        return [self._looks[start] for start in sorted(self._looks)]

    @property
    def crc32(self) -> int:
        """The CRC-32 of the whole file, all of whose parts were looked at."""
        return combine_all([(look.crc32, look.spans[-1].stop - look.spans[0].start) for look in self._in_order()])

    def of_cells(self) -> list[tuple[int, int]]:
        """CRC-32 and bytes of every cell of the layout, in order; all parts were looked at."""
        pieces = iter([piece for look in self._in_order() for piece in look.pieces])
        sums = []
        for cell in self.layout.cells:
            shares, missing = [], cell.stop - cell.start
            while missing:
                piece = next(pieces)
                shares.append(piece)
                missing -= piece[1]
            sums.append((combine_all(shares), cell.stop - cell.start))
        return sums

    def damages(self) -> list[Damage]:
        """All that is not as committed."""
        if self._is_sound():
            return []
        out: list[Damage] = []
        sums = self.of_cells()
        # Where a cell is known to be damaged its committed sum stands in for it, so that one damage hides no other.
        whole: list[tuple[int, int]] = []
        place = 0
        while place < len(sums):
            item = self.layout.cells[place].item
            if item is None:
                whole.append(sums[place])
                place += 1
                continue
            as_committed: list[tuple[int, int]] = []
            while place < len(sums) and self.layout.cells[place].item is item:
                cell, (crc, size) = self.layout.cells[place], sums[place]
                if cell.crc32 is not None and crc != cell.crc32:
                    what = "block" if item.blocks else "item"
                    out.append(Damage(what, cell.start, cell.stop, item.key, cell.crc32, crc))
                as_committed.append((crc if cell.crc32 is None else cell.crc32, size))
                place += 1
            found = combine_all(as_committed)
            if item.crc32 is not None and found != item.crc32:
                out.append(Damage("frame", item.offset, item.offset + item.length, item.key, item.crc32, found))
            whole.append((found if item.crc32 is None else item.crc32, item.length))
        record = self.layout.record
        if record.crc32 is not None and (found := combine_all(whole)) != record.crc32:
            out.append(Damage("file", 0, record.size, None, record.crc32, found))
        return out

    def _is_sound(self) -> bool:
        """Whether nothing is wrong, from the sums of whole runs: what a file comes to that is as it should be."""
        looks = self._in_order()
        if any(look.cuts or not look.right for look in looks):
            return False
        spans = (span for look in looks for span in look.spans)
        for _, of_one in itertools.groupby(spans, key=lambda span: id(span.item)):
            row = list(of_one)
            item = row[0].item
            found = combine_all([(span.crc32, span.stop - span.start) for span in row])
            if item is not None and item.crc32 is not None and found != item.crc32:
                return False
        record = self.layout.record
        return record.crc32 is None or self.crc32 == record.crc32


def read_part(store: Store, sums: FileSums, part: Part, data: memoryview) -> None:
    """Reads a part and checksums it; where it is not as committed, once more: it may be the way that altered it.

    Args:
        store: the folder.
        sums: of the file; gets those of the part.
        part: which bytes.
        data: where they go; of the part's size.

    Raises:
        ObjectNotFoundError, ObjectTooShortError: as the store does.
    """
    name = sums.layout.record.name
    store.read_into(name, part.start, [data])
    if not sums.look(part, data):
        store.read_into(name, part.start, [data])
        sums.look(part, data)
