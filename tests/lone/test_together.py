"""Saves without collectives that go well: every rank gets its own part back, and what is on the store says how."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import dcp_storage
from dcp_storage import CheckpointError, FsspecStorageReader, FsspecStorageWriter, SaveOptions
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, like, load, place_of, save, small_state
from tests.lone import commit_of, holds, save_all, state_of

pytestmark = pytest.mark.filterwarnings(ALONE)

TOKEN = r"([a-z][a-z0-9]{15})"


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_every_rank_gets_its_own_part(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """Three ranks hold other values under the same keys; each loads its own, and not those of another rank."""
    place = place_of(request, kind)
    known = Place(place.url, place.options)  # without the server's client, which does not pickle
    ranks.run(save_all, 3, known, 1)
    ranks.run(holds, 3, known, 1)


def test_the_files_of_each_rank(tmp_path: Path, ranks: RankPool) -> None:
    """Each rank leaves its commit, manifest, view and shard, by names of its own with tokens, and nothing else."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 3, place)
    names = sorted(place.files())
    assert len(names) == 12
    for rank in range(3):
        assert f"__{rank}.commit" in names
        assert f"__{rank}.metadata" in names
        for pattern in (rf"__{rank}\.manifest\.{TOKEN}", rf"__{rank}_0\.{TOKEN}\.distcp"):
            assert len([name for name in names if re.fullmatch(pattern, name)]) == 1, pattern


def test_the_commit_of_each_rank(tmp_path: Path, ranks: RankPool) -> None:
    """A rank's commit names its rank, the label, how many ranks there are, and its manifest by size and CRC."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 3, place, 0, "job-7 step 1000")
    for rank in range(3):
        commit = commit_of(place, rank)
        body = place.get(commit["manifest"]["name"])
        assert commit["manifest"] == {
            "name": f"__{rank}.manifest.{commit['author']}",
            "size": len(body),
            "crc32": zlib.crc32(body),
        }
        wanted = {
            "format": 1,
            "state": "committed",
            "number": 1,
            "rank": rank,
            "label": "job-7 step 1000",
            "world_size": 3,
            "torch": str(torch.__version__),
            "single_writer": False,
            "restates": None,
        }
        assert {name: commit.get(name) for name in wanted} == wanted
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", commit["time"])
        assert commit["package"] == dcp_storage.version.VERSION
    assert len({commit_of(place, rank)["author"] for rank in range(3)}) == 3


def save_two(rank: int, world: int, first: str, second: str) -> None:
    """Two saves of one writer, other values each time."""
    writer = FsspecStorageWriter()
    for number, folder in enumerate((first, second)):
        dcp.save(state_of(rank, number), checkpoint_id=folder, storage_writer=writer, use_collectives=False)


def test_two_saves_by_one_writer(tmp_path: Path, ranks: RankPool) -> None:
    """Without a label given the ranks agree on one for each save by the job's store, and each folder loads its own."""
    places = [Place(str(tmp_path / name)) for name in ("one", "two")]
    ranks.run(save_two, 3, *(place.url for place in places))
    labels = [{commit_of(place, rank)["label"] for rank in range(3)} for place in places]
    assert [len(found) for found in labels] == [1, 1]
    assert labels[0] != labels[1]
    assert all(label for found in labels for label in found)
    for number, place in enumerate(places):
        ranks.run(holds, 3, place, number)


def load_by_stock(rank: int, world: int, folder: str) -> None:
    found = like(state_of(rank))
    dcp.load(found, storage_reader=FileSystemReader(folder))
    assert_same(found, state_of(rank))


def test_stock_torch_loads_each_part(tmp_path: Path, ranks: RankPool) -> None:
    """The FileSystemReader of torch finds on each rank what that rank saved."""
    folder = str(tmp_path / "one")
    ranks.run(save_all, 3, Place(folder))
    ranks.run(load_by_stock, 3, folder)


def save_in_background(rank: int, world: int, folder: str) -> None:
    state = state_of(rank, 2)
    future = dcp.async_save(state, storage_writer=FsspecStorageWriter(folder), use_collectives=False)
    state["weight"].fill_(-1)
    future.result(60)  # type: ignore[union-attr]


def test_asynchronous_saves(tmp_path: Path, ranks: RankPool) -> None:
    """``async_save`` without collectives saves the values of the call, under one label."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_in_background, 3, place.url)
    assert len({commit_of(place, rank)["label"] for rank in range(3)}) == 1
    ranks.run(holds, 3, place, 2)


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_one_process_alone(request: pytest.FixtureRequest, kind: str) -> None:
    """Without any process group one rank saves, is rank 0 of 1, and loads again; the label may be given or not."""
    for label in (None, "mine"):
        place = place_of(request, kind).child(label or "none")
        writer = place.writer(options=SaveOptions(label=label))
        save(small_state(3), writer, use_collectives=False)
        commit = commit_of(place, 0)
        assert (commit["rank"], commit["world_size"]) == (0, 1)
        assert commit["label"] == (label or commit["author"])
        found = like(small_state())
        load(found, place.reader())
        assert_same(found, small_state(3))


def test_the_report(tmp_path: Path) -> None:
    """A save and a load leave reports with the bytes that moved, and no commit number: there is none of the whole."""
    writer, reader = FsspecStorageWriter(tmp_path), FsspecStorageReader(tmp_path)
    state = {"a": torch.ones(1000)}
    save(state, writer, use_collectives=False)
    load(like(state), reader)
    saved, loaded = writer.report, reader.report
    assert saved is not None
    assert loaded is not None
    assert (saved.commit, loaded.commit) == (None, None)
    (shard,) = Place(str(tmp_path)).shards()
    assert saved.bytes_written == Place(str(tmp_path)).files()[shard]
    assert loaded.bytes_needed == 4000
    assert saved.warnings == []


def save_apart(rank: int, world: int, folder: str) -> None:
    """Every rank for itself: a folder of its own, no word to the others; rank 0 does not save at all."""
    if rank == 0:
        return
    place = Place(f"{folder}/{rank}")
    save(state_of(rank), place.writer(options=SaveOptions(lone_ranks=1)), use_collectives=False)
    found = like(state_of(rank))
    load(found, place.reader())
    assert_same(found, state_of(rank))


def test_ranks_of_a_job_by_themselves(tmp_path: Path, ranks: RankPool) -> None:
    """With ``no_dist=True`` and ``lone_ranks=1`` a rank of a job waits for nobody, and its part loads anywhere."""
    ranks.run(save_apart, 3, str(tmp_path), timeout=60)
    for rank in (1, 2):
        place = Place(str(tmp_path / str(rank)))
        assert commit_of(place, 0)["world_size"] == 1
        found = like(state_of(rank))
        load(found, place.reader())
        assert_same(found, state_of(rank))


def save_without_saying(rank: int, world: int, folder: str) -> str:
    if rank == 0:
        return "label"
    with pytest.raises(CheckpointError, match="lone_ranks") as caught:
        save(state_of(rank), Place(f"{folder}/{rank}").writer(), use_collectives=False)
    return caught.value.kind


def test_a_rank_of_a_job_that_does_not_say_it_is_alone(tmp_path: Path, ranks: RankPool) -> None:
    """Without ``lone_ranks`` such a rank is told what to pass at once, instead of waiting for a label."""
    assert ranks.run(save_without_saying, 3, str(tmp_path), timeout=60) == ["label"] * 3
