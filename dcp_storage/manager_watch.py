"""Whether a save is due, agreed on by all ranks: the schedule and SIGTERM together."""

from __future__ import annotations

from dcp_storage.manager_schedule import Schedule, When
from dcp_storage.manager_signals import TermSignal
from dcp_storage.state_ranks import Ranks

__all__ = ["Watch"]


class Watch:
    """Says when to save.

    Args:
        when: the rule.
        on_sigterm: whether SIGTERM asks for a save, instead of ending the process.

    Attributes:
        preempted: whether SIGTERM came to any rank, as of the last :meth:`due`.

    Raises:
        ValueError: ``on_sigterm`` outside the main thread.
    """

    def __init__(self, when: When, *, on_sigterm: bool) -> None:
        self.preempted = False
        self._answered = False
        self._schedule = Schedule(when)
        self._signal = TermSignal() if on_sigterm else None
        if self._signal is not None:
            self._signal.listen()

    @property
    def alone(self) -> bool:
        """Whether every rank comes to the same answer by itself."""
        return self._schedule.when.by_steps_only and self._signal is None

    def due(self, step: int, ranks: Ranks, *, saving: bool) -> bool:
        """Whether to save now.

        Args:
            step: the step.
            ranks: those who ask together.
            saving: whether a save is still under way.

        Raises:
            ValueError: there is no rule.
        """
        if self._schedule.when.says_nothing and self._signal is None:
            raise ValueError(
                "Nothing says when to save: give the manager every_steps, every_seconds, mean_time_between_failures or "
                "on_sigterm."
            )
        by_steps = self._schedule.due_by_steps(step)
        if self.alone:
            return by_steps
        told = ranks.agree(
            "Asking whether to save",
            None,
            lambda: (self._schedule.due_by_time(step, saving=saving), self._signal is not None and self._signal.seen),
        )
        self.preempted = self.preempted or any(seen for _, seen in told)
        return by_steps or told[0][0] or (self.preempted and not self._answered)

    def begin(self) -> float:
        """The time at which a save begins."""
        return self._schedule.now()

    def saved(self, step: int, begun: float) -> None:
        """Notes a save, which lets the work go on now."""
        self._schedule.saved(step, begun)
        self._answered = self._answered or self.preempted

    def loaded(self, step: int) -> None:
        """Notes that this step was loaded: it need not be saved."""
        self._schedule.loaded(step)

    def close(self) -> None:
        """Puts the handler of SIGTERM back."""
        if self._signal is not None:
            self._signal.restore()
