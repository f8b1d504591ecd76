"""torch's plan caching: later saves get plans of earlier ones, and must still write their own values and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, clear_plan_caches, load

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    clear_plan_caches()
    yield
    clear_plan_caches()


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {f"a-{rank}": torch.full((1000,), 10 * step + rank), f"n-{rank}": step, "shared": torch.arange(5) + step}


def template(world: int) -> dict[str, Any]:
    out: dict[str, Any] = {"shared": torch.full((5,), -7)}
    for rank in range(world):
        out |= {f"a-{rank}": torch.full((1000,), -7), f"n-{rank}": None}
    return out


def check(found: dict[str, Any], world: int, step: int) -> None:
    assert found["shared"].tolist() == [step + k for k in range(5)]
    for rank in range(world):
        assert found[f"a-{rank}"].unique().tolist() == [10 * step + rank]
        assert found[f"n-{rank}"] == step


def save_steps(rank: int, world: int, folders: list[str], grown: bool, new_writers: bool) -> list[list[str]]:
    """Saves once to each folder, with a cached plan from the second save on; the names after each save."""
    clear_plan_caches()
    alone = not dist.is_initialized()
    writer = FsspecStorageWriter(overwrite=True)
    seen = []
    for step, folder in enumerate(folders):
        if new_writers:
            writer = FsspecStorageWriter(overwrite=True)
        state = state_of(rank, step)
        if grown and step == 2 and rank == world - 1:
            state["more"] = torch.full((3,), step)  # this rank's plan changes, the others' stay cached
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, checkpoint_id=folder, planner=planner, no_dist=alone)
        if not alone:
            dist.barrier()
        seen.append(sorted(path.name for path in Path(folder).iterdir()))
        if not alone:
            dist.barrier()
    return seen


def run(ranks: RankPool, world: int, folders: list[str], *, grown: bool, new_writers: bool) -> list[list[str]]:
    if world == 1:
        return save_steps(0, 1, folders, grown, new_writers)
    seen: list[list[str]] = ranks.run(save_steps, world, folders, grown, new_writers)[0]
    return seen


@pytest.mark.parametrize("new_writers", [False, True], ids=["one-writer", "new-writers"])
@pytest.mark.parametrize("grown", [False, True], ids=["same-plan", "grown-plan"])
@pytest.mark.parametrize("world", [1, 4])
def test_three_paths_hold_three_steps(
    tmp_path: Path, ranks: RankPool, world: int, grown: bool, new_writers: bool
) -> None:
    """Three saves to three folders: each has its own values although the plans are cached."""
    folders = [str(tmp_path / f"step-{step}") for step in range(3)]
    run(ranks, world, folders, grown=grown, new_writers=new_writers)
    for step, folder in enumerate(folders):
        found = template(world) | ({"more": torch.zeros(3, dtype=torch.int64)} if grown and step == 2 else {})
        load(found, FsspecStorageReader(folder))
        check(found, world, step)


@pytest.mark.parametrize("new_writers", [False, True], ids=["one-writer", "new-writers"])
@pytest.mark.parametrize("grown", [False, True], ids=["same-plan", "grown-plan"])
@pytest.mark.parametrize("world", [1, 4])
def test_one_path_holds_the_last_step(
    tmp_path: Path, ranks: RankPool, world: int, grown: bool, new_writers: bool
) -> None:
    """Three saves to one folder with overwrite: the last values, and no shard name was ever used twice."""
    folder = str(tmp_path / "step")
    seen = run(ranks, world, [folder] * 3, grown=grown, new_writers=new_writers)
    found = template(world) | ({"more": torch.zeros(3, dtype=torch.int64)} if grown else {})
    load(found, FsspecStorageReader(folder))
    check(found, world, 2)
    shards = [name for names in seen for name in names if name.endswith(".distcp")]
    assert len(shards) == 3 * world
    assert len(set(shards)) == len(shards)
    place = Place(folder)
    assert place.commits() == [".commit", ".commit.2", ".commit.3"]
    assert [json.loads(place.get(name))["number"] for name in place.commits()] == [1, 2, 3]


def test_an_old_plan_never_brings_the_plain_names_back(tmp_path: Path) -> None:
    """A cached plan carries a grant of an earlier save: in a new, empty folder its names are those with a token."""
    folders = [str(tmp_path / f"step-{step}") for step in range(2)]
    first, second = save_steps(0, 1, folders, grown=False, new_writers=True)
    assert "__0_0.distcp" in first
    assert "__0_0.distcp" not in second
    assert sum(name.endswith(".distcp") for name in second) == 1
