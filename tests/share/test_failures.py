"""A rank that fails, dies, stops or never comes is named on all others, soon."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_storage import CheckpointError, FsspecStorageReader, LoadOptions, StoreError
from dcp_storage.exchange_metadata import read_together
from dcp_storage.exchange_rounds import _come, _gather, meet
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankFailure, RankPool
from dcp_storage.wrappers import Request, RequestStore
from tests.share import MIB, Loaded, recording, save_from, source

SHAPES = {f"w{k}": (256, 1024) for k in range(12)}
BAD = 2


class Planner(DefaultLoadPlanner):
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _may_raise(self, where: str) -> None:
        if where == self.where:
            raise KeyError("the planner's own")

    def create_local_plan(self) -> LoadPlan:
        self._may_raise("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self._may_raise("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self._may_raise("resolve_tensor")
        target: torch.Tensor = super().resolve_tensor(read_item)
        return target

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self._may_raise("commit_tensor")
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self._may_raise("load_bytes")
        super().load_bytes(read_item, value)


class Stopping(RequestStore):
    """Stops its own process, for some seconds or for good, at the second read, as a machine that swaps does."""

    def __init__(self, inner: Store, seconds: float | None) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.reads = 0

    def request(self, request: Request, call: Any) -> Any:
        if request.operation == "read_into":
            self.reads += 1
            if self.reads == 2:
                if self.seconds is not None:
                    wake = f"sleep {self.seconds}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", wake])
                os.kill(os.getpid(), signal.SIGSTOP)
        return call()


def load_with(rank: int, world: int, url: str, what: str, deadline: float) -> Loaded:
    """A load that goes wrong on one rank; what each rank raised, and when."""
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state["note"] = None
    options = LoadOptions(share_reads=True, deadline=deadline, attempts=1, max_concurrency=2, memory_budget=8 * MIB)
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD)
    planner: DefaultLoadPlanner = DefaultLoadPlanner()
    if rank == BAD:
        faults = {"kill": Fault("read_into", nth=2, action="kill"), "store": Fault("read_into", nth=2)}
        if what in faults:
            recording(reader, lambda store: FaultyStore(store, [faults[what]]))
        elif what == "stop":
            recording(reader, lambda store: Stopping(store, 3 * deadline))
        elif what == "stop for good":
            recording(reader, lambda store: Stopping(store, None))
        else:
            planner = Planner(what)
    begun = time.monotonic()
    error: BaseException | None = None
    try:
        dcp.load(state, storage_reader=reader, planner=planner)
    except (CheckpointException, RuntimeError) as raised:
        error = raised
    took = time.monotonic() - begun
    wrong = [name for name, shape in SHAPES.items() if not torch.equal(state[name], source(name, shape))]
    error = error if isinstance(error, CheckpointException) else None
    return Loaded(wrong, 0, {}, error, reader.failure, took)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> str:
    """A checkpoint that one rank has saved."""
    folder = str(tmp_path_factory.mktemp("saved") / "one")
    ranks.run(save_from, 1, folder, SHAPES, ((), ()))
    return folder


def is_named(found: Loaded, rank: int = BAD) -> bool:
    failure = found.failure
    return (
        failure is not None and failure.kind == "peer" and f"rank {rank} " in str(failure) and "\n" not in str(failure)
    )


def test_a_rank_whose_store_fails(ranks: RankPool, saved: str) -> None:
    """Its own error on that rank; on all others a CheckpointError that names it; and the group can be used again."""
    found = ranks.run(load_with, 4, saved, "store", 20.0, timeout=60)
    for rank, each in enumerate(found):
        assert isinstance(each.error, CheckpointException)
        assert sorted(each.error.failures) == [0, 1, 2, 3]
        assert isinstance(each.error.failures[BAD][0], StoreError)
        assert rank == BAD or is_named(each), each.failure
        assert each.seconds < 10


def load_in_turn(rank: int, world: int, url: str, what: list[str]) -> list[Loaded]:
    return [load_with(rank, world, url, each, 20.0) for each in what]


def test_a_rank_whose_planner_fails(ranks: RankPool, saved: str) -> None:
    """A planner that raises before or in the exchange: its error on that rank, its name on all others; and again."""
    where = ["resolve_tensor", "commit_tensor", "load_bytes"]
    for rank, found in enumerate(ranks.run(load_in_turn, 4, saved, where, timeout=60)):
        for each in found:
            assert isinstance(each.error, CheckpointException)
            assert "the planner's own" in str(each.error.failures[BAD][0])
            assert rank == BAD or is_named(each), each.failure
            assert each.seconds < 10


def test_a_planner_that_fails_between_the_hooks(ranks: RankPool, saved: str) -> None:
    """Where no hook hears of it, the others wait for the deadline, and name the rank that did not come."""
    found = ranks.run(load_with, 4, saved, "finish_plan", 2.0, timeout=60)
    for rank, each in enumerate(found):
        assert isinstance(each.error, CheckpointException)
        assert isinstance(each.error.failures[BAD][0], KeyError)
        assert rank == BAD or is_named(each), each.failure
        assert each.seconds < 15


def test_a_rank_that_is_killed(ranks: RankPool, saved: str) -> None:
    """Kill -9 in the middle of the exchange: every survivor has an error that names the rank, in seconds."""
    found = ranks.run(load_with, 4, saved, "kill", 30.0, timeout=60, allow_failures=True)
    assert isinstance(found[BAD], RankFailure)
    assert found[BAD].signal == signal.SIGKILL
    for rank in (0, 1, 3):
        assert is_named(found[rank]), found[rank]
        assert found[rank].seconds < 15


class Stopped(Planner):
    """Is interrupted, or kills its process, where another would raise."""

    def _may_raise(self, where: str) -> None:
        if where != "resolve_tensor":
            return
        if self.where == "kill in the planner":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt


def stop_in_the_planner(rank: int, world: int, url: str, what: str) -> tuple[str, float]:
    """What each rank raised, and when, where one is stopped before the exchange; the deadline is the default one."""
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    group = dist.new_group(timeout=timedelta(seconds=6))
    reader = FsspecStorageReader(url, options=LoadOptions(share_reads=True), process_group=group)
    planner = Stopped(what) if rank == BAD else DefaultLoadPlanner()
    begun = time.monotonic()
    try:
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
    except BaseException as raised:  # noqa: BLE001 - torch's own is none of Exception's
        failure = reader.failure
        return (str(failure) if failure is not None else type(raised).__name__), time.monotonic() - begun
    return "loaded", time.monotonic() - begun


def test_a_rank_that_is_interrupted_in_its_planner(ranks: RankPool, saved: str) -> None:
    """The others hear of it at once: none waits for a deadline."""
    for rank, (said, took) in enumerate(ranks.run(stop_in_the_planner, 4, saved, "interrupt", timeout=45)):
        assert took < 25
        assert rank == BAD or f"rank {BAD} " in said, said


def test_a_rank_that_is_killed_in_its_planner(ranks: RankPool, saved: str) -> None:
    """The others name it when the group's time-out is over, although the deadline is far."""
    found = ranks.run(stop_in_the_planner, 4, saved, "kill in the planner", timeout=45, allow_failures=True)
    assert isinstance(found[BAD], RankFailure)
    for rank in (0, 1, 3):
        assert not isinstance(found[rank], RankFailure), found[rank]
        said, took = found[rank]
        assert f"rank {BAD} " in said, said
        assert took < 20


