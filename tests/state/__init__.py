"""Models, optimizers and the like for the tests of the whole training state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Tied", "assert_equal", "net", "stepped"]


def net(seed: int = 0, width: int = 8) -> nn.Sequential:
    """A small model with two layers and a normalisation, its numbers given by the seed."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator).abs() + 0.1)
    return model


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too, a frozen parameter and a buffer that is not saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight
        self.scratch = nn.Buffer(torch.full((3,), float(seed)), persistent=False)
        self.count = nn.Buffer(torch.tensor(seed))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.inner.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(self.embed(tokens))))  # type: ignore[no-any-return]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Some steps with gradients that follow from the place of each element."""
    for step in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                numbers = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
                parameter.grad = torch.sin(numbers + step).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    """Both are of the same types, and every element of every tensor is the same, bit for bit."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted) or set(found) == set(wanted), where
        for key, value in wanted.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_equal(found[number], value, f"{where}.{number}")
    else:
        assert found == wanted, where
