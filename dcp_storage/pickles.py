"""Reading what others pickled without running it (invariant I9).

Three things on a store are pickles: a stock ``.metadata``, a planner's own data, and object entries (``torch.save`` of
anything that is not a tensor). All go through one machine with one list, :data:`SAFE_GLOBALS`, which a user widens
by ``trusted_globals``. What is handed to a planner, which unpickles it without any list, is pickled again by us.

Nothing of the process is changed: torch's own list of safe globals is neither asked nor touched.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from dcp_storage.errors import CorruptCheckpointError, UntrustedDataError, portable
from dcp_storage.pickles_machine import Machine
from dcp_storage.pickles_safe import SAFE_GLOBALS, Allowed, Trusted
from dcp_storage.pickles_shape import checked_metadata
from dcp_storage.pickles_tensors import StorageType
from dcp_storage.pickles_zip import records

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "MEMORY_LIMIT",
    "SAFE_GLOBALS",
    "Trusted",
    "load_metadata",
    "load_object",
    "load_plain",
    "reserialized",
]

MEMORY_LIMIT: Final = 8 << 30
"""Bytes that one pickle's objects may take unless said otherwise, estimated from above: 8 GiB."""

_METADATA_FILE: Final = ".metadata"


def load_metadata(
    data: bytes, *, trusted_globals: Sequence[Trusted] = (), limit: int = MEMORY_LIMIT, path: str | None = None
) -> Metadata:
    """The ``Metadata`` of a checkpoint that stock torch wrote, from the bytes of its ``.metadata``.

    Args:
        data: the whole file.
        trusted_globals: classes, functions and dotted names that may be rebuilt besides :data:`SAFE_GLOBALS`.
        limit: bytes of memory that its objects may take, estimated from above.
        path: the checkpoint, for errors.

    Raises:
        UntrustedDataError: it asks for a global that is not allowed, for more memory, or names a file outside the
            folder.
        CorruptCheckpointError: it is no pickle of a ``Metadata``, or its fields make no sense.
        IncompatibleCheckpointError: what it needs cannot be imported here.
    """
    value = load_plain(data, trusted_globals=trusted_globals, limit=limit, what=_METADATA_FILE, path=path)
    return checked_metadata(value, file=_METADATA_FILE, path=path)


def load_plain(
    data: bytes,
    *,
    trusted_globals: Sequence[Trusted] = (),
    limit: int = MEMORY_LIMIT,
    what: str,
    path: str | None = None,
) -> Any:
    """The object of a plain pickle, such as a planner's own data.

    Args:
        data: the whole pickle.
        trusted_globals: classes, functions and dotted names that may be rebuilt besides :data:`SAFE_GLOBALS`.
        limit: bytes of memory that its objects may take, estimated from above.
        what: the file, or what of it, for errors.
        path: the checkpoint, for errors.

    Raises:
        UntrustedDataError: it asks for a global that is not allowed, or for more memory.
        CorruptCheckpointError: it is no whole pickle.
        IncompatibleCheckpointError: what it needs cannot be imported here.
    """
    return Machine(bytes(data), Allowed(trusted_globals).find, limit=limit, file=what, path=path).run()


def load_object(
    data: bytes | bytearray | memoryview,
    *,
    trusted_globals: Sequence[Trusted] = (),
    limit: int = MEMORY_LIMIT,
    path: str | None = None,
    key: str | None = None,
    file: str | None = None,
    offset: int | None = None,
) -> Any:
    """The object of an object entry, from the bytes that ``torch.save`` wrote; its tensors are on the CPU.

    Args:
        data: the whole entry.
        trusted_globals: classes, functions and dotted names that may be rebuilt besides :data:`SAFE_GLOBALS`.
        limit: bytes of memory that its objects may take, estimated from above; the bytes of its tensors, which are
            never more than ``data``, come on top.
        path: the checkpoint, for errors.
        key: the state-dict key, for errors.
        file: the file it is in, for errors.
        offset: its first byte there, for errors.

    Raises:
        UntrustedDataError: it asks for a global that is not allowed, or for more memory.
        CorruptCheckpointError: it is nothing that ``torch.save`` wrote, or damaged.
        IncompatibleCheckpointError: what it needs cannot be imported here.
    """
    where: dict[str, Any] = {"path": path, "key": key, "file": file}
    found = records(bytes(data), offset=offset, **where)
    if "data.pkl" not in found:
        raise CorruptCheckpointError("An object entry is damaged: it has no data.pkl.", offset=offset, **where)
    order = bytes(found["byteorder"].content) if "byteorder" in found else b"little"
    if order not in (b"little", b"big"):
        raise CorruptCheckpointError("An object entry is damaged: it names no byte order.", offset=offset, **where)
    swap = order != sys.byteorder.encode()
    pickled = found["data.pkl"]
    machine = Machine(
        bytes(pickled.content),
        Allowed(trusted_globals).find,
        limit=limit,
        base=(offset or 0) + pickled.start,
        persistent=_storages({name: record.content for name, record in found.items()}, swap=swap),
        **where,
    )
    return machine.run()


def reserialized(value: Any) -> bytes:
    """``torch.save`` of ``value``: what a planner may unpickle, since we wrote it.

    Raises:
        UntrustedDataError: ``value`` is nested too deeply for pickle.
        CheckpointError: of kind ``"hook"``: a class that the user trusts cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except RecursionError as error:
        raise UntrustedDataError("An object entry is nested too deeply to be handed on.", cause=error) from error
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise portable(error, "torch.save") from error
    return buffer.getvalue()


def _storages(found: Mapping[str, memoryview], *, swap: bool) -> Callable[[Any], Any]:
    """What turns a persistent id into a storage. A storage is as large as its record, whatever the id says."""
    loaded: dict[str, Any] = {}
    typed: Any = torch.storage.TypedStorage

    def load(reference: Any) -> Any:
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
            raise ValueError("it refers to something that is not a storage")
        _, kind, key, _location, count = reference
        if type(kind) is not StorageType or type(key) is not str or type(count) is not int or count < 0:
            raise ValueError("it refers to a storage in no way that torch.save does")
        storage: Any = loaded.get(key)
        if storage is None:
            content = found[f"data/{key}"]
            raw = torch.empty(len(content), dtype=torch.uint8, device="cpu")
            if len(content):
                raw.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            storage = raw.untyped_storage()
            if swap:
                storage.byteswap(kind.dtype)
            loaded[key] = storage
        if count * kind.dtype.itemsize > storage.nbytes():
            raise ValueError(f"a storage of {storage.nbytes()} bytes is called one of {count} elements")
        wrapped = typed(wrap_storage=storage, dtype=kind.dtype, _internal=True)
        wrapped.other_order = swap and kind.untyped  # only the tensor over it knows how wide its numbers are
        return wrapped

    return load
