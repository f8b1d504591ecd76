"""The rules for numpy: arrays, scalars and dtypes, rebuilt without trusting what the pickle says about memory.

A pickled dtype carries flags that say whether raw bytes are pointers to objects, and ``dtype.__setstate__`` believes
them. So a dtype is built again from its names, formats and offsets, and gets the state that numpy gives that one.

numpy is imported when data asks for it, not before.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from dcp_storage.errors import IncompatibleCheckpointError
from dcp_storage.pickles_machine import NotAllowedError, Rule
from dcp_storage.shapes import elements

__all__ = ["NUMPY_RULES"]

_CODE: Final = re.compile(r"[biufcSUVMmO]\d{1,9}")
_UNIT: Final = re.compile(r"generic|[YMWDhms]|[munpfa]s")
_DEEPEST: Final = 8
_ALIGNED_STRUCT: Final = 0x80


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise IncompatibleCheckpointError(
            "The checkpoint holds numpy values, and numpy cannot be imported here.", cause=error
        ) from error


def _counts(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or any(type(v) is not int or v < 0 for v in values):
        raise NotAllowedError("a shape is not a tuple of counts")
    return values


def _product(shape: Any) -> int:
    count = elements(_counts(shape))
    if count is None:
        raise NotAllowedError("a shape without bounds")
    return count


def _dtype(code: Any, align: Any = False, copy: Any = True) -> Any:
    if type(code) is not str or not _CODE.fullmatch(code) or align is not False:
        raise NotAllowedError("not the code of a dtype")
    return _numpy().dtype(code, False, True)  # a copy: building it further must not touch numpy's own


def _levels(dtype: Any) -> int:
    if dtype.subdtype is not None:
        return 1 + _levels(dtype.subdtype[0])
    return 1 + max((_levels(field[0]) for field in (dtype.fields or {}).values()), default=0)


def _plain(dtype: Any) -> Any:
    if not isinstance(dtype, _numpy().dtype) or dtype.hasobject:
        raise NotAllowedError("not a dtype of plain bytes")
    return dtype


def _build_dtype(dtype: Any, state: Any) -> None:
    if type(state) is not tuple or len(state) not in (8, 9):
        raise NotAllowedError("not the state of a dtype")
    wanted = _wanted(dtype, state)
    if wanted.kind != dtype.kind or _levels(wanted) > _DEEPEST:
        raise NotAllowedError("the state is of another dtype")
    dtype.__setstate__(wanted.__reduce__()[2])
    if dtype != wanted:
        raise NotAllowedError("the state is of another dtype")


def _wanted(dtype: Any, state: tuple[Any, ...]) -> Any:
    """The dtype that a state describes, made by numpy's own constructor."""
    numpy = _numpy()
    _version, order, base, names, fields, size, _alignment, flags, *extra = state
    if order not in ("<", ">", "|", "="):
        raise NotAllowedError("not a byte order")
    if base is not None:
        if type(base) is not tuple or len(base) != 2:
            raise NotAllowedError("not the base of a sub-array")
        return numpy.dtype((_plain(base[0]), _counts(base[1])))
    if names is not None:
        # Only strings may be hashed: a tuple can be made whose hash never ends.
        if type(names) is not tuple or type(fields) is not dict or any(type(name) is not str for name in names):
            raise NotAllowedError("names without fields")
        described: list[Any] = [fields.get(name) for name in names]
        if any(type(field) is not tuple or len(field) not in (2, 3) for field in described):
            raise NotAllowedError("not a field")
        if any(type(title) is not str for _, _, *titles in described for title in titles):
            raise NotAllowedError("not a title")
        record = {"names": list(names), "formats": [_plain(f[0]) for f in described], "itemsize": size}
        record["offsets"] = [f[1] for f in described]
        if any(len(f) == 3 for f in described):
            record["titles"] = [f[2] if len(f) == 3 else None for f in described]
        return numpy.dtype(record, align=type(flags) is int and bool(flags & _ALIGNED_STRUCT))
    if dtype.kind in "Mm":
        name, number, *_rest = extra[0][1]
        if type(name) is not bytes or not _UNIT.fullmatch(name.decode("ascii")) or type(number) is not int:
            raise NotAllowedError("not a unit of time")
        unit = "" if name == b"generic" else f"[{number}{name.decode('ascii')}]"
        return numpy.dtype(f"{dtype.kind}8{unit}").newbyteorder(order)
    return dtype.newbyteorder(order)


def _reconstruct(kind: Any, shape: Any, code: Any) -> Any:
    numpy = _numpy()
    if kind is not numpy.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise NotAllowedError("not a plain array")
    return numpy.ndarray((0,), "b")


def _build_array(array: Any, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise NotAllowedError("not the state of an array")
    _version, shape, dtype, fortran, content = state
    count = _product(shape)
    if type(content) is list and isinstance(dtype, _numpy().dtype) and dtype.kind == "O":
        # CPython frees these by recursion in C, so they must not be chained.
        if any(isinstance(item, (deque, defaultdict)) or _holds_objects(item) for item in content):
            raise NotAllowedError("an array of objects holds a deque, a defaultdict or another such array")
        found = len(content)
    elif type(content) is bytes:
        found, count = len(content), count * _plain(dtype).itemsize
    else:
        raise NotAllowedError("the content of an array is neither bytes nor objects")
    if found != count:
        raise ValueError(f"an array of {count} holds {found}")
    array.__setstate__((1, shape, dtype, bool(fortran), content))


def _holds_objects(item: Any) -> bool:
    return isinstance(item, _numpy().ndarray) and bool(item.dtype.hasobject)


def _scalar(dtype: Any, content: Any) -> Any:
    if type(content) is not bytes or len(content) != _plain(dtype).itemsize:
        raise NotAllowedError("not the bytes of a scalar")
    if not content:
        return dtype.type()
    return _numpy().frombuffer(content, dtype=dtype).copy()[0]


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    if type(content) not in (bytes, bytearray) or order not in ("C", "F", "K"):
        raise NotAllowedError("not the buffer of an array")
    if len(content) != _product(shape) * _plain(dtype).itemsize:
        raise ValueError("the buffer of an array has not its size")
    numpy = _numpy()
    array = numpy.frombuffer(bytearray(content), dtype=dtype)  # a copy: writable, and nobody else's
    if order == "K" and axes is not None:
        return array.reshape(shape).transpose(_counts(axes))
    return array.reshape(shape, order=order if order == "F" else "C")


def _array_class() -> Rule:
    return Rule(_numpy().ndarray)


def _dtype_class() -> Rule:
    return Rule(_numpy().dtype, _dtype, build=_build_dtype)


def _function(call: Callable[..., Any], build: Callable[[Any, Any], None] | None = None) -> Rule:
    return Rule(call, call, build=build)


def _rules() -> dict[str, Callable[[], Rule]]:
    rules: dict[str, Callable[[], Rule]] = {"numpy.ndarray": _array_class, "numpy.dtype": _dtype_class}
    for package in ("numpy.core", "numpy._core"):  # the same functions, before numpy 2 and since
        rules[f"{package}.multiarray._reconstruct"] = partial(_function, _reconstruct, _build_array)
        rules[f"{package}.multiarray.scalar"] = partial(_function, _scalar)
        rules[f"{package}.numeric._frombuffer"] = partial(_function, _frombuffer)
    return rules


NUMPY_RULES: Final[Mapping[str, Callable[[], Rule]]] = MappingProxyType(_rules())
"""What makes the rule of each global of numpy that is allowed."""
