"""The enumeration: records the calls of a piece of work, and runs it once for each of them and each way to be cut."""

from __future__ import annotations

import math
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from dcp_storage.errors import CheckpointError
from dcp_storage.testing.faults import FAULTS, HEALTHY, NamedFault
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.crash.checking import Checker
from tests.crash.places import Place, apply_kept
from tests.crash.points import MODES, REPEATS, Mode, Point
from tests.crash.scenarios import FOREIGN, Scenario, Snapshots, modes_at
from tests.crash.values import BrokenError
from tests.crash.work import NEW, Job, Outcome, do

__all__ = ["PRELOAD", "Bench", "Result", "Trial", "sample"]

PRELOAD = ("pytest", "tests.crash.work", "dcp_storage.reader", "dcp_storage.stores.s3", "dcp_storage.stores.gcs")
"""What the processes that are killed have imported before they begin."""

SECONDS = 60.0
BATCH = 40  # folders at once
THEN = ("save", "prune", "delete")
NEXT, LAST = 7, 8


@dataclass(frozen=True)
class Trial:
    """One process that is cut once.

    Attributes:
        scenario: what it does.
        seam: where it can be cut.
        at: where it is cut.
        mode: how.
        then: what is done to the folder before the last save: another ``save``, a ``prune`` or a ``delete``.
        early: whether a kept request arrives right after the process has ended, and not only after that.
        fault: name of the protection that is taken out of the process; empty for none.
    """

    scenario: Scenario
    seam: str
    at: Point
    mode: Mode
    then: str = "save"
    early: bool = False
    fault: str = ""

    def __str__(self) -> str:
        arrives = "" if self.mode not in REPEATS else " before that" if self.early else " after that"
        return f"{self.scenario.name}: {self.mode} [{self.at}] ({self.seam}), then a {self.then}{arrives}"


@dataclass
class Result:
    """What came of a trial.

    Attributes:
        trial: the trial.
        ended: ``killed``, ``returned``, or the class of what was raised.
        found: for each folder, right after the process: ``old``, ``new`` or ``uncommitted``.
        broken: what is wrong; empty where nothing is.
    """

    trial: Trial
    ended: str = ""
    found: list[str] = field(default_factory=list)
    broken: str = ""


@dataclass
class _Case:
    """A trial under way."""

    trial: Trial
    url: str
    notes: Path
    result: Result
    kept: bytes = b""
    versions: dict[str, int | None] = field(default_factory=dict)

    @property
    def folders(self) -> list[str]:
        return [f"{self.url}/{part}" for part in self.trial.scenario.parts] or [self.url]

    @property
    def fault(self) -> NamedFault:
        return FAULTS[self.trial.fault] if self.trial.fault else HEALTHY

    @property
    def foreign(self) -> set[str]:
        return set() if self.trial.scenario.before == "nothing" else {FOREIGN}

    def new(self, folder: str) -> int | None:
        parts = self.trial.scenario.parts
        return NEW + self.folders.index(folder) if parts else self.trial.scenario.new


