"""Meshes of two dimensions on 4 ranks: FSDP2 with tensor parallelism, HSDP, plain FSDP2, and from each to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

from dcp_storage import DCP
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE
from tests.state import assert_equal


class Block(nn.Module):
    """Two layers that tensor parallelism splits, and sizes that 2 and 4 do not divide."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 5)
        self.odd = nn.Linear(5, 7)
        self.scale = nn.Buffer(torch.tensor(float(seed)))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def make(kind: str, seed: int) -> nn.Module:
    model = Block(seed)
    if kind == "fsdp x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


def train(model: nn.Module, optimizer: AdamW, steps: int = 2) -> None:
    for number in range(steps):
        model(torch.linspace(-1, 1, 15).reshape(3, 5) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """Model and optimizer state under plain names, every tensor of them whole."""

    def full(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    state = {name: full(value).clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for what, value in optimizer.state[parameter].items():
            state[f"{name}.{what}"] = full(value).clone()
    return state


def on_the_way(rank: int, world: int, path: str, kinds: list[str]) -> Any:
    """Each kind loads what the one before saved, trains on and saves; beside it the same on one process, unsharded."""
    reference = Block(1)
    beside = AdamW(reference.parameters(), lr=0.01)
    saved: dict[str, Any] | None = None
    placements = []
    for number, kind in enumerate(kinds):
        model = make(kind, 1 if saved is None else 50 + number)
        optimizer = AdamW(model.parameters(), lr=0.01 if saved is None else 0.5)
        if saved is not None:
            if number % 2:
                train(model, optimizer, 1)  # so that its own state has to give way
            report = DCP.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{path}/{number - 1}")
            assert not report.untouched
            assert_equal(whole(model, optimizer), saved)
        train(model, optimizer)
        train(reference, beside)
        saved, wanted = whole(model, optimizer), whole(reference, beside)
        for name, value in wanted.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-4)
        placements.append(getattr(model.get_parameter("up.weight"), "placements", ()))
        DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{path}/{number}")
    return placements, saved


KINDS = ["fsdp x tp", "hsdp", "fsdp x tp", "fsdp", "hsdp", "fsdp", "fsdp x tp"]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings(ALONE)
def test_from_mesh_to_mesh_and_back(tmp_path: Path, ranks: RankPool) -> None:
    """Every number of model and optimizer arrives bit for bit in each layout, and training goes on as unsharded."""
    out = ranks.run(on_the_way, 4, str(tmp_path), KINDS, timeout=150)
    for placements, saved in out:
        # What each kind is: two dimensions that both cut, a replicated one before one that cuts, and one alone.
        assert [len(found) for found in placements] == [2, 2, 2, 1, 2, 1, 2]
        assert all(
            isinstance(found[0], Replicate) for found, kind in zip(placements, KINDS, strict=True) if kind == "hsdp"
        )
        assert all(isinstance(found[-1], Shard) for found in placements)
        assert_equal(saved, out[0][1])
    alone = Block(9)
    optimizer = AdamW(alone.parameters(), lr=0.5)
    DCP.load({"model": alone, "optimizer": optimizer}, checkpoint_id=tmp_path / str(len(KINDS) - 1))
    assert_equal(whole(alone, optimizer), out[0][1])
    DCP.save({"model": alone, "optimizer": optimizer}, checkpoint_id=tmp_path / "alone")
    plain = {"model": {name: torch.zeros_like(value) for name, value in alone.state_dict().items()}}
    load(plain, storage_reader=FileSystemReader(tmp_path / str(len(KINDS) - 1)), no_dist=True)
    assert_equal(plain["model"], dict(alone.state_dict()))
    again = ranks.run(back, 4, str(tmp_path / "alone"), timeout=60)
    for saved in again:
        assert_equal(saved, out[0][1])


def back(rank: int, world: int, path: str) -> dict[str, Any]:
    model = make("fsdp x tp", 3)
    optimizer = AdamW(model.parameters(), lr=0.5)
    DCP.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return whole(model, optimizer)
