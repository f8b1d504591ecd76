"""What keeps a shared load right and alive where planners, stores and ranks do not behave."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_storage import CheckpointError, FsspecStorageReader, LoadOptions
from dcp_storage.exchange import Limits, Sharing
from dcp_storage.exchange_metadata import Heard, Retold
from dcp_storage.exchange_plan import Segment
from dcp_storage.load import Counters
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from dcp_storage.wrappers import Request, RequestStore
from tests.share import KIB, Loaded, recording, save_from, source

T = TypeVar("T")

SHAPES = {"a": (300, 1000), "b": (77,), "c": (200, 500)}
BAD = 1


@pytest.fixture
def saved(tmp_path: Path, ranks: RankPool) -> str:
    """A checkpoint that two ranks have saved."""
    ranks.run(save_from, 2, str(tmp_path / "one"), SHAPES, ((2,), ("S0",)))
    return str(tmp_path / "one")


class Forgetting(DefaultLoadPlanner):
    """Plans without one tensor, and puts it into the plan after that was shared."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        self.left = [item for item in plan.items if item.dest_index.fqn == "a"]
        return dataclasses.replace(plan, items=[item for item in plan.items if item not in self.left])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[*plan.items, *self.left])


class Interrupted(DefaultLoadPlanner):
    """Is interrupted, as by Ctrl-C, while tensors come in."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        raise KeyboardInterrupt


class Flipping(RequestStore):
    """Flips a bit of what the first read brings back, on its way."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.flipped = False

    def read_into(self, name: str, offset: int, buffers: Any) -> None:
        self.inner.read_into(name, offset, buffers)
        if not self.flipped:
            self.flipped = True
            buffers[0][100] ^= 1

    def request(self, request: Request, call: Callable[[], T]) -> T:
        return call()


def load_with(
    rank: int,
    world: int,
    url: str,
    options: LoadOptions,
    faults: list[Fault],
    planner: type[DefaultLoadPlanner],
    flips: bool = False,
) -> Loaded:
    """A load that does not go as usual on one rank."""
    state: dict[str, Any] = {name: torch.full(shape, -7.0) for name, shape in SHAPES.items()} | {"note": None}
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD)
    if rank == BAD:
        stores = recording(reader, lambda store: Flipping(store) if flips else FaultyStore(store, faults))
    else:
        stores = recording(reader)
    begun = time.monotonic()
    error: BaseException | None = None
    try:
        dcp.load(state, storage_reader=reader, planner=planner() if rank == BAD else DefaultLoadPlanner())
    except CheckpointException as raised:
        error = raised
    took = time.monotonic() - begun
    wrong = [name for name, shape in SHAPES.items() if not torch.equal(state[name], source(name, shape))]
    report = {} if error is not None or reader.report is None else reader.report.to_dict()
    return Loaded(wrong, sum(s.bytes_read() for s in stores), report, error, reader.failure, took)


def names_it(found: Loaded) -> bool:
    return found.failure is not None and found.failure.kind == "peer" and f"rank {BAD} " in str(found.failure)


def test_a_plan_that_grew_after_it_was_shared_is_refused(ranks: RankPool, saved: str) -> None:
    """Bytes that nobody was asked to read are missed before the exchange begins: an error that names the key."""
    options = LoadOptions(share_reads=True, deadline=10.0)
    found = ranks.run(load_with, 3, saved, options, [], Forgetting)
    for rank, each in enumerate(found):
        assert each.failure is not None
        if rank == BAD:
            assert (each.failure.kind, each.failure.key) == ("planner", "a")
        else:
            assert names_it(each), each.failure
        assert each.seconds < 8


def test_an_interrupted_rank_is_named(ranks: RankPool, saved: str) -> None:
    """Ctrl-C on one rank in the exchange ends it on all, soon and by name."""
    options = LoadOptions(share_reads=True, deadline=30.0)
    found = ranks.run(load_with, 3, saved, options, [], Interrupted)
    for rank, each in enumerate(found):
        assert isinstance(each.error, CheckpointException)
        assert isinstance(each.error.failures[BAD][0], KeyboardInterrupt)
        assert rank == BAD or names_it(each), each.failure
        assert each.seconds < 15


def test_a_slow_store_is_not_silence(ranks: RankPool, saved: str) -> None:
    """A rank whose read takes longer than the deadline still gives signs of life, and the load comes to its end."""
    slow = [Fault("read_into", nth=1, action="delay", seconds=2.5)]
    options = LoadOptions(share_reads=True, deadline=1.0, max_concurrency=1)
    found = ranks.run(load_with, 3, saved, options, slow, DefaultLoadPlanner)
    for each in found:
        assert (each.wrong, each.error, each.report["shared"]) == ([], None, True)
    assert max(each.seconds for each in found) >= 2.5


