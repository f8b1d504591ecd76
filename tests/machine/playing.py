"""Playing a machine with a seed, and a clock that waits for nothing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from dcp_storage.testing.faults import HEALTHY, NamedFault
from tests.machine.beds import Bed
from tests.machine.machine import machine_on
from tests.machine.tally import Tally

__all__ = ["play", "quick"]


@contextmanager
def quick() -> Iterator[None]:
    """The waits between tries of a commit take no time, tokens come in order, and torch's log of every call is off."""
    counted = itertools.count()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            patch("dcp_storage.commit_object.time", SimpleNamespace(sleep=lambda seconds: None)),
            patch("dcp_storage.names.new_token", lambda: f"t{next(counted):015d}"),
        ):
            yield
    finally:
        logging.disable(disabled)


def play(
    make_bed: Callable[[], Bed],
    tally: Tally,
    *,
    runs: int,
    steps: int,
    seed: int,
    fault: NamedFault = HEALTHY,
    shrink: bool = True,
) -> None:
    """Plays so many runs.

    Args:
        make_bed: makes a folder for each run.
        tally: counts what is done.
        runs: folders.
        steps: rules for each of them.
        seed: of everything that is random.
        fault: what all members do wrong.
        shrink: whether a failure is made small before it is raised.

    Raises:
        ViolationError: an invariant was broken.
    """
    machine = seeded(seed)(machine_on(make_bed, tally, fault))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        ),
    )
