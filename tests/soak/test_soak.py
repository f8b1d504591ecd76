"""The soak finds nothing lost in a minute of it, and finds what is made to grow."""

from __future__ import annotations

import pytest

from scripts.soak import grown, soak
from tests.soak.life import Sample

MIB = 1024 * 1024


@pytest.mark.slow
def test_a_short_soak() -> None:
    """Two ranks save, load and prune over a link that keeps breaking: nothing is lost, nothing is left."""
    lives, wrong = soak(40.0, 2, seed=7)
    assert wrong == []
    for lived in lives:
        assert min(lived.done[action] for action in ("save", "async_save", "load")) >= 3


@pytest.mark.parametrize(
    ("memory", "threads", "files", "found"),
    [(0, 0, 0, []), (1, 0, 0, ["memory"]), (0, 1, 0, ["threads"]), (0, 0, 1, ["files"])],
)
def test_growth_is_seen(memory: int, threads: int, files: int, found: list[str]) -> None:
    """Memory, threads and files that grow from round to round are each named, and what stays flat is not."""
    samples = [Sample(k, (300 + memory * k) * MIB, 8 + threads * k, 30 + files * k) for k in range(100)]
    assert [text.split()[0] for text in grown(samples)] == found
