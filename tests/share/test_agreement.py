"""When ranks share, when they do not and say so, and what they must agree on."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_storage import (
    CheckpointError,
    CorruptCheckpointError,
    FsspecStorageReader,
    LoadOptions,
    NotCommittedError,
)
from dcp_storage.exchange_rounds import check_group
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, failures_of, load
from tests.share import MIB, fixed, recording, save_from, source, target_for

pytestmark = pytest.mark.filterwarnings(ALONE)

SHAPES = {"a": (300, 1000), "b": (77,), "c": (200, 500)}
SHARING = LoadOptions(share_reads=True, deadline=10.0)


class Replacing(DefaultLoadPlanner):
    """Puts something of its own into the plans."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def create_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        plans = super().create_global_plan(plans)
        if self.where == "all":
            return [dataclasses.replace(plan, storage_data="mine") for plan in plans]
        if self.where == "exchanged":
            return [*plans[1:], plans[0]]
        if self.where == "one":
            return [dataclasses.replace(plans[0], storage_data="mine"), *plans[1:]]
        return plans

    def finish_plan(self, plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(plan)
        return dataclasses.replace(plan, storage_data=None) if self.where == "late" else plan


def template(names: Any = SHAPES) -> dict[str, Any]:
    return {name: torch.full(SHAPES[name], -7.0) for name in names} | {"note": None}


def right(state: dict[str, Any]) -> bool:
    return all(torch.equal(state[name], source(name, SHAPES[name])) for name in state if name != "note")


def replaced(rank: int, world: int, url: str, where: list[str]) -> list[tuple[bool, bool, list[str], int]]:
    """A load with each of these planners."""
    found = []
    for each in where:
        reader = FsspecStorageReader(url, options=SHARING, process_group=dist.group.WORLD)
        stores = recording(reader)
        state = template()
        planner = Replacing(each if each != "late" or rank == 1 else "")
        dcp.load(state, storage_reader=reader, planner=planner)
        assert reader.report is not None
        read = sum(s.bytes_read() for s in stores)
        found.append((right(state), reader.report.shared, reader.report.warnings, read))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> str:
    """A checkpoint that two ranks have saved."""
    folder = str(tmp_path_factory.mktemp("saved") / "one")
    ranks.run(save_from, 2, folder, SHAPES, ((2,), ("S0",)))
    return folder


def test_a_planner_with_data_of_its_own_turns_sharing_off(ranks: RankPool, saved: str) -> None:
    """Every rank then reads all it wants, rightly, and its report says that nothing was shared, and why."""
    size = sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 4
    for found in ranks.run(replaced, 3, saved, ["all", "one", "late", "exchanged"]):
        for good, shared, warnings, read in found:
            assert (good, shared, len(warnings)) == (True, False, 1)
            assert "planner" in warnings[0]
            assert read > size


def other_options(rank: int, world: int, url: str) -> tuple[bool, bool, list[str]]:
    options = SHARING if rank != 1 else LoadOptions(deadline=10.0)
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD)
    state = template()
    dcp.load(state, storage_reader=reader)
    assert reader.report is not None
    return right(state), reader.report.shared, reader.report.warnings


def test_one_rank_that_does_not_share_is_enough(ranks: RankPool, saved: str) -> None:
    """All read alone; those that wanted to share say which rank did not ask for it."""
    found = ranks.run(other_options, 3, saved)
    assert [each[:2] for each in found] == [(True, False)] * 3
    assert [len(each[2]) for each in found] == [1, 0, 1]
    assert "rank 1 " in found[0][2][0]


def other_group(rank: int, world: int, url: str) -> dict[int, BaseException]:
    pair = dist.new_group([0, 1])
    rest = dist.new_group([2, 3])
    group = pair if rank < 2 else rest
    reader = FsspecStorageReader(url, options=SHARING, process_group=group)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(template(), storage_reader=reader)
    return failures_of(caught.value)


