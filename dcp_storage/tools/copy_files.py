"""The bytes of a copy: files of one store to another, in parts, many in flight, checked as they go by."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dcp_storage.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError, StoreError
from dcp_storage.options import KIB, SaveOptions
from dcp_storage.records import FileRecord
from dcp_storage.store import Store, Upload
from dcp_storage.tools.crew import Crew
from dcp_storage.tools.streams import FileSums, Layout, Part, read_part

__all__ = ["Job", "send_files"]


@dataclass(frozen=True)
class Job:
    """One file to be sent: its layout at the source, and its name at the destination."""

    layout: Layout
    name: str


@dataclass
class _File:
    job: Job
    sums: FileSums
    parts: list[Part]
    in_parts: bool = False
    begun: bool = False
    upload: Upload | None = None
    left: int = 0
    whole: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def send_files(
    source: Store,
    target: Store,
    jobs: list[Job],
    options: SaveOptions,
    *,
    sent: Callable[[int], None],
    done: Callable[[FileRecord, str, int], None],
) -> None:
    """Sends files. Where it raises, no upload is left open, and files that were whole by then stay.

    Args:
        source: where from.
        target: where to; all names are this attempt's own.
        jobs: the files.
        options: concurrency, part size and memory.
        sent: told the bytes of each part that has arrived, on any thread.
        done: told of each file that is whole and durable, with its CRC-32, on any thread.

    Raises:
        CorruptCheckpointError: the source's bytes are missing, short or altered; such a file is not completed.
        StoreError: one of the stores failed.
    """
    sender = _Sender(source, target, options, sent, done)
    try:
        with Crew(options.max_concurrency, options.memory_budget) as crew:
            for job in jobs:
                sender.begin(crew, job)
    except BaseException as error:
        left = sender.abort()
        if left is not None and isinstance(error, StoreError | CorruptCheckpointError):
            error.message = f"{error.message} Not every upload that was begun could be aborted: {left}"
        raise


def _memory(size: int) -> memoryview:
    """New memory, in pages as large as the system has them: it is zeroed at once and not at a fault for every 4 KiB."""
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory, the default, has none
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            held.madvise(advice)
    return memoryview(held)


class _Buffers:
    """Memory for parts, used again, since new memory has to be zeroed.

    Args:
        size: bytes of a full part. One that is more than half full takes a full buffer, and counts as one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def cost(self, size: int) -> int:
        """Bytes that a part of this size holds."""
        return self.size if self._is_full(size) else size

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[memoryview]:
        """Memory for a part, for as long as the block takes."""
        with self._lock:  # also where it does not fit: what lies idle goes before more is taken
            kept = self._free.pop() if self._free else None
        if kept is None or not self._is_full(size):
            kept = _memory(self.cost(size))
        yield kept[:size]
        if self._is_full(size):  # not after an error: somebody might still be reading it
            with self._lock:
                self._free.append(kept)

    def _is_full(self, size: int) -> bool:
        return self.size // 2 < size <= self.size


