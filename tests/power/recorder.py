"""Writes down what a store asks of its disk, as operations of the model."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from dcp_storage.stores.local_syscalls import Syscalls
from tests.power.disk import FOLDER, Disk, Operation

__all__ = ["Recorder", "materialize"]


class Recorder:
    """System calls that are done for real, and noted.

    Args:
        root: the folder that stands for the whole disk.
        disk: what is on it already, and what of that is certain; goes on from there.

    Attributes:
        log: the operations, in the order in which they took effect.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self.log: list[Operation] = []
        self._root = root
        self._disk = disk.copy()
        self._numbers = itertools.count(max(disk.files, default=-1) + 1)
        self._open: dict[int, tuple[int | None, str]] = {}
        self._lock = threading.RLock()

    def calls(self) -> Syscalls:
        """For a store."""
        return Syscalls(
            open=self._open_file,
            write=self._write,
            reserve=lambda fd, offset, length: None,  # changes neither bytes nor size
            truncate=self._truncate,
            fsync=self._fsync,
            link=self._link,
            rename_new=self._rename_new,
            replace=self._replace,
            unlink=self._unlink,
            mkdir=self._mkdir,
        )

    def _do(self, operation: Operation) -> None:
        self._disk.do(operation)
        self.log.append(operation)

    def _at(self, path: str) -> str:
        inside = Path(path).is_relative_to(self._root)
        return str(Path(path).relative_to(self._root)) if inside else "above the disk"

    def _open_file(self, path: str, flags: int, mode: int) -> int:
        with self._lock:
            there = os.path.lexists(path)
            fd = os.open(path, flags, mode)
            short = self._at(path)
            if not flags & os.O_CREAT:
                meant = self._disk.seen(short)
                self._open[fd] = (None if meant == FOLDER else meant, short)
                return fd
            if not there:
                self._do(Operation("name", short, next(self._numbers)))
            number = self._disk.seen(short)
            if there and flags & os.O_TRUNC:
                self._do(Operation("truncate", file=number))
            self._open[fd] = (number, short)
            return fd

    def _write(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            count = os.pwritev(fd, pieces, offset)
            data = b"".join(pieces)[:count]
            self._do(Operation("write", file=self._open[fd][0], offset=offset, data=data))
            return count

    def _truncate(self, fd: int, size: int) -> None:
        with self._lock:
            changes = os.fstat(fd).st_size != size
            os.ftruncate(fd, size)
            if changes:
                self._do(Operation("truncate", file=self._open[fd][0], offset=size))

    def _fsync(self, fd: int) -> None:
        with self._lock:
            number, path = self._open[fd]
            if number is None:
                self._do(Operation("sync folder", path))
            else:
                self._do(Operation("sync", file=number))

    def _link(self, existing: str, new: str) -> None:
        with self._lock:
            os.link(existing, new)
            self._do(Operation("name", self._at(new), self._disk.seen(self._at(existing))))

    def _rename_new(self, source: str, target: str) -> None:
        with self._lock:
            Syscalls().rename_new(source, target)
            self._moved(source, target)

    def _replace(self, source: str, target: str) -> None:
        with self._lock:
            Path(source).replace(target)
            self._moved(source, target)

    def _moved(self, source: str, target: str) -> None:
        number = self._disk.seen(self._at(source))
        self._do(Operation("name", self._at(target), number, joint=((self._at(source), None),)))

    def _unlink(self, path: str) -> None:
        with self._lock:
            Path(path).unlink()
            self._do(Operation("name", self._at(path), None))

    def _mkdir(self, path: str, mode: int) -> None:
        with self._lock:
            Path(path).mkdir(mode)
            self._do(Operation("name", self._at(path), FOLDER))


def materialize(disk: Disk, root: Path) -> None:
    """Makes the folder that a process sees on a disk now."""
    root.mkdir(parents=True, exist_ok=True)
    for path in sorted(disk.names):
        meant = disk.seen(path)
        if meant == FOLDER:
            (root / path).mkdir()
        elif meant is not None:
            (root / path).write_bytes(disk.files[meant].now)
