"""Both ways with stock torch: its readers load ours, we load its checkpoints, and the bytes are its own."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dcp_storage import FsspecStorageReader, NotCommittedError, SaveOptions
from dcp_storage.errors import CheckpointExistsError
from tests.e2e import ALONE, Place, assert_same, failure, like, load, place_of, save, small_state

pytestmark = [
    pytest.mark.filterwarnings(ALONE),
    # torch 2.14 says so of every remote stream of its own writer
    pytest.mark.filterwarnings("ignore:fsync not supported for this stream:UserWarning"),
]


def stock_reader(place: Place) -> Any:
    return FsspecReader(place.url, **place.options) if place.server else FileSystemReader(place.url)


def stock_writer(place: Place) -> Any:
    return FsspecWriter(place.url, **place.options) if place.server else FileSystemWriter(place.url)


def odd_state() -> dict[str, Any]:
    """What stock torch treats in ways of its own: views, holes, other orders, empty and 0-dim tensors, objects."""
    big = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
    return {
        **small_state(),
        "columns": big[:, 3:5],
        "transposed": big[:7, :9].T,
        "row": big[5],
        "channels_last": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "objects": [{"lr": 0.1}, (1, "two")],
    }


@pytest.fixture(params=["local", "moto", "ministack"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request, request.param)


@pytest.mark.parametrize("shard_size", [1 << 32, 3000], ids=["one-file", "several-files"])
def test_stock_readers_load_ours(place: Place, shard_size: int) -> None:
    """A stock reader, who knows nothing of us, gets every value bit for bit, from one file or several."""
    state = odd_state()
    save(state, place.writer(options=SaveOptions(shard_size=shard_size)))
    assert (len(place.shards()) > 1) is (shard_size == 3000)
    found = like(state)
    dcp.load(found, storage_reader=stock_reader(place), no_dist=True)
    assert_same(found, state)


def test_stock_readers_see_the_replacement(place: Place) -> None:
    """After an overwrite the stock view is that of the new checkpoint."""
    if place.server is None or place.server.name == "moto":
        save(odd_state(), place.writer())
    save(small_state(1), place.writer(overwrite=True))
    found = like(small_state())
    dcp.load(found, storage_reader=stock_reader(place), no_dist=True)
    assert_same(found, small_state(1))


def test_we_load_what_stock_wrote(place: Place) -> None:
    """A stock checkpoint is refused by default with the option that allows it, and loads bit for bit with it."""
    state = odd_state()
    dcp.save(state, storage_writer=stock_writer(place), no_dist=True)
    before = place.files()
    error = failure(NotCommittedError, lambda: load(like(state), place.reader()))
    assert "require_commit=False" in str(error)
    found = like(state)
    reader = place.reader(require_commit=False)
    load(found, reader)
    assert_same(found, state)
    assert reader.report is not None
    assert reader.report.commit is None
    assert place.files() == before


def test_a_stock_checkpoint_is_not_overwritten_by_default(place: Place) -> None:
    """Saving onto a stock checkpoint is refused and changes nothing; with overwrite=True ours takes its place."""
    dcp.save(small_state(1), storage_writer=stock_writer(place), no_dist=True)
    before = place.files()
    failure(CheckpointExistsError, lambda: save(small_state(2), place.writer()))
    assert place.files() == before
    save(small_state(2), place.writer(overwrite=True))
    for reader in (place.reader(), stock_reader(place)):
        found = like(small_state())
        load(found, reader)
        assert_same(found, small_state(2))


def test_a_commit_counts_also_where_none_is_required(tmp_path: Path) -> None:
    """``require_commit=False`` changes nothing where there is a commit: a damaged shard is still found out."""
    place = Place(str(tmp_path / "one"))
    save(small_state(), place.writer())
    found = like(small_state())
    load(found, place.reader(require_commit=False))
    assert_same(found, small_state())
    place.remove(".commit")
    place.remove(".metadata")
    failure(NotCommittedError, lambda: load(like(small_state()), place.reader(require_commit=False)))


FOREIGN = """
import pickle, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("dcp_storage", "msgspec", "fsspec"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Blocked())
try:
    import dcp_storage
