"""A digest of a value that is the same on every rank where the values are equal, whatever their place in memory."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Mapping, Set
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from dcp_storage.codec import bytes_of
from dcp_storage.errors import portable

__all__ = ["digest_of"]

_SIZE = 16


def digest_of(value: Any, *, key: str | None = None) -> bytes:
    """16 bytes that differ where ``value`` differs: by type, content and, for tensors, dtype and shape.

    Dicts count without their order and sets by their content, as they compare; NaNs of the same bits are equal. An
    object of any other class counts by what its own pickling gives.

    Args:
        value: anything that can be pickled.
        key: the state-dict key, for errors.

    Raises:
        CheckpointError: the value cannot be pickled.
    """
    try:
        return _digest(value, [])
    except Exception as error:
        raise portable(error, "Comparing the value between ranks", key=key) from error


def _joined(tag: str, *parts: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(digest_size=_SIZE)
    for part in (tag.encode(), *parts):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _digest(value: Any, above: list[int]) -> bytes:
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes, complex):
        return _joined(kind.__name__, value if kind is bytes else repr(value).encode("utf-8", "surrogatepass"))
    if kind is float:
        return _joined("float", struct.pack("<d", value))
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return _joined("global", f"{value.__module__}.{value.__qualname__}".encode())
    if id(value) in above:  # a circle: its place in it is what counts
        return _joined("circle", str(len(above) - above.index(id(value))).encode())
    above.append(id(value))
    try:
        return _compound(value, kind, above)
    finally:
        above.pop()


def _compound(value: Any, kind: type, above: list[int]) -> bytes:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if kind in (list, tuple):
        return _joined(kind.__name__, *(_digest(part, above) for part in value))
    if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections"):
        pairs = sorted(_digest(name, above) + _digest(part, above) for name, part in value.items())
        return _joined(kind.__name__, *pairs)
    if isinstance(value, Set) and kind.__module__ == "builtins":
        return _joined(kind.__name__, *sorted(_digest(part, above) for part in value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not getattr(value.dtype, "hasobject", True):
        return _joined("numpy", str(value.dtype).encode(), str(value.shape).encode(), value.tobytes())
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return _joined("global", kind.__module__.encode(), reduced.encode())
    rebuild, arguments, state, items, pairs_of = (*reduced, None, None, None)[:5]
    return _joined(
        "object",
        f"{kind.__module__}.{kind.__qualname__}".encode(),
        _digest(rebuild, above),
        _digest(tuple(arguments), above),
        _digest(state, above),
        _digest(list(items or ()), above),
        _digest(dict(pairs_of or ()), above),
    )


def _tensor(value: torch.Tensor) -> bytes:
    about = f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
    if type(value) is not torch.Tensor and not isinstance(value, torch.nn.Parameter):
        about += type(value).__qualname__.encode()
    if value.layout is not torch.strided or value.is_quantized:
        whole = io.BytesIO()
        torch.save(value, whole)
        return _joined("tensor", about, whole.getvalue())
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _joined("tensor", about, bytes_of(plain))
