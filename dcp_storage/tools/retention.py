"""Which steps of a run stay: a rule, and the search for a good one that must never go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dcp_storage.errors import CheckpointError
from dcp_storage.tools.delete import find_whole
from dcp_storage.tools.describe import COMMITTED
from dcp_storage.tools.runs import Run, StepFolder

__all__ = ["Choice", "Rule", "choose"]


@dataclass(frozen=True)
class Rule:
    """Which steps are kept. Without ``keep_latest`` and ``keep_every`` all are; the newest one always is.

    Attributes:
        keep_latest: keep so many of the newest committed steps; at least 1.
        keep_every: keep every step that this number divides.
        keep: keep these steps too.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: ``keep_latest`` or ``keep_every`` is less than 1.
    """

    keep_latest: int | None = None
    keep_every: int | None = None
    keep: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("keep_latest", "keep_every"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise TypeError(f"{name} must be an int or None, not {value!r}.")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        if any(type(step) is not int for step in self.keep):
            raise TypeError(f"keep takes steps, which are ints, not {sorted(map(repr, self.keep))}.")

    @property
    def keeps_all(self) -> bool:
        """Whether no step ever goes."""
        return self.keep_latest is None and self.keep_every is None

    def keeps(self, step: int) -> bool:
        """Whether this step stays whatever other steps there are."""
        return self.keeps_all or step in self.keep or (self.keep_every is not None and step % self.keep_every == 0)

    def gone(self, committed: Iterable[int]) -> list[int]:
        """Of these committed steps those that go, ascending."""
        steps = sorted(set(committed))
        newest = set(steps[-(self.keep_latest or 1) :])
        return [step for step in steps if step not in newest and not self.keeps(step)]


@dataclass
class Choice:
    """What the rule comes to in a run.

    Attributes:
        good: the newest committed step that is whole, where any is to go; it stays. None where none is known to be.
        gone: the folders that go, oldest first.
        kept: the committed folders that stay, ascending.
        spared: folders that would go by the rule, and why they stay.
        damaged: what is wrong with the committed steps that are newer.
    """

    good: StepFolder | None = None
    gone: list[StepFolder] = field(default_factory=list)
    kept: list[StepFolder] = field(default_factory=list)
    spared: dict[str, str] = field(default_factory=dict)
    damaged: list[CheckpointError] = field(default_factory=list)


def choose(run: Run, found: Sequence[StepFolder], rule: Rule) -> Choice:
    """Which committed folders go. Nothing goes unless a whole checkpoint is known to stay.

    Pinned steps stay, and so do both of two committed folders for one number. The newest whole step (its manifest
    reads, its files have their sizes) always stays, also where the rule keeps newer ones only.

    Args:
        run: the run.
        found: what was looked at: all folders that may go, and the newest committed ones.
        rule: which steps are kept.

    Raises:
        StoreError: the store failed.
    """
    committed = sorted((f for f in found if f.state == COMMITTED), key=lambda f: (f.step, f.name))
    gone = set(rule.gone(f.step for f in committed))
    choice = Choice()
    for folder in committed:
        twin = next((f for f in committed if f.step == folder.step and f is not folder), None)
        if folder.step not in gone:
            choice.kept.append(folder)
        elif folder.pinned:
            choice.spared[folder.name] = "pinned"
        elif twin is not None:
            choice.spared[folder.name] = f"{twin.name} holds a checkpoint of the same step"
        else:
            choice.gone.append(folder)
    choice.kept = [f for f in committed if f not in choice.gone]
    if choice.gone:
        _keep_a_good_one(run, choice)
    return choice


def _keep_a_good_one(run: Run, choice: Choice) -> None:
    committed = sorted([*choice.kept, *choice.gone], key=lambda f: (f.step, f.name))
    choice.good, choice.damaged = find_whole(run, committed[::-1])
    if choice.good is None:
        choice.spared.update({f.name: "no step of this run is known to be whole" for f in choice.gone})
        choice.kept, choice.gone = committed, []
    elif choice.good in choice.gone:
        choice.spared[choice.good.name] = "the newest whole step: newer ones, which the rule keeps, are damaged"
        choice.gone.remove(choice.good)
        choice.kept = [f for f in committed if f not in choice.gone]
