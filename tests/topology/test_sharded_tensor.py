"""torch's older ShardedTensor: saved in pieces, loaded in others, and into plain tensors and DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Sharded

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from dcp_storage.testing.ranks import RankPool

ROWS, COLUMNS = 13, 6

Box = tuple[int, int, int, int]
"""First row, rows, first column, columns."""

PIECES: dict[str, list[list[Box]]] = {
    "four uneven": [[(0, 5, 0, 6)], [(5, 1, 0, 6)], [(6, 4, 0, 6)], [(10, 3, 0, 6)]],
    "four, one of them with none": [[(0, 7, 0, 2), (0, 7, 2, 4)], [], [(7, 6, 0, 5)], [(7, 6, 5, 1)]],
    "two": [[(0, 9, 0, 6)], [(9, 4, 0, 6)]],
    "three columns": [[(0, 13, 0, 1)], [(0, 13, 1, 2)], [(0, 13, 3, 3)]],
    "one": [[(0, 13, 0, 6)]],
}


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 0.5


def part(box: Box) -> torch.Tensor:
    row, rows, column, columns = box
    return whole()[row : row + rows, column : column + columns].contiguous()


def sharded(rank: int, boxes: list[Box], real: bool) -> ShardedTensor:
    shards = [
        Shard.from_tensor_and_offsets(part(box) if real else torch.full_like(part(box), -7), [box[0], box[2]], rank)
        for box in boxes
    ]
    return init_from_local_shards(shards, ROWS, COLUMNS)


def save_ranks(rank: int, world: int, folder: str, pieces: str) -> None:
    state = {"weight": sharded(rank, PIECES[pieces][rank], real=True)}
    dcp.save(state, storage_writer=FsspecStorageWriter(folder))


def load_sharded(rank: int, world: int, folder: str, pieces: str) -> tuple[int, int]:
    """Elements compared, elements that differ."""
    state = {"weight": sharded(rank, PIECES[pieces][rank], real=False)}
    dcp.load(state, storage_reader=FsspecStorageReader(folder))
    shards = [shard.tensor for shard in state["weight"].local_shards()]
    wanted = [part(box) for box in PIECES[pieces][rank]]
    differing = sum(int((a != b).sum()) for a, b in zip(shards, wanted, strict=True))
    return sum(piece.numel() for piece in wanted), differing


def load_other(rank: int, world: int, folder: str) -> list[bool]:
    """Whether a plain tensor and a DTensor sharded by columns hold what they must."""
    mesh = init_device_mesh("cpu", (world,))
    blank = torch.full((ROWS, COLUMNS), -7.0)
    good = []
    for target in (blank.clone(), distribute_tensor(blank, mesh, [Sharded(1)])):
        dcp.load({"weight": target}, storage_reader=FsspecStorageReader(folder))
        good.append(torch.equal(target.full_tensor() if isinstance(target, DTensor) else target, whole()))
    return good


@pytest.mark.parametrize("most", [1, pytest.param(len(PIECES), marks=pytest.mark.slow)])
def test_a_sharded_tensor_is_cut_anew(tmp_path: Path, ranks: RankPool, most: int) -> None:
    """Shards of 4, 2, 3 and 1 ranks, uneven, by rows, by columns and by both, fill those of other cuts, or all."""
    for number, saved in enumerate(PIECES):
        folder = str(tmp_path / str(number))
        ranks.run(save_ranks, len(PIECES[saved]), folder, saved)
        others = [*PIECES, *PIECES][number + 1 : number + 1 + most]
        for wanted in others:
            boxes = PIECES[wanted]
            outcomes = ranks.run(load_sharded, len(boxes), folder, wanted)
            assert sum(compared for compared, _ in outcomes) == ROWS * COLUMNS
            assert sum(differing for _, differing in outcomes) == 0, (saved, wanted)


def test_a_sharded_tensor_fills_other_kinds_of_tensors(tmp_path: Path, ranks: RankPool) -> None:
    """What four ranks saved as a ShardedTensor fills whole tensors and DTensors on three."""
    folder = str(tmp_path / "one")
    ranks.run(save_ranks, 4, folder, "four uneven")
    assert ranks.run(load_other, 3, folder) == [[True, True]] * 3
