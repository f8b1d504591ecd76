"""One rank of a save is killed: the others raise, and nothing is committed that is not whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.crash.places import GcsPlace, LocalPlace, S3Place
from tests.crash.points import Mode, Point
from tests.crash.rank_trials import RankBench, RankResult, RankTrial
from tests.e2e import ALONE

pytestmark = pytest.mark.filterwarnings(ALONE)


def run(bench: RankBench, trials: Sequence[RankTrial]) -> list[RankResult]:
    results = list(bench.run(trials))
    assert not [f"{result.trial}: {result.broken}" for result in results if result.broken]
    assert len(results) == len(trials)
    return results


def test_a_rank_dies_as_its_file_is_written(local_place: LocalPlace, ranks: RankPool) -> None:
    """Rank 1 of two dies while it completes a file: rank 0 raises and the old checkpoint stands."""
    bench = RankBench(local_place, ranks, 2)
    modes: tuple[Mode, Mode] = ("before", "after")
    at = Point("complete __1_0.*.distcp", 1)
    before, after = run(bench, [RankTrial(1, at, mode, replaces=True) for mode in modes])
    assert (before.found, after.found) == ("old", "old")
    assert "returned" not in {*before.others.values(), *after.others.values()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_either_of_two_ranks_dies_anywhere(
    local_place: LocalPlace, crew: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a disk, either rank at each second cut of its calls, with and without a checkpoint before: never a mixture."""
    bench = RankBench(local_place, crew, 2)
    trials = bench.trials()
    results = run(bench, [trial for number, trial in enumerate(trials) if (number + number // 2) % 2])
    _tell(capsys, "local", results)
    assert {result.trial.rank for result in results} == {0, 1}
    assert {result.found for result in results} == {"old", "new", "uncommitted"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_dies_over_an_object_store(
    s3_place: S3Place, gcs_place: GcsPlace, crew: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """On S3 and GCS, a few of the calls of two ranks."""
    for place in (s3_place, gcs_place):
        bench = RankBench(place, crew, 2)
        _tell(capsys, place.name, run(bench, bench.trials()[5::12]))


def _tell(capsys: pytest.CaptureFixture[str], store: str, results: Sequence[RankResult]) -> None:
    found = Counter(result.found for result in results)
    with capsys.disabled():
        print(f"\n{store}: {len(results)} saves of two ranks, one of which was killed: {dict(found)}")
