"""Checkpoints of other machines: tensors that lived on a GPU, and numbers of the other byte order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import CheckpointError
from tests.e2e import ALONE, Place, assert_same, assert_sentence, like, raised_by
from tests.values import SAVED, STOCK_TO_US, US, Way, elements, of_bits
from tests.values.crafted import on_device, rewritten, swapped, with_record

pytestmark = [
    pytest.mark.filterwarnings(ALONE),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "step-1"))


def mixed_state() -> dict[str, Any]:
    return {
        "weight": torch.arange(12.0).reshape(3, 4),
        "half": torch.arange(6).to(torch.bfloat16),
        "eighth": of_bits(torch.float8_e4m3fn, 9),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "optimizer": {"step": torch.tensor(3.0)},
        "nested": (torch.arange(3), {"x": torch.ones(2, dtype=torch.uint16)}),
    }


@pytest.mark.parametrize("tag", ["cuda:0", "cuda:7", "mps", "xpu:0", "npu:0", "privateuse"])
@pytest.mark.parametrize("way", [US, STOCK_TO_US], ids=lambda way: way.name)
def test_tensors_that_lived_on_a_gpu(way: Way, tag: str, local: Place) -> None:
    """Items whose bytes say that they lay on another device load on the CPU, tensors and those within objects."""
    state = mixed_state()
    with on_device(tag):
        way.save(dict(state), local)
    shards = b"".join(local.get(name) for name in local.shards())
    assert shards.count(tag.encode()) == len(state)  # each item names it once
    found = like(state)
    way.load(found, local)
    nested, wanted = found.pop("nested"), state.pop("nested")
    assert_same(found, state)
    assert_same([nested[0], nested[1]], [wanted[0], wanted[1]])
    assert nested[0].device.type == nested[1]["x"].device.type == "cpu"


def width_of(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


# torch.save writes of these no type of storage, so torch's own loader does not know what to swap, either.
UNTYPED = {"uint16", "uint32", "uint64", "complex32", "bcomplex32"} & set(SAVED)
SWAPPED = [name for name in SAVED if not name.startswith("bits") and name not in UNTYPED]


@pytest.mark.parametrize("name", SWAPPED)
def test_numbers_of_the_other_byte_order(name: str, local: Place) -> None:
    """A tensor that a big-endian machine saved comes back with its numbers, alone and within an object."""
    tensor = of_bits(SAVED[name], 12).reshape(3, 4)
    state = {"a": tensor, "b": (tensor, tensor[1:])}
    rewritten(dict(state), local, lambda key, item: swapped(item, width_of(SAVED[name])))
    assert b"big" in local.get("__0_0.distcp")
    found: dict[str, Any] = {"a": of_bits(SAVED[name], 12, seed=1).reshape(3, 4), "b": None}
    STOCK_TO_US.load(found, local)
    for value in (found["a"], found["b"][0]):
        assert elements(value) == elements(tensor)
    assert elements(found["b"][1]) == elements(tensor[1:])


def test_no_byte_order_is_the_common_one(local: Place) -> None:
    """Items of older versions of torch, which did not note the byte order, are little-endian."""
    tensor = torch.arange(5.0)
    rewritten({"a": tensor}, local, lambda key, item: with_record(item, "byteorder", None))
    found = torch.zeros(5)
    STOCK_TO_US.load({"a": found}, local)
    assert torch.equal(found, tensor)


def test_a_damaged_device_is_no_device(local: Place) -> None:
    """An item whose pickle is damaged where the device stands is refused, with the key."""
    with on_device("cuda:0"):
        STOCK_TO_US.save({"a": torch.ones(3)}, local)
    body = local.get("__0_0.distcp")
    local.set("__0_0.distcp", body.replace(b"cuda:0", b"cud\xff:0"))
    found = torch.zeros(3)
    error = raised_by(STOCK_TO_US.refused({"a": found}, local))[0]
    assert isinstance(error, CheckpointError)
    assert error.key == "a"
    assert_sentence(str(error))
    assert found.tolist() == [0, 0, 0]
