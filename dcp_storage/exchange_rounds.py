"""The ranks of a group meet before anything is sent, and say how they are, with deadlines that break nothing.

All of it goes through the group's key-value store: a wait that runs out there leaves the group as it was, while one
for a message would close every connection of the group. No key outlives its round.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from dcp_storage import names
from dcp_storage.errors import CheckpointError, portable

__all__ = ["Meeting", "agree", "check_group", "meet", "named", "patience", "timeout_of"]

T = TypeVar("T")

_PREFIX = "dcp_storage"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


def check_group(group: dist.ProcessGroup) -> None:
    """Checks that tensors in CPU memory can be sent over a group.

    Raises:
        TypeError: it is no process group.
        ValueError: it has no backend for the CPU, e.g. gloo.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, not {type(group).__name__}.")
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(
            "process_group has no backend for tensors in CPU memory: make it with "
            'torch.distributed.new_group(backend="gloo") or "cpu:gloo,cuda:nccl".'
        ) from error


def named(ranks: Iterable[int]) -> str:
    """``[3]`` → ``"rank 3"``, ``[1, 3]`` → ``"ranks 1, 3"``; the first eight of many."""
    found = sorted(ranks)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found[:8]))}{more}"


class _Keys(Protocol):
    """What is used of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True)
class Meeting:
    """One load of all ranks of a group.

    Attributes:
        group: the group.
        token: what this load is called; the same on all ranks, unlike that of any other.
        rank: this rank in the group.
        size: how many ranks it has.
        path: the checkpoint, for errors.
        deadline: seconds of each wait.
        said: what each rank said when it came, by rank.
    """

    group: dist.ProcessGroup
    token: str
    rank: int
    size: int
    path: str
    deadline: float
    said: tuple[Any, ...] = ()

    def round(self, name: str, mine: object) -> list[Any]:
        """What each rank says, by rank; returns when all have said it.

        Args:
            name: unlike that of any other round of this load.
            mine: what this rank says; pickled.

        Raises:
            CheckpointError: of kind ``"peer"``: a rank did not come within the deadline; it is named on all.
        """
        store, own = self.group.get_group_store(), f"{_PREFIX}/{self.token}/{name}"
        with _Lost(self.path):
            if self.rank:
                store.set(f"{own}/{self.rank}", _packed(mine))
                # The rank that gathers may have come later than this one: it gets its own time.
                if not _await(store, [f"{own}/all/{self.rank}"], 2 * self.deadline + 1.0):
                    raise _absent(self.path, [0], name, self.deadline)
                missing, said = _unpacked(store.get(f"{own}/all/{self.rank}"))
                store.delete_key(f"{own}/all/{self.rank}")
            else:
                keys = {rank: f"{own}/{rank}" for rank in range(1, self.size)}
                _await(store, list(keys.values()), self.deadline)
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                here = {rank: store.get(key) for rank, key in keys.items() if rank not in missing}
                said = [mine, *(_unpacked(here[rank]) if rank in here else None for rank in keys)]
                answer = _packed((missing, said))
                for rank in here:
                    store.delete_key(keys[rank])
                    store.set(f"{own}/all/{rank}", answer)
        if missing:
            raise _absent(self.path, missing, name, self.deadline)
        return list(said)


def meet(group: dist.ProcessGroup, *, path: str, deadline: float, mine: object = None) -> Meeting:
    """Waits until every rank of a group has called this, and gives the load a name.

    Whoever calls a load of its own, as ``DCP.load`` does, can call it first: a rank that never comes is then named on
    all others before any collective waits for it.

    Args:
        group: every rank of it has to call; one load of a group at a time.
        path: the checkpoint, for errors.
        deadline: seconds that a rank may come later than the others.
        mine: what this rank says to all; pickled. An error says that it cannot load: it is raised here, and on all
            others one that names this rank.

    Raises:
        CheckpointError: of kind ``"peer"``, naming the ranks that did not come, or cannot load; of kind ``"group"``:
            this process is no member of the group.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise CheckpointError(f"{path}: this process is not in the reader's process_group.", path=path, kind="group")
    nonce = names.new_token()
    if size == 1:
        _refuse(path, "load", mine, (mine,))
        return Meeting(group, nonce, rank, size, path, deadline, (mine,))
    store = group.get_group_store()
    with _Lost(path):
        if rank:
            missing, token, said = _come(store, rank, nonce, mine, path, deadline)
        else:
            missing, token, said = _gather(store, size, nonce, mine, deadline)
    if missing:
        raise _absent(path, missing, "load", deadline)
    _refuse(path, "load", mine, said)
    return Meeting(group, token, rank, size, path, deadline, tuple(said))


