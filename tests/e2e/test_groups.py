"""Whole jobs, sub-groups, and single ranks of a job that save and load for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_storage import CheckpointExistsError, CorruptCheckpointError, FsspecStorageReader, FsspecStorageWriter
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, load, raised_by

pytestmark = pytest.mark.filterwarnings(ALONE)


def own(rank: int) -> dict[str, Any]:
    return {f"tensor-{rank}": torch.arange(50) + 1000 * rank, "everybody": torch.arange(7), f"object-{rank}": [rank]}


def empty(rank: int) -> dict[str, Any]:
    return {
        f"tensor-{rank}": torch.full((50,), -7),
        "everybody": torch.full((7,), -7),
        f"object-{rank}": None,
    }


def right(found: dict[str, Any], rank: int) -> bool:
    wanted = own(rank)
    return all(
        found[key].equal(value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in wanted.items()
    )


def save_and_load_all(rank: int, world: int, folder: str) -> tuple[bool, Any, Any]:
    writer, reader = FsspecStorageWriter(folder), FsspecStorageReader(folder)
    dcp.save(own(rank), storage_writer=writer)
    found = empty(rank)
    dcp.load(found, storage_reader=reader)
    return right(found, rank), writer.report, reader.report


def test_every_rank_saves_and_loads_its_own(tmp_path: Path, ranks: RankPool) -> None:
    """On the default group each rank gets its own values, no warning, a report; only the coordinator names a commit."""
    outcomes = ranks.run(save_and_load_all, 4, str(tmp_path / "one"), strict_warnings=True)
    assert [good for good, _, _ in outcomes] == [True] * 4
    assert [saved.commit for _, saved, _ in outcomes] == [1, None, None, None]
    assert [loaded.commit for _, _, loaded in outcomes] == [1] * 4
    place = Place(str(tmp_path / "one"))
    assert place.shards() == [f"__{rank}_0.distcp" for rank in range(4)]
    written = sum(saved.bytes_written for _, saved, _ in outcomes)
    assert written == sum(place.files()[name] for name in place.shards())
    assert {record["rank"] for record in place.manifest()["files"]} == {0, 1, 2, 3}


def save_on_a_subgroup(rank: int, world: int, folder: str) -> Any:
    group = dist.new_group([1, 3], backend="gloo")
    outcome = None
    if rank in {1, 3}:
        writer = FsspecStorageWriter(folder)
        dcp.save(own(rank), storage_writer=writer, process_group=group)
        found = empty(rank)
        dcp.load(found, storage_reader=FsspecStorageReader(folder), process_group=group)
        outcome = right(found, rank), writer.report.commit if writer.report else "no report"
    dist.barrier()
    return outcome


def test_a_subgroup_saves_while_the_others_do_nothing(tmp_path: Path, ranks: RankPool) -> None:
    """Ranks 1 and 3 of 4 save and load by themselves; their first rank commits, and global rank 0 is not needed."""
    outcomes = ranks.run(save_on_a_subgroup, 4, str(tmp_path / "one"))
    assert outcomes == [None, (True, 1), None, (True, None)]
    found = {**empty(1), **empty(3)}
    load(found, FsspecStorageReader(tmp_path / "one"))
    assert right(found, 1)
    assert right(found, 3)
    assert len(Place(str(tmp_path / "one")).shards()) == 2


def refuse_on_a_subgroup(rank: int, world: int, folder: str) -> Any:
    group = dist.new_group([1, 3], backend="gloo")
    if rank not in {1, 3}:
        return None
    return raised_by(lambda: dcp.save(own(rank), storage_writer=FsspecStorageWriter(folder), process_group=group))


def test_a_subgroup_is_refused_together(tmp_path: Path, ranks: RankPool) -> None:
    """A refusal reaches both ranks of the sub-group as the coordinator's typed error."""
    ranks.run(save_on_a_subgroup, 4, str(tmp_path / "one"))
    outcomes = ranks.run(refuse_on_a_subgroup, 4, str(tmp_path / "one"))
    for rank in (1, 3):
        assert [type(error) for error in outcomes[rank].values()] == [CheckpointExistsError]


def save_alone_in_a_job(rank: int, world: int, folder: str) -> bool:
    place = f"{folder}/rank-{rank}"
    dcp.save(own(rank), storage_writer=FsspecStorageWriter(place), no_dist=True)
    found = empty(rank)
    dcp.load(found, storage_reader=FsspecStorageReader(place), no_dist=True)
    return right(found, rank)


def test_ranks_of_a_job_save_without_each_other(tmp_path: Path, ranks: RankPool) -> None:
    """With ``no_dist=True`` inside a job every rank has a checkpoint of its own, committed and loadable anywhere."""
    assert ranks.run(save_alone_in_a_job, 3, str(tmp_path)) == [True] * 3
    for rank in range(3):
        assert Place(str(tmp_path / f"rank-{rank}")).commits() == [".commit"]
        found = empty(rank)
        load(found, FsspecStorageReader(tmp_path / f"rank-{rank}"))
        assert right(found, rank)


def save_to_folders_not_shared(rank: int, world: int, folder: str) -> Any:
    return raised_by(lambda: dcp.save(own(rank), storage_writer=FsspecStorageWriter(f"{folder}/host-{rank}")))


def test_ranks_that_do_not_share_the_folder_are_found_out(tmp_path: Path, ranks: RankPool) -> None:
    """Where each rank writes to a disk of its own the save fails on all ranks, names the file, and commits nothing."""
    for outcome in ranks.run(save_to_folders_not_shared, 2, str(tmp_path)):
        (error,) = outcome.values()
        assert type(error) is CorruptCheckpointError
        assert error.file == "__1_0.distcp"
        assert error.found is None
    assert not list(tmp_path.rglob(".commit*"))
    assert not list(tmp_path.rglob(".manifest*"))
