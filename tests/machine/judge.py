"""Whether the way in which a member ended is one that the promises allow, by what held while it worked."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CommitUnknownError,
    CorruptCheckpointError,
    ObjectExistsError,
    StoreError,
)
from tests.machine.members import Late, Member
from tests.machine.model import Model, Moment, ViolationError
from tests.machine.works import FILL
from tests.protocol.oracle import Killed

__all__ = ["judge"]

T = TypeVar("T")

UNCLEAR = ("lost", "later")  # faults after which a member does not know what became of its request


def judge(member: Member, model: Model, late: Sequence[Late]) -> None:
    """Looks at the end of a member.

    Raises:
        ViolationError: it told its caller what is not so.
        AssertionError: it ended with an error that is not of this package.
    """
    outcome = member.outcome
    assert outcome is not None
    member.judged = True
    error = outcome.error
    if member.killed or isinstance(error, Killed):
        return
    window = model.log[member.since :]
    if error is None:
        _succeeded(member, window, outcome.result)
        return
    if not isinstance(error, CheckpointError):
        raise AssertionError(f"{member.name} ended with {error!r}") from error
    again = pickle.loads(pickle.dumps(error))
    if (type(again), str(again), again.kind) != (type(error), str(error), error.kind):
        raise ViolationError("I7", f"{error!r} of {member.name} does not cross a process border")
    _FAILED[member.doer.kind](member, window, error)
    if member.doer.kind in {"save", "adopt"} and not isinstance(error, CommitUnknownError):
        _gave_up(member, model, late, error)


def _succeeded(member: Member, window: Sequence[Moment], result: object) -> None:
    doer = member.doer
    if doer.kind == "load":
        _loaded(member, window, result)
    elif doer.committed is None and doer.kind in {"save", "delete", "adopt"}:
        raise ViolationError("I7", f"{doer.name} reported success and has committed nothing")


def _loaded(member: Member, window: Sequence[Moment], author: object) -> None:
    name = member.name
    if author is None:
        raise ViolationError("I8", f"{name} reported success with {member.into}: a mixture, or not all of it")
    where = [m for m in window if m.author == author and (m.state == "live" or (m.state == "stock" and member.stock))]
    if not where:
        raise ViolationError("I8", f"{name} loaded what {author} had saved, which did not count while it read")
    if all(m.damaged for m in where):
        raise ViolationError("I8", f"{name} loaded what {author} had saved, which was damaged: {where[0].damaged}")


def _gave_up(member: Member, model: Model, late: Sequence[Late], error: CheckpointError) -> None:
    """What a save that failed for certain may leave: no commit, nothing of the rank that failed."""
    doer = member.doer
    if doer.committed is not None:
        raise ViolationError("I6", f"{doer.name} reported {error!r}, but its commit {doer.committed} is there")
    doer.gave_up = True
    removed = member.met("refuse", *UNCLEAR, "again", operation="delete")
    if removed or member.met("again", "later") or any(each.member is member for each in late):
        return
    rank = f"__{error.rank or 0}_"
    left = [
        name
        for name in model.files
        if name.startswith((rank, ".manifest")) and model.written.get(name, (None, 0))[0] is doer
    ]
    if left and doer.kind == "save":
        raise ViolationError("I4", f"{doer.name} failed ({error!r}) and left {left}")


# -- errors that have a cause ------------------------------------------------------------------------------------------


def _moved(window: Sequence[Moment]) -> bool:
    return len({m.number for m in window}) > 1


def _always(window: Sequence[Moment], test: Callable[[Moment], bool]) -> bool:
    return all(map(test, window))


def _common(member: Member, window: Sequence[Moment], error: CheckpointError) -> bool:
    """Errors that any member may end with."""
    if isinstance(error, CommitUnknownError):
        if not member.met(*UNCLEAR, "refuse"):
            raise ViolationError("I6", f"{member.name} does not know what became of its commit: {error}")
        return True
    if isinstance(error, StoreError):
        if not member.faults:
            label = "I6" if isinstance(error, ObjectExistsError) else "I10"
            raise ViolationError(label, f"{member.name} met an error of the store out of nothing: {error}")
        return True
    if isinstance(error, CheckpointReplacedError):
        if not _moved(window):
            raise ViolationError("I8", f"{member.name} says that it was replaced, and it was not: {error}")
        return True
    return False


def _blind(member: Member) -> str:
    return "I10" if member.met("refuse") else "I3"


def _save_failed(member: Member, window: Sequence[Moment], error: CheckpointError) -> None:
    if _common(member, window, error):
        return
    if isinstance(error, CheckpointExistsError):
        barred = not member.doer.overwrite and any(m.state in {"live", "stock"} for m in window)
        if not barred and not _moved(window):
            raise ViolationError("I3", f"{member.name} was refused, and nothing was in its way: {error}")
    elif isinstance(error, CorruptCheckpointError):
        if not member.met("nowhere") and not _moved(window):
            raise ViolationError("I10" if member.met("refuse") else "I11", f"{member.name} lost what it wrote: {error}")
    else:
        raise ViolationError("I7", f"{member.name} failed for no reason: {error!r}")


def _load_failed(member: Member, window: Sequence[Moment], error: CheckpointError) -> None:
    damaged = [m for m in window if m.damaged]
    if isinstance(error, CorruptCheckpointError):
        if not damaged:
            raise ViolationError("I3", f"{member.name} calls corrupt what was never damaged: {error}")
        hows = {how for _, how in window[0].damaged}
        touched = bool((member.into["t"] != FILL).any() or (member.into["u"] != int(FILL)).any())
        if hows and hows <= {"cut", "gone"} and not _moved(window) and touched:
            raise ViolationError("I8", f"{member.name} changed its tensors before it looked at the sizes: {error}")
        names = {name for m in damaged for name, _ in m.damaged}
        if error.file not in names:
            raise ViolationError("I8", f"{member.name} names {error.file}; damaged were {sorted(names)}")
        return
    if _common(member, window, error):
        return
    there = {"live", "stock"} if member.stock else {"live"}
    if not isinstance(error, CheckpointNotFoundError):
        raise ViolationError("I8", f"{member.name} failed for no reason: {error!r}")
    if _always(window, lambda m: m.state in there):
        raise ViolationError(_blind(member), f"{member.name} found nothing, and there was one all the time: {error}")


def _delete_failed(member: Member, window: Sequence[Moment], error: CheckpointError) -> None:
    if _common(member, window, error) or error.kind == "in-use":
        return
    if not isinstance(error, CheckpointNotFoundError):
        raise ViolationError("I3", f"{member.name} failed for no reason: {error!r}")
    if _always(window, lambda m: m.state == "live"):
        raise ViolationError(_blind(member), f"{member.name} found nothing, and there was one all the time: {error}")


def _prune_failed(member: Member, window: Sequence[Moment], error: CheckpointError) -> None:
    if not _common(member, window, error):
        raise ViolationError("I3", f"{member.name} failed for no reason: {error!r}")


def _adopt_failed(member: Member, window: Sequence[Moment], error: CheckpointError) -> None:
    if _common(member, window, error):
        return
    if _always(window, lambda m: m.state == "stock"):
        raise ViolationError(_blind(member), f"{member.name} failed for no reason: {error!r}")


_FAILED: dict[str, Callable[[Member, Sequence[Moment], CheckpointError], None]] = {
    "save": _save_failed,
    "load": _load_failed,
    "delete": _delete_failed,
    "prune": _prune_failed,
    "adopt": _adopt_failed,
}
