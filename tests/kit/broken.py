"""Stores with one fault each, for the conformance suite to catch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from urllib.parse import quote, unquote

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooShortError, StoreError
from dcp_storage.store import Buffers, Entry, Store, Upload, WrappedStore, check_name, total
from dcp_storage.testing.dictstore import DictStore

__all__ = [
    "AbortForgetsToLook",
    "AbortsAllUploads",
    "AppendsParts",
    "Caches",
    "CompletesOnce",
    "CreatesInPlace",
    "Decodes",
    "DeleteStops",
    "FillsFirstBufferOnly",
    "FolderCache",
    "FoldersByPrefix",
    "FoldersQuoted",
    "FoldersTwice",
    "Globs",
    "IgnoresLimit",
    "KeepsBuffers",
    "LeavesScratch",
    "LeavesTheFolder",
    "LeavesUploadOpen",
    "ListsNoUploads",
    "ListsOnePage",
    "ListsSubfolders",
    "LooksThenWrites",
    "LosesLastPart",
    "MissingIsEmpty",
    "NamelessErrors",
    "NotFresh",
    "OtherClock",
    "PublishesOnAbort",
    "PutsInPlace",
    "PutsOnce",
    "RefusesCrc",
    "RefusesEmpty",
    "RetriesNotFound",
    "SharesState",
    "ShortReads",
    "TakesFewBuffers",
    "TakesOneBuffer",
    "VisibleParts",
]


class PlainUpload(Upload):
    """An upload that hands on; the base of the broken ones."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.inner = store.upload(name)

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.write_part(number, offset, buffers, crc32=crc32)

    def complete(self) -> None:
        self.inner.complete()

    def abort(self) -> None:
        self.inner.abort()


class WithUpload(WrappedStore):
    """A store with another kind of upload."""

    kind: type[PlainUpload] = PlainUpload

    def upload(self, name: str) -> Upload:
        return self.kind(self.inner, name)


class PublishesOnAbort(WithUpload):
    class _Kind(PlainUpload):
        def abort(self) -> None:
            self.inner.complete()

    kind = _Kind


class LeavesUploadOpen(WithUpload):
    class _Kind(PlainUpload):
        def abort(self) -> None:
            pass

    kind = _Kind


class KeepsBuffers(WithUpload):
    class _Kind(PlainUpload):
        kept: tuple[int, int, Buffers] | None = None

        def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
            self.kept = number, offset, buffers

        def complete(self) -> None:
            assert self.kept is not None
            self.inner.write_part(*self.kept)
            self.inner.complete()

    kind = _Kind


class AppendsParts(WithUpload):
    """Parts in the order in which they came, whatever their numbers."""

    class _Kind(PlainUpload):
        def __init__(self, store: Store, name: str) -> None:
            super().__init__(store, name)
            self.body = b""

        def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
            self.body += b"".join(buffers)

        def complete(self) -> None:
            self.store.put(self.name, [memoryview(self.body)])
            self.inner.abort()

    kind = _Kind


class LosesLastPart(WithUpload):
    class _Kind(PlainUpload):
        def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
            if number < 3:
                super().write_part(number, offset, buffers)

    kind = _Kind


class VisibleParts(WithUpload):
    class _Kind(PlainUpload):
        def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
            super().write_part(number, offset, buffers)
            self.store.put(self.name, buffers)

    kind = _Kind


class CompletesOnce(WithUpload):
    class _Kind(PlainUpload):
        done = False

        def complete(self) -> None:
            if self.done:
                raise StoreError("no such upload", operation="complete", key=self.name)
            self.inner.complete()
            self.done = True

    kind = _Kind


class AbortForgetsToLook(WithUpload):
    """An abort after complete finds no upload and is content."""

    class _Kind(PlainUpload):
        done = False

        def complete(self) -> None:
            self.inner.complete()
            self.done = True

        def abort(self) -> None:
            if not self.done:
                self.inner.abort()

    kind = _Kind


class RefusesCrc(WrappedStore):
    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.put(name, buffers, crc32=None if crc32 is None else crc32 ^ 1)


class ListsNoUploads(WrappedStore):
    def open_uploads(self) -> list[Entry]:
        return []


class AbortsAllUploads(WrappedStore):
    def abort_uploads(self, names: Iterable[str]) -> None:
        self.inner.abort_uploads(self.inner_names())

    def inner_names(self) -> list[str]:
        return [entry.name for entry in self.inner.open_uploads()]


class ListsSubfolders(WrappedStore):
    """A listing by prefix only."""

    inner: DictStore

    def entries(self) -> list[Entry]:
        held = self.inner.objects.held.items()
        return [Entry(n, len(o.body), o.modified) for (f, n), o in held if f.startswith(self.inner.folder)]


class FoldersTwice(WrappedStore):
    """Names a folder for every object in it."""

    inner: DictStore

    def folders(self) -> list[str]:
        below = f"{self.inner.folder}/"
        return [f.removeprefix(below) for f, _ in self.inner.objects.held if f.startswith(below)]


class FoldersQuoted(WrappedStore):
    """Names folders as they stand in a URL."""

    def folders(self) -> list[str]:
        return [quote(name) for name in self.inner.folders()]


