"""The states that are saved and loaded: shapes from the field, random values, made the same in every process."""

from __future__ import annotations

import torch

__all__ = ["STATES", "empty_like", "is_state", "make_state", "size_of"]

ROWS = 125  # of the state that is one tensor: 64 MB each, the first one and a number added to it
GPT2_SMALL = {"layers": 12, "width": 768, "vocabulary": 50257, "context": 1024}


def _gpt2(layers: int, width: int, vocabulary: int, context: int) -> dict[str, tuple[int, ...]]:
    """The parameters of GPT-2 (Radford et al. 2019; output layer tied to the embedding)."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}
    for k in range(layers):
        at = f"h.{k}"
        for norm in ("ln_1", "ln_2"):
            shapes[f"{at}.{norm}.weight"] = shapes[f"{at}.{norm}.bias"] = (width,)
        for name, out, into in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes[f"{at}.{name}.weight"] = (out, into)
            shapes[f"{at}.{name}.bias"] = (out,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def _with_adamw(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    out = {f"model.{name}": shape for name, shape in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        out.update({f"optimizer.state.{name}.{moment}": shape for name, shape in shapes.items()})
    return out


def _shapes(state: str) -> dict[str, tuple[int, ...]]:
    if state == "gpt2":  # 124 million parameters and AdamW: 1.49 GB
        return _with_adamw(_gpt2(**GPT2_SMALL))
    if state == "gpt2-6":  # half its layers, a tenth of its vocabulary: 0.56 GB
        return _with_adamw(_gpt2(**{**GPT2_SMALL, "layers": 6, "vocabulary": 5000}))
    if state == "gpt2-2":  # 0.22 GB, for --quick
        return _with_adamw(_gpt2(**{**GPT2_SMALL, "layers": 2, "vocabulary": 5000}))
    if state == "gpt2-medium":  # 355 million parameters and AdamW: 4.3 GB
        return _with_adamw(_gpt2(24, 1024, 50257, 1024))
    if state == "small":  # 10,000 tensors of 4 KB
        return {f"t.{k}": (1024,) for k in range(10_000)}
    if state == "one-8gb":  # 8 GB in one tensor
        return {"t": (2_000_000_000,)}
    if state == "warm":
        return {"t": (262_144,)}
    raise ValueError(f"There is no state {state!r}.")


STATES = ("gpt2", "gpt2-6", "gpt2-2", "gpt2-medium", "small", "one-8gb")


def make_state(state: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors; every process with the same seed makes the same."""
    generator = torch.Generator().manual_seed(seed)
    if state == "one-8gb":
        rows = torch.empty(_shapes(state)["t"]).view(ROWS, -1)
        block = torch.randn(rows.shape[1], generator=generator)
        for number, row in enumerate(rows):
            torch.add(block, number, out=row)
        return {"t": rows.view(-1)}
    return {name: torch.randn(shape, generator=generator) for name, shape in _shapes(state).items()}


def empty_like(state: str) -> dict[str, torch.Tensor]:
    """Tensors to load into, their pages touched, so that a load is not timed by the kernel's zeroing."""
    return {name: torch.full(shape, -1.0) for name, shape in _shapes(state).items()}


def is_state(tensors: dict[str, torch.Tensor], state: str, seed: int = 0) -> bool:
    """Whether the tensors are those of :func:`make_state`; holds no second large state to find out."""
    generator = torch.Generator().manual_seed(seed)
    if state == "one-8gb":
        rows = tensors["t"].view(ROWS, -1)
        block = torch.randn(rows.shape[1], generator=generator)
        return all(torch.equal(row, block + number) for number, row in enumerate(rows))
    return all(
        torch.equal(tensors[name], torch.randn(shape, generator=generator)) for name, shape in _shapes(state).items()
    )


def size_of(state: dict[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in state.values())
