"""Delete: a void first, then exactly what was listed; and what becomes of a delete that was killed."""

from __future__ import annotations

import pytest

from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CommitUnknownError,
    NotCommittedError,
    StoreError,
)
from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.wrappers import Request
from tests.protocol.acting import Saver, commit_now
from tests.protocol.oracle import Hooked, Killed, files_of, highest

A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"
ORPHAN = f"__4_0.{C}.distcp"
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


def test_a_delete_leaves_commits_and_foreign_files_only() -> None:
    """A void is above the commit, everything of ours is gone, and what is not ours is as it was."""
    store = DictStore()
    commit_now(store, A)
    put(store, ORPHAN, *FOREIGN)
    sweep = delete_folder(store)
    assert files_of(store).keys() == {".commit", ".commit.2", *FOREIGN}
    assert {name: files_of(store)[name] for name in FOREIGN} == FOREIGN
    assert state_of(store) == (2, "void")
    assert (sweep.number, sweep.fenced) == (1, 2)
    assert {e.name for e in sweep.doomed} == {*ALIVE, ORPHAN} - {".commit"}


def test_a_delete_takes_exactly_what_it_listed() -> None:
    """What appears after the listing, of ours or not, is left."""
    store = DictStore()
    commit_now(store, A)
    later = f"__0_0.{B}.distcp"
    hooked = Hooked(store, after=lambda request: put(store, later) if request.operation == "create" else None)
    delete_folder(hooked)
    assert names_in(store) == {".commit", ".commit.2", later}


def test_a_delete_takes_a_view_that_was_written_after_its_listing() -> None:
    """The save that a delete deletes may write ``.metadata`` after that was listed: it goes all the same."""
    store = DictStore()
    commit_now(store, A)
    view = files_of(store)[".metadata"]
    store.delete([".metadata"])

    def write(request: Request) -> None:
        if request.operation == "create":
            store.put(".metadata", [memoryview(view)])

    delete_folder(Hooked(store, before=write))
    assert names_in(store) == {".commit", ".commit.2"}


@pytest.mark.parametrize("made", ["nothing", "foreign", "unfinished", "deleted", "stock"])
def test_a_delete_of_nothing_says_so_and_changes_nothing(made: str) -> None:
    """Without a live commit there is nothing to delete, and the folder stays as it is."""
    store = DictStore()
    if made == "foreign":
        put(store, "notes.txt", ".commit.1")
    if made == "unfinished":
        put(store, ".claim", "__0_0.distcp")
    if made == "stock":
        put(store, ".metadata", "__0_0.distcp")
    if made == "deleted":
        commit_now(store, A)
        delete_folder(store)
    before = files_of(store)
    with pytest.raises(CheckpointNotFoundError) as caught:
        delete_folder(store)
    assert isinstance(caught.value, NotCommittedError) == (made not in ("nothing", "foreign"))
    assert files_of(store) == before


def test_a_delete_that_lost_its_number_deletes_nothing() -> None:
    """A save that commits between the listing and the void wins: its checkpoint is whole and all files are there."""
    store = DictStore()
    commit_now(store, A)
    done: list[object] = []

    def save(request: Request) -> None:
        if request.operation == "create" and not done:
            done.append(None)
            commit_now(store, B, overwrite=True)

    with pytest.raises(CheckpointReplacedError):
        delete_folder(Hooked(store, before=save))
    assert state_of(store) == (2, "committed")
    assert authors_file(store, B)


def test_a_delete_whose_void_is_unknown_deletes_nothing() -> None:
    """No reply and no read-back: CommitUnknownError, and every file is there."""
    store = DictStore()
    commit_now(store, A)
    before = files_of(store)
    faults = [Fault("create", nth=None, when="late"), Fault("read", nth=None, name=r"\.commit\.2")]
    with pytest.raises(CommitUnknownError):
        delete_folder(FaultyStore(store, faults))
    assert files_of(store) == before


def test_a_delete_whose_reply_was_lost_goes_on() -> None:
    """The void is read back as our own, and the files go."""
    store = DictStore()
    commit_now(store, A)
    delete_folder(FaultyStore(store, [Fault("create", when="lost")]))
    assert names_in(store) == {".commit", ".commit.2"}


def test_an_outage_deletes_nothing() -> None:
    """A listing that fails raises before anything changes, in a delete and in a prune."""
    store = DictStore()
    commit_now(store, A)
    put(store, ORPHAN)
    before = files_of(store)
    down = [Fault("entries", nth=None, error=lambda: StoreError("down", transient=True))]
    with pytest.raises(StoreError, match="down"):
        delete_folder(FaultyStore(store, down))
    with pytest.raises(StoreError, match="down"):
        prune_folder(FaultyStore(store, down), grace=0)
    assert files_of(store) == before


def test_a_save_that_began_before_a_delete_is_fenced_off() -> None:
    """A save under way while the checkpoint is deleted loses: nothing comes alive again."""
    store = DictStore()
    commit_now(store, A)
    slow = Saver(store, B, overwrite=True)
    slow.begin()
    slow.write()
    delete_folder(store)
    with pytest.raises((CheckpointExistsError, CheckpointError)):
        slow.publish()
    assert state_of(store) == (2, "void")


@pytest.mark.parametrize("at", range(12))
def test_a_killed_delete_is_finished_by_prune_behind_a_void_of_its_own(at: int) -> None:
    """Wherever a delete dies: before its void the checkpoint is whole; after it, prune takes the rest under a void."""
    store = DictStore()
    put(store, *FOREIGN)
    commit_now(store, A)
    put(store, ".claim", ORPHAN)
    whole = files_of(store)
    left = [at]

    def die(request: Request) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1

    killed = False
    try:
        delete_folder(Hooked(store, before=die))
    except Killed:
        killed = True
    if state_of(store)[1] == "committed":
        assert killed
        assert files_of(store) == whole
        return
    rest = {name for name in files_of(store) if name not in FOREIGN and not name.startswith(".commit")}
    sweep = prune_folder(store, grace=0)
    assert sweep.fenced == (3 if rest else None)
    assert names_in(store) - {".commit", ".commit.2", ".commit.3"} == {*FOREIGN}
    if rest:
        assert state_of(store) == (3, "void")
    assert killed == (at < 9)
