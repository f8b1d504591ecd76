"""The store on a real folder: what it writes, in which order it reaches the disk, and what failures leave."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Atomicity, Store
from dcp_storage.stores import local_create
from dcp_storage.stores.local import LocalStore, scratch_token
from dcp_storage.stores.local_syscalls import IOV_MAX, Syscalls, rename_noreplace
from dcp_storage.stores.translate import store_error
from dcp_storage.testing.conformance import StoreConformance


@dataclass
class Trace:
    """Records the calls, with paths for descriptors, and raises where a test says so."""

    log: list[str] = field(default_factory=list)
    faults: dict[str, Callable[..., Any]] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)

    def calls(self) -> Syscalls:
        return Syscalls(**{item.name: self._wrap(item.name) for item in fields(Syscalls)})

    def _wrap(self, name: str) -> Callable[..., Any]:
        real = getattr(Syscalls(), name)

        def call(*args: Any) -> Any:
            named = [self.paths.get(arg, str(arg)) if isinstance(arg, int) else arg for arg in args]
            shown = [self._short(arg) for arg in named if isinstance(arg, str) and arg.startswith("/")]
            if name not in ("close", "may_write"):
                self.log.append(" ".join([name, *shown]))
            result = self.faults.get(name, real)(*args)
            if name == "open":
                self.paths[result] = args[0]
            return result

        return call

    @staticmethod
    def _short(path: str) -> str:
        return re.sub(r"\.[a-z][a-z0-9]{15}$", ".<token>", Path(path).name)


def failing(number: int, after: int = 0) -> Callable[..., Any]:
    """A system call that fails, after so many calls that do nothing."""
    left = [after]

    def call(*_: Any) -> None:
        if left[0] == 0:
            raise OSError(number, os.strerror(number))
        left[0] -= 1

    return call


def half_written(number: int) -> Callable[[int, Sequence[memoryview], int], int]:
    """A pwritev that takes three bytes and then fails."""

    def call(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        if offset >= 3:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, [pieces[0][:3]], offset)

    return call


@pytest.fixture
def trace() -> Trace:
    """The recorder of one test."""
    return Trace()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An existing folder."""
    made = tmp_path / "run"
    made.mkdir()
    return made


@pytest.fixture
def store(folder: Path, trace: Trace) -> LocalStore:
    """A store of the folder, recorded."""
    return LocalStore(folder, calls=trace.calls())


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Two umasks in turn."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def names(folder: Path) -> list[str]:
    """All names in the folder, by the system's own listing."""
    return sorted(path.name for path in folder.iterdir())


WAYS = {
    "link": {},
    "rename": {"link": failing(errno.EPERM)},
    "exclusive": {"link": failing(errno.EOPNOTSUPP), "rename_new": failing(errno.EINVAL)},
}


@pytest.fixture(params=sorted(WAYS))
def way(request: pytest.FixtureRequest, trace: Trace) -> str:
    """Each way to create, by taking the better ones away."""
    trace.faults.update(WAYS[request.param])
    way: str = request.param
    return way


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
    def beside(self, store: Store) -> Store:
        made = LocalStore(f"{store.url}x")
        made.make_folder()
        return made


