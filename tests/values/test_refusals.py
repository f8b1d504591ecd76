"""Values that cannot be kept bit for bit: each is refused by a typed error, never saved or filled wrong."""

from __future__ import annotations

import json
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcp_storage import CheckpointError, IncompatibleCheckpointError
from dcp_storage.errors import CorruptCheckpointError
from tests.e2e import ALONE, Place, failure, load, save
from tests.values import STOCK_TO_US, US, elements, of_bits
from tests.values.crafted import rewritten, swapped, with_record
from tests.values.test_elsewhere import UNTYPED, width_of

pytestmark = [
    pytest.mark.filterwarnings(ALONE),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel and:UserWarning"),
]


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "step-1"))


def test_a_tensor_without_data_is_not_saved(local: Place) -> None:
    """A meta tensor fails the save, with its key; nothing is committed and nothing of the rank is left."""
    state = {"a": torch.ones(3), "b": torch.ones(3, device="meta")}
    error = failure(CheckpointError, lambda: save(state, local.writer()))
    assert (error.key, error.kind) == ("b", "unsupported")
    assert set(local.files()) <= {".claim"}


@pytest.mark.parametrize("pair", [("float32", "float4_e2m1fn_x2"), ("float4_e2m1fn_x2", "float32")], ids="-to-".join)
@pytest.mark.parametrize("way", [US, STOCK_TO_US], ids=lambda way: way.name)
def test_a_cast_that_torch_does_not_have(way: Any, pair: tuple[str, str], local: Place) -> None:
    """Where torch cannot cast, the error names the key and both dtypes, and the target is as it was."""
    source, goal = (getattr(torch, name) for name in pair)
    way.save({"a": of_bits(source, 4)}, local)
    found = of_bits(goal, 4, seed=1)
    before = elements(found)
    error = failure(IncompatibleCheckpointError, way.refused({"a": found}, local))
    assert error.key == "a"
    assert all(name in str(error) for name in pair)
    assert elements(found) == before


@pytest.mark.parametrize("other", ["scale", "zero", "channels", "dtype"])
def test_another_quantization(other: str, local: Place) -> None:
    """A target with another scale, zero point or scheme would get other numbers: refused; a plain one gets them."""
    numbers = torch.arange(12.0).reshape(3, 4)
    saved = torch.quantize_per_tensor(numbers, 0.25, 3, torch.qint8)
    US.save({"a": saved}, local)
    blank = torch.zeros(3, 4)
    found = {
        "scale": lambda: torch.quantize_per_tensor(blank, 0.5, 3, torch.qint8),
        "zero": lambda: torch.quantize_per_tensor(blank, 0.25, 0, torch.qint8),
        "channels": lambda: torch.quantize_per_channel(blank, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "dtype": lambda: torch.quantize_per_tensor(blank, 0.25, 3, torch.quint8),
    }[other]()
    error = failure(IncompatibleCheckpointError, US.refused({"a": found}, local))
    assert error.key == "a"
    assert not found.dequantize().any()
    US.load({"a": blank}, local)
    assert torch.equal(blank, saved.dequantize())


@pytest.mark.parametrize("name", sorted(UNTYPED))
@pytest.mark.parametrize("inside", [False, True], ids=["tensor", "object"])
def test_an_order_that_nothing_tells_how_to_swap(name: str, inside: bool, local: Place) -> None:
    """Big-endian items of dtypes that ``torch.save`` writes without a type are refused, not loaded wrong."""
    dtype = getattr(torch, name)
    state: dict[str, Any] = {"a": (of_bits(dtype, 6),) if inside else of_bits(dtype, 6)}
    rewritten(state, local, lambda key, item: swapped(item, width_of(dtype)))
    found = None if inside else of_bits(dtype, 6, seed=1)
    error = failure(IncompatibleCheckpointError, STOCK_TO_US.refused({"a": found}, local))
    assert "byte order" in str(error)
    assert name in str(error)


@pytest.mark.parametrize("order", [b"middle", b"", b"BIG", b"little\n"])
def test_an_order_that_is_none(order: bytes, local: Place) -> None:
    """A byte order that is neither of the two is damage, not the other one."""
    rewritten({"a": torch.arange(3.0)}, local, lambda key, item: with_record(item, "byteorder", order))
    error = failure(CorruptCheckpointError, STOCK_TO_US.refused({"a": torch.zeros(3)}, local))
    assert error.key == "a"


def test_a_big_endian_machine_saves_what_others_can_load(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved where numbers are big-endian says so, item by item, and loads right on this machine."""
    numbers = torch.arange(5, dtype=torch.int32)
    memory = torch.tensor(list(elements(numbers)), dtype=torch.uint8).reshape(5, 4).flip(1).flatten()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        US.save({"a": memory.view(torch.int32)}, local)
    found = torch.zeros(5, dtype=torch.int32)
    US.load({"a": found}, local)
    assert torch.equal(found, numbers)


def test_a_big_endian_machine_does_not_load_raw_bytes(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numbers are big-endian, our raw bytes are refused, not taken as they are."""
    US.save({"a": torch.arange(5)}, local)
    found = torch.zeros(5, dtype=torch.int64)
    monkeypatch.setattr(sys, "byteorder", "big")
    error = failure(IncompatibleCheckpointError, US.refused({"a": found}, local))
    assert error.key == "a"
    assert not found.any()


def safetensors_save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file of float32 tensors, by its published layout."""
    header: dict[str, Any] = {"__metadata__": metadata or {}}
    body = b""
    for name, tensor in tensors.items():
        start, body = len(body), body + elements(tensor)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, len(body)]}
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def test_stocks_other_format_is_refused(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock checkpoint in safetensors, whose metadata has no places, is refused with what reads it."""
    package, module = types.ModuleType("safetensors"), types.ModuleType("safetensors.torch")
    module.save = safetensors_save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "safetensors", package)
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)
    writer = FileSystemWriter(local.url, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"a": torch.ones(30), "b": torch.ones(4, 5), "c": {"lr": 0.1}}, storage_writer=writer, no_dist=True)
    for key, found in {"a": torch.zeros(30), "b": torch.zeros(4, 5)}.items():
        error = failure(IncompatibleCheckpointError, STOCK_TO_US.refused({key: found}, local))
        assert error.key == key
        assert "SAFETENSORS" in str(error)
        assert not found.any()


def test_a_load_that_was_refused_leaves_no_report(local: Place) -> None:
    """A load that was refused leaves no report of success."""
    US.save({"a": of_bits(torch.float4_e2m1fn_x2, 4)}, local)
    reader = local.reader()
    failure(IncompatibleCheckpointError, lambda: load({"a": torch.zeros(4)}, reader))
    assert reader.report is None
