"""A part of a checkpoint in one process: some keys, a prefix, slices; without a model and without a process group."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_storage.codec import QUANTIZED
from dcp_storage.errors import IncompatibleCheckpointError
from dcp_storage.options import LoadOptions, LoadReport
from dcp_storage.reader import FsspecStorageReader

__all__ = ["LoadedState", "load_keys"]

Slices = Mapping[str, Sequence[slice]]


class LoadedState(dict[str, Any]):
    """What was loaded: key → tensor on the CPU, or object.

    Attributes:
        report: the load's.
    """

    report: LoadReport


def load_keys(
    path: str | os.PathLike[str],
    *,
    keys: Collection[str] | None = None,
    prefix: str | None = None,
    slices: Slices | None = None,
    storage_options: Mapping[str, Any] | None = None,
    require_commit: bool = True,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> LoadedState:
    """Loads a part of a checkpoint; only the bytes that hold it are read.

    Keys are those that :func:`~dcp_storage.list_keys` lists. ``keys``, ``prefix`` and the keys of ``slices`` add up;
    without any of them everything is loaded.

    Args:
        path: as for :class:`~dcp_storage.FsspecStorageReader`.
        keys: these.
        prefix: those that begin so, e.g. ``"model."``.
        slices: key → one slice for each dimension, from the first on, e.g. ``{"model.weight": (slice(0, 10),)}``;
            without steps, and clipped to the tensor as Python's are. Dimensions that are not named are whole.
        storage_options: handed to fsspec untouched.
        require_commit: whether a folder without any commit object is refused. False also loads what stock torch wrote.
        options: see :class:`LoadOptions`; nothing is shared here.

    Returns:
        The tensors and objects, in the order of their keys. Sparse tensors come dense, quantized ones as float32.

    Raises:
        IncompatibleCheckpointError: a key is not there, or has fewer dimensions than slices.
        TypeError: ``keys``, ``prefix`` or ``slices`` are of the wrong type.
        ValueError: a slice has a step, or the options ask for sharing.
        CheckpointError: whatever else a load raises.
    """
    if isinstance(keys, str):
        raise TypeError('keys is a collection, e.g. ["model.weight"], not a single string.')
    if slices is not None and not isinstance(slices, Mapping):
        raise TypeError(f"slices is a mapping of keys to slices, not a {type(slices).__name__}.")
    wanted = {key: _checked(key, parts) for key, parts in (slices or {}).items()}
    for name in (*(keys or ()), *wanted, *(() if prefix is None else (prefix,))):
        if not isinstance(name, str):
            raise TypeError(f"Keys and prefixes are strings, not {name!r}.")
    if options.share_reads:
        raise ValueError("share_reads needs several ranks; load_keys is for one process.")
    reader = FsspecStorageReader(path, storage_options=storage_options, require_commit=require_commit, options=options)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)  # raises why there is none
    saved = metadata.state_dict_metadata
    chosen = set(saved) if keys is None and prefix is None and slices is None else {*(keys or ()), *wanted}
    if prefix is not None:
        found = {key for key in saved if key.startswith(prefix)}
        if not found:
            raise _missing(reader, prefix, f"no key that begins with {prefix!r}", saved)
        chosen |= found
    for key in sorted(chosen):
        if key not in saved:
            raise _missing(reader, key, f"no key {key!r}", saved)
    planner = _Part(metadata, sorted(chosen), wanted, reader.checkpoint_id or "")
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(plan, planner).wait()
    out = LoadedState(planner.values)
    if reader.report is not None:
        out.report = reader.report
        out.report.loaded = sorted(out)  # also what has no elements, for which nothing was read
    return out


def _checked(key: str, parts: Sequence[slice]) -> tuple[slice, ...]:
    if not isinstance(parts, (slice, Sequence)):
        raise TypeError(f"The slices of {key!r} must be slices, not {parts!r}.")
    parts = (parts,) if isinstance(parts, slice) else tuple(parts)
    for part in parts:
        if not isinstance(part, slice):
            raise TypeError(f"The slices of {key!r} must be slices, not {part!r}.")
        if part.step not in (None, 1):
            raise ValueError(f"The slices of {key!r} must not have steps: {part!r}.")
    return parts


def _missing(reader: FsspecStorageReader, key: str, what: str, saved: Collection[str]) -> IncompatibleCheckpointError:
    close = difflib.get_close_matches(key, list(saved)[:10_000], 3)
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
    where = reader.checkpoint_id
    return IncompatibleCheckpointError(f"{where}: this checkpoint has {what}.{hint}", path=where, key=key)


class _Part(LoadPlanner):
    """Plans the wanted boxes, and makes a tensor for each as it is asked for."""

    def __init__(
        self, metadata: Metadata, keys: Sequence[str], slices: Mapping[str, tuple[slice, ...]], path: str
    ) -> None:
        self.values: dict[str, Any] = {}
        self._items: list[ReadItem] = []
        for key in keys:
            entry = metadata.state_dict_metadata[key]
            parts = slices.get(key, ())
            if not isinstance(entry, TensorStorageMetadata):
                if parts:
                    raise IncompatibleCheckpointError(
                        f"{path}: {key!r} is no tensor and cannot be sliced.", path=path, key=key
                    )
                self.values[key] = None
                self._items += _items(key, entry)
                continue
            if len(parts) > len(entry.size):
                raise IncompatibleCheckpointError(
                    f"{path}: {key!r} has {len(entry.size)} dimensions, of which {len(parts)} are to be sliced.",
                    path=path,
                    key=key,
                )
            ends = [slice(None)] * (len(entry.size) - len(parts))
            bounds = [part.indices(size)[:2] for part, size in zip((*parts, *ends), entry.size, strict=True)]
            box = ChunkStorageMetadata(
                torch.Size([first for first, _ in bounds]),
                torch.Size([max(last - first, 0) for first, last in bounds]),
            )
            dtype = entry.properties.dtype
            made_as = torch.float32 if dtype in QUANTIZED else dtype
            self.values[key] = torch.empty(box.sizes, dtype=made_as, device="cpu")
            if 0 not in box.sizes:
                self._items += _items(key, entry, box)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Everything is known from the start."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        # Ours: the reader has loaded the object by the allow-list and serialised it anew.
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.values[read_item.dest_index.fqn]
        for dim, (first, count) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, first, count)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The tensor is filled in place."""


def _items(
    key: str, entry: TensorStorageMetadata | BytesStorageMetadata, box: ChunkStorageMetadata | None = None
) -> list[ReadItem]:
    if isinstance(entry, BytesStorageMetadata) or box is None:
        index, nothing = MetadataIndex(key), torch.Size((0,))
        return [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, torch.Size((0,)))]
    return list(create_read_items_for_chunk_list(key, entry, [box]))
