"""The layouts of the reshard matrix, and where each rank's box lies, worked out here and not by torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["WORLDS", "Layout", "layout_named", "layouts"]

WORLDS = (1, 2, 3, 4, 8)

COPY, ROWS, COLUMNS, STRIDED = "copy", "rows", "columns", "strided rows"


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on the ranks of a job.

    Attributes:
        name: unlike any other of the same number of ranks.
        mesh: sizes of the mesh, outermost first.
        kinds: for each of its dimensions one of the words above; empty for a plain tensor that every rank has whole.
        members: the ranks that form the mesh; the others of the job have no part of the tensor.
    """

    name: str
    mesh: tuple[int, ...]
    kinds: tuple[str, ...]
    members: tuple[int, ...]

    def make_mesh(self) -> DeviceMesh:
        """The mesh on this job's ranks; every rank of the job has to call it, at the same time."""
        return DeviceMesh("cpu", torch.tensor(self.members).reshape(self.mesh))

    def placements(self, ndim: int) -> list[Placement]:
        """What torch calls it, for a tensor of ``ndim`` dimensions."""
        made: list[Placement] = []
        for axis, kind in enumerate(self._kinds(ndim)):
            if kind == COPY:
                made.append(Replicate())
            elif kind == STRIDED:
                inner = self._kinds(ndim)[axis + 1 :]
                factor = math.prod(self.mesh[axis + 1 + k] for k, other in enumerate(inner) if other == ROWS)
                made.append(_StridedShard(0, split_factor=factor))
            else:
                made.append(Shard(int(kind == COLUMNS)))
        return made

    def box(self, shape: Sequence[int], rank: int) -> tuple[slice, ...] | None:
        """The part of the whole tensor that a rank holds; None where it is no member.

        Each dimension is cut like ``torch.chunk`` does, from the outermost dimension of the mesh inwards; strided
        rows are cut last: FSDP divides what tensor parallelism has left to the rank.
        """
        if rank not in self.members:
            return None
        place = self.members.index(rank)
        coordinate: list[int] = []
        for size in reversed(self.mesh):
            coordinate.insert(0, place % size)
            place //= size
        ranges = [(0, size) for size in shape]
        kinds = self._kinds(len(shape))
        for axis in sorted(range(len(kinds)), key=lambda axis: kinds[axis] == STRIDED):
            if kinds[axis] != COPY:
                dim = int(kinds[axis] == COLUMNS)
                ranges[dim] = _chunk(*ranges[dim], self.mesh[axis], coordinate[axis])
        return tuple(slice(first, last) for first, last in ranges)

    def copies(self, ndim: int) -> int:
        """How often the job holds each element."""
        kinds = self._kinds(ndim)
        return (
            math.prod(size for size, kind in zip(self.mesh, kinds, strict=True) if kind == COPY)
            if kinds
            else len(self.members)
        )

    def _kinds(self, ndim: int) -> tuple[str, ...]:
        """A tensor without columns is cut by rows instead, one without rows is copied."""
        if ndim == 0:
            return tuple(COPY for _ in self.kinds)
        return tuple(ROWS if kind == COLUMNS and ndim == 1 else kind for kind in self.kinds)


def _chunk(first: int, last: int, parts: int, number: int) -> tuple[int, int]:
    step = -(-(last - first) // parts)
    return min(first + number * step, last), min(first + (number + 1) * step, last)


def layouts(world: int) -> list[Layout]:
    """All layouts of the matrix on ``world`` ranks."""
    everybody = tuple(range(world))
    made = [
        Layout("plain", (world,), (), everybody),
        Layout("copies", (world,), (COPY,), everybody),
        Layout("rows", (world,), (ROWS,), everybody),
        Layout("columns", (world,), (COLUMNS,), everybody),
    ]
    kinds = {
        "grid": (ROWS, COLUMNS),  # FSDP2 and row-wise tensor parallelism
        "strided": (STRIDED, ROWS),  # FSDP2 and column-wise tensor parallelism
        "rows-twice": (ROWS, ROWS),
        "hsdp": (COPY, ROWS),
        "copies-columns": (COPY, COLUMNS),
    }
    meshes: dict[int, dict[tuple[int, int], list[str]]] = {
        2: {(1, 2): ["grid"], (2, 1): ["strided"]},
        3: {(3, 1): ["strided"]},
        4: {(2, 2): list(kinds)},
        8: {(2, 4): list(kinds), (4, 2): list(kinds), (1, 8): ["grid", "strided"]},
    }
    for mesh, names in meshes.get(world, {}).items():
        made += [Layout(f"{name}@{mesh[0]}x{mesh[1]}", mesh, kinds[name], everybody) for name in names]
    if world == 8:
        made.append(Layout("hsdp-strided@2x2x2", (2, 2, 2), (COPY, STRIDED, ROWS), everybody))
    parts = {3: (0, 2), 4: (1, 3), 8: (6, 1, 4)}
    if world in parts:
        made.append(Layout("some-ranks", (len(parts[world]),), (ROWS,), parts[world]))
    return made


def layout_named(world: int, name: str) -> Layout:
    """The layout of that name on ``world`` ranks."""
    return {layout.name: layout for layout in layouts(world)}[name]
