"""Reading once and sharing: the load pipeline of a rank whose bytes come in part from other ranks.

Every byte that this rank wants is in one *segment*, which it reads itself or receives. A segment that has come is
checked by whoever read it, put into all targets that want some of it, and sent to the other ranks that do. Segments
come in any order. Receiving waits for nothing but the memory of other segments that are being received, which comes
back as soon as they have been put in place; so every send comes to its end, so every read gives its memory back, and
no two ranks can wait for each other. Items that are of no use before they are whole are held back by those who read
them, in one order on all ranks (docs/design/006).
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dcp_storage.budget import Budget
from dcp_storage.errors import CheckpointError, portable
from dcp_storage.exchange_links import Links
from dcp_storage.exchange_memory import Spare, Window
from dcp_storage.exchange_plan import Segment
from dcp_storage.exchange_rounds import Meeting
from dcp_storage.exchange_wants import Item, item_of, spread
from dcp_storage.fetching import fetch
from dcp_storage.load import Counters, Wanted
from dcp_storage.placing import Check, check_blocks
from dcp_storage.plan import Coalescer, Extent, Request
from dcp_storage.records import ItemRecord
from dcp_storage.store import Store

__all__ = ["Limits", "Sharing"]

_SPARE = 32 << 20  # bytes of memory that are kept to be used again


@dataclass(frozen=True)
class Limits:
    """How much of a rank's means an exchange may use.

    Attributes:
        budget: bytes that are held at once: up to half of them for items that are held until they are whole, of the
            rest one half for segments that are read, the other for those that are received.
        part_size: bytes of one ranged read, at most.
        max_gap: bytes thrown away to save a request, at most.
        max_concurrency: requests at once.
    """

    budget: int
    part_size: int
    max_gap: int
    max_concurrency: int


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
        self._finished: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._spare = Spare(min(limits.budget // 8, _SPARE))
        self._links: Links | None = None
        self._items = [item_of(each) for each in wanted]
        self._left = len(self._items)
        counters.bytes_needed += sum(item.needed for item in self._items)
        # Whoever reads it cannot check it either.
        counters.unchecked(sum(i.needed for i in self._items if i.box is not None and not i.wanted.item.blocks))
        self._portions, held = spread(self._items, segments, files, max_gap=limits.max_gap, path=store.url)
        room = min(sum(item.size for item in held), limits.budget // 2)
        self._window = Window(held, room)
        self._limits_of: dict[int, int] = {}  # what the other ranks allow; nothing before they have said so
        self._reading = Budget(max((limits.budget - room) // 2, 1))
        self._receiving = Budget(max((limits.budget - room) // 2, 1))
        for item in self._items:
            if not item.left:  # now: once others may send, an item without bytes left can be one that has just come
                self._finished.put(item)

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
        links.tell(self._window.limit)
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

    # -- on the hook's thread --

    def _work(self, pool: ThreadPoolExecutor, links: Links) -> None:
        futures: list[Future[None]] = []
        slots = threading.BoundedSemaphore(2 * self._limits.max_concurrency)
        for request in self._requests(links):
            size = request.stop - request.start
            while not self._failed.is_set() and not self._reading.try_acquire(size):
                self._deliver(links)
                self._reading.wait(size, lambda: self._failed.is_set() or not self._finished.empty())
            slots.acquire()
            if self._failed.is_set():
                break
            future = pool.submit(self._read, request, links)
            future.add_done_callback(lambda _: slots.release())
            futures.append(future)
            self._deliver(links)
        while self._left and not self._failed.is_set():
            self._deliver(links, wait=True)
        for future in futures:
            future.exception()
        for future in futures:
            future.result()

    def _requests(self, links: Links) -> Iterator[Request[Segment]]:
        """What is to be read, in order, each as soon as this rank and all who get some of it can take it."""
        most = max(min(self._limits.part_size, self._limits.budget // 4), 1)
        joiner: Coalescer[Segment] = Coalescer(self._limits.max_gap, most)
        mine = sorted((s for s in self._segments.values() if s.owner == self._rank), key=lambda s: s.number)
        for segment in mine:
            if not self._may_come(segment):
                done = joiner.flush()  # somebody may be waiting for what is not on its way yet
                if done is not None:
                    yield done
                while not self._may_come(segment):
                    if self._failed.is_set():
                        return
                    self._deliver(links, wait=True)
            done = joiner.add(Extent(self._files[segment.file], segment.start, segment.stop, segment))
            if done is not None:
                yield done
        last = joiner.flush()
        if last is not None:
            yield last

    def _may_come(self, segment: Segment) -> bool:
        limits = [self._window.limit, *(self._limits_of.get(peer, 0) for peer in segment.takers)]
        return segment.number < min(limits)

    def _deliver(self, links: Links, *, wait: bool = False) -> None:
        """Tells the planner of every item that is complete; with ``wait`` there is one, or something else is new."""
        while True:
            try:
                item = self._finished.get(block=wait)
            except queue.Empty:
                return
            if item is None:  # something failed, or another rank takes more
                return
            wait = False
            self._left -= 1
            result: torch.Tensor | memoryview = memoryview(item.whole) if item.box is None else item.box.target
            item.wanted.done(result)
            item.whole = bytearray()
            if item.box is None and self._window.free(item.wanted.item.payload_length):
                links.tell(self._window.limit)

    # -- on the pool --

    def _read(self, request: Request[Segment], links: Links) -> None:
        try:
            if self._failed.is_set():
                return
            read = _Read(request, len(request.extents), self._spare.take(request.stop - request.start))
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
            if failed is error:
                raise
            raise failed from error

    def _let_go(self, read: _Read) -> None:
        with self._lock:
            read.held_by -= 1
            last = not read.held_by
        if last:
            self._spare.keep(read.memory)
            self._reading.release(read.request.stop - read.request.start)

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
        return memoryview(self._spare.take(size))

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
                self._spare.keep(run.obj)
            self._receiving.release(run.nbytes)

    def allowed(self, peer: int, limit: int) -> None:
        """Another rank takes segments with lower numbers than this."""
        self._limits_of[peer] = limit
        self._finished.put(None)

    def _put(self, segment: Segment, run: memoryview) -> None:
        for portion in self._portions[segment.number]:
            item, record = portion.item, portion.item.wanted.item
            part = run[portion.start - segment.start : portion.stop - segment.start]
            at = portion.start - record.offset - record.payload_offset
            if item.box is not None:
                try:
                    item.box.place(at, part)
                except CheckpointError:
                    raise
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
