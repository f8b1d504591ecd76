"""Where the numbers are in an item that stock torch wrote, found from the item itself: its first and last few KiB.

Stock metadata says where an item is, not where the tensor's bytes are in it. The item is a zip, whose directory stands
at its end and whose pickle, which tells what tensor it is, at its beginning. Both are read with the same care as whole
items: the zip by :mod:`zipfile`, the pickle by the machine of :mod:`dcp_storage.pickles_machine`. Whatever is not
plainly a dense tensor on a storage of its own is left alone: it is read whole, as ever.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_storage.codec import contiguous_stride, dtype_named, name_of_dtype
from dcp_storage.errors import CheckpointError, ObjectNotFoundError, ObjectTooShortError
from dcp_storage.pickles_machine import Machine, Rule
from dcp_storage.pickles_safe import Allowed
from dcp_storage.pickles_tensors import StorageType
from dcp_storage.reading import Checkpoint
from dcp_storage.records import ItemRecord, TensorEntry
from dcp_storage.shapes import LARGEST, elements
from dcp_storage.store import Store

__all__ = ["WORTH", "look_inside", "peek"]

WORTH = 128 * 1024
"""Bytes that must be left out for looking to be worth its two requests."""

_HEAD, _TAIL = 8192, 8192
_LIMIT = 1 << 20  # bytes of memory for the pickle of one tensor
_LOCAL = struct.Struct("<4s22xHH")
_V2, _V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"


class _Hole(Exception):  # noqa: N818 - not an error: what was looked for is not at either end
    """The zip's directory points between the two ends that were read."""


