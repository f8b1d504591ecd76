"""The calls of a manager that look at a run, keep its steps and delete them; made by all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist

from dcp_storage.errors import CheckpointError
from dcp_storage.manager_pending import Background
from dcp_storage.manager_run import RunKeeper
from dcp_storage.state_ranks import Ranks
from dcp_storage.tools.prune import PruneReport
from dcp_storage.tools.runs import step_name

__all__ = ["RunCalls"]

T = TypeVar("T")


class RunCalls:
    """What :class:`~dcp_storage.manager.CheckpointManager` does besides saving and loading.

    Args:
        keeper: the run.
        process_group: the ranks that make the calls; None for the default group.
        no_dist: whether this process works alone although there is a process group.
    """

    def __init__(self, keeper: RunKeeper, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        self._keeper = keeper
        self._process_group = process_group
        self._no_dist = no_dist
        self._background = Background()

    @property
    def root(self) -> str:
        """The run's folder."""
        return self._keeper.folder.location.url

    def steps(self) -> list[int]:
        """The committed steps, ascending: one listing, and at most two requests for each folder of a step.

        Raises:
            CheckpointError: two folders stand for one number, and both are committed (kind ``two-folders``); or a save
                in the background failed.
            StoreError: the store failed.
        """
        self._hear()
        return self._told("Listing the run", self._keeper.steps)

    def latest(self) -> int | None:
        """The newest committed step; None where the run holds nothing. Newer folders that are not committed are said
        in a warning: unfinished ones, and those that stock torch wrote.

        One listing, and at most two requests for each folder looked at, newest first; never from a cache.

        Raises:
            NotCommittedError: no step is committed, but some are unfinished or of another kind.
            CheckpointError: as :meth:`steps`.
            StoreError: the store failed. An outage is never taken for an empty run.
        """
        self._hear()
        under_way = self._background.step
        return self._told_and_warned("Looking for the latest step", lambda: self._keeper.latest(under_way))[0]

    def path(self, step: int) -> str:
        """The folder of a step, as a path or URL, where it is or would be saved to; one listing."""
        step_name(step)
        self._hear()
        return self._told("Looking for a step", lambda: self._keeper.url_for(step))

    def pins(self) -> list[int]:
        """The pinned steps, ascending; as many requests as :meth:`steps`."""
        self._hear()
        return self._told("Listing the run", self._keeper.pins)

    def pin(self, step: int, why: str = "") -> None:
        """Keeps a committed step from being deleted by anybody, for good, until :meth:`unpin`.

        Args:
            step: which one.
            why: a note for whoever finds the pin.

        Raises:
            CheckpointNotFoundError: there is no such step.
            NotCommittedError: it is not committed.
            CheckpointReplacedError: it was deleted meanwhile; it is not pinned.
            StoreError: the store failed.
        """
        step_name(step)
        self._hear()
        self._told("Pinning a step", lambda: self._keeper.pin(step, why))

    def unpin(self, step: int) -> None:
        """Takes a pin away; nothing to do where there is none."""
        step_name(step)
        self._hear()
        self._told("Unpinning a step", lambda: self._keeper.unpin(step))

    def prune(self, *, apply: bool = False, keep: Iterable[int] = ()) -> PruneReport:
        """Deletes what need not be kept, and what dead attempts left, as :func:`~dcp_storage.prune` does.

        Args:
            apply: False only finds out what would be done. Default False.
            keep: keep these steps too.

        Returns:
            The report, the same on every rank.
        """
        kept = frozenset(keep)
        self._hear()
        return self._told("Pruning the run", lambda: self._keeper.prune(kept, apply=apply))

    def _ranks(self) -> Ranks:
        return Ranks.of(self._process_group, self._no_dist)

    def _told(self, doing: str, work: Callable[[], T]) -> T:
        """What the coordinator finds, told to all ranks; what it raises is raised on all, whatever it is."""
        ranks = self._ranks()
        told = ranks.agree(doing, self.root, lambda: work() if ranks.rank == 0 else None, plain=(UserWarning,))
        return told[0]  # type: ignore[return-value]

    def _told_of(self, step: int | None, doing: str, work: Callable[[], T]) -> T:
        """As :meth:`_told`, of a step: all ranks have to ask for the same, and one that is no step is told to all."""
        ranks = self._ranks()

        def mine() -> tuple[int | None, T | None]:
            if step is not None:
                step_name(step)
            return step, work() if ranks.rank == 0 else None

        told = ranks.agree(doing, self.root, mine, plain=(UserWarning, TypeError, ValueError))
        asked = [one for one, _ in told]
        for rank, one in enumerate(asked):
            if one != asked[0]:
                raise CheckpointError(
                    f"{self.root}: the ranks ask for different steps: rank 0 for {asked[0]}, rank {rank} for {one}.",
                    path=self.root,
                    kind="step",
                )
        return told[0][1]  # type: ignore[return-value]

    def _told_and_warned(self, doing: str, work: Callable[[], tuple[T, list[str]]]) -> tuple[T, list[str]]:
        """As :meth:`_told`, of a finding and sentences of which the coordinator warns.

        It warns before the others are told: where warnings are errors, this one reaches all ranks.
        """

        def find() -> tuple[T, list[str]]:
            found, said = work()
            for sentence in said:
                warnings.warn(sentence, stacklevel=7)  # the line that calls the manager
            return found, said

        return self._told(doing, find)

    def _hear(self) -> None:
        """Raises what went wrong in the background, once that has ended on all ranks; on all ranks."""
        self._background.hear(self._ranks())
