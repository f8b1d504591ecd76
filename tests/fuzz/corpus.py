"""The corpus in git: ``corpus/<target>/seed-*`` is valid and loads, ``found-*`` beside it once broke a promise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "found", "seeds"]

FOLDER: Final = Path(__file__).parent / "corpus"


@functools.cache
def _files(target: str, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((FOLDER / target).glob(f"{kind}-*"))}


def seeds(target: str) -> dict[str, bytes]:
    """Name → valid input of a target."""
    return _files(target, "seed")


def found(target: str) -> dict[str, bytes]:
    """Name → input that once ended otherwise than in a value or an error of this package, or took too much for it."""
    return _files(target, "found")
