"""Checkpoints that were written once and stay in git: every later version must load them, bit for bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from dcp_storage import FsspecStorageReader
from tests.golden_state import DTYPES, OBJECTS, SHARDED, empty_state, numbers, tensors

GOLDEN = Path(__file__).parent / "golden"
FORMAT_1 = GOLDEN / "format1"
STOCK = GOLDEN / "stock-2.13.0"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def loaded(reader: StorageReader) -> dict[str, Any]:
    state = empty_state()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def at(state: dict[str, Any], key: str) -> Any:
    group, _, name = key.partition(".")
    if group == "layers":
        number, _, name = name.partition(".")
        return state["layers"][int(number)][name]
    return state[group][name]


READERS: dict[str, Callable[[], StorageReader]] = {
    "ours-format-1": lambda: FsspecStorageReader(FORMAT_1),
    "stock-format-1": lambda: FileSystemReader(FORMAT_1),
    "ours-stock-2.13.0": lambda: FsspecStorageReader(STOCK, require_commit=False),
}


@pytest.fixture(params=READERS, ids=str)
def state(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The golden state as a reader gives it: ours of both checkpoints, and stock torch's of ours."""
    return loaded(READERS[request.param]())


def test_every_dtype_has_its_numbers(state: dict[str, Any]) -> None:
    """A golden tensor of every dtype holds the numbers of the formula."""
    for dtype in DTYPES:
        tensor = state["dtypes"][dtype]
        assert str(tensor.dtype) == f"torch.{dtype}"
        wide = torch.complex128 if dtype.startswith("complex") else torch.float64
        assert tensor.to(wide).flatten().tolist() == numbers(15, dtype), dtype


def test_every_tensor_is_the_same_bit_for_bit(state: dict[str, Any]) -> None:
    """Scalars, empty tensors, transposed ones, views, tensors in lists and under odd keys come back whole."""
    for key, wanted in tensors().items():
        found = at(state, key)
        assert found.shape == wanted.shape, key
        assert raw(found) == raw(wanted), key


def test_sharded_tensors_are_put_together(state: dict[str, Any]) -> None:
    """What lay split over two ranks, unevenly or on one of them only, is whole in one process."""
    for name, (rows, columns) in SHARDED.items():
        wanted = numbers(rows * columns, "float32")
        assert state["sharded"][name].flatten().tolist() == wanted, name


def test_objects_are_equal_and_of_their_types(state: dict[str, Any]) -> None:
    """Python objects of the safe list come back equal, with their own types."""
    for name, wanted in OBJECTS.items():
        found = state["objects"][name]
        assert found == wanted, name
        assert type(found) is type(wanted), name
    ordered, counts = state["objects"]["ordered"][0], state["objects"]["counts"][0]
    assert list(ordered) == ["b", "a"]
    assert counts["new"] == 0


def test_the_commit_has_the_documented_fields() -> None:
    """The commit object of format 1 is JSON with these fields, and its last one is the CRC-32 of all before it."""
    body = (FORMAT_1 / ".commit").read_bytes()
    commit = json.loads(body)
    assert commit["format"] == 1
    assert commit["state"] == "committed"
    assert commit["number"] == 1
    assert commit["world_size"] == 2
    assert commit["torch"].startswith("2.13.0")
    assert commit["package"] == "0.1.0"
    assert commit["single_writer"] is False
    assert len(commit["author"]) == 16
    assert commit["time"].endswith("+00:00")
    before, _, check = body.rpartition(b',"crc32":')
    assert check == f"{zlib.crc32(before)}}}".encode()
    manifest = (FORMAT_1 / ".manifest").read_bytes()
    assert commit["manifest"] == {"name": ".manifest", "size": len(manifest), "crc32": zlib.crc32(manifest)}


def test_the_manifest_names_every_file_with_its_size_and_crc() -> None:
    """The manifest of format 1 lists the shard files as they lie in git."""
    manifest = json.loads((FORMAT_1 / ".manifest").read_bytes())
    assert manifest["format"] == 1
    assert manifest["version"] == "1.0.0"
    assert manifest["storage_meta"]["checkpoint_id"] == "/tmp/dcp_storage-golden/format1"
    assert {file["name"] for file in manifest["files"]} == {"__0_0.distcp", "__1_0.distcp"}
    for file in manifest["files"]:
        data = (FORMAT_1 / file["name"]).read_bytes()
        assert (file["size"], file["crc32"]) == (len(data), zlib.crc32(data))
        assert file["rank"] == int(file["name"][2])


def test_the_manifest_places_every_payload_and_its_blocks() -> None:
    """Each tensor's raw bytes lie where the manifest says, and the CRC-32s of item, payload and blocks are of them."""
    manifest = json.loads((FORMAT_1 / ".manifest").read_bytes())
    wanted = tensors()
    seen = set()
    for item in manifest["items"]:
        data = (FORMAT_1 / manifest["files"][item["file"]]["name"]).read_bytes()
        whole = data[item["offset"] : item["offset"] + item["length"]]
        start = item.get("payload_offset", 0)
        payload = whole[start : start + item.get("payload_length", 0)]
        assert item["crc32"] == zlib.crc32(whole), item["key"]
        assert item["payload_crc32"] == zlib.crc32(payload), item["key"]
        step = item.get("block", 1024 * 1024)
        blocks = [zlib.crc32(payload[k : k + step]) for k in range(0, len(payload), step)]
        assert list(item.get("blocks", [])) == blocks, item["key"]
        if item["key"] in wanted and "dtype" in item:
            tensor = wanted[item["key"]]
            seen.add(item["key"])
            assert f"torch.{item['dtype']}" == str(tensor.dtype)
            assert tuple(item["shape"]) == tensor.shape
            assert payload == raw(tensor.t() if "stride" in item else tensor), item["key"]
    assert seen == set(wanted)
    assert manifest["entries"]["sharded.uneven"]["chunks"] == [
        {"offsets": [0, 0], "sizes": [3, 3]},
        {"offsets": [3, 0], "sizes": [2, 3]},
    ]
    assert manifest["entries"]["objects.step"] == {"kind": "bytes"}
    assert manifest["planner_data"]["paths"]["layers.0.weight"] == ["layers", 0, "weight"]
