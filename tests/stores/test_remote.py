"""The general adapter on fsspec filesystems: the contract, folders, listings, reads, deletes, errors."""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
from azure.core.exceptions import ServiceRequestError, ServiceResponseTimeoutError
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dcp_storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Store
from dcp_storage.stores.remote import FsspecStore
from dcp_storage.testing.conformance import StoreConformance
from tests.stores.blob_kit import BlobFileSystem, OnBlobs, PipingFileSystem


def _local(root: Path) -> tuple[Any, str]:
    return LocalFileSystem(), str(root / "run")


def _dir(root: Path) -> tuple[Any, str]:
    fs, path = fsspec.core.url_to_fs(f"dir://run::file://{root}")
    return fs, path


class TestConformance(StoreConformance):
    @pytest.fixture(params=[_local, _dir])
    def opened(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Store]:
        fs, path = request.param(tmp_path)
        return lambda suffix: FsspecStore(fs, path + suffix, "test://run")

    @pytest.fixture
    def store(self, opened: Callable[[str], Store]) -> Store:
        made = opened("")
        made.make_folder()
        return made

    @pytest.fixture
    def second(self, opened: Callable[[str], Store]) -> Store:
        return opened("/")

    @pytest.fixture
    def below(self, opened: Callable[[str], Store]) -> Store:
        made = opened("/below")
        made.make_folder()
        return made

    @pytest.fixture
    def inside(self, opened: Callable[[str], Store]) -> Callable[[str], Store]:
        return lambda name: opened(f"/{name}")

    @pytest.fixture
    def beside(self, opened: Callable[[str], Store]) -> Store:
        made = opened("x")
        made.make_folder()
        return made


class TestObjectConformance(StoreConformance):
    @pytest.fixture(params=[BlobFileSystem, PipingFileSystem])
    def fs(self, request: pytest.FixtureRequest) -> BlobFileSystem:
        made: BlobFileSystem = request.param()
        return made

    @pytest.fixture
    def store(self, fs: BlobFileSystem) -> Store:
        return FsspecStore(fs, "bucket/run", "blob://bucket/run")

    @pytest.fixture
    def below(self, fs: BlobFileSystem) -> Store:
        return FsspecStore(fs, "bucket/run/below", "blob://bucket/run/below")

    @pytest.fixture
    def inside(self, fs: BlobFileSystem) -> Callable[[str], Store]:
        return lambda name: FsspecStore(fs, f"bucket/run/{name}", f"blob://bucket/run/{name}")

    @pytest.fixture
    def beside(self, fs: BlobFileSystem) -> Store:
        return FsspecStore(fs, "bucket/runx", "blob://bucket/runx")


