"""A small transformer under each kind of parallelism, trained for some steps, on the ranks of a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.e2e import Place

__all__ = ["Job", "Transformer", "train"]

WORDS, WIDTH, HEADS, INNER, LENGTH, BATCH = 67, 36, 4, 52, 12, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        seen = self.before(x)
        query, key, value = (
            part(seen).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(self.between(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predicts the next word. Its sizes do not divide by the numbers of ranks: 67 words, 36 wide, 52 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Job:
    """How the model is trained.

    Attributes:
        kind: ``"plain"``, ``"ddp"``, ``"fsdp"``, ``"hsdp"`` or ``"fsdp+tp"``.
        mesh: sizes of the mesh; their product is the number of ranks.
    """

    kind: str
    mesh: tuple[int, ...]

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()

    def __str__(self) -> str:
        return f"{self.kind}@{'x'.join(map(str, self.mesh))}"


def build(job: Job) -> tuple[nn.Module, int]:
    """The model, and how many ranks share each slice of the batch."""
    torch.manual_seed(0)
    model = Transformer()
    if job.kind == "plain":
        return model, 1
    if job.kind == "ddp":
        return DistributedDataParallel(model), 1
    names = ("outer", "inner")[: len(job.mesh)]
    mesh = init_device_mesh("cpu", job.mesh, mesh_dim_names=names)
    data = mesh
    if job.kind == "fsdp+tp":
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {"query": columns, "key": columns, "value": columns, "up": columns, "out": rows, "down": rows}
        for block in model.blocks:
            parallelize_module(block, mesh["inner"], plan)
        data = mesh["outer"]
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model, job.mesh[1] if job.kind == "fsdp+tp" else 1


def train(
    rank: int,
    world: int,
    job: Job,
    steps: int,
    start: int,
    source: Place | None = None,
    target: Place | None = None,
    parts: tuple[str, ...] = ("model", "optimizer"),
) -> list[float]:
    """Trains from step ``start`` on, and returns each step's loss over the whole batch, the same on all ranks.

    Args:
        rank: of the job.
        world: its ranks.
        job: how.
        steps: how many.
        start: number of the first: each step has its own data, whatever the number of ranks.
        source: a checkpoint that is loaded before.
        target: where to save after three steps.
        parts: what is taken from ``source``.
    """
    model, sharing = build(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if source is not None:
        state = _state(model, optimizer)
        wanted = {name: state[name] for name in parts}
        dcp.load(wanted, storage_reader=source.reader())
        state |= wanted
        if "optimizer" in parts:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            set_state_dict(model, [], model_state_dict=state["model"], optim_state_dict={})
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    groups, group = world // sharing, rank // sharing
    for step in range(start, start + steps):
        if target is not None and step == start + 3:
            dcp.save(_state(model, optimizer), storage_writer=target.writer())
        random = torch.Generator().manual_seed(step)
        batch = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=random)
        mine = batch[group * BATCH // groups : (group + 1) * BATCH // groups]
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        losses.append(shared.item() / world)
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}
