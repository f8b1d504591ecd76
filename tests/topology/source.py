"""The tensors of the matrix: each element is a word of bits that follows from its place and its tensor's name."""

from __future__ import annotations

import math

import torch

__all__ = ["TENSORS", "bits_of", "differing", "elements", "inverted", "whole"]

TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((16, 8), torch.float32),
    "no-rows": ((0, 6), torch.float64),
    "one-row": ((1, 9), torch.int64),
    "five-rows": ((5, 8), torch.bfloat16),
    "six-rows": ((6, 4, 3), torch.float16),
    "line": ((13,), torch.complex64),
    "cube": ((7, 5, 6), torch.float64),
    "flags": ((10, 7), torch.bool),
    "eighths": ((11, 10), torch.float8_e4m3fn),
    "few-columns": ((40, 3), torch.int32),
    "wide": ((3, 41), torch.complex128),
    "point": ((), torch.float32),
    "large": ((130, 257), torch.float32),
}

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def whole(name: str) -> torch.Tensor:
    """The whole tensor. All bit patterns occur, NaNs too, which is why only bits are ever compared."""
    shape, dtype = TENSORS[name]
    words = math.prod(shape) * max(dtype.itemsize // 8, 1)
    index = torch.arange(words, dtype=torch.int64) + 1_000_003 * (list(TENSORS).index(name) + 1)
    mixed = (index * 0x5851F42D4C957F2D) ^ (index * 0x2545F4914F6CDD1D >> 29)
    mixed ^= mixed >> 32  # so that the low bits depend on all of them
    if dtype is torch.bool:
        return (mixed & 1).bool().reshape(shape)
    return mixed.to(_WORDS[min(dtype.itemsize, 8)]).view(dtype).reshape(shape)


def elements() -> dict[str, int]:
    """Tensor → how many elements it has."""
    return {name: math.prod(shape) for name, (shape, _) in TENSORS.items()}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers, one row for each element."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8).reshape(-1, 1)
    word = _WORDS[min(flat.dtype.itemsize, 8)]
    return flat.view(word).reshape(flat.numel(), max(flat.dtype.itemsize // 8, 1))


def differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many elements differ in any bit; all of them where dtype or shape differ."""
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return max(found.numel(), wanted.numel(), 1)
    return int((bits_of(found) != bits_of(wanted)).any(dim=1).sum())


def inverted(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype with every bit of every element turned: no element that is not read can look right."""
    if tensor.dtype is torch.bool:
        return ~tensor
    return (~bits_of(tensor)).reshape(-1).view(tensor.dtype).reshape(tensor.shape)
