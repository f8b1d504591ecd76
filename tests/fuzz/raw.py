"""Mutations that know nothing of a format: bits, numbers, pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tests.fuzz.choices import Choices

__all__ = ["mutated"]

_BYTES: Final = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x2F, 0x5C)
_NUMBERS: Final = (
    0,
    1,
    2**7,
    2**8 - 1,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_LARGEST: Final = 1 << 17  # an input does not grow without end
_NEAR: Final = 96


def _place(choices: Choices, data: bytes) -> int:
    """Anywhere; once in three times near an end, where headers and directories are."""
    size = len(data) + 1
    if size > _NEAR and choices.one_in(3):
        near = choices.below(_NEAR)
        return near if choices.one_in(2) else size - 1 - near
    return choices.below(size)


def _flip(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(1 + choices.below(3)):
        at = _place(choices, data)
        if at < len(out):
            out[at] ^= 1 << choices.below(8)
    return bytes(out)


def _replace(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    at = _place(choices, data)
    return data[:at] + bytes([choices.pick(_BYTES)]) + data[at + 1 :]


def _number(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    size = choices.pick((1, 2, 4, 8))
    at = _place(choices, data)
    raw = (choices.pick(_NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "big" if choices.one_in(4) else "little")
    return data[:at] + raw + data[at + size :]


def _cut(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    at = _place(choices, data)
    return data[:at] if choices.one_in(2) else data[:at] + data[at + 1 + choices.below(40) :]


def _repeat(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    at = _place(choices, data)
    piece = data[at : at + 1 + choices.below(40)]
    times = 200 if choices.one_in(20) else 1 + choices.below(3)
    return data[:at] + piece * times + data[at:]


def _splice(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    other = choices.pick(others)
    at, first = _place(choices, data), _place(choices, other)
    if choices.one_in(2):
        return data[:at] + other[first:]
    return data[:at] + other[first : first + 1 + choices.below(60)] + data[at:]


def _swap(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    size = 1 + choices.below(16)
    first, second = sorted((_place(choices, data), _place(choices, data)))
    if second < first + size:
        return data[::-1] if choices.one_in(50) else data
    middle = data[first + size : second]
    return data[:first] + data[second : second + size] + middle + data[first : first + size] + data[second + size :]


_WAYS: Final[tuple[Callable[[Choices, bytes, Sequence[bytes]], bytes], ...]] = (
    _flip, _replace, _number, _cut, _repeat, _splice, _swap,
)  # fmt: skip


def mutated(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    """The bytes after one to four mutations.

    Args:
        choices: decides.
        data: what is mutated.
        others: valid inputs of the same kind, to splice in.
    """
    for _ in range(1 + choices.below(4)):
        data = choices.pick(_WAYS)(choices, data, others)[:_LARGEST]
    return data
