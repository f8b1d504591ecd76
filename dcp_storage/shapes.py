"""Shapes that a store says: their elements, their boxes and their strides, whatever numbers stand in them (pure).

Everything here takes time and memory in proportion to the number of dimensions, also where each size is huge: a product
of many huge numbers, taken before anybody looks at it, would take hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["LARGEST", "MOST_DIMENSIONS", "elements", "is_dense", "is_inside"]

LARGEST: Final = 2**62
"""Most elements of a tensor, and the largest size, offset and stride of one dimension."""

MOST_DIMENSIONS: Final = 1024
"""Most dimensions of a tensor; most of torch's own operations take no more than 64."""


def elements(shape: Sequence[int]) -> int | None:
    """How many elements a tensor of this shape has; None where no tensor can be of it.

    Args:
        shape: counts, none of them negative; however many and however large.
    """
    if len(shape) > MOST_DIMENSIONS or any(size > LARGEST for size in shape):
        return None
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > LARGEST:
            return None
    return count


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides fill a run of as many elements as the shape has, each place once (in any order of dimensions)."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def is_inside(offsets: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether the box of ``sizes`` at ``offsets`` lies within a tensor of shape ``whole``."""
    return len(offsets) == len(sizes) == len(whole) and all(
        first + count <= size for first, count, size in zip(offsets, sizes, whole, strict=True)
    )
