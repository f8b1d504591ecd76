"""What a disk may do to a load: errors, short reads, interruptions, and files that change while they are read."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FsspecStorageReader,
    LoadOptions,
    SaveOptions,
    StoreError,
)
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.location import Location
from dcp_storage.wrappers import Request
from tests.disks import writer_with
from tests.e2e import ALONE, Place, assert_same, assert_sentence, failure, like, load, save
from tests.protocol.oracle import Hooked

pytestmark = pytest.mark.filterwarnings(ALONE)

Read = Callable[[int, Sequence[memoryview], int], int]


def state(seed: int = 0) -> dict[str, Any]:
    """Two tensors of several blocks in files of their own, and an object."""
    return {"a": torch.arange(30_000.0) + seed, "b": torch.arange(9000) + seed, "note": (seed, "x")}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(str(tmp_path / "one"))
    save(state(), made.writer(options=SaveOptions(shard_size=1)))
    return made


def shard_of(place: Place, key: str) -> str:
    body = place.manifest()
    (item,) = [item for item in body["items"] if item["key"] == key]
    return str(body["files"][item["file"]]["name"])


def path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def reading(monkeypatch: pytest.MonkeyPatch, does: Callable[[str, Read], Read]) -> None:
    """Puts something between the load and the disk: ``does(path, real)`` reads instead, of each descriptor."""
    real = os.preadv

    def preadv(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        return does(path_of(fd), real)(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(
    ("number", "attempts"), [(errno.EIO, 1), (errno.ESTALE, 2), (errno.EUCLEAN, 1)], ids=["EIO", "ESTALE", "EUCLEAN"]
)
def test_a_disk_that_cannot_read(place: Place, number: int, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error names errno, file, operation and attempts; nothing is reported as loaded, nor called corrupt."""
    bad = shard_of(place, "b")

    def does(path: str, real: Read) -> Read:
        def fail(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
            raise OSError(number, os.strerror(number))

        return fail if path.endswith(bad) else real

    reading(monkeypatch, does)
    reader = place.reader(options=LoadOptions(attempts=2))
    error = failure(StoreError, lambda: load(like(state()), reader))
    assert (error.errno, error.key, error.operation, error.attempts) == (number, bad, "read_into", attempts)
    assert bad in str(error)
    assert reader.report is None
    found = like({"a": state()["a"]})
    load(found, place.reader())  # what lies elsewhere loads
    assert_same(found, {"a": state()["a"]})


@pytest.mark.parametrize("name", [".commit", ".manifest"])
def test_a_disk_that_cannot_read_what_says_what_there_is(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO under the commit or the manifest is an error of the disk, never "nothing is committed"."""
    real = os.read

    def read(fd: int, size: int) -> bytes:
        if path_of(fd).endswith(f"/one/{name}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size)

    monkeypatch.setattr(os, "read", read)
    targets = like(state())
    error = failure(StoreError, lambda: load(targets, place.reader()))
    assert (error.errno, error.key, error.operation) == (errno.EIO, name, "read")
    assert_same(targets, like(state()))


def test_a_handle_that_was_stale_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle, as NFS gives when a file was moved on its server, is asked for again."""
    stale: set[str] = set()

    def does(path: str, real: Read) -> Read:
        def call(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
            if path not in stale:
                stale.add(path)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(fd, pieces, offset)

        return call

    reading(monkeypatch, does)
    found = like(state())
    load(found, place.reader())
    assert_same(found, state())
    assert len(stale) == 3


def test_short_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that moves a thousand bytes at a time saves and loads every element."""
    from dcp_storage.stores.local_syscalls import Syscalls

    def short(call: Read) -> Read:
        return lambda fd, pieces, offset: call(fd, [next(p for p in pieces if p.nbytes)[:1000]], offset)

    place = Place(str(tmp_path / "short"))
    save(state(), writer_with(place.url, Syscalls(write=short(os.pwritev))))
    reading(monkeypatch, lambda path, real: short(real))
    found = like(state())
    load(found, place.reader())
    assert_same(found, state())


@pytest.fixture
def interrupted() -> Iterator[list[int]]:
    """This process gets a signal, with a handler of Python, every two milliseconds."""
    count = [0]

    def handler(number: int, frame: object) -> None:
        count[0] += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    yield count
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals(tmp_path: Path, interrupted: list[int]) -> None:
    """Under signals that interrupt system calls, a save and a load do as ever."""
    place = Place(str(tmp_path / "one"))
    for seed in range(3):
        save(state(seed), place.writer(overwrite=True))
        found = like(state())
        load(found, place.reader())
        assert_same(found, state(seed))
    assert interrupted[0] > 5


def reader_that_meets(place: Place, name: str, change: Callable[[], None]) -> FsspecStorageReader:
    """A reader under which ``change`` happens when it has looked at all sizes and first reads ``name``."""
    done: list[bool] = []

    def before(request: Request) -> None:
        if (request.operation, request.name) == ("read_into", name) and not done:
            done.append(True)
            change()

    def opener(location: Location, options: Mapping[str, Any], concurrency: int) -> Store:
        return Hooked(LocalStore(location.path), before=before)

    reader = place.reader(options=LoadOptions(attempts=1))
    reader._opener = opener
    return reader


def test_a_file_that_is_cut_while_it_is_read(place: Place) -> None:
    """File, key, the bytes that were wanted and the size that is there are named; no signal ends the process."""
    name = shard_of(place, "a")
    size = place.files()[name]
    reader = reader_that_meets(place, name, lambda: os.truncate(f"{place.url}/{name}", size // 2))
    error = failure(CorruptCheckpointError, lambda: load(like(state()), reader))
    assert (error.file, error.key, error.found) == (name, "a", size // 2)
    assert isinstance(error.wanted, int)
    assert size // 2 < error.wanted <= size
    assert error.offset is not None
    assert_sentence(str(error))
    assert reader.report is None


def test_a_file_that_goes_while_it_is_read(place: Place) -> None:
    """A file that is removed after the sizes were looked at is named, with the key and the bytes that were wanted."""
    name = shard_of(place, "a")
    reader = reader_that_meets(place, name, lambda: place.remove(name))
    error = failure(CorruptCheckpointError, lambda: load(like(state()), reader))
    assert (error.file, error.key, error.found) == (name, "a", None)
    assert error.wanted is not None
    assert error.offset is not None
    assert repr("a") in str(error)


@pytest.mark.parametrize("way", ["in place", "renamed over"])
def test_a_file_that_is_another_while_it_is_read(place: Place, way: str) -> None:
    """Other bytes of the same size, written into the file or put in its place, are found by their CRC-32."""
    name = shard_of(place, "a")
    other = Place(f"{place.url}-other")
    save(state(5), other.writer(options=SaveOptions(shard_size=1)))
    data = other.get(shard_of(other, "a"))
    assert len(data) == place.files()[name]

    def change() -> None:
        if way == "in place":
            place.set(name, data)
        else:
            place.set("beside", data)
            Path(f"{place.url}/beside").replace(f"{place.url}/{name}")

    error = failure(CorruptCheckpointError, lambda: load(like(state()), reader_that_meets(place, name, change)))
    assert (error.file, error.key) == (name, "a")
    assert error.wanted not in {None, error.found}
    assert error.offset is not None


def test_a_checkpoint_that_is_replaced_while_it_is_read(place: Place) -> None:
    """Where the files change because another save committed, the error says so, and loading again gives that one."""
    name = shard_of(place, "a")
    reader = reader_that_meets(place, name, lambda: save(state(5), place.writer(overwrite=True)))
    failure(CheckpointReplacedError, lambda: load(like(state()), reader))
    found = like(state())
    load(found, place.reader())
    assert_same(found, state(5))


def test_bytes_that_were_wrong_on_the_way_only(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that a read got wrong is asked for again before anybody calls the file damaged."""
    spoiled: set[str] = set()

    def does(path: str, real: Read) -> Read:
        def call(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
            count = real(fd, pieces, offset)
            if path.endswith(".distcp") and path not in spoiled:
                spoiled.add(path)
                largest = max(pieces, key=lambda piece: piece.nbytes)
                largest[largest.nbytes // 2] ^= 4
            return count

        return call

    reading(monkeypatch, does)
    found = like(state())
    load(found, place.reader())
    assert_same(found, state())
    assert len(spoiled) == 3
