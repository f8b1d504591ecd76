"""``.metadata``, the view for stock readers: it follows the highest commit."""

from __future__ import annotations

import pytest

from dcp_storage.current import read_current
from dcp_storage.errors import CheckpointError, StoreError
from dcp_storage.fence import delete_folder
from dcp_storage.records import ManifestRef
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import FailingListing
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.view import settle_view
from dcp_storage.wrappers import Request
from tests.protocol.acting import Saver, commit_now
from tests.protocol.oracle import Hooked, files_of, highest, stock_view

A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"


def files_by(author: str) -> set[str]:
    return {f"__{rank}_0.r{rank}{author[2:]}.distcp" for rank in (0, 1)}


def ref_in(store: DictStore) -> ManifestRef | None:
    current = read_current(store)
    return None if current is None else current.commit.manifest


def test_the_view_of_a_save_names_its_files() -> None:
    """After a save stock torch finds exactly the files of that save, also when it replaced another."""
    store = DictStore()
    commit_now(store, A)
    assert stock_view(files_of(store)) == {"__0_0.distcp", "__1_0.distcp"}
    commit_now(store, B, overwrite=True)
    assert stock_view(files_of(store)) == files_by(B)


def test_a_view_that_agrees_is_left_alone() -> None:
    """Settling what agrees already looks once and writes nothing."""
    store = DictStore()
    commit_now(store, A)
    recording = RecordingStore(store)
    settle_view(recording, ref_in(store))
    assert recording.operations() == ["entries", "read"]


def test_a_view_of_an_older_commit_is_made_anew() -> None:
    """Who wrote the view of a commit that was replaced meanwhile writes that of the highest."""
    store = DictStore()
    commit_now(store, A)
    old, said = ref_in(store), files_of(store)[".metadata"]
    commit_now(store, B, overwrite=True)
    store.put(".metadata", [memoryview(said)])
    settle_view(store, old)
    assert stock_view(files_of(store)) == files_by(B)


def test_a_view_that_was_removed_comes_back_where_something_is_committed() -> None:
    """A delete that took the view of a later save writes it again."""
    store = DictStore()
    commit_now(store, A)
    store.delete([".metadata"])
    settle_view(store, None)
    assert stock_view(files_of(store)) == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.parametrize("void", [True, False], ids=["deleted", "empty"])
def test_a_view_of_nothing_is_removed(void: bool) -> None:
    """Where a delete came last, or no commit is there at all, no view stays."""
    store = DictStore()
    commit_now(store, A)
    old, said = ref_in(store), files_of(store)[".metadata"]
    if void:
        delete_folder(store)
    else:
        store.delete([".commit"])
    store.put(".metadata", [memoryview(said)])
    settle_view(store, old)
    assert stock_view(files_of(store)) is None


def test_a_save_settles_the_view_that_a_delete_overtook() -> None:
    """A delete that ends between a save's commit and its view: no view of the deleted files is left."""
    store = DictStore()
    gone: list[object] = []

    def delete(request: Request) -> None:
        if (request.operation, request.name) == ("put", ".metadata") and not gone:
            gone.append(delete_folder(store))

    commit_now(Hooked(store, before=delete), A)
    number, said = highest(files_of(store))
    assert said is not None
    assert (number, said["state"]) == (2, "void")
    assert stock_view(files_of(store)) is None


def test_a_save_that_was_replaced_leaves_the_view_to_the_winner() -> None:
    """A save overtaken right after its commit writes no view of files that are gone."""
    store = DictStore()
    done: list[object] = []

    def replace(request: Request) -> None:
        if request.name == ".commit" and not done:
            done.append(None)
            commit_now(store, B, overwrite=True)

    def after(request: Request) -> None:
        if request.operation == "create":
            replace(request)

    recording = RecordingStore(Hooked(store, after=after))
    commit_now(recording, A)
    assert stock_view(files_of(store)) == files_by(B)
    assert ".metadata" not in [call.name for call in recording.of("put")]


def test_a_folder_that_never_rests_is_given_up() -> None:
    """Where the highest commit changes at every look, settling ends with an error instead of going on for ever."""
    store = DictStore()
    commit_now(store, A)
    looks: list[int] = []

    def another(request: Request) -> None:
        if request.operation == "entries":
            looks.append(1)
            commit_now(store, chr(ord("b") + len(looks)) * 16, overwrite=True)

    with pytest.raises(CheckpointError) as caught:
        settle_view(Hooked(store, before=another), ref_in(store))
    assert caught.value.kind == "view"
    assert 2 <= len(looks) <= 20


def test_an_outage_while_settling_raises() -> None:
    """A listing that fails is no empty folder: the view is not removed."""
    store = DictStore()
    commit_now(store, A)
    with pytest.raises(StoreError):
        settle_view(FailingListing(store, lambda: StoreError("down", transient=True)), None)
    assert stock_view(files_of(store)) == {"__0_0.distcp", "__1_0.distcp"}


def test_a_restated_commit_has_the_same_view() -> None:
    """A prune that restates the commit under a higher number does not keep the save from writing its view."""
    from dcp_storage.fence import prune_folder

    store = DictStore()
    commit_now(store, A)
    store.put(f"__9_0.{C}.distcp", [memoryview(b"orphan")])
    saver = Saver(store, B, overwrite=True)
    done: list[object] = []

    def prune(request: Request) -> None:
        if (request.operation, request.name) == ("create", ".commit.2") and not done:
            done.append(None)

    def after(request: Request) -> None:
        if done == [None] and request.operation == "create":
            done.append(prune_folder(store, grace=0))

    saver.store = Hooked(store, before=prune, after=after)
    saver.save()
    number, said = highest(files_of(store))
    assert said is not None
    assert (number, said["restates"]) == (3, 2)
    assert stock_view(files_of(store)) == files_by(B)
