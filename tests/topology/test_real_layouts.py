"""Strided layouts are those of FSDP2 with tensor parallelism; where torch describes them wrongly we refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_storage import CheckpointError, FsspecStorageWriter
from dcp_storage.testing.ranks import RankPool
from tests.e2e import Place, raised_by
from tests.topology.layouts import layout_named
from tests.topology.source import TENSORS, differing, whole

FLOATS = [name for name, (shape, dtype) in TENSORS.items() if dtype in {torch.float32, torch.float64} and shape]


def fsdp_and_tp(source: torch.Tensor, outer: int, inner: int) -> DTensor:
    """A parameter sharded by rows over ``inner`` ranks, then by ``fully_shard`` over ``outer`` ones."""
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(source, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    assert isinstance(module.weight, DTensor)
    return module.weight


def compare_ranks(rank: int, world: int, outer: int, inner: int) -> list[str]:
    layout = layout_named(world, f"strided@{outer}x{inner}")
    wrong = []
    for name in FLOATS:
        made = fsdp_and_tp(whole(name), outer, inner)
        box = layout.box(made.shape, rank)
        assert box is not None
        if list(made.placements) != layout.placements(made.ndim) or differing(made.to_local(), whole(name)[box]):
            wrong.append(f"{name}: {made.placements}, {made.to_local().shape}")
    return wrong


@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (4, 2), (2, 4)])
def test_strided_layouts_are_those_of_fsdp_and_tensor_parallelism(ranks: RankPool, outer: int, inner: int) -> None:
    """Placements and local parts of the matrix equal those that torch itself makes."""
    world = outer * inner
    assert ranks.run(compare_ranks, world, outer, inner) == [[]] * world


def save_misdescribed(rank: int, world: int, folder: str) -> Any:
    state = {"good": torch.ones(3), "weight": fsdp_and_tp(torch.arange(63.0).reshape(9, 7), 4, 2)}
    return raised_by(lambda: dcp.save(state, storage_writer=FsspecStorageWriter(folder)))


def test_a_part_that_is_not_as_it_was_planned_is_refused(tmp_path: Path, ranks: RankPool) -> None:
    """Of 9 rows on 4x2 ranks torch says that two ranks hold others than they do: the save fails, naming the key."""
    for outcome in ranks.run(save_misdescribed, 8, str(tmp_path / "one")):
        assert sorted(outcome) == [6, 7]
        for error in outcome.values():
            assert isinstance(error, CheckpointError)
            assert error.key == "weight"
    assert Place(str(tmp_path / "one")).commits() == []
