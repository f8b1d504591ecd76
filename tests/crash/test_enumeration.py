"""Killed, cut off or answered twice at any call: old, new or plainly none; then a save and a prune leave nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.crash.places import GcsPlace, LocalPlace, S3Place
from tests.crash.points import Mode, Point
from tests.crash.scenarios import SCENARIOS
from tests.crash.table import Table, enumerate_calls
from tests.crash.trials import Bench, Trial, sample
from tests.e2e import ALONE

pytestmark = pytest.mark.filterwarnings(ALONE)

SHARES = {"local": 0.05, "s3 (ministack)": 0.015, "gcs (strict)": 0.02}
"""Which part of all trials CI runs; ``make proof`` runs all."""

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def commits(trials: Sequence[Trial]) -> list[Trial]:
    """Those that are cut where the commit object is made."""
    return [trial for trial in trials if trial.at.what.startswith("create .commit") and not trial.early]


def test_a_disk(local_place: LocalPlace, ranks: RankPool) -> None:
    """Of four scenarios on a local disk, one of all trials at each seam."""
    table = Table()
    some = [BY_NAME[name] for name in ("fresh save", "save that replaces", "delete", "prune")]
    enumerate_calls(table, Bench(local_place, ranks), lambda trials: sample(trials, 1), scenarios=some)
    assert table.total.trials == 8
    assert table.total.calls > 200
    assert not table.total.broken


def test_the_commit_of_a_save_to_s3(s3_place: S3Place, ranks: RankPool) -> None:
    """A save over a checkpoint on a real server loses the reply of its commit, or is killed before it."""
    modes: tuple[Mode, Mode] = ("lost", "before")
    cut = [Trial(BY_NAME["save that replaces"], "store", Point("create .commit.3", 1), mode) for mode in modes]
    lost, killed = Bench(s3_place, ranks).run(cut)
    assert (lost.broken, killed.broken) == ("", "")
    assert (lost.ended, lost.found) == ("returned", ["new"])
    assert (killed.ended, killed.found) == ("killed", ["old"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_store_and_scenario(
    local_place: LocalPlace,
    s3_place: S3Place,
    gcs_place: GcsPlace,
    crew: RankPool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At least 300 processes, over three stores and all scenarios: each leaves old, new or plainly none."""
    table = Table()
    for place in (local_place, s3_place, gcs_place):
        enumerate_calls(table, Bench(place, crew), _share(SHARES[place.name]))
    with capsys.disabled():
        print(table)
    assert not table.total.broken
    assert table.total.trials >= 300
    assert all(row.trials for row in table.rows)


def _share(share: float) -> Callable[[Sequence[Trial]], list[Trial]]:
    def pick(trials: Sequence[Trial]) -> list[Trial]:
        always = commits(trials)
        return always + [trial for trial in sample(trials, max(1, round(len(trials) * share))) if trial not in always]

    return pick
