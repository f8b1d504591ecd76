"""Digests tell values apart, and nothing else: not identity, order of dicts and sets, or place in memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from dcp_storage import CheckpointError
from dcp_storage.state_digest import digest_of


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


def same() -> list[tuple[Any, Any]]:
    text = "".join(["a", "b"])
    strided = torch.arange(6.0).reshape(2, 3).T
    return [
        ([text, text], ["ab", "".join(["a", "b"])]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (strided, strided.contiguous()),
        (torch.zeros(4)[::2], torch.zeros(2)),
        (Point(1, [2]), Point(1, [2])),
        (float("nan"), float("nan")),
        (np.arange(4)[::2], np.array([0, 2])),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    ]


@pytest.mark.parametrize("pair", same(), ids=range(len(same())))
def test_equal_values_have_one_digest(pair: tuple[Any, Any]) -> None:
    """Values that are equal, made in different ways, have the same digest."""
    assert digest_of(pair[0]) == digest_of(pair[1])


def test_different_values_have_different_digests() -> None:
    """Type, content, dtype and shape all count; also signs of zero, and where a list ends."""
    values: list[Any] = [
        None, 0, False, 0.0, -0.0, 0j, "", b"", "0", (), [], {}, set(), frozenset(), OrderedDict(), [[], []], [[[]]],
        [1, 2], (1, 2), ["ab", "c"], ["a", "bc"], {1: 2}, {2: 1}, {"a": 1}, Point(1), Point(2), Point(1, 1), int, len,
        torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32),
        torch.tensor([0.0, -0.0]), torch.zeros(0), torch.zeros(0, 1), np.zeros(2), np.zeros(2, np.float32),
        torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.bfloat16), range(3), slice(1), 1 << 70, float("inf"),
    ]  # fmt: skip
    digests = [digest_of(value) for value in values]
    for (number, one), (other, two) in itertools.combinations(enumerate(digests), 2):
        assert one != two, (values[number], values[other])


def test_circles_and_what_cannot_be_compared() -> None:
    """A value that contains itself has a digest; one that cannot be pickled is an error with its key."""
    circle: list[Any] = [1]
    circle.append(circle)
    other: list[Any] = [1]
    other.append(other)
    assert digest_of(circle) == digest_of(other)
    with pytest.raises(CheckpointError) as caught:
        digest_of({"a": (number for number in [1])}, key="k")
    assert caught.value.key == "k"
