"""What keeps a shared load right and alive where planners, stores and ranks do not behave."""

from __future__ import annotations

import dataclasses
import json
import threading
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

import dcp_storage.exchange
from dcp_storage import CheckpointError, CorruptCheckpointError, FsspecStorageReader, LoadOptions
from dcp_storage.exchange import Limits, Sharing
from dcp_storage.exchange_metadata import Heard, Retold
from dcp_storage.exchange_plan import Segment
from dcp_storage.exchange_rounds import Meeting
from dcp_storage.load import Counters, Wanted
from dcp_storage.records import ItemRecord
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from dcp_storage.wrappers import Request, RequestStore
from tests.share import KIB, Loaded, recording, save_from, source

T = TypeVar("T")

SHAPES = {"a": (300, 1000), "b": (77,), "c": (200, 500)}
ROW = {"a": (1000,), "b": (100,), "c": (1000,)}
BAD = 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> str:
    """A checkpoint that two ranks have saved."""
    folder = str(tmp_path_factory.mktemp("saved") / "one")
    ranks.run(save_from, 2, folder, SHAPES, ((2,), ("S0",)))
    return folder


class Forgetting(DefaultLoadPlanner):
    """Plans without one tensor, and puts it into the plan after that was shared."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        self.left = [item for item in plan.items if item.dest_index.fqn == "a"]
        return dataclasses.replace(plan, items=[item for item in plan.items if item not in self.left])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[*plan.items, *self.left])


class Dropping(DefaultLoadPlanner):
    """Leaves one tensor out of the plan after that was shared."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[item for item in plan.items if item.dest_index.fqn != "a"])


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


@pytest.mark.parametrize(("planner", "left"), [(Forgetting, []), (Dropping, ["a"])])
def test_a_plan_that_changed_after_it_was_shared_is_not_shared(
    ranks: RankPool, saved: str, planner: type[DefaultLoadPlanner], left: list[str]
) -> None:
    """Bytes that nobody was asked to read, or that their reader would not check: all read alone, and say why."""
    options = LoadOptions(share_reads=True, deadline=10.0)
    found = ranks.run(load_with, 3, saved, options, [], planner)
    for rank, each in enumerate(found):
        assert each.failure is None
        assert (each.wrong, each.report["shared"]) == (left if rank == BAD else [], False)
        (warning,) = each.report["warnings"]
        assert f"rank {BAD} " in warning
        assert each.seconds < 8


def test_bytes_that_no_segment_holds_are_missed() -> None:
    """A plan by which this rank would get less than it wants is refused before anything is read, and the key named."""
    item = ItemRecord(key="k", offsets=None, file=0, offset=0, length=9, payload_length=9)
    wanted = [Wanted("f", item, None, None, None, lambda data: None)]
    limits = Limits(budget=100, part_size=100, max_gap=0, max_concurrency=1)
    for segments in ([], [Segment(0, 0, 0, 8, 0)], [Segment(0, 0, 0, 4, 0), Segment(1, 0, 5, 9, 0)]):
        with pytest.raises(CheckpointError) as caught:
            Sharing(DictStore(), wanted, segments, ["f"], rank=0, counters=Counters(), limits=limits)
        assert (caught.value.kind, caught.value.key) == ("planner", "k")


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


class Lines:
    """Lines to a rank so quick that its first segment is here as soon as it may be sent; the next takes its time."""

    payloads = (b"first", b"second")

    def __init__(self, meeting: Meeting, peers: Any, sink: Sharing, failed: Callable[[], None]) -> None:
        self.sink = sink
        self.failure = None
        self.later = threading.Timer(0.3, self.arrive, (1,))

    def arrive(self, number: int) -> None:
        run = self.sink.room(number, len(self.payloads[number]))
        run[:] = self.payloads[number]
        self.sink.arrived(number, run)

    def start(self) -> None:
        self.later.start()

    def tell(self, limit: int) -> None:
        if self.sink._left == len(self.payloads):
            self.arrive(0)

    def fail(self, error: CheckpointError) -> None:
        raise error

    def finish(self) -> None:
        self.later.cancel()


@pytest.mark.timeout(30)
def test_what_comes_before_this_rank_has_begun_is_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that is here before the hook's thread looks at it goes to the planner once, and the rest is awaited."""
    monkeypatch.setattr(dcp_storage.exchange, "Links", Lines)
    handed: list[bytes] = []

    def take(data: torch.Tensor | memoryview) -> None:
        assert isinstance(data, memoryview)
        handed.append(bytes(data))

    segments, wanted, at = [], [], 0
    for number, payload in enumerate(Lines.payloads):
        size = len(payload)
        segments.append(Segment(number, 0, at, at + size, owner=1, takers=(0,)))
        item = ItemRecord(key=f"k{number}", offsets=None, file=0, offset=at, length=size, payload_length=size)
        wanted.append(Wanted("f", item, None, None, None, take))
        at += size
    limits = Limits(budget=1000, part_size=100, max_gap=0, max_concurrency=1)
    sharing = Sharing(DictStore(), wanted, segments, ["f"], rank=0, counters=Counters(), limits=limits)
    sharing.run(Meeting(None, "load", 0, 2, "here", 30.0))  # type: ignore[arg-type]  # nothing is sent over its group
    assert handed == list(Lines.payloads)


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


def some(rank: int, world: int, url: str, wanted: list[list[str]]) -> tuple[BaseException | None, bool]:
    """Loads what each rank wants; the error on this rank, and whether all of it is right."""
    state: dict[str, Any] = {name: torch.full(ROW[name], -7.0) for name in wanted[rank]}
    options = LoadOptions(share_reads=True, deadline=20.0)
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD)
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as raised:
        return raised.failures[rank][0], False
    return None, all(torch.equal(value, source(name, ROW[name])) for name, value in state.items())


def test_bytes_between_what_their_reader_wants_are_checked_too(tmp_path: Path, ranks: RankPool) -> None:
    """A small tensor that one rank skips, between two that it reads for others, does not reach these unchecked."""
    folder = tmp_path / "one"
    names = list(ROW)
    ranks.run(save_from, 1, str(folder), ROW, ((), ()))
    items = {item["key"]: item for item in json.loads((folder / ".manifest").read_text())["items"]}
    assert items["a"]["offset"] < items["b"]["offset"] < items["c"]["offset"]
    file = next(folder.glob("__0_0*.distcp"))
    data = bytearray(file.read_bytes())
    data[items["b"]["offset"] + items["b"]["payload_offset"] + 100] ^= 1
    file.write_bytes(data)
    for wanted in ([["a", "c"], names, names], [names, ["a", "c"], names]):
        found = ranks.run(some, 3, str(folder), wanted)
        assert [type(error) for error, _ in found].count(CorruptCheckpointError) == 1
        assert not any(right for _, right in found)
    assert ranks.run(some, 3, str(folder), [["a", "c"], ["c"], ["a"]]) == [(None, True)] * 3


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
    heard = Heard(store)
    assert heard.read("x", limit=10) == b"abc"
    retold = Retold(store, heard.answers)
    assert retold.read("x", limit=10) == b"abc"
    for ask in (lambda: retold.read("x", limit=10), retold.entries, lambda: retold.size("x")):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert caught.value.kind == "group"
