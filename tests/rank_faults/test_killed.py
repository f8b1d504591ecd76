"""One rank is killed in the middle of a save or a load, or is only slow."""

from __future__ import annotations

import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_storage import NotCommittedError, SaveOptions, prune
from dcp_storage.testing.faulty import Fault
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.e2e import ALONE, Place, assert_same, failure, load, place_of
from tests.processes import plain
from tests.rank_faults import BAD, Opener, Raised, merged, raised_in, state_of, template_of

pytestmark = pytest.mark.filterwarnings(ALONE)

WORLD = 3
PATIENCE = 4.0  # seconds: the group's time-out
SECONDS = 20.0

KILLS = {
    "before its writes": (BAD, Fault("make_folder", action="kill")),
    "in the middle": (BAD, Fault("write_part", nth=2, action="kill")),
    "after its writes": (BAD, Fault("complete", when="after", action="kill")),
    "the coordinator in the middle": (0, Fault("write_part", nth=2, action="kill")),
    "the coordinator before its commit": (0, Fault("create", name=r"\.commit.*", action="kill")),
}
"""Who is killed, and at which call of its store."""


def dying_save(rank: int, world: int, place: Place, on: int, fault: Fault, mode: str) -> tuple[Raised, float]:
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    writer = place.writer(overwrite=True, options=SaveOptions(part_size=64 << 10, attempts=1, max_concurrency=1))
    if rank == on:
        writer._opener = Opener((fault,))
    begun = time.monotonic()

    def save() -> None:
        if mode == "sync":
            dcp.save(state_of(rank, 1), storage_writer=writer, process_group=group)
        else:
            future = dcp.async_save(state_of(rank, 1), storage_writer=writer, process_group=group)
            cast("Future[Any]", future).result(60)

    found = raised_in(save)
    return found, time.monotonic() - begun


def save_all(rank: int, world: int, place: Place, version: int) -> None:
    dcp.save(state_of(rank, version), storage_writer=place.writer(overwrite=True))


def case(mode: str, when: str, old: bool, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(mode, when, old, id=f"{mode}, {when}, {'replacing' if old else 'fresh'}", marks=marks)


@pytest.mark.parametrize(
    ("mode", "when", "old"),
    [
        case("sync", "in the middle", True),
        *(case("sync", when, True, pytest.mark.slow) for when in KILLS if when != "in the middle"),
        case("sync", "after its writes", False, pytest.mark.slow),
        case("sync", "the coordinator before its commit", False, pytest.mark.slow),
        case("thread", "in the middle", True, pytest.mark.slow),
        case("thread", "the coordinator before its commit", True, pytest.mark.slow),
    ],
)
def test_a_save(request: pytest.FixtureRequest, ranks: RankPool, mode: str, when: str, old: bool) -> None:
    """SIGKILL to one rank: all others raise, soon; nothing is committed, what was there loads, and the next save and
    a prune leave nothing of it.
    """
    place = place_of(request, "local")
    if old:
        ranks.run(save_all, WORLD, plain(place), 0)
    on, fault = KILLS[when]
    outcomes = ranks.run(dying_save, WORLD, plain(place), on, fault, mode, timeout=60, allow_failures=True)
    for rank, outcome in enumerate(outcomes):
        if rank == on:
            assert isinstance(outcome, RankFailure)
            assert outcome.signal == 9
            continue
        assert not isinstance(outcome, RankFailure), outcome
        raised, seconds = outcome
        assert seconds < SECONDS
        assert raised.type in {"RuntimeError", "DistBackendError", "DistNetworkError"}, raised
    assert place.commits() == [".commit"] * old
    found = template_of(WORLD)
    if old:
        load(found, place.reader())
        assert_same(found, merged(WORLD))
    else:
        failure(NotCommittedError, lambda: load(found, place.reader()))
    ranks.run(save_all, WORLD, plain(place), 2)
    check_clean(place, 2)


def check_clean(place: Place, version: int) -> None:
    """What was saved last loads, and a prune leaves only that and commit objects."""
    prune(place.url, storage_options=place.options, grace=timedelta(0), apply=True)
    manifest = place.manifest()
    named = {".metadata", *place.commits(), *(record["name"] for record in manifest["files"])}
    assert {name for name in place.files() if not name.startswith(".manifest")} == named
    assert len([name for name in place.files() if name.startswith(".manifest")]) == 1
    assert place.uploads() == []
    found = template_of(WORLD)
    load(found, place.reader())
    assert_same(found, merged(WORLD, version))


def dying_load(rank: int, world: int, place: Place, on: int) -> tuple[Raised, float]:
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    reader = place.reader()
    if rank == on:
        reader._opener = Opener((Fault("read_into", nth=2, action="kill"),))
    begun = time.monotonic()
    found = raised_in(lambda: dcp.load(template_of(world), storage_reader=reader, process_group=group))
    return found, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("on", [BAD, 0])
def test_a_load(request: pytest.FixtureRequest, ranks: RankPool, on: int) -> None:
    """SIGKILL to a rank that reads: no other rank reports success, and the checkpoint is as it was."""
    place = place_of(request, "local")
    ranks.run(save_all, WORLD, plain(place), 0)
    before = {name: place.get(name) for name in place.files()}
    outcomes = ranks.run(dying_load, WORLD, plain(place), on, timeout=60, allow_failures=True)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, RankFailure) == (rank == on), outcome
        if rank != on:
            assert outcome[0].type in {"RuntimeError", "DistBackendError", "DistNetworkError"}, outcome
            assert outcome[1] < SECONDS
    assert {name: place.get(name) for name in place.files()} == before


