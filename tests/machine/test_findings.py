"""What the machine has found, each in the one order of requests that shows it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable

import pytest

from dcp_storage.current import blame
from dcp_storage.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError
from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.session import guard
from dcp_storage.store import Store
from dcp_storage.stores.location import parse_location
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.tools.delete import RETIRE, sweep_with
from tests.protocol.acting import commit_now
from tests.protocol.oracle import Hooked, files_of, highest, stock_view
from tests.rank_faults import ERRORS

WEEK = 7 * 86400.0
A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"


def before(store: Store, operation: str, name: str, act: Callable[[], object]) -> Store:
    """The folder for one to whom something happens right before its first request of an operation on a name."""
    left = [act]

    def hook(request: object) -> None:
        wanted = (getattr(request, "operation", ""), getattr(request, "name", None) or "")
        if left and wanted[0] == operation and wanted[1].startswith(name):
            left.pop()()

    return Hooked(store, before=hook)


@pytest.mark.parametrize("how", ["prune", "retire"])
def test_what_was_replaced_meanwhile_is_not_called_corrupt(how: str) -> None:
    """A prune, or a delete, whose manifest is gone because a save was faster says so; it once called that corrupt."""
    store = DictStore()
    commit_now(store, A)
    seen = before(store, "read", ".manifest", lambda: commit_now(store, B, overwrite=True))
    works = {"prune": lambda: prune_folder(seen, grace=0), "retire": lambda: sweep_with(RETIRE, seen, WEEK, False)}
    with pytest.raises(CheckpointReplacedError):
        works[how]()
    assert sorted(name for name in files_of(store) if name.startswith(".commit")) == [".commit", ".commit.2"]


def test_a_manifest_that_is_gone_for_no_reason_is_corrupt() -> None:
    """Where the number did not move, a prune still says that the manifest is missing."""
    store = DictStore()
    commit_now(store, A)
    store.delete([".manifest"])
    with pytest.raises(CorruptCheckpointError, match="missing"):
        prune_folder(store, grace=0)


def test_a_commit_that_came_between_two_looks_is_not_called_torn() -> None:
    """Who looks whether it was replaced takes one listing; a void that came after that was once called torn."""
    store = DictStore()
    commit_now(store, A)
    gone = CorruptCheckpointError("gone", file="__0_0.distcp")
    seen = before(store, "read", ".commit", lambda: delete_folder(store))
    assert blame(seen, 1, gone) is gone  # by what was there when it looked
    found = blame(store, 1, gone)
    assert type(found) is CheckpointReplacedError


def test_the_view_follows_a_save_that_replaced_what_it_was_made_of() -> None:
    """A view that is made to agree looks again where the manifest went meanwhile, and ends up with the newest."""
    store = DictStore()
    commit_now(store, A)

    def two_more() -> None:
        commit_now(store, B, overwrite=True)
        commit_now(store, C, overwrite=True)

    fourth = before(store, "read", ".manifest.c", lambda: commit_now(store, "d" * 16, overwrite=True))
    attempt = commit_now(before(fourth, "put", ".metadata", two_more), "e" * 16, overwrite=True)
    assert attempt.warnings == []
    files = files_of(store)
    number, said = highest(files)
    assert said is not None
    assert (number, said["author"]) == (5, "d" * 16)
    assert stock_view(files) == {record["name"] for record in json.loads(files[said["manifest"]["name"]])["files"]}


@pytest.mark.parametrize("what", ERRORS)
def test_whatever_a_hook_raises_can_be_sent(what: str) -> None:
    """Everything that leaves a hook crosses a process border; an interrupt and an exit stay what they are."""
    with pytest.raises(BaseException, match="the reason") as caught, guard("write_data", parse_location("/nowhere")):
        raise ERRORS[what]()
    sent = pickle.loads(pickle.dumps(caught.value))
    assert type(sent) is type(caught.value)
    if what in {"KeyboardInterrupt", "SystemExit"}:
        assert type(sent).__name__ == what
    else:
        assert isinstance(sent, CheckpointError)
        assert (sent.kind, sent.path) == ("hook", "/nowhere")
        assert sent.cause is not None
        assert sent.cause.type.endswith(what)
