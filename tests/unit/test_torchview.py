"""torch's Metadata to a manifest and back, and the pickle for stock readers, against torch's own planner."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from dcp_storage.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from dcp_storage.records import FileRecord, ItemRecord, Manifest, WrittenItem, decode_manifest, encode_manifest
from dcp_storage.torchview import (
    manifest_from_stock,
    manifest_of,
    metadata_of,
    stock_pickle,
    stock_storage_data,
)

STATE: dict[str, Any] = {
    "model": {"w": torch.zeros(4, 6, dtype=torch.bfloat16), "b": torch.zeros(())},
    "empty": torch.zeros(0, 3),
    "grad": torch.zeros(2, requires_grad=True),
    "list": [torch.zeros(2), {"x": 1}],
    "a.b": (1, 2),
    "grün 日本": None,
}


def planned(state: dict[str, Any]) -> tuple[Metadata, list[MetadataIndex]]:
    """What torch's own planner makes of a state on one rank."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, StorageMeta(), True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    metadata.version = "1.0.0"
    metadata.storage_meta = StorageMeta(checkpoint_id="/run/step-1", save_id="token")
    return metadata, [item.index for item in plans[0].items]


def written(indices: list[MetadataIndex]) -> list[tuple[MetadataIndex, WrittenItem]]:
    """Items of 10 bytes each, two to a file."""
    out = []
    for number, index in enumerate(indices):
        name = f"__0_{number // 2}.distcp"
        offsets = None if index.offset is None else tuple(index.offset)
        item = ItemRecord(
            key=index.fqn, offsets=offsets, index=index.index, file=0, offset=10 * (number % 2), length=10,
            payload_length=10,
        )  # fmt: skip
        shard = FileRecord(name, 20, 7, 0) if number % 2 == 0 else None
        out.append((index, WrittenItem(name, item, shard)))
    return out


def a_manifest() -> tuple[Metadata, list[MetadataIndex], Manifest]:
    metadata, indices = planned(STATE)
    return metadata, indices, manifest_of(metadata, [written(indices)])


