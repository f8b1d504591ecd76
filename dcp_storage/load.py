"""The load pipeline of one rank: byte ranges of the store in, tensors and objects out.

The hook's thread walks the wanted items in the order of their files, asks the planner for each target, and turns each
into *jobs*: runs of payload bytes with a buffer to put them into. A job's buffer is the target's own memory where its
layout allows, else a staging buffer out of the budget. Jobs are read in ranges, joined where they lie close together,
many in flight; each block's CRC-32 is checked before its bytes count; a staged job is copied into its target when its
last range is there. The planner hears of an item, on the hook's thread, when all its jobs are done.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dcp_storage.budget import Budget
from dcp_storage.carrying import staging_for
from dcp_storage.codec import bytes_of, contiguous_stride
from dcp_storage.errors import CheckpointError, portable
from dcp_storage.fetching import fetch
from dcp_storage.placing import Check, Place, Taker, check_blocks, dtype_of, is_direct, narrowed, product, view_of
from dcp_storage.plan import Coalescer, Extent, Request, align, cut, strips
from dcp_storage.plan_slices import slices
from dcp_storage.records import ItemRecord
from dcp_storage.store import Store

__all__ = ["Counters", "Wanted", "run"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wanted:
    """One item, or a box of one, that the planner wants.

    Attributes:
        file: name of the file it is in.
        item: where it is.
        offsets: where the wanted box begins in the saved chunk; None for an object or for a whole item.
        lengths: the box's size, with ``offsets``.
        target: gives the tensor to fill, of the box's shape; called once, on the hook's thread. None for an object.
        done: called on the hook's thread with the filled target, or with the item's bytes where there is no target or
            the payload is no plain tensor.
    """

    file: str
    item: ItemRecord
    offsets: tuple[int, ...] | None
    lengths: tuple[int, ...] | None
    target: Callable[[], torch.Tensor] | None
    done: Callable[[torch.Tensor | memoryview], None]


@dataclass
class Counters:
    """What was read, counted where it happens."""

    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_unchecked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, count: int) -> None:
        """Counts bytes fetched from the store."""
        with self.lock:
            self.bytes_read += count

    def received(self, count: int) -> None:
        """Counts bytes that another rank sent."""
        with self.lock:
            self.bytes_received += count

    def unchecked(self, count: int) -> None:
        """Counts bytes of a tensor that no CRC-32 is known for."""
        with self.lock:
            self.bytes_unchecked += count


class _Item:
    """A wanted item while its jobs are under way."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.result: torch.Tensor | memoryview | None = None
        self.open_jobs = 1  # one for the hook's thread, while it still adds jobs


class _Job:
    """A block-aligned run of an item's payload, and the buffers that take it.

    Attributes:
        buffers: the run's bytes, in order.
        place: what is done when all are there, None where they are in place already.
        held: bytes of the budget that are given back then.
    """

    def __init__(self, item: _Item, buffers: list[memoryview], place: Callable[[], None] | None, held: int) -> None:
        self.item = item
        self.buffers = buffers
        self.place = place
        self.held = held
        self.open_extents = 0


@dataclass(frozen=True)
class _Piece:
    """One extent's share: its job, where it begins in the payload, and its buffers."""

    job: _Job
    start: int
    buffers: tuple[memoryview, ...]


class _StoppedError(Exception):
    """Something failed on the pool while the hook's thread was waiting for its turn."""


