"""What becomes of a commit whose reply was lost, or whose number another took (invariant I6)."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import msgspec
import pytest

from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    StoreError,
)
from dcp_storage.records import ManifestRef, encode_commit
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from tests.protocol.acting import Saver, commit_now, loaded_by, once
from tests.protocol.oracle import Hooked, files_of, highest

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
PLAIN = {"__0_0.distcp", "__1_0.distcp"}
COMMIT = r"\.commit(\.\d+)?"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between tries of a commit take no time here."""
    monkeypatch.setattr("dcp_storage.commit_object.time.sleep", lambda seconds: None)


def put(store: Store, name: str, body: bytes = b"x") -> None:
    store.put(name, [memoryview(body)])


def test_a_lost_reply_of_a_commit_that_was_made_is_a_success() -> None:
    """The token that is read back is ours: the save has committed, by one create."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("create", name=COMMIT, when="lost")])
    attempt = commit_now(faulty, A)
    assert attempt.committed
    assert loaded_by(store) == {A}


def test_a_create_that_never_arrived_is_made_again() -> None:
    """An ambiguous error with nothing there: the commit is tried again and succeeds."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("create", name=COMMIT, when="late")])
    attempt = commit_now(faulty, A)
    assert attempt.committed
    assert loaded_by(store) == {A}
    assert faulty.deliver_late() == 1
    assert len(faulty.late_errors) == 1
    assert loaded_by(store) == {A}


def test_a_create_that_lands_late_is_recognised_as_ours() -> None:
    """The first create lands between two tries: the second finds the name taken, and the token is ours."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("create", name=COMMIT, when="late", late_after=2)])
    attempt = commit_now(faulty, A)
    assert attempt.committed
    assert faulty.late_errors == []
    assert loaded_by(store) == {A}


def test_a_lost_reply_while_another_commits_is_a_defeat() -> None:
    """Ours never landed and another took the number: the save fails, the other's checkpoint is untouched."""
    store = DictStore()
    commit_now(store, "c" * 16)
    saver = Saver(store, A, overwrite=True)
    saver.begin()
    saver.write()
    rival = Saver(store, B, overwrite=True)
    late = FaultyStore(store, [Fault("create", name=COMMIT, when="late")])
    saver.store = Hooked(late, before=once("read", ".commit.2", rival.save))
    assert saver.attempt is not None
    saver.attempt.store = saver.store
    with pytest.raises(CheckpointExistsError):
        saver.publish()
    assert late.deliver_late() == 1
    assert loaded_by(store) == {B}


@pytest.mark.parametrize("when", ["lost", "late"])
def test_a_commit_that_cannot_be_looked_at_is_unknown_and_nothing_is_deleted(when: str) -> None:
    """No reply and no read-back: CommitUnknownError; every file of the attempt stays, for the commit may be there."""
    store = DictStore()
    faults = [
        Fault("create", nth=None, name=COMMIT, when=when),  # type: ignore[arg-type]
        Fault("read", nth=None, name=COMMIT),
    ]
    faulty = FaultyStore(store, faults)
    with pytest.raises(CommitUnknownError) as caught:
        commit_now(faulty, A)
    assert (caught.value.key, caught.value.path) == (".commit", "dict://folder")
    assert {*PLAIN, ".manifest", ".claim"} <= set(files_of(store))
    faulty.deliver_late()
    assert loaded_by(store) == {A}


