"""Many tasks at once: bounded, all ended when the block ends, the first error raised."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from dcp_storage.tools.crew import Crew


def test_the_first_error_is_raised_after_all_have_ended() -> None:
    """One task fails while another runs: the error comes out when the other has ended, and no more begin."""
    ended: list[str] = []
    begun = threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.3)
        ended.append("slow")

    def fails() -> None:
        begun.wait(timeout=10)
        raise ValueError("first")

    def late() -> None:
        ended.append("late")
        time.sleep(0.2)

    def both() -> None:
        with Crew(2, 100) as crew:
            crew.do(1, slow)
            crew.do(1, fails)
            for _ in range(50):
                crew.do(1, late)

    with pytest.raises(ValueError, match="first"):
        both()
    assert "slow" in ended
    assert len(ended) < 10


def test_the_budget_bounds_what_is_held() -> None:
    """No more bytes are held at once than allowed."""
    held, most = [0], [0]
    lock = threading.Lock()

    def task() -> None:
        with lock:
            held[0] += 40
            most[0] = max(most[0], held[0])
        time.sleep(0.01)
        with lock:
            held[0] -= 40

    with Crew(8, 100) as crew:
        for _ in range(20):
            crew.do(40, task)
    assert most[0] == 80


def test_an_interrupt_at_the_end_awaits_what_runs() -> None:
    """Interrupted while it waits for the last tasks: those that run end first, those that wait are dropped."""
    ended: list[str] = []

    def task() -> None:
        time.sleep(0.5)
        ended.append("ended")

    def interrupted() -> None:
        with Crew(1, 100) as crew:
            crew.do(1, task)
            crew.do(1, task)
            threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ended == ["ended"]