class _Pipeline:
    def __init__(
        self, store: Store, pool: ThreadPoolExecutor, budget: Budget, counters: Counters, part_size: int, max_gap: int,
        in_flight: int, check: Check,
        received: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.store = store
        self.pool = pool
        self.budget = budget
        self.counters = counters
        self.part_size = part_size
        self.check = check
        self.received = received
        self.max_gap = max_gap
        self.joiner: Coalescer[_Piece] = Coalescer(max_gap, part_size)
        self.slots = threading.BoundedSemaphore(in_flight)
        self.futures: list[Future[None]] = []
        self.finished: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.failed = threading.Event()
        self.open_items = 0
        self.held = 0

    # -- on the hook's thread --

    def add(self, wanted: Wanted) -> None:
        item = _Item(wanted)
        self.open_items += 1
        for job, start, stop in self._jobs(item):
            pieces = list(self._pieces(job, start, stop))
            with self.lock:
                item.open_jobs += 1
                job.open_extents = len(pieces)
            for extent in pieces:
                self._submit(self.joiner.add(extent))
        self._close_job(item)
        self.deliver()

    def _jobs(self, item: _Item) -> Iterator[tuple[_Job, int, int]]:
        """The item's jobs, each with its run of the payload."""
        wanted, record = item.wanted, item.wanted.item
        length = record.payload_length
        if wanted.target is None or wanted.offsets is None or wanted.lengths is None or record.shape is None:
            self.counters.bytes_needed += length
            item.result = staging = self._stage(length)
            if length:
                yield _Job(item, [staging], None, length), 0, length
            return
        target = wanted.target()
        item.result = target
        dtype = dtype_of(record)
        size = dtype.itemsize
        stride = record.stride or contiguous_stride(record.shape)
        direct = is_direct(target, dtype)
        block = record.block if record.blocks else 1
        # Never less than a block: each strip widens to whole blocks, and would read the same ones again.
        limit = max(self.part_size, self.budget.total // 4, block)
        for strip in slices(stride, size, wanted.offsets, wanted.lengths, block=block, gap=self.max_gap):
            start, stop = align(strip.start, strip.stop, block, length)
            needed = size * product(strip.lengths)
            self.counters.bytes_needed += needed
            if not record.blocks:
                self.counters.unchecked(needed)
            if direct and strip.run and record.stride is None:
                box = bytes_of(narrowed(target, strip.at, strip.lengths))
                head, tail = strip.start - start, stop - strip.stop
                buffers = [memoryview(bytearray(head)), box, memoryview(bytearray(tail))]
                yield _Job(item, [b for b in buffers if b.nbytes], None, 0), start, stop
                continue
            for part in strips(stride, size, _shifted(wanted.offsets, strip.at), strip.lengths, limit):
                start, stop = align(part.start, part.stop, block, length)
                staging = self._stage(stop - start, target.device)
                at = _shifted(strip.at, part.at)
                view = functools.partial(view_of, staging, part.start - start, dtype, part.lengths, stride)
                place = Place(target, at, part.lengths, view, record.key)
                yield _Job(item, [staging], place, stop - start), start, stop

    def _stage(self, size: int, device: torch.device = CPU) -> memoryview:
        while not self.budget.try_acquire(size):
            self._submit(self.joiner.flush())  # what is not on its way yet could never give its bytes back
            self.deliver()  # nor could what waits for the planner
            if self.failed.is_set():
                raise _StoppedError
            self.budget.wait(size, lambda: self.failed.is_set() or not self.finished.empty())
        with self.lock:
            self.held += size
        return staging_for(device, size)

    def _unstage(self, size: int) -> None:
        with self.lock:
            self.held -= size
        self.budget.release(size)

    def _pieces(self, job: _Job, start: int, stop: int) -> Iterator[Extent[_Piece]]:
        record = job.item.wanted.item
        base = record.offset + record.payload_offset
        taker = Taker(job.buffers)
        block = record.block if record.blocks else 1
        for first, last in cut(start, stop, block, self.part_size):
            piece = _Piece(job, first, tuple(taker.take(last - first)))
            yield Extent(job.item.wanted.file, base + first, base + last, piece)

    def _submit(self, request: Request[_Piece] | None) -> None:
        if request is None:
            return
        self.slots.acquire()
        if self.failed.is_set():
            self.slots.release()
            return
        self.futures.append(self.pool.submit(self._read, request))

    def deliver(self) -> None:
        """Tells the planner of every item that is complete."""
        while True:
            try:
                item = self.finished.get_nowait()
            except queue.Empty:
                return
            self._finish(item)

    def _finish(self, item: _Item) -> None:
        self.open_items -= 1
        wanted = item.wanted
        if item.result is not None:
            wanted.done(item.result)
        if isinstance(item.result, memoryview):
            self._unstage(item.result.nbytes)
        item.result = None

    def finish(self) -> None:
        """Waits for everything; raises the first error after all requests have ended."""
        self._submit(self.joiner.flush())
        for future in self.futures:
            future.exception()
        for future in self.futures:
            future.result()
        self.deliver()
        if self.open_items:
            raise CheckpointError(f"{self.open_items} items were not read to their end.", kind="load")

    # -- on the pool --

    def _read(self, request: Request[_Piece]) -> None:
        try:
            if self.failed.is_set():
                return
            buffers: list[memoryview] = []
            at = request.start
            for extent in request.extents:
                if extent.start > at:
                    buffers.append(memoryview(bytearray(extent.start - at)))
                buffers.extend(extent.owner.buffers)
                at = extent.stop
            self._fetch(request.file, request.start, buffers, request.extents[0].owner.job.item.wanted.item)
            for extent in request.extents:
                self._arrived(extent)
        except BaseException:
            self.failed.set()
            self.budget.wake()
            raise
        finally:
            self.slots.release()

    def _fetch(self, file: str, offset: int, buffers: Sequence[memoryview], item: ItemRecord) -> None:
        fetch(self.store, file, offset, buffers, item.key)
        size = sum(b.nbytes for b in buffers)
        self.counters.read(size)
        self.received(size)

    def _arrived(self, extent: Extent[_Piece]) -> None:
        piece = extent.owner
        job, record = piece.job, piece.job.item.wanted.item
        error = self.check(extent.file, record, piece.start, piece.buffers)
        if error is not None:
            # Once more, alone: only what is altered on the store is corrupt, not what was altered on the way.
            self._fetch(extent.file, extent.start, piece.buffers, record)
            error = self.check(extent.file, record, piece.start, piece.buffers)
            if error is not None:
                error.path = self.store.url
                raise error
        with self.lock:
            job.open_extents -= 1
            last = not job.open_extents
        if last:
            if job.place is not None:
                try:
                    job.place()
                except Exception as failed:
                    raise portable(failed, "Filling the tensor", path=self.store.url, key=record.key) from failed
                self._unstage(job.held)
            job.buffers = []
            self._close_job(job.item)

    def _close_job(self, item: _Item) -> None:
        with self.lock:
            item.open_jobs -= 1
            last = not item.open_jobs
        if last:
            self.finished.put(item)
            self.budget.wake()


def _shifted(offsets: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(offsets, by, strict=True))


def run(
    store: Store,
    wanted: Sequence[Wanted],
    *,
    budget: Budget,
    counters: Counters,
    part_size: int,
    max_gap: int,
    max_concurrency: int,
    check: Check = check_blocks,
    received: Callable[[int], None] = lambda count: None,
) -> None:
    """Reads everything that one rank wants.

    Args:
        store: the folder.
        wanted: the items; they are read in the order of files and places.
        budget: bytes of staging buffers.
        counters: counts what is read.
        part_size: bytes of one ranged read, at most.
        max_gap: bytes thrown away to save a request, at most.
        max_concurrency: threads.
        check: compares bytes with the manifest's sums; the test kit exchanges it.
        received: told the bytes of each range that has arrived, on any thread.

    Raises:
        CorruptCheckpointError: bytes are missing, short or altered; targets may hold part of the new values.
        StoreError: the store failed.
    """
    ordered = sorted(wanted, key=lambda w: (w.file, w.item.offset, w.offsets or ()))
    # A disk's reads are copies out of the page cache: more threads than processors only take turns on the interpreter.
    threads = max_concurrency if store.remote else min(max_concurrency, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp_storage-load") as pool:
        pipeline = _Pipeline(store, pool, budget, counters, part_size, max_gap, 2 * max_concurrency, check, received)
        try:
            for one in ordered:
                if pipeline.failed.is_set():
                    break
                pipeline.add(one)
            pipeline.finish()
        except _StoppedError:
            pipeline.finish()  # raises what stopped it
            raise
        except BaseException:
            pipeline.failed.set()
            raise
        finally:
            pool.shutdown()
            budget.release(pipeline.held)
