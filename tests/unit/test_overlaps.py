"""Runs of bytes that lie over each other are found, in whatever order they come; twins are none."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from dcp_storage.overlaps import first_overlap


@dataclass(frozen=True)
class Piece:
    file: int
    offset: int
    length: int
    name: str = ""


def same(one: Piece, other: Piece) -> bool:
    return (one.offset, one.length) == (other.offset, other.length)


APART = [Piece(0, 0, 4), Piece(0, 4, 4), Piece(1, 0, 9), Piece(0, 20, 1)]


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([], False),
        (APART, False),
        ([*APART, Piece(0, 4, 4, "twin"), Piece(0, 4, 4, "third")], False),
        ([*APART, Piece(0, 5, 1)], True),
        ([*APART, Piece(0, 4, 3)], True),
        ([*APART, Piece(1, 8, 5)], True),
        ([*APART, Piece(0, 20, 0)], False),
        ([Piece(0, 0, 9), Piece(0, 5, 0), Piece(0, 7, 4)], True),
        ([Piece(0, 0, 4), Piece(0, 0, 4, "twin"), Piece(0, 2, 4)], True),
        ([Piece(0, 0, 6), Piece(0, 0, 6, "twin"), Piece(0, 0, 5)], True),
    ],
)
def test_overlaps(runs: list[Piece], wrong: bool) -> None:
    """A run that begins inside another one is found in every order of the runs; the same run once more is not."""
    for number, ordered in enumerate(itertools.permutations(runs)):
        assert (first_overlap(ordered, same) is not None) is wrong
        if number > 200:
            break


def test_other_facts_make_no_twin() -> None:
    """The same bytes of which something else is said are an overlap."""
    assert first_overlap([Piece(0, 0, 4), Piece(0, 0, 4, "x")], lambda one, other: False) == Piece(0, 0, 4, "x")
