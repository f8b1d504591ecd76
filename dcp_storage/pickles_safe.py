"""The safe list: the rules for builtins, the standard library and the stock classes of DCP, and the user's own.

Each rule takes exactly the arguments that the class's own pickling writes, of any protocol from 2 to 5 and any Python
since 3.8. What could take memory by a number alone (``bytearray(10**10)``, ``list(range(10**10))``) is thereby out.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import importlib
import pathlib
import pkgutil
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from dcp_storage.errors import IncompatibleCheckpointError
from dcp_storage.pickles_machine import NotAllowedError, Rule
from dcp_storage.pickles_numpy import NUMPY_RULES
from dcp_storage.pickles_tensors import TORCH_RULES

__all__ = ["SAFE_GLOBALS", "Allowed", "Trusted"]

Trusted = type | Callable[..., Any] | str
"""What ``trusted_globals`` takes: classes, functions, and dotted names such as ``"my_package.my_module.MyClass"``."""

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
_NUMBERS: Final = (int, float)
_LATIN: Final = ("latin1", "latin-1")
_RANGE_BITS: Final = 1024
_FRACTION_BITS: Final = 1 << 16
_DECIMAL_CHARACTERS: Final = 10_000


def _only(kinds: type | tuple[type, ...], *values: Any) -> None:
    """Every value is exactly of one of ``kinds``: a subclass or a bool could do something of its own."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    for value in values:
        if type(value) not in allowed:
            raise NotAllowedError(f"a {type(value).__name__} is not expected there")


def _empty(items: Any) -> None:
    _only((list, tuple), items)
    if items:
        raise NotAllowedError("the items come after the object")


def _bytes_of(text: Any, encoding: Any) -> bytes:
    _only(str, text)
    if encoding not in _LATIN:
        raise NotAllowedError("not the encoding that stands for bytes")
    return str.encode(text, "latin-1")


def _bytearray(content: Any = b"", encoding: Any = None) -> bytearray:
    if encoding is not None:
        content = _bytes_of(content, encoding)
    _only(bytes, content)
    return bytearray(content)


def _bytes() -> bytes:
    return b""


def _complex(real: Any, imaginary: Any) -> complex:
    _only(_NUMBERS, real, imaginary)
    return complex(real, imaginary)


def _short(most: int, *values: Any) -> None:
    """Ints, none of them so long that dividing them takes time: that grows with the square of their length."""
    _only(int, *values)
    if any(value.bit_length() > most for value in values):
        raise NotAllowedError(f"an int of more than {most} bits")


def _range(start: Any, stop: Any, step: Any) -> range:
    _short(_RANGE_BITS, start, stop, step)
    return range(start, stop, step)


def _slice(start: Any, stop: Any, step: Any) -> slice:
    # No containers and no slices: CPython frees a slice by recursion in C.
    _only((int, float, str, bool, type(None)), start, stop, step)
    return slice(start, stop, step)


def _deque(items: Any = (), most: Any = None) -> deque[Any]:
    _only((int, type(None)), most)
    _empty(items)
    return deque(maxlen=most)


def _defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and not callable(factory):
        raise NotAllowedError("the factory cannot be called")
    return defaultdict(factory)


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    _empty(pairs)
    return OrderedDict()


def _counter(counts: Any = None) -> Counter[Any]:
    if counts is not None:
        _only(dict, counts)
    return Counter(counts)


def _fraction(numerator: Any, denominator: Any = 1) -> fractions.Fraction:
    if type(numerator) is str:  # Python before 3.12 writes it as text; Fraction would also take "1e1000000000"
        head, _, tail = numerator.partition("/")
        numerator, denominator = int(head), int(tail or "1")  # which end at the digits that Python converts
    _short(_FRACTION_BITS, numerator, denominator)
    return fractions.Fraction(numerator, denominator)


def _decimal(text: Any) -> decimal.Decimal:
    _only(str, text)
    if len(text) > _DECIMAL_CHARACTERS:  # its hash is taken anew wherever it is a key
        raise NotAllowedError(f"a number of more than {_DECIMAL_CHARACTERS} characters")
    return decimal.Decimal(text)


def _uuid() -> uuid.UUID:
    return uuid.UUID.__new__(uuid.UUID)


def _build_uuid(target: uuid.UUID, state: Any) -> None:
    if type(state) is not dict or not {"int"} <= set(state) <= {"int", "is_safe"}:
        raise NotAllowedError("not the state of a UUID")
    _only(int, *state.values())
    if not 0 <= state["int"] < 1 << 128:
        raise NotAllowedError("not the number of a UUID")
    target.__setstate__(state)  # type: ignore[attr-defined]


