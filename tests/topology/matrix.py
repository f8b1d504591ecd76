"""What the ranks of the matrix do: save all layouts of a job at once, load them all into layouts of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp_storage import LoadOptions, SaveOptions
from dcp_storage.testing.ranks import RankPool
from tests.e2e import Place
from tests.topology.layouts import Layout, layout_named, layouts
from tests.topology.source import TENSORS, differing, elements, inverted, whole

State = dict[str, torch.Tensor]

__all__ = ["Tally", "load_into", "save_all"]

TURNED = {"cube"}
"""Tensors whose local parts are not contiguous, neither when they are saved nor when they are loaded."""

SECONDS = 240.0


@dataclass
class Tally:
    """What was compared.

    Attributes:
        cells: pairs of a saved and a loaded layout.
        elements: compared, on all ranks together.
        differing: of those.
        wrong: the cells that do not hold what they must, with what is wrong.
    """

    cells: int = 0
    elements: int = 0
    differing: int = 0
    wrong: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        self.cells += other.cells
        self.elements += other.elements
        self.differing += other.differing
        self.wrong += other.wrong
        return self

    def __str__(self) -> str:
        return f"{self.cells} cells, {self.elements} elements compared, {self.differing} differing"


class _Meshes:
    """One mesh for each shape: two layouts of the same shape share their process groups."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], DeviceMesh] = {}

    def of(self, layout: Layout) -> DeviceMesh:
        key = (layout.mesh, layout.members)
        if key not in self.made:
            self.made[key] = layout.make_mesh()
        return self.made[key]


def _placed(name: str, part: torch.Tensor | None, layout: Layout, meshes: _Meshes) -> torch.Tensor:
    """The tensor of this rank, whose local part is ``part``; None where the rank is not on the mesh."""
    shape, dtype = TENSORS[name]
    local = torch.empty(0, dtype=dtype) if part is None else part.contiguous()
    if part is not None and name in TURNED:
        local = local.transpose(0, -1).contiguous().transpose(0, -1)
    if not layout.kinds:
        return local
    stride = torch.empty(shape, dtype=dtype, device="meta").stride()
    where = layout.placements(len(shape))
    return DTensor.from_local(local, meshes.of(layout), where, run_check=False, shape=torch.Size(shape), stride=stride)


def _state(keys: Sequence[str], parts: Mapping[str, torch.Tensor | None], layout: Layout, meshes: _Meshes) -> State:
    """The tensors of this rank under each of the keys.

    A rank beside the mesh has the sharded ones, too, with nothing in them, as a job that builds one state everywhere
    does; but not the one without dimensions, which torch would there take for one of shape (0,).
    """
    return {
        f"{key}/{name}": _placed(name, part, layout, meshes)
        for key in keys
        for name, part in parts.items()
        if part is not None or TENSORS[name][0]
    }


def _part(name: str, layout: Layout, rank: int) -> torch.Tensor | None:
    box = layout.box(TENSORS[name][0], rank)
    return None if box is None else whole(name)[box]


def save_ranks(rank: int, world: int, place: Place) -> None:
    """One checkpoint with every tensor in every layout of this number of ranks."""
    meshes = _Meshes()
    state: State = {}
    for layout in layouts(world):
        state |= _state([layout.name], {name: _part(name, layout, rank) for name in TENSORS}, layout, meshes)
    dcp.save(state, storage_writer=place.writer(options=SaveOptions(shard_size=1 << 16)))


def load_ranks(
    rank: int, world: int, place: Place, saved: Sequence[str], targets: Sequence[str]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Loads all saved layouts into each target layout; (saved, target) → elements compared, elements that differ."""
    meshes = _Meshes()
    counts = {}
    for target in targets:
        layout = layout_named(world, target)
        parts = {name: _part(name, layout, rank) for name in TENSORS}
        blank = {name: None if part is None else inverted(part) for name, part in parts.items()}
        state = _state(saved, blank, layout, meshes)
        dcp.load(state, storage_reader=place.reader(options=LoadOptions(part_size=1 << 16)))
        for key in saved:
            compared = wrong = 0
            for name, part in parts.items():
                if part is not None:
                    value = state[f"{key}/{name}"]
                    wrong += differing(value.to_local() if isinstance(value, DTensor) else value, part)
                    compared += part.numel()
            counts[key, target] = (compared, wrong)
    return counts


def save_all(ranks: RankPool, world: int, place: Place) -> None:
    """Saves every layout on ``world`` ranks into one checkpoint."""
    ranks.run(save_ranks, world, _plain(place), timeout=SECONDS)


def load_into(ranks: RankPool, source: int, world: int, place: Place, targets: Sequence[str] | None = None) -> Tally:
    """Loads everything that ``source`` ranks saved into layouts of ``world`` ranks; None: into all of them."""
    saved = [layout.name for layout in layouts(source)]
    wanted = [layout.name for layout in layouts(world)] if targets is None else list(targets)
    outcomes = ranks.run(load_ranks, world, _plain(place), saved, wanted, timeout=SECONDS)
    tally = Tally()
    for target in wanted:
        layout = layout_named(world, target)
        due = sum(count * layout.copies(len(TENSORS[name][0])) for name, count in elements().items())
        for key in saved:
            compared = sum(outcome[key, target][0] for outcome in outcomes)
            wrong = sum(outcome[key, target][1] for outcome in outcomes)
            at = f"{key} on {source} ranks -> {target} on {world}"
            problems = [f"{at}: {wrong} elements differ"] if wrong else []
            if compared != due:
                problems.append(f"{at}: {compared} elements were compared, not {due}")
            tally += Tally(1, compared, wrong, problems)
    return tally


def _plain(place: Place) -> Place:
    """The place without its server, which does not travel to the ranks."""
    return Place(place.url, place.options)
