"""Writing through fsspec's file objects, so that a failure publishes nothing.

fsspec's files publish what they hold when they are closed, also by ``with`` after an exception and by the garbage
collector. So nothing here uses ``with``, and a file that failed is disarmed before it is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from dcp_storage.errors import StoreError
from dcp_storage.store import Buffers, Upload, total
from dcp_storage.stores.translate import store_error, unmasked

__all__ = ["Connection", "RemoteUpload", "abandon", "fresh_info", "write_file"]


class Connection:
    """Who may use a filesystem object now.

    fsspec means a blocking filesystem for one thread: ftp is one connection, on which two requests at once get each
    other's answers. So calls take turns there; asynchronous filesystems and local files are used by all at once.

    Args:
        base: the filesystem, behind every ``dir://``.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._lock = None if isinstance(base, (AsyncFileSystem, LocalFileSystem)) else threading.RLock()
        self._broken = False

    @classmethod
    def of(cls, base: Any) -> Connection:
        """The one of this filesystem object, for all stores on it."""
        made: Connection = base.__dict__.setdefault("_dcp_storage_connection", cls(base))
        return made

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the filesystem, and connects anew where its connection broke in an earlier turn."""
        if self._lock is None:
            yield
            return
        with self._lock:
            if self._broken:
                self._connect()
            try:
                yield
            except Exception as error:
                # Also after a time-out: the late answer would be taken for the next request's.
                self._broken = store_error(error, "turn", "").transient
                raise

    def _connect(self) -> None:
        # The client libraries do not do this by themselves; ftp, sftp and smb all have it under this name.
        connect = getattr(self._base, "_connect", None)
        if connect is not None:
            client = getattr(self._base, "ftp", None)
            if client is not None:
                client.close()
            connect()
        self._broken = False


def fresh_info(fs: Any, path: str) -> dict[str, Any] | None:
    """What the filesystem says of ``path``, past its listing cache; None where there is nothing."""
    fs.invalidate_cache(path.rpartition("/")[0])
    fs.invalidate_cache(path)
    try:
        info: dict[str, Any] = fs.info(path)
    except FileNotFoundError as error:
        hidden = unmasked(error)
        if hidden is error:
            return None
        raise hidden from None
    return info


def abandon(file: Any) -> None:
    """Ends a file that is being written without publishing it, as far as its class allows."""
    if not isinstance(file, AbstractBufferedFile):
        # It grows in place; closing it publishes no more than is there, and the caller removes that.
        with contextlib.suppress(OSError):  # what it could not write is not wanted
            file.close()
        return
    try:
        # The base's does nothing, object stores end their upload, ftp removes the path by rm, which expands patterns:
        # in a folder "run [1]" that would be the object in "run 1".
        if type(file).discard is not AbstractBufferedFile.discard and file.fs.protocol != "ftp":
            file.discard()
    finally:
        file.buffer = io.BytesIO()
        file.closed = True  # close(), which __del__ calls too, flushes what is left, but nothing once it is closed


def _write(file: Any, pieces: Sequence[memoryview | bytes]) -> None:
    for piece in pieces:
        written = file.write(piece)
        if written is not None and written != len(piece):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def write_file(fs: Any, path: str, buffers: Buffers, *, mode: str = "wb") -> None:
    """Writes a whole object through a file; a failure leaves what was there before, or nothing.

    Args:
        fs: the filesystem.
        path: the object.
        buffers: its bytes.
        mode: ``"wb"``, or ``"xb"`` to fail where it is there already.
    """
    before = fresh_info(fs, path) if mode == "wb" else None
    file = fs.open(path, mode)
    try:
        _write(file, buffers)
        file.close()
    except BaseException:
        # The first error is the one to tell; what cannot be cleaned up now is seen as a wrong size later.
        with contextlib.suppress(Exception):
            abandon(file)
        with contextlib.suppress(Exception):
            after = fresh_info(fs, path)
            # The whole size means that the answer was lost, not the object; the old state means nothing happened.
            if after is not None and after != before and after["size"] != total(buffers):
                fs.rm_file(path)
        raise


class RemoteUpload(Upload):
    """One fsspec file, written in order.

    The newest part is held back until the next one comes, so that it can be replaced by sending it again: a stream
    cannot be rewound.

    Args:
        fs: the filesystem.
        path: the object.
        url: the folder, for messages.
        name: the object's name.
        connection: gives turns on the filesystem.
    """

    def __init__(self, fs: Any, path: str, url: str, name: str, connection: Connection) -> None:
        self._fs = fs
        self._connection = connection
        self._path = path
        self._url = url
        self._name = name
        self._file: Any = None
        self._touched = False
        self._state = "open"
        self._number = 0
        self._offset = 0
        self._held = b""

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        if self._state != "open":
            raise self._ended("write_part")
        again = number == self._number and offset == self._offset
        end = self._offset + len(self._held)
        if not again and (number != self._number + 1 or offset != end):
            raise StoreError(
                f"write_part failed for {self._name!r} in {self._url}: part {self._number + 1} at byte {end} is next, "
                f"not part {number} at byte {offset}; this filesystem takes parts in order.",
                operation="write_part",
                errno=errno.EINVAL,
                path=self._url,
                key=self._name,
            )
        if not again and self._number:
            self._flush("write_part")
        self._number, self._offset, self._held = number, offset, b"".join(buffers)

    def complete(self) -> None:
        if self._state == "complete":
            return
        if self._state == "aborted":
            raise self._ended("complete")
        size = self._offset + len(self._held)
        if self._state == "open":
            self._flush("complete")
            self._offset, self._held = size, b""
            self._state = "failed"
            try:
                with self._connection.turn():
                    self._file.close()
            except Exception as error:
                with contextlib.suppress(Exception), self._connection.turn():  # abort tries again, and tells
                    abandon(self._file)
                raise self._error(error, "complete") from error
        # Also after an earlier call failed: its answer may have been lost.
        try:
            with self._connection.turn():
                info = fresh_info(self._fs, self._path)
        except Exception as error:
            raise self._error(error, "complete") from error
        if info is None or info["size"] not in (size, None):
            raise self._ended("complete")
        self._state = "complete"

    def abort(self) -> None:
        if self._state == "aborted":
            return
        self._state = "failed"
        try:
            with self._connection.turn():
                if self._file is not None:
                    abandon(self._file)
                    self._file = None
                if self._touched and fresh_info(self._fs, self._path) is not None:
                    self._fs.rm_file(self._path)
                    if fresh_info(self._fs, self._path) is not None:
                        raise OSError(errno.EBUSY, "the object is still there after it was removed")
        except Exception as error:
            raise self._error(error, "abort") from error
        self._state = "aborted"

    def _flush(self, operation: str) -> None:
        """Hands the held part to the file, which is opened late: an upload given up early leaves no trace at all."""
        try:
            with self._connection.turn():
                if self._file is None:
                    self._touched = True
                    self._file = self._fs.open(self._path, "wb")
                _write(self._file, [self._held])
        except Exception as error:
            made = self._error(error, operation)
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(Exception), self._connection.turn():  # abort looks again
                    abandon(file)
            if self._number > 1 or operation == "complete":
                # Earlier parts are lost with the file. Only the first can be sent once more, into a new one.
                self._state = "failed"
                made.transient = False
            raise made from error

    def _error(self, error: Exception, operation: str) -> StoreError:
        return store_error(error, operation, self._url, self._name, writes=True)

    def _ended(self, operation: str) -> StoreError:
        return StoreError(
            f"{operation} failed for {self._name!r} in {self._url}: this upload is {self._state}; begin it again.",
            operation=operation,
            errno=errno.EINVAL,
            path=self._url,
            key=self._name,
        )
