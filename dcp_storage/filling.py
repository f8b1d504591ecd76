"""Handing to the planner what was read: tensors that are filled, and objects loaded by the allow-list."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp_storage.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, portable
from dcp_storage.extensions import untransformed
from dcp_storage.pickles import reserialized
from dcp_storage.placing import fill
from dcp_storage.reading import LoadSteps
from dcp_storage.records import ItemRecord

__all__ = ["Finish", "resolve"]

_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Finish:
    """What the planner is told when an item's bytes are there.

    Attributes:
        planner: who is told.
        item: what it wanted.
        record: what was saved.
        file: the name of the file that it is in.
        path: the checkpoint, for errors.
        trusted_globals: what objects may use beyond the safe list.
        steps: how objects are loaded.
        limit: most bytes that an item may have once its stream extensions are undone.
    """

    planner: LoadPlanner
    item: ReadItem
    record: ItemRecord
    file: str
    path: str
    trusted_globals: Sequence[Any]
    steps: LoadSteps
    limit: int

    def as_object(self, data: torch.Tensor | memoryview) -> None:
        """Loads a Python object by the allow-list and hands it over, serialised anew by us."""
        value = self._loaded(self._untransformed(data))
        again = io.BytesIO(reserialized(value))  # the planner unpickles what it gets: it gets only what we made
        self._tell(lambda: self.planner.load_bytes(self.item, again), "planner.load_bytes")

    def as_tensor(self, data: torch.Tensor | memoryview) -> None:
        """Commits a tensor that is filled, or fills it from an item that had to be loaded whole."""
        if isinstance(data, torch.Tensor):
            target = data
        else:  # not the raw bytes of a plain tensor: the whole item is loaded, then the wanted box is taken out of it
            key = self.item.dest_index.fqn
            raw = self._untransformed(data)
            # A safetensors file begins with the length of its header, which is JSON.
            if bytes(raw[:4]) != _ZIP and bytes(raw[8:9]) == b"{":
                raise IncompatibleCheckpointError(
                    f"{self.path}: {key!r} was saved by stock torch's writer with serialization_format=SAFETENSORS, "
                    "whose metadata does not say where the numbers are. Load it with torch's HuggingFaceStorageReader.",
                    path=self.path,
                    key=key,
                )
            value = self._loaded(raw)
            self._check_box(value, key)
            target = resolve(self.planner, self.item, self.path, key)
            if target.layout is not torch.strided:
                raise CheckpointError(
                    f"{self.path}: the target for {key!r} is of layout {str(target.layout).removeprefix('torch.')}, "
                    "which cannot be filled in place. Give a dense tensor of the same shape.",
                    path=self.path,
                    key=key,
                    kind="unsupported",
                )
            if value.layout is not torch.strided:
                value = value.to_dense()  # no part can be taken out of a sparse tensor
            for dim, (first, count) in enumerate(zip(self.item.storage_offsets, self.item.lengths, strict=True)):
                if (first, count) != (0, value.shape[dim]):
                    value = value.narrow(dim, first, count)
            fill(target, value, key)
        self._tell(lambda: self.planner.commit_tensor(self.item, target), "planner.commit_tensor")

    def _loaded(self, raw: memoryview) -> Any:
        return self.steps.load_object(
            raw,
            trusted_globals=self.trusted_globals,
            path=self.path,
            key=self.item.dest_index.fqn,
            file=self.file,
            offset=None if self.record.transforms else self.record.offset,
        )

    def _check_box(self, value: Any, key: str) -> None:
        """The item itself says what tensor it is; here that is held against what the metadata says of it."""
        wanted = " × ".join(map(str, self.item.lengths)) or "one element"
        ends = [first + count for first, count in zip(self.item.storage_offsets, self.item.lengths, strict=True)]
        if not isinstance(value, torch.Tensor):
            found = f"a {type(value).__name__}"
        elif value.dim() != len(ends) or any(end > size for end, size in zip(ends, value.shape, strict=True)):
            found = f"a tensor of shape {tuple(value.shape)!s:.100}"
        elif value.layout is not torch.strided and math.prod(value.shape) * value.element_size() > self.limit:
            found = f"a sparse tensor of shape {tuple(value.shape)!s:.100}"  # which would be made dense
        else:
            return
        raise CorruptCheckpointError(
            f"{self.path}: {key!r:.200} in {self.file} at offset {self.record.offset} should be a tensor that holds "
            f"{wanted}, and is {found}.",
            path=self.path,
            key=key,
            file=self.file,
            offset=self.record.offset,
            wanted=wanted,
            found=found,
        )

    def _untransformed(self, data: torch.Tensor | memoryview) -> memoryview:
        if isinstance(data, torch.Tensor):
            raise CheckpointError("An object came as a tensor.", path=self.path, kind="protocol")
        return untransformed(
            data, self.record.transforms, limit=self.limit, path=self.path, key=self.item.dest_index.fqn
        )

    def _tell(self, call: Any, doing: str) -> None:
        try:
            call()
        except Exception as error:
            raise portable(error, doing, path=self.path, key=self.item.dest_index.fqn) from error


def resolve(planner: LoadPlanner, item: ReadItem, path: str, key: str) -> torch.Tensor:
    """The planner's tensor for an item, checked to be of the shape that is read.

    Raises:
        CheckpointError: the planner raised, or gave another shape.
    """
    try:
        target = planner.resolve_tensor(item).detach()
    except Exception as error:
        raise portable(error, "planner.resolve_tensor", path=path, key=key) from error
    if tuple(target.shape) != tuple(item.lengths):
        raise CheckpointError(
            f"{path}: the planner gave a target of shape {tuple(target.shape)} for {key!r}, of which "
            f"{tuple(item.lengths)} is to be read.",
            path=path,
            key=key,
            kind="planner",
        )
    return target
