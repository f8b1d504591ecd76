"""Claim, commit and what becomes of a commit whose reply was lost."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dcp_storage.commit import Attempt, Steps, begin, remove_replaced
from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    CorruptCheckpointError,
    StoreError,
)
from dcp_storage.fence import delete_folder
from dcp_storage.records import ManifestRef, encode_commit
from dcp_storage.store import Atomicity, Store, WrappedStore
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.wrappers import Request
from tests.protocol.acting import Saver, body_of, commit_now, contents
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


def shards(store: DictStore) -> set[str]:
    return {name for name in files_of(store) if name.startswith("__")}


class NotAtomic(WrappedStore):
    """A store whose create cannot be trusted."""

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.UNKNOWN


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_a_clean_folder_gives_the_plain_names() -> None:
    """In an empty folder a save takes the plain names, and its claim is gone afterwards."""
    store = DictStore()
    attempt = commit_now(store, A)
    assert (attempt.plain, attempt.claimed, attempt.committed) == (True, True, True)
    assert set(files_of(store)) == {*PLAIN, ".manifest", ".commit", ".metadata"}


@pytest.mark.parametrize("name", ["notes.txt", ".commit.1", "__init__.py"])
def test_foreign_files_do_not_keep_a_save_from_the_plain_names(name: str) -> None:
    """Somebody's own files in the folder neither block the claim nor are touched."""
    store = DictStore()
    put(store, name, b"mine")
    commit_now(store, A)
    assert shards(store) - {name} == PLAIN
    assert files_of(store)[name] == b"mine"


@pytest.mark.parametrize(
    "name",
    [
        ".claim",
        "__7_0.distcp",
        f"__0_0.{B}.distcp",
        f".manifest.{B}",
        f".commit.{B}",
        f".claim.{B}",
        ".metadata.tmp",
        "__0.metadata.tmp",
    ],
)
def test_anything_of_ours_or_of_stock_means_tokens(name: str) -> None:
    """Where any attempt may have been, every name of this one carries a token, and no claim is made or removed."""
    store = DictStore()
    put(store, name)
    attempt = commit_now(store, A)
    assert (attempt.plain, attempt.claimed) == (False, False)
    assert not (shards(store) - {name}) & PLAIN
    assert f".manifest.{A}" in files_of(store)
    assert name in files_of(store)


def test_a_torn_commit_means_tokens() -> None:
    """A torn commit object blocks the plain names too."""
    store = DictStore()
    put(store, ".commit", b"{")
    attempt = commit_now(store, A)
    assert (attempt.plain, attempt.number) == (False, 1)
    assert highest(files_of(store))[0] == 2


def test_who_loses_the_claim_takes_tokens_and_leaves_it() -> None:
    """Two attempts in a clean folder: one has the plain names, the other tokens, and the claim is the first one's."""
    store = DictStore()
    first, second = Saver(store, A), Saver(store, B)
    # The second lists the clean folder, then the first claims it, then the second wants to.
    hooked = Hooked(store, before=_once("create", ".claim", first.begin))
    second.store = hooked
    second.begin()
    assert first.attempt is not None
    assert second.attempt is not None
    assert (first.attempt.plain, second.attempt.plain, second.attempt.claimed) == (True, False, False)
    second.write()
    second.publish()
    assert ".claim" in files_of(store)
    assert loaded_by(store) == {B}
    first.write()
    with pytest.raises(CheckpointExistsError):
        first.publish()
    assert loaded_by(store) == {B}


def test_the_second_listing_sees_what_came_before_the_claim() -> None:
    """Files that appear between the first listing and the claim mean tokens, though the claim is ours."""
    store = DictStore()
    hooked = Hooked(store, before=_once("create", ".claim", lambda: put(store, "__5_0.distcp")))
    saver = Saver(hooked, A)
    attempt = saver.save()
    assert (attempt.plain, attempt.claimed) == (False, True)
    assert PLAIN.isdisjoint(shards(store))
    assert ".claim" not in files_of(store)


