"""Managers in several processes: jobs of several ranks, two managers on one run, and tools that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import CheckpointManager, delete, prune
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.e2e import place_of
from tests.runs.jobs import agree, preempt, race, save_together, state, swept
from tests.servers.endpoint import S3Endpoint

Place = tuple[str, dict[str, Any]]


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path, bucket: Callable[[S3Endpoint], str]) -> Place:
    """The root of a run, on disk and on S3."""
    if request.param == "local":
        return str(tmp_path / "run"), {}
    server = request.getfixturevalue("moto")
    return f"s3://{bucket(server)}/run", server.storage_options


def fill(place: Place, *steps: int) -> CheckpointManager:
    manager = CheckpointManager(place[0], storage_options=place[1])
    for step in steps:
        manager.save(step, state(step))
    return manager


def test_all_ranks_see_the_same(ranks: RankPool, tmp_path: Path) -> None:
    """Three ranks save, save in the background, load, pin, prune and fail together; each sees what the others see."""
    seen = ranks.run(save_together, 3, str(tmp_path / "run"), timeout=90)
    assert seen[0] == {
        "none": (None, []),
        "steps": (3, [2, 3]),
        "loaded": (1, [3.0] * 8, 3, 3),
        "pins": [2],
        "pruned": [2, 3],
        "due": False,
        "refused": "exists",
        "late": "exists",
        "after": 3,
    }
    assert seen == [seen[0]] * 3


@pytest.mark.parametrize(
    ("whom", "late", "step"), [pytest.param(0, False, 3, marks=pytest.mark.slow), (2, False, 3), (1, True, 4)]
)
def test_sigterm_to_one_rank_saves_once_on_all(
    ranks: RankPool, tmp_path: Path, whom: int, late: bool, step: int
) -> None:
    """Whichever of three ranks gets SIGTERM, all save the same step, once, together, and all know that they end."""
    seen = ranks.run(preempt, 3, str(tmp_path / "run"), whom, late, timeout=90)
    assert seen == [([step], step, step)] * 3


def test_the_coordinator_looks_and_the_others_are_told(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks that see other folders than the coordinator all act on what it sees, also on its errors."""
    fill((str(tmp_path / "a"), {}), 1, 2)
    fill((str(tmp_path / "b"), {}), 7)
    assert ranks.run(agree, 2, str(tmp_path / "a"), str(tmp_path / "b")) == [[2, [1, 2], "not-found"]] * 2


def test_two_managers_race_on_one_run(ranks: RankPool, place: Place) -> None:
    """Two processes save the same steps, keep two each and prune: what is left is whole, by one that was told so."""
    root, options = place
    last = 2 if options else 6
    won = ranks.run(race, 2, root, options, last, init=False, timeout=90)
    assert last in won[0] + won[1]
    manager = CheckpointManager(root, storage_options=options)
    assert manager.latest() == last
    steps = manager.steps()
    for step in steps:
        found: dict[str, Any] = {"weight": torch.zeros(64), "step": 0, "who": -1}
        manager.load(found, step)
        assert (found["weight"].tolist(), found["step"]) == ([float(step)] * 64, step)
        assert step in won[found["who"]]


@pytest.mark.parametrize("what", ["prune", "delete"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_killed_tool_is_finished_by_the_next_prune(ranks: RankPool, tmp_path: Path, what: str, nth: int) -> None:
    """Killed by SIGKILL between its requests that remove something, a prune or a delete is finished by the next one."""
    place: Place = (str(tmp_path / "run"), {})
    fill(place, 1, 2)
    for path in (tmp_path / "run" / "step-00000001").iterdir():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    (failure,) = ranks.run(swept, 1, what, *place, nth, init=False, allow_failures=True)
    assert isinstance(failure, RankFailure)
    assert failure.signal == signal.SIGKILL
    manager = CheckpointManager(place[0], keep_latest=1)
    assert manager.latest() == 2
    report = manager.prune(apply=True)
    assert (report.ok, manager.steps()) == (True, [2])
    left = {path.name for path in (tmp_path / "run" / "step-00000001").iterdir()}
    assert {name for name in left if not name.startswith(".commit")} == set()


def test_the_tools_work_on_s3(moto: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
    """On S3 a run is listed, pruned and deleted from as on a disk, and the bucket's own folder may be the run."""
    name = bucket(moto)
    options = moto.storage_options
    manager = fill((f"s3://{name}", options), 1, 2, 3)
    manager.pin(1)
    report = prune(f"s3://{name}", keep_latest=1, apply=True, storage_options=options)
    assert (report.ok, report.deleted, manager.steps()) == (True, [2], [1, 3])
    delete(manager.path(3), storage_options=options)
    assert manager.steps() == [1]
    keys = [item["Key"] for item in moto.client.list_objects_v2(Bucket=name)["Contents"]]
    assert sorted(key for key in keys if not key.startswith("step-00000001/")) == [
        "step-00000002/.commit",
        "step-00000002/.commit.2",
        "step-00000003/.commit",
        "step-00000003/.commit.2",
    ]


def test_a_run_on_gcs(request: pytest.FixtureRequest) -> None:
    """On GCS a run is saved, kept, loaded, pinned, pruned and deleted from as on a disk; no upload stays open."""
    place = place_of(request, "gcs")
    with CheckpointManager(place.url, storage_options=place.options, keep_latest=2) as manager:
        assert manager.latest() is None
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.async_save(4, state(4))
    assert (manager.latest(), manager.steps()) == (4, [3, 4])
    found: dict[str, Any] = {"weight": torch.zeros(64), "step": 0}
    manager.load(found)
    assert (found["weight"].tolist(), found["step"], manager.loaded) == ([4.0] * 64, 4, 4)
    manager.pin(3)
    manager.save(5, state(5))
    manager.save(6, state(6))
    assert (manager.pins(), manager.steps()) == ([3], [3, 5, 6])
    assert (manager.prune(apply=True).ok, manager.steps()) == (True, [3, 5, 6])
    delete(manager.path(6), storage_options=place.options)
    assert manager.steps() == [3, 5]
    shards = {name.partition("/")[0] for name in place.files() if name.endswith(".distcp")}
    assert shards == {"step-00000003", "step-00000005"}
    assert place.uploads() == []
