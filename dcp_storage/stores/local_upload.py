"""A large file on a local disk, written in parts straight under its final name. Shards are never renamed or copied."""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from dcp_storage.errors import StoreError
from dcp_storage.store import Buffers, Upload, total
from dcp_storage.stores.local_direct import Direct, is_on_a_disk, skip
from dcp_storage.stores.local_syscalls import Syscalls, sync_folder, write_all
from dcp_storage.stores.parts import Parts
from dcp_storage.stores.translate import store_error

__all__ = ["LocalUpload"]

_LARGE = 1 << 20  # bytes of a part for which space is set aside, and which is written past the page cache


class LocalUpload(Upload):
    """One file that grows under its final name.

    Nothing of a save counts before its commit, so a part of a shard that readers can see does no harm, and a rename
    would only add a step that can fail.

    Args:
        calls: the system calls.
        folder: absolute path.
        name: the file's name.
        direct: writes large parts past the page cache, where the file is on a disk that can do so; None: nothing does.

    Raises:
        StoreError: the file cannot be made.
    """

    def __init__(self, calls: Syscalls, folder: str, name: str, direct: Direct | None = None) -> None:
        self._calls = calls
        self._folder = folder
        self._name = name
        self._path = f"{folder.rstrip('/')}/{name}"
        self._parts = Parts()
        self._lock = threading.Lock()
        # The kernel lets one writer at a time into a file; the others would spin before it and burn their processors.
        self._turn = threading.Lock()
        self._state = "open"
        try:
            self._fd = calls.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error, "upload") from error
        self._direct = direct if direct is not None and is_on_a_disk(self._fd) else None

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        if self._state != "open":
            raise self._ended("write_part")
        size, done = total(buffers), 0
        try:
            if size >= _LARGE:
                with self._turn:
                    self._calls.reserve(self._fd, offset, size)
                if self._direct is not None:
                    done = self._direct.write(self._path, buffers, offset, size)
            if done < size:
                with self._turn:
                    write_all(self._calls, self._fd, skip(buffers, done), offset + done)
        except OSError as error:
            raise self._error(error, "write_part") from error
        self._parts.add(number, offset, size)

    def complete(self) -> None:
        with self._lock:
            if self._state == "complete":
                return
            if self._state != "open":
                raise self._ended("complete")
            size = self._parts.size(operation="complete", url=self._folder, name=self._name)
            try:
                # A part that was sent twice may have been longer the first time.
                self._calls.truncate(self._fd, size)
            except OSError as error:
                raise self._error(error, "complete") from error
            # From here on an error is final: after a failed fsync the kernel may forget the pages it could not write
            # and answer the next fsync with success.
            self._state = "failed"
            try:
                try:
                    self._calls.fsync(self._fd)
                finally:
                    self._calls.close(self._fd)
                sync_folder(self._calls, self._folder)
            except OSError as error:
                made = self._error(error, "complete")
                made.transient = False
                raise made from error
            self._state = "complete"

    def abort(self) -> None:
        with self._lock:
            if self._state == "aborted":
                return
            if self._state == "open":
                self._state = "failed"
                with contextlib.suppress(OSError):  # what could not be written is about to be removed
                    self._calls.close(self._fd)
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._calls.unlink(self._path)
                with contextlib.suppress(FileNotFoundError):  # the whole folder is gone
                    sync_folder(self._calls, self._folder)
            except OSError as error:
                raise self._error(error, "abort") from error
            self._state = "aborted"

    def _error(self, error: OSError, operation: str) -> StoreError:
        return store_error(error, operation, self._folder, self._name, writes=True)

    def _ended(self, operation: str) -> StoreError:
        return StoreError(
            f"{operation} failed for {self._name!r} in {self._folder}: this upload is {self._state}; begin it again.",
            operation=operation,
            errno=errno.EINVAL,
            path=self._folder,
            key=self._name,
        )
