"""The store on fsspec's in-memory filesystem."""

from __future__ import annotations

import errno
import gc
import threading
import uuid
from collections.abc import Callable

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcp_storage.errors import ObjectExistsError, ObjectTooShortError, StoreError
from dcp_storage.store import Atomicity, Store
from dcp_storage.stores.memory import MemoryStore
from dcp_storage.testing.conformance import StoreConformance


@pytest.fixture
def path() -> str:
    """A folder nobody else has."""
    return f"{uuid.uuid4().hex}/run"


class TestConformance(StoreConformance):
    @pytest.fixture
    def store(self, path: str) -> Store:
        return MemoryStore(path)

    @pytest.fixture
    def second(self, store: Store, path: str) -> Store:
        return MemoryStore(f"/{path}/")

    @pytest.fixture
    def below(self, path: str) -> Store:
        return MemoryStore(f"{path}/below")

    @pytest.fixture
    def inside(self, path: str) -> Callable[[str], Store]:
        return lambda name: MemoryStore(f"{path}/{name}")

    @pytest.fixture
    def beside(self, path: str) -> Store:
        return MemoryStore(f"{path}x")


def test_it_shares_its_objects_with_fsspec(path: str) -> None:
    """What this store writes fsspec reads, and the other way round."""
    store, fs = MemoryStore(path), fsspec.filesystem("memory")
    store.make_folder()
    assert fs.isdir(path)
    store.put("a[1]", [memoryview(b"from us")])
    fs.pipe_file(f"memory://{path}/b", b"from fsspec")
    assert fs.cat_file(f"/{path}/a[1]") == b"from us"
    assert store.read("b", limit=100) == b"from fsspec"
    assert {entry.name: entry.size for entry in store.entries()} == {"a[1]": 7, "b": 11}
    assert store.url == f"memory://{path}"


def test_an_independent_filesystem_stays_apart(path: str) -> None:
    """A MemoryFileSystem with a dict of its own is used, not the shared one."""
    fs = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    MemoryStore(path, fs=fs).put("a", [memoryview(b"1")])
    assert [entry.name for entry in MemoryStore(path, fs=fs).entries()] == ["a"]
    assert MemoryStore(path).entries() == []


def test_one_of_eight_creates_wins_each_round(path: str) -> None:
    """Of eight threads that create one name at once, in each of fifty rounds exactly one succeeds, with its body."""
    assert MemoryStore(path).create_if_absent is Atomicity.ATOMIC
    winners: list[tuple[int, int]] = []
    start = threading.Barrier(8, timeout=60)

    def race(who: int) -> None:
        store = MemoryStore(path)
        for turn in range(50):
            start.wait()
            try:
                store.create(f"n{turn}", bytes([who]))
            except ObjectExistsError:
                continue
            winners.append((turn, who))

    threads = [threading.Thread(target=race, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(turn for turn, _ in winners) == list(range(50))
    assert {turn: MemoryStore(path).read(f"n{turn}", limit=9) for turn, _ in winners} == {
        turn: bytes([who]) for turn, who in winners
    }


def test_a_path_that_is_a_file_is_no_folder(path: str) -> None:
    """Listing or making a folder whose path, or a part of it, is an object raises ENOTDIR."""
    MemoryStore(path).put("file", [memoryview(b"1")])
    for call in (
        MemoryStore(f"{path}/file").entries,
        MemoryStore(f"{path}/file").make_folder,
        MemoryStore(f"{path}/file/x/y").make_folder,
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.errno == errno.ENOTDIR


def test_a_short_object_says_how_short(path: str) -> None:
    """A range beyond the end names the byte that was wanted and the size that was found."""
    store = MemoryStore(path)
    store.put("a", [memoryview(b"12345")])
    with pytest.raises(ObjectTooShortError) as caught:
        store.read_into("a", 3, [memoryview(bytearray(4))])
    assert (caught.value.wanted, caught.value.found) == (7, 5)


def test_an_upload_needs_all_its_parts(path: str) -> None:
    """A gap between parts fails the completion and publishes nothing; aborting leaves another's object alone."""
    store = MemoryStore(path)
    upload = store.upload("a")
    upload.write_part(1, 0, [memoryview(b"12")])
    upload.write_part(3, 4, [memoryview(b"56")])
    with pytest.raises(StoreError):
        upload.complete()
    assert store.entries() == []
    upload.write_part(2, 2, [memoryview(b"34")])
    upload.complete()
    assert store.read("a", limit=10) == b"123456"
    store.put("a", [memoryview(b"another's")])
    upload.abort()
    assert store.read("a", limit=10) == b"another's"
    with pytest.raises(StoreError):
        upload.complete()


def test_objects_that_come_while_others_are_listed(path: str) -> None:
    """A listing goes on although objects are added while it is made, by another thread or by a finalizer."""
    fs = MemoryFileSystem()
    fs.store = {}
    store = MemoryStore(path, fs=fs)
    for number in range(2000):
        store.put(f"a{number}", [memoryview(b"x")])
    came: list[str] = []

    def add(phase: str, _: dict[str, int]) -> None:
        came.append(f"later{len(came)}")
        fs.store[f"/{path}/later/{len(came)}"] = fs.store[f"/{path}/a0"]

    before = gc.get_threshold()
    gc.callbacks.append(add)
    gc.set_threshold(1)
    try:
        found = store.entries()
        folders = store.folders()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(add)
    assert came
    assert {entry.name for entry in found} == {f"a{number}" for number in range(2000)}
    assert folders in ([], ["later"])