@pytest.mark.slow
def test_a_rank_that_stops(ranks: RankPool, saved: str) -> None:
    """A rank that gives no sign of life for the deadline is named by all others, and itself fails when it wakes."""
    found = ranks.run(load_with, 4, saved, "stop", 3.0, timeout=60)
    for rank, each in enumerate(found):
        assert each.failure is not None
        assert rank == BAD or is_named(each), each.failure


def stopped(rank: int, world: int, url: str) -> Loaded:
    """A load in which one rank stops for good; the last of the others ends it."""
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    found = load_with(rank, world, url, "stop for good", 1.0)
    store = dist.distributed_c10d._get_default_store()
    if store.add("done", 1) == world - 1:
        os.kill(pids[BAD], signal.SIGKILL)
    if rank == 0:  # the store lives in this rank
        store.wait(["done"], timedelta(seconds=10))
        while store.add("done", 0) < world - 1:
            time.sleep(0.05)
    return found


def test_a_rank_that_stops_for_good(ranks: RankPool, saved: str) -> None:
    """A rank that stays stopped is named by all others soon after the deadline, and none of them waits for it."""
    found = ranks.run(stopped, 4, saved, timeout=40, allow_failures=True)
    for rank in (0, 1, 3):
        assert isinstance(found[rank], Loaded), found[rank]
        assert is_named(found[rank]), found[rank].failure
        assert found[rank].seconds < 10


