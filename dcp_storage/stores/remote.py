"""Any fsspec filesystem, by its public blocking interface and with none of its conveniences.

What fsspec does by itself and what is avoided here: ``exists()`` answers False on any error; ``rm()``, ``cat()``,
``glob()`` expand patterns; listings come from caches; a file object publishes what it has when it is closed, also
after an exception (see :mod:`dcp_storage.stores.remote_files`).
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from dcp_storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.names import new_token
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, check_name, is_name, total
from dcp_storage.stores.remote_files import Connection, RemoteUpload, fresh_info, write_file
from dcp_storage.stores.translate import store_error, unmasked

__all__ = ["FsspecStore"]

# Here a path's first part is a bucket (a container), which fsspec's makedirs would create; deeper folders are not real.
_BUCKETS = frozenset({"abfs", "abfss", "az", "gcs", "gs", "oci", "ocilake", "oss", "s3", "s3a", "tos", "tosfs"})
_WEB = frozenset({"http", "https"})
_SLACK = 1 << 16
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "created")


class FsspecStore(Store):
    """A folder of an fsspec filesystem that has no store of its own here.

    What it cannot promise: that a create is atomic (nobody knows), that bytes are durable beyond what the
    filesystem does by itself, and, where files grow in place (sftp, smb, a mounted disk behind ``dir://``), that an
    upload cannot be seen while it grows.

    ``http://`` and ``https://`` can only be read: a page of links may leave out any name, so nothing is listed there.

    Args:
        fs: the filesystem; used by several threads at once.
        path: the folder, as that filesystem names it.
        url: the folder for messages, without secrets.
    """

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self.url = url
        self._fs = fs
        self._folder = path.rstrip("/") or path[:1]
        # dir:// only puts a prefix before every path: what the filesystem can do is asked of the one behind it.
        base, inside = fs, self._folder
        while isinstance(base, DirFileSystem):
            base, inside = base.fs, f"{base.path}/{inside}" if base.path else inside
        protocols = {base.protocol} if isinstance(base.protocol, str) else set(base.protocol)
        self._bucket = inside.lstrip("/").partition("/")[0] if protocols & _BUCKETS else None
        self._base = base
        self._web = bool(protocols & _WEB)
        self._connection = Connection.of(base)
        self.remote = not isinstance(base, LocalFileSystem)
        self._top = None if inside.startswith("/") else inside.partition("/")[0]
        kind = type(base)
        self._pipes = getattr(base.pipe_file, "__func__", None) is not AbstractFileSystem.pipe_file
        self._renames = self._bucket is None and kind.mv is not AbstractFileSystem.mv
        self._makes_folders = kind.makedirs is not AbstractFileSystem.makedirs or (
            isinstance(base, AsyncFileSystem) and kind._makedirs is not AsyncFileSystem._makedirs
        )
        self._refreshes = "refresh" in inspect.signature(base.ls).parameters

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.UNKNOWN

    def make_folder(self) -> None:
        if self._bucket is not None:
            return
        with self._errors("make_folder", writes=True):
            try:
                if self._makes_folders:
                    if self._top:  # no root: the first part may be a bucket, which makedirs would create
                        self._base.info(self._top)
                    self._fs.makedirs(self._folder, exist_ok=True)
                info = fresh_info(self._fs, self._folder)
            except (FileExistsError, NotADirectoryError) as error:
                raise self._no_folder("make_folder") from error
            if info is not None and info["type"] != "directory":
                raise self._no_folder("make_folder")

    def entries(self) -> list[Entry]:
        return [
            Entry(path, self.size(path) if info["size"] is None else int(info["size"]), _modified(info))
            for path, info in self._list("entries")
            if "/" not in path and info["type"] == "file" and not info["name"].endswith("/")
        ]

    def folders(self) -> list[str]:
        found = (
            path.partition("/")[0]  # some list what is deeper too
            for path, info in self._list("folders")
            if "/" in path or info["type"] == "directory" or info["name"].endswith("/")
        )
        return [name for name in dict.fromkeys(found) if is_name(name)]

    def _list(self, operation: str) -> list[tuple[str, dict[str, Any]]]:
        """What lies in the folder, by its path in it."""
        if self._web:  # EACCES: the caller probes for the names that it knows
            raise self._no_web(operation, errno.EACCES, "a web server has no listing that can be trusted")
        with self._errors(operation):
            self._fs.invalidate_cache(self._folder)
            try:
                listing = self._fs.ls(self._folder, detail=True, **({"refresh": True} if self._refreshes else {}))
            except FileNotFoundError as error:
                if unmasked(error) is not error:
                    raise
                self._check_bucket()
                return []
            if not listing:
                self._check_empty()
            found, is_file = [], False
            folder = self._folder.strip("/")
            for info in listing:
                path = self._fs._strip_protocol(info["name"]).strip("/")
                if path == folder:
                    is_file = is_file or (info["type"] == "file" and not info["name"].endswith("/"))
                elif not folder or path.startswith(f"{folder}/"):
                    found.append((path[len(folder) + bool(folder) :], info))
            if is_file and not found:
                raise self._no_folder(operation)
        return found

    def size(self, name: str) -> int:
        size = self._info("size", name)["size"]
        if size is None:
            raise StoreError(
                f"size failed for {name!r} in {self.url}: the store does not say how large it is.",
                operation="size",
                errno=errno.EOPNOTSUPP,
                path=self.url,
                key=name,
            )
        return int(size)

    def read(self, name: str, *, limit: int) -> bytes:
        path, data, size = self._path(name), b"", self._info("read", name)["size"]
        if size != 0:  # a range of an empty object is an error on object stores
            size = size or 0
            while size <= limit:
                # One request for all of it and a little more, so that an object that is being replaced is read whole.
                end = min(limit, size + _SLACK) + 1
                with self._errors("read", name):
                    data = bytes(self._fs.cat_file(path, start=0, end=end))
                size = len(data)
                if size < end:
                    break
        if size > limit:
            raise UntrustedDataError(
                f"{name!r} in {self.url} is refused: it has {size} bytes or more, the limit is {limit}.",
                name=name,
                path=self.url,
                key=name,
            )
        return data

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        path, wanted = self._path(name), total(buffers)
        data = b""
        if wanted == 0:
            self._info("read_into", name)
            return
        try:
            with self._errors("read_into", name):
                self._fs.invalidate_cache(self._folder)
                self._fs.invalidate_cache(path)
                data = self._fs.cat_file(path, start=offset, end=offset + wanted)
        except ObjectNotFoundError:
            raise
        except StoreError as error:
            # Asking for bytes behind the end is an error of its own on some stores: see whether it was that.
            if error.transient or self.size(name) >= offset + wanted:
                raise
        if len(data) > wanted:
            data = data[offset : offset + wanted]  # a web server may send the whole of what it was asked a part of
        if len(data) < wanted:
            found = self.size(name)
            raise ObjectTooShortError(
                f"{name!r} in {self.url} ends at byte {found}; bytes up to {offset + wanted} were wanted.",
                wanted=offset + wanted,
                found=found,
                operation="read_into",
                path=self.url,
                key=name,
            )
        position, view = 0, memoryview(data)
        for buffer in buffers:
            buffer[:] = view[position : position + buffer.nbytes]
            position += buffer.nbytes

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        path = self._path(name)
        with self._errors("put", name, writes=True):
            if self._renames:
                self._put_by_rename(name, buffers)
            elif self._pipes:
                self._fs.pipe_file(path, b"".join(buffers))
            else:
                write_file(self._fs, path, buffers)

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._errors("create", name, writes=True):
            info = fresh_info(self._fs, path)
            if info is not None and info["type"] != "directory":  # adlfs takes "?" for the folder; a real one refuses
                raise self._taken(name)
            if not self._pipes:
                try:
                    write_file(self._fs, path, [memoryview(data)], mode="xb")
                except (NotImplementedError, TypeError, ValueError):  # no such mode; UNKNOWN promises no more
                    write_file(self._fs, path, [memoryview(data)])
                return
            try:
                self._fs.pipe_file(path, data, mode="create")
            except (NotImplementedError, TypeError, ValueError):
                if fresh_info(self._fs, path) is not None:
                    raise self._taken(name) from None
                self._fs.pipe_file(path, data)

    def upload(self, name: str) -> Upload:
        path = self._path(name)
        self._check_writable("upload", name)
        return RemoteUpload(self._fs, path, self.url, name, self._connection)

    def delete(self, names: Iterable[str]) -> None:
        errors: list[StoreError] = []
        for name, path in [(name, self._path(name)) for name in names]:
            try:
                with self._errors("delete", name, writes=True):
                    self._fs.rm_file(path)  # rm would expand patterns
            except ObjectNotFoundError:
                continue
            except StoreError as error:
                if not (error.transient or error.errno) and self._is_missing(name):
                    continue  # ftp has one number for all refusals
                errors.append(error)
        if errors:
            raise errors[0]

    def open_uploads(self) -> list[Entry]:
        return []

    def abort_uploads(self, names: Iterable[str]) -> None:
        """Does nothing: fsspec has no way to name an upload that is not its own."""

    def now(self) -> float:
        name = f".claim.{new_token()}"
        try:
            self.put(name, [memoryview(b"now")])
        except StoreError as error:
            if error.errno in (errno.EACCES, errno.EROFS, errno.ENOENT):
                return time.time()  # a folder that can only be read has no clock to ask
            raise
        try:
            modified = _modified(self._info("now", name))
        finally:
            self.delete([name])
        return time.time() if modified is None else modified

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._folder.rstrip('/')}/{name}" if self._folder else name

    def _put_by_rename(self, name: str, buffers: Buffers) -> None:
        # Files grow in place here, so replacing one takes a second file and a rename.
        beside = f"{name}.{new_token()}"
        temp = self._path(beside if len(beside.encode()) <= 255 else f".claim.{new_token()}")
        try:
            write_file(self._fs, temp, buffers)
            self._fs.mv(temp, self._path(name))
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell; prune sweeps what is left
                self._fs.rm_file(temp)
            raise

    def _info(self, operation: str, name: str) -> dict[str, Any]:
        path = self._path(name)
        with self._errors(operation, name):
            info = fresh_info(self._fs, path)
            if info is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if info["type"] == "directory":
            raise ObjectNotFoundError(
                f"{operation} failed for {name!r} in {self.url}: what has this name is a folder.",
                operation=operation,
                path=self.url,
                key=name,
            )
        return info

    def _check_bucket(self) -> None:
        """Raises where not only the folder but its bucket is missing."""
        if self._bucket is not None:
            with contextlib.suppress(PermissionError):  # many may use a bucket that they may not look at
                self._base.info(self._bucket)

    def _is_missing(self, name: str) -> bool:
        with self._errors("delete", name):
            return fresh_info(self._fs, self._path(name)) is None

    def _check_empty(self) -> None:
        """Raises where an empty listing is one that failed: fsspec's ftp makes nothing of a refusal or a cut."""
        held = getattr(self._base, "dircache", None)
        if self._base.protocol == "ftp" and held is not None and held.use_listings_cache:
            folder = self._fs._strip_protocol(self._folder)
            if folder not in held and self._fs.info(self._folder)["type"] == "directory":
                raise ConnectionError(f"the listing of {folder!r} was refused or cut")

    def _check_writable(self, operation: str, name: str | None) -> None:
        if self._web:
            raise self._no_web(operation, errno.EROFS, "http:// can only be read; save to another place", name)

    def _no_web(self, operation: str, number: int, why: str, name: str | None = None) -> StoreError:
        about = self.url if name is None else f"{name!r} in {self.url}"
        return StoreError(
            f"{operation} failed for {about}: {why}.", operation=operation, errno=number, path=self.url, key=name
        )

    def _taken(self, name: str) -> ObjectExistsError:
        return ObjectExistsError(
            f"create failed for {name!r} in {self.url}: the name is taken.", operation="create", path=self.url, key=name
        )

    def _no_folder(self, operation: str) -> StoreError:
        return StoreError(
            f"{operation} failed for {self.url}: the path, or a part of it, is a file.",
            operation=operation,
            errno=errno.ENOTDIR,
            path=self.url,
        )

    @contextlib.contextmanager
    def _errors(self, operation: str, name: str | None = None, *, writes: bool = False) -> Iterator[None]:
        """Waits for a turn, and makes whatever the filesystem raises one of our errors."""
        if writes:
            self._check_writable(operation, name)
        try:
            with self._connection.turn():
                yield
        except Exception as error:
            raise store_error(error, operation, self.url, name, writes=writes) from error


def _modified(info: dict[str, Any]) -> float | None:
    """Seconds since the epoch, from whichever field this filesystem has."""
    for field in _MODIFIED:
        value = info.get(field)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None