@pytest.mark.parametrize("when", ["lost", "late"])
def test_a_claim_whose_reply_was_lost_gives_no_plain_names(when: str) -> None:
    """A claim that may be ours is never built on, but it is taken away after the commit."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("create", name=r"\.claim", when=when, late_after=1)])  # type: ignore[arg-type]
    attempt = commit_now(faulty, A)
    assert (attempt.plain, attempt.claimed) == (False, True)
    assert PLAIN.isdisjoint(shards(store))
    assert ".claim" not in files_of(store)


def test_a_claim_that_fails_once_does_not_fail_the_save() -> None:
    """One 503 at the claim is no reason to fail: the save tries again or takes tokens."""
    store = DictStore()
    busy = Fault("create", name=r"\.claim", error=lambda: StoreError("503", operation="create", transient=True))
    commit_now(FaultyStore(store, [busy]), A)
    assert loaded_by(store) == {A}


def test_a_claim_that_is_forbidden_fails_the_save_before_anything_is_written() -> None:
    """Where nothing may be created the save says so at once."""
    store = DictStore()
    no = Fault("create", nth=None, error=lambda: StoreError("no", operation="create", errno=errno.EACCES))
    with pytest.raises(StoreError) as caught:
        Saver(FaultyStore(store, [no]), A).begin()
    assert caught.value.errno == errno.EACCES
    assert files_of(store) == {}


def test_nobody_asked_means_no_claim() -> None:
    """Where no rank holds a fresh question there is no use for plain names."""
    store = DictStore()
    attempt = Attempt(store, A, asked=False)
    begin(attempt, Steps())
    assert (attempt.plain, attempt.claimed) == (False, False)
    assert files_of(store) == {}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_live_commit_is_refused_before_anything_is_written() -> None:
    """Without overwrite a committed checkpoint is refused, and the folder stays as it was."""
    store = DictStore()
    commit_now(store, A)
    before = files_of(store)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        Saver(store, B).begin()
    assert files_of(store) == before


def test_a_void_is_not_refused() -> None:
    """After a delete a save needs no overwrite; it goes above the void, with tokens."""
    store = DictStore()
    commit_now(store, A)
    delete_folder(store)
    attempt = commit_now(store, B)
    assert (attempt.number, attempt.plain) == (2, False)
    assert highest(files_of(store))[0] == 3
    assert loaded_by(store) == {B}


@pytest.mark.parametrize("name", [".metadata", "__3.metadata"])
def test_a_stock_checkpoint_is_refused(name: str) -> None:
    """What stock torch wrote, for all ranks or for one, is only replaced with overwrite, and then by other names."""
    store = DictStore()
    put(store, name, b"stock")
    put(store, "__0_0.distcp", b"stock too")
    with pytest.raises(CheckpointExistsError, match="stock"):
        Saver(store, A).begin()
    attempt = commit_now(store, A, overwrite=True)
    assert not attempt.plain
    assert files_of(store)["__0_0.distcp"] == b"stock too"
    assert loaded_by(store) == {A}


def test_ranks_without_collectives_are_never_overwritten() -> None:
    """A folder with per-rank commits is refused, overwrite or not."""
    store = DictStore()
    put(store, "__0.commit", b"{}")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="without collectives"):
            Saver(store, A, overwrite).begin()


def test_overwrite_on_a_store_that_is_not_atomic_needs_the_users_word() -> None:
    """Where a second create is not refused, replacing a checkpoint needs ``assume_single_writer``."""
    inner = DictStore()
    store = NotAtomic(inner)
    commit_now(store, A)
    with pytest.raises(CheckpointExistsError, match="assume_single_writer"):
        begin(Attempt(store, B, overwrite=True), Steps())
    attempt = Attempt(store, B, overwrite=True, assume_single_writer=True)
    begin(attempt, Steps())
    assert attempt.single_writer
    assert len(attempt.warnings) == 1


def test_a_store_that_is_not_atomic_gets_tokens_and_a_commit_that_says_so() -> None:
    """Two attempts could both believe they hold such a claim: none is made, and the commit says ``single_writer``."""
    inner = DictStore()
    attempt = commit_now(NotAtomic(inner), A)
    assert (attempt.plain, attempt.claimed) == (False, False)
    assert PLAIN.isdisjoint(shards(inner))
    said = highest(files_of(inner))[1]
    assert said is not None
    assert said["single_writer"] is True


# -- publishing --------------------------------------------------------------------------------------------------------


def loaded_by(store: DictStore) -> set[str] | None:
    """Whose files the committed checkpoint has; None where nothing is committed. Raises where it is not whole."""
    files = files_of(store)
    _, said = highest(files)
    if said is None or said["state"] == "void":
        return None
    manifest = json.loads(files[said["manifest"]["name"]])
    return contents(files, [record["name"] for record in manifest["files"]])


def _once(operation: str, name: str, action: Callable[[], object]) -> Callable[[Request], None]:
    left = [action]

    def hook(request: Request) -> None:
        if left and (request.operation, request.name) == (operation, name):
            left.pop()()

    return hook


@pytest.mark.parametrize("found", [None, 31, 33])
def test_a_file_that_is_not_as_reported_fails_the_save(found: int | None) -> None:
    """A reported file that is missing, short or long where the coordinator looks: named, with both sizes, no commit."""
    store = DictStore()
    saver = Saver(store, A)
    saver.begin()
    saver.write()
    store.delete(["__1_0.distcp"])
    if found is not None:
        put(store, "__1_0.distcp", b"x" * found)
    with pytest.raises(CorruptCheckpointError) as caught:
        saver.publish()
    assert (caught.value.file, caught.value.wanted, caught.value.found) == ("__1_0.distcp", len(body_of(A)), found)
    assert highest(files_of(store)) == (0, None)


def test_overwriting_removes_what_the_old_commit_names_and_nothing_else() -> None:
    """After a replacing save the old files and manifest are gone; orphans and foreign files stay."""
    store = DictStore()
    commit_now(store, A)
    put(store, f"__0_0.{'c' * 16}.distcp", b"orphan")
    put(store, "notes.txt", b"mine")
    commit_now(store, B, overwrite=True)
    assert set(files_of(store)) == {
        ".commit",
        ".commit.2",
        ".metadata",
        f".manifest.{B}",
        f"__0_0.r0{B[2:]}.distcp",
        f"__1_0.r1{B[2:]}.distcp",
        f"__0_0.{'c' * 16}.distcp",
        "notes.txt",
    }
    assert loaded_by(store) == {B}


def test_files_that_both_commits_name_stay() -> None:
    """What the new commit names is kept, whatever the old one says."""
    store = DictStore()
    first = commit_now(store, A)
    again = Attempt(store, B, overwrite=True)
    begin(again, Steps())
    again.manifest, again.ref = first.manifest, first.ref
    before = files_of(store)
    remove_replaced(again)
    assert files_of(store) == before
    assert again.warnings == []


def test_the_number_is_that_of_the_first_listing() -> None:
    """A save that was overtaken while its ranks wrote does not aim again: it loses, and the winner stays whole."""
    store = DictStore()
    commit_now(store, A)
    slow = Saver(store, B, overwrite=True)
    slow.begin()
    slow.write()
    commit_now(store, "c" * 16, overwrite=True)
    with pytest.raises(CheckpointExistsError):
        slow.publish()
    assert loaded_by(store) == {"c" * 16}
    assert not [name for name in files_of(store) if B[2:] in name]


def test_a_view_that_cannot_be_written_is_a_warning() -> None:
    """After the commit nothing fails the save any more; the report says what could not be done."""
    store = DictStore()
    faults = [Fault("put", nth=None, name=r"\.metadata"), Fault("delete", nth=None)]
    attempt = commit_now(FaultyStore(store, faults), A)
    assert attempt.committed
    assert len(attempt.warnings) == 2
    assert loaded_by(store) == {A}
    assert {".claim"} == set(files_of(store)) - {*PLAIN, ".manifest", ".commit"}


def test_an_old_manifest_that_is_gone_is_a_warning() -> None:
    """What was replaced and cannot be read any more is left to prune, and the save succeeds."""
    store = DictStore()
    commit_now(store, A)
    store.delete([".manifest"])
    attempt = commit_now(store, B, overwrite=True)
    assert len(attempt.warnings) == 1
    assert loaded_by(store) == {B}


# -- replies that were lost --------------------------------------------------------------------------------------------


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
    saver.store = Hooked(late, before=_once("read", ".commit.2", rival.save))
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