def retold() -> tuple[str, str]:
    """A rank that gave up a meeting while its answer was on its way, and meets again: the names of both meetings."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch lists it in no __all__
    with pytest.raises(CheckpointError, match="rank 0 "):
        _come(store, 1, "first", None, "here", -0.5)  # no patience at all
    store.set("dcp_storage/hello/1", base64.b64encode(pickle.dumps(("first", None))).decode())  # was taken before that
    _gather(store, 2, "one", None, 0.0)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(_come, store, 1, "second", None, "here", 5.0)
        _gather(store, 2, "two", None, 5.0)
        return again.result()[1], "two"


def test_a_late_answer_is_not_taken_for_that_of_the_next_meeting() -> None:
    """The word of an earlier call that nobody waited for any more is not heard by the next one."""
    found, wanted = retold()
    assert found == wanted


def absent(rank: int, world: int, url: str) -> str:
    if rank == BAD:
        time.sleep(2.0)
        return ""
    reader = FsspecStorageReader(
        url, options=LoadOptions(share_reads=True, deadline=1.0), process_group=dist.group.WORLD
    )
    metadata = reader.read_metadata()
    with pytest.raises(CheckpointError) as caught:
        reader.set_up_storage_reader(metadata, rank == 0)
    assert caught.value.kind == "peer"
    return str(caught.value)


def test_a_rank_that_never_comes(ranks: RankPool, saved: str) -> None:
    """The others have its name after the deadline, at the first hook that may raise."""
    said = ranks.run(absent, 4, saved, timeout=40)
    assert all(f"rank {BAD} " in text for rank, text in enumerate(said) if rank != BAD), said


def excused(rank: int, world: int, url: str, what: str, bad: int) -> tuple[BaseException, float, list[str]]:
    """A load that one rank cannot even begin, and one more; the error here, its seconds, and what is wrong then."""

    def refuse(*args: object) -> Store:
        raise ValueError("not on this machine")

    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    options = LoadOptions(share_reads=True, deadline=60.0)
    reader = FsspecStorageReader(
        None if (rank, what) == (bad, "no path") else url, options=options, process_group=dist.group.WORLD
    )
    if (rank, what) == (bad, "no store"):
        reader._opener = refuse
    begun = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader)
    took = time.monotonic() - begun
    dcp.load(state, storage_reader=FsspecStorageReader(url, options=options, process_group=dist.group.WORLD))
    wrong = [name for name, shape in SHAPES.items() if not torch.equal(state[name], source(name, shape))]
    return caught.value.failures[rank][0], took, wrong


@pytest.mark.parametrize(("what", "bad"), [("no path", 0), ("no store", BAD)])
def test_a_rank_that_cannot_begin_says_so(ranks: RankPool, saved: str, what: str, bad: int) -> None:
    """Its own error there, its name and reason on all others, at once; and the group can be used again."""
    found = ranks.run(excused, 3, saved, what, bad)
    reason = "has no path" if what == "no path" else "not on this machine"
    for rank, (error, seconds, wrong) in enumerate(found):
        assert isinstance(error, CheckpointError)
        assert reason in str(error)
        assert (error.kind == "peer") is (f"rank {bad} " in str(error)) is (rank != bad)
        assert seconds < 20
        assert wrong == []


def unread(rank: int, world: int, stops: bool) -> tuple[str, str]:
    """Rank 0 fails with what is no error of ours while it reads for all: type and text of the error here."""

    def read(store: Store) -> None:
        raise KeyboardInterrupt if stops else ValueError("not of ours")

    group = dist.group.WORLD
    assert group is not None
    try:
        read_together(meet(group, path="here", deadline=20.0), DictStore(), read)
    except (CheckpointError, ValueError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("stops", [True, False])
def test_whatever_the_first_rank_fails_with_reaches_all(ranks: RankPool, stops: bool) -> None:
    """An error that nobody thought of, or Ctrl-C, on the rank that reads for all: the others do not wait for it."""
    first, *rest = ranks.run(unread, 4, stops, timeout=15)
    assert first[0] == ("KeyboardInterrupt" if stops else "ValueError")
    assert {kind for kind, _ in rest} == {"CheckpointError"}
    assert all(("interrupted" if stops else "not of ours") in text for _, text in rest)


def late(rank: int, world: int) -> list[Any]:
    if rank == 1:
        time.sleep(0.5)
    group = dist.group.WORLD
    assert group is not None
    first = meet(group, path="here", deadline=20.0, mine=rank)
    second = meet(group, path="here", deadline=20.0, mine=-rank)
    return [first.token, first.said, second.token, second.said, second.round("x", rank * 10)]


def test_ranks_meet_again_and_again(ranks: RankPool) -> None:
    """Each meeting has one name for all, unlike the last one's, and everybody hears what everybody says."""
    found = ranks.run(late, 3)
    assert found[0] == found[1] == found[2]
    first, said, second, again, ten = found[0]
    assert first != second
    assert (said, again, ten) == ((0, 1, 2), (0, -1, -2), [0, 10, 20])


def retried(rank: int, world: int) -> str:
    """Rank 1 misses the first meeting; all come to the second."""
    group = dist.group.WORLD
    assert group is not None
    if rank != 1:
        with pytest.raises(CheckpointError, match="rank 1 "):
            meet(group, path="here", deadline=0.5)
    else:
        time.sleep(1.5)
    return meet(group, path="here", deadline=20.0).token


def test_a_meeting_that_failed_does_not_disturb_the_next(ranks: RankPool) -> None:
    """What a rank said to a meeting that came to nothing is not taken for the next one."""
    found = ranks.run(retried, 3)
    assert len(set(found)) == 1
