"""What each rank of the demo does: train and save, or load and go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from demo_training import Trainer
from torch.distributed.checkpoint.api import CheckpointException

from dcp_storage import FsspecStorageReader, FsspecStorageWriter

__all__ = ["FirstRun", "Place", "Resumed", "first_run", "resume"]


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is.

    Attributes:
        name: for the table.
        path: a folder or a URL.
        storage_options: what fsspec's filesystem takes.
    """

    name: str
    path: str
    storage_options: dict[str, Any]


@dataclass(frozen=True)
class FirstRun:
    """What the first run came to.

    Attributes:
        losses: of all steps.
        refusals: by the place's name, what a second save said to this rank.
    """

    losses: list[float]
    refusals: dict[str, str]


@dataclass(frozen=True)
class Resumed:
    """What a resumed run came to.

    Attributes:
        losses: of the steps after the checkpoint.
        forgetful: of the same steps, by a run that loaded the weights but not the optimizer.
        bytes_read: bytes that this rank read from the store.
    """

    losses: list[float]
    forgetful: list[float]
    bytes_read: int


def first_run(rank: int, world: int, layout: str, places: list[Place], save_at: int, steps: int) -> FirstRun:
    """Trains all steps without a break; after ``save_at`` of them saves to every place."""
    trainer = Trainer(layout, rank, world)
    losses = trainer.train(0, save_at)
    refusals = {}
    for place in places:
        writer = FsspecStorageWriter(place.path, storage_options=place.storage_options)
        dcp.save(trainer.state(), storage_writer=writer)
        try:
            dcp.save(trainer.state(), storage_writer=writer)
        except CheckpointException as error:
            refusals[place.name] = str(next(iter(error.failures.values()))[0])
    return FirstRun(losses + trainer.train(save_at, steps), refusals)


def resume(rank: int, world: int, layout: str, place: Place, save_at: int, steps: int) -> Resumed:
    """Begins with other weights, loads the checkpoint and trains the rest; then once more without the optimizer."""

    def load() -> Trainer:
        trainer = Trainer(layout, rank, world, seed=1)
        state = trainer.state()
        dcp.load(state, storage_reader=reader)
        trainer.take(state)
        return trainer

    reader = FsspecStorageReader(place.path, storage_options=place.storage_options)
    trainer = load()
    report = reader.report
    losses = trainer.train(save_at, steps)
    trainer = load()
    trainer.renew_optimizer()
    forgetful = trainer.train(save_at, steps)
    return Resumed(losses, forgetful, report.bytes_read if report else 0)
