"""``memory://``: the objects of fsspec's in-memory filesystem, which live in one process."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFile

from dcp_storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, check_name, is_name, total
from dcp_storage.stores.parts import Parts

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """A folder of fsspec's ``MemoryFileSystem``; whoever uses that sees the same objects.

    It works on the filesystem's dict directly: one dict operation is atomic, which fsspec's own
    exists-then-write is not. Objects are made whole and then put into the dict; they are never changed in it.

    Args:
        path: the folder, with or without a leading slash.
        fs: the filesystem; fsspec's shared one by default.
    """

    parallel_parts = True
    remote = False
    max_parts = 1 << 31

    def __init__(self, path: str, *, fs: Any = None) -> None:
        self._fs = fsspec.filesystem("memory") if fs is None else fs
        self._folder = "/" + path.strip("/")
        self.url = f"memory:/{self._folder}"

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.ATOMIC

    @property
    def _objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = self._fs.store
        return objects

    def make_folder(self) -> None:
        above = self._folder
        while above:
            if above in self._objects:
                raise self._no_folder("make_folder", above)
            above = above.rpartition("/")[0]
        self._fs.makedirs(self._folder, exist_ok=True)

    def entries(self) -> list[Entry]:
        prefix = f"{self._folder}/"
        found = []
        # A copy is one step; going through the items is not, and another thread may add one meanwhile.
        for key, file in self._objects.copy().items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and "/" not in name:
                found.append(Entry(name, len(file.getvalue()), file.modified.timestamp()))
        if not found and self._folder in self._objects:
            raise self._no_folder("entries", self._folder)
        return found

    def folders(self) -> list[str]:
        prefix = f"{self._folder.rstrip('/')}/"
        paths = [key for key in self._objects.copy() if key.startswith(prefix)]
        if not paths and self._folder in self._objects:
            raise self._no_folder("folders", self._folder)
        inside = [path.removeprefix(prefix).partition("/") for path in paths]
        names = [head for head, slash, _ in inside if slash]
        names += [p.removeprefix(prefix).partition("/")[0] for p in tuple(self._fs.pseudo_dirs) if p.startswith(prefix)]
        return [name for name in dict.fromkeys(names) if is_name(name)]

    def size(self, name: str) -> int:
        return len(self._body("size", name))

    def read(self, name: str, *, limit: int) -> bytes:
        body = self._body("read", name)
        if len(body) > limit:
            raise UntrustedDataError(
                f"{name!r} in {self.url} is refused: it has {len(body)} bytes, the limit is {limit}.",
                name=name,
                path=self.url,
                key=name,
            )
        return body

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        body = memoryview(self._body("read_into", name))
        wanted = offset + total(buffers)
        if wanted > len(body) and wanted > offset:
            raise ObjectTooShortError(
                f"{name!r} in {self.url} ends at byte {len(body)}; bytes up to {wanted} were wanted.",
                wanted=wanted,
                found=len(body),
                operation="read_into",
                path=self.url,
                key=name,
            )
        for buffer in buffers:
            buffer[:] = body[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        key = self._key(name)
        self._objects[key] = MemoryFile(self._fs, key, b"".join(buffers))

    def create(self, name: str, data: bytes) -> None:
        key = self._key(name)
        made = MemoryFile(self._fs, key, bytes(data))
        if self._objects.setdefault(key, made) is not made:
            raise ObjectExistsError(
                f"create failed for {name!r} in {self.url}: the name is taken.",
                operation="create",
                path=self.url,
                key=name,
            )

    def upload(self, name: str) -> Upload:
        return _MemoryUpload(self._fs, self._key(name), self.url, name)

    def delete(self, names: Iterable[str]) -> None:
        for key in [self._key(name) for name in names]:
            self._objects.pop(key, None)

    def open_uploads(self) -> list[Entry]:
        return []

    def abort_uploads(self, names: Iterable[str]) -> None:
        """Does nothing: an upload lives only in the object that its writer holds."""

    def now(self) -> float:
        return time.time()

    def _key(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{check_name(name)}"

    def _body(self, operation: str, name: str) -> bytes:
        file = self._objects.get(self._key(name))
        if file is None:
            raise ObjectNotFoundError(
                f"{operation} failed for {name!r} in {self.url}: there is no such object.",
                operation=operation,
                path=self.url,
                key=name,
            )
        body: bytes = file.getvalue()  # the buffer itself, not a copy, as nobody writes to it any more
        return body

    def _no_folder(self, operation: str, path: str) -> StoreError:
        return StoreError(
            f"{operation} failed for {self.url}: memory:/{path} is a file, not a folder.",
            operation=operation,
            errno=errno.ENOTDIR,
            path=self.url,
        )


class _MemoryUpload(Upload):
    """Parts in a dict, joined and published by :meth:`complete`."""

    def __init__(self, fs: Any, key: str, url: str, name: str) -> None:
        self._fs = fs
        self._key = key
        self._url = url
        self._name = name
        self._parts = Parts()
        self._bodies: dict[int, bytes] = {}
        self._made: MemoryFile | None = None
        self._aborted = False

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        if self._made is not None or self._aborted:
            raise self._ended("write_part")
        self._bodies[number] = b"".join(buffers)
        self._parts.add(number, offset, total(buffers))

    def complete(self) -> None:
        if self._aborted:
            raise self._ended("complete")
        if self._made is None:
            self._parts.size(operation="complete", url=self._url, name=self._name)
            body = b"".join(self._bodies[number] for number in sorted(self._bodies))
            self._bodies.clear()
            self._made = self._fs.store[self._key] = MemoryFile(self._fs, self._key, body)

    def abort(self) -> None:
        self._aborted = True
        self._bodies.clear()
        if self._made is not None and self._fs.store.get(self._key) is self._made:
            self._fs.store.pop(self._key, None)

    def _ended(self, operation: str) -> StoreError:
        return StoreError(
            f"{operation} failed for {self._name!r} in {self._url}: this upload has ended; begin it again.",
            operation=operation,
            errno=errno.EINVAL,
            path=self._url,
            key=self._name,
        )
