"""The exact order of store requests: the order is the protocol."""

from __future__ import annotations

import re

from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.store import Atomicity
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.recording import RecordingStore
from tests.protocol.acting import commit_now

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


class Replacing(DictStore):
    """A store that does not promise create-if-absent."""

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.NONE


def calls(store: RecordingStore) -> list[str]:
    """Each request as ``operation name…``, tokens shortened to ``T``."""
    told = (" ".join([c.operation, *([c.name] if c.name else c.names)]) for c in store.calls)
    return [re.sub(r"\.[a-z][a-z0-9]{15}(?=\.distcp| |$)", ".T", line) for line in told]


def test_a_fresh_save() -> None:
    """List → claim → list → files → list → manifest → commit → look → view → look → claim removed."""
    store = RecordingStore(DictStore())
    commit_now(store, A)
    assert calls(store) == [
        "make_folder",
        "entries",
        "create .claim",
        "entries",
        "put __0_0.distcp",
        "put __1_0.distcp",
        "entries",
        "put .manifest",
        "create .commit",
        "entries",
        "put .metadata",
        "entries",
        "delete .claim",
    ]


def test_a_save_where_others_may_replace_the_commit() -> None:
    """On a store whose create replaces, what the highest commit says is read and not remembered."""
    store = RecordingStore(Replacing())
    commit_now(store, A)
    looks = calls(store)[-5:]
    assert looks == ["entries", "read .commit", "put .metadata", "entries", "read .commit"]


def test_an_overwriting_save() -> None:
    """The replaced files go last, after the commit and the view, and what they are is read from the old manifest."""
    store = RecordingStore(DictStore())
    commit_now(store.inner, A)
    commit_now(store, B, overwrite=True)
    assert calls(store) == [
        "make_folder",
        "entries",
        "read .commit",
        "put __0_0.T.distcp",
        "put __1_0.T.distcp",
        "entries",
        "put .manifest.T",
        "create .commit.2",
        "entries",
        "put .metadata",
        "entries",
        "read .manifest",
        "delete __0_0.distcp __1_0.distcp .manifest",
    ]


def test_a_delete() -> None:
    """List → void → view → look → files → manifest; no commit object goes."""
    store = RecordingStore(DictStore())
    commit_now(store.inner, A)
    delete_folder(store)
    assert calls(store) == [
        "entries",
        "read .commit",
        "create .commit.2",
        "delete .metadata",
        "entries",
        "read .commit.2",
        "delete __0_0.distcp __1_0.distcp",
        "delete .manifest",
    ]


def test_a_prune_of_orphans() -> None:
    """List → clock → uploads → manifest → fence → orphans, then what only a dead attempt's end would need."""
    store = RecordingStore(DictStore())
    commit_now(store.inner, A)
    for name in (".claim", f"__4_0.{B}.distcp", f".manifest.{B}", f"__3_0.{B}.distcp"):
        store.inner.put(name, [memoryview(b"x")])
    prune_folder(store, grace=0)
    assert calls(store) == [
        "entries",
        "read .commit",
        "now",
        "open_uploads",
        "read .manifest",
        "create .commit.2",
        "delete __3_0.T.distcp __4_0.T.distcp",
        "delete .manifest.T .claim",
    ]


def test_a_prune_of_a_folder_that_never_committed() -> None:
    """The void comes before the first deletion; a stray view goes first, the claim last."""
    store = RecordingStore(DictStore())
    for name in (".claim", ".metadata", f".metadata.{B}", "__0_0.distcp", ".manifest"):
        store.inner.put(name, [memoryview(b"x")])
    store.inner.create(".commit", b"{")
    store.inner.upload("__1_0.distcp")
    prune_folder(store, grace=0)
    assert calls(store) == [
        "entries",
        "read .commit",
        "now",
        "open_uploads",
        "create .commit.2",
        "abort_uploads __1_0.distcp",
        "delete .metadata",
        "entries",
        "read .commit.2",
        "delete .metadata.T __0_0.distcp",
        "delete .manifest .claim",
    ]


def test_a_prune_that_sweeps_lower_commits() -> None:
    """Commit objects go one by one, after everything else."""
    store = RecordingStore(DictStore())
    commit_now(store.inner, A)
    commit_now(store.inner, B, overwrite=True)
    commit_now(store.inner, A, overwrite=True)
    prune_folder(store, grace=0)
    assert calls(store) == [
        "entries",
        "read .commit.3",
        "now",
        "open_uploads",
        "read .manifest.T",
        "delete .commit",
        "delete .commit.2",
    ]


def test_a_prune_with_nothing_to_do_writes_nothing() -> None:
    """A whole checkpoint costs a prune a listing, a clock and two reads."""
    store = RecordingStore(DictStore())
    commit_now(store.inner, A)
    prune_folder(store, grace=0)
    assert calls(store) == ["entries", "read .commit", "now", "open_uploads", "read .manifest"]