def _moment(kind: Callable[..., Any], packed: Any, zone: Any = None) -> Any:
    if type(packed) is str:  # as Python 2 wrote it
        packed = packed.encode("latin-1")
    _only(bytes, packed)
    return kind(packed) if zone is None else kind(packed, zone)


def _timedelta(days: Any, seconds: Any, microseconds: Any) -> datetime.timedelta:
    _only(int, days, seconds, microseconds)
    return datetime.timedelta(days, seconds, microseconds)


def _timezone(offset: Any, name: Any = None) -> datetime.timezone:
    _only(datetime.timedelta, offset)
    if name is None:
        return datetime.timezone(offset)
    _only(str, name)
    return datetime.timezone(offset, name)


def _path(kind: type[pathlib.PurePath], *parts: Any) -> pathlib.PurePath:
    _only(str, *parts)
    return kind(*parts)


def _build_attributes(known: frozenset[str], target: Any, state: Any) -> None:
    """Sets plain attributes, none of which hides anything of the class but the ``known`` fields."""
    if type(state) is not dict:
        raise NotAllowedError("the state is not a dict")
    for name in state:
        # Pickling, copying and hashing look methods up on the instance first: data must not put itself in between.
        if name not in known and (type(name) is not str or name.startswith("__") or hasattr(type(target), name)):
            # Never the text of any other value: that of a tuple which holds itself twice, and so on, has no end.
            raise NotAllowedError(f"an attribute {name!r:.100}" if type(name) is str else "an attribute without a name")
    target.__dict__.update({sys.intern(name): value for name, value in state.items()})


def _build_index(known: frozenset[str], target: Any, state: Any) -> None:
    _build_attributes(known, target, state)
    # It is hashed next, so what it consists of is looked at now.
    _only(str, target.fqn)
    _only((torch.Size, type(None)), target.offset)
    _only((int, type(None)), target.index)


def _build_storage_meta(known: frozenset[str], target: Any, state: Any) -> None:
    _build_attributes(known, target, state)
    target.__dict__.setdefault("modules", [])  # an older torch has no such field


