"""Local disks with habits of their own under whole saves: what a save asked of the disk, and what the disk had then."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dcp_storage import FsspecStorageWriter
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.stores.location import Location

__all__ = ["Call", "Disk", "Faults", "Recorder", "limited", "opened_with", "refusing", "writer_with"]

Faults = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """One system call that succeeded.

    Attributes:
        name: of the field of :class:`Syscalls`.
        paths: what it was about; that of a descriptor is the one it was opened by.
        begun: by the machine's monotonic clock, which all its processes share, in seconds.
        ended: the same.
    """

    name: str
    paths: tuple[str, ...]
    begun: float
    ended: float


@dataclass
class Recorder:
    """System calls that are done, and noted where they succeed."""

    faults: Faults = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    _open: dict[int, str] = field(default_factory=dict)

    def syscalls(self) -> Syscalls:
        """The record for a store."""
        return Syscalls(**{item.name: self._wrap(item.name) for item in fields(Syscalls)})

    def _wrap(self, name: str) -> Callable[..., Any]:
        do = self.faults.get(name, getattr(Syscalls(), name))

        def call(*args: Any) -> Any:
            paths = [self._open[a] if isinstance(a, int) and n == 0 else a for n, a in enumerate(args)]
            begun = time.monotonic()
            result = do(*args)
            shown = tuple(path for path in paths if isinstance(path, str))
            self.calls.append(Call(name, shown, begun, time.monotonic()))
            if name == "open":
                self._open[result] = args[0]
                if args[1] & os.O_CREAT:
                    self.calls.append(Call("made", (args[0],), begun, time.monotonic()))
            return result

        return call


@dataclass
class Disk:
    """What would be left after a power loss, as POSIX promises it: what was synced, and nothing else.

    Attributes:
        bytes: files whose bytes are all on the disk.
        names: files and folders whose names are.
    """

    bytes: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    _pending: set[str] = field(default_factory=set)
    _started: dict[str, float] = field(default_factory=dict)

    def replay(self, calls: Iterable[Call]) -> Disk:
        """Takes calls, of all ranks in the order in which they ended; returns itself."""
        for call in sorted(calls, key=lambda c: c.ended):
            self._take(call)
        return self

    def holds(self, path: str) -> bool:
        """Whether a file would be there, whole, or a folder by its name."""
        return path in self.names and (path in self.bytes or Path(path).is_dir())

    def _take(self, call: Call) -> None:
        name, paths = call.name, call.paths
        if name in {"made", "mkdir", "link", "replace", "rename_new"}:
            self._pending.add(paths[-1])
            self._started[paths[-1]] = call.ended
            self.names.discard(paths[-1])
            if name in {"link", "replace", "rename_new"} and paths[0] in self.bytes:
                self.bytes.add(paths[-1])
        elif name in {"write", "truncate"}:
            self.bytes.discard(paths[0])
        elif name == "unlink":
            for known in (self._pending, self.names, self.bytes):
                known.discard(paths[0])
        elif name == "fsync":
            self.bytes.add(paths[0])
            # A name that came while the sync of its folder was running may have come too late for it.
            done = {p for p in self._pending if str(Path(p).parent) == paths[0] and self._started[p] <= call.begun}
            self.names |= done
            self._pending -= done


def opened_with(
    calls: Syscalls | None = None, elsewhere: str | None = None
) -> Callable[[Location, Mapping[str, Any], int], LocalStore]:
    """What opens a folder on a disk with these system calls, or another folder in its place."""

    def opener(location: Location, options: Mapping[str, Any], concurrency: int) -> LocalStore:
        return LocalStore(elsewhere or location.path, calls=calls)

    return opener


def writer_with(folder: str | os.PathLike[str], calls: Syscalls, **options: Any) -> FsspecStorageWriter:
    """A writer to a disk with these system calls."""
    writer = FsspecStorageWriter(folder, **options)
    writer._opener = opened_with(calls)
    return writer


def refusing(number: int, does: Callable[..., Any], *parts: str) -> Callable[..., Any]:
    """A system call that fails with this errno for every path that holds one of ``parts``, and else is done."""

    def call(*args: Any) -> Any:
        if any(part in str(arg) for arg in args[:2] for part in parts):
            raise OSError(number, os.strerror(number), args[0])
        return does(*args)

    return call


def limited(folder: str, size: int) -> Callable[[int, Sequence[memoryview], int], int]:
    """A pwritev on a disk of ``size`` bytes, all of them below ``folder``: it takes what there is room for."""

    def call(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        used = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        wanted = sum(piece.nbytes for piece in pieces)
        grows = offset + wanted - os.fstat(fd).st_size
        if grows > size - used:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(fd, pieces, offset)

    return call
