"""What was done in all runs of a machine, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Tally"]


@dataclass
class Tally:
    """What was done in all runs of a machine.

    Attributes:
        runs: folders that were played on.
        steps: rules that were chosen.
        requests: requests that reached a store.
        ended: how the members ended, by kind.
        faults: what befell requests, by mode.
    """

    runs: int = 0
    steps: int = 0
    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = [f"{what} {count}" for what, count in sorted((self.ended + self.faults).items())]
        return f"{self.runs} runs, {self.steps} steps, {self.requests} requests; {', '.join(told)}"
