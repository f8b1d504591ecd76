"""Each byte out of the store once, whatever the two layouts are: counted at the store, every element compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dcp_storage import LoadOptions
from dcp_storage.testing.ranks import RankPool
from tests.share import KIB, MIB, Layout, Loaded, load_into, save_from

SHAPES = {
    "large": (512, 1024),
    "wide": (24, 40_000),
    "odd": (37, 1001),
    "few": (3, 5),
    "line": (70_001,),
    "point": (),
    **{f"bias{k}": (257,) for k in range(10)},
}
SHARING = LoadOptions(share_reads=True, deadline=30.0)
ONE: Layout = ((), ())

Case = tuple[int, Layout, int, Layout]

CASES: list[Case] = [
    (1, ONE, 4, ((4,), ("S0",))),
    (4, ((4,), ("S0",)), 1, ONE),
    (4, ((4,), ("S0",)), 4, ((4,), ("S1",))),
    (2, ((2,), ("S1",)), 4, ((4,), ("S1",))),
    (4, ((2, 2), ("R", "S0")), 4, ((2, 2), ("R", "S0"))),
]
MORE: list[Case] = [
    (2, ((2,), ("S0",)), 4, ((4,), ("R",))),
    (2, ((2,), ("S0",)), 3, ONE),
]
LARGE: list[Case] = [
    (8, ((2, 4), ("S0", "S1")), 8, ((4, 2), ("S0", "S1"))),
    (8, ((2, 4), ("R", "S1")), 8, ((4, 2), ("R", "S1"))),
    (8, ((8,), ("S0",)), 8, ((2, 2, 2), ("R", "S1", "S0"))),
]


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint: its shards, manifest and commit."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != ".metadata")


def outcomes(ranks: RankPool, folder: Path, case: Case, options: LoadOptions) -> list[Loaded]:
    world, layout, loaders, wanted = case
    ranks.run(save_from, world, str(folder), SHAPES, layout, timeout=60)
    return ranks.run(load_into, loaders, str(folder), SHAPES, wanted, options, timeout=90)


def save_each(rank: int, world: int, jobs: list[tuple[str, Layout]]) -> None:
    for folder, layout in jobs:
        save_from(rank, world, folder, SHAPES, layout)


def load_each(rank: int, world: int, jobs: list[tuple[str, Layout, LoadOptions]]) -> list[Loaded]:
    return [load_into(rank, world, folder, SHAPES, layout, options) for folder, layout, options in jobs]


def hold(found: list[Loaded], size: int) -> None:
    for each in found:
        assert each.wrong == []
        assert each.report["shared"] is True
        assert each.report["bytes_read"] == each.read
        assert not each.report["warnings"]
    assert sum(each.read for each in found) <= 1.05 * size


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Mapping[tuple[int, Layout], Path]:
    """What was saved, by how many ranks and in which layout: for CASES, and once for all tests."""
    out = tmp_path_factory.mktemp("saved")
    made = {(case[0], case[1]): out / str(number) for number, case in enumerate([*CASES, (2, ((2,), ("S0",)), 0, ONE)])}
    for world in {savers for savers, _ in made}:
        jobs = [(str(folder), layout) for (savers, layout), folder in made.items() if savers == world]
        ranks.run(save_each, world, jobs, timeout=60)
    return made


def test_each_byte_leaves_the_store_once(folders: Mapping[tuple[int, Layout], Path], ranks: RankPool) -> None:
    """All ranks together read no more than the checkpoint and a twentieth, and hold what was saved."""
    for world in {case[2] for case in CASES}:
        loads = [(folders[case[0], case[1]], case[3]) for case in CASES if case[2] == world]
        jobs = [(str(folder), layout, SHARING) for folder, layout in loads]
        found = ranks.run(load_each, world, jobs, timeout=90)
        for (folder, _), each in zip(loads, zip(*found, strict=True), strict=True):
            hold(list(each), size_of(folder))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda c: f"{c[0]}:{''.join(c[1][1])}-{c[2]}:{''.join(c[3][1])}")
def test_each_byte_leaves_the_store_once_also_here(tmp_path: Path, ranks: RankPool, case: Case) -> None:
    """The same for two more pairs of layouts."""
    found = outcomes(ranks, tmp_path / "one", case, SHARING)
    hold(found, size_of(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{''.join(c[1][1])}-{''.join(c[3][1])}")
def test_each_byte_leaves_the_store_once_on_eight_ranks(tmp_path: Path, ranks: RankPool, case: Case) -> None:
    """The same for tensor and data parallelism of another shape on eight ranks."""
    found = outcomes(ranks, tmp_path / "one", case, SHARING)
    hold(found, size_of(tmp_path / "one"))


@pytest.mark.parametrize("budget", [64 * KIB, pytest.param(MIB, marks=pytest.mark.slow)])
def test_a_small_budget_is_enough(folders: Mapping[tuple[int, Layout], Path], ranks: RankPool, budget: int) -> None:
    """With memory for hardly a segment at a time the exchange comes to its end all the same."""
    options = LoadOptions(share_reads=True, deadline=60.0, memory_budget=budget, part_size=64 * KIB, max_concurrency=2)
    folder = folders[2, ((2,), ("S0",))]
    found = ranks.run(load_into, 4, str(folder), SHAPES, ((2, 2), ("R", "S1")), options, timeout=90)
    hold(found, size_of(folder))


def test_ranks_may_want_different_things(folders: Mapping[tuple[int, Layout], Path], ranks: RankPool) -> None:
    """Ranks that want other keys, or none but an object, share what they have in common."""
    folder = folders[2, ((2,), ("S0",))]
    keys = [["large", "odd"], ["large", "wide"], [], ["wide", "line", "point", "odd"]]
    found = ranks.run(load_into, 4, str(folder), SHAPES, ONE, SHARING, keys, timeout=90)
    hold(found, size_of(folder))
    assert found[2].report["bytes_needed"] < 4 * KIB


def test_replicas_read_about_the_same(folders: Mapping[tuple[int, Layout], Path], ranks: RankPool) -> None:
    """Of four replicas each reads about a quarter, and receives the rest from the others.

    Without share_reads each reads all of it, and only commit and manifest are read once; the report says so.
    """
    folder = folders[1, ONE]
    jobs = [(str(folder), ONE, SHARING), (str(folder), ONE, LoadOptions(deadline=30.0))]
    shared, alone = zip(*ranks.run(load_each, 4, jobs, timeout=90), strict=True)
    hold(list(shared), size_of(folder))
    needed = shared[0].report["bytes_needed"]
    for each in shared:
        assert each.report["bytes_needed"] == needed
        assert needed <= each.report["bytes_read"] + each.report["bytes_received"] <= 1.05 * needed + 20 * KIB
        assert each.report["bytes_read"] >= 0.1 * needed
    size = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    metadata = size_of(folder) - size
    for rank, each in enumerate(alone):
        assert (each.wrong, each.report["shared"], each.report["warnings"]) == ([], False, [])
        assert 0.9 * size <= each.read - (0 if rank else metadata) <= size
        assert (each.report["bytes_received"] > 0) is bool(rank)
