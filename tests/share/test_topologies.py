"""Each byte out of the store once, whatever the two layouts are: counted at the store, every element compared."""

from __future__ import annotations

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

CASES: list[tuple[int, Layout, int, Layout]] = [
    (1, ONE, 4, ((4,), ("S0",))),
    (4, ((4,), ("S0",)), 1, ONE),
    (4, ((4,), ("S0",)), 4, ((4,), ("S1",))),
    (2, ((2,), ("S1",)), 4, ((4,), ("S1",))),
    (4, ((2, 2), ("R", "S0")), 4, ((2, 2), ("R", "S0"))),
]
MORE: list[tuple[int, Layout, int, Layout]] = [
    (2, ((2,), ("S0",)), 4, ((4,), ("R",))),
    (2, ((2,), ("S0",)), 3, ONE),
]
LARGE: list[tuple[int, Layout, int, Layout]] = [
    (8, ((2, 4), ("S0", "S1")), 8, ((4, 2), ("S0", "S1"))),
    (8, ((2, 4), ("R", "S1")), 8, ((4, 2), ("R", "S1"))),
    (8, ((8,), ("S0",)), 8, ((2, 2, 2), ("R", "S1", "S0"))),
]


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint: its shards, manifest and commit."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != ".metadata")


def outcomes(
    ranks: RankPool, folder: Path, case: tuple[int, Layout, int, Layout], options: LoadOptions
) -> list[Loaded]:
    world, layout, loaders, wanted = case
    ranks.run(save_from, world, str(folder), SHAPES, layout, timeout=60)
    return ranks.run(load_into, loaders, str(folder), SHAPES, wanted, options, timeout=90)


def hold(found: list[Loaded], size: int) -> None:
    for each in found:
        assert each.wrong == []
        assert each.report["shared"] is True
        assert each.report["bytes_read"] == each.read
        assert not each.report["warnings"]
    assert sum(each.read for each in found) <= 1.05 * size


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda c: f"{c[0]}:{''.join(c[1][1])}-{c[2]}:{''.join(c[3][1])}",
)
def test_each_byte_leaves_the_store_once(
    tmp_path: Path, ranks: RankPool, case: tuple[int, Layout, int, Layout]
) -> None:
    """All ranks together read no more than the checkpoint and a twentieth, and hold what was saved."""
    found = outcomes(ranks, tmp_path / "one", case, SHARING)
    hold(found, size_of(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{''.join(c[1][1])}-{''.join(c[3][1])}")
def test_each_byte_leaves_the_store_once_on_eight_ranks(
    tmp_path: Path, ranks: RankPool, case: tuple[int, Layout, int, Layout]
) -> None:
    """The same for tensor and data parallelism of another shape on eight ranks."""
    found = outcomes(ranks, tmp_path / "one", case, SHARING)
    hold(found, size_of(tmp_path / "one"))


@pytest.mark.parametrize("budget", [64 * KIB, pytest.param(MIB, marks=pytest.mark.slow)])
def test_a_small_budget_is_enough(tmp_path: Path, ranks: RankPool, budget: int) -> None:
    """With memory for hardly a segment at a time the exchange comes to its end all the same."""
    options = LoadOptions(share_reads=True, deadline=60.0, memory_budget=budget, part_size=64 * KIB, max_concurrency=2)
    found = outcomes(ranks, tmp_path / "one", (2, ((2,), ("S0",)), 4, ((2, 2), ("R", "S1"))), options)
    hold(found, size_of(tmp_path / "one"))


def test_ranks_may_want_different_things(tmp_path: Path, ranks: RankPool) -> None:
    """Ranks that want other keys, or none but an object, share what they have in common."""
    ranks.run(save_from, 2, str(tmp_path / "one"), SHAPES, ((2,), ("S0",)))
    keys = [["large", "odd"], ["large", "wide"], [], ["wide", "line", "point", "odd"]]
    found = ranks.run(load_into, 4, str(tmp_path / "one"), SHAPES, ONE, SHARING, keys, timeout=90)
    hold(found, size_of(tmp_path / "one"))
    assert found[2].report["bytes_needed"] < 4 * KIB


def test_replicas_read_about_the_same(tmp_path: Path, ranks: RankPool) -> None:
    """Of four replicas each reads about a quarter, and receives the rest from the others."""
    found = outcomes(ranks, tmp_path / "one", (1, ONE, 4, ONE), SHARING)
    hold(found, size_of(tmp_path / "one"))
    needed = found[0].report["bytes_needed"]
    for each in found:
        assert each.report["bytes_needed"] == needed
        assert needed <= each.report["bytes_read"] + each.report["bytes_received"] <= 1.05 * needed + 20 * KIB
        assert each.report["bytes_read"] >= 0.1 * needed


def test_without_sharing_every_rank_reads_its_own(tmp_path: Path, ranks: RankPool) -> None:
    """With a group but without share_reads only commit and manifest are read once, and the report says so."""
    found = outcomes(ranks, tmp_path / "one", (1, ONE, 4, ONE), LoadOptions(deadline=30.0))
    size = sum(file.stat().st_size for file in (tmp_path / "one").glob("*.distcp"))
    metadata = size_of(tmp_path / "one") - size
    for rank, each in enumerate(found):
        assert (each.wrong, each.report["shared"], each.report["warnings"]) == ([], False, [])
        assert each.read - (0 if rank else metadata) <= size
        assert (each.report["bytes_received"] > 0) is bool(rank)
