"""Deleting one checkpoint, and pins."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import dcp_storage
from dcp_storage.errors import CheckpointError, CheckpointReplacedError, NotCommittedError
from dcp_storage.fence import delete_folder
from dcp_storage.store import Atomicity, Store, WrappedStore
from dcp_storage.stores.local import LocalStore
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.tools.delete import DeleteReport, delete_at
from dcp_storage.tools.pins import pin_folder, unpin_folder
from dcp_storage.wrappers import Request
from tests.protocol.acting import Saver, commit_now
from tests.protocol.oracle import Hooked, Killed, files_of, highest
from tests.runs.kit import DAY, MemoryRun, bare, put

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


def deleted(run: MemoryRun, name: str, *, force: bool = False, word: bool = False) -> DeleteReport:
    return delete_at(run.folder.child(name), grace=7 * DAY, force=force, assume_single_writer=word)


def test_a_checkpoint_is_deleted_and_foreign_files_stay(tmp_path: Path) -> None:
    """The public call leaves the commit objects and what is not ours, and reports what it removed."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    commit_now(LocalStore(folder), A)
    (folder / "notes.txt").write_text("mine")
    size = sum(p.stat().st_size for p in folder.iterdir() if p.name not in (".commit", "notes.txt"))
    report = dcp_storage.delete(folder)
    assert (report.ok, report.commit, report.files, report.frees) == (True, 2, 4, size)
    assert sorted(p.name for p in folder.iterdir()) == [".commit", ".commit.2", "notes.txt"]
    with pytest.raises(NotCommittedError, match="deleted"):
        dcp_storage.delete(folder)


def test_the_last_good_step_of_a_run_is_not_deleted() -> None:
    """The only whole step is refused, damaged ones beside it do not count; ``force`` deletes it."""
    run = MemoryRun()
    run.commit(1, 2)
    run.at("step-00000002").delete(["__0_0.distcp"])
    with pytest.raises(CheckpointError, match="last good") as caught:
        deleted(run, "step-00000001")
    assert caught.value.kind == "last-good"
    assert run.committed() == ["step-00000001", "step-00000002"]
    deleted(run, "step-00000002")
    deleted(run, "step-00000001", force=True)
    assert run.committed() == []


def test_a_step_with_a_good_one_beside_it_goes() -> None:
    """Any step of a run may be deleted as long as another whole one stays, an older or a newer one."""
    run = MemoryRun()
    run.commit(1, 2, 3)
    deleted(run, "step-00000003")
    deleted(run, "step-00000001")
    assert run.committed() == ["step-00000002"]


def test_one_that_is_being_replaced_is_not_deleted() -> None:
    """A save under way in the folder is not fenced off, unless that is forced; then it fails."""
    run = MemoryRun()
    run.commit("checkpoint")
    saver = run.saver("checkpoint", overwrite=True)
    with pytest.raises(CheckpointError, match="under way") as caught:
        deleted(run, "checkpoint")
    assert caught.value.kind == "in-use"
    deleted(run, "checkpoint", force=True)
    with pytest.raises(CheckpointError):
        saver.publish()
    assert run.state("checkpoint") == "void"


def test_a_pinned_one_is_not_deleted() -> None:
    """A pin holds against a delete, forced or not, until it is taken away."""
    run = MemoryRun()
    run.commit("checkpoint")
    pin_folder(run.at("checkpoint"), "the paper")
    for force in (False, True):
        with pytest.raises(CheckpointError, match="pinned") as caught:
            deleted(run, "checkpoint", force=force)
        assert caught.value.kind == "pinned"
    unpin_folder(run.at("checkpoint"))
    deleted(run, "checkpoint")
    assert run.committed() == []


@pytest.mark.parametrize("at", range(10))
def test_a_killed_delete_is_finished_by_a_second_one(at: int) -> None:
    """Wherever a delete dies: before its void the checkpoint is whole, after it the same call removes the rest."""
    run = MemoryRun()
    run.commit("checkpoint")
    run.objects.advance(1)
    whole = run.files("checkpoint")
    left = [at]

    def die(request: Request) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1

    run.wrap = lambda store: Hooked(store, before=die)
    with pytest.raises(Killed):
        deleted(run, "checkpoint")
    run.wrap = bare
    run.objects.advance(1)
    if run.state("checkpoint") == "committed":
        assert run.files("checkpoint") == whole
    assert deleted(run, "checkpoint").files > 0
    assert {name for name in run.files("checkpoint") if not name.startswith(".commit")} == set()
    assert run.state("checkpoint") == "void"


