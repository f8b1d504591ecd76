"""One call in a child that may take neither much memory nor much time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz.running import run

__all__ = ["ON_FORK", "bounded"]

ON_FORK = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""For tests that call :func:`bounded`."""


def bounded(call: Callable[[], object], *, seconds: float = 15.0) -> None:
    """Runs ``call`` in a forked child with a GiB of memory; whatever is raised there, also by a lack of it, fails here.

    Args:
        call: what is run; its assertions count.
        seconds: that it may take.
    """

    def trial(number: int) -> str:
        call()
        return "fine"

    tally = run(trial, inputs=1, patience=seconds)
    assert not tally.faults, tally.faults[0].why
    assert tally.outcomes == {"fine": 1}
