"""Adopting what stock torch wrote: refused unless its sizes are right, and unchanged from then on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcp_storage import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
    LoadOptions,
    NotCommittedError,
    StoreError,
    adopt,
    verify,
)
from dcp_storage.store import Store
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from dcp_storage.tools.adopt import adopt_folder
from dcp_storage.tools.opening import Folder
from tests.e2e import ALONE, Place, assert_same, like, load, place_of
from tests.tools import SLOW_MOTO, flip, folder_of, make, remove, state

pytestmark = pytest.mark.filterwarnings(ALONE)

SMALL = LoadOptions(part_size=64 * 1024, memory_budget=256 * 1024, max_concurrency=3)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    place = place_of(request, getattr(request, "param", "local"))
    make(place, "stock")
    return place


@pytest.mark.parametrize("place", ["local", SLOW_MOTO, "gcs"], indirect=True)
@pytest.mark.parametrize("data", [False, True])
def test_what_is_adopted_is_committed_and_loads(place: Place, data: bool) -> None:
    """Manifest and commit are added, no file changes, and loading and every depth of verify go well."""
    before = {name: place.get(name) for name in place.files()}
    report = adopt(place.url, data=data, storage_options=place.options, options=SMALL)
    assert (report.ok, report.commit, report.files, report.single_writer) == (True, 1, 1, False)
    assert report.says.startswith("unchanged from now on")
    assert report.bytes_read == (report.nbytes if data else 0)
    after = {name: place.get(name) for name in place.files()}
    assert {name: after[name] for name in before} == before
    assert {name.partition(".manifest")[1] or name for name in set(after) - set(before)} == {".commit", ".manifest"}
    assert json.loads(place.get(".commit"))["state"] == "committed"
    assert verify(place.url, "sizes", storage_options=place.options).warnings == []
    assert verify(place.url, "data", storage_options=place.options).ok
    found = like(state())
    load(found, place.reader())
    assert_same(found, state())


def test_a_changed_byte_is_found_only_where_sums_were_kept(place: Place, tmp_path: Path) -> None:
    """With data, one altered bit is found and named; without, verify says that the bytes were not checked."""
    other = Place(str(tmp_path / "other"))
    make(other, "stock")
    for each, data in ((place, True), (other, False)):
        adopt(each.url, data=data, options=SMALL)
        flip(each, each.shards()[0], each.files()[each.shards()[0]] // 2)
    report = verify(place.url, "data")
    assert [(p.kind, p.key) for p in report.problems] in ([("altered", "large")], [("altered", "matrix")])
    unknown = verify(other.url, "data")
    assert unknown.ok
    assert "was not checked" in unknown.warnings[0]


def test_a_changed_size_is_found(place: Place) -> None:
    """After adopt, a file that is cut short is a problem, and a load refuses."""
    adopt(place.url)
    name = place.shards()[0]
    place.set(name, place.get(name)[:-1])
    assert [p.kind for p in verify(place.url).problems] == ["short"]


@pytest.mark.parametrize("how", ["missing", "short"])
def test_what_is_not_whole_is_not_adopted(place: Place, how: str) -> None:
    """A missing or short file refuses, with its name, and nothing is written."""
    name = place.shards()[0]
    if how == "missing":
        remove(place, name)
    else:
        place.set(name, place.get(name)[:-10])
    before = place.files()
    with pytest.raises(CorruptCheckpointError) as caught:
        adopt(place.url)
    assert (caught.value.file, caught.value.path) == (name, place.url)
    assert place.files() == before


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nothing", CheckpointNotFoundError),
        ("committed", CheckpointExistsError),
        ("unfinished", NotCommittedError),
        ("void", CheckpointExistsError),
    ],
)
def test_other_folders_are_not_adopted(request: pytest.FixtureRequest, kind: str, error: type[Exception]) -> None:
    """Only a stock checkpoint without any commit is adopted; nothing else is changed."""
    place = place_of(request, "local")
    make(place, kind)
    before = place.files()
    with pytest.raises(error):
        adopt(place.url)
    assert place.files() == before


def test_a_void_beside_a_view_is_not_revived(request: pytest.FixtureRequest) -> None:
    """A deleted checkpoint whose ``.metadata`` is still there is not adopted."""
    place = place_of(request, "local")
    make(place, "committed")
    view = place.get(".metadata")
    make_void = folder_of(place).open()
    from dcp_storage.fence import delete_folder

    delete_folder(make_void.store)
    place.set(".metadata", view)
    with pytest.raises(CheckpointExistsError, match="deleted"):
        adopt(place.url)


def _save_stock_alone(rank: int, world: int, path: str) -> None:
    dcp.save({f"of-{rank}": rank}, checkpoint_id=path, use_collectives=False)


def test_rank_by_rank_stock_is_not_adopted(ranks: RankPool, tmp_path: Path) -> None:
    """What stock torch saved without collectives has no metadata of the whole."""
    ranks.run(_save_stock_alone, 2, str(tmp_path / "c"))
    with pytest.raises(NotCommittedError, match="without collectives"):
        adopt(tmp_path / "c")


def _save_stock(rank: int, world: int, path: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    dcp.save({"w": distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])}, checkpoint_id=path)


def test_the_ranks_of_a_stock_save_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    """World size and each file's rank come from stock's names; stock torch still loads what was adopted."""
    path = str(tmp_path / "c")
    ranks.run(_save_stock, 2, path)
    adopt(path, data=True)
    place = Place(path)
    assert json.loads(place.get(".commit"))["world_size"] == 2
    assert {(f["name"], f["rank"]) for f in place.manifest()["files"]} == {("__0_0.distcp", 0), ("__1_0.distcp", 1)}
    import torch

    found = {"w": torch.zeros(4, 6)}
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    assert_same(found, {"w": torch.arange(24.0).reshape(4, 6)})


def broken(place: Place, *faults: Fault) -> Folder:
    plain = folder_of(place)

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        return FaultyStore(open_store(location, options, max_concurrency=concurrency), list(faults))

    return Folder(plain.location, {}, LoadOptions(attempts=1), opener)


def test_a_lost_reply_is_recognised_and_an_unknown_one_said(place: Place) -> None:
    """A commit whose reply was lost is our own; where it cannot be read back, the error says that nobody knows."""
    assert adopt_folder(broken(place, Fault("create", when="lost"))).commit == 1
    remove(place, ".commit")
    faults = [Fault("create", when="lost", nth=None), Fault("read", name=r"\.commit", nth=None)]
    with pytest.raises(CommitUnknownError):
        adopt_folder(broken(place, *faults))


@pytest.mark.parametrize("operation", ["entries", "read", "put", "read_into"])
def test_a_store_that_fails_before_the_commit_leaves_none(place: Place, operation: str) -> None:
    """An outage raises, and the folder stays a stock checkpoint."""
    with pytest.raises(StoreError):
        adopt_folder(broken(place, Fault(operation, nth=None)), data=True)
    assert place.commits() == []
