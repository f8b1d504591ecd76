"""The byte budget: who waits, who goes through, who is let in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dcp_storage.budget import Budget

SHORT, LONG = 0.1, 20.0


def begin(call: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    """Calls in a thread; the event says that it has returned."""
    done = threading.Event()

    def work() -> None:
        call()
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, done


def test_what_fits_is_held_at_once() -> None:
    """Up to the total nobody waits."""
    budget = Budget(10)
    budget.acquire(4)
    budget.acquire(6)
    assert budget.held == 10
    assert not budget.try_acquire(1)
    assert budget.held == 10
    budget.release(6)
    assert budget.try_acquire(1)
    assert budget.held == 5


def test_who_does_not_fit_waits_for_a_release() -> None:
    """A holder beyond the total waits until enough was given back, and takes it then."""
    budget = Budget(10)
    budget.acquire(8)
    thread, done = begin(lambda: budget.acquire(5))
    assert not done.wait(SHORT)
    budget.release(2)
    assert not done.wait(SHORT)
    budget.release(1)
    assert done.wait(LONG)
    thread.join(LONG)
    assert budget.held == 10


@pytest.mark.parametrize("held", [0, 1])
def test_a_holder_larger_than_the_budget_goes_through_alone(held: int) -> None:
    """It gets in when nobody else holds anything, and then nobody else does."""
    budget = Budget(10)
    budget.acquire(held)
    _, done = begin(lambda: budget.acquire(100))
    if held:
        assert not done.wait(SHORT)
        assert not budget.try_acquire(100)
        budget.release(held)
    assert done.wait(LONG)
    assert budget.held == 100
    assert not budget.try_acquire(1)
    budget.release(100)
    assert budget.held == 0


def test_nothing_can_be_held_of_nothing() -> None:
    """Zero bytes count as zero, and never let two large holders in together."""
    budget = Budget(10)
    budget.acquire(0)
    budget.acquire(50)
    assert not budget.try_acquire(50)
    budget.release(0)
    assert budget.held == 50


def test_waiting_takes_nothing() -> None:
    """``wait`` returns when there is room, and holds none of it."""
    budget = Budget(10)
    budget.acquire(10)
    _, done = begin(lambda: budget.wait(3, lambda: False))
    assert not done.wait(SHORT)
    budget.wake()
    assert not done.wait(SHORT)
    budget.release(3)
    assert done.wait(LONG)
    assert budget.held == 7


def test_waiting_ends_for_another_reason() -> None:
    """``wait`` also returns when its reason has come true and somebody wakes it."""
    budget = Budget(10)
    budget.acquire(10)
    reason = threading.Event()
    _, done = begin(lambda: budget.wait(3, reason.is_set))
    assert not done.wait(SHORT)
    reason.set()
    budget.wake()
    assert done.wait(LONG)
    assert budget.held == 10


def test_many_threads_never_hold_more_than_the_total() -> None:
    """Whatever the interleaving, the sum stays within the budget and comes back to zero."""
    budget = Budget(100)
    lock = threading.Lock()
    inside, most = 0, 0

    def work(size: int) -> None:
        nonlocal inside, most
        for _ in range(20):
            budget.acquire(size)
            with lock:
                inside += size
                most = max(most, inside)
            time.sleep(0.0005)
            with lock:
                inside -= size
            budget.release(size)

    threads = [begin(lambda size=size: work(size))[0] for size in (10, 30, 50, 70, 100, 1)]  # type: ignore[misc]
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
    assert most <= 100
    assert budget.held == 0
