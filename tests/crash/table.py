"""Runs an enumeration over a store, and shows what it found as a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.crash.scenarios import SCENARIOS, Scenario
from tests.crash.trials import Bench, Result, Trial

__all__ = ["Row", "Table", "enumerate_calls"]

Pick = Callable[[Sequence[Trial]], Sequence[Trial]]


@dataclass
class Row:
    """One scenario on one store, cut at one seam.

    Attributes:
        store: its name.
        what: the scenario and the seam.
        calls: how many distinct calls it makes there.
        all_trials: how many trials these give.
        ended: how the processes ended, each how often.
        found: what was in the folders right after.
        broken: what is wrong.
    """

    store: str
    what: str
    calls: int = 0
    all_trials: int = 0
    trials: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def take(self, result: Result) -> None:
        """Counts a result in."""
        self.trials += 1
        self.ended[result.ended if result.ended in ("killed", "returned") else "raised"] += 1
        self.found.update(result.found)
        if result.broken:
            self.broken.append(f"{self.store}: {result.trial}: {result.broken}")

    def add(self, other: Row) -> None:
        """Counts another row in."""
        self.calls += other.calls
        self.all_trials += other.all_trials
        self.trials += other.trials
        self.ended += other.ended
        self.found += other.found
        self.broken += other.broken

    def __str__(self) -> str:
        ended, found = self.ended, self.found
        numbers = (self.calls, self.all_trials, self.trials, ended["killed"], ended["returned"], ended["raised"])
        outcome = (found["old"], found["new"], found["uncommitted"], len(self.broken))
        return f"{self.store:<16} {self.what:<34}" + "".join(f"{n:>9}" for n in (*numbers, *outcome))


@dataclass
class Table:
    """All rows of a run.

    Attributes:
        rows: in the order in which they were made.
        seconds: wall time.
    """

    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> Row:
        """All rows in one."""
        made = Row("in all", f"{len({row.store for row in self.rows})} stores, {self.seconds:.0f} s")
        for row in self.rows:
            made.add(row)
        return made

    def __str__(self) -> str:
        names = ("calls", "possible", "trials", "killed", "returned", "raised", "old", "new", "none", "broken")
        head = f"{'store':<16} {'what':<34}" + "".join(f"{name:>9}" for name in names)
        return "\n".join(["", head, *(str(row) for row in self.rows), str(self.total)])


def enumerate_calls(
    table: Table,
    bench: Bench,
    pick: Pick = lambda trials: trials,
    *,
    scenarios: Sequence[Scenario] = SCENARIOS,
    seams: Sequence[str] = (),
    fault: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Enumerates the calls of scenarios on a store and adds what it found to the table.

    Args:
        table: gets a row for each scenario and seam.
        bench: the store.
        pick: which of a scenario's trials are run; all of them by default.
        scenarios: which.
        seams: at which seams; all that the store has by default.
        fault: name of a protection that is taken out.
        tell: hears how far it has come, some twenty times.
    """
    begun = time.monotonic()
    rows: dict[tuple[str, str], Row] = {}
    chosen: list[Trial] = []
    for scenario in scenarios:
        for seam in seams or bench.place.seams:
            trials = bench.trials(scenario, seam, fault)
            row = Row(bench.place.name, f"{scenario.name} ({seam})", len({t.at for t in trials}), len(trials))
            rows[scenario.name, seam] = row
            table.rows.append(row)
            chosen += pick(trials)
    broken = 0
    for done, result in enumerate(bench.run(chosen), start=1):
        rows[result.trial.scenario.name, result.trial.seam].take(result)
        broken += bool(result.broken)
        if done * 20 // len(chosen) > (done - 1) * 20 // len(chosen):
            spent = time.monotonic() - begun
            tell(f"{bench.place.name}: {done} of {len(chosen)} trials, {broken} broken, {spent:.0f} s")
    table.seconds += time.monotonic() - begun
