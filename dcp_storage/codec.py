"""Tensors to the bytes of ``torch.save``, without copying the tensor, and where its raw bytes sit in them.

``torch.save`` hands the memory of a storage to a file-like object in one ``write``. :func:`encode` keeps that piece
as a view of the tensor's own memory and copies everything else, so that an item is a short list of buffers.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from dataclasses import dataclass, field
from typing import IO, cast

import torch

from dcp_storage.crc import block_sums, combine_all
from dcp_storage.errors import CheckpointError
from dcp_storage.records import block_size
from dcp_storage.sealing import Seal, alignment, can_seal, write_unsummed
from dcp_storage.store import Buffers, total

__all__ = [
    "QUANTIZED",
    "Encoded",
    "bytes_of",
    "contiguous_stride",
    "dtype_named",
    "encode",
    "encode_object",
    "name_of_dtype",
]


@dataclass
class Encoded:
    """The bytes of one item.

    Attributes:
        buffers: the bytes, in order.
        length: bytes in all.
        payload_offset: where the payload begins in them.
        payload_length: its bytes.
        dtype: element type, where the payload is the raw bytes of a tensor; None where it is the whole item.
        shape: the tensor's shape, with ``dtype``.
        stride: its element strides where they are not those of a contiguous tensor.
        copied: bytes held beyond the caller's own tensors (a budget counts them).
        blocks: CRC-32 of each block of the payload where they are known already, else empty.
        payload_crc32: CRC-32 of the payload, with ``blocks``.
    """

    buffers: list[memoryview] = field(default_factory=list)
    length: int = 0
    payload_offset: int = 0
    payload_length: int = 0
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    copied: int = 0
    blocks: tuple[int, ...] = ()
    payload_crc32: int = 0


QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Dtypes whose scales and zero points are in the item, not in its metadata."""

_SMALL = 1 << 20  # bytes of payload up to which what surrounds it is remembered by kind of tensor


class _Py_buffer(ctypes.Structure):  # noqa: N801 - CPython's name
    """CPython's buffer record, to learn where a read-only memoryview points (PEP 3118)."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


def _address(view: memoryview) -> int:
    record = _Py_buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(record), 0)
    try:
        return int(record.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(record))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense CPU tensor as a flat, writable view of bytes that keeps the tensor alive.

    Args:
        tensor: strided, on the CPU, its elements in one run of memory without holes or overlaps.
    """
    nbytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    array.keep = tensor  # type: ignore[attr-defined]  # the view holds the array, the array the tensor
    return memoryview(array).cast("B")


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor of ``shape``."""
    out = []
    step = 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def name_of_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """``"bfloat16"`` → ``torch.bfloat16``; None where this torch has no such dtype."""
    # Not getattr: for some names torch imports a module then, and the name comes from a store.
    found = vars(torch).get(name)
    return found if isinstance(found, torch.dtype) else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, each place once (in any order of dimensions)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and sys.byteorder == "little"  # raw bytes are little-endian; elsewhere the item's own marker says what they are
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.requires_grad
        and not getattr(tensor, "__dict__", None)  # torch.save would keep Python attributes: let it see the original
    )


def _own_storage(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor on a storage of exactly its own bytes, and how many bytes had to be copied for that.

    Stock torch clones where the storage is larger; a tensor over the dense region itself serialises to the same bytes.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() == nbytes:
        return tensor, 0
    if not nbytes or not _is_dense(tensor):
        return tensor.clone(), nbytes
    flat = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()), 0


class _Sink:
    """The file-like object that ``torch.save`` writes to."""

    def __init__(self, out: Encoded, memory: memoryview | None) -> None:
        self._out = out
        self._memory = memory
        self._start = _address(memory) if memory is not None and memory.nbytes else 0
        self._small = bytearray()
        self.payload_offset: int | None = None

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B") if isinstance(data, bytes) else data
        if (
            self._start
            and self.payload_offset is None
            and self._memory is not None
            and view.nbytes == self._memory.nbytes
            and _address(view) == self._start
        ):
            self._spill()
            self.payload_offset = self._out.length
            self._out.buffers.append(self._memory)
        else:
            self._small += view
        self._out.length += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Torch asks for it; there is nothing behind this object to flush to."""

    def _spill(self) -> None:
        if self._small:
            self._out.buffers.append(memoryview(bytes(self._small)))
            self._out.copied += len(self._small)
            self._small = bytearray()

    def finish(self) -> None:
        self._spill()