class TestFolders:
    def test_missing_parents_are_made_and_synced(self, tmp_path: Path, trace: Trace) -> None:
        """Each new folder is made, then it and the folder that names it are synced, from the top down."""
        LocalStore(tmp_path / "a/b", calls=trace.calls()).make_folder()
        synced = [line for line in trace.log if line.split()[0] in ("mkdir", "fsync")]
        assert synced == ["mkdir a", "fsync a", f"fsync {tmp_path.name}", "mkdir b", "fsync b", "fsync a"]
        assert (tmp_path / "a/b").is_dir()

    def test_a_folder_that_is_there_is_left_alone(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Making an existing folder changes nothing."""
        (folder / "x").write_bytes(b"1")
        store.make_folder()
        assert trace.log == []
        assert names(folder) == ["x"]

    def test_another_rank_may_be_faster(self, tmp_path: Path, trace: Trace) -> None:
        """A folder that appears between the look and the mkdir is fine, and is synced all the same."""

        def late(path: str, mode: int) -> None:
            Path(path).mkdir()
            raise FileExistsError(errno.EEXIST, "exists", path)

        trace.faults["mkdir"] = late
        LocalStore(tmp_path / "a", calls=trace.calls()).make_folder()
        assert [line for line in trace.log if line.startswith("fsync")] == ["fsync a", f"fsync {tmp_path.name}"]

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


class TestListing:
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
        """A folder that does not exist has no entries."""
        assert LocalStore(tmp_path / "none/such").entries() == []

    def test_a_file_is_not_a_folder(self, folder: Path) -> None:
        """Listing a path that is a file, or goes through one, raises ENOTDIR."""
        (folder / "file").write_bytes(b"")
        for path in ("file", "file/x"):
            with pytest.raises(StoreError) as caught:
                LocalStore(folder / path).entries()
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
            with pytest.raises(StoreError) as caught:
                store.entries()
            assert caught.value.errno == errno.EIO


class TestReading:
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


class TestPut:
    def test_the_order_on_the_disk(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """A put writes and syncs a file beside the name, puts it there in one step, and syncs the folder last."""
        store.put("a", [memoryview(b"12")])
        assert trace.log == [
            "open a.<token>",
            "write a.<token>",
            "fsync a.<token>",
            "replace a.<token> a",
            "open run",
            "fsync run",
        ]
        assert (folder / "a").read_bytes() == b"12"

    @pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
    def test_a_failure_leaves_the_old_object_alone(
        self, store: LocalStore, folder: Path, trace: Trace, call: str, number: int
    ) -> None:
        """Where any step before the last fails, the old object is as it was and no other file is left."""
        (folder / "a").write_bytes(b"old")
        trace.faults[call] = half_written(number) if call == "write" else failing(number)
        with pytest.raises(StoreError) as caught:
            store.put("a", [memoryview(b"newer and longer")])
        error = caught.value
        assert (error.errno, error.operation, error.key, error.transient) == (number, "put", "a", False)
        assert "'a'" in str(error)
        assert names(folder) == ["a"]
        assert (folder / "a").read_bytes() == b"old"

    def test_a_failed_folder_sync_is_ambiguous(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """If only the last sync fails, the new object may last or not, and the error says so."""
        trace.faults["fsync"] = failing(errno.EIO, after=1)
        for write in (lambda: store.put("a", [memoryview(b"1")]), lambda: store.create("b", b"1")):
            trace.faults["fsync"] = failing(errno.EIO, after=1)
            with pytest.raises(StoreError) as caught:
                write()
            assert (caught.value.ambiguous, caught.value.errno) == (True, errno.EIO)
        assert names(folder) == ["a", "b"]

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
    def test_a_folder_that_cannot_be_synced_is_fine(self, store: LocalStore, trace: Trace, number: int) -> None:
        """Filesystems without a sync of folders answer EINVAL or ENOTSUP, for folders only."""
        trace.faults["fsync"] = failing(number, after=1)
        store.put("a", [memoryview(b"1")])
        trace.faults["fsync"] = failing(number)
        with pytest.raises(StoreError):
            store.put("b", [memoryview(b"1")])

    def test_a_missing_folder_is_said(self, tmp_path: Path) -> None:
        """Writing into a folder that does not exist raises ENOENT and makes nothing."""
        store = LocalStore(tmp_path / "none")
        for write in (
            lambda: store.put("a", [memoryview(b"1")]),
            lambda: store.create("a", b"1"),
            lambda: store.upload("a"),
        ):
            with pytest.raises(StoreError) as caught:
                write()
            assert caught.value.errno == errno.ENOENT
        assert names(tmp_path) == []

    def test_the_longest_name_is_written(self, store: LocalStore, folder: Path) -> None:
        """A name of 255 bytes, which leaves no room for a token beside it, can be put and created."""
        store.put("p" * 255, [memoryview(b"1")])
        store.create("ü" * 127, b"2")
        assert names(folder) == sorted(["p" * 255, "ü" * 127])

    def test_tokens_never_read_as_numbers(self) -> None:
        """Tokens are sixteen small letters and digits, a letter first, and do not repeat."""
        tokens = {scratch_token() for _ in range(500)}
        assert len(tokens) == 500
        assert all(re.fullmatch("[a-z][a-z0-9]{15}", token) for token in tokens)


class TestCreate:
    def test_each_way_creates_once(self, store: LocalStore, folder: Path, way: str) -> None:
        """Each of the three ways writes the whole body under a free name, refuses a taken one, leaves nothing else."""
        store.create(".commit", b"ours")
        with pytest.raises(ObjectExistsError) as caught:
            store.create(".commit", b"theirs")
        assert (caught.value.errno, caught.value.key) == (errno.EEXIST, ".commit")
        assert names(folder) == [".commit"]
        assert (folder / ".commit").read_bytes() == b"ours"
        assert store.create_if_absent is Atomicity.ATOMIC

    def test_the_order_on_the_disk(self, store: LocalStore, trace: Trace, way: str) -> None:
        """Each way: the bytes are synced before the name appears, and the folder is synced after it."""
        store.create("a", b"12")
        temp = ["open a.<token>", "write a.<token>", "fsync a.<token>"]
        placed = {
            "link": ["link a.<token> a"],
            "rename": ["link a.<token> a", "rename_new a.<token> a"],
            "exclusive": ["link a.<token> a", "rename_new a.<token> a", "open a", "write a", "fsync a"],
        }
        assert trace.log == [*temp, *placed[way], "unlink a.<token>", "open run", "fsync run"]

    def test_one_of_eight_wins_each_round(self, folder: Path, way: str) -> None:
        """Of eight threads that create one name at once, in each of fifty rounds exactly one succeeds, with its body."""
        winners: list[tuple[int, int]] = []
        start = threading.Barrier(8, timeout=100)

        def race(who: int) -> None:
            store = LocalStore(folder, calls=replace(Syscalls(), **WAYS[way]))
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
            thread.join(timeout=100)
        assert sorted(turn for turn, _ in winners) == list(range(50))
        assert names(folder) == sorted(f"n{turn}" for turn in range(50))
        assert all((folder / f"n{turn}").read_bytes() == bytes([who]) for turn, who in winners)

    @pytest.mark.parametrize("call", ["open", "write", "fsync", "link"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
    def test_a_failure_leaves_nothing(
        self, store: LocalStore, folder: Path, trace: Trace, call: str, number: int
    ) -> None:
        """Where a step fails, neither the name nor a file beside it is left, and the outcome is not in doubt."""
        trace.faults[call] = half_written(number) if call == "write" else failing(number)
        with pytest.raises(StoreError) as caught:
            store.create("a", b"1234567")
        assert (caught.value.errno, caught.value.transient, caught.value.ambiguous) == (number, False, False)
        assert names(folder) == []

    def test_a_half_written_exclusive_file_is_removed(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """If the last way fails while it writes under the final name, that file is removed."""
        trace.faults.update(WAYS["exclusive"])
        synced: list[int] = []

        def second_fails(fd: int) -> None:
            synced.append(fd)
            if len(synced) == 2:
                raise OSError(errno.ENOSPC, "full")

        trace.faults["fsync"] = second_fails
        with pytest.raises(StoreError) as caught:
            store.create("a", b"1234567")
        assert caught.value.errno == errno.ENOSPC
        assert names(folder) == []

    def test_an_exclusive_open_that_fails_removes_nothing(
        self, store: LocalStore, folder: Path, trace: Trace
    ) -> None:
        """If the last way cannot open the name, a file that another put there meanwhile stays."""
        trace.faults.update(WAYS["exclusive"])

        def lost(path: str, flags: int, mode: int) -> int:
            if path.endswith("/a"):
                (folder / "a").write_bytes(b"theirs")
                raise OSError(errno.ENOSPC, "full")
            return os.open(path, flags, mode)

        trace.faults["open"] = lost
        with pytest.raises(StoreError):
            store.create("a", b"ours")
        assert (folder / "a").read_bytes() == b"theirs"

    @pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.ESTALE, errno.EIO])
    def test_a_link_whose_answer_was_lost_is_ambiguous(self, store: LocalStore, trace: Trace, number: int) -> None:
        """After such an error of the link the name may be there all the same."""
        trace.faults["link"] = failing(number)
        with pytest.raises(StoreError) as caught:
            store.create("a", b"1")
        assert (caught.value.ambiguous, caught.value.transient) == (True, number != errno.EIO)

    def test_a_link_that_was_sent_twice_is_ours(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Where the first of two sent links succeeded and the second says EEXIST (NFS), the create succeeded."""

        def twice(source: str, target: str) -> None:
            os.link(source, target)
            os.link(source, target)

        trace.faults["link"] = twice
        store.create("a", b"ours")
        assert names(folder) == ["a"]
        with pytest.raises(ObjectExistsError):
            LocalStore(folder).create("a", b"theirs")

    def test_a_rename_that_was_sent_twice_is_ours(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """The same for the rename: our own file has left its place."""

        def twice(source: str, target: str) -> None:
            rename_noreplace(source, target)
            raise FileExistsError(errno.EEXIST, "exists", target)

        trace.faults.update({"link": failing(errno.ENOSYS), "rename_new": twice})
        store.create("a", b"ours")
        assert (folder / "a").read_bytes() == b"ours"

    def test_a_taken_name_is_durable_when_it_is_told(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Before "taken" is raised the folder is synced, since the name may be our own from a try that failed late."""
        (folder / "a").write_bytes(b"1")
        with pytest.raises(ObjectExistsError):
            store.create("a", b"2")
        assert trace.log[-3:] == ["open run", "fsync run", "unlink a.<token>"]

    def test_the_ways_by_themselves(self, folder: Path) -> None:
        """The real link and the real rename work here, and refuse a taken name without touching either file."""
        for number, by in enumerate((local_create.by_link, local_create.by_rename)):
            temp, final = folder / f"t{number}", folder / f"f{number}"
            temp.write_bytes(b"1")
            assert by(Syscalls(), str(temp), str(final))
            assert final.read_bytes() == b"1"
            temp.unlink(missing_ok=True)
            temp.write_bytes(b"2")
            with pytest.raises(FileExistsError):
                by(Syscalls(), str(temp), str(final))
            assert (temp.read_bytes(), final.read_bytes()) == (b"2", b"1")

    def test_an_old_c_library_has_no_rename(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without renameat2 in the C library the rename answers ENOSYS, so that the last way is taken."""
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
        with pytest.raises(OSError, match="implemented") as caught:
            rename_noreplace(str(folder / "a"), str(folder / "b"))
        assert caught.value.errno == errno.ENOSYS
        LocalStore(folder, calls=replace(Syscalls(), link=failing(errno.EMLINK))).create("c", b"1")
        assert names(folder) == ["c"]


class TestUpload:
    def test_the_order_on_the_disk(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Parts go straight under the final name, in any order; completing syncs the file, then the folder; no rename."""
        upload = store.upload("a")
        upload.write_part(2, 3, [memoryview(b"45")])
        upload.write_part(1, 0, [memoryview(b"1"), memoryview(b"23")])
        upload.complete()
        upload.complete()
        assert trace.log == ["open a", "write a", "write a", "truncate a", "fsync a", "open run", "fsync run"]
        assert (folder / "a").read_bytes() == b"12345"
        upload.abort()
        upload.abort()
        assert names(folder) == []

    def test_a_part_sent_again_replaces_all_of_it(self, store: LocalStore, folder: Path) -> None:
        """A last part that is shorter the second time leaves no bytes of the first."""
        (folder / "a").write_bytes(b"something old and long")
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"12")])
        upload.write_part(2, 2, [memoryview(b"xxxxxx")])
        upload.write_part(2, 2, [memoryview(b"34")])
        upload.complete()
        assert (folder / "a").read_bytes() == b"1234"

    def test_parts_with_a_gap_do_not_complete(self, store: LocalStore, folder: Path) -> None:
        """Missing parts and gaps raise EINVAL, and the upload can still be completed or aborted."""
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"12")])
        upload.write_part(3, 4, [memoryview(b"56")])
        with pytest.raises(StoreError) as caught:
            upload.complete()
        assert caught.value.errno == errno.EINVAL
        upload.write_part(2, 2, [memoryview(b"34")])
        upload.complete()
        assert (folder / "a").read_bytes() == b"123456"

    def test_a_full_disk_is_named_and_aborted_clean(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """ENOSPC comes with the file's name; after the abort nothing is left and no descriptor is open."""
        trace.faults["write"] = half_written(errno.ENOSPC)
        before = os.listdir("/proc/self/fd")
        upload = store.upload("a")
        with pytest.raises(StoreError) as caught:
            upload.write_part(1, 0, [memoryview(b"1234567")])
        error = caught.value
        assert (error.errno, error.operation, error.key, error.transient) == (errno.ENOSPC, "write_part", "a", False)
        upload.abort()
        assert names(folder) == []
        assert trace.log[-3:] == ["unlink a", "open run", "fsync run"]
        assert os.listdir("/proc/self/fd") == before
        for call in (upload.complete, lambda: upload.write_part(1, 0, [memoryview(b"1")])):
            with pytest.raises(StoreError):
                call()

    def test_a_failed_sync_is_never_forgotten(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """After a failed fsync a second complete fails as well: the kernel may have dropped the pages it lost."""
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"1")])
        trace.faults["fsync"] = failing(errno.EIO)
        with pytest.raises(StoreError) as caught:
            upload.complete()
        assert caught.value.errno == errno.EIO
        del trace.faults["fsync"]
        with pytest.raises(StoreError) as caught:
            upload.complete()
        assert not caught.value.transient
        upload.abort()
        assert names(folder) == []

    def test_an_abort_that_fails_can_be_called_again(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """A file that could not be removed is told, and removed by the next call."""
        upload = store.upload("a")
        trace.faults["unlink"] = failing(errno.EACCES)
        with pytest.raises(StoreError):
            upload.abort()
        assert names(folder) == ["a"]
        del trace.faults["unlink"]
        upload.abort()
        assert names(folder) == []


class TestDelete:
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


class TestClock:
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
