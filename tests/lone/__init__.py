"""Ranks that save and load without collectives: what each of them holds, and how they wait for each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_storage import CheckpointError, SaveOptions
from tests.e2e import Place, assert_same, assert_sentence, like

__all__ = ["commit_of", "holds", "raised", "save_all", "save_own", "state_of"]

E = TypeVar("E", bound=CheckpointError)


def state_of(rank: int, seed: int = 0) -> dict[str, Any]:
    """What one rank holds: keys that all have with other values on each, and one of its own."""
    return {
        "weight": torch.arange(60_000).reshape(200, 300) + 1_000_000 * rank + 1000 * seed,
        "name": f"rank-{rank}-{seed}",
        f"own-{rank}": torch.full((17,), rank + seed / 8, dtype=torch.float64),
    }


def save_own(place: Place, rank: int, seed: int = 0, label: str | None = None) -> None:
    """Saves this rank's part."""
    writer = place.writer(options=SaveOptions(label=label))
    dcp.save(state_of(rank, seed), storage_writer=writer, use_collectives=False)


def save_all(rank: int, world: int, place: Place, seed: int = 0, label: str | None = None) -> None:
    """On a rank: saves its part."""
    save_own(place, rank, seed, label)


def holds(rank: int, world: int, place: Place, seed: int = 0) -> None:
    """On a rank: loads its part, which must be what this rank saved."""
    found = like(state_of(rank))
    dcp.load(found, storage_reader=place.reader())
    assert_same(found, state_of(rank, seed))


def raised(kind: type[E], call: Callable[[], object]) -> E:
    """The error of ``call``, of exactly this class, raised as it is: no collective wraps it.

    Without collectives torch still ends a save, and the reading of a load, with a barrier; who fails takes part in it
    here, so that the others need not wait for its time-out.
    """
    with pytest.raises(CheckpointError) as caught:
        call()
    if dist.is_initialized():
        dist.barrier()
    assert type(caught.value) is kind, repr(caught.value)
    assert_sentence(str(caught.value))
    return caught.value


def commit_of(place: Place, rank: int) -> dict[str, Any]:
    """A rank's commit object as plain JSON."""
    found: dict[str, Any] = json.loads(place.get(f"__{rank}.commit"))
    return found
