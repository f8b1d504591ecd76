"""The store on a real folder: folders, listings, reads, deletes, the clock, and which errors pass by themselves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.errors import (
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import IOV_MAX, Syscalls
from dcp_storage.stores.translate import store_error
from dcp_storage.testing.conformance import StoreConformance
from tests.stores.local_kit import WAYS, Recorded, Trace, failing, names


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Two umasks in turn."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


class TestConformance(StoreConformance):
    @pytest.fixture(params=["link", "rename"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
        return LocalStore(tmp_path / "run", calls=replace(Syscalls(), **WAYS[request.param]))

    @pytest.fixture(autouse=True)
    def made(self, store: Store) -> None:
        store.make_folder()

    @pytest.fixture
    def second(self, store: Store) -> Store:
        return LocalStore(store.url)

    @pytest.fixture
    def below(self, store: Store) -> Store:
        made = LocalStore(f"{store.url}/below")
        made.make_folder()
        return made

    @pytest.fixture
    def inside(self, store: Store) -> Callable[[str], Store]:
        return lambda name: LocalStore(f"{store.url}/{name}")

    @pytest.fixture
    def beside(self, store: Store) -> Store:
        made = LocalStore(f"{store.url}x")
        made.make_folder()
        return made


class TestFolders(Recorded):
    def test_missing_parents_are_made_and_synced(self, tmp_path: Path, trace: Trace) -> None:
        """Each new folder is made, then it and the folder that names it are synced, from the top down; before that the
        name of the one that is there, which a process may have made that was killed before its sync.
        """
        LocalStore(tmp_path / "a/b", calls=trace.calls()).make_folder()
        synced = [line for line in trace.log if line.split()[0] in ("mkdir", "fsync")]
        first, *rest = synced
        assert first == f"fsync {tmp_path.parent.name}"
        assert rest == ["mkdir a", "fsync a", f"fsync {tmp_path.name}", "mkdir b", "fsync b", "fsync a"]
        assert (tmp_path / "a/b").is_dir()

    def test_a_folder_that_is_there_is_left_alone(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Making an existing folder changes nothing, and syncs its name."""
        (folder / "x").write_bytes(b"1")
        store.make_folder()
        assert trace.log == [f"open {folder.parent.name}", f"fsync {folder.parent.name}"]
        assert names(folder) == ["x"]

    def test_another_rank_may_be_faster(self, tmp_path: Path, trace: Trace) -> None:
        """A folder that appears between the look and the mkdir is fine, and is synced all the same."""

        def late(path: str, mode: int) -> None:
            Path(path).mkdir()
            raise FileExistsError(errno.EEXIST, "exists", path)

        trace.faults["mkdir"] = late
        LocalStore(tmp_path / "a", calls=trace.calls()).make_folder()
        assert [line for line in trace.log if line.startswith("fsync")][1:] == ["fsync a", f"fsync {tmp_path.name}"]

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
    def test_a_parent_that_cannot_be_synced(self, store: LocalStore, trace: Trace, number: int) -> None:
        """The folder above one that is there may be unreadable or read-only: that folder is not of our making."""
        trace.faults["fsync"] = failing(number)
        store.make_folder()

    def test_a_parent_that_fails_to_be_synced(self, store: LocalStore, trace: Trace) -> None:
        """Where the disk fails as the name of the folder is synced, the folder is not said to be there for good."""
        trace.faults["fsync"] = failing(errno.EIO)
        with pytest.raises(StoreError) as caught:
            store.make_folder()
        assert caught.value.errno == errno.EIO

    @pytest.mark.parametrize("path", ["file", "file/x", "file/x/y", "dangling"])
    def test_a_file_in_the_way_is_enotdir(self, tmp_path: Path, path: str) -> None:
        """A path of which a part is a file (or leads nowhere) raises ENOTDIR."""
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        with pytest.raises(StoreError) as caught:
            LocalStore(tmp_path / path).make_folder()
        assert (caught.value.errno, caught.value.operation) == (errno.ENOTDIR, "make_folder")
        assert not caught.value.transient

    def test_an_unwritable_folder_is_eacces(self, store: LocalStore, trace: Trace) -> None:
        """A folder that is there but cannot be written raises EACCES, which is not worth another try."""
        trace.faults["may_write"] = lambda _: False
        with pytest.raises(StoreError) as caught:
            store.make_folder()
        assert (caught.value.errno, caught.value.transient) == (errno.EACCES, False)

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
    def test_a_folder_that_cannot_be_made_says_why(self, tmp_path: Path, trace: Trace, number: int) -> None:
        """The system's number of a failed mkdir is kept."""
        trace.faults["mkdir"] = failing(number)
        with pytest.raises(StoreError) as caught:
            LocalStore(tmp_path / "a", calls=trace.calls()).make_folder()
        assert (caught.value.errno, caught.value.transient) == (number, False)

    def test_modes_follow_the_umask(self, tmp_path: Path, umask: int) -> None:
        """Folders get 0o777 and files 0o666, less the umask, however they were written."""
        store = LocalStore(tmp_path / "a/b")
        store.make_folder()
        store.put("put", [memoryview(b"1")])
        store.create("created", b"1")
        upload = store.upload("uploaded")
        upload.write_part(1, 0, [memoryview(b"1")])
        upload.complete()
        for calls in (WAYS["rename"], WAYS["exclusive"]):
            LocalStore(store.url, calls=replace(Syscalls(), **calls)).create(f"c{len(calls)}", b"1")
        modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
        assert set(modes.values()) == {0o777 & ~umask, 0o666 & ~umask}
        assert all(mode == (0o777 if path.is_dir() else 0o666) & ~umask for path, mode in modes.items())
        assert len(modes) == 7


