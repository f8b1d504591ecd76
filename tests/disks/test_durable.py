"""In which order a whole save reaches the disk, and folders that the ranks of a save do not share."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import CorruptCheckpointError, FsspecStorageWriter, SaveOptions
from dcp_storage.testing.ranks import RankPool
from tests.disks import Call, Disk, Faults, Recorder, opened_with, writer_with
from tests.e2e import ALONE, Place, assert_same, assert_sentence, like, load, raised_by, save, small_state
from tests.stores.local_kit import failing

pytestmark = pytest.mark.filterwarnings(ALONE)

WAYS: dict[str, Faults] = {
    "link": {},
    "rename_new": {"link": failing(errno.EPERM)},
    "made": {"link": failing(errno.EPERM), "rename_new": failing(errno.ENOSYS)},
}
"""The call that gives the commit its name → the faults that lead there; "made" is an open with O_EXCL."""


def recorded(rank: int, world: int, folder: str, way: str, overwrite: bool) -> list[Call]:
    """Saves in several files and parts on every rank; returns what the disk was asked."""
    recorder = Recorder(WAYS[way])
    options = SaveOptions(shard_size=100_000, part_size=1 << 16)
    state = {f"{name}-{rank}": torch.rand(40_000) for name in "abc"}
    dcp.save(state, storage_writer=writer_with(folder, recorder.syscalls(), overwrite=overwrite, options=options))
    return recorder.calls


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_all_is_on_the_disk_before_the_commit(tmp_path: Path, ranks: RankPool, way: str, overwrite: bool) -> None:
    """When the commit gets its name, all ranks' bytes and names, the manifest and every new folder are on the disk;
    when the save returns, so is the commit.
    """
    folder = tmp_path / "run" / "deep" / "step-1"
    if overwrite:
        save(small_state(), FsspecStorageWriter(folder))
    found: list[list[Call]] = ranks.run(recorded, 3, str(folder), way, overwrite)
    calls = [call for own in found for call in own]
    commit = str(folder / (".commit.2" if overwrite else ".commit"))
    (placed,) = [call for call in calls if call.name == way and call.paths[-1] == commit]
    before = Disk().replay(call for call in calls if call.ended <= placed.begun)
    manifest = Place(str(folder)).manifest()
    named = [record["name"] for record in manifest["files"]]
    assert len(named) == 9
    (listed,) = [name for name in Place(str(folder)).files() if name.startswith(".manifest")]
    for name in [*named, listed]:
        assert before.holds(str(folder / name)), name
    if not overwrite:
        for new in (tmp_path / "run", tmp_path / "run" / "deep", folder):
            assert before.holds(str(new)), new
    if way != "made":
        assert placed.paths[0] in before.bytes
    after = Disk().replay(calls)
    assert after.holds(commit)


def test_what_is_replaced_goes_only_after_the_commit(tmp_path: Path, ranks: RankPool) -> None:
    """Files of the old checkpoint are removed only once the new commit and its name are on the disk."""
    folder = tmp_path / "one"
    save(small_state(), FsspecStorageWriter(folder))
    old = {str(folder / name) for name in Place(str(folder)).files() if name.endswith(".distcp") or name == ".manifest"}
    assert len(old) == 2
    found: list[list[Call]] = ranks.run(recorded, 2, str(folder), "link", True)
    calls = [call for own in found for call in own]
    gone = [call for call in calls if call.name == "unlink" and call.paths[0] in old]
    assert {call.paths[0] for call in gone} == old
    first = min(call.begun for call in gone)
    assert Disk().replay(call for call in calls if call.ended <= first).holds(str(folder / ".commit.2"))


def save_apart(rank: int, world: int, folder: str, apart: int, overwrite: bool) -> dict[int, BaseException]:
    """The same path on all ranks; on rank ``apart`` it is another disk's folder."""
    writer = FsspecStorageWriter(folder, overwrite=overwrite)
    if rank == apart:
        writer._opener = opened_with(elsewhere=f"{folder}-of-another-host")
    return raised_by(lambda: dcp.save({f"own-{rank}": torch.ones(100)}, storage_writer=writer))


@pytest.mark.parametrize("apart", [0, 1, 2])
def test_a_rank_whose_disk_is_another(tmp_path: Path, ranks: RankPool, apart: int) -> None:
    """Where one of three ranks has another disk under the same path all are told, with a file; nothing commits."""
    place = Place(str(tmp_path / "one"))
    outcomes: list[dict[int, Any]] = ranks.run(save_apart, 3, place.url, apart, False)
    for outcome in outcomes:
        assert list(outcome) == [0]
        error = outcome[0]
        assert type(error) is CorruptCheckpointError
        assert error.file in ({"__1_0.distcp", "__2_0.distcp"} if apart == 0 else {f"__{apart}_0.distcp"})
        assert error.found is None
        assert int(error.wanted or 0) > 400
        assert "share this folder" in str(error)
        assert_sentence(str(error))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith((".commit", ".manifest", ".metadata"))]


def test_another_disk_loses_no_checkpoint(tmp_path: Path, ranks: RankPool) -> None:
    """An overwrite in which a rank has another disk under the same path fails, and the old checkpoint loads."""
    place = Place(str(tmp_path / "one"))
    save(small_state(4), place.writer())
    for outcome in ranks.run(save_apart, 2, place.url, 1, True):
        assert [type(error) for error in outcome.values()] == [CorruptCheckpointError]
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(4))
    assert place.commits() == [".commit"]
