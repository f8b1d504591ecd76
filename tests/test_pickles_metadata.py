"""What stock torch pickled as ``.metadata`` loads as it was; what makes no sense is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_storage.errors import CorruptCheckpointError, UntrustedDataError
from dcp_storage.pickles import load_metadata

STOCK = (Path(__file__).parent / "data" / "pickles" / "stock-torch-2.13.metadata").read_bytes()


def small() -> Metadata:
    """One tensor in two chunks and one object, as stock torch describes them."""
    half = torch.Size((2, 3))
    return Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.bfloat16),
                size=torch.Size((4, 3)),
                chunks=[ChunkStorageMetadata(torch.Size((0, 0)), half), ChunkStorageMetadata(torch.Size((2, 0)), half)],
            ),
            "step": BytesStorageMetadata(),
        },
        planner_data={"w": ("w",), "step": ("step",)},
        storage_data={
            MetadataIndex("w", (0, 0), 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("w", (2, 0), 1): _StorageInfo("__1_0.distcp", 0, 100, ["zstd"]),
            MetadataIndex("step"): _StorageInfo("__0_0.distcp", 100, 7),
        },
        storage_meta=StorageMeta(checkpoint_id="run", save_id="a"),
        version="1.0.0",
    )


class TestStock:
    def test_the_file_of_torch_2_13(self) -> None:
        """A file that torch 2.13 wrote loads with exactly the fields that were saved."""
        loaded = load_metadata(STOCK)
        assert sorted(loaded.state_dict_metadata) == ["opt.l.0", "opt.l.1", "opt.step", "w"]
        weight = loaded.state_dict_metadata["w"]
        assert isinstance(weight, TensorStorageMetadata)
        assert weight.size == (2, 3)
        assert weight.properties.dtype is torch.float32
        assert weight.properties.memory_format is torch.contiguous_format
        assert loaded.planner_data["opt.l.1"] == ("opt", "l", 1)
        assert loaded.storage_data[MetadataIndex("w", (0, 0))].relative_path == "__0_0.distcp"
        assert loaded.storage_meta is not None
        assert loaded.storage_meta.checkpoint_id == PurePosixPath("run")
        assert loaded.version == "1.0.0"

    def test_it_is_what_pickle_itself_gives(self) -> None:
        """Our machine and Python's make equal objects of the same stock file."""
        assert load_metadata(STOCK) == pickle.loads(STOCK)

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_every_protocol(self, protocol: int) -> None:
        """Metadata pickled by any protocol from 2 to 5 loads as it was."""
        assert load_metadata(pickle.dumps(small(), protocol=protocol)) == small()

    @pytest.mark.parametrize("protocol", [0, 1])
    def test_older_protocols_are_refused(self, protocol: int) -> None:
        """Protocols that stock torch never used are named as damage."""
        with pytest.raises(CorruptCheckpointError, match="protocol 2"):
            load_metadata(pickle.dumps({}, protocol=protocol))

    def test_fields_that_an_older_torch_did_not_know(self) -> None:
        """Metadata without version, storage_meta, modules and transforms loads with the defaults of today."""
        old = small()
        del old.__dict__["version"]
        del old.__dict__["storage_meta"]
        for place in old.storage_data.values():
            place.__dict__.pop("transform_descriptors")
        loaded = load_metadata(pickle.dumps(old))
        assert loaded.version is None
        assert loaded.storage_meta is None
        assert loaded.storage_data[MetadataIndex("step")] == _StorageInfo("__0_0.distcp", 100, 7)
        old.storage_meta = StorageMeta("run")
        del old.storage_meta.__dict__["modules"]
        again = load_metadata(pickle.dumps(old))
        assert again.storage_meta == StorageMeta("run")

    def test_fields_that_a_newer_torch_adds(self) -> None:
        """A field that is not known yet is kept and does not hinder."""
        new = small()
        new.__dict__["added_later"] = (1, 2)
        assert load_metadata(pickle.dumps(new)).__dict__["added_later"] == (1, 2)

    def test_a_memory_format_pickled_by_its_name(self) -> None:
        """An enum's member may come as getattr of its class and name, which then reaches nothing else."""
        head = b"\x80\x04cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n"
        data = head + b"_MEM_FORMAT_ENCODING\n\x8c\x13TORCH_CHANNELS_LAST\x86R."
        with pytest.raises(CorruptCheckpointError, match="it holds a _MEM_FORMAT_ENCODING"):
            load_metadata(data)
        for tail in (b"_MEM_FORMAT_ENCODING\n\x8c\x0b__members__\x86R.", b"Metadata\n\x8c\x08__init__\x86R."):
            with pytest.raises(UntrustedDataError) as caught:
                load_metadata(head + tail)
            assert caught.value.name == "builtins.getattr"


