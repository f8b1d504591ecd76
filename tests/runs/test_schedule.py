"""When a save is due."""

from __future__ import annotations

import math
import signal
import threading

import pytest

from dcp_storage.manager_schedule import Schedule, When, optimal_interval
from dcp_storage.manager_signals import TermSignal


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def due(schedule: Schedule, steps: range) -> list[int]:
    return [step for step in steps if schedule.due_by_steps(step)]


def test_every_so_many_steps() -> None:
    """Multiples are due, step 0 is not."""
    assert due(Schedule(When(every_steps=10)), range(35)) == [10, 20, 30]
    assert due(Schedule(When(every_steps=1)), range(4)) == [1, 2, 3]
    assert due(Schedule(When()), range(35)) == []


def test_a_multiple_that_was_jumped_over_is_due() -> None:
    """A loop that counts in fours still saves once in every ten steps."""
    assert due(Schedule(When(every_steps=10)), range(4, 45, 4)) == [12, 20, 32, 40]


def test_a_step_is_not_due_twice() -> None:
    """What was just saved, or just loaded, need not be saved; the next multiple is due as ever."""
    schedule = Schedule(When(every_steps=10))
    schedule.loaded(20)
    assert due(schedule, range(20, 31)) == [30]
    schedule.saved(30, schedule.now())
    assert due(schedule, range(30, 41)) == [40]


def test_every_so_many_seconds() -> None:
    """A save is due so long after the last one began, not before, and not while one is under way."""
    time = Time()
    schedule = Schedule(When(every_seconds=60.0), time)
    assert not schedule.due_by_time(1, saving=False)
    time.now += 59.5
    assert not schedule.due_by_time(2, saving=False)
    time.now += 0.5
    assert not schedule.due_by_time(3, saving=True)
    assert schedule.due_by_time(3, saving=False)
    begun = schedule.now()
    time.now += 20.0
    schedule.saved(3, begun)
    time.now += 39.0
    assert not schedule.due_by_time(4, saving=False)
    time.now += 1.0
    assert schedule.due_by_time(4, saving=False)
    assert not schedule.due_by_time(3, saving=False)


@pytest.mark.parametrize(
    ("cost", "between", "wanted"),
    [
        # sqrt(2 d M) [1 + sqrt(d / 2M) / 3 + (d / 2M) / 9] - d, by hand for round numbers: d / 2M = 1/400, 1/100, 1/4.
        (5.0, 1000.0, 100.0 * (1 + 1 / 60 + 1 / 3600) - 5.0),
        (20.0, 1000.0, 200.0 * (1 + 1 / 30 + 1 / 900) - 20.0),
        (500.0, 1000.0, 1000.0 * (1 + 1 / 6 + 1 / 36) - 500.0),
        (2000.0, 1000.0, 1000.0),
        (9000.0, 1000.0, 1000.0),
    ],
)
def test_the_interval_is_dalys(cost: float, between: float, wanted: float) -> None:
    """The interval follows Daly's formula, and is the mean time between failures where a save costs more than that."""
    assert optimal_interval(cost, between) == pytest.approx(wanted, rel=1e-12)


def test_the_interval_loses_the_least_time() -> None:
    """Beside other intervals, this one wastes least by Daly's model of saves, failures and lost work."""
    cost, between = 30.0, 3600.0

    def wasted(interval: float) -> float:
        return between * math.expm1((interval + cost) / between) / interval

    best = optimal_interval(cost, between)
    assert wasted(best) <= min(wasted(best * factor) for factor in (0.7, 0.9, 1.1, 1.4))


def test_the_first_save_is_measured_and_then_the_interval_holds() -> None:
    """Before anything was measured a save is due at once; then as often as its cost and the failures ask for."""
    time = Time()
    schedule = Schedule(When(between_failures=1000.0), time)
    assert schedule.interval is None
    assert schedule.due_by_time(1, saving=False)
    begun = schedule.now()
    time.now += 5.0
    schedule.saved(1, begun)
    wanted = 100.0 * (1 + 1 / 60 + 1 / 3600) - 5.0
    assert schedule.cost == 5.0
    assert schedule.interval == pytest.approx(wanted)
    time.now += wanted - 0.1
    assert not schedule.due_by_time(2, saving=False)
    time.now += 0.2
    assert schedule.due_by_time(2, saving=False)


def test_the_cost_is_that_of_the_last_few_saves() -> None:
    """One slow save does not count for ever."""
    time = Time()
    schedule = Schedule(When(between_failures=1000.0), time)
    for step, seconds in enumerate((500.0, 2.0, 2.0, 2.0, 2.0, 2.0)):
        begun = schedule.now()
        time.now += seconds
        schedule.saved(step, begun)
    assert schedule.cost == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every_steps": 0}, ValueError),
        ({"every_steps": 2.0}, TypeError),
        ({"every_steps": True}, TypeError),
        ({"every_seconds": 0}, ValueError),
        ({"every_seconds": float("nan")}, TypeError),
        ({"every_seconds": "60"}, TypeError),
        ({"between_failures": -1.0}, ValueError),
    ],
)
def test_wrong_rules_are_refused(options: dict[str, object], error: type[Exception]) -> None:
    """A rule that can never be meant is refused when it is given."""
    with pytest.raises(error):
        When(**options)  # type: ignore[arg-type]


def test_sigterm_is_noted_and_the_handler_comes_back() -> None:
    """Between listen and restore SIGTERM sets a flag and calls the handler that was there; then all is as before."""
    called: list[int] = []

    def before(number: int, frame: object) -> None:
        called.append(number)

    original = signal.signal(signal.SIGTERM, before)
    try:
        term = TermSignal()
        term.listen()
        assert not term.seen
        signal.raise_signal(signal.SIGTERM)
        assert (term.seen, called) == (True, [signal.SIGTERM])
        term.restore()
        assert signal.getsignal(signal.SIGTERM) is before
        term.restore()
        later = TermSignal()
        later.listen()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        later.restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, original)


def test_only_the_main_thread_can_listen() -> None:
    """Elsewhere Python sets no handlers, which is said at once."""
    errors: list[Exception] = []

    def listen() -> None:
        try:
            TermSignal().listen()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(10)
    assert "main thread" in str(errors[0])
