"""Every parser, given bytes that nobody vouches for, ends in a value or in an error of this package, soon and small."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.choices import Drawn
from tests.fuzz.corpus import FOLDER
from tests.fuzz.judging import FaultError, attempt, input_of, numbered
from tests.fuzz.running import run
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
SEED = 20261130


def fuzz(*arguments: str, seconds: float) -> str:
    """Runs the fuzzer in a process of its own, which must end well; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.fuzz", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def count_in(said: str) -> int:
    """How many inputs the last line speaks of."""
    (found,) = re.findall(r": ([\d,]+) inputs in ", said.splitlines()[-1])
    return int(found.replace(",", ""))


def test_the_corpus() -> None:
    """What is valid in the corpus loads, and what once broke a promise ends as it should; all of it is read."""
    said = fuzz("--replay", seconds=100)
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS)
    assert count_in(said) == len(files)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_minute() -> None:
    """A minute of inputs for all targets: no other outcome than loaded or an error of ours."""
    said = fuzz("--seconds", "60", "--seed", str(SEED), seconds=200)
    print(said)
    assert count_in(said) > 2000


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_with_decisions_of_hypothesis(name: str) -> None:
    """The same mutations, decided by hypothesis, which would make a fault as small as it can: there is none."""

    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        attempt(TARGETS[name], input_of(TARGETS[name], Drawn(data)))

    check()


def test_inputs_are_the_same_always() -> None:
    """An input is made of the seed and its number alone; other numbers and seeds give others."""
    made = [numbered(SEED, number) for number in range(200)]
    assert [data for _, data in made] == [numbered(SEED, number)[1] for number in range(200)]
    assert len({data for _, data in made}) > 150
    assert {target.name for target, _ in made} == set(TARGETS)
    assert sum(numbered(SEED + 1, number)[1] == data for number, (_, data) in enumerate(made)) < 50


def hang() -> None:
    time.sleep(60)


def eat() -> None:
    held = [bytes(1 << 20) for _ in range(2000)]
    raise AssertionError(f"{len(held)} MiB were to be had")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def fail() -> None:
    raise FaultError("it was no error of ours")


PLANTED: dict[str, tuple[Callable[[], None], str]] = {
    "hang": (hang, "did not end within"),
    "memory": (eat, "MemoryError"),
    "crash": (crash, "SIGSEGV"),
    "another error": (fail, "no error of ours"),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", PLANTED)
def test_what_must_not_happen_is_seen(name: str) -> None:
    """An input that hangs, takes memory, kills the process or ends in a foreign error is named, and the run goes on."""
    plant, why = PLANTED[name]

    def trial(number: int) -> str:
        if number == 5:
            plant()
        return "fine"

    tally = run(trial, inputs=9, patience=1.0 if name == "hang" else 30.0)
    assert [fault.number for fault in tally.faults] == [5]
    assert why in tally.faults[0].why
    assert (tally.inputs, dict(tally.outcomes)) == (9, {"fine": 8})
