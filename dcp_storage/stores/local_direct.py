"""Large writes past the page cache (``O_DIRECT``): the disk takes them from our memory, and the kernel copies nothing.

A buffered write of a checkpoint costs the kernel a page and a copy for every 4 KiB, and pushes out of the page cache
what the training reads. What is written directly costs one copy into aligned memory, which the disk then reads.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
from collections.abc import Sequence

from dcp_storage.store import Buffers
from dcp_storage.stores.local_syscalls import Syscalls, advance

__all__ = ["PIECE", "Direct", "is_on_a_disk", "skip"]

PIECE = 4 << 20
"""Bytes of one direct write, and of one piece of aligned memory."""

_PIECES = 2  # of aligned memory: one is filled while the disk reads the other
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
_PAGE = mmap.PAGESIZE  # a multiple of every disk's block; a page is written in one way only
_NO_DIRECT = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY, errno.EACCES, errno.EPERM, errno.ENOENT}
)
"""What says that a file is not opened, or written, in this way. Whether it is in another, the ordinary way shows."""


def is_on_a_disk(fd: int) -> bool:
    """Whether the file is in a filesystem right on a block device, on a system that has direct writes.

    Network, FUSE and memory filesystems (and those of several devices) have no device number of their own; what
    ``O_DIRECT`` means there differs from one to the next, and it is not always faster.
    """
    return _O_DIRECT != 0 and os.major(os.fstat(fd).st_dev) != 0


class Direct:
    """Writes directly, in pieces of aligned memory that all files of a store share. Thread-safe.

    Args:
        calls: the system calls.
    """

    def __init__(self, calls: Syscalls) -> None:
        self._calls = calls
        self._memory: queue.LifoQueue[mmap.mmap | None] = queue.LifoQueue()
        self._owner = -1

    def write(self, path: str, buffers: Buffers, offset: int, size: int) -> int:
        """Writes as much from the start of ``buffers`` as can be written directly.

        Args:
            path: the file, which is there.
            buffers: the bytes.
            offset: where in the file they belong, in bytes.
            size: of ``buffers``, in bytes.

        Returns:
            Bytes that are written, whole pages; the caller writes the rest in the ordinary way. 0 where the filesystem
            has no direct writes, or the place is not at a page's border.

        Raises:
            OSError: as the system says.
        """
        whole = size - size % _PAGE
        if offset % _PAGE or not whole:
            return 0
        memory_of = self._pool()
        memory = memory_of.get()
        try:
            memory = memory or mmap.mmap(-1, PIECE)
            try:
                # For each part anew: a second descriptor for every open file would halve how many there may be.
                fd = self._calls.open(path, os.O_WRONLY | _O_DIRECT | os.O_CLOEXEC, 0)
            except OSError as error:
                if error.errno in _NO_DIRECT:
                    return 0
                raise
            try:
                return self._write(fd, memory, [piece for piece in buffers if piece.nbytes], offset, whole)
            finally:
                self._calls.close(fd)
        finally:
            memory_of.put(memory)

    def _pool(self) -> queue.LifoQueue[mmap.mmap | None]:
        """The memory of this process: in a forked one, threads that had taken a piece are not there to give it back."""
        if self._owner != os.getpid():
            self._memory = queue.LifoQueue()
            for _ in range(_PIECES):
                self._memory.put(None)
            self._owner = os.getpid()
        return self._memory

    def _write(self, fd: int, memory: mmap.mmap, pieces: list[memoryview], offset: int, whole: int) -> int:
        done, first = 0, 0
        with memoryview(memory) as view:
            while done < whole:
                count = min(PIECE, whole - done)
                first = _gather(view, pieces, first, count)
                try:
                    with view[:count] as chunk:
                        written = self._calls.write(fd, [chunk], offset + done)
                except OSError as error:
                    if error.errno in _NO_DIRECT:  # this disk wants another alignment
                        return done
                    raise
                done += written - written % _PAGE
                if written < count:  # what a full disk or a signal has cut short goes the ordinary way, and errs there
                    return done
        return done


def _gather(into: memoryview, pieces: list[memoryview], first: int, count: int) -> int:
    """Copies the next ``count`` bytes of ``pieces[first:]``; returns the index of the first piece that is not done."""
    filled, index = 0, first
    while filled < count:
        part = pieces[index][: count - filled]
        into[filled : filled + part.nbytes] = part
        filled += part.nbytes
        index += 1
    return advance(pieces, first, count)


def skip(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of ``buffers`` behind their first ``count`` bytes."""
    pieces = [piece for piece in buffers if piece.nbytes]
    return pieces[advance(pieces, 0, count) :]
