"""From bytes that arrived to tensors: checking blocks, staging boxes, and when memory can be filled directly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_storage.carrying import copy_into
from dcp_storage.codec import dtype_named, name_of_dtype
from dcp_storage.crc import crc32
from dcp_storage.errors import CorruptCheckpointError, IncompatibleCheckpointError
from dcp_storage.records import ItemRecord

__all__ = [
    "Check",
    "Place",
    "Taker",
    "check_blocks",
    "dtype_of",
    "fill",
    "is_direct",
    "narrowed",
    "product",
    "view_of",
]

Check = Callable[[str, ItemRecord, int, Sequence[memoryview]], CorruptCheckpointError | None]


def check_blocks(
    file: str, item: ItemRecord, start: int, buffers: Sequence[memoryview]
) -> CorruptCheckpointError | None:
    """Compares the CRC-32 of each block with the manifest; the error for the first that differs.

    Args:
        file: for the message.
        item: whose payload it is; where it has no block sums nothing is checked.
        start: where the bytes begin in the payload, at a block's border.
        buffers: the bytes, up to a block's border or the payload's end.
    """
    if not item.blocks:
        return None
    number, room, crc = start // item.block, item.block, 0
    found: list[int] = []
    for buffer in buffers:
        rest = buffer
        while rest.nbytes:
            taken = rest[:room]
            crc = crc32(taken, crc)
            rest = rest[taken.nbytes :]
            room -= taken.nbytes
            if not room:
                found.append(crc)
                room, crc = item.block, 0
    if room != item.block:
        found.append(crc)
    for k, sum_ in enumerate(found, number):
        if sum_ != item.blocks[k]:
            at = item.offset + item.payload_offset + k * item.block
            return CorruptCheckpointError(
                f"{file}: the bytes of {item.key!r} at offset {at} are altered: CRC-32 {item.blocks[k]:#010x} was "
                f"committed, {sum_:#010x} was read.",
                file=file,
                key=item.key,
                offset=at,
                wanted=item.blocks[k],
                found=sum_,
            )
    return None


class Taker:
    """Hands out a row of buffers in runs of any length.

    Args:
        buffers: what is handed out, in order.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._source = iter(buffers)
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes, in as many pieces as they lie in."""
        while size:
            if not self._rest.nbytes:
                self._rest = next(self._source)
                continue
            taken = self._rest[:size]
            self._rest = self._rest[taken.nbytes :]
            size -= taken.nbytes
            yield taken


@dataclass(frozen=True)
class Place:
    """Copies a staged box into its place in the target.

    Attributes:
        target: the whole target.
        at: where the box begins in it.
        lengths: the box's size.
        view: makes the box in the staging buffer, once its bytes are there: one that does not begin where its
            elements must is a copy.
        key: the state-dict key, for errors.
    """

    target: torch.Tensor
    at: tuple[int, ...]
    lengths: tuple[int, ...]
    view: Callable[[], torch.Tensor]
    key: str

    def __call__(self) -> None:
        fill(narrowed(self.target, self.at, self.lengths), self.view(), self.key)


def narrowed(tensor: torch.Tensor, at: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The box of a tensor that begins at ``at``, as a view."""
    for dim, (first, count) in enumerate(zip(at, lengths, strict=True)):
        tensor = tensor.narrow(dim, first, count)
    return tensor


def fill(target: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Copies a value into a target of its shape, cast to the target's dtype.

    Raises:
        IncompatibleCheckpointError: torch has no such cast, or the two are quantized in different ways.
    """
    if value.is_quantized and not target.is_quantized:
        value = value.dequantize()
    elif value.is_quantized and _quantizer(value) != _quantizer(target):
        # copy_ would take over the integers and leave the target's scale: other numbers than the saved ones.
        raise IncompatibleCheckpointError(
            f"The tensor {key!r} was quantized with other scales or zero points than its target has.", key=key
        )
    try:
        copy_into(target, value)
    except (RuntimeError, TypeError) as error:
        raise IncompatibleCheckpointError(
            f"The tensor {key!r} of dtype {name_of_dtype(value.dtype)} cannot be copied into a target of dtype "
            f"{name_of_dtype(target.dtype)}: {str(error).partition(chr(10))[0][:200]}",
            key=key,
            cause=error,
        ) from error


def _quantizer(tensor: torch.Tensor) -> tuple[Any, ...]:
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        return tensor.dtype, scheme, tensor.q_scale(), tensor.q_zero_point()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.dtype, scheme, tensor.q_per_channel_axis(), scales.tolist(), zeros.tolist()


def view_of(
    staging: memoryview, skip: int, dtype: torch.dtype, lengths: tuple[int, ...], stride: Sequence[int]
) -> torch.Tensor:
    """The box in a staging buffer, as a strided tensor. The bytes must be there already: it may be a copy of them."""
    itemsize = dtype.itemsize
    span = (sum((n - 1) * s for n, s in zip(lengths, stride, strict=True)) + 1) * itemsize
    raw = torch.frombuffer(staging, dtype=torch.uint8, offset=skip, count=span)
    if raw.data_ptr() % itemsize:
        raw = raw.clone()  # a view of a wider type must begin on its own border: complex128 is copied in units of 16
    return raw.view(dtype).as_strided(lengths, tuple(stride))


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes may be put straight into the target's memory."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and target.dtype is dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def dtype_of(item: ItemRecord) -> torch.dtype:
    """The element type of an item's raw payload, checked against its length.

    Raises:
        IncompatibleCheckpointError: this torch does not have it, or this machine has another byte order.
        CorruptCheckpointError: shape, dtype and length do not fit each other.
    """
    dtype = dtype_named(item.dtype or "")
    if dtype is None:
        raise IncompatibleCheckpointError(
            f"The tensor {item.key!r} is of dtype {item.dtype}, which torch {torch.__version__} does not have.",
            key=item.key,
        )
    if sys.byteorder != "little" and dtype.itemsize > 1:
        raise IncompatibleCheckpointError(
            f"The bytes of {item.key!r} are little-endian, and this machine is {sys.byteorder}-endian.", key=item.key
        )
    if product(item.shape or ()) * dtype.itemsize != item.payload_length:
        raise CorruptCheckpointError(
            f"The manifest gives {item.payload_length} bytes for {item.key!r}, whose shape {item.shape} and dtype "
            f"{item.dtype} need another number.",
            key=item.key,
            wanted=product(item.shape or ()) * dtype.itemsize,
            found=item.payload_length,
        )
    return dtype


def product(sizes: Sequence[int]) -> int:
    """The number of elements of a shape; 1 of an empty one."""
    out = 1
    for size in sizes:
        out *= size
    return out
