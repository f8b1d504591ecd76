"""What the checkpoints of the crash tests hold: other values in every version, known here and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["PART", "SHARD", "BrokenError", "blank", "state", "version_in"]

PART = 64 * 1024
"""Bytes of one part: the large tensor goes in three of them."""

SHARD = 100_000
"""Bytes after which the next file begins: the large tensor has one, the rest another."""

_LARGE = 40_000  # elements of the large tensor


class BrokenError(AssertionError):
    """What is in a folder is neither the old state nor the new one nor plainly nothing."""


@functools.lru_cache(maxsize=64)
def state(version: int, rank: int = 0) -> Mapping[str, Any]:
    """Two tensors and an object; nobody may change them."""
    return {
        f"large-{rank}": torch.arange(_LARGE, dtype=torch.float32) + 1000 * version + rank,
        f"small-{rank}": torch.full((7,), 10 * version + rank, dtype=torch.int64),
        f"note-{rank}": f"version {version} of rank {rank}",
    }


def blank(rank: int = 0) -> dict[str, Any]:
    """A template of :func:`state` that no version equals."""
    return {
        f"large-{rank}": torch.full((_LARGE,), -7.0),
        f"small-{rank}": torch.full((7,), -7, dtype=torch.int64),
        f"note-{rank}": None,
    }


def version_in(found: dict[str, Any], ranks: int = 1) -> int:
    """Which version was loaded, compared bit for bit.

    Raises:
        BrokenError: none, or a mixture.
    """
    note = found["note-0"]
    version = int(note.split()[1]) if isinstance(note, str) else -1
    for rank in range(ranks):
        for key, wanted in state(version, rank).items():
            same = torch.equal(found[key], wanted) if isinstance(wanted, torch.Tensor) else found[key] == wanted
            if not same:
                raise BrokenError(f"a mixture: {key} is not that of version {version}")
    return version
