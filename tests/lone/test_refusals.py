"""What is refused without collectives: parts of two saves, a missing part, anything that would replace a checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_storage import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NotCommittedError,
    SaveOptions,
)
from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.ranks import RankPool
from tests.disks import refusing, writer_with
from tests.e2e import ALONE, Place, assert_same, assert_sentence, like, raised_by, save, small_state
from tests.lone import commit_of, holds, raised, save_all, save_own, state_of

pytestmark = pytest.mark.filterwarnings(ALONE)


def bodies(place: Place) -> dict[str, bytes]:
    return {name: place.get(name) for name in place.files()}


def refused_load(rank: int, world: int, place: Place, kind: type[CheckpointError]) -> dict[int, CheckpointError]:
    """On a rank: the load must fail so, and the template must be as before. torch plans such a load collectively."""
    template = like(state_of(rank))
    errors = raised_by(lambda: dcp.load(template, storage_reader=place.reader()))
    assert_same(template, like(state_of(rank)))
    found = {who: error for who, error in errors.items() if isinstance(error, CheckpointError)}
    assert len(found) == len(errors)
    assert {type(error) for error in errors.values()} == {kind}
    for error in found.values():
        assert_sentence(str(error))
    return found


def move_rank(source: Path, target: Path, rank: int) -> None:
    """Puts a rank's files of one folder in the place of those of another."""
    for old in target.glob(f"__{rank}[._]*"):
        old.unlink()
    for new in source.glob(f"__{rank}[._]*"):
        shutil.copy(new, target)


def test_parts_of_two_saves_are_not_loaded(tmp_path: Path, ranks: RankPool) -> None:
    """Where one rank's files are those of another save every rank refuses, names both labels, and fills nothing."""
    places = [Place(str(tmp_path / label)) for label in ("first", "second")]
    for number, (place, label) in enumerate(zip(places, ("first", "second"), strict=True)):
        ranks.run(save_all, 3, place, number, label)
    move_rank(tmp_path / "second", tmp_path / "first", 2)
    for errors in ranks.run(refused_load, 3, places[0], CorruptCheckpointError):
        assert sorted(errors) == [0, 1, 2]
        for error in errors.values():
            assert "first" in str(error)
            assert "second" in str(error)


def without_commit(place: Place) -> None:
    place.remove("__1.commit")


def torn_commit(place: Place) -> None:
    place.set("__1.commit", place.get("__1.commit")[:40])


@pytest.mark.parametrize("damage", [without_commit, torn_commit])
def test_a_missing_rank_is_named(tmp_path: Path, ranks: RankPool, damage: Callable[[Place], None]) -> None:
    """Where rank 1 did not commit, or its commit is torn, all ranks refuse as not committed and say which rank."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 3, place)
    damage(place)
    for errors in ranks.run(refused_load, 3, place, NotCommittedError):
        assert sorted(errors) == [0, 1, 2]
        assert all("rank 1 has not committed" in str(error) for error in errors.values())


def test_more_ranks_than_saved(tmp_path: Path, ranks: RankPool) -> None:
    """A fourth rank has nothing to load: all are told that it is that rank, and on how many ranks it can be loaded."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 3, place)
    for errors in ranks.run(refused_load, 4, place, IncompatibleCheckpointError):
        assert list(errors) == [3]
        assert "Load it on 3 ranks" in str(errors[3])


