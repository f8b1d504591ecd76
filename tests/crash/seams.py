"""Where a process is cut: at every call of its store, or at every system call under a local one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from dcp_storage.errors import StoreError
from dcp_storage.store import Buffers, Store
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.wrappers import Request, RequestStore
from tests.crash.points import Kept, Seam, plain

__all__ = ["REPEATED", "SILENT", "AtStore", "at_syscalls"]

T = TypeVar("T")

REPEATED = ("put", "create", "delete", "write_part")
"""Calls of a store that can be made once more by another process. Not the beginning of a local upload, which empties
the file: a disk does nothing after the process that asked for it, and NFS servers know a repeated request again."""

SILENT = ("close", "may_write", "reserve")
"""System calls that leave nothing behind: a kill there is a kill at the next one."""


class AtStore(RequestStore):
    """Every call of a store passes through a seam.

    Args:
        inner: the store that does the work.
        seam: what happens where.
        label: of the folder, for stores of several folders under one seam.
    """

    def __init__(self, inner: Store, seam: Seam, label: str = "") -> None:
        super().__init__(inner)
        self._seam = seam
        self._label = label
        self._own = threading.local()

    def outgoing(self, buffers: Buffers) -> Buffers:
        self._own.data = b"".join(buffers)
        return buffers

    def create(self, name: str, data: bytes) -> None:
        self._own.data = bytes(data)
        super().create(name, data)

    def request(self, request: Request, call: Callable[[], T]) -> T:
        about = request.name or ",".join(sorted(plain(name) for name in request.names))
        part = "" if request.operation != "write_part" else f" @{request.offset}"
        data: bytes = getattr(self._own, "data", b"")

        def keep() -> Kept:
            return Kept(
                request.operation, self.inner.url, request.name, tuple(request.names), data, request.offset or 0
            )

        return self._seam.through(
            plain(f"{self._label}{request.operation} {about}{part}").strip(),
            call,
            error=lambda done: _store_error(request, self.url, done),
            keep=keep,
        )


def _store_error(request: Request, url: str, done: bool) -> StoreError:
    return StoreError(
        f"injected fault: {request.operation} {'lost its reply' if done else 'was refused'}",
        operation=request.operation,
        errno=errno.ETIMEDOUT if done else errno.ENOSPC,
        transient=done,
        ambiguous=done,
        key=request.name,
        path=url,
    )


def at_syscalls(calls: Syscalls, seam: Seam, base: str) -> Syscalls:
    """System calls that pass through a seam.

    Args:
        calls: does the work.
        seam: what happens where.
        base: the folder whose path is left out of the names of the calls.
    """
    opened: dict[int, str] = {}

    def wrap(name: str) -> Callable[..., Any]:
        does = getattr(calls, name)
        if name in SILENT:
            return does  # type: ignore[no-any-return]

        def call(*args: Any) -> Any:
            paths = [opened.get(arg, "?") if n == 0 and isinstance(arg, int) else arg for n, arg in enumerate(args)]
            shown = [_short(path, base) for path in paths if isinstance(path, str)]
            if name == "write":
                shown.append(f"@{args[2]}")
            if name == "open" and not args[1] & os.O_CREAT:
                shown.append("(to sync it)")

            def do() -> Any:
                result = does(*args)
                if name == "open":
                    opened[result] = args[0]
                return result

            return seam.through(
                plain(" ".join([name, *shown])), do, error=lambda done: OSError(errno.EIO, os.strerror(errno.EIO))
            )

        return call

    return Syscalls(**{item.name: wrap(item.name) for item in fields(Syscalls)})


def _short(path: str, base: str) -> str:
    return (path.removeprefix(base).lstrip("/") or ".") if path.startswith(base) else "(above)"