@pytest.mark.parametrize("budget", [64 * KIB, 8 * KIB])
def test_a_failure_reaches_ranks_that_wait_for_memory(ranks: RankPool, saved: str, budget: int) -> None:
    """With hardly any memory, ranks are waiting for some when another one fails: they stop all the same."""
    fails = [Fault("read_into", nth=3)]
    options = LoadOptions(share_reads=True, deadline=30.0, memory_budget=budget, max_concurrency=1, attempts=1)
    found = ranks.run(load_with, 3, saved, options, fails, DefaultLoadPlanner)
    for rank, each in enumerate(found):
        assert isinstance(each.error, CheckpointException)
        assert rank == BAD or names_it(each), each.failure
        assert each.seconds < 15


def test_what_was_altered_on_the_way_is_read_again(ranks: RankPool, saved: str) -> None:
    """A bit that flipped between store and reader is noticed before it is sent on, and its segment read again."""
    options = LoadOptions(share_reads=True, deadline=10.0)
    found = ranks.run(load_with, 3, saved, options, [], DefaultLoadPlanner, True)
    for each in found:
        assert (each.wrong, each.error, each.report["shared"]) == ([], None, True)
    assert found[BAD].report["bytes_read"] == found[BAD].read


class Remembering(DefaultLoadPlanner):
    """Hands out the plan of the first load again, as a planner that caches plans does."""

    plan: LoadPlan | None = None

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.plan = self.plan or new_plan
        return super().finish_plan(self.plan)


def remembered(rank: int, world: int, url: str) -> list[tuple[bool, bool, int]]:
    planner = Remembering()
    reader = FsspecStorageReader(
        url, options=LoadOptions(share_reads=True, deadline=10.0), process_group=dist.group.WORLD
    )
    out = []
    for _ in range(2):
        state: dict[str, Any] = {name: torch.full(shape, -7.0) for name, shape in SHAPES.items()}
        dcp.load(state, storage_reader=reader, planner=planner)
        assert reader.report is not None
        right = all(torch.equal(value, source(name, SHAPES[name])) for name, value in state.items())
        out.append((right, reader.report.shared, len(reader.report.warnings)))
    return out


def test_an_answer_to_an_earlier_load_is_not_followed(ranks: RankPool, saved: str) -> None:
    """A plan from the planner's memory has segments of another load: nothing is shared then, and all is right."""
    assert ranks.run(remembered, 3, saved) == [[(True, True, 0), (True, False, 1)]] * 3


def test_segments_that_nobody_awaits_are_refused() -> None:
    """Bytes of an unknown segment, or too many of a known one, fail the load, and their memory comes back."""

    class Told:
        def __init__(self) -> None:
            self.errors: list[CheckpointError] = []

        def fail(self, error: CheckpointError) -> None:
            self.errors.append(error)

    limits = Limits(budget=100, part_size=100, max_gap=0, max_concurrency=1)
    known = Segment(3, 0, 0, 10, owner=1, takers=(0,))
    sharing = Sharing(DictStore(), [], [known], ["f"], rank=0, counters=Counters(), limits=limits)
    told = Told()
    sharing._links = told  # type: ignore[assignment]
    for number, size in ((4, 10), (3, 11)):
        sharing.arrived(number, sharing.room(number, size))
    assert [error.kind for error in told.errors] == ["protocol", "protocol"]
    assert sharing._receiving.held == 0


def test_what_comes_in_waits_for_memory() -> None:
    """The memory for segments from other ranks is bounded: the next one waits until the last is in its place."""
    limits = Limits(budget=100, part_size=100, max_gap=0, max_concurrency=1)
    segments = [Segment(number, 0, 40 * number, 40 * number + 40, owner=1, takers=(0,)) for number in range(2)]
    sharing = Sharing(DictStore(), [], segments, ["f"], rank=0, counters=Counters(), limits=limits)
    first = sharing.room(0, 40)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(sharing.room, 1, 40)
        with pytest.raises(FutureTimeoutError):
            second.result(0.2)
        sharing.arrived(0, first)
        assert second.result(5).nbytes == 40


def test_a_rank_that_asks_otherwise_than_the_first_is_told_so() -> None:
    """What rank 0 did not ask of the store cannot be retold: an error that points to options that differ."""
    store = DictStore()
    store.put("x", [memoryview(b"abc")])
    heard = Heard(store, keep=True)
    assert heard.read("x", limit=10) == b"abc"
    retold = Retold(store, heard.answers)
    assert retold.read("x", limit=10) == b"abc"
    for ask in (lambda: retold.read("x", limit=10), retold.entries, lambda: retold.size("x")):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert caught.value.kind == "group"
