"""What the local store's writes leave when they fail, and in which order they reach the disk."""

from __future__ import annotations

import errno
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_storage.errors import (
    ObjectExistsError,
    StoreError,
)
from dcp_storage.names import new_token
from dcp_storage.store import Atomicity
from dcp_storage.stores import local_create
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls, rename_noreplace
from tests.stores.local_kit import WAYS, Recorded, Trace, failing, half_written, names


class TestPut(Recorded):
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
        with pytest.raises(StoreError) as put:
            store.put("a", [memoryview(b"1")])
        trace.faults["fsync"] = failing(errno.EIO, after=1)
        with pytest.raises(StoreError) as create:
            store.create("b", b"1")
        for error in (put.value, create.value):
            assert (error.ambiguous, error.errno) == (True, errno.EIO)
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
        tokens = {new_token() for _ in range(500)}
        assert len(tokens) == 500
        assert all(re.fullmatch("[a-z][a-z0-9]{15}", token) for token in tokens)


class TestCreate(Recorded):
    @pytest.fixture(params=sorted(WAYS))
    def way(self, request: pytest.FixtureRequest, trace: Trace) -> str:
        """Each way to create, by taking the better ones away."""
        trace.faults.update(WAYS[request.param])
        way: str = request.param
        return way

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
        """Of eight threads that create a name at once, exactly one succeeds in each of fifty rounds, with its body."""
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

    def test_an_exclusive_open_that_fails_removes_nothing(self, store: LocalStore, folder: Path, trace: Trace) -> None:
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


class TestUpload(Recorded):
    def test_the_order_on_the_disk(self, store: LocalStore, folder: Path, trace: Trace) -> None:
        """Parts go straight under the final name in any order; completing syncs the file, then the folder."""
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
        before = names(Path("/proc/self/fd"))
        upload = store.upload("a")
        with pytest.raises(StoreError) as caught:
            upload.write_part(1, 0, [memoryview(b"1234567")])
        error = caught.value
        assert (error.errno, error.operation, error.key, error.transient) == (errno.ENOSPC, "write_part", "a", False)
        upload.abort()
        assert names(folder) == []
        assert trace.log[-3:] == ["unlink a", "open run", "fsync run"]
        assert names(Path("/proc/self/fd")) == before
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
        (folder / "other").write_bytes(b"12345")
        with (folder / "other").open("rb+"):  # it gets the descriptor that the upload had
            with pytest.raises(StoreError) as caught:
                upload.complete()
            assert (caught.value.errno, caught.value.transient) == (errno.EINVAL, False)
        assert (folder / "other").read_bytes() == b"12345"
        upload.abort()
        assert names(folder) == ["other"]

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