class FoldersByPrefix(WrappedStore):
    """Takes folders beside this one for folders in it."""

    inner: DictStore

    def folders(self) -> list[str]:
        here = self.inner.folder
        found = {f[len(here) :].strip("/") for f, _ in self.inner.objects.held if f.startswith(here) and f != here}
        return sorted(found)


class FolderCache(WrappedStore):
    """Lists the folders once."""

    known: list[str] | None = None

    def folders(self) -> list[str]:
        if self.known is None:
            self.known = self.inner.folders()
        return list(self.known)


class ListsOnePage(WrappedStore):
    def entries(self) -> list[Entry]:
        return self.inner.entries()[:30]


class ShortReads(WrappedStore):
    """Fills what there is and says nothing."""

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        body = self.inner.read(name, limit=1 << 30)[offset:]
        for buffer in buffers:
            part, body = body[: buffer.nbytes], body[buffer.nbytes :]
            buffer[: len(part)] = part


class FillsFirstBufferOnly(WrappedStore):
    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        self.inner.read_into(name, offset, [])
        if buffers:
            self.inner.read_into(name, offset, buffers[:1])


class TakesFewBuffers(WrappedStore):
    """Like writev with more than IOV_MAX pieces."""

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.put(name, buffers[:1024], crc32=crc32)


class TakesOneBuffer(WrappedStore):
    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.put(name, buffers[:1], crc32=crc32)


class IgnoresLimit(WrappedStore):
    def read(self, name: str, *, limit: int) -> bytes:
        return self.inner.read(name, limit=1 << 30)


class MissingIsEmpty(WrappedStore):
    def read(self, name: str, *, limit: int) -> bytes:
        try:
            return self.inner.read(name, limit=limit)
        except ObjectNotFoundError:
            return b""


class RefusesEmpty(WrappedStore):
    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        if not total(buffers):
            raise ObjectTooShortError("416", operation="read_into", key=name, wanted=offset)
        self.inner.read_into(name, offset, buffers)


class PutsOnce(WrappedStore):
    """Silently keeps what was put first."""

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        if name not in [entry.name for entry in self.inner.entries()]:
            self.inner.put(name, buffers, crc32=crc32)


class PutsInPlace(WrappedStore):
    """Truncates, writes, and is seen in between."""

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        body = b"".join(buffers)
        self.inner.put(name, [memoryview(body)[: len(body) // 2]])
        time.sleep(0.005)
        self.inner.put(name, [memoryview(body)])


class CreatesInPlace(WrappedStore):
    def create(self, name: str, data: bytes) -> None:
        self.inner.create(name, b"")
        time.sleep(0.005)
        self.inner.put(name, [memoryview(data)])


class LooksThenWrites(WrappedStore):
    """Exists-then-write, called atomic."""

    def create(self, name: str, data: bytes) -> None:
        if name in [entry.name for entry in self.inner.entries()]:
            raise ObjectExistsError("taken", operation="create", key=name)
        time.sleep(0.01)
        self.inner.put(name, [memoryview(data)])


class Caches(WrappedStore):
    """Remembers the first answer of size for each name."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.known: dict[str, int] = {}

    def size(self, name: str) -> int:
        if name not in self.known:
            self.known[name] = self.inner.size(name)
        return self.known[name]


class Decodes(WrappedStore):
    """Takes names for URLs."""

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.put(unquote(name).replace("/", "_"), buffers, crc32=crc32)

    def create(self, name: str, data: bytes) -> None:
        self.inner.create(unquote(name), data)


class Globs(WrappedStore):
    """Expands patterns when it deletes."""

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            pattern = re.escape(name).replace(r"\*", ".*").replace(r"\?", ".")
            self.inner.delete(e.name for e in self.inner.entries() if re.fullmatch(pattern, e.name))


class DeleteStops(WrappedStore):
    """Stops at the first name that is not there."""

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in [entry.name for entry in self.inner.entries()]:
                return
            self.inner.delete([name])


class LeavesTheFolder(WrappedStore):
    """Joins names to a path without a look at them."""

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if name in [entry.name for entry in self.inner.entries()]:
                self.inner.delete([name])


class OtherClock(WrappedStore):
    def now(self) -> float:
        return self.inner.now() + 60


class LeavesScratch(WrappedStore):
    def now(self) -> float:
        self.inner.put(".claim.scratch", [])
        return self.inner.now()


class NamelessErrors(WrappedStore):
    def size(self, name: str) -> int:
        try:
            return self.inner.size(check_name(name))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError("404", operation="size") from error


class RetriesNotFound(WrappedStore):
    def read(self, name: str, *, limit: int) -> bytes:
        try:
            return self.inner.read(name, limit=limit)
        except ObjectNotFoundError as error:
            error.transient = True
            raise


class SharesState(WrappedStore):
    """Keeps what a call works on in the object, so that threads mix it up."""

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.name = name
        time.sleep(0.001)
        self.inner.put(self.name, buffers, crc32=crc32)


class NotFresh(WrappedStore):
    def make_folder(self) -> None:
        self.inner.put(".keep", [])
