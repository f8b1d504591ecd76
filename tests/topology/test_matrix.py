"""The reshard matrix: every layout on every number of ranks, loaded into every other, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.e2e import place_of
from tests.topology.layouts import WORLDS, layouts
from tests.topology.matrix import Tally, load_into, save_all

LAYOUTS = {1: 4, 2: 6, 3: 6, 4: 10, 8: 18}
"""Ranks → layouts, counted by hand in ``docs/topology.md``."""


def report(request: pytest.FixtureRequest, line: str) -> None:
    """Prints past pytest's capturing, also from a fixture of the whole module."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{line}", flush=True)


@pytest.fixture(scope="module")
def total(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """What all tests of this module compared; printed at the end."""
    tally = Tally()
    yield tally
    report(request, f"matrix: {tally}")


def test_the_layouts_are_those_of_the_documentation() -> None:
    """The numbers of layouts are those written down, so that no cell goes missing unseen."""
    assert {world: len(layouts(world)) for world in WORLDS} == LAYOUTS


@pytest.mark.parametrize(("source", "world"), [(1, 8), (2, 1), (3, 2), (4, 3), (8, 4)])
def test_each_layout_is_saved_once_and_loaded_once(
    request: pytest.FixtureRequest, ranks: RankPool, total: Tally, source: int, world: int
) -> None:
    """Every layout of every number of ranks is saved, and filled from those of another number, without a difference."""
    place = place_of(request, "local")
    save_all(ranks, source, place)
    tally = load_into(ranks, source, world, place)
    total += tally
    report(request, f"matrix, {source} -> {world} ranks: {tally}")
    assert tally.wrong == []
    assert tally.cells == LAYOUTS[source] * LAYOUTS[world]
