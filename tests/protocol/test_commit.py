"""The claim, what is refused, and what publishing does before and after the commit."""

from __future__ import annotations

import dataclasses
import errno

import pytest
import torch

from dcp_storage.commit import Attempt, Steps, begin, remove_replaced
from dcp_storage.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    StoreError,
)
from dcp_storage.fence import delete_folder
from dcp_storage.store import Atomicity, Store, WrappedStore
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from tests.protocol.acting import Saver, body_of, commit_now, loaded_by, once
from tests.protocol.oracle import Hooked, files_of, highest, loaded, save_to, writer_on

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
PLAIN = {"__0_0.distcp", "__1_0.distcp"}


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


def test_a_damaged_commit_with_a_view_beside_it_is_not_overwritten_unasked() -> None:
    """Where `.metadata` tells that a commit was there once, a save refuses although that commit cannot be read."""
    store = DictStore()
    commit_now(store, A)
    put(store, ".commit", files_of(store)[".commit"].replace(b"committed", b"cammitted"))
    with pytest.raises(CheckpointExistsError):
        Saver(store, B).begin()
    commit_now(store, B, overwrite=True)
    assert loaded_by(store) == {B}


def test_who_loses_the_claim_takes_tokens_and_leaves_it() -> None:
    """Two attempts in a clean folder: one has the plain names, the other tokens, and the claim is the first one's."""
    store = DictStore()
    first, second = Saver(store, A), Saver(store, B)
    # The second lists the clean folder, then the first claims it, then the second wants to.
    hooked = Hooked(store, before=once("create", ".claim", first.begin))
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
    hooked = Hooked(store, before=once("create", ".claim", lambda: put(store, "__5_0.distcp")))
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


def test_a_void_that_was_swept_under_a_save_ends_it() -> None:
    """A save that began from a deleted checkpoint's number does not replace the one that began after the sweep."""
    store = DictStore()
    commit_now(store, A)
    delete_folder(store)
    slow = Saver(store, B)
    slow.begin()
    slow.write()
    store.delete(list(files_of(store)))  # as a prune does it, once the void is older than the grace
    commit_now(store, "c" * 16)
    slow.write()
    with pytest.raises(CheckpointExistsError, match="swept"):
        slow.publish()
    assert loaded_by(store) == {"c" * 16}


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_nothing_is_taken_back_once_the_commit_is_there() -> None:
    """A step that fails after the commit cannot uncommit: the writer deletes nothing of a checkpoint that stands."""
    store = DictStore()
    writer = writer_on(store)

    def fail(attempt: Attempt) -> None:
        raise StoreError("later", operation="put")

    writer._steps = dataclasses.replace(writer._steps, publish=(*writer._steps.publish, fail))
    assert isinstance(save_to(writer, {"w": torch.ones(3)}), StoreError)
    values = loaded(files_of(store))
    assert values is not None
    assert values["w"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_commit_that_is_refused_takes_the_writers_files_back() -> None:
    """After a failure before the commit the writer leaves its claim and nothing else (invariant I4)."""
    store = DictStore()
    no = Fault("create", name=r"\.commit", error=lambda: StoreError("no", operation="create", errno=errno.EACCES))
    assert isinstance(save_to(writer_on(FaultyStore(store, [no])), {"w": torch.ones(3)}), StoreError)
    assert set(files_of(store)) == {".claim"}