def encode(tensor: torch.Tensor) -> Encoded:
    """The bytes that ``torch.save(tensor)`` to a buffer gives (of a view: of its clone), the tensor itself not copied.

    The caller must not change the tensor until the bytes are written. A tensor that is not plain strided CPU memory
    (a subclass, sparse, quantized) is serialised whole, and its payload is the whole item.

    Args:
        tensor: what the planner resolved; moved to the CPU here where it is elsewhere.

    Raises:
        CheckpointError: of kind ``unsupported``, for a tensor without data.
    """
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        raise CheckpointError("A tensor on the meta device has no data that could be saved.", kind="unsupported")
    copied = 0
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
        copied = tensor.numel() * tensor.element_size()
    out = Encoded()
    memory = None
    if _is_plain(tensor):
        tensor, extra = _own_storage(tensor)
        copied += extra
        memory = bytes_of(tensor)
    elif tensor.layout is torch.strided and tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
    if memory is not None and memory.nbytes and can_seal():
        _fill_sealed(out, tensor, memory)
    else:
        sink = _Sink(out, memory)
        torch.save(tensor, cast("IO[bytes]", sink))  # it only ever calls write and flush
        sink.finish()
        out.payload_offset = sink.payload_offset or 0
    out.copied += copied
    if memory is not None and (out.payload_offset or not memory.nbytes):
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        out.payload_length = memory.nbytes
        out.dtype = name_of_dtype(tensor.dtype)
        out.shape = shape
        out.stride = None if tensor.is_contiguous() else stride
    else:
        out.payload_length = out.length
    return out


def _fill_sealed(out: Encoded, tensor: torch.Tensor, memory: memoryview) -> None:
    """Makes the item with one run over the tensor's memory, which gives its blocks' sums too."""
    length = memory.nbytes
    if length <= _SMALL:
        seal = _frame(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), alignment())
    else:
        seal = _unsummed(tensor, memory)
    block = block_size(length)
    out.blocks = block_sums(memory, block)
    whole, rest = divmod(length, block)
    pieces = [*zip(out.blocks, [block] * whole, strict=False), *([(out.blocks[-1], rest)] if rest else [])]
    out.payload_crc32 = combine_all(pieces)
    before, after = seal.fill(out.payload_crc32)
    out.buffers = [memoryview(before), memory, memoryview(after)]
    out.payload_offset = len(before)
    out.length = len(before) + length + len(after)
    out.copied += len(before) + len(after)


def _unsummed(tensor: torch.Tensor, memory: memoryview) -> Seal:
    made = Encoded()
    sink = _Sink(made, memory)
    write_unsummed(tensor, sink)
    sink.finish()
    before, _, after = made.buffers
    return Seal(bytes(before), memory.nbytes, bytes(after))


@functools.lru_cache(maxsize=1024)
def _frame(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], aligned_to: int) -> Seal:
    """What surrounds the payload of small tensors of one kind, which a model has by the hundred.

    ``aligned_to`` is torch's setting, on which it depends; it is here to tell what is remembered apart.
    """
    # Viewed as what it is: torch warns where some dtypes are allocated, and the caller's tensor is there already.
    raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
    sample = raw.view(dtype).as_strided(shape, stride)
    return _unsummed(sample, bytes_of(sample))


def encode_object(data: Buffers) -> Encoded:
    """An object item, whose bytes the planner made; its payload is all of it."""
    length = total(data)
    return Encoded(buffers=list(data), length=length, payload_length=length, copied=length)
