"""Boxes, casts and odd targets of tensors whose checksum blocks do not end where their elements do.

A block is a 128th of a payload of 2 to 128 MiB, so its border falls anywhere in an element. What is staged then begins
in the middle of one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_storage import DCP, FsspecStorageReader, FsspecStorageWriter, LoadOptions, load_keys
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE

pytestmark = pytest.mark.filterwarnings(ALONE)

MIB = 1 << 20
DTYPES = [torch.int8, torch.bfloat16, torch.int16, torch.float32, torch.float64, torch.int64, torch.complex64]
DTYPES.append(torch.complex128)
SIZES = [(1001, 1339), (1003, 1341), (7, 200_003), (2_400_011,), (3, 801, 517)]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of which none is zero and few are alike."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) % 113 + 1).to(dtype).reshape(shape)


def saved(folder: Path, tensor: torch.Tensor) -> str:
    """The folder of a checkpoint that has the tensor as ``k``."""
    dcp.save({"k": tensor}, storage_writer=FsspecStorageWriter(str(folder / "c")), no_dist=True)
    return str(folder / "c")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_boxes(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Boxes that begin and end anywhere are those of the tensor."""
    tensor = made(shape, dtype)
    path = saved(tmp_path, tensor)
    boxes = [
        tuple(slice(1, size - 1) for size in shape),
        tuple(slice(size // 3 + 1, size // 2 + 2) for size in shape),
        (*(slice(0, size) for size in shape[:-1]), slice(1, shape[-1])),
        (slice(shape[0] // 2, shape[0]), *(slice(0, max(size // 2, 1)) for size in shape[1:])),
    ]
    for box in boxes:
        found = load_keys(path, keys=["k"], slices={"k": box})["k"]
        assert torch.equal(found, tensor[box]), box


TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda like: torch.zeros(like.shape, dtype=torch.float64),
    "transposed": lambda like: torch.zeros(like.shape[::-1], dtype=like.dtype).permute(*range(like.dim())[::-1]),
    "every other": lambda like: torch.zeros((*like.shape, 2), dtype=like.dtype)[..., 0],
    "its own": torch.zeros_like,
}


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions(part_size=MIB, memory_budget=MIB)], ids=["", "narrow"])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("turned", [False, True], ids=["", "saved transposed"])
def test_whole_tensors_into_odd_targets(tmp_path: Path, kind: str, turned: bool, options: LoadOptions) -> None:
    """A target of another dtype or layout gets every element, also where the budget cuts the tensor in pieces."""
    for shape in ((24_000_032 // 8,), (1001, 1339)):
        tensor = made(shape, torch.float32)
        tensor = tensor.t().contiguous().t() if turned and len(shape) == 2 else tensor
        path = saved(tmp_path / str(len(shape)), tensor)
        into = {"k": TARGETS[kind](tensor)}
        dcp.load(into, storage_reader=FsspecStorageReader(path, options=options), no_dist=True)
        assert torch.equal(into["k"], tensor.to(into["k"].dtype))


def resharded(rank: int, world: int, path: str, share: bool) -> list[int]:
    """How many elements of each kind of target are wrong on this rank."""
    tensor = made((1001, 1340), torch.float32)
    wrong = []
    grid: Any = init_device_mesh("cpu", (3, 2))
    flat = init_device_mesh("cpu", (6,))
    for mesh, placements, dtype in (
        (flat, [Shard(0)], torch.bfloat16),
        (flat, [Shard(1)], torch.float32),
        (grid, [Shard(0), Shard(1)], torch.float32),
    ):
        for whole in (False, True):
            into: dict[str, Any] = {"k": distribute_tensor(torch.zeros(tensor.shape, dtype=dtype), mesh, placements)}
            if whole:
                DCP.load(into, checkpoint_id=path, allow_dtype_cast=True, options=LoadOptions(share_reads=share))
            else:
                options = LoadOptions(share_reads=share)
                group = dist.group.WORLD if share else None
                dcp.load(into, storage_reader=FsspecStorageReader(path, options=options, process_group=group))
            assert isinstance(into["k"], DTensor)
            wanted = distribute_tensor(tensor.to(dtype), mesh, placements).to_local()
            wrong.append(int((into["k"].to_local() != wanted).sum()))
    return wrong


@pytest.mark.parametrize("share", [False, True], ids=["each for itself", "shared"])
def test_resharding(tmp_path: Path, ranks: RankPool, share: bool) -> None:
    """Six ranks get their parts of a tensor that was saved whole: by rows in another dtype, by columns, and both."""
    path = saved(tmp_path, made((1001, 1340), torch.float32))
    for wrong in ranks.run(resharded, 6, path, share):
        assert wrong == [0] * 6


def test_the_borders_are_odd() -> None:
    """The sizes above are such that blocks do end within elements: else nothing here would be tested."""
    odd = [shape for shape in SIZES if (-(-int(torch.tensor(shape).prod()) * 4 // 128)) % 4]
    assert len(odd) >= 3
