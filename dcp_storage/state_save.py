"""Saving a whole state: what is shared, what every rank keeps for itself, and one save of all of it."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from dcp_storage.errors import CheckpointError, portable
from dcp_storage.options import SaveReport
from dcp_storage.per_rank import PREFIX, WORLD_KEY
from dcp_storage.state_digest import digest_of
from dcp_storage.state_models import ModulePart
from dcp_storage.state_optimizers import OptimizerPart
from dcp_storage.state_process import save_in_process
from dcp_storage.state_ranks import Ranks, check_same, unwrapped
from dcp_storage.state_tree import Path, key_of, rebuild
from dcp_storage.state_values import RngPart
from dcp_storage.state_view import as_kept
from dcp_storage.state_walk import parts_of
from dcp_storage.twins import tied_keys, together

__all__ = ["Differing", "Leaf", "collect", "save_leaves"]

Differing = Literal["warn", "error"]
"""What a plain value that differs between ranks leads to, besides being kept for every rank."""

_TIED = "__tied__."
"""Put before a key in a rank's plan: of which other key its tensor is."""


@dataclass(slots=True)
class Leaf:
    """One value to save. There are thousands, and the training waits while they are made.

    Attributes:
        path: where it is, as torch keeps it; the dotted path is its key.
        value: a tensor or an object; later its copy, where the save goes on behind the training.
        kind: ``"shared"`` is one value for all ranks, or the ranks' parts of it; ``"own"`` is every rank's own;
            ``"plain"`` should be the same on all ranks, which is looked at.
        key: its key on the store, before that of a rank's own is made of it.
    """

    path: Path
    value: Any
    kind: Literal["shared", "own", "plain"]
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = key_of(self.path)

    def detached(self) -> Any:
        """The value without what autograd has of it. While the training waits for copies, nobody asks for this."""
        tracked = isinstance(self.value, torch.nn.Parameter) or getattr(self.value, "requires_grad", False)
        return self.value.detach() if tracked and isinstance(self.value, torch.Tensor) else self.value


def collect(state: MutableMapping[str, Any]) -> list[Leaf]:
    """All values of a state, the random generators' last: asking a loader for its state may have moved them.

    Raises:
        CheckpointError: two values have the same key, or a PerRank has only what other ranks saved.
        TypeError, ValueError: see :func:`~dcp_storage.state_walk.parts_of`.
    """
    leaves: dict[str, Leaf] = {}
    for part in parts_of(state):
        kind: Literal["shared", "own", "plain"] = "plain"
        if part.own is not None and part.own.holder.saved is not None and part.own.holder.value is None:
            raise CheckpointError(
                f"{part.own.key!r} has the values of all ranks of a checkpoint of another number of ranks, and none of "
                "this rank's own: choose from .saved and hand over a new value.",
                key=part.own.key,
                kind="per_rank",
            )
        if part.own is not None or isinstance(part, RngPart):
            kind = "own"
        elif isinstance(part, (ModulePart, OptimizerPart)):
            kind = "shared"
        try:
            found = part.leaves()
        except Exception as error:
            raise portable(error, "Asking for the state", key=part.key) from error
        for path, value in found:
            leaf = Leaf((part.key, *path), value, "shared" if kind == "plain" and _is_placed(value) else kind)
            if leaf.key in leaves:
                raise CheckpointError(f"Two values have the key {leaf.key!r}.", key=leaf.key, kind="planner")
            leaves[leaf.key] = leaf
    return list(leaves.values())


def _is_placed(value: Any) -> bool:
    """Whether a tensor says itself where its parts are, or is on a device: then ranks are not compared."""
    return isinstance(value, (DTensor, ShardedTensor)) or (
        isinstance(value, torch.Tensor) and value.device.type != "cpu"
    )


class _Planner(DefaultSavePlanner):
    """torch's planner for values that are flat already; it keeps where each one was, as for nested ones."""

    def __init__(self, paths: dict[str, Path]) -> None:
        super().__init__()
        self.paths = paths

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.flatten_state_dict = False
        # Goes through all values again, and would lose the empty dicts: only where it has something to do.
        self.flatten_sharded_tensors = any(isinstance(value, ShardedTensor) for value in state_dict.values())
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict = True
        self.mappings = {}
        for key in self.state_dict:
            self.mappings.update(as_kept(key, self.paths.get(key, (key,))))

    def create_local_plan(self) -> SavePlan:
        """torch's, with what is tied on this rank, which only the coordinator's planner looks at."""
        told = {f"{_TIED}{key}": (first,) for key, first in tied_keys(self.state_dict).items()}
        plan = super().create_local_plan()
        self.plan = replace(plan, planner_data={**plan.planner_data, **told})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's, with the names of a tied tensor on one rank, which then writes it once."""
        tied = []
        for number, plan in enumerate(all_plans):
            told = {key: path for key, path in plan.planner_data.items() if key.startswith(_TIED)}
            tied.append({key.removeprefix(_TIED): first for key, (first,) in told.items()})
            paths = {key: path for key, path in plan.planner_data.items() if key not in told}
            all_plans[number] = replace(plan, planner_data=paths)
        plans, metadata = super().create_global_plan(all_plans)
        self.global_plan = together(plans, tied)
        return self.global_plan, metadata


