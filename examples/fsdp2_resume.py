"""Train on two ranks with FSDP2, save the whole state in one call, and resume in new processes: the same losses.

Run it: python examples/fsdp2_resume.py
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcp_storage import DCP, RngState

WORLD = 2


def train(rank: int, port: int, folder: str, resume: bool) -> list[float]:
    """What each rank does: six steps, saved after the third; or the last three of them, from the checkpoint."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(rank if not resume else 99)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

    # Everything that the run is made of. What is alive is filled in place, "step" is replaced.
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": RngState(),  # every rank's own
        "step": 0,
    }
    if resume:
        report = DCP.load(state, checkpoint_id=f"{folder}/step-3")
        assert report.per_rank == {"rng": "own"}

    losses = []
    for step in range(state["step"], 6):
        batch = torch.randn(8, 16)  # from the generator that the checkpoint has, too
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step == 2 and not resume:
            DCP.save({**state, "step": 3}, checkpoint_id=f"{folder}/step-3")

    dist.destroy_process_group()
    return losses


def launch(folder: str, resume: bool) -> list[list[float]]:
    """Runs the ranks, each in a new process, and returns the losses of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(WORLD, get_context("spawn")) as pool:
        return list(pool.map(train, range(WORLD), repeat(port), repeat(folder), repeat(resume)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        whole, resumed = launch(place, resume=False), launch(place, resume=True)
    same = all(one[3:] == two for one, two in zip(whole, resumed, strict=True))
    print("losses of the resumed run:", "the same, bit for bit" if same else "NOT the same")
    sys.exit(not same)
