"""Tensors under several names that are one and the same memory, as tied weights are: their bytes are written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_storage.errors import portable
from dcp_storage.records import WrittenItem

__all__ = ["place_of", "tied_keys", "together", "twins_of", "with_twins"]


def place_of(value: Any) -> Hashable | None:
    """Where the elements of a tensor are and how they are read.

    Two tensors that are alive at the same time and have the same place have the same elements, whatever is written
    to one of them. Only the address is not enough: views of one storage begin alike and differ in shape, steps, dtype,
    or the mark of a conjugate.

    Returns:
        None where that cannot be said: no elements, or no plain strided memory.
    """
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_quantized or value.is_meta or not value.numel() or not value.data_ptr():
        return None
    marks = (value.is_conj(), value.is_neg())
    return (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype, marks)


def twins_of(items: Sequence[WriteItem], planner: SavePlanner, path: str) -> dict[int, int]:
    """Which items of a plan have the bytes of an earlier one: number → number of the earlier one.

    Only planners that hand out the state's own tensors are asked. Another one may make each value when it is wanted,
    in memory that it uses again.

    Args:
        items: of this rank's plan.
        planner: resolves them.
        path: the checkpoint, for errors.

    Raises:
        CheckpointError: the planner does not know an item; names the key.
    """
    if not isinstance(planner, DefaultSavePlanner) or not _hands_out_the_state(planner):
        return {}
    first: dict[Hashable, int] = {}
    twins: dict[int, int] = {}
    for number, item in enumerate(items):
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None or item.tensor_data.chunk is None:
            continue
        key = item.index.fqn
        try:
            key.encode()  # a lone surrogate cannot be written into the manifest
            value = planner.lookup_object(item.index)
        except Exception as error:
            raise portable(error, "Serialising the value", path=path, key=key) from error
        place = place_of(value)
        # One that is not as it was planned is no twin: resolving it will say so.
        if place is None or tuple(value.shape) != tuple(item.tensor_data.chunk.sizes):
            continue
        if first.setdefault(place, number) != number:
            twins[number] = first[place]
    return twins


def _hands_out_the_state(planner: DefaultSavePlanner) -> bool:
    return all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name) and name not in vars(planner)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def with_twins(
    items: Sequence[WriteItem], written: Sequence[WrittenItem], twins: Mapping[int, int]
) -> list[WrittenItem]:
    """What was written of every item of a plan, where only those without an earlier twin were.

    Args:
        items: all of the plan's.
        written: of those that are in ``twins`` not, in their order.
        twins: of :func:`twins_of`.
    """
    if not twins:
        return list(written)
    rest = iter(written)
    out: list[WrittenItem] = []
    for number, item in enumerate(items):
        if number not in twins:
            out.append(next(rest))
            continue
        found = out[twins[number]]
        offsets = None if item.index.offset is None else tuple(item.index.offset)
        record = msgspec.structs.replace(found.item, key=item.index.fqn, offsets=offsets, index=item.index.index)
        out.append(WrittenItem(found.name, record, None))
    return out


def tied_keys(state: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a flat state whose tensor, or this rank's part of it, is that of an earlier key: key → earlier key."""
    first: dict[Hashable, str] = {}
    tied: dict[str, str] = {}
    for key, value in state.items():
        place = place_of(value.to_local() if isinstance(value, DTensor) else value)
        if place is not None and first.setdefault(place, key) != key:
            tied[key] = first[place]
    return tied


def together(plans: Sequence[SavePlan], tied: Sequence[Mapping[str, str]]) -> list[SavePlan]:
    """The plans of all ranks with tied tensors on the rank that writes the first of them.

    Of what several ranks have alike, torch has the one write that has least to write, key by key: of two names of one
    tensor it so gives each to another rank.

    Args:
        plans: of all ranks, each item in one of them.
        tied: what :func:`tied_keys` says on each rank.
    """
    if not any(tied):
        return list(plans)
    home = {(item.index.fqn, item.index.offset): rank for rank, plan in enumerate(plans) for item in plan.items}
    items: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            first = tied[rank].get(item.index.fqn)
            target = rank if first is None else home.get((first, item.index.offset), rank)
            # The same two keys have to be tied there as well, or that rank would not have the tensor.
            if target != rank and tied[target].get(item.index.fqn) != first:
                target = rank
            items[target].append(item)
    return [dataclasses.replace(plan, items=found) for plan, found in zip(plans, items, strict=True)]