def _build_properties(memory_formats: type, target: Any, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise NotAllowedError("not the state of TensorProperties")
    kinds = (torch.dtype, torch.layout, bool, memory_formats, bool)
    if tuple(map(type, state)) != kinds:
        raise NotAllowedError("not the state of TensorProperties")
    target.__setstate__(state)


def _stock(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)


def _record(module: str, name: str, build: Callable[[frozenset[str], Any, Any], None] = _build_attributes) -> Rule:
    kind = _stock(module, name)
    known = frozenset(field.name for field in fields(kind))
    return Rule(kind, partial(_blank, kind), build=partial(build, known), cost=300)


def _properties() -> Rule:
    kind = _stock(_METADATA, "TensorProperties")
    return Rule(
        kind, partial(_blank, kind), build=partial(_build_properties, _stock(_METADATA, "_MEM_FORMAT_ENCODING"))
    )


def _memory_format() -> Rule:
    kind = _stock(_METADATA, "_MEM_FORMAT_ENCODING")
    return Rule(kind, partial(_member_by_value, kind))


def _member_by_value(kind: Any, value: Any) -> Any:
    _only(int, value)
    return kind(value)


def _member_by_name(kind: Any, name: Any) -> Any:
    """``getattr`` as a pickle of an enum's member may name it: it reaches nothing but memory formats."""
    if kind is not _stock(_METADATA, "_MEM_FORMAT_ENCODING") or type(name) is not str or name not in kind.__members__:
        raise NotAllowedError("not a memory format")
    return kind[name]


def _filled(kind: Callable[..., Any], items: Any = ()) -> Any:
    _only((list, tuple), items)
    return kind(items)


def _rules() -> dict[str, Callable[[], Rule]]:
    rules: dict[str, Callable[[], Rule]] = {
        **NUMPY_RULES,
        **TORCH_RULES,
        "_codecs.encode": partial(Rule, _bytes_of, _bytes_of),
        "builtins.bytearray": partial(Rule, bytearray, _bytearray),
        "builtins.bytes": partial(Rule, bytes, _bytes),
        "builtins.complex": partial(Rule, complex, _complex),
        "builtins.frozenset": partial(Rule, frozenset, partial(_filled, frozenset), hashes=True),
        "builtins.getattr": partial(Rule, _member_by_name, _member_by_name),
        "builtins.range": partial(Rule, range, _range),
        "builtins.set": partial(Rule, set, partial(_filled, set), hashes=True),
        "builtins.slice": partial(Rule, slice, _slice),
        "collections.Counter": partial(Rule, Counter, _counter),
        "collections.OrderedDict": partial(Rule, OrderedDict, _ordered, build=partial(_build_attributes, frozenset())),
        "collections.defaultdict": partial(Rule, defaultdict, _defaultdict),
        "collections.deque": partial(Rule, deque, _deque, cost=1024),
        "datetime.date": partial(Rule, datetime.date, partial(_moment, datetime.date)),
        "datetime.datetime": partial(Rule, datetime.datetime, partial(_moment, datetime.datetime)),
        "datetime.time": partial(Rule, datetime.time, partial(_moment, datetime.time)),
        "datetime.timedelta": partial(Rule, datetime.timedelta, _timedelta),
        "datetime.timezone": partial(Rule, datetime.timezone, _timezone),
        "decimal.Decimal": partial(Rule, decimal.Decimal, _decimal),
        "fractions.Fraction": partial(Rule, fractions.Fraction, _fraction),
        "uuid.UUID": partial(Rule, uuid.UUID, _uuid, build=_build_uuid),
        f"{_METADATA}._MEM_FORMAT_ENCODING": _memory_format,
        f"{_METADATA}.MetadataIndex": partial(_record, _METADATA, "MetadataIndex", _build_index),
        f"{_METADATA}.TensorProperties": _properties,
        f"{_METADATA}.StorageMeta": partial(_record, _METADATA, "StorageMeta", _build_storage_meta),
        f"{_FILESYSTEM}._StorageInfo": partial(_record, _FILESYSTEM, "_StorageInfo"),
    }
    for kind in (bool, dict, float, int, list, str, tuple):  # as values only: what a defaultdict fills in
        rules[f"builtins.{kind.__name__}"] = partial(Rule, kind)
    for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "TensorStorageMetadata"):
        rules[f"{_METADATA}.{name}"] = partial(_record, _METADATA, name)
    for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"):
        foreign = name == ("PosixPath" if sys.platform == "win32" else "WindowsPath")
        kind = getattr(pathlib, f"Pure{name}" if foreign else name)
        for module in ("pathlib", "pathlib._local"):  # the second is how Python 3.13 names it
            rules[f"{module}.{name}"] = partial(Rule, kind, partial(_path, kind))
    return rules


_RULES: Final[Mapping[str, Callable[[], Rule]]] = MappingProxyType(_rules())

SAFE_GLOBALS: Final[tuple[str, ...]] = tuple(sorted(_RULES))
"""Every global that data from the store may name, sorted. Functions are stood in for, and take only what they need."""


def _build_trusted(target: Any, state: Any) -> None:
    setter = getattr(target, "__setstate__", None)
    if setter is not None:
        setter(state)
        return
    plain, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if plain:
        target.__dict__.update(plain)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


class Allowed:
    """The safe list together with what the user trusts.

    Args:
        trusted: classes and functions, or their dotted names; a module is imported when data asks for a name in it.

    Raises:
        TypeError: something else is in ``trusted``.
    """

    def __init__(self, trusted: Sequence[Trusted]) -> None:
        self._trusted: dict[str, Any] = {}
        for item in (trusted,) if isinstance(trusted, str) else trusted:
            if isinstance(item, str):
                self._trusted.setdefault(item, item)
            elif hasattr(item, "__qualname__") and hasattr(item, "__module__"):
                self._trusted[f"{item.__module__}.{item.__qualname__}"] = item
            else:
                raise TypeError(f"trusted_globals takes classes, functions and dotted names, not {item!r}")

    def find(self, name: str) -> Rule | None:
        """The rule for the global of that dotted name, None where it is not allowed.

        Raises:
            IncompatibleCheckpointError: it is allowed, but it cannot be imported here.
        """
        if name in self._trusted:
            return self._trust(name, self._trusted[name])
        rule = _RULES.get(name)
        return None if rule is None else rule()

    @staticmethod
    def _trust(name: str, item: Any) -> Rule:
        if isinstance(item, str):
            try:
                item = pkgutil.resolve_name(item)
            except (ImportError, AttributeError, ValueError) as error:
                raise IncompatibleCheckpointError(
                    f"trusted_globals names {name!r}, which cannot be imported here: {error}", cause=error
                ) from error
        call = item if callable(item) else None
        new = partial(item.__new__, item) if isinstance(item, type) else None
        return Rule(item, call, new=new, build=_build_trusted, trusted=True)
