"""The model, the text and the training loop of the demo; nothing here knows where checkpoints go.

The batch is a function of the step and there is no dropout, so two runs that begin with the same state compute the
same losses, up to the order in which floating-point numbers are added.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

__all__ = ["ByteTransformer", "Trainer", "read_text"]

CONTEXT = 64
BATCH = 16
WIDTH = 128
HEADS = 4
LAYERS = 3
TEXT_BYTES = 2_000_000


def read_text() -> torch.Tensor:
    """The sources of Python's standard library as one tensor of bytes: a text that every machine has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


class Block(nn.Module):
    """One layer: causal attention and a feed-forward part, each beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for ``x`` (batch, time, width)."""
        batch, time, _ = x.shape
        normed = self.norm1(x)
        # -1 and not HEADS: under tensor parallelism each rank has its share of the heads.
        query, key, value = (
            part(normed).view(batch, time, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, -1))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x  # noqa: RET504 - named for its type


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte at every place of ``text`` (batch, time): one row for each place."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).flatten(0, 1))  # type: ignore[no-any-return]


def _shard_by_rows(model: ByteTransformer, world: int) -> None:
    """FSDP2: every parameter split over all ranks along its first dimension."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _shard_by_columns(model: ByteTransformer, world: int) -> None:
    """FSDP2 with another placement: every matrix split along its second dimension."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)


def _split_layers(model: ByteTransformer, world: int) -> None:
    """Tensor parallelism: the layers' matrices are split, the rest is on every rank."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**plan, "out": RowwiseParallel(), "down": RowwiseParallel()})


_LAYOUTS = {"fsdp-rows": _shard_by_rows, "fsdp-columns": _shard_by_columns, "tensor-parallel": _split_layers}


@dataclass
class Trainer:
    """A model, its optimizer and the text, on all ranks of the default process group.

    Attributes:
        layout: ``"fsdp-rows"``, ``"fsdp-columns"`` or ``"tensor-parallel"``: how the model is spread over the ranks.
        rank: this rank.
        world: how many there are.
        seed: of the first weights.
    """

    layout: str
    rank: int
    world: int
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = ByteTransformer()
        _LAYOUTS[self.layout](self.model, self.world)
        self.renew_optimizer()
        self.text = read_text()

    def renew_optimizer(self) -> None:
        """Begins with an optimizer that remembers nothing."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01, foreach=False)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, by torch's own keys: each rank its shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def take(self, state: dict[str, Any]) -> None:
        """Puts a loaded state into the model and the optimizer."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def train(self, first: int, last: int) -> list[float]:
        """Trains steps ``first`` to ``last - 1``; the loss of each over the whole batch."""
        return [self._step(step) for step in range(first, last)]

    def _step(self, step: int) -> float:
        starts = torch.randint(
            len(self.text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(1000 + step)
        )
        if self.layout != "tensor-parallel":  # there every rank sees the whole batch
            starts = starts.chunk(self.world)[self.rank]
        rows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        scores = self.model(rows[:, :-1])
        loss = functional.cross_entropy(scores, rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.world
