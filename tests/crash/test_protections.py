"""Each protection is there for something: without it the enumeration finds what is broken."""

from __future__ import annotations

import dataclasses

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.crash.places import LocalPlace
from tests.crash.points import Mode, Point
from tests.crash.scenarios import SCENARIOS
from tests.crash.trials import Bench, Trial
from tests.e2e import ALONE

pytestmark = pytest.mark.filterwarnings(ALONE)

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

CASES: dict[str, tuple[str, str, Mode]] = {
    "old-files-first": ("save that replaces", "create .commit.3", "before"),
    "commit-before-manifest": ("fresh save", "put .manifest", "before"),
    "commit-by-put": ("fresh save", "put .commit", "late"),
    "shared-names": ("fresh save", "put .manifest", "late"),
    "no-read-back": ("fresh save", "create .commit", "lost"),
    "ignores-if-absent": ("fresh save", "create .commit", "late"),
    "no-clean-up": ("fresh save", "put .manifest", "refused"),
    "delete-without-void": ("delete", "delete .commit.2", "after"),
    "prune-forgets-live": ("prune", "open_uploads", "lost"),
    "takes-everything": ("prune", "open_uploads", "lost"),
}
"""Protection → the scenario, the call and the way in which a cut finds that it is missing."""


@pytest.mark.parametrize("fault", CASES)
def test_without_a_protection_something_breaks(fault: str, local_place: LocalPlace, ranks: RankPool) -> None:
    """One cut of a process that lacks a protection leaves a broken folder, and of one that has it a right one."""
    scenario, what, mode = CASES[fault]
    missing = Trial(BY_NAME[scenario], "store", Point(what, 1), mode, fault=fault)
    (found,) = Bench(local_place, ranks).run([missing])
    assert found.broken
    assert "was never reached" not in found.broken


def test_a_fence_keeps_a_late_commit_out(local_place: LocalPlace, ranks: RankPool) -> None:
    """A save is killed, a prune sweeps its files, and then its commit arrives: the prune's fence has taken the number;
    for a store that lets a second create replace the first, the commit comes alive without its files.
    """
    trial = Trial(BY_NAME["fresh save"], "store", Point("create .commit", 1), "late", then="prune")
    whole, broken = Bench(local_place, ranks).run([trial, dataclasses.replace(trial, fault="ignores-if-absent")])
    assert not whole.broken
    assert "load raised" in broken.broken
