"""When to save: every so many steps, every so many seconds, or as often as pays off between failures."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Schedule", "When", "optimal_interval"]

_REMEMBERED = 5  # saves whose time is averaged


def optimal_interval(save_seconds: float, mean_time_between_failures: float) -> float:
    """The seconds of work between two saves that lose the least time, by Daly's refinement of Young's formula.

    Young: ``sqrt(2 * d * M)``, with ``d`` the time that a save costs and ``M`` the mean time between failures of the
    whole job. Daly adds the terms that matter where ``d`` is not small beside ``M``, and takes ``d`` off, since the
    time counts from the end of one save to the beginning of the next (J. T. Daly, 2006, equation 37).

    Args:
        save_seconds: seconds that a save keeps the work waiting.
        mean_time_between_failures: seconds.
    """
    cost, between = save_seconds, mean_time_between_failures
    if cost >= 2 * between:
        return between
    ratio = cost / (2 * between)
    return math.sqrt(2 * cost * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@dataclass(frozen=True)
class When:
    """When a save is due: as soon as one of these says so.

    Attributes:
        every_steps: at every step that this number divides.
        every_seconds: so many seconds after the last save began.
        between_failures: mean time between failures of the whole job, seconds; see :func:`optimal_interval`.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is not positive.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    between_failures: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and type(self.every_steps) is not int:
            raise TypeError(f"every_steps must be an int or None, not {self.every_steps!r}.")
        for name in ("every_seconds", "between_failures"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
                raise TypeError(f"{name} must be a number of seconds or None, not {value!r}.")
        for name in ("every_steps", "every_seconds", "between_failures"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}.")

    @property
    def by_steps_only(self) -> bool:
        """Whether every rank comes to the same answer by itself."""
        return self.every_seconds is None and self.between_failures is None

    @property
    def says_nothing(self) -> bool:
        """Whether no save is ever due."""
        return self.every_steps is None and self.by_steps_only


class Schedule:
    """Keeps the time of saves and says whether the next one is due.

    Args:
        when: the rule.
        clock: seconds, monotonic.
    """

    def __init__(self, when: When, clock: Callable[[], float] = time.monotonic) -> None:
        self.when = when
        self._clock = clock
        self._begun = clock()
        self._ended = self._begun
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._step: int | None = None
        self._saved: int | None = None

    @property
    def cost(self) -> float | None:
        """Seconds that a save kept the work waiting, the mean of the last few; None before the first."""
        return sum(self._costs) / len(self._costs) if self._costs else None

    @property
    def interval(self) -> float | None:
        """Seconds of work between two saves by the time between failures; None where that is not known yet."""
        if self.when.between_failures is None or self.cost is None:
            return None
        return optimal_interval(self.cost, self.when.between_failures)

    def due_by_steps(self, step: int) -> bool:
        """Whether a multiple of ``every_steps`` was reached, or passed since the last question."""
        before = max(step - 1, 0) if self._step is None else min(self._step, step)
        self._step = step
        every = self.when.every_steps
        return every is not None and step != self._saved and step // every > before // every

    def due_by_time(self, step: int, *, saving: bool) -> bool:
        """Whether the time for a save has come.

        Args:
            step: the step; it is not due twice.
            saving: whether a save is still under way: no second one is begun only because time has passed.
        """
        if step == self._saved or saving:
            return False
        now = self._clock()
        if self.when.every_seconds is not None and now - self._begun >= self.when.every_seconds:
            return True
        if self.when.between_failures is None:
            return False
        # What the first save costs is not known before it was made, so it is made at once: that also shows early
        # whether the store works at all.
        return self.interval is None or now - self._ended >= self.interval

    def now(self) -> float:
        """The clock's time, seconds."""
        return self._clock()

    def saved(self, step: int, begun: float) -> None:
        """Notes a save of this step, which began then and lets the work go on now."""
        self._saved = self._step = step
        self._begun, self._ended = begun, self._clock()
        self._costs.append(self._ended - begun)

    def loaded(self, step: int) -> None:
        """Notes that this step was loaded: it need not be saved."""
        self._saved = self._step = step