def test_the_groups_have_to_be_those_of_the_load(ranks: RankPool, saved: str) -> None:
    """Readers on two groups in a load of all ranks are refused on all, before anything is read."""
    for failures in ranks.run(other_group, 4, saved):
        (error,) = {str(error) for error in failures.values()}
        assert "process_group" in error
        assert all(isinstance(each, CheckpointError) and each.kind == "group" for each in failures.values())


def crossed(rank: int, world: int, url: str, groups: str) -> dict[int, BaseException]:
    """Loads in pairs by readers of other groups: of all ranks, or of pairs that each have one rank in two loads."""
    loads = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = dist.group.WORLD if groups == "all" else pairs[rank // 2]
    reader = FsspecStorageReader(url, options=SHARING, process_group=group)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(template(), storage_reader=reader, process_group=loads[rank in {1, 2}])
    return failures_of(caught.value)


@pytest.mark.parametrize("groups", ["all", "pairs"])
def test_groups_that_only_look_like_those_of_the_load(ranks: RankPool, saved: str, groups: str) -> None:
    """More ranks in the group than in the load, or as many of two groups: refused before anything is read."""
    for failures in ranks.run(crossed, 4, saved, groups):
        assert failures
        assert all(isinstance(each, CheckpointError) and each.kind == "group" for each in failures.values())


def sub_group(rank: int, world: int, url: str) -> tuple[bool, bool] | str:
    group = dist.new_group([1, 2])
    if rank not in {1, 2}:
        reader = FsspecStorageReader(url, options=SHARING, process_group=dist.group.WORLD)
        reader.process_group = group if isinstance(group, dist.ProcessGroup) else None
        return "outside"
    reader = FsspecStorageReader(url, options=SHARING, process_group=group)
    state = template()
    dcp.load(state, storage_reader=reader, process_group=group)
    assert reader.report is not None
    return right(state), reader.report.shared


def test_a_part_of_the_ranks_can_share(ranks: RankPool, saved: str) -> None:
    """A group whose ranks are not the first of the job works like any other."""
    assert ranks.run(sub_group, 4, saved) == ["outside", (True, True), (True, True), "outside"]


def broken(rank: int, world: int, url: str) -> dict[int, BaseException]:
    reader = FsspecStorageReader(url, options=SHARING, process_group=dist.group.WORLD)
    stores = recording(reader)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(template(), storage_reader=reader)
    assert rank == 0 or not any(store.of("read") for store in stores)
    return failures_of(caught.value)


@pytest.fixture
def own(tmp_path: Path, saved: str) -> Path:
    """A copy of that checkpoint, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "own"))


@pytest.mark.parametrize(("what", "kind"), [("manifest", CorruptCheckpointError), ("commit", NotCommittedError)])
def test_what_the_first_rank_finds_is_raised_on_all(ranks: RankPool, own: Path, what: str, kind: type) -> None:
    """A damaged manifest, or no commit: the same typed error on all ranks, though only one has read anything."""
    file = own / f".{what}"
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    for failures in ranks.run(broken, 3, str(own)):
        assert sorted(failures) == [0, 1, 2]
        assert {type(error) for error in failures.values()} == {kind}


def corrupt(rank: int, world: int, url: str) -> dict[int, BaseException]:
    reader = FsspecStorageReader(url, options=SHARING, process_group=dist.group.WORLD)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(template(), storage_reader=reader)
    return failures_of(caught.value)


def test_a_flipped_byte_is_found_by_its_reader_and_named_on_all(ranks: RankPool, own: Path) -> None:
    """Shared bytes are checked like all others: corrupt on the rank that read them, named with the key on the rest."""
    file = next(own.glob("__0_0*.distcp"))
    data = bytearray(file.read_bytes())
    data[300_000] ^= 1
    file.write_bytes(data)
    for failures in ranks.run(corrupt, 3, str(own)):
        kinds = sorted(type(error).__name__ for error in failures.values())
        assert kinds == ["CheckpointError", "CheckpointError", "CorruptCheckpointError"]
        assert len({error.key for error in failures.values() if isinstance(error, CheckpointError)}) == 1


def stock_ranks(rank: int, world: int, url: str, sliced: bool) -> tuple[bool, bool, int, int]:
    reader = FsspecStorageReader(url, options=SHARING, process_group=dist.group.WORLD, require_commit=False)
    layout: Any = ((2, 2), ("R", "S0")) if sliced else ((), ())
    state: dict[str, Any] = {"a": target_for(torch.full(SHAPES["a"], -7.0), layout)}
    dcp.load(state, storage_reader=reader)
    assert reader.report is not None
    good = torch.equal(fixed(state["a"]), fixed(target_for(source("a", SHAPES["a"]), layout)))
    report = reader.report
    return good, report.shared, report.bytes_read, report.bytes_unchecked


@pytest.mark.parametrize("sliced", [True, False])
def test_what_stock_torch_saved_is_shared_too(tmp_path: Path, ranks: RankPool, sliced: bool) -> None:
    """Whole items and slices are read once for all who want them, and are right; who gets a slice says: unchecked."""
    state = {name: source(name, shape) for name, shape in SHAPES.items()}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    found = ranks.run(stock_ranks, 4, str(tmp_path / "one"), sliced)
    assert [each[:2] for each in found] == [(True, True)] * 4
    assert sum(each[2] for each in found) < 1.2 * 300 * 1000 * 4
    assert [each[3] for each in found] == [150 * 1000 * 4 if sliced else 0] * 4


def test_sharing_needs_a_group(tmp_path: Path) -> None:
    """Without a group it is refused at once; what is no group, too."""
    with pytest.raises(ValueError, match="process_group"):
        FsspecStorageReader(tmp_path, options=SHARING)
    with pytest.raises(TypeError, match="ProcessGroup"):
        FsspecStorageReader(tmp_path, process_group="gloo")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        check_group(None)  # type: ignore[arg-type]


def travelled(rank: int, world: int, url: str) -> tuple[bool, list[str]]:
    reader = pickle.loads(pickle.dumps(FsspecStorageReader(url, options=SHARING, process_group=dist.group.WORLD)))
    assert reader.process_group is None
    state = template()
    load(state, reader)
    return right(state), reader.report.warnings


def test_a_group_does_not_travel(ranks: RankPool, saved: str) -> None:
    """A reader that was pickled loads alone, and says that it does not share."""
    for good, warnings in ranks.run(travelled, 2, saved):
        assert good
        assert len(warnings) == 1
        assert "did not travel" in warnings[0]


def many(rank: int, world: int, url: str) -> list[bool]:
    """Three loads in a row by one reader, the second one failing on one rank."""
    reader = FsspecStorageReader(
        url, options=LoadOptions(share_reads=True, deadline=10.0, memory_budget=MIB), process_group=dist.group.WORLD
    )
    out = []
    for wanted in (SHAPES, [*SHAPES, "missing"], ["a"]):
        state = {name: torch.full(SHAPES.get(name, (1,)), -7.0) for name in wanted}
        if "missing" in state and rank == 0:
            with pytest.raises(CheckpointException):
                dcp.load(state, storage_reader=reader)
            continue
        if "missing" in state:
            del state["missing"]
            with pytest.raises(CheckpointException):
                dcp.load(state, storage_reader=reader)
            continue
        dcp.load(state, storage_reader=reader)
        assert reader.report is not None
        out.append(right(state) and reader.report.shared)
        assert reader._budget.held == 0
    return out


def test_a_reader_shares_again_after_a_load_that_failed(ranks: RankPool, saved: str) -> None:
    """A load that failed leaves nothing behind in the group or the reader."""
    assert ranks.run(many, 3, saved) == [[True, True]] * 3
