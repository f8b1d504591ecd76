"""The smallest store that keeps the whole contract: a dict and a lock."""

from __future__ import annotations

import errno
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from dcp_storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, check_name, is_name, total

__all__ = ["DictStore"]


@dataclass
class _Object:
    body: bytes
    modified: float
    origin: object = None
    """The upload that made it, None for a put or a create."""


@dataclass
class _Objects:
    """What several :class:`DictStore` share: a whole "bucket", with its lock and its clock.

    Attributes:
        clock: seconds since the epoch; the store's own clock and the source of every modified time.
    """

    clock: Callable[[], float] = time.time
    lock: threading.RLock = field(default_factory=threading.RLock)
    held: dict[tuple[str, str], _Object] = field(default_factory=dict)
    uploads: list[_DictUpload] = field(default_factory=list)
    ahead: float = 0.0

    def now(self) -> float:
        """Seconds since the epoch by this store's clock."""
        return self.clock() + self.ahead

    def advance(self, seconds: float) -> None:
        """Puts the store's clock forward; objects that are there grow older by so much."""
        with self.lock:
            self.ahead += seconds


class DictStore(Store):
    """A store in the memory of this process. Atomic, uploads in parallel, open uploads listed.

    Args:
        objects: what to keep the objects in; stores that share one see each other's objects. A new one if None.
        folder: the folder in ``objects``; ``"a/b"`` is a sub-folder of ``"a"``.
        min_part_size: as in :class:`~dcp_storage.store.Store`; enforced on completion.
        max_parts: as in :class:`~dcp_storage.store.Store`; enforced.

    Attributes:
        objects: the shared objects; ``store.objects.advance(seconds)`` moves the clock.
    """

    Objects = _Objects
    parallel_parts = True

    def __init__(
        self,
        objects: _Objects | None = None,
        *,
        folder: str = "folder",
        min_part_size: int = 1,
        max_parts: int = 10_000,
    ) -> None:
        self.objects = _Objects() if objects is None else objects
        self.folder = folder
        self.url = f"dict://{folder}"
        self.min_part_size = min_part_size
        self.max_parts = max_parts

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.ATOMIC

    def make_folder(self) -> None:
        """Nothing to do: folders are only the first halves of keys."""

    def entries(self) -> list[Entry]:
        with self.objects.lock:
            return [
                Entry(name, len(held.body), held.modified)
                for (folder, name), held in self.objects.held.items()
                if folder == self.folder
            ]

    def folders(self) -> list[str]:
        prefix = f"{self.folder}/"
        with self.objects.lock:
            below = [folder for folder, _ in self.objects.held if folder.startswith(prefix)]
        names = (folder.removeprefix(prefix).partition("/")[0] for folder in below)
        return [name for name in dict.fromkeys(names) if is_name(name)]

    def size(self, name: str) -> int:
        return len(self._find("size", name).body)

    def read(self, name: str, *, limit: int) -> bytes:
        body = self._find("read", name).body
        if len(body) > limit:
            raise UntrustedDataError(
                f"{name} has {len(body)} bytes, more than the {limit} allowed.", name=name, key=name, path=self.url
            )
        return body

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        body = self._find("read_into", name).body
        wanted = offset + total(buffers)
        if wanted > len(body):
            raise ObjectTooShortError(
                f"{name} ends at byte {len(body)}, {wanted} were wanted.",
                wanted=wanted,
                found=len(body),
                operation="read_into",
                key=name,
                path=self.url,
            )
        for buffer in buffers:
            buffer[:] = body[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        check_name(name)
        body = _joined(self, "put", name, buffers, crc32)
        with self.objects.lock:
            self._keep(name, body)

    def create(self, name: str, data: bytes) -> None:
        check_name(name)
        with self.objects.lock:
            if (self.folder, name) in self.objects.held:
                raise ObjectExistsError(f"{name} exists already.", operation="create", key=name, path=self.url)
            self._keep(name, bytes(data))

    def upload(self, name: str) -> Upload:
        check_name(name)
        begun = _DictUpload(self, name)
        with self.objects.lock:
            self.objects.uploads.append(begun)
        return begun

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            check_name(name)
            with self.objects.lock:
                self.objects.held.pop((self.folder, name), None)

    def open_uploads(self) -> list[Entry]:
        with self.objects.lock:
            return [Entry(each.name, 0, each.begun) for each in self._uploads()]

    def abort_uploads(self, names: Iterable[str]) -> None:
        wanted = {check_name(name) for name in names}
        with self.objects.lock:
            for each in self._uploads():
                if each.name in wanted:
                    self.objects.uploads.remove(each)

    def now(self) -> float:
        return self.objects.now()

    def _uploads(self) -> list[_DictUpload]:
        return [each for each in self.objects.uploads if each.store.folder == self.folder]

    def _find(self, operation: str, name: str) -> _Object:
        check_name(name)
        with self.objects.lock:
            held = self.objects.held.get((self.folder, name))
        if held is None:
            raise ObjectNotFoundError(
                f"There is no {name} in {self.url}.", operation=operation, key=name, path=self.url
            )
        return held

    def _keep(self, name: str, body: bytes, origin: object = None) -> None:
        self.objects.held[self.folder, name] = _Object(body, self.objects.now(), origin)


class _DictUpload(Upload):
    def __init__(self, store: DictStore, name: str) -> None:
        self.store = store
        self.name = name
        self.begun = store.now()
        self.parts: dict[int, tuple[int, bytes]] = {}
        self.completed = False

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        body = _joined(self.store, "write_part", self.name, buffers, crc32)
        if not body or not 1 <= number <= self.store.max_parts:
            self._refuse("write_part", errno.EINVAL, f"part {number} of {len(body)} bytes is not allowed")
        with self.store.objects.lock:
            self._must_be_open("write_part")
            self.parts[number] = offset, body

    def complete(self) -> None:
        with self.store.objects.lock:
            if self.completed:
                return
            self._must_be_open("complete")
            expected = 0
            for place, number in enumerate(sorted(self.parts), start=1):
                offset, body = self.parts[number]
                if number != place or offset != expected:
                    self._refuse("complete", errno.EINVAL, f"part {number} at byte {offset} leaves a gap or overlaps")
                if number < len(self.parts) and len(body) < self.store.min_part_size:
                    self._refuse("complete", errno.EINVAL, f"part {number} has only {len(body)} bytes")
                expected += len(body)
            self.store._keep(self.name, b"".join(self.parts[number][1] for number in sorted(self.parts)), self)
            self.store.objects.uploads.remove(self)
            self.completed = True

    def abort(self) -> None:
        objects = self.store.objects
        place = self.store.folder, self.name
        with objects.lock:
            if self in objects.uploads:
                objects.uploads.remove(self)
            held = objects.held.get(place)
            if held is not None and held.origin is self:
                del objects.held[place]
            self.completed = False

    def _must_be_open(self, operation: str) -> None:
        if self not in self.store.objects.uploads:
            self._refuse(operation, errno.ENOENT, "the upload was ended")

    def _refuse(self, operation: str, number: int, reason: str) -> NoReturn:
        raise StoreError(
            f"Upload of {self.name}: {reason}.", operation=operation, errno=number, key=self.name, path=self.store.url
        )


def _joined(store: DictStore, operation: str, name: str, buffers: Buffers, crc32: int | None) -> bytes:
    body = b"".join(buffers)
    if crc32 is not None and crc32 != zlib.crc32(body):
        raise StoreError(
            f"The bytes of {name} do not have the CRC-32 {crc32:#010x}.",
            operation=operation,
            errno=errno.EBADMSG,
            key=name,
            path=store.url,
        )
    return body
