"""A first proof of topology: DTensors saved by four ranks, loaded by four, two, three and one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.testing.ranks import RankPool
from tests.e2e import place_of

SHAPES = {"even": (16, 6), "five-rows": (5, 8), "one-row": (1, 9), "no-rows": (0, 3), "line": (13,), "cube": (7, 5, 6)}


def whole(name: str) -> torch.Tensor:
    """The source: each element by formula from its place and the tensor's name."""
    shape = SHAPES[name]
    grid = torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in shape), indexing="ij")
    out = torch.zeros(shape, dtype=torch.float64) + 1e9 * list(SHAPES).index(name)
    for axis, places in enumerate(grid):
        out += (places + 1) * 1000**axis
    return out


def placements(world: int) -> dict[str, Any]:
    """All layouts: on one dimension of ranks, and on a mesh of two where their number allows."""
    flat = init_device_mesh("cpu", (world,))
    out = {"rows": (flat, [Shard(0)]), "columns": (flat, [Shard(1)]), "copies": (flat, [Replicate()])}
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        out |= {"rows+columns": (mesh, [Shard(0), Shard(1)]), "copies+rows": (mesh, [Replicate(), Shard(0)])}
    return out


def tensor(name: str, layout: Any, source: torch.Tensor) -> DTensor | torch.Tensor:
    mesh, kinds = layout
    kinds = [Shard(0) if kind == Shard(1) and len(SHAPES[name]) < 2 else kind for kind in kinds]
    return distribute_tensor(source, mesh, kinds)


def save_all(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    state = {
        f"{name}/{layout}": tensor(name, at, whole(name)) for layout, at in placements(world).items() for name in SHAPES
    }
    state["plain"] = torch.arange(11.0)
    writer = FsspecStorageWriter(url, storage_options=options, options=SaveOptions(shard_size=1500))
    dcp.save(state, storage_writer=writer)


def load_all(rank: int, world: int, url: str, options: dict[str, Any], saved: list[str], wanted: str) -> list[str]:
    """Loads every saved layout into one other layout; names what is wrong."""
    at = placements(world)[wanted]
    state: dict[str, Any] = {
        f"{name}/{layout}": tensor(name, at, torch.full_like(whole(name), -7)) for layout in saved for name in SHAPES
    }
    state["plain"] = torch.full((11,), -7.0)
    reader = FsspecStorageReader(url, storage_options=options, options=LoadOptions(part_size=1 << 16, max_gap=0))
    dcp.load(state, storage_reader=reader)
    wrong = [] if torch.equal(state.pop("plain"), torch.arange(11.0)) else ["plain"]
    for key, value in state.items():
        mine = tensor(key.partition("/")[0], at, whole(key.partition("/")[0]))
        assert isinstance(mine, DTensor)
        if not torch.equal(value.to_local(), mine.to_local()):
            wrong.append(key)
    return wrong


LAYOUTS = ["rows", "columns", "copies", "rows+columns", "copies+rows"]


@pytest.mark.parametrize("kind", ["local", pytest.param("moto", marks=pytest.mark.slow)])
def test_four_ranks_to_four_two_three_and_one(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """Every layout on four ranks loads into every layout on 4, 2, 3 and 1 ranks, each element by its formula."""
    place = place_of(request, kind)
    ranks.run(save_all, 4, place.url, place.options, timeout=90)
    checked = 0
    for world in (4, 2, 3, 1):
        for wanted in LAYOUTS if world == 4 else LAYOUTS[:3]:
            if kind == "moto" and wanted not in {"columns", "rows+columns"}:
                continue
            outcomes = ranks.run(load_all, world, place.url, place.options, LAYOUTS, wanted, timeout=90)
            assert outcomes == [[]] * world, (world, wanted)
            checked += 1
    assert checked == (14 if kind == "local" else 5)


def save_flat(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    at = placements(world)["rows"]
    state = {name: tensor(name, at, whole(name)) for name in SHAPES}
    dcp.save(state, storage_writer=FsspecStorageWriter(url, storage_options=options))


def load_plain(rank: int, world: int, url: str, options: dict[str, Any]) -> list[str]:
    state = {name: torch.full_like(whole(name), -7) for name in SHAPES}
    dcp.load(state, storage_reader=FsspecStorageReader(url, storage_options=options))
    return [name for name in SHAPES if not torch.equal(state[name], whole(name))]


@pytest.mark.parametrize("world", [1, 3])
def test_shards_load_into_plain_tensors(request: pytest.FixtureRequest, ranks: RankPool, world: int) -> None:
    """What was sharded over three ranks fills whole plain tensors on one rank and on three."""
    place = place_of(request, "local")
    ranks.run(save_flat, 3, place.url, place.options)
    assert ranks.run(load_plain, world, place.url, place.options) == [[]] * world
