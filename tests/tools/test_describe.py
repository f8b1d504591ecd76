"""What describe says of folders in every state, and of tensors that are cut over ranks and files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageWriter, StoreError, describe
from dcp_storage.store import Store
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from dcp_storage.tools.describe import describe_folder
from dcp_storage.tools.opening import Folder
from tests.e2e import ALONE, Place, place_of, save
from tests.tools import SLOW_MOTO, STATES, flip, folder_of, make, state

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request, getattr(request, "param", "local"))


everywhere = pytest.mark.parametrize("place", ["local", SLOW_MOTO, "gcs"], indirect=True)


@everywhere
@pytest.mark.parametrize("kind", STATES)
def test_every_state_is_told(place: Place, kind: str) -> None:
    """The state is named, only a committed checkpoint is ok, and the report is plain data."""
    make(place, kind)
    report = describe(place.url, storage_options=place.options)
    assert report.state == kind
    assert report.ok is (kind == "committed")
    assert json.loads(json.dumps(report.to_dict()))["state"] == kind
    assert report.says


def test_a_checkpoint_is_told_as_torch_made_it(place: Place) -> None:
    """Keys, shapes, dtypes, files, sizes and the commit are those of the state and of the folder."""
    make(place, "committed")
    report = describe(place.url, storage_options=place.options)
    commit = json.loads(place.get(".commit"))
    assert (report.commit, report.author, report.time) == (1, commit["author"], commit["time"])
    assert (report.world_size, report.torch, report.single_writer) == (1, str(torch.__version__), False)
    assert report.files == {name: size for name, size in place.files().items() if name.endswith(".distcp")}
    assert report.nbytes == sum(report.files.values())
    assert {key: (found.kind, found.dtype, found.shape) for key, found in report.keys.items()} == {
        "large": ("tensor", "float32", (200_000,)),
        "small": ("tensor", "int16", (12,)),
        "matrix": ("tensor", "float64", (300, 200)),
        "object": ("object", None, ()),
    }
    assert report.stock_view
    assert report.leftovers == {}
    assert report.modified is not None


@everywhere
def test_values_are_read_on_demand(place: Place) -> None:
    """The first values along each dimension of one tensor, and an object, are as saved; others are not described."""
    make(place, "committed")
    options: dict[str, Any] = {"storage_options": place.options}
    report = describe(place.url, "matrix", values=3, **options)
    assert list(report.keys) == ["matrix"]
    assert report.keys["matrix"].values == str(state()["matrix"][:3, :3].tolist())
    assert describe(place.url, "object", values=1, **options).keys["object"].values == "[0.1, 'run', 7]"
    assert describe(place.url, "small", **options).keys["small"].values is None


def test_values_of_a_stock_checkpoint_are_read(place: Place) -> None:
    """A checkpoint without a commit shows its values, too."""
    make(place, "stock")
    report = describe(place.url, "small", values=5, storage_options=place.options)
    assert report.keys["small"].values == "[0, 1, 2, 3, 4]"


def test_values_cost_only_what_they_are(tmp_path: Any) -> None:
    """Some values of a large tensor bring back far fewer bytes than the tensor has."""
    place = Place(str(tmp_path / "c"))
    save({"big": torch.zeros(4 << 20, dtype=torch.uint8)}, place.writer())
    stores = []

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        from dcp_storage.testing.recording import RecordingStore

        stores.append(RecordingStore(open_store(location, options, max_concurrency=concurrency)))
        return stores[-1]

    plain = folder_of(place)
    describe_folder(Folder(plain.location, {}, plain.options, opener), "big", values=4)
    assert sum(store.bytes_read() for store in stores) < 200_000


def test_a_damaged_value_is_not_shown(place: Place) -> None:
    """Values whose block is altered raise; nothing wrong is ever printed."""
    make(place, "committed")
    report = describe(place.url, "small", storage_options=place.options)
    piece = report.keys["small"].pieces[0]
    manifest = place.manifest()
    item = next(item for item in manifest["items"] if item["key"] == "small")
    flip(place, piece.file, item["offset"] + item["payload_offset"])
    with pytest.raises(Exception, match="altered"):
        describe(place.url, "small", values=2, storage_options=place.options)


def test_wrong_questions_are_refused(place: Place) -> None:
    """A key that is not there, and values of no key, are errors."""
    make(place, "committed")
    with pytest.raises(KeyError, match="absent"):
        describe(place.url, "absent", storage_options=place.options)
    with pytest.raises(ValueError, match="values"):
        describe(place.url, values=3, storage_options=place.options)


def test_leftovers_are_told_apart_from_the_checkpoint(place: Place) -> None:
    """Files of ours that the commit does not name are listed with their bytes; a stranger's are not ours."""
    make(place, "committed")
    place.set("__3_0.abcdefghijklmnop.distcp", b"dead")
    place.set("notes.txt", b"mine")
    report = describe(place.url, storage_options=place.options)
    assert report.leftovers == {"__3_0.abcdefghijklmnop.distcp": 4}
    assert report.ok


