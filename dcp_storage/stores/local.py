"""A folder on a local disk (or anything mounted), by system calls alone."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dcp_storage.errors import ObjectNotFoundError, ObjectTooShortError, StoreError, UntrustedDataError
from dcp_storage.names import new_token
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, check_name, is_name, total
from dcp_storage.stores.local_create import place
from dcp_storage.stores.local_direct import Direct
from dcp_storage.stores.local_syscalls import IOV_MAX, Syscalls, advance, make_folders, sync_folder, write_new
from dcp_storage.stores.local_upload import LocalUpload
from dcp_storage.stores.translate import store_error

__all__ = ["LocalStore"]

# The disk cannot take a scratch file: read-only, not ours, full, or not there yet.
_NO_SCRATCH = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT})


class LocalStore(Store):
    """A real folder. Creates are atomic; what a method wrote is on the disk, name and bytes, when it returns.

    Small files are written beside their name as ``<name>.<token>`` and then put there in one step; uploads grow under
    their final name. Files get mode 0o666 and folders 0o777, less the umask.

    Args:
        path: the folder; a relative one is made absolute at once.
        direct: whether large parts are written past the page cache (``O_DIRECT``) where the folder is on a disk.
        calls: the system calls; for tests.
    """

    parallel_parts = True
    remote = False
    max_parts = 1 << 31

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True, calls: Syscalls | None = None) -> None:
        self.url = str(Path(path).absolute())
        self._calls = calls or Syscalls()
        self._direct = Direct(self._calls) if direct else None

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.ATOMIC

    def make_folder(self) -> None:
        with self._errors("make_folder", writes=True):
            make_folders(self._calls, self.url)

    def entries(self) -> list[Entry]:
        found = []
        with self._errors("entries"):
            try:
                listing = os.scandir(self.url)
            except FileNotFoundError:
                return []
            with listing:
                for entry in listing:
                    with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                        if entry.is_file():
                            info = entry.stat()
                            found.append(Entry(entry.name, info.st_size, info.st_mtime))
        return found

    def folders(self) -> list[str]:
        found = []
        with self._errors("folders"):
            try:
                listing = os.scandir(self.url)
            except FileNotFoundError:
                return []
            with listing:
                for entry in listing:
                    with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                        if entry.is_dir() and is_name(entry.name):
                            found.append(entry.name)
        return found

    def size(self, name: str) -> int:
        path = self._path(name)
        with self._errors("size", name):
            info = Path(path).stat()
        if not stat.S_ISREG(info.st_mode):
            raise self._no_file("size", name)
        return info.st_size

    def read(self, name: str, *, limit: int) -> bytes:
        with self._open("read", name) as fd, self._errors("read", name):
            size, pieces, got = os.fstat(fd).st_size, [], 0
            while size <= limit and (piece := os.read(fd, min(limit + 1 - got, 1 << 20))):
                pieces.append(piece)
                got += len(piece)
                size = max(size, got)
        if size > limit:
            raise UntrustedDataError(
                f"{name!r} in {self.url} is refused: it has {size} bytes or more, the limit is {limit}.",
                name=name,
                path=self.url,
                key=name,
            )
        return b"".join(pieces)

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        pieces = [piece for piece in buffers if piece.nbytes]
        position, first = offset, 0
        with self._open("read_into", name) as fd, self._errors("read_into", name):
            while first < len(pieces):
                count = os.preadv(fd, pieces[first : first + IOV_MAX], position)
                if count == 0:
                    wanted, found = offset + total(buffers), os.fstat(fd).st_size
                    raise ObjectTooShortError(
                        f"{name!r} in {self.url} ends at byte {found}; bytes up to {wanted} were wanted.",
                        wanted=wanted,
                        found=found,
                        operation="read_into",
                        path=self.url,
                        key=name,
                    )
                position += count
                first = advance(pieces, first, count)

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        final, temp = self._path(name), self._temp(name)
        try:
            with self._errors("put", name):
                write_new(self._calls, temp, buffers)
            with self._errors("put", name, writes=True):
                self._calls.replace(temp, final)
        except BaseException:
            self._discard(temp)
            raise
        with self._errors("put", name, applied=True):
            sync_folder(self._calls, self.url)

    def create(self, name: str, data: bytes) -> None:
        final, temp = self._path(name), self._temp(name)
        try:
            with self._errors("create", name):
                write_new(self._calls, temp, [memoryview(data)])
            with self._errors("create", name, writes=True):
                try:
                    place(self._calls, temp, final, data)
                except FileExistsError:
                    # The name may be our own, from a try that failed before its name was durable, and the caller may
                    # find that out and count on it.
                    sync_folder(self._calls, self.url)
                    raise
        finally:
            self._discard(temp)
        with self._errors("create", name, applied=True):
            sync_folder(self._calls, self.url)

    def upload(self, name: str) -> Upload:
        return LocalUpload(self._calls, self.url, check_name(name), self._direct)

    def delete(self, names: Iterable[str]) -> None:
        paths = [(name, self._path(name)) for name in names]
        errors: list[tuple[OSError, str | None]] = []
        for name, path in paths:
            try:
                self._calls.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                errors.append((error, name))
        try:
            sync_folder(self._calls, self.url)
        except FileNotFoundError:  # no folder, no objects
            pass
        except OSError as error:
            errors.append((error, None))
        if errors:
            first, about = errors[0]
            raise store_error(first, "delete", self.url, about, writes=True) from first

    def open_uploads(self) -> list[Entry]:
        return []

    def abort_uploads(self, names: Iterable[str]) -> None:
        """Does nothing: an upload that its process left is an ordinary file, and :meth:`delete` removes it."""

    def now(self) -> float:
        path = self._path(f".claim.{new_token()}")
        try:
            fd = self._calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in _NO_SCRATCH:
                return time.time()
            raise store_error(error, "now", self.url) from error
        try:
            with self._errors("now"):
                return os.fstat(fd).st_mtime
        finally:
            with self._errors("now"):
                self._calls.close(fd)
                self._calls.unlink(path)

    def make_durable(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path(name)
            with self._errors("make_durable", name):
                fd = self._calls.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, 0)
                try:
                    self._calls.fsync(fd)
                finally:
                    self._calls.close(fd)
        with self._errors("make_durable"):
            sync_folder(self._calls, self.url)

    def _path(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{check_name(name)}"

    def _temp(self, name: str) -> str:
        beside = f"{name}.{new_token()}"
        # A name near the limit of 255 bytes leaves no room for the token.
        return self._path(beside if len(os.fsencode(beside)) <= 255 else f".claim.{new_token()}")

    def _discard(self, temp: str) -> None:
        # After a rename it is gone; where it cannot be removed, what happened before is what counts, and prune sweeps.
        with contextlib.suppress(OSError):
            self._calls.unlink(temp)

    @contextlib.contextmanager
    def _open(self, operation: str, name: str) -> Iterator[int]:
        """A descriptor to read the object."""
        path = self._path(name)
        with self._errors(operation, name):
            # O_NONBLOCK: a FIFO of that name must not hang the load; it means nothing to a file.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._no_file(operation, name)
            yield fd
        finally:
            os.close(fd)

    def _no_file(self, operation: str, name: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(
            f"{operation} failed for {name!r} in {self.url}: what has this name is not a file.",
            operation=operation,
            path=self.url,
            key=name,
        )

    @contextlib.contextmanager
    def _errors(
        self, operation: str, name: str | None = None, *, writes: bool = False, applied: bool = False
    ) -> Iterator[None]:
        """Turns the system's errors into ours."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise store_error(error, operation, self.url, name, writes=writes, applied=applied) from error
