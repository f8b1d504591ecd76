"""Runs of bytes that lie over each other (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

__all__ = ["Run", "first_overlap"]


class Run(Protocol):
    """A run of bytes of a file."""

    @property
    def file(self) -> int:
        """Which file."""

    @property
    def offset(self) -> int:
        """Its first byte."""

    @property
    def length(self) -> int:
        """Its bytes."""


T = TypeVar("T", bound=Run)


def first_overlap(runs: Sequence[T], is_twin: Callable[[T, T], bool]) -> T | None:
    """A run that begins before one that comes earlier in its file has ended; None where there is none.

    Args:
        runs: in any order; in that of their places it is found out faster.
        is_twin: whether two runs with one beginning are one and the same, which is no overlap.
    """
    if _overlap(runs, is_twin) is None:
        return None
    return _overlap(sorted(runs, key=lambda run: (run.file, run.offset, run.offset + run.length)), is_twin)


def _overlap(runs: Iterable[T], is_twin: Callable[[T, T], bool]) -> T | None:
    ends: dict[int, int] = {}
    last: dict[int, T] = {}
    for run in runs:
        if run.offset < ends.get(run.file, 0) and run.length:
            if is_twin(run, last[run.file]):
                continue
            return run
        ends[run.file] = max(ends.get(run.file, 0), run.offset + run.length)
        last[run.file] = run
    return None
