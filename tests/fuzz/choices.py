"""Where a mutation gets its decisions from: a seeded generator in the millions, or hypothesis, which then shrinks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

__all__ = ["Choices", "Drawn", "Seeded"]

T = TypeVar("T")


class Choices:
    """Decisions, all of them made of one: a number below another."""

    def below(self, n: int) -> int:
        """A number from 0 to ``n - 1``."""
        raise LookupError(f"nobody to choose below {n}")

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def one_in(self, n: int) -> bool:
        """True once in ``n`` times."""
        return self.below(n) == n - 1  # hypothesis shrinks towards 0: towards nothing unusual


class Seeded(Choices):
    """Decisions of a generator: the same for the same seed and number, on any machine.

    Args:
        seed: of the run.
        number: of the input.
    """

    def __init__(self, seed: int, number: int) -> None:
        self._below = random.Random((seed << 40) + number).randrange

    def below(self, n: int) -> int:
        return self._below(n)


class _Data(Protocol):
    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        """A value of the strategy."""


class Drawn(Choices):
    """Decisions of hypothesis.

    Args:
        data: what ``st.data()`` gives to a test.
    """

    def __init__(self, data: _Data) -> None:
        self._data = data

    def below(self, n: int) -> int:
        found: int = self._data.draw(st.integers(0, n - 1))
        return found
