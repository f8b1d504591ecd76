"""One system call of a save that fails: which one is told by its name, its file and how often it came before."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dcp_storage.stores.local_syscalls import Syscalls

__all__ = ["NUMBERS", "Injector", "Point"]

NUMBERS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EINTR)
"""Full, broken, over quota, made read-only, a stale handle of NFS, interrupted."""

_TOKEN = re.compile(r"\.[a-z][a-z0-9]{15}\b")


@dataclass(frozen=True, order=True)
class Point:
    """One call of a save, the same in every save of the same state.

    Attributes:
        call: name of the field of :class:`Syscalls`.
        file: the name it is about, a token in it shown as ``<token>``; of a rename the new one; ``.`` for the folder,
            ``..`` for the one it is in.
        number: how many such calls came before it.
    """

    call: str
    file: str
    number: int


@dataclass
class Injector:
    """The system calls of a disk that fails once, or from then on.

    Attributes:
        folder: the checkpoint's folder.
        at: where it fails; None: nowhere.
        errno: with what.
        for_ever: whether every later call that writes fails, too; removing and reading still work.
        half: whether a write that fails has written half of its bytes.
        seen: every call that was made, in order.
    """

    folder: str
    at: Point | None = None
    errno: int = errno.EIO
    for_ever: bool = False
    half: bool = False
    seen: list[Point] = field(default_factory=list)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _open: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failing: bool = False

    def calls(self) -> Syscalls:
        """The record for a store."""
        return Syscalls(**{item.name: self._wrapped(item.name) for item in fields(Syscalls)})

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = getattr(Syscalls(), name)
        if name == "may_write":
            return real  # type: ignore[no-any-return]

        def call(*args: Any) -> Any:
            path = self._open.get(args[0], "") if isinstance(args[0], int) else str(args[-1 if name in _TWO else 0])
            if self._fails(name, path):
                if name == "close":
                    real(*args)
                if name == "write" and self.half:
                    _half_of(args)
                raise OSError(self.errno, os.strerror(self.errno), path)
            result = real(*args)
            if name == "open":
                self._open[result] = path
            return result

        return call

    def _fails(self, name: str, path: str) -> bool:
        file = _TOKEN.sub(".<token>", os.path.relpath(path, self.folder))
        with self._lock:
            point = Point(name, file, self._counts[name, file])
            self._counts[name, file] += 1
            self.seen.append(point)
            if point == self.at:
                self._failing = True
                return True
            return self._failing and self.for_ever and name in _WRITES


_TWO = frozenset({"link", "rename_new", "replace"})
_WRITES = frozenset({"open", "write", "reserve", "truncate", "fsync", "link", "rename_new", "replace", "mkdir"})


def _half_of(args: Sequence[Any]) -> None:
    fd, pieces, offset = args
    piece = pieces[0][: pieces[0].nbytes // 2]
    os.pwritev(fd, [piece], offset)
