"""Drawings of how a tensor is cut: compared with drawings made by hand."""

from __future__ import annotations

import textwrap

import pytest

from dcp_storage.tools.drawing import Box, draw, size_text


def hand(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_a_grid_shows_borders_and_labels() -> None:
    """Four pieces of a matrix stand where they lie, the borders beside them; a wide piece has no wall inside."""
    boxes = [Box("0", (0, 0), (4, 3)), Box("1", (0, 3), (4, 5)), Box("2", (4, 0), (6, 8))]
    assert draw((10, 8), boxes) == hand(
        """
           0      3      8
         0 ┌──────┬──────┐
           │ 0    │ 1    │
         4 ├──────┴──────┤
           │ 2           │
        10 └─────────────┘
        """
    )


def test_a_vector_is_drawn_downwards() -> None:
    """A tensor of one dimension is a column."""
    assert draw((7,), [Box("0", (0,), (3,)), Box("1", (3,), (4,))]) == hand(
        """
        0 ┌──────┐
          │ 0    │
        3 ├──────┤
          │ 1    │
        7 └──────┘
        """
    )


def test_a_scalar_is_one_box() -> None:
    """A tensor without dimensions is one box without borders' numbers."""
    assert draw((), [Box("0", (), ())]) == "  ┌──────┐\n  │ 0    │\n  └──────┘"


def test_a_hole_and_an_overlap_can_be_seen() -> None:
    """A place without a piece shows a dot; one that two pieces cover shows a plus."""
    text = draw((6,), [Box("0", (0,), (3,)), Box("1", (2,), (2,))])
    assert "│ 0+   │" in text
    assert "│ .    │" in text


def test_what_is_not_drawn_is_said() -> None:
    """Many bands are cut off with their number, and cuts along a third dimension are told in words."""
    many = draw((100,), [Box(str(n), (n,), (1,)) for n in range(100)])
    assert "88 more borders along dimension 0" in many
    boxes = [Box(str(n), (n % 2, n // 2 % 2, n // 4), (1, 1, 1)) for n in range(8)]
    assert "Also cut along dimension 2 at 0, 1" in draw((2, 2, 2), boxes)


@pytest.mark.parametrize("boxes", [[], [Box("0", (0, 0), (0, 4))]])
def test_nothing_is_drawn_of_nothing(boxes: list[Box]) -> None:
    """Without pieces that have elements there is no drawing."""
    assert draw((0, 4), boxes) == ""


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes_are_for_people(nbytes: int, text: str) -> None:
    """Bytes are said in the largest unit that leaves a number of one or more."""
    assert size_text(nbytes) == text