class TestFolders(OnBlobs):
    def test_folders_are_made_where_they_are_real(self, tmp_path: Path) -> None:
        """Over a real folder, missing parents are made, and a file in the way is ENOTDIR."""
        FsspecStore(LocalFileSystem(), str(tmp_path / "a/b"), "test://x").make_folder()
        assert (tmp_path / "a/b").is_dir()
        fs, path = _dir(tmp_path)
        FsspecStore(fs, path, "test://x").make_folder()
        assert (tmp_path / "run").is_dir()
        (tmp_path / "file").write_bytes(b"")
        for inside in ("file", "file/x"):
            for call in (
                FsspecStore(LocalFileSystem(), str(tmp_path / inside), "test://x").make_folder,
                FsspecStore(LocalFileSystem(), str(tmp_path / inside), "test://x").entries,
                FsspecStore(LocalFileSystem(), str(tmp_path / inside), "test://x").folders,
            ):
                with pytest.raises(StoreError) as caught:
                    call()
                assert caught.value.errno == errno.ENOTDIR

    def test_a_bucket_is_never_made(self) -> None:
        """Neither a known object store nor an unknown filesystem without a root gets its first folder made."""
        made: list[str] = []

        class Bucketed(BlobFileSystem):
            def makedirs(self, path: str, exist_ok: bool = False) -> None:
                made.append(path)

        class Google(Bucketed):
            protocol = ("gs", "gcs")

        FsspecStore(Google(), "nosuch/run", "gs://nosuch/run").make_folder()
        with pytest.raises(ObjectNotFoundError):
            FsspecStore(Bucketed(), "nosuch/run", "blob://nosuch/run").make_folder()
        assert made == []

    def test_a_flat_path_that_is_an_object(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """An object of the folder's own name makes listing and making it ENOTDIR, unless objects are below it too."""
        blobs.blobs["bucket/run"] = b"1"
        for call in (store.make_folder, store.entries, store.folders):
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.errno == errno.ENOTDIR
        blobs.blobs["bucket/run/a"] = b"1"
        assert [entry.name for entry in store.entries()] == ["a"]


class TestListing(OnBlobs):
    def test_only_exact_children_are_listed(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """Deeper objects, sub-folders, folder markers and objects beside the folder are left out."""
        for key in ("run/a", "run/b[1]", "run/sub/c", "runx", "run/marker/"):
            blobs.blobs[f"bucket/{key}"] = b"12"
        assert {entry.name: entry.size for entry in store.entries()} == {"a": 2, "b[1]": 2}
        assert sorted(store.folders()) == ["marker", "sub"]

    def test_a_listing_that_fails_raises(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """Any failure but "not there" is an error, never an empty folder."""
        for error, transient in ((TimeoutError(), True), (PermissionError(), False), (RuntimeError("odd"), False)):
            for call in (store.entries, store.folders):
                blobs.faults["ls"] = [error]
                with pytest.raises(StoreError) as caught:
                    call()
                assert (caught.value.transient, caught.value.ambiguous) == (transient, False)
        assert (store.entries(), store.folders()) == ([], [])

    def test_a_missing_bucket_is_not_an_empty_folder(self) -> None:
        """On an object store a missing folder is empty, a missing bucket is not found, a hidden one is left alone."""

        class Google(BlobFileSystem):
            protocol = "gs"

            def info(self, path: str, **_: Any) -> dict[str, Any]:
                if path == "hidden":
                    raise PermissionError(path)
                return {"name": path, "size": 0, "type": "directory"} if path == "there" else super().info(path)

        assert FsspecStore(Google(), "there/run", "gs://there/run").entries() == []
        assert FsspecStore(Google(), "hidden/run", "gs://hidden/run").entries() == []
        with pytest.raises(ObjectNotFoundError):
            FsspecStore(Google(), "nosuch/run", "gs://nosuch/run").entries()

    def test_caches_are_passed_by(self) -> None:
        """Listings and looks drop what the filesystem remembers of the folder, and ask it to refresh if it can."""

        class Caching(BlobFileSystem):
            def __init__(self) -> None:
                super().__init__()
                self.cache: list[dict[str, Any]] | None = None
                self.refreshed: list[bool] = []

            def ls(self, path: str, detail: bool = True, refresh: bool = False) -> list[dict[str, Any]]:
                self.refreshed.append(refresh)
                self.cache = super().ls(path) if self.cache is None or refresh else self.cache
                return self.cache

            def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
                if self.cache is not None:
                    for entry in self.cache:
                        if entry["name"] == path:
                            return entry
                return super().info(path)

            def invalidate_cache(self, path: str | None = None) -> None:
                assert path in ("bucket/run", "bucket/run/a")
                self.cache = None

        fs = Caching()
        store = FsspecStore(fs, "bucket/run", "blob://bucket/run")
        fs.blobs["bucket/run/a"] = b"1"
        assert [entry.size for entry in store.entries()] == [1]
        fs.blobs["bucket/run/a"] = b"12"
        assert store.size("a") == 2
        fs.cache = [{"name": "bucket/run/old", "size": 9, "type": "file"}]
        assert [(entry.name, entry.size) for entry in store.entries()] == [("a", 2)]
        assert fs.refreshed == [True, True]

    def test_a_cache_that_cannot_be_refreshed_is_dropped(self) -> None:
        """Where listing has no such option, what the filesystem remembers of the folder is dropped before it lists."""

        class Remembering(BlobFileSystem):
            cache: list[dict[str, Any]] | None = None

            def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
                self.cache = super().ls(path) if self.cache is None else self.cache
                return self.cache

            def invalidate_cache(self, path: str | None = None) -> None:
                self.cache = None if path == "bucket/run" else self.cache

        fs = Remembering()
        fs.blobs["bucket/run/a"] = b"1"
        store = FsspecStore(fs, "bucket/run", "blob://bucket/run")
        assert [entry.name for entry in store.entries()] == ["a"]
        fs.blobs["bucket/run/b"] = b"1"
        assert [entry.name for entry in store.entries()] == ["a", "b"]

    @pytest.mark.parametrize(
        ("fields", "modified"),
        [
            ({"mtime": 12.5, "created": 1.0}, 12.5),
            ({"LastModified": datetime(2026, 1, 2, tzinfo=timezone.utc)}, 1767312000.0),
            ({"last_modified": datetime(2026, 1, 2)}, 1767312000.0),
            ({"updated": datetime(2026, 1, 2, 1, tzinfo=timezone(timedelta(hours=1)))}, 1767312000.0),
            ({"created": 7}, 7.0),
            ({"mtime": "yesterday"}, None),
            ({}, None),
        ],
    )
    def test_modified_times(
        self, store: FsspecStore, blobs: BlobFileSystem, fields: dict[str, Any], modified: float | None
    ) -> None:
        """The time comes from whichever field the filesystem has: seconds, or a datetime (UTC if it is silent)."""
        blobs.blobs["bucket/run/a"] = b""
        blobs.fields = fields
        assert [entry.modified for entry in store.entries()] == [modified]

    def test_now_is_the_filesystem_s_clock(
        self, store: FsspecStore, blobs: BlobFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The clock is read off a scratch object, which is removed; without times or the right to write, it is ours."""
        monkeypatch.setattr("time.time", lambda: 42.0)
        blobs.fields = {"mtime": 99.0}
        assert (store.now(), blobs.blobs) == (99.0, {})
        blobs.fields = {}
        assert (store.now(), blobs.blobs) == (42.0, {})
        blobs.faults["open wb"] = [PermissionError()]
        assert store.now() == 42.0
        blobs.faults["open wb"] = [TimeoutError()]
        with pytest.raises(StoreError):
            store.now()


class TestReading(OnBlobs):
    def test_an_object_above_the_limit_is_not_fetched(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """An object whose size is above the limit is refused by its size; one that grew, after the limit's bytes."""
        blobs.blobs["bucket/run/a"] = b"x" * 11
        with pytest.raises(UntrustedDataError):
            store.read("a", limit=10)
        assert "cat_file" not in blobs.log
        assert store.read("a", limit=11) == b"x" * 11
        blobs.fields["size"] = 3  # what it was when it was looked at
        with pytest.raises(UntrustedDataError):
            store.read("a", limit=10)

    def test_an_object_that_grew_is_read_whole(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """An object that was replaced by a much larger one since the look is read whole, not cut."""
        blobs.blobs["bucket/run/a"] = body = os.urandom(300_000)
        blobs.fields["size"] = 3
        assert store.read("a", limit=1 << 30) == body
        blobs.fields["size"] = None
        assert store.read("a", limit=1 << 30) == body

    def test_a_range_beyond_the_end_is_too_short(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """A range that ends, or begins, beyond the end is ObjectTooShortError, however the filesystem says it."""
        blobs.blobs["bucket/run/a"] = b"12345"
        for offset in (3, 5, 99):
            with pytest.raises(ObjectTooShortError) as caught:
                store.read_into("a", offset, [memoryview(bytearray(4))])
            assert (caught.value.wanted, caught.value.found) == (offset + 4, 5)

    def test_another_failure_of_a_range_is_itself(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """An error of a range that the object does hold is told as it is."""
        blobs.blobs["bucket/run/a"] = b"12345"
        for error, transient in ((ConnectionResetError(), True), (ValueError("odd"), False)):
            blobs.faults["cat_file"] = [error]
            with pytest.raises(StoreError) as caught:
                store.read_into("a", 0, [memoryview(bytearray(5))])
            assert (type(caught.value), caught.value.transient) == (StoreError, transient)
            assert caught.value.__cause__ is error

    def test_a_folder_is_no_object(self, tmp_path: Path) -> None:
        """What is a folder has no size."""
        (tmp_path / "sub").mkdir()
        with pytest.raises(ObjectNotFoundError):
            FsspecStore(LocalFileSystem(), str(tmp_path), "test://x").size("sub")


class TestDelete(OnBlobs):
    def test_one_that_stays_does_not_save_the_others(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """Missing names are fine; where one cannot be removed the others are, and it is named."""
        blobs.blobs = {f"bucket/run/{name}": b"" for name in ("a", "b", "c")}
        blobs.faults["rm_file"] = [None, PermissionError(), None, None]
        with pytest.raises(StoreError) as caught:
            store.delete(["a", "b", "none", "c"])
        assert (caught.value.key, caught.value.errno) == ("b", errno.EACCES)
        assert list(blobs.blobs) == ["bucket/run/b"]

    def test_patterns_are_names(self, tmp_path: Path) -> None:
        """Deleting a name with pattern characters removes that object alone."""
        for fs, path in (
            (LocalFileSystem(), str(tmp_path)),
            (MemoryFileSystem(), f"/{uuid.uuid4().hex}"),
        ):
            store = FsspecStore(fs, path, "test://x")
            for name in ("a*", "ab", "[a]", "a", "?"):
                store.put(name, [memoryview(name.encode())])
            store.delete(["a*", "[a]", "?"])
            assert sorted(entry.name for entry in store.entries()) == ["a", "ab"]


class HTTPError(Exception):
    """An error with a status, as HTTP clients raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}")
        self.status = status


@pytest.mark.parametrize(
    ("error", "kind", "number", "transient", "ambiguous"),
    [
        (FileNotFoundError("x"), ObjectNotFoundError, errno.ENOENT, False, False),
        (FileExistsError("x"), ObjectExistsError, errno.EEXIST, False, False),
        (PermissionError("x"), StoreError, errno.EACCES, False, False),
        (TimeoutError("x"), StoreError, None, True, True),
        (asyncio.TimeoutError("x"), StoreError, None, True, True),
        (fsspec.exceptions.FSTimeoutError("x"), StoreError, None, True, True),
        (ConnectionResetError(errno.ECONNRESET, "x"), StoreError, errno.ECONNRESET, True, True),
        (OSError(errno.EPIPE, "x"), StoreError, errno.EPIPE, True, True),
        (OSError(errno.ENOSPC, "x"), StoreError, errno.ENOSPC, False, False),
        (NotImplementedError("x"), StoreError, errno.EOPNOTSUPP, False, False),
        (HTTPError(503), StoreError, None, True, True),
        (HTTPError(429), StoreError, None, True, True),
        (HTTPError(403), StoreError, errno.EACCES, False, False),
        (HTTPError(404), ObjectNotFoundError, errno.ENOENT, False, False),
        (HTTPError(400), StoreError, None, False, False),
        (RuntimeError("x"), StoreError, None, False, False),
        # Azure's client has tried for a minute by itself; the blob may be there all the same.
        (ServiceRequestError("x"), StoreError, None, False, True),
        (ServiceResponseTimeoutError("x"), StoreError, None, False, True),
    ],
)
def test_errors_are_translated(
    error: Exception, kind: type[StoreError], number: int | None, transient: bool, ambiguous: bool
) -> None:
    """A write's failure keeps its number, says whether another try helps and whether the write may be there."""
    fs = PipingFileSystem()
    fs.faults["pipe overwrite"] = [error]
    with pytest.raises(StoreError) as caught:
        FsspecStore(fs, "b/run", "blob://b/run").put("a", [memoryview(b"1")])
    found = caught.value
    assert (type(found), found.errno, found.transient, found.ambiguous) == (kind, number, transient, ambiguous)
    assert (found.operation, found.key, found.path) == ("put", "a", "blob://b/run")
    assert found.__cause__ is error
    assert "'a'" in str(found)
    fs.blobs["b/run/a"] = b"1"
    fs.faults["cat_file"] = [error]
    if kind is StoreError:
        with pytest.raises(StoreError) as caught:
            FsspecStore(fs, "b/run", "blob://b/run").read("a", limit=10)
        assert (caught.value.transient, caught.value.ambiguous) == (transient, False)


@pytest.mark.parametrize(("module", "name"), [("aiohttp", "ServerDisconnectedError"), ("requests", "ConnectionError")])
def test_broken_connections_of_client_libraries(module: str, name: str) -> None:
    """Connection errors that do not derive from Python's own are transient all the same."""
    fs = PipingFileSystem()
    fs.faults["pipe overwrite"] = [getattr(importlib.import_module(module), name)()]
    with pytest.raises(StoreError) as caught:
        FsspecStore(fs, "b/run", "blob://b/run").put("a", [memoryview(b"1")])
    assert (caught.value.transient, caught.value.ambiguous) == (True, True)
