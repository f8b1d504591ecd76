"""Jobs whose ranks hold different keys, or none: stages of a pipeline, each on ranks of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_storage.testing.ranks import RankPool
from tests.e2e import Place, place_of

Job = tuple[int, int, int]

LAYERS = 5
SHAPE = (11, 3)


def weight(layer: int) -> torch.Tensor:
    return torch.arange(33, dtype=torch.float64).reshape(SHAPE) + 1000 * (layer + 1)


def layers_of(stage: int, stages: int) -> list[int]:
    """The layers of one stage, as even as may be; with more stages than layers the last have none."""
    return [layer for layer in range(LAYERS) if layer * stages // LAYERS == stage]


def state_of(rank: int, stages: int, width: int, real: bool) -> dict[str, Any]:
    """What a rank of a pipeline holds: its stage's layers, sharded over the ranks of its stage, and their steps.

    Args:
        rank: of the job; those beyond ``stages * width`` hold nothing.
        stages: of the pipeline.
        width: ranks of each stage.
        real: the true values; else what a load has to replace.
    """
    state: dict[str, Any] = {}
    for stage in range(stages):
        members = list(range(stage * width, (stage + 1) * width))
        mesh = DeviceMesh("cpu", members)  # every rank of the job takes part in making it
        if rank in members:
            for layer in layers_of(stage, stages):
                source = weight(layer) if real else torch.full(SHAPE, -7.0, dtype=torch.float64)
                state[f"layers.{layer}.weight"] = distribute_tensor(source, mesh, [Shard(0)])
                state[f"layers.{layer}.step"] = 100 + layer if real else None
    return state


def save_ranks(rank: int, world: int, place: Place, stages: int, width: int) -> int:
    state = state_of(rank, stages, width, real=True)
    dcp.save(state, storage_writer=place.writer())
    return len(state)


def load_ranks(rank: int, world: int, place: Place, stages: int, width: int) -> tuple[list[str], int, list[str]]:
    """Keys of this rank, elements compared, and what is wrong."""
    found, wanted = (state_of(rank, stages, width, real=real) for real in (False, True))
    dcp.load(found, storage_reader=place.reader())
    wrong, compared = [], 0
    for key, value in wanted.items():
        if isinstance(value, DTensor):
            compared += value.to_local().numel()
            if not torch.equal(found[key].to_local(), value.to_local()):
                wrong.append(key)
        elif found[key] != value:
            wrong.append(key)
    return sorted(found), compared, wrong


MANY = [(1, 1, 1), (1, 3, 3), (2, 1, 3), (2, 4, 8), (6, 1, 6)]
"""Stages, ranks of each, ranks of the job."""


@pytest.mark.parametrize(
    ("kind", "stages", "width", "world", "jobs"),
    [("local", 2, 2, 4, MANY), ("local", 3, 1, 4, MANY[:2]), ("moto", 2, 1, 3, [(3, 1, 4)])],
)
def test_stages_of_a_pipeline(
    request: pytest.FixtureRequest, ranks: RankPool, kind: str, stages: int, width: int, world: int, jobs: list[Job]
) -> None:
    """Stages with keys of their own load into pipelines of other depth and width; ranks without a key take part."""
    place = place_of(request, kind)
    there = Place(place.url, place.options)
    held = ranks.run(save_ranks, world, there, stages, width)
    assert sum(held) == 2 * LAYERS * width
    assert held.count(0) == world - stages * width
    for deep, wide, job in jobs:
        outcomes = ranks.run(load_ranks, job, there, deep, wide)
        assert [wrong for _, _, wrong in outcomes] == [[]] * job, (deep, wide)
        assert sum(compared for _, compared, _ in outcomes) == LAYERS * 33
        assert {key for keys, _, _ in outcomes for key in keys} == {
            f"layers.{layer}.{name}" for layer in range(LAYERS) for name in ("weight", "step")
        }
        assert [keys for keys, _, _ in outcomes].count([]) == job - min(deep, LAYERS) * wide
