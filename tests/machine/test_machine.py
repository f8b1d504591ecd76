"""hypothesis drives saves, loads, deletes, prunes and adoptions against the model; and finds every planted fault.

A failure prints the rules that were chosen, shrunk, and the last requests. ``python -m tests.machine.proof`` plays
longer, with a seed that it prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.testing.faults import FAULTS, HEALTHY, NamedFault
from tests.machine import works
from tests.machine.beds import Bed, DictBed, LocalBed, MemoryBed, S3Bed
from tests.machine.model import ViolationError
from tests.machine.playing import play, quick
from tests.machine.tally import Tally
from tests.servers.endpoint import S3Endpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SEED = 20_261_130
STEPS = 40
BUDGET = 250
"""Runs, of at most ``STEPS`` steps each, that a healthy machine plays."""
SEARCH = 1500
"""Runs in which a planted fault must be found. It takes a few hundred steps, for the rarest some thousand in the mean;
and a seed is no promise, since what hypothesis draws depends on which modules are loaded."""

FOUND: dict[str, set[str]] = {
    "commit-by-put": {"I1"},
    "commit-before-manifest": {"I2"},
    "no-second-listing": {"I2"},
    "old-files-first": {"I3", "I5"},
    "shared-names": {"I3", "I5", "I2"},
    "no-clean-up": {"I4"},
    "ignores-if-absent": {"I1"},
    "delete-without-void": {"I5"},
    "no-read-back": {"I3", "I6"},
    "commit-errors-logged": {"I3", "I7", "I11"},
    "write-errors-logged": {"I2"},
    "no-sizes": {"I8"},
    "no-blocks": {"I8"},
    "outage-is-empty": {"I5", "I10"},
    "prune-without-fence": {"I11"},
    "prune-lists-late": {"I11"},
    "prune-ignores-ages": {"I5", "I11"},
    "prune-forgets-live": {"I11"},
    "takes-everything": {"I11"},
}
"""Each fault, and the invariants of which one must be seen broken."""

BEYOND = {"no-fsync": "tests/disks", "no-allow-list": "tests/test_pickles_attacks.py"}
"""Faults that cannot show in any order of requests, and where they are shown."""


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """The waits between tries of a commit take no time here."""
    with quick():
        yield


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line past pytest's capture."""

    def say(text: str) -> None:
        capture: Any = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{request.node.name}: {text}")

    return say


def played(make_bed: Callable[[], Bed], runs: int, fault: NamedFault = HEALTHY, *, seed: int = SEED) -> Tally:
    tally = Tally()
    play(make_bed, tally, runs=runs, steps=STEPS, seed=seed, fault=fault, shrink=fault is HEALTHY)
    return tally


def test_a_sample_in_memory(said: Callable[[str], None]) -> None:
    """Some hundred steps on a dict break no invariant."""
    tally = played(DictBed, 8)
    said(f"seed {SEED}: {tally}")
    assert tally.steps >= 300


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_steps_in_memory(said: Callable[[str], None]) -> None:
    """10,000 steps and more on a dict break no invariant, and every kind of member and of fault is among them."""
    tally = played(DictBed, BUDGET)
    said(f"seed {SEED}: {tally}")
    assert tally.steps >= 10_000
    for kind in ("save", "load", "delete", "prune", "adopt"):
        assert tally.ended[f"{kind}/ok"] >= 20, kind
    assert sum(count for how, count in tally.ended.items() if how.endswith("/killed")) >= 100
    assert all(tally.faults[mode] >= 20 for mode in ("lost", "later", "again", "refuse", "nowhere"))


@pytest.mark.slow
def test_fsspecs_own_memory(said: Callable[[str], None]) -> None:
    """So it is on ``memory://``, in the hundreds of steps."""
    tally = played(MemoryBed, 20)
    said(f"seed {SEED}: {tally}")
    assert tally.steps >= 700


@pytest.mark.slow
def test_a_local_disk(tmp_path: Path, said: Callable[[str], None]) -> None:
    """So it is on a local disk, with its uploads, links and temporary files."""
    tally = played(lambda: LocalBed(tmp_path), 15)
    said(f"seed {SEED}: {tally}")
    assert tally.steps >= 500


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3(ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str], said: Callable[[str], None]) -> None:
    """So it is on S3, by real conditional requests to a server that holds them."""
    name = bucket(ministack)
    tally = played(lambda: S3Bed(ministack, name), 5)
    said(f"seed {SEED}: {tally}")
    assert tally.steps >= 200


def test_the_table_names_every_fault() -> None:
    """Every fault of the test kit is either to be found here, or says where else it is."""
    assert FOUND.keys() | BEYOND.keys() == FAULTS.keys()
    assert not FOUND.keys() & BEYOND.keys()
    root = Path(__file__).parents[2]
    assert all((root / where).exists() for where in BEYOND.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_is_found(name: str, said: Callable[[str], None]) -> None:
    """With one protection switched off the machine sees the invariant broken that it holds up, within its budget."""
    tally = Tally()
    with pytest.raises(ViolationError) as caught:
        play(DictBed, tally, runs=SEARCH, steps=STEPS, seed=SEED, fault=FAULTS[name], shrink=False)
    said(f"{caught.value} ({tally.steps} steps)")
    assert caught.value.invariant in FOUND[name]


@pytest.mark.slow
def test_a_seed_plays_the_same_again() -> None:
    """The same seed gives the same runs: what one machine found another will find."""
    tallies = [played(DictBed, 10) for _ in range(2)]
    assert str(tallies[0]) == str(tallies[1])


def test_values_tell_their_author() -> None:
    """A mixture of two saves, and values that nobody filled, are seen for what they are."""
    assert works.author_of(works.state_of(3)) == 3
    mixed = {**works.state_of(3), "t": works.state_of(4)["t"]}
    assert works.author_of(mixed) is None
    assert works.author_of(works.template()) is None