class _Sender:
    def __init__(
        self,
        source: Store,
        target: Store,
        options: SaveOptions,
        sent: Callable[[int], None],
        done: Callable[[FileRecord, str, int], None],
    ) -> None:
        self.source = source
        self.target = target
        self.sent = sent
        self.done = done
        self.files: list[_File] = []
        # A disk's reads are copies out of the page cache: more at once than processors only take turns.
        self.reading = threading.BoundedSemaphore(
            options.max_concurrency if source.remote else min(options.max_concurrency, os.cpu_count() or 1)
        )
        # A remote store's client holds a second copy of what it sends.
        self.weight = 2 if target.remote else 1
        self.part_size = max(
            min(options.part_size, options.memory_budget // (2 * self.weight)), target.min_part_size, 64 * KIB
        )
        self.buffers = _Buffers(self.part_size)

    def begin(self, crew: Crew, job: Job) -> None:
        record = job.layout.record
        # A part is at least half as large as it may be, so that the number of parts stays within the store's limit.
        size = max(self.part_size, -(-2 * record.size // self.target.max_parts))
        file = _File(job, FileSums(job.layout), list(job.layout.parts(size, self.target.min_part_size)))
        file.left = len(file.parts)
        self.files.append(file)
        # A local file always goes through an upload, which writes it in place: a put would rename it.
        file.in_parts = not self.target.remote or len(file.parts) > 1
        if not file.parts:
            crew.do(0, functools.partial(self._finish, file))
        elif self.target.parallel_parts:
            for number, part in enumerate(file.parts, 1):
                crew.do(self._cost(part), functools.partial(self._part, file, number, part))
        else:
            crew.do(max(map(self._cost, file.parts)), functools.partial(self._in_order, crew, file))

    def _cost(self, part: Part) -> int:
        return self.buffers.cost(part.size) * self.weight

    def _in_order(self, crew: Crew, file: _File) -> None:
        for number, part in enumerate(file.parts, 1):
            if crew.failed.is_set():
                return
            self._part(file, number, part)

    def _part(self, file: _File, number: int, part: Part) -> None:
        with self.buffers.of(part.size) as data:
            self._send(file, number, part, data)
        self.sent(part.size)
        with file.lock:
            file.left -= 1
            last = not file.left
        if last:
            self._finish(file)

    def _send(self, file: _File, number: int, part: Part, data: memoryview) -> None:
        record = file.job.layout.record
        try:
            with self.reading:
                read_part(self.source, file.sums, part, data)
        except (ObjectNotFoundError, ObjectTooShortError) as error:
            raise CorruptCheckpointError(
                f"{self.source.url}: {record.name} is gone or was shortened while it was being copied.",
                path=self.source.url,
                file=record.name,
                wanted=record.size,
                found=getattr(error, "found", None),
                cause=error,
            ) from error
        crc32 = file.sums.crc32_of(part)
        if file.in_parts:
            self._upload_of(file).write_part(number, part.start, [data], crc32=crc32)
        else:
            self._check(file)
            self.target.put(file.job.name, [data], crc32=crc32)

    def _upload_of(self, file: _File) -> Upload:
        """The file's upload, begun by whichever part comes first: files that wait their turn hold nothing open."""
        with file.lock:
            if file.upload is None:
                file.begun = True
                file.upload = self.target.upload(file.job.name)
            return file.upload

    def _check(self, file: _File) -> None:
        """Raises where what was read is not what was committed, before the copy of it counts for anything."""
        damages = file.sums.damages()
        if damages:
            record, first = file.job.layout.record, damages[0]
            raise CorruptCheckpointError(
                f"{self.source.url}: bytes {first.start} to {first.stop} of {record.name} are altered at the source: "
                f"CRC-32 {first.wanted:#010x} was committed, {first.found:#010x} was read.",
                path=self.source.url,
                file=record.name,
                key=first.key,
                offset=first.start,
                wanted=first.wanted,
                found=first.found,
            )

    def _finish(self, file: _File) -> None:
        name = file.job.name
        if file.in_parts:
            self._check(file)
            self._upload_of(file).complete()
        elif not file.parts:
            self.target.put(name, [], crc32=0)
        file.whole = True
        self.done(file.job.layout.record, name, file.sums.crc32)

    def abort(self) -> StoreError | None:
        """Aborts what is not whole; returns the first failure."""
        open_ = [file for file in self.files if file.begun and not file.whole]
        todo = [file.upload.abort for file in open_ if file.upload is not None]
        # Where the beginning failed, it may have taken place all the same.
        unknown = [file.job.name for file in open_ if file.upload is None]
        if unknown:
            todo.append(lambda: self.target.abort_uploads(unknown))
        first = None
        for action in todo:
            try:
                action()
            except StoreError as error:
                first = first or error
        return first
