"""Errors cross process borders whole: inside torch's exception, by pickle and by copy."""

from __future__ import annotations

import copy
import errno
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcp_storage import errors
from dcp_storage.errors import Cause, CheckpointError, StoreError, portable

CLASSES = sorted(
    (found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, CheckpointError)),
    key=lambda cls: cls.__name__,
)

KINDS = {
    "CheckpointError": "checkpoint",
    "CheckpointExistsError": "exists",
    "CheckpointNotFoundError": "not-found",
    "CheckpointReplacedError": "replaced",
    "CommitUnknownError": "commit-unknown",
    "CorruptCheckpointError": "corrupt",
    "IncompatibleCheckpointError": "incompatible",
    "InvalidLocationError": "location",
    "NotCommittedError": "not-committed",
    "ObjectExistsError": "object-exists",
    "ObjectNotFoundError": "object-not-found",
    "ObjectTooShortError": "object-too-short",
    "StoreError": "store",
    "UntrustedDataError": "untrusted",
}

BUILTINS: dict[str, tuple[type[BaseException], ...]] = {
    "CheckpointExistsError": (FileExistsError,),
    "CheckpointNotFoundError": (FileNotFoundError,),
    "NotCommittedError": (FileNotFoundError,),
    "InvalidLocationError": (ValueError,),
    "StoreError": (OSError,),
    "ObjectNotFoundError": (OSError, FileNotFoundError),
    "ObjectExistsError": (OSError, FileExistsError),
    "ObjectTooShortError": (OSError, EOFError),
}

ERRNO = {
    "CheckpointExistsError": errno.EEXIST,
    "CheckpointNotFoundError": errno.ENOENT,
    "NotCommittedError": errno.ENOENT,
    "ObjectNotFoundError": errno.ENOENT,
    "ObjectExistsError": errno.EEXIST,
}

OWN: dict[str, dict[str, Any]] = {
    "CorruptCheckpointError": {"file": "__0_0.distcp", "offset": 704, "wanted": 10, "found": 9},
    "UntrustedDataError": {"name": "os.system"},
    "StoreError": {"operation": "put", "errno": errno.ENOSPC, "transient": True, "ambiguous": True, "attempts": 3},
    "ObjectNotFoundError": {"operation": "read", "attempts": 2},
    "ObjectExistsError": {"operation": "create"},
    "ObjectTooShortError": {"operation": "read_into", "wanted": 10, "found": 9},
}

CAUSE = Cause("builtins.OSError", "no space", errno.ENOSPC)


def made(cls: type[CheckpointError]) -> CheckpointError:
    """One with every attribute set to something that is no default."""
    return cls("What went wrong.", path="s3://b/k", key="model.w", cause=CAUSE, **OWN.get(cls.__name__, {}))


def facts(error: CheckpointError) -> dict[str, Any]:
    named = {**vars(error), "errno": getattr(error, "errno", None), "args": error.args, "str": str(error)}
    return {name: value for name, value in named.items() if not name.startswith("__")}


def through_torch(error: CheckpointError) -> CheckpointError:
    wrapped = CheckpointException("save", {3: (error, ())})  # type: ignore[dict-item]
    sent: CheckpointException = pickle.loads(pickle.dumps(wrapped))
    found = sent.failures[3][0]
    assert isinstance(found, CheckpointError)
    return found


WAYS = {
    **{f"pickle-{protocol}": protocol for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch": through_torch,
}


def sent(error: CheckpointError, way: str) -> CheckpointError:
    how: Any = WAYS[way]
    found = pickle.loads(pickle.dumps(error, how)) if isinstance(how, int) else how(error)
    assert isinstance(found, CheckpointError)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_attribute_survives(cls: type[CheckpointError], way: str) -> None:
    """An error with all its attributes set comes out of pickle, copy and torch's exception as it went in."""
    error = made(cls)
    found = sent(error, way)
    assert type(found) is cls
    assert found is not error
    assert facts(found) == facts(error)
    for name, value in {"path": "s3://b/k", "key": "model.w", "cause": CAUSE, **OWN.get(cls.__name__, {})}.items():
        assert getattr(found, name) == value
    assert str(found) == "What went wrong."


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_handlers_of_builtin_errors_catch_ours(cls: type[CheckpointError]) -> None:
    """Each class has the builtin bases that its users expect, and their errno."""
    error = pickle.loads(pickle.dumps(cls("What went wrong.")))
    expected = BUILTINS.get(cls.__name__, ())
    assert isinstance(error, Exception)
    assert all(isinstance(error, base) for base in expected)
    others = {OSError, ValueError, EOFError, FileExistsError, FileNotFoundError}
    assert {base for base in others if isinstance(error, base)} == {
        base for base in others if any(issubclass(own, base) for own in expected)
    }
    assert getattr(error, "errno", None) == ERRNO.get(cls.__name__)


def test_kinds_are_stable_and_each_is_of_one_class() -> None:
    """``kind`` is a name to branch on: written down here for every class, and no two classes share one."""
    assert {cls.__name__: cls("x").kind for cls in CLASSES} == KINDS
    assert len(set(KINDS.values())) == len(KINDS)


def test_what_was_added_later_survives_too() -> None:
    """Attributes and text that a wrapper sets on the way up are kept."""
    error = StoreError("First words.", operation="put", cause=OSError(errno.ECONNRESET, "reset"))
    error.message = "First words. (6 attempts over 3.0 s)"
    error.attempts = 6
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == "First words. (6 attempts over 3.0 s)"
    assert (found.attempts, found.errno) == (6, errno.ECONNRESET)
    assert found.cause.type in ("builtins.ConnectionResetError", "builtins.OSError")


class ForeignError(Exception):
    """An exception that does not pickle, as client libraries have them."""

    def __init__(self, one: str, two: object) -> None:
        super().__init__(one)
        self.two = two


def test_foreign_errors_become_ours_with_their_cause() -> None:
    """What a planner or a client raised travels as an error of ours that names the key, the type and the text."""
    foreign = ForeignError("broken planner", lambda: None)
    found = through_torch(portable(foreign, "planner.resolve_data", path="/c", key="model.w"))
    assert type(found) is CheckpointError
    assert (found.kind, found.path, found.key) == ("hook", "/c", "model.w")
    assert found.cause == Cause(f"{ForeignError.__module__}.ForeignError", "broken planner", None)
    assert "planner.resolve_data" in str(found)
    assert "'model.w'" in str(found)


def test_our_errors_stay_what_they_are() -> None:
    """An error that is ours already keeps its class, and gets path and key only where it has none."""
    error = StoreError("No space.", key="__0_0.distcp")
    assert portable(error, "write_data", path="/c", key="model.w") is error
    assert (error.path, error.key) == ("/c", "__0_0.distcp")
