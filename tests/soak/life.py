"""What each rank of a soak does: saves, loads, deletes, and says what of memory, files and threads it holds."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_storage import (
    CheckpointError,
    CheckpointManager,
    CommitUnknownError,
    LoadOptions,
    PerRank,
    SaveOptions,
    StoreError,
)

__all__ = ["Lived", "Sample", "live"]

ROWS, COLUMNS = 4096, 512  # of the sharded tensor: 8 MiB
PART = 1024 * 1024


@dataclass(frozen=True)
class Sample:
    """What a rank holds at a moment.

    Attributes:
        seconds: since the rank began.
        memory: resident bytes.
        threads: of this process.
        files: open file descriptors.
    """

    seconds: float
    memory: int
    threads: int
    files: int


@dataclass
class Lived:
    """What a rank did and saw.

    Attributes:
        done: how often each action ended well.
        failed: how often it ended in one of our errors, by its kind.
        said: the text of each error of the store.
        wrong: values that were loaded and are not those that were saved.
        samples: one after each round.
    """

    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def count(self, table: dict[str, int], name: str) -> None:
        """One more of these."""
        table[name] = table.get(name, 0) + 1


def _state(step: int, rank: int, mesh: Any) -> dict[str, Any]:
    """The values of a step: every rank can tell them from the number alone."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + step
    return {
        "weights": distribute_tensor(whole, mesh, [Shard(0)]),
        "same": distribute_tensor(torch.full((1000,), float(step)), mesh, [Replicate()]),
        "own": PerRank(1000 * step + rank),
        "step": step,
    }


def _empty(mesh: Any) -> dict[str, Any]:
    return {
        "weights": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.zeros(1000), mesh, [Replicate()]),
        "own": PerRank(-1),
        "step": -1,
    }


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    def plain(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.to_local()
        return value.value if isinstance(value, PerRank) else value

    out = []
    for key, value in wanted.items():
        mine, theirs = plain(found[key]), plain(value)
        same = torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
        if not same:
            out.append(f"{key} of step {wanted['step']}: {mine!r:.80} instead of {theirs!r:.80}")
    return out


def _sample(begun: float) -> Sample:
    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    return Sample(
        time.monotonic() - begun, memory, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    )


def live(rank: int, world: int, root: str, storage_options: dict[str, Any], seconds: float, seed: int) -> Lived:
    """Saves, loads and prunes a run until the time is over.

    Args:
        rank: of this process.
        world: how many there are.
        root: the run's folder.
        storage_options: lead through the proxy.
        seconds: how long, about.
        seed: decides the order of actions, the same on all ranks.
    """
    lived, choice, begun = Lived(), random.Random(seed), time.monotonic()
    mesh = init_device_mesh("cpu", (world,))
    shared = {"part_size": PART, "memory_budget": 16 * PART, "attempts": 8, "deadline": 30.0}
    manager = CheckpointManager(
        root,
        storage_options=storage_options,
        keep_latest=3,
        grace=timedelta(seconds=20),
        save_options=SaveOptions(**shared),  # type: ignore[arg-type]
        load_options=LoadOptions(**shared),  # type: ignore[arg-type]
    )
    step, known = 0, 0  # the newest step that is known to be committed; a failed save may have committed all the same
    try:
        while True:
            over = [time.monotonic() - begun > seconds]
            dist.broadcast_object_list(over, src=0)  # rank 0's clock decides, so that nobody goes on alone
            if over[0]:
                break
            step += 1
            action = choice.choice(["save", "save", "async_save", "load", "load"]) if step > 2 else "save"
            try:
                if action == "load":
                    found = _empty(mesh)
                    manager.load(found)
                    at = found["step"]
                    lived.wrong += _differences(found, _state(at, rank, mesh))
                    if not known <= at < step:
                        lived.wrong.append(f"step {at} was loaded in round {step}, and {known} had been saved")
                elif action == "save":
                    manager.save(step, _state(step, rank, mesh))
                    known = step
                else:
                    manager.async_save(step, _state(step, rank, mesh)).wait()
                    known = step
                lived.count(lived.done, action)
            except StoreError as error:
                lived.count(lived.failed, f"{action}: {error.kind}")
                lived.said.append(str(error))
            except CheckpointError as error:
                lived.count(lived.failed, f"{action}: {error.kind}")
                if action == "load" or not isinstance(error, CommitUnknownError):
                    lived.wrong.append(f"round {step}, {action}: {type(error).__name__}: {error}")
            lived.samples.append(_sample(begun))
    finally:
        manager.close()
    return lived
