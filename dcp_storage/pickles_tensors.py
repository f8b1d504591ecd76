"""The rules for torch: dtypes, sizes, devices, and tensors whose storages are exactly the bytes that are there.

torch's own rebuilding functions let a storage grow to whatever size the pickle names, or leave a check for later in a
list of the whole process. The stand-ins here check first, and then use torch's public constructors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from dcp_storage.errors import IncompatibleCheckpointError
from dcp_storage.pickles_machine import NotAllowedError, Rule
from dcp_storage.shapes import LARGEST, MOST_DIMENSIONS, elements

__all__ = ["TORCH_RULES", "StorageType"]

_STORAGES: Final = {  # the names that torch.save still writes; newer dtypes come as UntypedStorage
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "QInt32": torch.qint32,
    "QInt8": torch.qint8,
    "QUInt2x4": torch.quint2x4,
    "QUInt4x2": torch.quint4x2,
    "QUInt8": torch.quint8,
    "Short": torch.int16,
}


@dataclass(frozen=True)
class StorageType:
    """What a pickle names where it means storages of one dtype, or (``untyped``) of bytes that a tensor gives one."""

    dtype: torch.dtype
    untyped: bool = False


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(v) is not int or not 0 <= v < LARGEST for v in values):
        raise NotAllowedError("not a tuple of counts")
    return values


def _product(size: tuple[int, ...]) -> int:
    count = elements(size)
    if count is None:
        raise NotAllowedError("a size without bounds")
    return count


def _storage(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype]:
    if type(storage) is not torch.storage.TypedStorage:
        raise NotAllowedError("not a storage")
    return storage._untyped_storage, storage.dtype


def _no_hooks(hooks: Any) -> None:
    if hooks is not None and (type(hooks) is not OrderedDict or hooks):
        raise NotAllowedError("backward hooks")


def _fits(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> None:
    _counts((offset, *_counts(size), *_counts(stride)))
    if len(size) != len(stride):
        raise NotAllowedError("a size and its strides differ in length")
    span = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    last = offset + span if _product(size) else offset
    if last * dtype.itemsize > storage.nbytes():
        raise ValueError(f"a tensor needs {last * dtype.itemsize} bytes of a storage of {storage.nbytes()}")


def _strided(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    # Tensor.set_ makes a storage larger when the tensor does not fit, so that has to be known before.
    _fits(storage, dtype, offset, size, stride)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)


def _dressed(tensor: torch.Tensor, requires_grad: Any, hooks: Any, metadata: Any) -> torch.Tensor:
    _no_hooks(hooks)
    if metadata is not None:
        if type(metadata) is not dict or any(k not in ("conj", "neg") or v is not True for k, v in metadata.items()):
            raise NotAllowedError("unknown properties of a tensor")
        if "conj" in metadata:
            tensor = tensor.conj()
        if "neg" in metadata:
            tensor = torch._neg_view(tensor)
    if type(requires_grad) is not bool:
        raise NotAllowedError("requires_grad is not a bool")
    return tensor.requires_grad_() if requires_grad else tensor


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    untyped, dtype = _storage(storage)
    return _dressed(_strided(untyped, dtype, offset, size, stride), requires_grad, hooks, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> torch.Tensor:
    untyped, _ = _storage(storage)
    if type(dtype) is not torch.dtype:
        raise NotAllowedError("not a dtype")
    if getattr(storage, "other_order", False) and dtype.itemsize > 1:
        raise IncompatibleCheckpointError(
            f"A tensor of dtype {str(dtype).removeprefix('torch.')} was saved on a machine of the other byte order, "
            "which torch.save notes in no way that it could be put right."
        )
    return _dressed(_strided(untyped, dtype, offset, size, stride), requires_grad, hooks, metadata)


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, params: Any, requires_grad: Any, hooks: Any
) -> torch.Tensor:
    untyped, dtype = _storage(storage)
    _fits(untyped, dtype, offset, size, stride)
    if type(params) is not tuple or len(params) < 3:
        raise NotAllowedError("not a way to quantize")
    if _product(size) * dtype.itemsize > untyped.nbytes():
        raise NotAllowedError("a quantized tensor larger than its storage")  # torch allocates its whole size first
    scheme, scale, zero, *axis = params
    if scheme is torch.per_tensor_affine and not axis and type(scale) is float and type(zero) is int:
        tensor = torch._empty_affine_quantized(size, scale=scale, zero_point=zero, dtype=dtype)
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams) and len(axis) == 1:
        at = _counts((axis[0],))[0]
        wanted = (torch.float64, torch.int64) if scheme is torch.per_channel_affine else (torch.float32,) * 2
        if not (
            at < len(size)
            and all(type(t) is torch.Tensor and t.shape == (size[at],) for t in (scale, zero))
            and (scale.dtype, zero.dtype) == wanted  # else torch would keep a copy of each
        ):
            raise NotAllowedError("scales that do not fit a quantized tensor")
        tensor = torch._empty_per_channel_affine_quantized(size, scales=scale, zero_points=zero, axis=at, dtype=dtype)
    else:
        raise NotAllowedError("not a way to quantize")
    tensor.set_(untyped, offset, size, stride)
    return _dressed(tensor, requires_grad, hooks, None)


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    if type(parts) is not tuple or not 3 <= len(parts) <= 4:
        raise NotAllowedError("not the parts of a sparse tensor")
    if layout == torch.sparse_coo:
        indices, values, size, *coalesced = parts
        tensors, flag = (indices, values), coalesced[0] if coalesced else None
        if flag is not None and type(flag) is not bool:
            raise NotAllowedError("not the parts of a sparse tensor")
    else:
        *tensors, size = parts  # type: ignore[assignment]
    if any(type(t) is not torch.Tensor for t in tensors):
        raise NotAllowedError("not the parts of a sparse tensor")
    _product(_counts(size))
    if layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(*tensors, size, is_coalesced=flag, check_invariants=True)
    return torch.sparse_compressed_tensor(*tensors, size, layout=layout, check_invariants=True)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    _no_hooks(hooks)
    if type(data) is not torch.Tensor or type(requires_grad) is not bool:
        raise NotAllowedError("not a tensor")
    return torch.nn.Parameter(data, requires_grad)


def _size(values: Any = ()) -> torch.Size:
    # Its hash is taken anew each time, also inside the keys of a dict, so that it must not be of any length.
    if not isinstance(values, tuple) or len(values) > MOST_DIMENSIONS or any(type(v) is not int for v in values):
        raise NotAllowedError("not a tuple of ints")
    return torch.Size(values)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or (index is not None and type(index) is not int):
        raise NotAllowedError("not a device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> torch.layout:
    for value in vars(torch).values():
        if isinstance(value, torch.layout) and str(value) == name:
            return value
    raise NotAllowedError("not a layout")


def _rules() -> dict[str, Callable[[], Rule]]:
    rules: dict[str, Callable[[], Rule]] = {
        "torch.Size": partial(Rule, torch.Size, _size, cost=96),
        "torch.device": partial(Rule, torch.device, _device),
        "torch.serialization._get_layout": partial(Rule, _layout, _layout),
        "torch.storage.UntypedStorage": partial(Rule, StorageType(torch.uint8, untyped=True)),
    }
    for name, function in (
        ("_rebuild_tensor_v2", _tensor_v2),
        ("_rebuild_tensor_v3", _tensor_v3),
        ("_rebuild_qtensor", _quantized),
        ("_rebuild_sparse_tensor", _sparse),
        ("_rebuild_parameter", _parameter),
    ):
        rules[f"torch._utils.{name}"] = partial(Rule, function, function, cost=2048)
    for value in vars(torch).values():
        if isinstance(value, (torch.dtype, torch.qscheme)):
            rules[str(value)] = partial(Rule, value)
    for name, dtype in _STORAGES.items():
        rules[f"torch.{name}Storage"] = partial(Rule, StorageType(dtype))
    return rules


TORCH_RULES: Final[Mapping[str, Callable[[], Rule]]] = MappingProxyType(_rules())
"""What makes the rule of each global of torch that is allowed."""
