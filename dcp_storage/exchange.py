"""Reading once and sharing: the load pipeline of a rank whose bytes come in part from other ranks.

Every byte that this rank wants is in one *segment*, which it reads itself or receives. A segment that has come is
checked by whoever read it, put into all targets that want some of it, and sent to the other ranks that do. Segments
come in any order. Receiving waits for nothing but the memory of other segments that are being received, which comes
back as soon as they have been put in place; so every send comes to its end, so every read gives its memory back, and
no two ranks can wait for each other (docs/design/006).
"""

from __future__ import annotations

import bisect
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dcp_storage.budget import Budget
from dcp_storage.errors import CheckpointError, portable
from dcp_storage.exchange_links import Links
from dcp_storage.exchange_plan import Segment
from dcp_storage.exchange_rounds import Meeting
from dcp_storage.fetching import fetch
from dcp_storage.load import Counters, Wanted
from dcp_storage.placing import Check, check_blocks, dtype_of, product
from dcp_storage.plan import Coalescer, Extent, Request
from dcp_storage.records import ItemRecord
from dcp_storage.scattering import Box, extents
from dcp_storage.store import Store

__all__ = ["Limits", "Sharing"]

_SPARE = 32 << 20  # bytes of memory that are kept to be used again


@dataclass(frozen=True)
class Limits:
    """How much of a rank's means an exchange may use.

    Attributes:
        budget: bytes of segments that are held at once, half of them for those that are received.
        part_size: bytes of one ranged read, at most.
        max_gap: bytes thrown away to save a request, at most.
        max_concurrency: requests at once.
    """

    budget: int
    part_size: int
    max_gap: int
    max_concurrency: int


@dataclass
class _Item:
    """A wanted item while its bytes come in."""

    wanted: Wanted
    box: Box | None
    left: int = 0
    whole: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class _Portion:
    """What one item wants of one segment: its bytes from ``start`` to ``stop`` in the file."""

    item: _Item
    start: int
    stop: int


@dataclass
class _Read:
    """The memory of one read, given back when the last of those who need it lets go."""

    request: Request[Segment]
    held_by: int
    memory: bytearray