def patience(group: dist.ProcessGroup, deadline: float) -> float:
    """Seconds to wait for another rank: the deadline, or the group's own time-out where that is less.

    Args:
        group: where torch does not tell its time-out, the deadline counts.
        deadline: seconds.
    """
    own = timeout_of(group)
    return deadline if own is None else min(deadline, own.total_seconds())


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a group's collectives; None where torch does not tell it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for device in (torch.device("cpu"), accelerator):
        if device is not None:
            with contextlib.suppress(AttributeError, RuntimeError):  # no backend for it, or one without options
                found: timedelta = group._get_backend(device).options._timeout
                return found
    return None


def agree(meeting: Meeting, begin: Callable[[], T | str]) -> tuple[T | None, str]:
    """Lets every rank say that its plan is fine, before any exchange begins.

    Args:
        meeting: the load.
        begin: makes this rank's part, or says why nothing can be shared.

    Returns:
        This rank's part if all ranks have theirs; else None, and why.

    Raises:
        CheckpointError: of kind ``"peer"``: a rank failed or did not come, and is named; or what ``begin`` raised.
    """
    mine: T | str | None = None
    failed: CheckpointError | None = None
    interrupted: BaseException | None = None
    try:
        mine = begin()
    except Exception as error:  # noqa: BLE001 - raised below, after the others have been told
        failed = portable(error, "read_data", path=meeting.path)
    except BaseException as error:  # noqa: BLE001 - likewise: nobody is to wait for a rank that has been stopped
        interrupted = error
        failed = CheckpointError(f"{meeting.path}: the load was interrupted.", path=meeting.path, kind="hook")
    said = meeting.round("exchange", failed if failed is not None else mine if isinstance(mine, str) else None)
    if interrupted is not None:
        raise interrupted
    _refuse(meeting.path, "share their reads", failed, said)
    reasons = [reason for reason in said if reason is not None]
    if reasons or mine is None or isinstance(mine, str):
        return None, str(reasons[0])
    return mine, ""


def _refuse(path: str, doing: str, mine: object, said: Iterable[Any]) -> None:
    """Raises what this rank or another one has failed with, where one says so."""
    if isinstance(mine, CheckpointError):
        raise mine
    wrong = {rank: error for rank, error in enumerate(said) if isinstance(error, CheckpointError)}
    if wrong:
        first = wrong[min(wrong)]
        raise CheckpointError(
            f"{path}: {named(wrong)} failed before the ranks could {doing}: {first}",
            path=path,
            key=first.key,
            kind="peer",
            cause=first,
        )


_Answer = tuple[list[int], str, list[Any]]  # who is missing, the load's token, what each rank said


def _come(store: _Keys, rank: int, nonce: str, mine: object, path: str, deadline: float) -> _Answer:
    """Says that this rank is here, by a word used once: an answer to an earlier call is never taken for this one's."""
    hello, welcome = f"{_PREFIX}/hello/{rank}", f"{_PREFIX}/welcome/{rank}/{nonce}"
    store.set(hello, _packed((nonce, mine)))
    if not _await(store, [welcome], 2 * deadline + 1.0):
        store.delete_key(hello)
        raise _absent(path, [0], "load", deadline)
    answer: _Answer = _unpacked(store.get(welcome))
    store.delete_key(welcome)
    return answer


def _gather(store: _Keys, size: int, token: str, mine: object, deadline: float) -> _Answer:
    keys = {rank: f"{_PREFIX}/hello/{rank}" for rank in range(1, size)}
    _await(store, list(keys.values()), deadline)
    nonces: dict[int, str] = {}
    said: list[Any] = [mine] + [None] * (size - 1)
    for rank, key in keys.items():
        if store.check([key]):
            nonces[rank], said[rank] = _unpacked(store.get(key))
            store.delete_key(key)
    answer = [rank for rank in keys if rank not in nonces], token, said
    for rank, nonce in nonces.items():
        store.set(f"{_PREFIX}/welcome/{rank}/{nonce}", _packed(answer))
    return answer


def _packed(said: object) -> str:
    return base64.b64encode(pickle.dumps(said)).decode()


def _unpacked(said: bytes) -> Any:
    return pickle.loads(base64.b64decode(said))


def _await(store: _Keys, keys: list[str], seconds: float) -> bool:
    """Whether all keys were there in time. Asks again and again: a waiting call would block the store's other users."""
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not store.check(keys):
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return True


def _absent(path: str, ranks: list[int], what: str, deadline: float) -> CheckpointError:
    return CheckpointError(
        f"{path}: {named(ranks)} of the process group did not come to the {what} within {deadline:g} s.",
        path=path,
        kind="peer",
    )


class _Lost:
    """Turns what torch's stores raise into an error of ours: the process that keeps them is gone, or the network is."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise CheckpointError(
                f"{self._path}: the key-value store of the process group does not answer (most often it lives in rank "
                f"0): {error}",
                path=self._path,
                kind="peer",
                cause=error,
            ) from error