class NotAtomic(WrappedStore):
    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.NONE


def test_without_atomic_creates_the_users_word_is_needed() -> None:
    """A store that cannot refuse a second create needs ``assume_single_writer``; nothing was deleted without."""
    run = MemoryRun()
    run.commit("checkpoint")
    run.wrap = NotAtomic
    with pytest.raises(CheckpointError, match="assume_single_writer"):
        deleted(run, "checkpoint")
    assert run.committed() == ["checkpoint"]
    deleted(run, "checkpoint", word=True)
    assert run.committed() == []


def test_wrong_graces_are_refused(tmp_path: Path) -> None:
    """The grace is a timedelta, and not negative."""
    with pytest.raises(TypeError, match="timedelta"):
        dcp_storage.delete(tmp_path, grace=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        dcp_storage.delete(tmp_path, grace=timedelta(days=-1))


# -- pins --------------------------------------------------------------------------------------------------------------


def test_a_pin_says_when_and_why_and_restates_the_commit() -> None:
    """A pin is a small JSON object; the commit goes on under the next number with the same manifest."""
    store = DictStore()
    commit_now(store, A)
    said = highest(files_of(store))[1]
    pin_folder(store, "best on the test set")
    assert json.loads(store.read(".pin", limit=1000))["why"] == "best on the test set"
    number, now = highest(files_of(store))
    assert said is not None
    assert now is not None
    assert (number, now["state"], now["manifest"]) == (2, "committed", said["manifest"])


def test_a_delete_that_began_before_the_pin_loses() -> None:
    """A delete that listed the folder without the pin, and goes on once it is pinned, deletes nothing."""
    store = DictStore()
    commit_now(store, A)
    done: list[object] = []

    def pin(request: Request) -> None:
        if request.operation == "create" and not done:
            done.append(None)
            pin_folder(store)

    with pytest.raises(CheckpointReplacedError):
        delete_folder(Hooked(store, before=pin))
    assert done
    assert highest(files_of(store))[1]["state"] == "committed"  # type: ignore[index]
    assert {"__0_0.distcp", ".pin", ".manifest"} <= set(files_of(store))


def test_a_pin_that_comes_too_late_says_so_and_is_gone() -> None:
    """A checkpoint that is deleted while it is being pinned is not pinned, and that is an error."""
    store = DictStore()
    commit_now(store, A)

    def delete(request: Request) -> None:
        delete_folder(store)

    with pytest.raises(CheckpointReplacedError, match="not pinned"):
        pin_folder(Hooked(store, before=once(delete)))
    assert ".pin" not in files_of(store)


def once(call: Callable[[Request], object]) -> Callable[[Request], None]:
    """The call, at the first request to create only."""
    done: list[object] = []

    def hook(request: Request) -> None:
        if request.operation == "create" and not done:
            done.append(None)
            call(request)

    return hook


def test_a_pin_beside_a_save_goes_on() -> None:
    """Where a save commits first, the pin is on what that save made."""
    store = DictStore()
    commit_now(store, A)

    def save(request: Request) -> None:
        commit_now(store, B, overwrite=True)

    pin_folder(Hooked(store, before=once(save)))
    number, said = highest(files_of(store))
    assert said is not None
    assert (number, said["state"]) == (3, "committed")
    assert ".pin" in files_of(store)


def test_what_is_not_committed_cannot_be_pinned() -> None:
    """A pin on an unfinished or deleted checkpoint is refused and leaves nothing."""
    store: Store = DictStore()
    saver = Saver(store, A)
    saver.begin()
    saver.write()
    with pytest.raises(NotCommittedError):
        pin_folder(store)
    saver.publish()
    delete_folder(store)
    with pytest.raises(NotCommittedError, match="deleted"):
        pin_folder(store)
    assert ".pin" not in {e.name for e in store.entries()}


def test_a_pin_keeps_nobody_from_saving() -> None:
    """A pinned checkpoint may be replaced by a save; a pinned folder stays pinned."""
    store = DictStore()
    commit_now(store, A)
    pin_folder(store)
    commit_now(store, B, overwrite=True)
    assert ".pin" in files_of(store)
    put(store, "notes.txt")
    unpin_folder(store)
    unpin_folder(store)
    assert ".pin" not in files_of(store)
