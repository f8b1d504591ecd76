"""Killed at any store call: the old checkpoint or the new one, whole, or plainly none; and life goes on after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp_storage.errors import CheckpointNotFoundError
from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.reading import read_checkpoint, sizes_of_files
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.wrappers import Request
from tests.protocol.acting import commit_now, loaded_by
from tests.protocol.oracle import Hooked, Killed, files_of

A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"


def old(store: DictStore) -> None:
    commit_now(store, A)
    store.put(f"__0_0.{C}.distcp", [memoryview(b"orphan")])


def unfinished(store: DictStore) -> None:
    for name in (".claim", "__0_0.distcp", ".manifest", f"__0_0.{C}.distcp"):
        store.put(name, [memoryview(b"x")])


def deleted(store: DictStore) -> None:
    old(store)
    delete_folder(store)
    store.put("__0_0.distcp", [memoryview(b"x")])


def nothing(store: DictStore) -> None:
    pass


def save(store: Store) -> object:
    return commit_now(store, B, overwrite=True)


def prune(store: Store) -> object:
    return prune_folder(store, grace=0)


Folder = Callable[[DictStore], None]
Work = Callable[[Store], object]

CASES: tuple[tuple[Folder, Work, set[str | None], int], ...] = (
    (nothing, save, {None, B}, 13),
    (old, save, {A, B}, 13),
    (unfinished, save, {None, B}, 11),
    (deleted, save, {None, B}, 11),
    (old, delete_folder, {A, None}, 6),
    (old, prune, {A}, 6),
    (unfinished, prune, {None}, 5),
    (deleted, prune, {None}, 5),
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("folder", "work", "allowed", "least"), CASES, ids=[f"{c[1].__name__}, {c[0].__name__}" for c in CASES]
)
def test_a_kill_at_any_call_leaves_old_or_new(
    folder: Folder, work: Work, allowed: set[str | None], least: int, when: str
) -> None:
    """After a kill before or behind every single call: old or new whole, or none; then a save and a prune work."""
    seen: set[str | None] = set()
    for at in range(60):
        store = DictStore()
        folder(store)
        left = [at]

        def count(request: Request, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        hooked = Hooked(store, before=count) if when == "before" else Hooked(store, after=count)
        try:
            work(hooked)
        except Killed:
            ended = False
        else:
            ended = True
        authors = loaded_by(store)
        author = None if authors is None else authors.pop()
        assert not authors, f"a mixture after call {at}"
        assert author in allowed, f"after call {at}"
        seen.add(author)
        _reads_as(store, author)
        _goes_on(store)
        if ended:
            assert at >= least
            assert seen == allowed
            return
    raise AssertionError("the work never ended")


def _reads_as(store: DictStore, author: str | None) -> None:
    if author is None:
        with pytest.raises(CheckpointNotFoundError):
            read_checkpoint(store, require_commit=True)
        return
    checkpoint = read_checkpoint(store, require_commit=True)
    sizes_of_files(store, checkpoint, [record.name for record in checkpoint.manifest.files])


def _goes_on(store: DictStore) -> None:
    prune_folder(store, grace=0)
    assert loaded_by(store) in (None, {A}, {B})
    commit_now(store, C, overwrite=True)
    prune_folder(store, grace=0)
    assert loaded_by(store) == {C}
    shards = [name for name in files_of(store) if name.startswith("__")]
    assert len(shards) == 2
