"""Mutations of JSON that stay JSON, or nearly: fields swapped, doubled, left out, and values that are bombs."""

from __future__ import annotations

import copy
import json
from typing import Any, Final

from tests.fuzz.choices import Choices

__all__ = ["mutated"]

_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 255, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**62 + 1, 2**63, 2**64,
    -(2**63), 10**40,
    0.5, -0.0, 1e308, float("inf"), float("nan"), "", " ", "0", "1", "w", ".", "..", "../x", "/etc/passwd",
    "a/b", "a\\b",
    "a\0b", "\x9b", "file:///etc/passwd", "s3://b/k", "::", "__0_0.distcp", ".commit", ".manifest", "．．／x", "․․",
    "\ud800", "\udc80", "é" * 200, "x" * 300, "float32", "bfloat16", "float4_e2m1fn_x2", "distributed", "_dynamo", "os",
    "tensor", "bytes", "zstd", [], {}, [[]], [0], [2**62], [2**62] * 40, [1] * 70, [0, 2**62], [-1], ["a"], {"a": 1},
)  # fmt: skip
_RAW: Final = (
    "1e400", "-1e400", "NaN", "Infinity", "9" * 5000, "0" * 50, "1.0", "-0", "01", '"\\ud800"', '"\\udc00\\ud800"',
    '"\\u0000"', '"\x01"', "[" * 2000, "{" * 500, '{"a":' * 1500, "[" * 300 + "]" * 300, '{"x":1,"x":2}', "tru", "",
)  # fmt: skip
_MARK: Final = "\N{SYMBOL FOR NULL}"  # stands for raw text until the tree is written
_ESCAPED: Final = json.dumps(_MARK)[1:-1]
_QUOTED: Final = tuple((json.dumps(_MARK + raw, ensure_ascii=how), raw) for raw in _RAW for how in (True, False))


def _paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        found += _paths(value, (*at, key))
    return found


def _holder(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        tree = tree[step]
    return tree


def _value(choices: Choices) -> Any:
    return copy.deepcopy(choices.pick(_VALUES))  # what the next change finds in it must not stay there


def _number_near(choices: Choices, value: Any) -> Any:
    if type(value) is int:
        return choices.pick((value + 1, value - 1, value * 2, value // 2, -value, value + 2**32, value * 2**40))
    return _value(choices)


def _change(choices: Choices, tree: Any) -> None:
    paths = _paths(tree)
    if not paths:
        return
    path = choices.pick(paths)
    holder, last = _holder(tree, path), path[-1]
    way = choices.below(9)
    if way == 0:
        holder[last] = _value(choices)
    elif way == 1:
        holder[last] = _number_near(choices, holder[last])
    elif way == 2:
        del holder[last]
    elif way in (3, 4):
        other = choices.pick(paths)
        if other[: len(path)] == path[: len(other)]:
            return  # one is in the other, and would be in itself
        there = _holder(tree, other)
        if way == 3:
            holder[last], there[other[-1]] = there[other[-1]], holder[last]
        else:
            holder[last] = copy.deepcopy(there[other[-1]])
    elif way == 5 and isinstance(holder, dict):
        holder[choices.pick(("later", "format", "name", "crc32", "kind", "key", "..", ""))] = _value(choices)
    elif way == 6 and isinstance(holder[last], list):
        holder[last] = holder[last] * choices.pick((0, 2, 3, 40))
    elif way == 7 and isinstance(holder, dict):
        holder[choices.pick(("a\0", "..", "x" * 300, "\ud800", "w"))] = holder.pop(last)
    else:
        holder[last] = _MARK + choices.pick(_RAW)


def mutated(choices: Choices, data: bytes) -> bytes:
    """The JSON text after one to four changes of its tree; now and then with a field twice.

    Args:
        choices: decides.
        data: valid JSON with an object on top.
    """
    tree = json.loads(data)
    for _ in range(1 + choices.below(4)):
        try:
            _change(choices, tree)
        except (LookupError, TypeError):
            continue  # an earlier change took away what this one was about
    try:
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=choices.one_in(2))
    except RecursionError:
        return data
    if _MARK in text or _ESCAPED in text:
        for quoted, raw in _QUOTED:
            text = text.replace(quoted, raw)
    if choices.one_in(12) and text[:1] == "{" and len(text) > 2:
        text = text[:-1] + "," + text[1:]  # every field twice
    return text.encode("utf-8", "surrogatepass")
