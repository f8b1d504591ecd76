"""The ranks of one call: what they tell each other, and how the failure of one becomes the same error on all."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from dcp_storage.errors import Cause, CheckpointError, portable

__all__ = ["Ranks", "check_same", "joined_failure", "unwrapped"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Unsendable:
    """What a rank sends in place of something that does not pickle: none may be left waiting for it."""

    cause: Cause


@dataclass(frozen=True)
class Ranks:
    """Those who make a call together.

    Attributes:
        rank: this one's number in the group.
        world: how many there are.
        group: their process group; None is the default group.
        alone: whether this process saves or loads by itself, without any group.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None
    alone: bool

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, no_dist: bool) -> Ranks:
        """The ranks of a group; this process alone with ``no_dist`` or where there is no process group.

        Raises:
            ValueError: this process is not in the group, or a group was given with ``no_dist``.
        """
        if no_dist and process_group is not None:
            raise ValueError("process_group and no_dist=True exclude each other.")
        if no_dist or not dist.is_available() or not dist.is_initialized():
            return cls(0, 1, None, True)
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("This rank is not in process_group: only its members make this call.")
        return cls(rank, dist.get_world_size(process_group), process_group, False)

    def gather(self, value: T) -> list[T]:
        """What every rank says, by rank.

        Raises:
            CheckpointError: of kind ``"peer"``: a rank is gone, or did not come within the group's time-out. Of kind
                ``"unsendable"``, on all ranks: what one of them has to say does not pickle.
        """
        if self.alone:
            return [value]
        told: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(told, _packed(value), group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"The ranks of the process group do not reach each other, as where one of them is gone: {error}",
                kind="peer",
                cause=error,
            ) from error
        return [_unpacked(rank, data) for rank, data in enumerate(told)]

    def agree(
        self, doing: str, path: str | None, call: Callable[[], T], *, plain: tuple[type[Exception], ...] = ()
    ) -> list[T]:
        """Calls something on every rank, and tells every rank what came out.

        Args:
            doing: what it is, for errors.
            path: the checkpoint, for errors.
            call: what this rank does.
            plain: exactly these exceptions, of wrong use, are raised as they are on the rank that met them.

        Raises:
            CheckpointError: it failed on some rank; the same call raises on all. Of kind ``"peer"``: a rank is gone.
            KeyboardInterrupt: some rank was interrupted.
        """
        failure: BaseException | None = None
        original: BaseException | None = None
        outcome: T | None = None
        try:
            outcome = call()
        except (KeyboardInterrupt, SystemExit) as error:
            failure = error
        except BaseException as error:  # noqa: BLE001 - raised again below, on every rank; torch's own is no Exception
            failure = portable(error, doing, path=path)
            original = error
        if isinstance(failure, CheckpointError) and failure.kind == "peer":
            # It names a rank that is not there, and every other rank has been told: a collective would wait for it.
            raise joined_failure({self.rank: failure}, self.rank, doing, path) from failure.__cause__
        try:
            told = self.gather((None if failure is None else _sendable(failure), outcome))
        except CheckpointError as broken:
            raise joined_failure({self.rank: failure or broken}, self.rank, doing, path) from broken
        failures = {rank: failed for rank, (failed, _) in enumerate(told) if failed is not None}
        if not failures:
            return [said for _, said in told]  # type: ignore[misc]  # no failure: every outcome is there
        if failure is not None:
            failures[self.rank] = failure  # the original, with its cause
            if original is not None and (
                type(original) in plain or not isinstance(original, Exception | CheckpointException)
            ):
                raise original
        raise joined_failure(failures, self.rank, doing, path)


def _packed(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever a foreign __reduce__ raises; every rank is told
        return pickle.dumps(_Unsendable(Cause.of(error)))


def _unpacked(rank: int, data: bytes) -> Any:
    try:
        found = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - likewise
        found = _Unsendable(Cause.of(error))
    if isinstance(found, _Unsendable):
        raise CheckpointError(
            f"What rank {rank} has to say does not reach the other ranks, as it does not pickle: {found.cause.type}: "
            f"{found.cause.message}",
            kind="unsendable",
            cause=found.cause,
        )
    return found


def _sendable(error: BaseException) -> BaseException:
    """The error as the other ranks can get it: without what of it does not pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a foreign __reduce__ raises
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt()
        if isinstance(error, SystemExit):
            return SystemExit(1)
        known = error if isinstance(error, CheckpointError) else None
        return CheckpointError(
            Cause.of(error).message,
            path=known.path if known else None,
            kind=known.kind if known else "hook",
            cause=known.cause if known and known.cause else error,
        )
    return error


def check_same(name: str, told: Sequence[object], outcome: str, path: str | None) -> None:
    """Refuses an argument that is not the same on all ranks: they would part, and some would wait for the others.

    Args:
        name: of the argument.
        told: what it is, by rank.
        outcome: a sentence: that nothing was done.
        path: the checkpoint, for errors.

    Raises:
        CheckpointError: of kind ``"options"``.
    """
    for rank, one in enumerate(told):
        if one != told[0]:
            raise CheckpointError(
                f"{name} is {told[0]!r} on rank 0 and {one!r} on rank {rank}; every rank must say the same. {outcome}",
                path=path,
                kind="options",
            )


def joined_failure(failures: Mapping[int, BaseException], rank: int, doing: str, path: str | None) -> BaseException:
    """The one error that stands for what happened on all ranks: this rank's own, else that of the lowest.

    An interrupt stays what it is, and wins: every rank is to stop.

    Args:
        failures: rank → what it raised.
        rank: this rank.
        doing: what was being done.
        path: the checkpoint.

    Returns:
        A CheckpointError with ``rank`` and ``failures``; or a KeyboardInterrupt or SystemExit.
    """
    for error in failures.values():
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return error
    ours: dict[int, CheckpointError] = {}
    for number in sorted(failures):
        ours[number] = portable(failures[number], doing, path=path)
        ours[number].rank = number
    chosen = ours[rank] if rank in ours else ours[min(ours)]
    chosen.failures = ours
    return chosen


@contextlib.contextmanager
def unwrapped(
    ranks: Ranks, doing: str, path: str | None, reason: Callable[[], CheckpointError | None] = lambda: None
) -> Iterator[None]:
    """What torch wraps in its own CheckpointException comes out as the error itself; any other error as one of ours.

    Args:
        ranks: who makes the call.
        doing: what it is, for errors.
        path: the checkpoint, for errors.
        reason: asked where torch's own collectives failed, as they do, without a name, where a rank is gone: what this
            rank met before, None where that was nothing.

    Raises:
        CheckpointError: for everything but interrupts.
    """
    try:
        yield
    except CheckpointException as error:
        raised = joined_failure({n: pair[0] for n, pair in error.failures.items()}, ranks.rank, doing, path)
        raise raised from (raised.__cause__ or error)
    except Exception as error:
        raised = joined_failure({ranks.rank: reason() or error}, ranks.rank, doing, path)
        if raised is error:
            raise
        raise raised from error