def test_a_commit_that_never_arrives_is_unknown_after_a_few_tries() -> None:
    """Every create is lost on its way and may still land: unknown, not failed, and a late one is then whole."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("create", nth=None, name=COMMIT, when="late")])
    with pytest.raises(CommitUnknownError):
        commit_now(faulty, A)
    assert highest(files_of(store)) == (0, None)
    assert 2 <= len(faulty.fired) <= 10
    faulty.deliver_late()
    assert loaded_by(store) == {A}


def test_a_doubt_is_not_forgotten_when_a_later_try_is_refused() -> None:
    """After a create without a reply, a plain refusal of the next one does not make the outcome known."""
    store = DictStore()
    faults = [
        Fault("create", name=COMMIT, when="late"),
        Fault("create", nth=None, name=COMMIT, error=lambda: StoreError("no", operation="create", errno=errno.EACCES)),
    ]
    faulty = FaultyStore(store, faults)
    with pytest.raises(CommitUnknownError):
        commit_now(faulty, A)
    assert set(files_of(store)) >= {*PLAIN, ".manifest"}
    faulty.deliver_late()
    assert loaded_by(store) == {A}


def test_a_plain_refusal_is_a_failure_that_takes_its_files_back() -> None:
    """An error that leaves no doubt (no right, no space) is raised as it is, and what was written is removed."""
    store = DictStore()
    full = Fault("create", name=COMMIT, error=lambda: StoreError("full", operation="create", errno=errno.ENOSPC))
    with pytest.raises(StoreError) as caught:
        commit_now(FaultyStore(store, [full]), A)
    assert caught.value.errno == errno.ENOSPC
    assert set(files_of(store)) == {".claim"}


def test_a_passing_refusal_is_tried_again() -> None:
    """A 503 that leaves no doubt is followed by another create."""
    store = DictStore()
    busy = [
        Fault("create", nth=n, name=COMMIT, error=lambda: StoreError("503", operation="create", transient=True))
        for n in (1, 2)
    ]
    assert commit_now(FaultyStore(store, busy), A).committed
    assert loaded_by(store) == {A}


@pytest.mark.parametrize("body", [b"", b"{", encode_commit(new_commit(1, A, manifest=None))[:-3]])
def test_a_torn_commit_under_our_number_is_anothers(body: bytes) -> None:
    """A body that does not check is no commit of ours: the number is taken and the save loses."""
    store = DictStore()
    saver = Saver(store, A)
    saver.begin()
    saver.write()
    put(store, ".commit", body)
    with pytest.raises(CheckpointExistsError):
        saver.publish()
    assert files_of(store)[".commit"] == body


def test_a_commit_of_a_later_format_under_our_number_is_anothers() -> None:
    """A later version took the number: the save loses instead of guessing."""
    store = DictStore()
    saver = Saver(store, A)
    saver.begin()
    saver.write()
    later = encode_commit(msgspec.structs.replace(new_commit(1, A, manifest=None), format=2))
    put(store, ".commit", later)
    with pytest.raises(CheckpointExistsError):
        saver.publish()
    assert files_of(store)[".commit"] == later


def test_a_commit_whose_name_is_not_durable_is_not_reported_as_made(tmp_path: Path) -> None:
    """The commit's name is there and syncing its folder failed: success is only said once a sync has gone through."""
    synced: list[str] = []
    state = {"linked": False, "failed": False}

    def link(existing: str, new: str) -> None:
        os.link(existing, new)
        state["linked"] = True

    def fsync(fd: int) -> None:
        if state["linked"] and not state["failed"]:
            state["failed"] = True
            raise OSError(errno.EIO, "the disk did not answer")
        os.fsync(fd)
        if state["linked"]:
            synced.append("folder")

    store = LocalStore(tmp_path, calls=dataclasses.replace(Syscalls(), link=link, fsync=fsync))
    commit = new_commit(1, A, manifest=ManifestRef(".manifest", 1, 1))
    try:
        create_commit(store, commit)
    except CommitUnknownError:
        return
    assert state["failed"]
    assert synced


def test_two_commits_of_one_number_have_one_winner() -> None:
    """Of two attempts at one number one returns and the other is told that it lost."""
    store = DictStore()
    ref = ManifestRef(".manifest", 1, 1)
    create_commit(store, new_commit(3, A, manifest=ref))
    with pytest.raises(CheckpointExistsError) as caught:
        create_commit(store, new_commit(3, B, manifest=ref))
    assert caught.value.key == ".commit.3"
    said = highest(files_of(store))[1]
    assert said is not None
    assert said["author"] == A