def test_a_torn_later_commit_is_told(place: Place) -> None:
    """A commit that cannot be read is a problem, and what stands before it is described."""
    make(place, "committed")
    place.set(".commit.2", b"{torn")
    report = describe(place.url, storage_options=place.options)
    assert (report.state, report.commit, [p.kind for p in report.problems]) == ("committed", 1, ["torn-commit"])


def test_an_outage_is_never_a_state(tmp_path: Any) -> None:
    """A store that fails makes describe raise, at every one of its requests."""
    place = Place(str(tmp_path / "c"))
    make(place, "committed")
    plain = folder_of(place)
    for operation in ("entries", "read"):
        for nth in (1, 2):
            faults = [Fault(operation, nth=nth)]

            def opener(location: Any, options: Any, concurrency: int, faults: Any = faults) -> Store:
                return FaultyStore(open_store(location, options, max_concurrency=concurrency), faults)

            folder = Folder(plain.location, {}, plain.options, opener)
            if (operation, nth) == ("entries", 2):
                assert describe_folder(folder).ok  # there is no second listing
                continue
            with pytest.raises(StoreError):
                describe_folder(folder)


def _save_cut(rank: int, world: int, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}
    dcp.save(state, storage_writer=FsspecStorageWriter(path))


def test_a_tensor_cut_over_ranks_is_drawn(ranks: RankPool, tmp_path: Any) -> None:
    """Four ranks' shards of a matrix stand in a grid of two by two, each with its rank and file."""
    path = str(tmp_path / "c")
    ranks.run(_save_cut, 4, path)
    found = describe(path, "w", values=6).keys["w"]
    assert [(p.offsets, p.sizes, p.rank) for p in found.pieces] == [
        ((0, 0), (2, 3), 0),
        ((0, 3), (2, 3), 1),
        ((2, 0), (2, 3), 2),
        ((2, 3), (2, 3), 3),
    ]
    assert found.values == str(torch.arange(24.0).reshape(4, 6).tolist())
    drawing = found.drawing()
    assert "│ 0    │ 1    │" in drawing
    assert "│ 2    │ 3    │" in drawing
    assert "3  [2:4, 3:6]  rank 3  __3_0.distcp at 0" in drawing


def _save_alone(rank: int, world: int, path: str) -> None:
    dcp.save({f"of-{rank}": torch.full((3,), rank)}, storage_writer=FsspecStorageWriter(path), use_collectives=False)


def test_a_checkpoint_saved_rank_by_rank_is_told(ranks: RankPool, tmp_path: Any) -> None:
    """Without collectives, the keys of all ranks are shown, with values; a missing rank is a problem."""
    path = str(tmp_path / "c")
    ranks.run(_save_alone, 2, path)
    report = describe(path)
    assert (report.state, report.ok, sorted(report.keys), report.world_size) == (
        "rank-by-rank",
        True,
        ["of-0", "of-1"],
        2,
    )
    assert describe(path, "of-1", values=3).keys["of-1"].values == "[1, 1, 1]"
    (tmp_path / "c" / "__1.commit").unlink()
    assert not describe(path).ok
