"""A small transformer that is trained on several ranks: what resuming is held to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcp_storage import DCP, PerRank, RngState

__all__ = ["WORDS", "Transformer", "run", "run_elsewhere"]

WORDS = 32
LENGTH = 8
STEPS = 40
SAVE_AT = 20


class Transformer(nn.Module):
    """Two encoder layers, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]


def make(world: int, dropout: float) -> tuple[nn.Module, AdamW, CosineAnnealingLR]:
    torch.manual_seed(1)
    model = Transformer(dropout)
    if world > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, CosineAnnealingLR(optimizer, STEPS)


def sentence(number: int) -> torch.Tensor:
    return (torch.arange(LENGTH + 1) * (number % 7 + 1) + number) % WORDS


class Sentences(torch.utils.data.Dataset[torch.Tensor]):
    """The share of one rank; each item's first word tells which it is."""

    def __init__(self, rank: int, world: int) -> None:
        self.numbers = range(rank, 1024, world)  # more than the steps of one epoch: see docs/training-state.md

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([self.numbers[index]]), sentence(self.numbers[index])])


def learn(model: nn.Module, optimizer: AdamW, schedule: CosineAnnealingLR, batch: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    return loss.item()


def run(rank: int, world: int, path: str, part: str) -> tuple[list[float], list[list[int]], dict[str, str]]:
    """Losses and sentences: of a whole run, of one that saves in its middle, or of the second half of it."""
    warnings.simplefilter("ignore")  # torchdata 0.11 calls what torch 2.13 has deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader

    model, optimizer, schedule = make(world, 0.1)
    torch.manual_seed(1000 + rank if part != "resumed" else 5)
    own = torch.Generator().manual_seed(rank if part != "resumed" else 77)
    loader: Any = StatefulDataLoader(Sentences(rank, world), batch_size=4, shuffle=True, generator=own)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": schedule,
        "rng": RngState(),
        "loader": PerRank(loader),
        "step": 0,
    }
    outcome: dict[str, str] = {}
    if part == "resumed":
        outcome = DCP.load(state, checkpoint_id=path).per_rank
        assert state["step"] == SAVE_AT

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    losses, order = [], []
    for step, batch in zip(range(state["step"], STEPS), batches(), strict=False):
        order.append(batch[:, 0].tolist())
        losses.append(learn(model, optimizer, schedule, batch[:, 1:]))
        if part == "saving" and step + 1 == SAVE_AT:
            DCP.save({**state, "step": SAVE_AT}, checkpoint_id=path)
    return losses, order, outcome


def run_elsewhere(rank: int, world: int, path: str, part: str) -> list[float]:
    """Mean losses of steps with one batch for all ranks, without dropout, so that only sums are added differently."""
    model, optimizer, schedule = make(world, 0.0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": schedule, "step": 0}
    if part != "saving":
        keys = {"optimizer.state": None} if part == "forgetful" else None
        DCP.load(state, checkpoint_id=path, keys=keys)
    losses = []
    for step in range(state["step"], STEPS):
        batch = torch.stack([sentence(step * 8 + number) for number in range(8)])
        loss = torch.tensor(learn(model, optimizer, schedule, batch.chunk(world)[rank]))
        if world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / world)
        if part == "saving" and step + 1 == SAVE_AT:
            DCP.save({**state, "step": SAVE_AT}, checkpoint_id=path)
    return losses
