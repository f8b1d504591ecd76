"""Prune: what it takes, behind which fence, in which order, and what it leaves alone."""

from __future__ import annotations

import pytest

from dcp_storage.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CommitUnknownError,
)
from dcp_storage.fence import Sweep, delete_folder, prune_folder
from dcp_storage.store import Atomicity, Entry, Store, WrappedStore
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.wrappers import Request
from tests.protocol.acting import Saver, commit_now
from tests.protocol.oracle import Hooked, Killed, files_of, highest

A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"
ORPHAN = f"__4_0.{C}.distcp"
DAY = 86400.0
FOREIGN = {"notes.txt": b"mine", "model.distcp": b"mine", ".commit.1": b"mine", ".metadata.tmp": b"stock's"}
ALIVE = {"__0_0.distcp", "__1_0.distcp", ".manifest", ".commit", ".metadata"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between tries of a fence take no time here."""
    monkeypatch.setattr("dcp_storage.commit_object.time.sleep", lambda seconds: None)


def put(store: Store, *names: str) -> None:
    for name in names:
        store.put(name, [memoryview(FOREIGN.get(name, b"x"))])


def names_in(store: DictStore) -> set[str]:
    return set(files_of(store))


def state_of(store: DictStore) -> tuple[int, str]:
    number, said = highest(files_of(store))
    return number, "" if said is None else said["state"]


def authors_file(store: DictStore, author: str) -> bool:
    return any(author[2:] in name for name in files_of(store))


def test_a_folder_that_never_committed_is_emptied_behind_a_void() -> None:
    """Leftovers of a dead save go, after commit 1 was made a void; foreign files stay."""
    store = DictStore()
    put(store, *FOREIGN)
    put(store, ".claim", "__0_0.distcp", "__1_0.distcp", ".manifest", ORPHAN, f".commit.{C}")
    sweep = prune_folder(store, grace=0)
    assert names_in(store) == {".commit", *FOREIGN}
    assert state_of(store) == (1, "void")
    assert (sweep.number, sweep.fenced, sweep.why) == (0, 1, "")
    assert sweep.frees == 6


def test_orphans_beside_a_live_commit_go_behind_a_commit_that_restates_it() -> None:
    """Orphans, a stale claim and old manifests go; the checkpoint stays whole under the next number."""
    store = DictStore()
    commit_now(store, A)
    put(store, ORPHAN, ".claim", f".manifest.{C}", *FOREIGN)
    said = highest(files_of(store))[1]
    prune_folder(store, grace=0)
    number, now = highest(files_of(store))
    assert now is not None
    assert said is not None
    assert (number, now["state"], now["restates"], now["manifest"]) == (2, "committed", 1, said["manifest"])
    assert now["author"] != A
    assert names_in(store) == {*ALIVE, ".commit.2", *FOREIGN}


def test_a_live_checkpoint_without_orphans_needs_no_fence() -> None:
    """Where nothing is to be deleted no commit is made."""
    store = DictStore()
    commit_now(store, A)
    before = files_of(store)
    sweep = prune_folder(store, grace=0)
    assert (sweep.fenced, sweep.doomed) == (None, [])
    assert files_of(store) == before


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("age", [0.0, 6.9 * DAY])
def test_young_files_are_left_alone_and_nothing_is_fenced(live: bool, age: float) -> None:
    """One loose file younger than the grace may be a save in flight: no fence, no deletion, and a sentence why."""
    store = DictStore()
    if live:
        commit_now(store, A)
    put(store, ORPHAN)
    store.objects.advance(30 * DAY)
    put(store, f"__5_0.{C}.distcp")
    store.objects.advance(age)
    before = files_of(store)
    sweep = prune_folder(store, grace=7 * DAY)
    assert files_of(store) == before
    assert (sweep.fenced, sweep.doomed) == (None, [])
    assert sweep.why


def test_old_files_go_by_the_stores_own_clock() -> None:
    """A file is old when the store's clock, not this machine's, says so."""
    store = DictStore()
    store.objects.ahead = -1000 * DAY
    put(store, ORPHAN)
    store.objects.advance(7.1 * DAY)
    prune_folder(store, grace=7 * DAY)
    assert names_in(store) == {".commit"}


class Ageless(WrappedStore):
    """A store that does not say when things were written."""

    def entries(self) -> list[Entry]:
        return [Entry(e.name, e.size, None) for e in self.inner.entries()]


def test_files_without_an_age_are_never_old() -> None:
    """Where the store tells no ages, only a prune without any grace takes a file."""
    store = DictStore()
    put(store, ORPHAN)
    store.objects.advance(1000 * DAY)
    sweep = prune_folder(Ageless(store), grace=DAY)
    assert sweep.why
    assert names_in(store) == {ORPHAN}
    prune_folder(Ageless(store), grace=0)
    assert names_in(store) == {".commit"}


def test_a_stock_checkpoint_is_left_alone() -> None:
    """A ``.metadata`` without any commit object is a checkpoint of stock torch, however old it is."""
    store = DictStore()
    put(store, ".metadata", "__0_0.distcp", "__0_1.distcp")
    store.objects.advance(1000 * DAY)
    before = files_of(store)
    sweep = prune_folder(store, grace=DAY)
    assert files_of(store) == before
    assert "stock" in sweep.why


def test_ranks_without_collectives_are_left_alone() -> None:
    """A folder with per-rank commits is no rubbish."""
    store = DictStore()
    put(store, "__0.commit", f"__0.manifest.{A}", "__0_0.distcp")
    store.objects.advance(1000 * DAY)
    before = files_of(store)
    sweep = prune_folder(store, grace=DAY)
    assert files_of(store) == before
    assert sweep.why


def test_a_dry_run_says_what_it_would_do_and_changes_nothing() -> None:
    """With ``apply=False`` the same files are found, and no request writes."""
    store = DictStore()
    commit_now(store, A)
    put(store, ORPHAN, ".claim")
    before = files_of(store)
    recording = RecordingStore(store)
    sweep = prune_folder(recording, grace=0, apply=False)
    assert {e.name for e in sweep.doomed} == {ORPHAN, ".claim"}
    assert sweep.frees == 2
    assert files_of(store) == before
    assert {"put", "create", "delete", "abort_uploads"}.isdisjoint(recording.operations())


class NotAtomic(WrappedStore):
    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.NONE


def test_a_store_that_is_not_atomic_is_pruned_on_the_users_word_only() -> None:
    """Where a fence holds nobody off, prune needs ``assume_single_writer`` as soon as it would delete something."""
    store = DictStore()
    commit_now(store, A)
    prune_folder(NotAtomic(store), grace=0)
    put(store, ORPHAN)
    before = files_of(store)
    with pytest.raises(CheckpointError, match="assume_single_writer") as caught:
        prune_folder(NotAtomic(store), grace=0)
    assert caught.value.kind == "single-writer"
    assert files_of(store) == before
    prune_folder(NotAtomic(store), grace=0, assume_single_writer=True)
    assert ORPHAN not in names_in(store)


def test_a_prune_that_lost_its_number_deletes_nothing() -> None:
    """A save that commits between the listing and the fence wins, and keeps every file."""
    store = DictStore()
    saver = Saver(store, A)
    saver.begin()
    saver.write()
    done: list[object] = []

    def commit(request: Request) -> None:
        if request.operation == "create" and not done:
            done.append(None)
            saver.publish()

    with pytest.raises(CheckpointReplacedError):
        prune_folder(Hooked(store, before=commit), grace=0)
    assert names_in(store) == ALIVE
    assert state_of(store) == (1, "committed")


def test_two_prunes_of_one_folder_have_one_winner() -> None:
    """The second of two prunes that listed the same folder gives up."""
    store = DictStore()
    put(store, ORPHAN)
    done: list[object] = []

    def other(request: Request) -> None:
        if request.operation == "create" and not done:
            done.append(None)
            prune_folder(store, grace=0)

    with pytest.raises(CheckpointReplacedError):
        prune_folder(Hooked(store, before=other), grace=0)
    assert names_in(store) == {".commit"}


def test_a_prune_whose_fence_is_unknown_deletes_nothing() -> None:
    """No reply and no read-back: CommitUnknownError, and the orphan is there."""
    store = DictStore()
    commit_now(store, A)
    put(store, ORPHAN)
    before = files_of(store)
    faults = [Fault("create", nth=None, when="late"), Fault("read", nth=None, name=r"\.commit\.2")]
    with pytest.raises(CommitUnknownError):
        prune_folder(FaultyStore(store, faults), grace=0)
    assert files_of(store) == before


def test_a_live_commit_whose_manifest_cannot_be_read_is_not_pruned() -> None:
    """Where it cannot be known which files the live commit names, nothing is deleted."""
    store = DictStore()
    commit_now(store, A)
    put(store, ORPHAN)
    store.put(".manifest", [memoryview(b"{}")])
    before = files_of(store)
    with pytest.raises(CheckpointError):
        prune_folder(store, grace=0)
    assert files_of(store) == before


def test_lower_commits_go_in_ascending_order_and_the_live_one_stays() -> None:
    """Commits below the live one go one by one, the lowest first, once they are old."""
    store = DictStore()
    for number, author in enumerate((A, B, C)):
        commit_now(store, author, overwrite=number > 0)
    store.objects.advance(8 * DAY)
    recording = RecordingStore(store)
    prune_folder(recording, grace=7 * DAY)
    assert [call.names for call in recording.of("delete")] == [(".commit",), (".commit.2",)]
    assert state_of(store) == (3, "committed")
    assert authors_file(store, C)


def test_lower_commits_within_the_grace_stay() -> None:
    """A commit object younger than the grace is never deleted: it still holds late writers off."""
    store = DictStore()
    commit_now(store, A)
    commit_now(store, B, overwrite=True)
    store.objects.advance(6 * DAY)
    before = files_of(store)
    prune_folder(store, grace=7 * DAY)
    assert files_of(store) == before


def test_an_old_void_goes_last() -> None:
    """A deleted folder is swept once its void is old: commits in ascending order, the void at the very end."""
    store = DictStore()
    for number in range(11):
        commit_now(store, chr(ord("a") + number) * 16, overwrite=number > 0)
    delete_folder(store)
    store.objects.advance(8 * DAY)
    recording = RecordingStore(store)
    prune_folder(recording, grace=7 * DAY)
    names = [call.names for call in recording.of("delete")]
    assert names == [(".commit",), *((f".commit.{number}",) for number in range(2, 13))]
    assert files_of(store) == {}


def test_a_young_void_stays_with_all_below_it() -> None:
    """As long as the void is within the grace nothing of the row of commits goes."""
    store = DictStore()
    commit_now(store, A)
    store.objects.advance(30 * DAY)
    delete_folder(store)
    before = files_of(store)
    prune_folder(store, grace=7 * DAY)
    assert files_of(store) == before


def test_a_void_stays_while_files_are_swept() -> None:
    """The prune that finishes a killed delete takes files only; the voids wait for a later one."""
    store = DictStore()
    commit_now(store, A)
    delete_folder(store)
    put(store, ORPHAN)
    store.objects.advance(8 * DAY)
    prune_folder(store, grace=7 * DAY)
    assert names_in(store) == {".commit", ".commit.2", ".commit.3"}
    assert state_of(store) == (3, "void")


@pytest.mark.parametrize("at", range(3))
def test_a_sweep_of_commits_that_is_killed_never_uncovers_an_older_state(at: int) -> None:
    """Killed between two deletes of commit objects, the folder still says deleted, or nothing at all."""
    store = DictStore()
    commit_now(store, A)
    commit_now(store, B, overwrite=True)
    delete_folder(store)
    store.objects.advance(8 * DAY)
    left = [at]

    def die(request: Request) -> None:
        if request.operation == "delete":
            if not left[0]:
                raise Killed
            left[0] -= 1

    with pytest.raises(Killed):
        prune_folder(Hooked(store, before=die), grace=7 * DAY)
    assert state_of(store) == (3, "void")


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_old_uploads_of_ours_are_aborted_and_no_others() -> None:
    """Uploads begun before the grace are aborted; young ones, and those of foreign names, go on."""
    store = DictStore()
    commit_now(store, A)
    store.upload(ORPHAN)
    store.upload("video.mp4")
    store.objects.advance(8 * DAY)
    store.upload(f"__6_0.{C}.distcp")
    sweep = prune_folder(store, grace=7 * DAY)
    assert sweep.uploads == [ORPHAN]
    assert {e.name for e in store.open_uploads()} == {"video.mp4", f"__6_0.{C}.distcp"}


def test_a_dry_run_aborts_no_upload() -> None:
    """With ``apply=False`` open uploads are told and left."""
    store = DictStore()
    store.upload(ORPHAN)
    sweep = prune_folder(store, grace=0, apply=False)
    assert sweep.uploads == [ORPHAN]
    assert [e.name for e in store.open_uploads()] == [ORPHAN]


def test_a_sweep_begins_empty() -> None:
    """Two sweeps never share a token: each knows its own fence."""
    store = DictStore()
    assert Sweep(store).token != Sweep(store).token
