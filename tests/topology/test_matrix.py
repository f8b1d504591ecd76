"""The reshard matrix: every layout on every number of ranks, loaded into every other, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.e2e import place_of
from tests.topology.layouts import WORLDS, layouts
from tests.topology.matrix import Tally, load_into, save_all

Loads = dict[int, list[str] | None]
"""Ranks → names of the layouts that are filled; None: all."""

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


def compare(
    request: pytest.FixtureRequest, ranks: RankPool, total: Tally, kind: str, source: int, loads: Loads
) -> Tally:
    """Saves every layout on ``source`` ranks, and loads them into the named layouts of each number of ranks."""
    place = place_of(request, kind)
    save_all(ranks, source, place)
    tally = Tally()
    for world, targets in loads.items():
        tally += load_into(ranks, source, world, place, targets)
    total += tally
    report(request, f"matrix, {kind}, saved on {source}, loaded on {', '.join(map(str, loads))}: {tally}")
    return tally


PARALLEL = ["strided@4x2", "grid@4x2", "strided@1x8", "grid@1x8"]
"""With what 8 ranks save: TP=4, DP=2 to TP=2, DP=4, and TP=2, DP=4 to TP=8, DP=1, among others."""


@pytest.mark.parametrize(
    ("source", "loads", "cells"),
    [
        (1, {8: None}, 4 * 18),
        (2, {1: None}, 6 * 4),
        (3, {2: None}, 6 * 6),
        pytest.param(4, {3: None}, 10 * 6, marks=pytest.mark.slow),
        pytest.param(8, {4: None, 8: PARALLEL}, 18 * 10 + 18 * 4, marks=pytest.mark.slow),
    ],
)
def test_each_layout_is_saved_once_and_loaded_once(
    request: pytest.FixtureRequest, ranks: RankPool, total: Tally, source: int, loads: Loads, cells: int
) -> None:
    """Every layout of every number of ranks is saved, and filled from those of another number, without a difference."""
    tally = compare(request, ranks, total, "local", source, loads)
    assert tally.wrong == []
    assert (tally.cells, tally.differing) == (cells, 0)


@pytest.mark.parametrize(
    ("source", "loads", "cells"),
    [
        pytest.param(4, {8: ["strided@4x2"], 1: ["plain"]}, 20, marks=pytest.mark.slow),
        pytest.param(3, {4: ["grid@2x2"]}, 6, marks=pytest.mark.slow),
    ],
)
def test_a_spread_on_s3(
    request: pytest.FixtureRequest, ranks: RankPool, total: Tally, source: int, loads: Loads, cells: int
) -> None:
    """On S3 some layouts on more, fewer and one rank are filled from all that were saved, without a difference."""
    tally = compare(request, ranks, total, "moto", source, loads)
    assert tally.wrong == []
    assert (tally.cells, tally.differing) == (cells, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("source", "worlds"), [(1, WORLDS), (2, WORLDS), (3, WORLDS), (4, WORLDS), (8, (1, 2, 3, 4)), (8, (8,))]
)
def test_every_layout_into_every_other(
    request: pytest.FixtureRequest, ranks: RankPool, total: Tally, source: int, worlds: tuple[int, ...]
) -> None:
    """The whole matrix on local disk: every layout of every number of ranks into every other, and into itself."""
    tally = compare(request, ranks, total, "local", source, dict.fromkeys(worlds))
    assert tally.wrong == []
    assert (tally.cells, tally.differing) == (LAYOUTS[source] * sum(LAYOUTS[world] for world in worlds), 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", WORLDS)
def test_every_number_of_ranks_into_every_other_on_s3(
    request: pytest.FixtureRequest, ranks: RankPool, total: Tally, source: int
) -> None:
    """On S3 what every number of ranks saved fills one layout of every other number, without a difference."""
    loads: Loads = {1: ["plain"], 2: ["strided@2x1"], 3: ["some-ranks"], 4: ["columns"], 8: ["strided@2x4"]}
    tally = compare(request, ranks, total, "moto", source, loads)
    assert tally.wrong == []
    assert (tally.cells, tally.differing) == (LAYOUTS[source] * 5, 0)