def _replace(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.__dict__.update(fields)


def _tensor(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata["w"].__dict__.update(fields)


def _chunk(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata["w"].chunks[1].__dict__.update(fields)  # type: ignore[union-attr]


def _place(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.storage_data[MetadataIndex("step")].__dict__.update(fields)


def _meta(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.storage_meta.__dict__.update(fields)


@pytest.mark.parametrize(
    "spoil",
    [
        _replace(state_dict_metadata=[]),
        _replace(state_dict_metadata={1: BytesStorageMetadata()}),
        _replace(state_dict_metadata={"a": 3}),
        _replace(storage_data=None),
        _replace(storage_data={"a": _StorageInfo("x", 0, 1)}),
        _replace(storage_data={MetadataIndex("a"): ("x", 0, 1)}),
        _replace(version=1),
        _replace(storage_meta="run"),
        _tensor(properties=None),
        _tensor(size=(4, -3)),
        _tensor(size=[4, 3]),
        _tensor(size=(4, True)),
        _tensor(chunks=()),
        _tensor(chunks=[None]),
        _chunk(offsets=torch.Size((3, 0))),
        _chunk(offsets=torch.Size((2,))),
        _chunk(sizes=torch.Size((2, 3, 1))),
        _chunk(sizes=torch.Size((2, -3))),
        _chunk(sizes=None),
        _place(relative_path=b"__0_0.distcp"),
        _place(offset=-1),
        _place(offset=True),
        _place(length=1.0),
        _place(length=-1),
        _place(transform_descriptors="zstd"),
        _place(transform_descriptors=[1]),
        _meta(checkpoint_id=3),
        _meta(save_id=3),
        _meta(load_id=3),
        _meta(modules=[3]),
    ],
)
def test_a_field_that_makes_no_sense(spoil: Callable[[Metadata], None]) -> None:
    """Each field of another type, a negative count and a chunk outside of its tensor is named as damage."""
    metadata = small()
    spoil(metadata)
    with pytest.raises(CorruptCheckpointError) as caught:
        load_metadata(pickle.dumps(metadata), path="memory://run")
    assert (caught.value.kind, caught.value.file, caught.value.path) == ("corrupt", ".metadata", "memory://run")


def test_an_object_that_was_never_filled() -> None:
    """An instance whose state never came is named as damage, not returned half made."""
    for name in (b"Metadata", b"TensorStorageMetadata"):
        with pytest.raises(CorruptCheckpointError):
            load_metadata(b"\x80\x04ctorch.distributed.checkpoint.metadata\n" + name + b"\n)\x81.")


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "/etc/passwd", "a\\b", "a\nb"])
def test_a_name_that_leaves_the_folder(name: str) -> None:
    """A file's name that could leave the folder is refused and named."""
    metadata = small()
    metadata.storage_data[MetadataIndex("step")] = _StorageInfo(name, 0, 1)
    with pytest.raises(UntrustedDataError) as caught:
        load_metadata(pickle.dumps(metadata), path="memory://run")
    assert (caught.value.name, caught.value.path, caught.value.key) == (name, "memory://run", "step")


def test_other_things_than_metadata() -> None:
    """A pickle of something else is no metadata."""
    values: list[Any] = [None, {}, [small()], BytesStorageMetadata()]
    for value in values:
        with pytest.raises(CorruptCheckpointError):
            load_metadata(pickle.dumps(value))
