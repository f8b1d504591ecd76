"""What the other processes of these tests do: they save, prune and delete, and are killed at a store call."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from dcp_storage import CheckpointManager
from dcp_storage.errors import CheckpointError
from dcp_storage.options import LoadOptions
from dcp_storage.store import Store
from dcp_storage.stores.location import Location, parse_location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.tools.delete import delete_at
from dcp_storage.tools.opening import Folder
from dcp_storage.tools.prune import prune_at
from dcp_storage.tools.retention import Rule

__all__ = ["agree", "preempt", "race", "save_together", "state", "swept"]


def state(step: int) -> dict[str, Any]:
    """A state that shows its step."""
    return {"weight": torch.full((64,), float(step)), "step": step}


def race(rank: int, world: int, root: str, options: dict[str, Any], steps: int) -> list[int]:
    """One of several managers that save the same steps, keep two and prune; the steps whose save was its own."""
    manager = CheckpointManager(root, storage_options=options, keep_latest=2, no_dist=True)
    won = []
    for step in range(1, steps + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the other's step, as long as it is unfinished
            try:
                manager.save(step, {"weight": torch.full((64,), float(step)), "step": step, "who": rank})
            except CheckpointError as error:
                if error.kind not in {"exists", "replaced"}:
                    raise
            else:
                won.append(step)
            manager.prune(apply=True)
            assert manager.latest() is not None
    return won


def swept(rank: int, world: int, what: str, root: str, options: dict[str, Any], nth: int) -> None:
    """Prunes or deletes, and is killed by SIGKILL at its n-th request that removes something."""
    faults = [Fault("delete", nth=nth, action="kill")]
    left = [nth]

    def opener(location: Location, storage_options: Mapping[str, Any], most: int) -> Store:
        store = FaultyStore(open_store(location, storage_options, max_concurrency=most), faults)
        del left[:]
        return store

    folder = Folder(parse_location(root), options, LoadOptions(max_concurrency=1), opener)
    if what == "prune":
        prune_at(folder, Rule(keep_latest=1), grace=7 * 86400.0, apply=True, assume_single_writer=False)
    else:
        delete_at(folder.child("step-00000001"), grace=7 * 86400.0, force=False, assume_single_writer=False)
    sys.exit(3)  # it was not killed


def save_together(rank: int, world: int, root: str) -> dict[str, Any]:
    """A real job of several ranks through all calls; what each rank saw."""
    seen: dict[str, Any] = {}
    with CheckpointManager(root, keep_latest=2, every_seconds=3600.0) as manager:
        seen["none"] = (manager.latest(), manager.steps())
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((8,), float(step)), "step": step})
        pending = manager.async_save(3, {"weight": torch.full((8,), 3.0), "step": 3})
        pending.wait()
        seen["steps"] = (manager.latest(), manager.steps())
        found: dict[str, Any] = {"weight": torch.zeros(8), "step": 0}
        seen["loaded"] = (manager.load(found).commit, found["weight"].tolist(), found["step"], manager.loaded)
        manager.pin(2)
        seen["pins"] = manager.pins()
        seen["pruned"] = manager.prune(apply=True).kept
        seen["due"] = manager.should_save(4)
        try:
            manager.save(3, {"weight": torch.zeros(8), "step": 3})
        except CheckpointError as error:
            seen["refused"] = error.kind
        manager.async_save(3, {"weight": torch.zeros(8), "step": 3})
        try:
            manager.save(4, {"weight": torch.zeros(8), "step": 4})
        except CheckpointError as error:
            seen["late"] = error.kind
        seen["after"] = manager.latest()
    return seen


def agree(rank: int, world: int, root: str, other: str) -> list[Any]:
    """Ranks whose views of the store differ, as on disks that they do not share: all get the coordinator's."""
    manager = CheckpointManager(root if rank == 0 else other)
    found: list[Any] = [manager.latest(), manager.steps()]
    try:
        manager.load({"weight": torch.zeros(64), "step": 0}, 99)
    except CheckpointError as error:
        found.append(error.kind)
    return found


def preempt(rank: int, world: int, root: str, whom: int, late: bool) -> tuple[list[int], int | None, int]:
    """A job of which one rank gets SIGTERM at step 3, before or after it asks; what was saved, and where it ended."""
    saved = []
    with CheckpointManager(root, on_sigterm=True) as manager:
        for step in range(1, 50):
            if (step, rank, late) == (3, whom, False):
                signal.raise_signal(signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, {"weight": torch.full((8,), float(step)), "step": step})
                saved.append(step)
            if manager.preempted:
                break
            if (step, rank, late) == (3, whom, True):
                signal.raise_signal(signal.SIGTERM)
        return saved, manager.latest(), step
