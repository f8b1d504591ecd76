"""What the tests of shared reads have in common: sources, layouts, and ranks that load and count."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_storage import CheckpointError, FsspecStorageReader, FsspecStorageWriter, LoadOptions
from dcp_storage.store import Store
from dcp_storage.stores.location import Location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.recording import RecordingStore

__all__ = [
    "Layout",
    "Loaded",
    "fixed",
    "load_into",
    "recording",
    "save_from",
    "source",
    "target_for",
]

KIB = 1024
MIB = 1024 * KIB

NOTE = "an object " * 100

Layout = tuple[tuple[int, ...], tuple[str, ...]]
"""A mesh, and what each of its dimensions does: ``"R"``, ``"S0"`` or ``"S1"``; no mesh: a plain tensor on each rank."""


def source(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements follow from their place and its name."""
    start = sum(map(ord, name)) % 97
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.int64) * 31 % 9973 + start).to(dtype).reshape(tuple(shape))


def _placements(kinds: Sequence[str], ndim: int) -> list[Placement]:
    found: list[Placement] = []
    for kind in kinds:
        dim = int(kind[1:] or 0) if kind != "R" else 0
        found.append(Replicate() if kind == "R" or not ndim else Shard(min(dim, ndim - 1)))
    return found


@functools.cache
def _mesh(mesh: tuple[int, ...]) -> DeviceMesh:
    """The mesh, made once in a rank: each one of several dimensions makes new process groups."""
    return init_device_mesh("cpu", mesh)


def target_for(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a tensor in a layout, as ``dcp`` wants it."""
    mesh, kinds = layout
    if not mesh:
        return value.clone()
    device_mesh = _mesh(mesh)
    parts = value
    placements = _placements(kinds, value.dim())
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces = list(torch.chunk(parts, mesh[axis], placement.dim))
            pieces += [parts.narrow(placement.dim, 0, 0)] * (mesh[axis] - len(pieces))
            parts = pieces[coordinate[axis]]
    return DTensor.from_local(
        parts.contiguous().clone(), device_mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def save_from(rank: int, world: int, url: str, shapes: Mapping[str, Sequence[int]], layout: Layout) -> None:
    """Saves tensors of these shapes in a layout, and an object."""
    state: dict[str, Any] = {name: target_for(source(name, shape), layout) for name, shape in shapes.items()}
    state["note"] = NOTE
    dcp.save(state, storage_writer=FsspecStorageWriter(url))


def recording(
    reader: FsspecStorageReader, wrap: Callable[[Store], Store] = lambda store: store
) -> list[RecordingStore]:
    """Has a reader write down its requests; the stores that it opens come into the list."""
    made: list[RecordingStore] = []

    def opener(location: Location, options: Mapping[str, Any], max_concurrency: int) -> Store:
        made.append(RecordingStore(wrap(open_store(location, options, max_concurrency=max_concurrency))))
        return made[-1]

    reader._opener = opener
    return made


@dataclass(frozen=True)
class Loaded:
    """What a rank has to say of a load.

    Attributes:
        wrong: keys whose value is not what was saved.
        read: bytes out of the store, counted at it.
        report: the report, as plain data.
        error: what the load raised here, None where it went well.
        failure: what the reader says failed.
        seconds: wall time of the load.
    """

    wrong: list[str]
    read: int
    report: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    failure: CheckpointError | None = None
    seconds: float = 0.0


def load_into(
    rank: int,
    world: int,
    url: str,
    shapes: Mapping[str, Sequence[int]],
    layout: Layout,
    options: LoadOptions,
    keys: Sequence[Sequence[str]] = (),
) -> Loaded:
    """Loads into a layout over the default group and compares every element; ``keys``: what each rank wants."""
    wanted = [name for name in shapes if not keys or name in keys[rank]]
    state: dict[str, Any] = {
        name: target_for(torch.full_like(source(name, shapes[name]), -7), layout) for name in wanted
    }
    state["note"] = None
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD)
    stores = recording(reader)
    begun = time.monotonic()
    dcp.load(state, storage_reader=reader)
    seconds = time.monotonic() - begun
    wrong = [] if state.pop("note") == NOTE else ["note"]
    for name, value in state.items():
        mine = target_for(source(name, shapes[name]), layout)
        if not torch.equal(fixed(value), fixed(mine)):
            wrong.append(name)
    assert reader.report is not None
    return Loaded(wrong, sum(s.bytes_read() for s in stores), reader.report.to_dict(), seconds=seconds)


def fixed(value: torch.Tensor) -> torch.Tensor:
    """The local part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
