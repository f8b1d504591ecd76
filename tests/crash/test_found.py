"""What the enumeration found when it was first run, and its kin, each by the shortest way to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dcp_storage.errors import ObjectNotFoundError, StoreError
from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.tools.delete import FINISH, sweep_with
from dcp_storage.tools.pins import pin_folder
from tests.crash.points import plain
from tests.protocol.acting import commit_now

A, B = "a" * 16, "b" * 16


@pytest.mark.parametrize("name", [".commit.2", ".pin"])
def test_a_temporary_file_of_a_commit_or_a_pin_is_pruned(tmp_path: Path, name: str) -> None:
    """A process that dies before a numbered commit, or a pin, gets its name leaves a file that prune takes."""
    store = LocalStore(tmp_path)
    commit_now(store, A)
    left = f"{name}.{B}"
    store.put(left, [memoryview(b"half of it")])
    prune_folder(store, grace=0)
    assert left not in {entry.name for entry in store.entries()}


def test_a_pin_is_not_pruned(tmp_path: Path) -> None:
    """Only a pin's temporary file is ours to take."""
    store = LocalStore(tmp_path)
    commit_now(store, A)
    pin_folder(store)
    store.put(f"__0_0.{B}.distcp", [memoryview(b"x")])
    prune_folder(store, grace=0)
    assert ".pin" in {entry.name for entry in store.entries()}


def test_what_finishes_a_delete_ends_older_uploads() -> None:
    """A delete was killed after its void: who finishes it aborts uploads from before the void, and no later one."""
    store = DictStore()
    commit_now(store, A)
    store.upload(f"__0_0.{A}.distcp").write_part(1, 0, [memoryview(b"x")])
    store.objects.advance(5)
    delete_folder(store)
    store.put(f"__1_0.{A}.distcp", [memoryview(b"what the delete had no time for")])
    store.objects.held["folder", f"__1_0.{A}.distcp"].modified -= 60
    store.objects.advance(5)
    store.upload(f"__0_0.{B}.distcp").write_part(1, 0, [memoryview(b"x")])
    sweep = sweep_with(FINISH, store, 0, False)
    assert sweep.uploads == [f"__0_0.{A}.distcp"]
    assert [entry.name for entry in store.open_uploads()] == [f"__0_0.{B}.distcp"]


def test_objects_of_others_are_made_durable(tmp_path: Path) -> None:
    """Each file is synced, and the folder last; one that is not there is said."""
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        os.fsync(fd)

    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    store = LocalStore(tmp_path, calls=Syscalls(fsync=fsync))
    store.make_durable(["a", "b"])
    assert synced == ["a", "b", tmp_path.name]
    with pytest.raises(ObjectNotFoundError) as caught:
        store.make_durable(["gone"])
    assert caught.value.key == "gone"


def test_a_file_that_cannot_be_made_durable_is_said(tmp_path: Path) -> None:
    """A disk that fails at the sync: operation, name and number are told."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(StoreError) as caught:
        LocalStore(tmp_path, calls=Syscalls(fsync=fail)).make_durable(["a"])
    assert (caught.value.operation, caught.value.key, caught.value.errno) == ("make_durable", "a", errno.EIO)


def test_a_token_that_looks_like_a_folder() -> None:
    """A call is the same in every run, also where a token happens to have the letters of a trial's folder in it."""
    calls = [f"write t00012/run/.manifest.{token}.{token} @0" for token in (A, "abct12345defghij", "t12345abcdefghij")]
    assert {plain(call) for call in calls} == {"write T/run/.manifest.*.* @0"}