except ImportError:
    pass
else:
    raise SystemExit("dcp_storage could be imported")
metadata = pickle.loads(open(sys.argv[1], "rb").read())
print(sorted(metadata.state_dict_metadata), len(metadata.storage_data))
modules = {type(value).__module__ for value in metadata.storage_data.values()}
print(sorted(modules), metadata.version, type(metadata.planner_data).__name__)
"""


def test_the_stock_view_needs_nothing_of_ours(tmp_path: Path) -> None:
    """``.metadata`` unpickles where dcp_storage cannot be imported, and holds stock classes only."""
    place = Place(str(tmp_path / "one"))
    save({"a": torch.ones(3), "b": {"c": 1}}, place.writer())
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, str(tmp_path / "one" / ".metadata")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['a', 'b.c'] 2",
        "['torch.distributed.checkpoint.filesystem'] 1.0.0 dict",
    ]


def stock_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.numel() * value.element_size():
        value = value.clone()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_each_item_is_what_torch_save_writes(place: Place) -> None:
    """The bytes of each item in the shards equal ``torch.save`` to a buffer, of a view those of its clone."""
    state = {key: value for key, value in odd_state().items() if key not in {"model", "objects"}}
    save(state, place.writer(options=SaveOptions(shard_size=3000)))
    manifest = place.manifest()
    shards = {name: place.get(name) for name in place.shards()}
    assert {item["key"] for item in manifest["items"]} == set(state)
    for item in manifest["items"]:
        name = manifest["files"][item["file"]]["name"]
        assert shards[name][item["offset"] : item["offset"] + item["length"]] == stock_bytes(state[item["key"]])
    assert sum(item["length"] for item in manifest["items"]) == sum(len(data) for data in shards.values())


def test_each_item_is_what_stock_wrote(tmp_path: Path) -> None:
    """Item by item the bytes are those of a stock checkpoint of the same state."""
    ours, stock = Place(str(tmp_path / "ours")), Place(str(tmp_path / "stock"))
    state = odd_state()
    save(state, ours.writer())
    dcp.save(state, storage_writer=FileSystemWriter(stock.url), no_dist=True)
    found = {}
    for place in (ours, stock):
        metadata = pickle.loads(place.get(".metadata"))
        found[place.url] = {
            (index.fqn, index.offset): place.get(info.relative_path)[info.offset : info.offset + info.length]
            for index, info in metadata.storage_data.items()
        }
    assert found[ours.url] == found[stock.url]


def test_the_stock_view_equals_stocks_own(tmp_path: Path) -> None:
    """Entries, planner data and version of ``.metadata`` are those that stock torch writes for the same state."""
    ours, stock = Place(str(tmp_path / "ours")), Place(str(tmp_path / "stock"))
    save(odd_state(), ours.writer())
    dcp.save(odd_state(), storage_writer=FileSystemWriter(stock.url), no_dist=True)
    one, other = (pickle.loads(place.get(".metadata")) for place in (ours, stock))
    assert one.state_dict_metadata == other.state_dict_metadata
    assert one.planner_data == other.planner_data
    assert one.version == other.version
    assert set(one.storage_data) == set(other.storage_data)


def test_torchs_own_converter_reads_ours(tmp_path: Path) -> None:
    """``dcp_to_torch_save``, which goes by the stock view, gives one plain file with our values."""
    place = Place(str(tmp_path / "one"))
    state = small_state()
    save(state, place.writer())
    dcp_to_torch_save(place.url, str(tmp_path / "plain.pt"))
    found = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert_same({key: found[key] for key in state}, state)


def test_we_keep_to_the_template_of_a_stock_checkpoint(tmp_path: Path) -> None:
    """Of a stock checkpoint only the wanted keys are loaded, and a slice of a view comes back right."""
    state = odd_state()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    found = {"transposed": torch.zeros(9, 7), "row": torch.zeros(100)}
    load(found, FsspecStorageReader(tmp_path / "one", require_commit=False))
    assert torch.equal(found["transposed"], state["transposed"])
    assert torch.equal(found["row"], state["row"])
