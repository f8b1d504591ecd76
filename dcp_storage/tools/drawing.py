"""How a tensor is cut over files, drawn with plain characters; sizes and counts as text (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "count_text", "draw", "size_text"]

_ROWS, _COLUMNS = 12, 6  # bands drawn at most, per direction
_CORNERS = {  # (up, down, left, right): which of the four lines meet here
    (bool(n & 8), bool(n & 4), bool(n & 2), bool(n & 1)): corner for n, corner in enumerate(" ╶╴─╷┌┐┬╵└┘┴│├┤┼")
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Box:
    """One piece of a tensor.

    Attributes:
        label: what is written into it; short.
        offsets: where it begins, per dimension.
        sizes: its size, per dimension.
    """

    label: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def count_text(number: int, what: str) -> str:
    """How many of something: ``"1 file"``, ``"2 files"``."""
    return f"{number} {what}{'s' * (number != 1)}"


def size_text(nbytes: int) -> str:
    """Bytes for people: ``"1.5 MiB"``."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{nbytes} B" if not unit else f"{value:.1f} {_UNITS[unit]}"


def draw(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """The tensor as a grid whose lines are the borders of its pieces, the first element at the top left.

    Drawn are the (at most two) dimensions that are cut into most; what is cut along others as well is said below. A
    place that no piece covers shows ``.``, one that several cover ``label+``. Not to scale.

    Args:
        shape: of the whole tensor.
        boxes: its pieces.

    Returns:
        Lines joined by newlines; empty where there is nothing to draw (no pieces, no elements).
    """
    boxes = [box for box in boxes if all(box.sizes)]
    if not boxes:
        return ""
    down, across = _directions(shape, boxes)
    rows, more_rows = _bands(shape, boxes, down, _ROWS)
    columns, more_columns = _bands(shape, boxes, across, _COLUMNS)
    cells = [[_label(boxes, down, row, across, column) for column in columns[:-1]] for row in rows[:-1]]
    width = max(4, *(len(text) for line in cells for text in line), *(len(str(n)) - 2 for n in columns))
    margin = max(len(str(n)) for n in rows)
    edge = "   …" if more_columns else ""
    lines = []
    if across is not None:
        marks = "".join(str(n).ljust(width + 3) for n in columns)
        lines.append(" " * (margin + 1) + marks.rstrip())
    for number, line in enumerate([*cells, None]):
        above = cells[number - 1] if number else None
        rule = _rule(above, line, len(columns) - 1, width)
        lines.append(f"{str(rows[number]).rjust(margin) if down is not None else ' ' * margin} {rule}{edge}".rstrip())
        if line is not None:
            lines.append(" " * (margin + 1) + _content(line, width))
    if more_rows:
        lines.append(f"{'…'.rjust(margin)} {more_rows} more borders along dimension {down}")
    if more_columns:
        lines.append(f"{'…'.rjust(margin)} {more_columns} more borders along dimension {across}")
    lines += _said_below(boxes, down, across, len(shape))
    return "\n".join(lines)


def _starts(boxes: Sequence[Box], dim: int) -> set[int]:
    return {box.offsets[dim] for box in boxes}


def _directions(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[int | None, int | None]:
    """The dimension drawn downwards and the one drawn across; None where there is none."""
    if len(shape) < 2:
        return (0, None) if shape else (None, None)
    most_cut = sorted(range(len(shape)), key=lambda dim: (-len(_starts(boxes, dim)), dim))[:2]
    down, across = sorted(most_cut)
    return down, across


def _bands(shape: Sequence[int], boxes: Sequence[Box], dim: int | None, most: int) -> tuple[list[int], int]:
    """The borders along one dimension, and how many are left out at the end."""
    if dim is None:
        return [0, 1], 0
    borders = {0, shape[dim]}
    for box in boxes:
        borders |= {box.offsets[dim], box.offsets[dim] + box.sizes[dim]}
    ordered = sorted(borders)
    return ordered[: most + 1], max(len(ordered) - most - 1, 0)


def _covers(box: Box, dim: int | None, at: int) -> bool:
    return dim is None or box.offsets[dim] <= at < box.offsets[dim] + box.sizes[dim]


def _label(boxes: Sequence[Box], down: int | None, row: int, across: int | None, column: int) -> str:
    found = [box for box in boxes if _covers(box, down, row) and _covers(box, across, column)]
    if not found:
        return "."
    return found[0].label if len(found) == 1 else f"{found[0].label}+"


def _content(line: Sequence[str], width: int) -> str:
    out = "│"
    for number, text in enumerate(line):
        joined = number and line[number - 1] == text
        out = f"{out[:-1]} " if joined else out
        out += f" {('' if joined else text).ljust(width)} │"
    return out


def _rule(above: Sequence[str] | None, below: Sequence[str] | None, count: int, width: int) -> str:
    """The line between two rows of cells; open where both belong to one piece."""
    out = ""
    for number in range(count + 1):
        left = number > 0 and not _open(above, below, number - 1)
        right = number < count and not _open(above, below, number)
        up = above is not None and _wall(above, number, count)
        down = below is not None and _wall(below, number, count)
        out += _CORNERS[up, down, left, right]
        if number < count:
            out += ("─" if right else " ") * (width + 2)
    return out


def _open(above: Sequence[str] | None, below: Sequence[str] | None, number: int) -> bool:
    return above is not None and below is not None and above[number] == below[number]


def _wall(line: Sequence[str], number: int, count: int) -> bool:
    return number in (0, count) or line[number - 1] != line[number]


def _said_below(boxes: Sequence[Box], down: int | None, across: int | None, dims: int) -> list[str]:
    others = [dim for dim in range(dims) if dim not in (down, across)]
    cut = [f"dimension {dim} at {', '.join(map(str, sorted(_starts(boxes, dim))))}" for dim in others]
    cut = [text for dim, text in zip(others, cut, strict=True) if len(_starts(boxes, dim)) > 1]
    return [f"Also cut along {'; '.join(cut)}: each place above stands for several pieces."] if cut else []
