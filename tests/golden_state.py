"""The state in the golden checkpoints, by formula; the script that writes them and the test that reads them share it.

It never changes: a later format gets a state of its own.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict, defaultdict, deque
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_storage import FsspecStorageWriter

__all__ = ["DTYPES", "OBJECTS", "SHARDED", "empty_state", "numbers", "save_on_rank", "tensors"]

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip

OBJECTS: dict[str, Any] = {
    "step": 500_000,
    "rate": 2.5e-4,
    "name": "größer",
    "flag": True,
    "nothing": None,
    "raw": b"\x00\xff",
    "pair": (1, "two"),
    "ordered": (OrderedDict([("b", 1), ("a", 2)]),),  # in a tuple, since torch takes a bare mapping apart
    "queue": deque([1, 2, 3], maxlen=3),
    "counts": (defaultdict(int, {"x": 1}),),
    "when": datetime.datetime(2026, 11, 30, 12, 0, tzinfo=datetime.timezone.utc),
    "range": range(2, 10, 3),
    "where": PurePosixPath("data/train"),
}

SHARDED = {"rows": (6, 4), "uneven": (5, 3), "single": (1, 8)}
"""Shapes of the tensors that lie split over the two ranks, along their first dimension."""


def numbers(count: int, dtype: str) -> list[Any]:
    """The elements of a golden tensor: small numbers that every dtype has, no two neighbours alike."""
    if dtype == "bool":
        return [k % 3 == 0 for k in range(count)]
    if dtype.startswith("complex"):
        return [complex(k % 7, -(k % 5)) for k in range(count)]
    if dtype.startswith("uint"):
        return [(3 * k) % 7 for k in range(count)]
    return [(3 * k) % 7 - 3 for k in range(count)]


def _tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    return torch.tensor(numbers(count, dtype), dtype=wide).reshape(shape).to(getattr(torch, dtype))


def tensors() -> dict[str, torch.Tensor]:
    """Every tensor that is not sharded, by its key in the checkpoint."""
    made = {f"dtypes.{name}": _tensor((3, 5), name) for name in DTYPES}
    made["shapes.scalar"] = torch.tensor(2.5)
    made["shapes.empty"] = torch.zeros((0, 3))
    made["shapes.transposed"] = _tensor((4, 6), "float32").t()
    made["shapes.view"] = _tensor((64, 64), "float32")[3:5, 7:10]
    made["shapes.large"] = _tensor((40, 256), "float32")  # more than two checksum blocks
    made["layers.0.weight"] = _tensor((2, 2), "float32")
    made["layers.1.weight"] = _tensor((2, 2), "bfloat16")
    made["odd keys.a/b ß"] = _tensor((2,), "int64")
    return made


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    layers = [{"weight": flat["layers.0.weight"]}, {"weight": flat["layers.1.weight"]}]
    state: dict[str, Any] = {"layers": layers}
    for key, value in flat.items():
        group, _, name = key.partition(".")
        if group != "layers":
            state.setdefault(group, {})[name] = value
    return state


def empty_state() -> dict[str, Any]:
    """A state of the golden shape to load into, for one process: every number is wrong."""
    flat: dict[str, Any] = {key: torch.full_like(value, 1) for key, value in tensors().items()}
    state = _nested(flat)
    state["sharded"] = {name: torch.full(shape, -99.0) for name, shape in SHARDED.items()}
    state["objects"] = dict.fromkeys(OBJECTS, "not loaded")
    return state


def save_on_rank(rank: int, world: int, path: str, stock: bool) -> None:
    """Saves the golden state; called on each of two ranks."""
    mesh = init_device_mesh("cpu", (world,))
    state = _nested(dict(tensors()))
    state["sharded"] = {}
    for name, shape in SHARDED.items():
        whole = _tensor(shape, "float32")
        parts = list(whole.chunk(world))
        local = parts[rank] if rank < len(parts) else whole[:0]
        state["sharded"][name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    state["objects"] = dict(OBJECTS)
    dcp.save(state, storage_writer=FileSystemWriter(path) if stock else FsspecStorageWriter(path))