def save_leaves(
    ranks: Ranks,
    leaves: Sequence[Leaf],
    writer: StorageWriter,
    planner: SavePlanner | None,
    differing: Differing,
    *,
    in_process: bool = False,
) -> SaveReport:
    """Saves what :func:`collect` gave, on all ranks together.

    Args:
        ranks: who saves.
        leaves: this rank's values.
        writer: pointed to the checkpoint already.
        planner: the user's; it is given nested values, as by ``dcp.save``.
        differing: what a plain value that differs between ranks leads to.
        in_process: whether another process is to write.

    Raises:
        CheckpointError: of kind ``"differs"`` if that is an error; else see the writer.
    """
    path = getattr(writer, "checkpoint_id", None)
    path = None if path is None else str(path)
    named, different = _divide(ranks, leaves, path, differing)
    sentence = None
    if different:
        shown = ", ".join(map(repr, different[:20])) + (
            f" and {len(different) - 20} more" if len(different) > 20 else ""
        )
        differ = f"These plain values differ between ranks: {shown}."
        if differing == "error":
            raise CheckpointError(
                f"{differ} Nothing was saved: make them the same, or keep each rank's own by PerRank(...).",
                path=path,
                key=different[0],
                kind="differs",
            )
        sentence = f"{differ} Each rank's own is kept; say so by PerRank(...), or make them the same."
        # Before the save, and agreed upon: where warnings are errors, nothing is saved.
        text = sentence
        ranks.agree("Warning", path, lambda: warnings.warn(text, stacklevel=6) if ranks.rank == 0 else None)
    if planner is None:
        planner = _Planner({key_of(path): path for path, _ in named})
        flat: Any = {key_of(path): value for path, value in named}
    else:
        flat = rebuild(named) or {}
    if in_process:
        written = save_in_process(ranks, flat, writer, planner, path)
    else:
        with unwrapped(ranks, "Saving", path):
            _save_state_dict(flat, writer, ranks.group, 0, ranks.alone, planner)
        written = getattr(writer, "report", None)
    report = written if isinstance(written, SaveReport) else SaveReport(path or "")
    if sentence is not None:
        report.warnings = [*report.warnings, sentence]
    return report


def _divide(
    ranks: Ranks, leaves: Sequence[Leaf], path: str | None, differing: Differing
) -> tuple[list[tuple[Path, Any]], list[str]]:
    """The values under the names that they get on the store, and the keys that differ between ranks."""
    digests: dict[str, tuple[bool, bytes]] = {}

    values: list[Any] = []

    def compare() -> tuple[bytes, Differing, str | None]:
        values.extend(map(_detached, leaves))
        digests.update(_digests(ranks, leaves))
        return digest_of(digests), differing, path

    different: set[str] = set()
    told = ranks.agree("Comparing the ranks", path, compare)
    check_same("differing", [one[1] for one in told], "Nothing was saved.", path)
    check_same("checkpoint_id", [one[2] for one in told], "Nothing was saved.", path)
    if len({one[0] for one in told}) > 1:
        tables = ranks.gather(digests)
        for key in set().union(*tables):
            seen = {table[key] for table in tables if key in table}
            # A tensor that only some have stays under its name, as the stages of a pipeline have theirs.
            everywhere = all(key in table for table in tables) or any(is_tensor for is_tensor, _ in seen)
            if len(seen) > 1 or not everywhere:
                different.add(key)
    named: list[tuple[Path, Any]] = []
    for leaf, value in zip(leaves, values, strict=True):
        own = leaf.kind == "own" or leaf.key in different
        named.append(((PREFIX, str(ranks.rank), *leaf.path) if own else leaf.path, value))
    if different or any(leaf.kind == "own" for leaf in leaves):
        named.append(((PREFIX, WORLD_KEY.partition(".")[2]), torch.zeros(ranks.world, dtype=torch.uint8, device="cpu")))
    return named, sorted(different)


def _detached(leaf: Leaf) -> Any:
    try:
        return leaf.detached()
    except Exception as error:
        raise portable(error, "Asking for the value", key=leaf.key) from error


def _digests(ranks: Ranks, leaves: Sequence[Leaf]) -> dict[str, tuple[bool, bytes]]:
    if ranks.world == 1:
        return {}
    return {
        leaf.key: (isinstance(leaf.value, torch.Tensor), digest_of(leaf.value, key=leaf.key))
        for leaf in leaves
        if leaf.kind == "plain"
    }