def test_metadata_comes_back_as_it_was() -> None:
    """Entries, planner data, storage meta and version survive the way to JSON and back."""
    metadata, _, manifest = a_manifest()
    again = decode_manifest(encode_manifest(manifest), path="place", file=".manifest")
    assert again == manifest
    found = metadata_of(again)
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert list(found.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert found.planner_data == metadata.planner_data
    assert found.storage_meta == metadata.storage_meta
    assert found.version == "1.0.0"


def test_items_know_their_file() -> None:
    """Each item points at the file that its rank wrote it to, each file is there once, in order."""
    _, indices, manifest = a_manifest()
    assert [file.name for file in manifest.files] == [f"__0_{k}.distcp" for k in range((len(indices) + 1) // 2)]
    assert [manifest.files[item.file].name for item in manifest.items] == [
        f"__0_{number // 2}.distcp" for number in range(len(indices))
    ]


def test_the_stock_pickle_is_torchs_own_metadata() -> None:
    """It unpickles to torch's classes with every place, and names nothing but torch and builtins."""
    metadata, indices, manifest = a_manifest()
    data, warning = stock_pickle(manifest)
    assert warning is None
    found = pickle.loads(data)
    assert type(found) is Metadata
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.planner_data == metadata.planner_data
    assert {type(place) for place in found.storage_data.values()} == {_StorageInfo}
    assert found.storage_data == stock_storage_data(manifest)
    for number, index in enumerate(indices):
        place = found.storage_data[index]
        assert (place.relative_path, place.offset, place.length) == (f"__0_{number // 2}.distcp", 10 * (number % 2), 10)
    strings = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert not [text for text in strings if "dcp_storage" in text]


class Plain:
    """A planner's own data of a class that nobody knows."""


@pytest.mark.parametrize("data", [{"a": [1, 2]}, [("a", 1)], "text", {1: ("a",)}])
def test_planner_data_of_other_planners(data: Any) -> None:
    """What is not torch's own form is kept as opaque bytes, comes back equal, and stands in the stock view too."""
    metadata, indices = planned({"a": torch.zeros(1)})
    metadata.planner_data = data
    manifest = manifest_of(metadata, [written(indices)])
    assert manifest.planner_data is not None
    assert manifest.planner_data.opaque is not None
    again = decode_manifest(encode_manifest(manifest), path="place", file=".manifest")
    assert metadata_of(again).planner_data == data
    pickled, warning = stock_pickle(again)
    assert warning is None
    assert pickle.loads(pickled).planner_data == data


def test_planner_data_that_nobody_allowed() -> None:
    """A class of the planner's own needs to be trusted; the stock view is written without it, with a warning."""
    metadata, indices = planned({"a": torch.zeros(1)})
    metadata.planner_data = Plain()
    manifest = manifest_of(metadata, [written(indices)])
    with pytest.raises(CheckpointError, match="trusted_globals"):
        metadata_of(manifest)
    assert isinstance(metadata_of(manifest, trusted_globals=[Plain]).planner_data, Plain)
    data, warning = stock_pickle(manifest)
    assert warning is not None
    assert "planner" in warning
    assert b"Plain" not in data


def test_altered_planner_data_is_found() -> None:
    """Opaque bytes are checked before anything is made of them."""
    metadata, indices = planned({"a": torch.zeros(1)})
    metadata.planner_data = [1, 2]
    manifest = manifest_of(metadata, [written(indices)])
    data = encode_manifest(manifest)
    assert manifest.planner_data is not None
    altered = data.replace(str(manifest.planner_data.crc32).encode(), b"12345")
    with pytest.raises(CorruptCheckpointError) as caught:
        metadata_of(decode_manifest(altered, path="place", file=".manifest"))
    assert caught.value.wanted == 12345


def test_a_dtype_that_this_torch_lacks() -> None:
    """Such a tensor is named, with its dtype."""
    _, _, manifest = a_manifest()
    data = encode_manifest(manifest).replace(b'"bfloat16"', b'"float3"')
    with pytest.raises(IncompatibleCheckpointError, match="float3") as caught:
        metadata_of(decode_manifest(data, path="place", file=".manifest"), path="place")
    assert (caught.value.key, caught.value.path) == ("model.w", "place")


def test_a_file_whose_size_nobody_told() -> None:
    """A result without the facts of its file is a broken result, not a file of size 0."""
    metadata, indices = planned({"a": torch.zeros(1)})
    (index, told) = written(indices)[0]
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp") as caught:
        manifest_of(metadata, [[(index, WrittenItem(told.name, told.item, None))]])
    assert caught.value.kind == "results"


def stock_metadata() -> Metadata:
    metadata, indices = planned({"a": torch.zeros(3), "b": 1})
    metadata.storage_data = {
        index: _StorageInfo("__0_0.distcp", 100 * number, 100) for number, index in enumerate(indices)
    }
    return metadata


def test_a_stock_checkpoint_becomes_a_manifest() -> None:
    """Places are as stock has them, payloads the whole items, without checksums."""
    manifest = manifest_from_stock(stock_metadata(), {"__0_0.distcp": 200, "other": 5})
    assert manifest.files == (FileRecord("__0_0.distcp", 200, None, 0),)
    assert [(item.key, item.offset, item.length, item.payload_length) for item in manifest.items] == [
        ("a", 0, 100, 100),
        ("b", 100, 100, 100),
    ]
    assert all((item.crc32, item.blocks, item.dtype) == (None, (), None) for item in manifest.items)
    assert metadata_of(manifest).state_dict_metadata == stock_metadata().state_dict_metadata


@pytest.mark.parametrize(("sizes", "found"), [({}, None), ({"__0_0.distcp": 199}, 199)])
def test_a_stock_checkpoint_whose_file_is_gone_or_short(sizes: dict[str, int], found: int | None) -> None:
    """The file is named, with the wanted and the found end."""
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp") as caught:
        manifest_from_stock(stock_metadata(), sizes)
    assert caught.value.file == "__0_0.distcp"
    assert caught.value.found == found