def slow_round(rank: int, world: int, place: Place) -> tuple[float, float]:
    """A save and a load in which one rank takes longer than the others, and less than the group's time-out."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    writer, reader = place.writer(), place.reader()
    if rank == BAD:
        writer._opener = Opener((Fault("complete", action="delay", seconds=2.0),))
        reader._opener = Opener((Fault("read_into", action="delay", seconds=2.0),))
    begun = time.monotonic()
    dcp.save(state_of(rank), storage_writer=writer, process_group=group)
    saved = time.monotonic() - begun
    begun = time.monotonic()
    found = template_of(world)
    dcp.load(found, storage_reader=reader, process_group=group)
    assert_same(found, merged(world))
    return saved, time.monotonic() - begun


@pytest.mark.slow
def test_a_slow_rank(request: pytest.FixtureRequest, ranks: RankPool) -> None:
    """The others wait for a rank that is slow: both calls succeed on all, and none returns before it."""
    place = place_of(request, "local")
    for saved, loaded in ranks.run(slow_round, WORLD, plain(place), timeout=60):
        assert saved >= 2.0
        assert loaded >= 2.0
    assert place.commits() == [".commit"]


# -- without collectives -----------------------------------------------------------------------------------------------


def alone_round(rank: int, world: int, place: Place, what: str) -> Any:
    """A save without collectives in which one rank raises or dies; the others end with torch's barrier."""
    writer = place.writer(options=SaveOptions(label="one", lone_ranks=world, attempts=1))
    fault = {
        "raises": Fault("write_part", nth=None),
        "dies": Fault("write_part", nth=1, action="kill"),
        "dies late": Fault("create", nth=1, name=r"__.*", action="kill"),
        "is slow": Fault("write_part", nth=1, action="delay", seconds=2.0),
    }[what]
    if rank == BAD:
        writer._opener = Opener((fault,))
    begun = time.monotonic()
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    call = {"storage_writer": writer, "use_collectives": False, "process_group": group}
    if what == "is slow":
        dcp.save(state_of(rank), **call)
        return time.monotonic() - begun
    found = raised_in(lambda: dcp.save(state_of(rank), **call))
    return found, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raises", "dies", "dies late"])
def test_without_collectives(request: pytest.FixtureRequest, ranks: RankPool, what: str) -> None:
    """The promise is per rank: the others commit their own part, and end by torch's barrier; what loads all of it
    refuses, and names the rank that has not committed.
    """
    place = place_of(request, "local")
    outcomes = ranks.run(alone_round, WORLD, plain(place), what, timeout=60, allow_failures=True)
    for rank, outcome in enumerate(outcomes):
        if rank == BAD and what != "raises":
            assert isinstance(outcome, RankFailure)
            assert outcome.signal == 9
            continue
        raised, seconds = outcome
        assert seconds < SECONDS
        if rank == BAD:
            assert raised.of == {-1: "StoreError"}
        else:
            assert raised.type in {"RuntimeError", "DistBackendError", "DistNetworkError"}, raised
    names = place.files()
    assert [rank for rank in range(WORLD) if f"__{rank}.commit" in names] == [0, 2]
    for outcome in ranks.run(refused, WORLD, plain(place)):
        assert "rank 1 has not committed" in outcome


def refused(rank: int, world: int, place: Place) -> str:
    raised = raised_in(lambda: dcp.load(template_of(world), storage_reader=place.reader()))
    assert set(raised.of.values()) == {"NotCommittedError"}
    return raised.texts[rank]


@pytest.mark.slow
def test_a_slow_rank_without_collectives(request: pytest.FixtureRequest, ranks: RankPool) -> None:
    """A rank that is slow commits later than the others, and the whole loads."""
    place = place_of(request, "local")
    assert min(ranks.run(alone_round, WORLD, plain(place), "is slow", timeout=60)) >= 2.0
    ranks.run(loads_own, WORLD, plain(place))


def loads_own(rank: int, world: int, place: Place) -> None:
    found = {key: value for key, value in template_of(world).items() if key in state_of(rank)}
    dcp.load(found, storage_reader=place.reader())
    assert_same(found, state_of(rank))


# -- in torch's background process -------------------------------------------------------------------------------------


def in_process(rank: int, world: int, place: Place, what: str) -> tuple[Raised, float]:
    """``async_save`` in process mode, in which the background process of one rank raises or dies."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from tests.rank_faults import Saving

    writer = place.writer(overwrite=True, options=SaveOptions(attempts=1, part_size=64 << 10))
    planner = Saving("resolve_data" if (rank, what) == (BAD, "Needy") else "", what)
    if rank == BAD and what == "dies":
        writer._opener = Opener((Fault("write_part", nth=2, action="kill"),))
    begun = time.monotonic()
    found = raised_in(
        lambda: cast(
            "Future[Any]",
            dcp.async_save(
                state_of(rank, 1),
                storage_writer=writer,
                planner=planner,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ),
        ).result(80)
    )
    return found, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("what", ["Needy", "dies"])
def test_in_process_mode(request: pytest.FixtureRequest, ranks: RankPool, what: str) -> None:
    """In torch's background processes: all ranks hear of an error through their futures, and of a process that was
    killed; nothing is committed, and the old checkpoint loads.
    """
    place = place_of(request, "local")
    ranks.run(save_all, 2, plain(place), 0)
    for rank, (raised, _) in enumerate(
        ranks.run(in_process, 2, plain(place), what, timeout=110, env={"MASTER_ADDR": "127.0.0.1"})
    ):
        if what == "Needy":
            assert (raised.of, raised.causes) == ({BAD: "CheckpointError"}, {BAD: "Needy"}), (rank, raised)
        else:
            assert raised.type == "RuntimeError", (rank, raised)
    assert place.commits() == [".commit"]
    found = template_of(2)
    load(found, place.reader())
    assert_same(found, merged(2))