class Sharing:
    """One rank's part in a shared load. Making one asks the planner for every target, and reads nothing yet.

    Args:
        store: the folder.
        wanted: the items that this rank wants.
        segments: the segments that it reads or receives.
        files: names, by the segments' ``file``.
        rank: this rank in the group.
        counters: counts what is needed, read and received.
        limits: see :class:`Limits`.
        check: compares bytes with the manifest's sums.
        received: told the bytes of each segment that has come, on any thread.

    Raises:
        CheckpointError: the segments do not hold what is wanted; or whatever the planner raises.
    """

    def __init__(
        self,
        store: Store,
        wanted: Sequence[Wanted],
        segments: Sequence[Segment],
        files: Sequence[str],
        *,
        rank: int,
        counters: Counters,
        limits: Limits,
        check: Check = check_blocks,
        received: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._store = store
        self._segments = {segment.number: segment for segment in segments}
        self._files = files
        self._rank = rank
        self._counters = counters
        self._limits = limits
        self._check = check
        self._received = received
        self._lock = threading.Lock()
        self._finished: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._reading = Budget(max(limits.budget // 2, 1))
        self._receiving = Budget(max(limits.budget // 2, 1))
        self._spare: dict[int, list[bytearray]] = {}  # used again: fresh pages cost more than the copy into them
        self._spared = 0
        self._links: Links | None = None
        self._items = [self._item(each) for each in wanted]
        self._portions: dict[int, list[_Portion]] = {number: [] for number in self._segments}
        self._spread()

    def run(self, meeting: Meeting) -> None:
        """Reads, receives and sends; returns when all ranks that this one exchanges with are done, too.

        Raises:
            CheckpointError: of kind ``"peer"``: another rank failed, which is named.
            CorruptCheckpointError: bytes that this rank read are missing, short or altered.
            StoreError: the store failed this rank.
        """
        peers = {p for s in self._segments.values() for p in (s.takers if s.owner == meeting.rank else (s.owner,))}
        # Every rank has a line to rank 0, so that a failure comes round also where nothing is shared.
        peers |= set(range(meeting.size)) if meeting.rank == 0 else {0}
        self._links = links = Links(meeting, sorted(peers - {meeting.rank}), self, self._stop)
        links.start()
        with ThreadPoolExecutor(self._limits.max_concurrency, thread_name_prefix="dcp_storage-load") as pool:
            try:
                self._work(pool, links)
            except Exception as error:  # noqa: BLE001 - raised below, after the others have been told
                links.fail(portable(error, "read_data", path=self._store.url))
            except BaseException:
                links.fail(CheckpointError("The load was interrupted.", path=self._store.url, kind="hook"))
                raise
            finally:
                pool.shutdown()
                links.finish()
        failure = links.failure
        if failure is not None:
            if failure.error is not None:
                raise failure.error
            raise CheckpointError(
                f"{self._store.url}: rank {failure.rank} {failure.text} (while the ranks shared their reads).",
                path=self._store.url,
                key=failure.key,
                kind="peer",
            )

    # -- before --

    def _item(self, wanted: Wanted) -> _Item:
        record = wanted.item
        if wanted.target is None or wanted.offsets is None or wanted.lengths is None or record.shape is None:
            self._counters.bytes_needed += record.payload_length
            return _Item(wanted, None)
        self._counters.bytes_needed += product(wanted.lengths) * dtype_of(record).itemsize
        return _Item(wanted, Box(record, wanted.target(), wanted.offsets, wanted.lengths))

    def _spread(self) -> None:
        """Notes for each segment who wants what of it."""
        names = {name: number for number, name in enumerate(self._files)}
        rows: dict[int, list[Segment]] = {}
        for segment in sorted(self._segments.values(), key=lambda s: (s.file, s.start)):
            rows.setdefault(segment.file, []).append(segment)
        starts = {file: [segment.start for segment in row] for file, row in rows.items()}
        for item in self._items:
            offsets = None if item.box is None else item.wanted.offsets
            file = names[item.wanted.file]
            for start, stop in extents(item.wanted.item, offsets, item.wanted.lengths, self._limits.max_gap):
                item.left += stop - start
                at = start
                row = rows.get(file, [])
                for segment in row[max(bisect.bisect_right(starts.get(file, []), start) - 1, 0) :]:
                    if segment.start > at or at >= stop:
                        break
                    if segment.stop > at:
                        portion = _Portion(item, at, min(stop, segment.stop))
                        self._portions[segment.number].append(portion)
                        at = portion.stop
                if at < stop:
                    raise CheckpointError(
                        f"{self._store.url}: the shared plan gives this rank no bytes from {at} on of "
                        f"{item.wanted.file}, which its own plan wants: a planner changed it after it was shared.",
                        path=self._store.url,
                        key=item.wanted.item.key,
                        kind="planner",
                    )

    # -- on the hook's thread --

    def _work(self, pool: ThreadPoolExecutor, links: Links) -> None:
        left = len(self._items)
        for item in self._items:
            if not item.left:
                self._finished.put(item)
        futures: list[Future[None]] = []
        slots = threading.BoundedSemaphore(2 * self._limits.max_concurrency)
        for request in self._requests():
            size = request.stop - request.start
            while not self._failed.is_set() and not self._reading.try_acquire(size):
                left -= self._deliver()
                self._reading.wait(size, lambda: self._failed.is_set() or not self._finished.empty())
            slots.acquire()
            if self._failed.is_set():
                break
            future = pool.submit(self._read, request, links)
            future.add_done_callback(lambda _: slots.release())
            futures.append(future)
            left -= self._deliver()
        while left and not self._failed.is_set():
            left -= self._deliver(wait=True)
        for future in futures:
            future.exception()
        for future in futures:
            future.result()

    def _requests(self) -> Iterator[Request[Segment]]:
        most = max(min(self._limits.part_size, self._limits.budget // 4), 1)
        joiner: Coalescer[Segment] = Coalescer(self._limits.max_gap, most)
        mine = sorted((s for s in self._segments.values() if s.owner == self._rank), key=lambda s: s.number)
        for segment in mine:
            done = joiner.add(Extent(self._files[segment.file], segment.start, segment.stop, segment))
            if done is not None:
                yield done
        last = joiner.flush()
        if last is not None:
            yield last

    def _deliver(self, *, wait: bool = False) -> int:
        """Tells the planner of every item that is complete; how many there were."""
        count = 0
        while True:
            try:
                item = self._finished.get(block=wait and not count)
            except queue.Empty:
                return count
            if item is None:  # something failed
                return count
            result: torch.Tensor | memoryview = memoryview(item.whole) if item.box is None else item.box.target
            item.wanted.done(result)
            item.whole = bytearray()
            count += 1

    # -- on the pool --

    def _read(self, request: Request[Segment], links: Links) -> None:
        try:
            if self._failed.is_set():
                return
            read = _Read(request, len(request.extents), self._memory(request.stop - request.start))
            memory = memoryview(read.memory)
            self._fetch(request.file, request.start, memory, request.extents[0].owner)
            for extent in request.extents:
                segment = extent.owner
                run = memory[extent.start - request.start : extent.stop - request.start]
                self._verify(segment, run)
                with self._lock:
                    read.held_by += len(segment.takers)
                for peer in segment.takers:
                    links.send(peer, segment.number, run, functools.partial(self._let_go, read))
                self._put(segment, run)
                self._let_go(read)
        except Exception as error:
            failed = portable(error, "read_data", path=self._store.url)
            links.fail(failed)
            raise failed from error

    def _let_go(self, read: _Read) -> None:
        with self._lock:
            read.held_by -= 1
            last = not read.held_by
        if last:
            self._keep(read.memory)
            self._reading.release(read.request.stop - read.request.start)

    def _memory(self, size: int) -> bytearray:
        with self._lock:
            row = self._spare.get(size)
            if row:
                self._spared -= size
                return row.pop()
        return bytearray(size)

    def _keep(self, memory: bytearray) -> None:
        with self._lock:
            if self._spared + len(memory) <= min(self._limits.budget // 8, _SPARE):
                self._spared += len(memory)
                self._spare.setdefault(len(memory), []).append(memory)

    def _fetch(self, file: str, offset: int, memory: memoryview, segment: Segment) -> None:
        portions = self._portions[segment.number]
        fetch(self._store, file, offset, [memory], portions[0].item.wanted.item.key if portions else None)
        self._counters.read(memory.nbytes)
        self._received(memory.nbytes)

    def _verify(self, segment: Segment, run: memoryview) -> None:
        """Compares every block that anybody wants with its sum, each once."""
        seen: dict[int, int] = {}
        for portion in sorted(self._portions[segment.number], key=lambda p: p.start):
            record = portion.item.wanted.item
            start = max(portion.start, seen.get(id(record), 0))
            if start < portion.stop:
                seen[id(record)] = portion.stop
                self._verify_blocks(segment, record, start, run[start - segment.start : portion.stop - segment.start])

    def _verify_blocks(self, segment: Segment, record: ItemRecord, start: int, run: memoryview) -> None:
        file = self._files[segment.file]
        at = start - record.offset - record.payload_offset
        if not record.blocks and record.dtype is not None:
            self._counters.unchecked(run.nbytes)
        if self._check(file, record, at, [run]) is None:
            return
        # Once more, alone: only what is altered on the store is corrupt, not what was altered on the way.
        self._fetch(file, start, run, segment)
        error = self._check(file, record, at, [run])
        if error is not None:
            error.path = self._store.url
            raise error

    # -- where segments come in: on the pool, or on a line's thread --

    def room(self, number: int, size: int) -> memoryview:
        """Memory for a segment that another rank sends."""
        while not self._receiving.try_acquire(size):
            self._receiving.wait(size, lambda: False)
        return memoryview(self._memory(size))

    def arrived(self, number: int, run: memoryview) -> None:
        """A segment from another rank is in its memory."""
        try:
            segment = self._segments.get(number)
            if self._failed.is_set():
                return
            if segment is None or segment.stop - segment.start != run.nbytes:
                raise CheckpointError(
                    f"{self._store.url}: another rank sent bytes that were not to come.", kind="protocol"
                )
            self._counters.received(run.nbytes)
            self._received(run.nbytes)
            self._put(segment, run)
        except Exception as error:  # noqa: BLE001 - told to all ranks, and raised by run
            if self._links is not None:
                self._links.fail(portable(error, "read_data", path=self._store.url))
        finally:
            if isinstance(run.obj, bytearray):
                self._keep(run.obj)
            self._receiving.release(run.nbytes)

    def _put(self, segment: Segment, run: memoryview) -> None:
        for portion in self._portions[segment.number]:
            item, record = portion.item, portion.item.wanted.item
            part = run[portion.start - segment.start : portion.stop - segment.start]
            at = portion.start - record.offset - record.payload_offset
            if item.box is not None:
                try:
                    item.box.place(at, part)
                except Exception as error:
                    raise portable(error, "Filling the tensor", path=self._store.url, key=record.key) from error
            with self._lock:
                if item.box is None:
                    if not item.whole:
                        item.whole = bytearray(record.payload_length)
                    item.whole[at : at + part.nbytes] = part
                item.left -= part.nbytes
                done = not item.left
            if done:
                self._finished.put(item)
                self._reading.wake()

    def _stop(self) -> None:
        self._failed.set()
        self._finished.put(None)
        self._reading.wake()