class Bench:
    """Runs trials on one store.

    Args:
        place: the store.
        pool: forks the processes that are killed.
    """

    def __init__(self, place: Place, pool: RankPool) -> None:
        self.place = place
        self._pool = pool
        self._checker = Checker(place)
        self._snapshots = Snapshots(place, self._checker)

    def points(self, scenario: Scenario, seam: str, fault: str = "") -> list[Point]:
        """Every call of a scenario, by one run that is not cut."""
        with tempfile.TemporaryDirectory() as notes:
            trial = Trial(scenario, seam, Point("", 0), "lost", fault=fault)
            case = _Case(trial, self.place.url(self.place.number()), Path(notes), Result(trial))
            self._prepare(case)
            if scenario.aged:
                time.sleep(self.place.waits)
            answer, points, _ = self._run(case, record=True)
            if not isinstance(answer, Outcome) or (any(answer.errors) and not fault):
                raise AssertionError(f"{scenario.name} failed without any fault: {answer}")
            if not fault:
                for folder in case.folders:
                    self._expect(folder, {case.new(folder)})
            self.place.clear(case.url)
        return points

    def trials(self, scenario: Scenario, seam: str, fault: str = "") -> list[Trial]:
        """Every trial of a scenario; a request that is kept arrives at each time that it can."""
        found: list[Trial] = []
        for point in self.points(scenario, seam, fault):
            for mode in modes_at(self.place, seam, point):
                if mode in REPEATS:
                    ways = [("save", True), *((then, False) for then in THEN)]
                else:
                    ways = [(THEN[len(found) // len(MODES) % len(THEN)], False)]
                found += [Trial(scenario, seam, point, mode, then, early, fault) for then, early in ways]
        return found

    def run(self, trials: Sequence[Trial]) -> Iterator[Result]:
        """Runs trials, some side by side as far as that saves waiting for the store's clock."""
        for begin in range(0, len(trials), BATCH):
            with tempfile.TemporaryDirectory() as notes:
                yield from self._batch(trials[begin : begin + BATCH], Path(notes))

    def _batch(self, trials: Sequence[Trial], notes: Path) -> list[Result]:
        cases = []
        for trial in trials:
            name = self.place.number()
            case = _Case(trial, self.place.url(name), notes / name, Result(trial))
            case.notes.mkdir()
            self._prepare(case)
            cases.append(case)
        if any(case.trial.scenario.aged for case in cases):
            time.sleep(self.place.waits)
        for step, waits in ((self._strike, True), (self._then, True), (self._finish, False)):
            for case in cases:
                if not case.result.broken:
                    try:
                        step(case)
                    except (AssertionError, CheckpointError, CheckpointException) as error:
                        case.result.broken = f"{type(error).__name__}: {error}"
            if waits:
                time.sleep(self.place.waits)
        for case in cases:
            self.place.clear(case.url)
        return [case.result for case in cases]

    # -- one trial

    def _prepare(self, case: _Case) -> None:
        scenario = case.trial.scenario
        self.place.fill(case.url, self._snapshots.of(scenario.before))
        if scenario.leftovers:
            self.place.leave_upload(case.url, f"__0_1.{'e' * 16}.distcp")

    def _run(self, case: _Case, *, record: bool = False) -> tuple[Outcome | RankFailure, list[Point], bool]:
        """Runs the process to its end; what it left, the calls it made, and whether it was cut."""
        trial, gate = case.trial, self.place.gate
        at = None if record else trial.at
        outside = gate is not None and trial.seam == "http"
        job = Job(
            work=trial.scenario.work,
            url=case.url,
            options=self.place.cut_options,
            notes=str(case.notes),
            seam=trial.seam,
            at=None if outside else at,
            mode=trial.mode,
            fault=trial.fault,
            source=self._snapshots.source if trial.scenario.work == "copy" else "",
        )
        if gate is not None:
            gate.arm(at if outside else None, trial.mode, case.notes / "pid")
        (answer,) = self._pool.run(do, 1, job, timeout=SECONDS, init=False, allow_failures=True)
        points = list(answer.points) if isinstance(answer, Outcome) else []
        fired = isinstance(answer, Outcome) and answer.fired
        if gate is not None:
            heard, cut, case.kept = gate.settle()
            if outside:
                points, fired = list(heard), cut
        kept = case.notes / "kept"
        if kept.exists():
            case.kept = kept.read_bytes()
        return answer, points, fired

    def _strike(self, case: _Case) -> None:
        trial, scenario = case.trial, case.trial.scenario
        may_fail = trial.mode in ("lost", "refused") and scenario.work in ("save", "async")
        there = {folder: self.place.names(folder) for folder in case.folders if may_fail}
        open_ = {folder: set(self.place.open_uploads(folder)) for folder in there}
        answer, _, fired = self._run(case)
        if isinstance(answer, RankFailure):
            if answer.signal != 9 or trial.mode not in ("before", "after", "late"):
                raise BrokenError(f"the process ended in another way than it should: {answer}")
            case.result.ended = "killed"
        elif not fired or trial.mode in ("before", "after", "late"):
            raise BrokenError(f"{trial.at} was never reached")
        else:
            case.result.ended = next((error for error in answer.errors if error), "returned")
        if trial.early:
            self._deliver(case)
        for number, folder in enumerate(case.folders):
            new = case.new(folder)
            found = case.versions[folder] = self._checker.version(folder)
            case.result.found.append("uncommitted" if found is None else "old" if found == scenario.old else "new")
            allowed = {scenario.old, new}
            if isinstance(answer, Outcome):
                error = answer.errors[number]
                if error is None:
                    allowed = {new}
                elif scenario.work in ("save", "async", "adopt", "copy") and error != "CommitUnknownError":
                    allowed = {scenario.old}
                if scenario.work in ("save", "async") and error not in (None, "CommitUnknownError"):
                    self._check_withdrawn(folder, there[folder], open_[folder])
            if found not in allowed:
                raise BrokenError(f"{folder} holds version {found}, which may be {allowed}; {case.result.ended}")
        if scenario.before == "stock" and self._checker.version(case.url, stock=True) != scenario.new:
            raise BrokenError("the stock checkpoint does not load any more")

    def _check_withdrawn(self, folder: str, there: set[str], open_: set[str]) -> None:
        """A failed save leaves nothing of its own but the claim (invariant I4)."""
        left = {name for name in self.place.names(folder) - there if not name.startswith(".claim")}
        uploads = set(self.place.open_uploads(folder)) - open_
        if left or uploads:
            raise BrokenError(f"a failed save left {sorted(left)}, uploads {sorted(uploads)}")

    def _deliver(self, case: _Case) -> None:
        """Has a kept request take effect now."""
        kept, case.kept = case.kept, b""
        if kept and self.place.gate is not None:
            self.place.gate.send(kept)
        elif kept:
            apply_kept(pickle.loads(kept), case.fault)

    def _then(self, case: _Case) -> None:
        trial = case.trial
        late = trial.mode in REPEATS and not trial.early
        for folder in case.folders:
            version = case.versions[folder]
            if trial.then == "delete" and version is not None:
                self._checker.delete(folder)
                case.versions[folder] = None
            elif trial.then == "prune":
                self._checker.prune(folder)
                if not (trial.scenario.before == "stock" and version is None):  # that prune leaves alone
                    self._checker.check_tidy(folder, case.foreign)
            else:
                self._checker.save(folder, NEXT, case.fault)
                case.versions[folder] = NEXT
        self._deliver(case)
        for folder in case.folders:
            allowed = {case.versions[folder]}
            if late and trial.then == "prune" and trial.scenario.work in ("delete", "adopt"):
                allowed.add(case.new(folder))  # a prune that found nothing to remove has held nobody off
            self._expect(folder, allowed)
            self._checker.save(folder, LAST)

    def _finish(self, case: _Case) -> None:
        for folder in case.folders:
            self._checker.prune(folder)
            self._expect(folder, {LAST})
            self._checker.check_tidy(folder, case.foreign)

    def _expect(self, folder: str, allowed: set[int | None]) -> None:
        found = self._checker.version(folder)
        if found not in allowed:
            raise BrokenError(f"{folder} holds version {found}, which may be {allowed}")


def sample(trials: Sequence[Trial], count: int) -> list[Trial]:
    """So many of the trials, spread evenly over points and modes."""
    if count >= len(trials):
        return list(trials)
    step = next(step for step in range(round(len(trials) * 0.618), len(trials)) if math.gcd(step, len(trials)) == 1)
    return [trials[place] for place in sorted(step * n % len(trials) for n in range(1, count + 1))]