class _Ends(io.RawIOBase):
    """An item of which only the two ends are here."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        super().__init__()
        self._head, self._tail, self._length, self._at = head, tail, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise _Hole
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._length if size < 0 else min(self._at + size, self._length)
        first = self._length - len(self._tail)
        if stop <= len(self._head):
            found = self._head[self._at : stop]
        elif self._at >= first:
            found = self._tail[self._at - first : stop - first]
        else:
            raise _Hole
        self._at = max(stop, self._at)
        return found


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def look_inside(
    store: Store, checkpoint: Checkpoint, items: Iterable[ReadItem], max_concurrency: int
) -> dict[MetadataIndex, ItemRecord]:
    """The records, with the place of their numbers, of the saved tensors that are not wanted whole.

    Args:
        store: the folder.
        checkpoint: what is in it; only one without sums of its own is looked into.
        items: what is wanted.
        max_concurrency: requests at once.

    Raises:
        StoreError: as :func:`peek`.
    """
    found: dict[MetadataIndex, tuple[ItemRecord, tuple[int, ...], str]] = {}
    for item in items:
        record = checkpoint.items.get(item.storage_index)
        entry = checkpoint.manifest.entries.get(item.storage_index.fqn)
        if record is None or record.dtype is not None or record.crc32 is not None or record.transforms:
            continue
        if item.type == LoadItemType.BYTE_IO or not isinstance(entry, TensorEntry) or item.storage_index in found:
            continue
        dtype = dtype_named(entry.dtype)
        shape = next((chunk.sizes for chunk in entry.chunks if chunk.offsets == record.offsets), None)
        if shape is None or dtype is None:
            continue
        if (math.prod(shape) - math.prod(item.lengths)) * dtype.itemsize >= WORTH:
            found[item.storage_index] = record, shape, entry.dtype
    if not found:
        return {}
    with ThreadPoolExecutor(max_concurrency, thread_name_prefix="dcp_storage-peek") as pool:
        looked = pool.map(lambda f: peek(store, checkpoint.file_of(f[0]), *f), found.values())
        return dict(zip(found, looked, strict=True))


def peek(store: Store, file: str, item: ItemRecord, shape: Sequence[int], dtype: str) -> ItemRecord:
    """The item with the place of its raw bytes, where it is plainly a contiguous tensor of that shape and dtype.

    Args:
        store: the folder.
        file: the file that the item is in.
        item: what stock metadata says of it.
        shape: the chunk's shape, by the metadata.
        dtype: its dtype, by the metadata.

    Returns:
        A record with ``dtype``, ``shape`` and the payload's place, and without block sums; or ``item`` itself.

    Raises:
        StoreError: the store failed otherwise than by not having the bytes, which the check of sizes will say.
    """
    if item.dtype is not None or item.transforms or item.length <= _HEAD + _TAIL:
        return item
    head, tail = bytearray(_HEAD), bytearray(_TAIL)
    try:
        store.read_into(file, item.offset, [memoryview(head)])
        store.read_into(file, item.offset + item.length - _TAIL, [memoryview(tail)])
    except (ObjectNotFoundError, ObjectTooShortError):
        return item
    found = _look(bytes(head), bytes(tail), item)
    if found is None:
        return item
    start, tensor = found
    if tensor.size != tuple(shape) or name_of_dtype(tensor.dtype) != dtype:
        return item
    size = tensor.dtype.itemsize
    return msgspec.structs.replace(
        item,
        payload_offset=start + tensor.offset * size,
        payload_length=math.prod(tensor.size) * size,
        dtype=dtype,
        shape=tensor.size,
        blocks=(),
    )


def _look(head: bytes, tail: bytes, item: ItemRecord) -> tuple[int, _Tensor] | None:
    """Where the storage begins in the item, and the tensor on it; None where it is not plain."""
    try:
        with zipfile.ZipFile(_Ends(head, tail, item.length)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if any(e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1 for e in entries.values()):
                return None
            pickled = _content(head, entries["data.pkl"])
            order = _content(head, entries["byteorder"]) if "byteorder" in entries else b"little"
        tensor = Machine(pickled, _find, limit=_LIMIT, key=item.key, persistent=_persistent).run()
        if type(tensor) is not _Tensor or order != b"little":
            return None
        entry = entries[f"data/{tensor.storage.key}"]
        start = _start(head, entry)
    except (CheckpointError, _Hole, zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, LookupError):
        return None  # whatever it is, it is no plain tensor: reading it whole gives the value, or says what is wrong
    last = (tensor.offset + math.prod(tensor.size)) * tensor.dtype.itemsize
    if last > entry.file_size or start + entry.file_size > item.length:
        return None
    return start, tensor


def _start(head: bytes, entry: zipfile.ZipInfo) -> int:
    if entry.header_offset < 0:  # zipfile takes off what it believes to be in front of the archive
        raise _Hole
    signature, name, extra = _LOCAL.unpack(head[entry.header_offset : entry.header_offset + _LOCAL.size])
    if signature != b"PK\x03\x04":
        raise _Hole
    return int(entry.header_offset + _LOCAL.size + name + extra)


def _content(head: bytes, entry: zipfile.ZipInfo) -> bytes:
    start = _start(head, entry)
    if start + entry.file_size > len(head):
        raise _Hole
    return head[start : start + entry.file_size]


def _persistent(reference: Any) -> _Storage:
    kind, storage, key, _, _ = reference
    if kind != "storage" or type(storage) is not StorageType or type(key) is not str:
        raise ValueError("not a storage")
    return _Storage(key, storage.dtype)


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> _Tensor:
    return _tensor_v3(storage, offset, size, stride, requires_grad, hooks, storage.dtype, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> _Tensor:
    counts = (offset, *size, *stride)
    if type(storage) is not _Storage or metadata is not None or type(dtype) is not torch.dtype:
        raise ValueError("not a plain tensor")
    if any(type(n) is not int or not 0 <= n <= LARGEST for n in counts) or elements(size) is None:
        raise ValueError("not the place of a tensor")  # before anything is multiplied
    size, stride, dense = tuple(size), tuple(stride), contiguous_stride(tuple(size))
    if any(n > 1 and a != b for n, a, b in zip(size, stride, dense, strict=True)):
        raise ValueError("not a contiguous tensor")
    return _Tensor(storage, dtype, offset, size, stride)


def _find(name: str) -> Rule | None:
    if name in (_V2, _V3):
        function = _tensor_v2 if name == _V2 else _tensor_v3
        return Rule(function, function, cost=2048)
    return Allowed(()).find(name)
