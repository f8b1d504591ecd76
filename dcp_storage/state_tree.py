"""Nested values as flat keys and back, by the rules of torch's own planner (pure)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from dcp_storage.errors import UntrustedDataError

__all__ = ["Numeral", "Path", "flatten", "is_container", "key_of", "kinds_of", "rebuild", "set_at"]

_MOST_EMPTY = 1 << 16  # places in front of one that is filled, for which nothing is there: only a part may be loaded

Path = tuple[Any, ...]
"""Where a value is: dict keys as they are, and places in lists."""


class Numeral(str):
    """In a path as torch keeps it, the key of a dict that is an int: it is text there, as any dict key, and a bare int
    is a place in a list.
    """

    __slots__ = ()


def _text_of(name: Any) -> str:
    return Numeral(name) if type(name) is int else str(name)


def key_of(path: Path) -> str:
    """The flat key, as torch spells it: parts joined by dots."""
    return ".".join(map(str, path))


def is_container(value: Any, is_leaf: Callable[[Any], bool]) -> bool:
    """Whether a value is looked into: a filled dict, or a list that holds a tensor, a dict or such a list.

    Args:
        value: any value.
        is_leaf: whether a value is taken as a whole although it might be a container, e.g. a live object.
    """
    if is_leaf(value):
        return False
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(_counts(part, is_leaf) for part in value)


def _counts(part: Any, is_leaf: Callable[[Any], bool]) -> bool:
    return isinstance(part, (torch.Tensor, Mapping)) or is_leaf(part) or is_container(part, is_leaf)


def flatten(
    value: Any, is_leaf: Callable[[Any], bool] = lambda _: False, path: Path = (), text: Path = ()
) -> Iterator[tuple[Path, Path, Any]]:
    """Every leaf: its path, its path as torch keeps it, and its value.

    An empty dict or list is a leaf, so that it comes back; a tuple is one, too, as for torch.

    Args:
        value: what to take apart.
        is_leaf: see :func:`is_container`.
        path: put before every path.
        text: the same as torch keeps it.
    """
    if not is_container(value, is_leaf):
        yield path, text, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from flatten(part, is_leaf, (*path, name), (*text, _text_of(name)))
    else:
        for at, part in enumerate(value):
            yield from flatten(part, is_leaf, (*path, at), (*text, at))


def kinds_of(value: Any, text: Path = ()) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """The mappings in a value that are no plain dicts, such as a Counter, by their paths as torch keeps them."""
    if isinstance(value, Mapping):
        if type(value) is not dict and hasattr(value, "clear"):
            yield text, value
        for name, part in value.items():
            yield from kinds_of(part, (*text, _text_of(name)))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from kinds_of(part, (*text, at))


def rebuild(items: Iterable[tuple[Path, Any]], kinds: Mapping[Path, Mapping[Any, Any]] | None = None) -> Any:
    """The nested value of what :func:`flatten` gave; dicts and lists are new ones.

    Args:
        items: paths with values. An empty path is the whole value.
        kinds: mappings whose like is to be at a path, see :func:`kinds_of`; elsewhere dicts are made.
    """

    def new(path: Path) -> Any:
        like = (kinds or {}).get(path[:-1])
        if like is None or type(path[-1]) is int:
            return [] if type(path[-1]) is int else {}
        empty: Any = copy.copy(like)
        empty.clear()
        return empty

    root: Any = None
    for path, value in items:
        if not path:
            root = value
            continue
        if root is None:
            root = new(path[:1])
        inner = root
        for at, part in enumerate(path):
            last = at + 1 == len(path)
            if isinstance(inner, list):
                _check_place(part, len(inner), path)
                inner.extend([None] * (part + 1 - len(inner)))
                if last or inner[part] is None:
                    inner[part] = value if last else new(path[: at + 2])
                inner = inner[part]
            else:
                name = int(part) if type(part) is Numeral else part
                if last:
                    inner[name] = value
                elif name not in inner:
                    inner[name] = new(path[: at + 2])
                inner = inner[name]
    return root


def _check_place(part: Any, length: int, path: Path) -> None:
    # Paths may be those of a store, and any number may stand in them.
    if type(part) is not int or not 0 <= part <= length + _MOST_EMPTY:
        raise UntrustedDataError(
            f"The path of {key_of(path[:3])!r:.200} leads to no place of a list of {length}: {part!r:.40}.",
            name=key_of(path[:3])[:200],
        )


def set_at(root: Any, path: Path, value: Any) -> None:
    """Puts a value into a container that is there, in place; ``path`` is not empty."""
    inner = root
    for part in path[:-1]:
        inner = inner[part]
    if inner[path[-1]] is not value:
        inner[path[-1]] = value