def test_a_short_part_is_found(tmp_path: Path, ranks: RankPool) -> None:
    """A shard that has lost its end is found before anything is filled on any rank, and named with both sizes."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 2, place)
    (name,) = [shard for shard in place.shards() if shard.startswith("__1_")]
    size = place.files()[name]
    place.set(name, place.get(name)[:-5])
    for errors in ranks.run(refused_load, 2, place, CorruptCheckpointError):
        (error,) = errors.values()
        assert (error.file, error.wanted, error.found) == (name, size, size - 5)


def load_altered(rank: int, world: int, place: Place) -> CheckpointError | None:
    if rank == 1:
        template = like(state_of(rank))
        return raised(CorruptCheckpointError, lambda: dcp.load(template, storage_reader=place.reader()))
    holds(rank, world, place)
    return None


def test_an_altered_part_is_found(tmp_path: Path, ranks: RankPool) -> None:
    """A shard with another byte in it is refused by the rank whose it is, with the file; the other rank loads."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 2, place)
    (name,) = [shard for shard in place.shards() if shard.startswith("__1_")]
    data = bytearray(place.get(name))
    data[len(data) // 2] ^= 1
    place.set(name, bytes(data))
    _, error = ranks.run(load_altered, 2, place)
    assert error.file == name


def refused_save(rank: int, world: int, place: Place, label: str | None) -> CheckpointError:
    """On a rank: the save must be refused before it begins to write, on a disk that would take no shard."""
    calls = Syscalls(open=refusing(errno.EROFS, os.open, ".distcp"))
    writer = writer_with(place.url, calls, options=SaveOptions(label=label))
    state = state_of(rank, 5)
    return raised(CheckpointExistsError, lambda: dcp.save(state, storage_writer=writer, use_collectives=False))


def a_lone_save(place: Place, ranks: RankPool) -> None:
    ranks.run(save_all, 3, place, 0, "same")


def a_whole_save(place: Place, ranks: RankPool) -> None:
    save(small_state(), place.writer())


def a_stock_save(place: Place, ranks: RankPool) -> None:
    dcp.save(small_state(), storage_writer=FileSystemWriter(place.url), no_dist=True)


@pytest.mark.parametrize("before", [a_lone_save, a_whole_save, a_stock_save])
@pytest.mark.parametrize("label", ["same", None])
def test_nothing_is_overwritten_by_lone_ranks(
    tmp_path: Path, ranks: RankPool, before: Callable[[Place, RankPool], None], label: str | None
) -> None:
    """A checkpoint of any kind refuses lone ranks, on each of them, and stays byte for byte, under any label."""
    place = Place(str(tmp_path / "one"))
    before(place, ranks)
    held = bodies(place)
    for error in ranks.run(refused_save, 3, place, label):
        assert error.path == place.url
    assert bodies(place) == held


def test_lone_ranks_are_not_overwritten_by_a_whole_save(tmp_path: Path, ranks: RankPool) -> None:
    """A save with collectives onto a folder of lone ranks is refused, also with overwrite=True, and all stays."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 2, place)
    held = bodies(place)
    for overwrite in (False, True):
        error = raised_by(lambda o=overwrite: save(small_state(), place.writer(overwrite=o)))[0]  # type: ignore[misc]
        assert type(error) is CheckpointExistsError
        assert "without collectives" in str(error)
    assert bodies(place) == held
    ranks.run(holds, 2, place)


def save_late_under_another_label(rank: int, world: int, place: Place) -> None:
    if rank < 2:
        save_own(place, rank, 0, "ours")
        return
    end = time.monotonic() + 30
    while not {"__0.commit", "__1.commit"} <= set(place.files()):
        assert time.monotonic() < end
        time.sleep(0.02)
    raised(CheckpointExistsError, lambda: save_own(place, rank, 0, "another's"))


def test_a_rank_of_another_label_does_not_join(tmp_path: Path, ranks: RankPool) -> None:
    """A rank that saves under another label than those that have committed is refused, and leaves nothing there."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_late_under_another_label, 3, place)
    assert not [name for name in place.files() if name.startswith("__2")]
    assert {commit_of(place, rank)["label"] for rank in (0, 1)} == {"ours"}


class Unsavable:
    """An object that does not pickle."""

    def __reduce__(self) -> Any:
        raise ValueError("this value cannot be saved")


def save_with_one_that_fails(rank: int, world: int, place: Place) -> CheckpointError | None:
    if rank != 1:
        save_own(place, rank)
        return None
    state = {**state_of(rank), "bad": Unsavable()}
    writer = place.writer(options=SaveOptions())
    return raised(CheckpointError, lambda: dcp.save(state, storage_writer=writer, use_collectives=False))


def test_the_rank_that_fails_raises(tmp_path: Path, ranks: RankPool) -> None:
    """A rank that cannot save raises with the key and leaves nothing; the checkpoint lacks it and is refused."""
    place = Place(str(tmp_path / "one"))
    error = ranks.run(save_with_one_that_fails, 3, place)[1]
    assert error.key == "bad"
    assert "this value cannot be saved" in str(error)
    assert not [name for name in place.files() if name.startswith("__1")]
    for errors in ranks.run(refused_load, 3, place, NotCommittedError):
        assert all("rank 1 has not committed" in str(refused) for refused in errors.values())


def whole(place: Place) -> None:
    """Leaves it as it is."""


@pytest.mark.parametrize("damage", [whole, without_commit])
def test_delete_and_prune_leave_it_alone(tmp_path: Path, ranks: RankPool, damage: Callable[[Place], None]) -> None:
    """Neither a delete nor a prune without any grace takes a file of lone ranks, whole or with a rank missing."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 2, place)
    damage(place)
    held = bodies(place)
    store = LocalStore(place.url)
    with pytest.raises(CheckpointNotFoundError):
        delete_folder(store)
    sweep = prune_folder(store, grace=0)
    assert (sweep.doomed, sweep.old_commits, sweep.fenced) == ([], [], None)
    assert "without collectives" in sweep.why
    assert bodies(place) == held


def strangers(rank: int, world: int, place: Place) -> list[str]:
    """A load on a rank of which the template has a key that no rank saved."""
    template = {**like(state_of(rank)), "nobody's": torch.zeros(3)}
    return [str(error) for error in raised_by(lambda: dcp.load(template, storage_reader=place.reader())).values()]


def test_a_key_that_is_not_there(tmp_path: Path, ranks: RankPool) -> None:
    """A key that the rank's own part lacks is refused by torch's planner with its name, as with collectives."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_all, 2, place)
    for said in ranks.run(strangers, 2, place):
        assert len(said) == 2
        assert all("nobody's" in text for text in said)