class TestListing(Recorded):
    def test_only_files_are_listed(self, store: LocalStore, folder: Path) -> None:
        """Files and links to files count; sub-folders, links to folders, dangling links and FIFOs do not."""
        (folder / "file").write_bytes(b"12345")
        os.utime(folder / "file", (1_000_000_000, 1_000_000_000.5))
        (folder / "sub").mkdir()
        (folder / "sub/inner").write_bytes(b"1")
        (folder / "to-file").symlink_to(folder / "file")
        (folder / "to-sub").symlink_to(folder / "sub")
        (folder / "dangling").symlink_to(folder / "nowhere")
        os.mkfifo(folder / "fifo")
        found = {entry.name: entry for entry in store.entries()}
        assert {name: entry.size for name, entry in found.items()} == {"file": 5, "to-file": 5}
        assert found["file"].modified == 1_000_000_000.5
        assert store.open_uploads() == []

    def test_a_missing_folder_is_empty(self, tmp_path: Path) -> None:
        """A folder that does not exist has no entries and no sub-folders."""
        assert LocalStore(tmp_path / "none/such").entries() == []
        assert LocalStore(tmp_path / "none/such").folders() == []

    def test_folders_are_real_ones_and_links_to_them(self, store: LocalStore, folder: Path) -> None:
        """Sub-folders are listed, empty ones and links to folders too; files, dead links and odd names are not."""
        for name in ("step-1", "empty", "a\\b", "a\nb"):
            (folder / name).mkdir()
        (folder / "step-1" / "deeper").mkdir()
        (folder / "file").write_bytes(b"")
        (folder / "link").symlink_to("step-1")
        (folder / "dead").symlink_to("nowhere")
        assert sorted(store.folders()) == ["empty", "link", "step-1"]

    def test_a_file_is_not_a_folder(self, folder: Path) -> None:
        """Listing a path that is a file, or goes through one, raises ENOTDIR."""
        (folder / "file").write_bytes(b"")
        for path in ("file", "file/x"):
            for call in (LocalStore(folder / path).entries, LocalStore(folder / path).folders):
                with pytest.raises(StoreError) as caught:
                    call()
                assert caught.value.errno == errno.ENOTDIR

    def test_a_listing_that_fails_raises(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """An I/O error of the listing, at its start or half-way, never looks like an empty folder."""
        real = os.scandir

        class Broken:
            def __init__(self, path: str) -> None:
                self.inner = real(path)

            def __enter__(self) -> Broken:
                return self

            def __exit__(self, *_: object) -> None:
                self.inner.close()

            def __iter__(self) -> Iterator[Any]:
                raise OSError(errno.EIO, "bad disk")

        store.put("a", [memoryview(b"1")])
        for broken in (Broken, failing(errno.EIO)):
            monkeypatch.setattr(os, "scandir", broken)
            for call in (store.entries, store.folders):
                with pytest.raises(StoreError) as caught:
                    call()
                assert caught.value.errno == errno.EIO


class TestReading(Recorded):
    def test_more_pieces_than_one_call_takes(self, store: LocalStore, folder: Path) -> None:
        """More buffers than IOV_MAX, some empty, are filled and written in order."""
        count = IOV_MAX * 2 + 5
        data = os.urandom(3 * count)
        pieces = [piece for i in range(count) for piece in (memoryview(data)[3 * i : 3 * i + 3], memoryview(b""))]
        store.put("a", pieces)
        assert (folder / "a").read_bytes() == data
        target = bytearray(len(data) - 1)
        store.read_into("a", 1, [memoryview(target)[i : i + 2] for i in range(0, len(target), 2)])
        assert bytes(target) == data[1:]

    def test_short_reads_and_writes_go_on(
        self, store: LocalStore, folder: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A system that moves one byte at a time still moves all of them to the right places."""
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, pieces, offset: real(fd, [pieces[0][:1]], offset))
        trace.faults["write"] = lambda fd, pieces, offset: os.pwritev(fd, [pieces[0][:1]], offset)
        store.put("a", [memoryview(b"01234"), memoryview(b"56"), memoryview(b"789")])
        assert (folder / "a").read_bytes() == b"0123456789"
        target = [memoryview(bytearray(size)) for size in (2, 3, 1)]
        store.read_into("a", 3, target)
        assert b"".join(target) == b"345678"

    def test_a_short_file_says_how_short(self, store: LocalStore, folder: Path) -> None:
        """A range beyond the end names the byte that was wanted and the size that was found."""
        (folder / "a").write_bytes(b"12345")
        for offset in (3, 5, 99):
            with pytest.raises(ObjectTooShortError) as caught:
                store.read_into("a", offset, [memoryview(bytearray(4))])
            assert (caught.value.wanted, caught.value.found) == (offset + 4, 5)

    def test_a_folder_or_a_fifo_is_no_object(self, store: LocalStore, folder: Path) -> None:
        """What is not a file is not found, and a FIFO does not hang."""
        (folder / "sub").mkdir()
        os.mkfifo(folder / "fifo")
        for name in ("sub", "fifo", "none"):
            for call in (
                lambda name=name: store.read(name, limit=9),
                lambda name=name: store.size(name),
                lambda name=name: store.read_into(name, 0, [memoryview(bytearray(1))]),
            ):
                with pytest.raises(ObjectNotFoundError):
                    call()

    def test_no_more_than_the_limit_is_read(
        self, store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file larger than the limit is refused unread; one that grows while it is read is refused at the limit."""
        (folder / "a").write_bytes(b"x" * 1000)
        fetched: list[int] = []
        real = os.read

        def counted(fd: int, count: int) -> bytes:
            fetched.append(len(data := real(fd, count)))
            return data

        monkeypatch.setattr(os, "read", counted)
        with pytest.raises(UntrustedDataError):
            store.read("a", limit=999)
        assert fetched == []
        assert store.read("a", limit=1000) == b"x" * 1000
        fetched.clear()
        grown = os.stat_result((0o100644, 1, 1, 1, 0, 0, 10, 0, 0, 0))  # the size was 10 when it was looked at
        monkeypatch.setattr(os, "fstat", lambda _: grown)
        with pytest.raises(UntrustedDataError):
            store.read("a", limit=100)
        assert sum(fetched) <= 101


class TestDelete(Recorded):
    def test_all_are_removed_with_one_sync(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Names go in the given order, missing ones are fine, and the folder is synced once at the end."""
        for name in ("a", "b", "keep"):
            (folder / name).write_bytes(b"1")
        store.delete(["b", "none", "a"])
        assert trace.log == ["unlink b", "unlink none", "unlink a", "open run", "fsync run"]
        assert names(folder) == ["keep"]

    def test_one_that_stays_does_not_save_the_others(self, store: LocalStore, folder: Path) -> None:
        """Where one cannot be removed (a folder), the rest is removed and the error names it."""
        (folder / "a").write_bytes(b"1")
        (folder / "sub").mkdir()
        (folder / "z").write_bytes(b"1")
        with pytest.raises(StoreError) as caught:
            store.delete(["a", "sub", "z"])
        assert (caught.value.key, caught.value.errno) == ("sub", errno.EISDIR)
        assert names(folder) == ["sub"]

    def test_a_bad_name_removes_nothing(self, store: LocalStore, folder: Path) -> None:
        """A name that could leave the folder is refused before anything is removed."""
        (folder / "a").write_bytes(b"1")
        with pytest.raises(UntrustedDataError):
            store.delete(["a", "../run/a"])
        assert names(folder) == ["a"]

    def test_a_missing_folder_has_nothing_to_delete(self, tmp_path: Path) -> None:
        """Deleting from a folder that does not exist is no error."""
        LocalStore(tmp_path / "none").delete(["a"])
        assert names(tmp_path) == []


class TestClock(Recorded):
    def test_it_is_the_clock_of_modified_times(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """The time is that of a scratch file's inode, whose name begins with .claim., and which is removed."""
        trace.faults["open"] = lambda path, flags, mode: _aged(os.open(path, flags, mode))
        assert store.now() == 1_234_567_890.25
        assert trace.log == ["open .claim.<token>", "unlink .claim.<token>"]
        assert names(folder) == []

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOENT])
    def test_a_folder_that_takes_no_file(
        self, store: LocalStore, trace: Trace, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where no scratch file can be made, the host's clock is used."""
        trace.faults["open"] = failing(number)
        monkeypatch.setattr("time.time", lambda: 42.0)
        assert store.now() == 42.0

    def test_another_failure_raises(self, store: LocalStore, trace: Trace) -> None:
        """An I/O error is not papered over by the host's clock."""
        trace.faults["open"] = failing(errno.EIO)
        with pytest.raises(StoreError) as caught:
            store.now()
        assert caught.value.errno == errno.EIO


def _aged(fd: int) -> int:
    os.utime(fd, (0, 1_234_567_890.25))
    return fd


@pytest.mark.parametrize(
    ("number", "transient"),
    [
        (errno.EINTR, True),
        (errno.EAGAIN, True),
        (errno.ETIMEDOUT, True),
        (errno.ESTALE, True),
        (errno.ENOSPC, False),
        (errno.EDQUOT, False),
        (errno.EACCES, False),
        (errno.EPERM, False),
        (errno.EROFS, False),
        (errno.ENOTDIR, False),
        (errno.EIO, False),
        (errno.ENOENT, False),
    ],
)
def test_which_errors_are_worth_another_try(number: int, transient: bool) -> None:
    """Only errors that pass by themselves are transient; the number and the name always survive."""
    error = store_error(OSError(number, os.strerror(number)), "put", "/run", "a")
    assert (error.transient, error.errno, error.key, error.path) == (transient, number, "a", "/run")
    assert isinstance(error, ObjectNotFoundError) is (number == errno.ENOENT)
    assert errno.errorcode[number] in str(error)
