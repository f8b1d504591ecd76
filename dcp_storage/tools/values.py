"""The first values of one tensor, or one object, read through the reader's own partial reads."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_storage.options import LoadOptions
from dcp_storage.reader import FsspecStorageReader
from dcp_storage.tools.opening import Folder

__all__ = ["values_of"]

_MOST_TEXT = 2000
_MOST_ELEMENTS = 4096


class _Corner(LoadPlanner):
    """Reads the corner of one tensor that holds its first elements, or one object.

    Attributes:
        found: the tensor or the object, once it is read.
    """

    def __init__(self, key: str, per_dimension: int) -> None:
        self.key = key
        self.per_dimension = per_dimension
        self.found: Any = None
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        entries = self._metadata.state_dict_metadata if self._metadata is not None else {}
        entry = entries[self.key]
        if not isinstance(entry, TensorStorageMetadata):
            found = next(index for index in self._storage_data() if index.fqn == self.key)
            origin = torch.Size([0])
            item = ReadItem(LoadItemType.BYTE_IO, found, origin, found, origin, torch.Size([1]))
            return LoadPlan([item])
        sizes = [min(size, self.per_dimension) for size in entry.size]
        for dim in range(len(sizes)):  # of many dimensions, the last ones are shown
            while sizes[dim] > 1 and torch.Size(sizes).numel() > _MOST_ELEMENTS:
                sizes[dim] -= 1
        self.found = torch.empty(sizes, dtype=entry.properties.dtype, device="cpu")
        corner = ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
        return LoadPlan(create_read_items_for_chunk_list(self.key, entry, [corner]))

    def _storage_data(self) -> Any:
        return (self._metadata.storage_data if self._metadata is not None else None) or {}

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The reader loaded it through the allow-list and hands over what it pickled itself.
        self.found = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.found
        for dim, (first, count) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, first, count)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the corner was filled in place."""


def values_of(folder: Folder, key: str, per_dimension: int, rank: int | None) -> str:
    """The text of a tensor's first values along each dimension, or of an object.

    Args:
        folder: the checkpoint.
        key: whose values.
        per_dimension: how many elements along each dimension.
        rank: whose part is read, of a checkpoint that was saved without collectives; None of any other.

    Raises:
        CorruptCheckpointError: their bytes are missing, short or altered.
        UntrustedDataError: an object asks for a global outside the allow-list.
        StoreError: the store failed.
    """
    options = folder.options if isinstance(folder.options, LoadOptions) else LoadOptions()
    reader = FsspecStorageReader(
        folder.location.url, storage_options=folder.storage_options, require_commit=False, options=options
    )
    reader._opener = folder.opener
    planner = _Corner(key, per_dimension)
    metadata = reader.read_metadata() if rank is None else reader.read_metadata(rank=rank)
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner({}, metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(reader.prepare_global_plan([plan])[0], planner).wait()
    text = str(planner.found.tolist()) if isinstance(planner.found, torch.Tensor) else repr(planner.found)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
