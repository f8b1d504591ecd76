"""The save pipeline of one rank: items in, files on the store out.

The hook's thread asks the planner for one item after the other and serialises it; everything behind it (checksums,
copies, requests) runs on a pool of threads, many parts in flight, bounded by a budget of bytes. The first error stops
everything: parts under way are awaited, then every upload is aborted and every finished file of this rank removed
(invariant I4).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from dcp_storage.budget import Budget
from dcp_storage.checksums import PartSums, cells_of, known_of, piece_sums, sums_of_items
from dcp_storage.codec import Encoded
from dcp_storage.crc import combine_all
from dcp_storage.errors import StoreError
from dcp_storage.plan import part_size_for
from dcp_storage.records import FileRecord, ItemRecord, WrittenItem
from dcp_storage.store import Store, Upload, total

__all__ = ["Source", "clean_up", "run"]


@dataclass(frozen=True)
class Source:
    """One item to be written.

    Attributes:
        key: state-dict key.
        offsets: the chunk's place; None for an object.
        index: torch's index hint.
        encode: makes the item's bytes; called once, on the hook's thread.
    """

    key: str
    offsets: tuple[int, ...] | None
    index: int | None
    encode: Callable[[], Encoded]


@dataclass
class _File:
    """One file while it is being written."""

    name: str
    upload: Upload | None = None
    sources: list[Source] = field(default_factory=list)
    items: list[Encoded] = field(default_factory=list)
    parts: list[PartSums] = field(default_factory=list)
    size: int = 0
    open_parts: int = 1  # one for the hook's thread, while it still adds parts


class _Lane:
    """Runs tasks in order, one at a time, on the pool: for stores that take the parts of an upload only so."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._running = False

    def submit(self, task: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((task, future))
            if self._running:
                return future
            self._running = True
        self._pool.submit(self._drain)
        return future

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                task, future = self._waiting.popleft()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - handed over whole to who waits for the future
                future.set_exception(error)
            else:
                future.set_result(None)


class _Pipeline:
    """The state of one rank's save."""

    def __init__(
        self, store: Store, pool: ThreadPoolExecutor, budget: Budget, part_size: int, sent: Callable[[int], None]
    ) -> None:
        self.sent = sent
        self.store = store
        self.pool = pool
        self.budget = budget
        self.part_size = max(part_size, store.min_part_size)
        self.files: list[_File] = []
        self.futures: list[Future[None]] = []
        self.failed = threading.Event()
        self._first: BaseException | None = None  # by time, not by place in the plan
        self._lock = threading.Lock()

    def write_file(self, name: str, sources: Sequence[Source]) -> None:
        """Serialises a file's items on this thread and hands its parts to the pool."""
        file = _File(name)
        self.files.append(file)
        lane = None if self.store.parallel_parts else _Lane(self.pool)
        cutter = _Cutter(lambda number: part_size_for(number, self.part_size, self.store.max_parts))
        for source in sources:
            if self.failed.is_set():
                return
            encoded = source.encode()
            file.sources.append(source)
            for part in cutter.add(encoded):
                self._send(file, lane, part, last=False)
            # From here on only its lengths are needed; what a part still holds is kept alive by the part.
            encoded.buffers = []
            file.items.append(encoded)
        self._send(file, lane, cutter.rest(), last=True)
        if self._part_ended(file):
            self.futures.append(self.pool.submit(self._complete, file))

    def _part_ended(self, file: _File) -> bool:
        """Notes it; whether all parts have been sent and the upload is to be completed."""
        with self._lock:
            file.open_parts -= 1
            return not file.open_parts and file.upload is not None

    def _complete(self, file: _File) -> None:
        """Ends the upload as soon as it can be: an open one holds a file descriptor, or a place at the server."""
        if self.failed.is_set() or file.upload is None:
            return
        try:
            file.upload.complete()
        except BaseException as error:
            self._fail(error)
            raise

    def _send(self, file: _File, lane: _Lane | None, part: _Part, *, last: bool) -> None:
        number = len(file.parts) + 1
        sums = PartSums()
        file.parts.append(sums)
        offset, size = file.size, total(part.buffers)
        file.size += size
        whole = last and number == 1
        if not whole and file.upload is None:
            file.upload = self.store.upload(file.name)
        if last and number > 1 and not size:
            file.parts.pop()
            return
        self.budget.acquire(size)
        with self._lock:
            file.open_parts += 1

        def task() -> None:
            try:
                if self.failed.is_set():
                    return
                found = piece_sums(part.buffers, part.lengths, part.known)
                sums.pieces, sums.crc32 = found.pieces, found.crc32
                if whole and not self.store.remote:
                    # Through an upload, which writes it in place: a put would rename it. It is opened only now, as
                    # there may be thousands of small files.
                    file.upload = self.store.upload(file.name)
                if file.upload is None:
                    self.store.put(file.name, part.buffers, crc32=sums.crc32)
                elif size:
                    file.upload.write_part(number, offset, part.buffers, crc32=sums.crc32)
                self.sent(size)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                part.buffers = []
                self.budget.release(size)
            if self._part_ended(file):
                self._complete(file)

        self.futures.append(lane.submit(task) if lane else self.pool.submit(task))

    def finish(self) -> None:
        """Waits until all parts are sent and all uploads completed; raises the first error, after all have ended."""
        self._await()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._first = self._first or error
        self.failed.set()

    def _await(self) -> None:
        errors = [future.exception() for future in self.futures]
        self.futures = []
        for error in (self._first, *errors):
            if error is not None:
                raise error

    def abandon(self) -> None:
        """Waits for what is under way, aborts every upload and removes every finished file of this rank."""
        self.failed.set()
        for future in self.futures:
            future.exception()
        clean_up(self.store, [(file.name, file.upload) for file in self.files])

    def results(self, rank: int) -> list[WrittenItem]:
        """What the coordinator must know, in the order of the items."""
        out = []
        for file in self.files:
            crc = combine_all([(part.crc32, sum(n for _, n in part.pieces)) for part in file.parts])
            shard: FileRecord | None = FileRecord(file.name, file.size, crc, rank)
            offset = 0
            sums = sums_of_items(file.items, file.parts)
            for source, item, found in zip(file.sources, file.items, sums, strict=True):
                record = ItemRecord(
                    key=source.key,
                    offsets=source.offsets,
                    index=source.index,
                    file=0,
                    offset=offset,
                    length=item.length,
                    crc32=found.crc32,
                    payload_offset=item.payload_offset,
                    payload_length=item.payload_length,
                    payload_crc32=found.payload_crc32,
                    block=found.block,
                    blocks=found.blocks,
                    dtype=item.dtype,
                    shape=item.shape,
                    stride=item.stride,
                )
                out.append(WrittenItem(file.name, record, shard))
                shard = None
                offset += item.length
        return out


@dataclass
class _Part:
    """A part's buffers, the lengths of its pieces (cells, cut at the part's borders), and their sums where known."""

    buffers: list[memoryview] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    known: list[int | None] = field(default_factory=list)


class _Cutter:
    """Cuts a row of items into parts, whose sizes may differ."""

    def __init__(self, size_of: Callable[[int], int]) -> None:
        self._size_of = size_of
        self._number = 1
        self._part = _Part()
        self._room = size_of(1)

    def add(self, item: Encoded) -> Iterable[_Part]:
        """Takes an item; gives every part that is full now."""
        cells = zip(cells_of(item), known_of(item), strict=True)
        whole, known = next(cells)
        cell = whole
        for buffer in item.buffers:
            rest = buffer
            while rest.nbytes:
                if not self._room:
                    yield self.rest()
                taken = rest[: self._room]
                rest = rest[taken.nbytes :]
                self._room -= taken.nbytes
                self._part.buffers.append(taken)
                left = taken.nbytes
                while left:
                    if not cell:
                        whole, known = next(cells)
                        cell = whole
                        continue
                    step = min(cell, left)
                    self._part.lengths.append(step)
                    self._part.known.append(known if step == whole else None)
                    cell -= step
                    left -= step

    def rest(self) -> _Part:
        """The part as it is now; the next one begins."""
        part, self._part = self._part, _Part()
        self._number += 1
        self._room = self._size_of(self._number)
        return part


def clean_up(store: Store, files: Sequence[tuple[str, Upload | None]]) -> None:
    """Leaves nothing of a failed rank: every upload aborted, every file removed; raises after trying all."""
    # An upload whose beginning failed may have begun all the same: such names are looked for on the store.
    unknown = [name for name, upload in files if upload is None]
    todo: list[Callable[[], None]] = [upload.abort for _, upload in files if upload is not None]
    todo += [lambda: store.abort_uploads(unknown), lambda: store.delete([name for name, _ in files])]
    failures: list[StoreError] = []
    for action in todo:
        try:
            action()
        except StoreError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def run(
    store: Store,
    files: Sequence[tuple[str, Sequence[Source]]],
    *,
    rank: int,
    budget: Budget,
    part_size: int,
    max_concurrency: int,
    left_behind: list[str],
    sent: Callable[[int], None],
) -> list[WrittenItem]:
    """Writes all files of one rank.

    Args:
        store: the folder.
        files: names, each with its items; names of this attempt only.
        rank: recorded with each file.
        budget: bytes of parts in flight.
        part_size: bytes of a part.
        max_concurrency: threads.
        left_behind: filled with sentences on what could not be removed after a failure.
        sent: told the bytes of each part that has arrived, on any thread.

    Returns:
        What the coordinator must know of each item, in order.

    Raises:
        BaseException: the first thing that failed, in any thread or in ``encode``; nothing of this rank is left then,
            or ``left_behind`` says what could not be removed.
    """
    with ThreadPoolExecutor(max_concurrency, thread_name_prefix="dcp_storage-save") as pool:
        pipeline = _Pipeline(store, pool, budget, part_size, sent)
        try:
            for name, sources in files:
                pipeline.write_file(name, sources)
            pipeline.finish()
            return pipeline.results(rank)
        except BaseException:
            try:
                pipeline.abandon()
            except StoreError as error:
                left_behind.append(f"Not all that was written could be removed: {error}")
            raise
