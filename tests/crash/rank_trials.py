"""A rank of a save is killed at each of its calls; what the other ranks say of it, and what is in the folder."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint import CheckpointException

from dcp_storage.errors import CheckpointError
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.crash.checking import Checker
from tests.crash.places import Place
from tests.crash.points import Mode, Point
from tests.crash.scenarios import FOREIGN, Snapshots
from tests.crash.trials import LAST
from tests.crash.values import BrokenError
from tests.crash.work import NEW, Job, Outcome, save_on_ranks

__all__ = ["RankBench", "RankResult", "RankTrial"]

SECONDS = 30.0


@dataclass(frozen=True)
class RankTrial:
    """One save of several ranks, of which one is killed.

    Attributes:
        rank: which.
        at: at which of its calls.
        mode: ``before`` or ``after``.
        replaces: whether there is a checkpoint that is replaced.
    """

    rank: int
    at: Point
    mode: Mode
    replaces: bool

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.mode} [{self.at}], {'a' if self.replaces else 'no'} checkpoint before it"


@dataclass
class RankResult:
    """What came of it.

    Attributes:
        trial: the trial.
        others: what became of each other rank: ``returned``, or the class of what it raised.
        found: ``old``, ``new`` or ``uncommitted``.
        broken: what is wrong; empty where nothing is.
    """

    trial: RankTrial
    others: dict[int, str]
    found: str = ""
    broken: str = ""


class RankBench:
    """Runs saves of several ranks on one store.

    Args:
        place: the store.
        pool: forks the ranks.
        world: how many.
    """

    def __init__(self, place: Place, pool: RankPool, world: int) -> None:
        self.place = place
        self.world = world
        self._pool = pool
        self._checker = Checker(place)
        self._snapshots = Snapshots(place, self._checker)

    def trials(self) -> list[RankTrial]:
        """Each rank at each of its calls."""
        found = []
        for replaces in (False, True):
            for rank in range(self.world):
                answers = self._run(self._prepared(replaces), rank, None, "before")
                (mine,) = [answer for n, answer in enumerate(answers) if n == rank]
                if not isinstance(mine, Outcome) or any(mine.errors):
                    raise AssertionError(f"a save of {self.world} ranks failed without any fault: {mine}")
                modes: tuple[Mode, Mode] = ("before", "after")
                found += [RankTrial(rank, point, mode, replaces) for point in mine.points for mode in modes]
        return found

    def run(self, trials: Sequence[RankTrial]) -> Iterator[RankResult]:
        """Runs trials, one after another."""
        for begin in range(0, len(trials), 16):
            done = []
            for trial in trials[begin : begin + 16]:
                url = self._prepared(trial.replaces)
                result = RankResult(trial, {})
                done.append((url, result))
                try:
                    self._strike(url, result)
                except (AssertionError, CheckpointError, CheckpointException) as error:
                    result.broken = f"{type(error).__name__}: {error}"
            time.sleep(self.place.waits)
            for url, result in done:
                try:
                    if not result.broken:
                        self._checker.prune(url)
                        self._checker.check_tidy(url, {FOREIGN} if result.trial.replaces else set())
                except (AssertionError, CheckpointError, CheckpointException) as error:
                    result.broken = f"{type(error).__name__}: {error}"
                self.place.clear(url)
                yield result

    def _prepared(self, replaces: bool) -> str:
        url = self.place.url(self.place.number())
        self.place.fill(url, self._snapshots.of("old" if replaces else "nothing"))
        return url

    def _run(self, url: str, rank: int, at: Point | None, mode: Mode) -> list[Outcome | RankFailure]:
        gate = self.place.gate
        with tempfile.TemporaryDirectory() as notes:
            job = Job("save", url, self.place.options, notes, "store", at, mode, rank=rank)
            answers: list[Outcome | RankFailure] = self._pool.run(
                save_on_ranks, self.world, job, timeout=SECONDS, allow_failures=True
            )
        if gate is not None:
            gate.settle()
        return answers

    def _strike(self, url: str, result: RankResult) -> None:
        trial = result.trial
        answers = self._run(url, trial.rank, trial.at, trial.mode)
        killed = answers[trial.rank]
        if not isinstance(killed, RankFailure) or killed.signal != 9:
            raise BrokenError(f"{trial.at} was never reached: {killed}")
        for rank, answer in enumerate(answers):
            if rank == trial.rank:
                continue
            if isinstance(answer, RankFailure):
                if answer.signal is not None or answer.exit_code is not None:
                    raise BrokenError(f"rank {rank} died too: {answer}")
                result.others[rank] = answer.type
            else:
                result.others[rank] = answer.errors[0] or "returned"
        version = self._checker.version(url)
        if version == NEW:
            version = self._checker.version(url, self.world)
        old = 1 if trial.replaces else None
        result.found = "new" if version == NEW else "uncommitted" if version is None else "old"
        if version not in ({old, NEW} if trial.rank == 0 else {old}):
            raise BrokenError(f"the folder holds version {version}")
        if version != NEW and "returned" in result.others.values():
            raise BrokenError(f"nothing new is committed, but {result.others}")
        self._checker.save(url, LAST)
        if self._checker.version(url) != LAST:
            raise BrokenError("the next save cannot be loaded")
