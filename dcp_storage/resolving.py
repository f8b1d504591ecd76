"""From the planner's write items to the bytes of files: asked for, checked, serialised."""

from __future__ import annotations

import io
import math

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from dcp_storage.codec import Encoded, encode, encode_object
from dcp_storage.errors import CheckpointError, portable

__all__ = ["encoded", "resolved", "size_about"]

_OVERHEAD = 2048  # bytes that torch.save puts around a tensor, about; only for cutting files


def size_about(item: WriteItem) -> int:
    """Bytes of an item, about."""
    if item.tensor_data is None or item.tensor_data.chunk is None:
        return _OVERHEAD
    elements = math.prod(item.tensor_data.chunk.sizes)
    return elements * item.tensor_data.properties.dtype.itemsize + _OVERHEAD


def resolved(item: WriteItem, planner: SavePlanner, path: str) -> torch.Tensor | io.BytesIO:
    """The planner's value for an item, checked to be of the kind and shape that was planned.

    Raises:
        CheckpointError: the planner raised, or gave something else; names the key.
    """
    key = item.index.fqn
    try:
        key.encode()  # a lone surrogate cannot be written into the manifest: said before any byte is
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO and isinstance(data, io.BytesIO):
            return data
        if item.type != WriteItemType.BYTE_IO and isinstance(data, torch.Tensor):
            _check_shape(item, data)
            return data
    except Exception as error:
        raise portable(error, "Serialising the value", path=path, key=key) from error
    raise CheckpointError(
        f"The planner resolved {key!r}, an item of type {item.type.name}, to a {type(data).__name__}.",
        path=path,
        key=key,
        kind="planner",
    )


def encoded(item: WriteItem, data: object, path: str) -> Encoded:
    """The bytes of what :func:`resolved` gave.

    Raises:
        CheckpointError: it cannot be serialised; names the key.
    """
    try:
        return encode(data) if isinstance(data, torch.Tensor) else encode_object([_bytes_in(data)])
    except Exception as error:
        raise portable(error, "Serialising the value", path=path, key=item.index.fqn) from error


def _bytes_in(data: object) -> memoryview:
    if not isinstance(data, io.BytesIO):
        raise TypeError(f"an object came as a {type(data).__name__}")
    return data.getbuffer()


def _check_shape(item: WriteItem, data: torch.Tensor) -> None:
    """A part that is not as it was planned could be saved, but never loaded again."""
    if item.tensor_data is None or item.tensor_data.chunk is None:
        return
    planned, found = tuple(item.tensor_data.chunk.sizes), tuple(data.shape)
    if planned != found:
        raise CheckpointError(
            f"This rank's part of {item.index.fqn!r} has the shape {found}, but was planned with {planned} at "
            f"{tuple(item.tensor_data.chunk.offsets)}. Saved so, it could never be loaded.",
            key=item.index.fqn,
            kind="planner",
        )
