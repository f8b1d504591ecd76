"""Save a model that tensor parallelism splits over two ranks; load it with FSDP2 on three, and in one process.

Run it: python examples/tp_reshard.py
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_storage import DCP


class Mlp(nn.Module):
    """Two layers; sizes that three ranks cannot share evenly are no obstacle."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 20)
        self.down = nn.Linear(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up and down again."""
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def start(rank: int, world: int, port: int) -> None:
    """Makes the process group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def save_tp(rank: int, world: int, port: int, path: str) -> None:
    """On two ranks: columns of one layer, rows of the other."""
    start(rank, world, port)
    torch.manual_seed(0)
    model = Mlp()
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    dist.destroy_process_group()


def load_fsdp(rank: int, world: int, port: int, path: str) -> None:
    """On three ranks: rows of everything. Each reads only the bytes of its own rows."""
    start(rank, world, port)
    model = Mlp()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    report = DCP.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    assert not report.untouched

    alone = whole(path)
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, alone.state_dict()[name]), name
    if rank == 0:
        print("3 ranks with FSDP2 have what 2 ranks with tensor parallelism saved")
    dist.destroy_process_group()


def whole(path: str) -> nn.Module:
    """In one process, without any group."""
    model = Mlp()
    DCP.load({"model": model}, checkpoint_id=path, no_dist=True)
    return model


def run(function: Callable[..., Any], world: int, path: str) -> None:
    """Starts the ranks and waits for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(world, get_context("spawn")) as pool:
        list(pool.map(function, range(world), repeat(world), repeat(port), repeat(path)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(save_tp, 2, f"{folder}/c")
        run(load_fsdp, 3, f"{folder}/c")
        print("1 process has", sum(value.numel() for value in whole(f"{folder}/c").parameters()), "numbers")
