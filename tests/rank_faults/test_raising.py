"""One rank raises, whatever it may be: every rank raises the same, nothing is committed, and the old one stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, SaveOptions
from dcp_storage.testing.faulty import Fault
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, assert_sentence, load, place_of
from tests.processes import plain
from tests.rank_faults import (
    BAD,
    ERRORS,
    Loading,
    Opener,
    Raised,
    Saving,
    Telling,
    merged,
    raised_in,
    state_of,
    template_of,
)

pytestmark = pytest.mark.filterwarnings(ALONE)

WORLD = 3
SECONDS = 20.0
PASSING = {"KeyboardInterrupt", "SystemExit"}
"""What is nobody's error stays what it is."""

SAVES = {
    "resolve_data": BAD,
    "callback": BAD,
    "write_part": BAD,
    "make_folder": BAD,
    "manifest": 0,
    "listing": 0,
}
"""Where it happens in a save, and on which rank."""

LOADS = {
    "resolve_tensor": BAD,
    "commit_tensor": BAD,
    "load_bytes": BAD,
    "callback": BAD,
    "read_into": BAD,
    "listing": 0,
}


def slow_but(*quick: str, of: Sequence[str] = tuple(ERRORS)) -> list[Any]:
    """Errors; but for some only in the slow group."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in of]


def fault_at(where: str, what: str) -> Fault | None:
    """The fault of a store that raises there."""
    error = ERRORS[what]
    return {
        "write_part": Fault("write_part", nth=None, name=r"__.*", error=error),
        "make_folder": Fault("make_folder", nth=None, error=error),
        "manifest": Fault("put", nth=None, name=r"\.manifest.*", error=error),
        "read_into": Fault("read_into", nth=2, error=error),
        "listing": Fault("entries", nth=2, error=error),
    }.get(where)


def put_in(writer_or_reader: Any, rank: int, where: str, what: str, on: int) -> None:
    """Makes the store or the callback of a rank fail, where that is what is to fail."""
    if rank != on:
        return
    fault = fault_at(where, what)
    if fault is not None:
        writer_or_reader._opener = Opener((fault,))
    elif where == "callback":
        writer_or_reader.callback = Telling(what)


def failing_saves(rank: int, world: int, place: Place, what: str, mode: str) -> dict[str, tuple[Raised, float]]:
    """A save that goes well to each of some folders, and then one over it in which one rank raises."""
    seen = {}
    for where, on in SAVES.items():
        folder = place.child(where)
        dcp.save(state_of(rank), storage_writer=folder.writer())
        writer = folder.writer(overwrite=True, options=SaveOptions(attempts=1))
        put_in(writer, rank, where, what, on)
        planner = Saving(where if rank == on else "", what)
        begun = time.monotonic()
        found = raised_in(lambda: saved(rank, writer, planner, mode))  # noqa: B023 - called at once
        seen[where] = found, time.monotonic() - begun
        assert writer._budget.held == 0
        assert writer.report is None or (rank, on) not in {(BAD, BAD), (0, 0)}
        dist.barrier()
    return seen


def saved(rank: int, writer: FsspecStorageWriter, planner: Saving, mode: str) -> None:
    if mode == "sync":
        dcp.save(state_of(rank, 1), storage_writer=writer, planner=planner)
        return
    future = dcp.async_save(state_of(rank, 1), storage_writer=writer, planner=planner)
    cast("Future[Any]", future).result(60)


def check(seen: list[dict[str, tuple[Raised, float]]], what: str, places: dict[str, int]) -> None:
    """Every rank was told who failed, by an error that says why."""
    for rank, told in enumerate(seen):
        assert list(told) == list(places)
        for where, (raised, seconds) in told.items():
            on, at = places[where], f"{where} on rank {rank}: {raised}"
            assert raised.type == "CheckpointException", at
            assert list(raised.of) == [on], at
            assert "the reason" in raised.texts[on], at
            assert seconds < SECONDS, at
            if what in PASSING:
                assert raised.of == {on: what}, at
                continue
            assert (raised.of, raised.kinds, raised.causes) == ({on: "CheckpointError"}, {on: "hook"}, {on: what}), at
            assert_sentence(raised.texts[on])


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("sync", "KeyboardInterrupt"),
        *(pytest.param("sync", name, marks=pytest.mark.slow) for name in ERRORS if name != "KeyboardInterrupt"),
        *(pytest.param("thread", name, marks=pytest.mark.slow) for name in ("Needy", "Stop", "SystemExit")),
    ],
)
def test_a_save(request: pytest.FixtureRequest, ranks: RankPool, mode: str, what: str) -> None:
    """In the planner, the callback or the store of one rank: all ranks raise it as ours, with its type and text, or as
    what it is where it is nobody's error; the checkpoint that was there loads, and nothing of that rank is left.
    """
    place = place_of(request, "local")
    check(ranks.run(failing_saves, WORLD, plain(place), what, mode), what, SAVES)
    for where, on in SAVES.items():
        folder = place.child(where)
        assert folder.commits() == [".commit"]
        manifest = folder.manifest()
        kept = {record["name"] for record in manifest["files"]}
        left = [name for name in folder.files() if name.startswith(f"__{on}_") and name not in kept]
        assert not left or (where in {"manifest", "listing"} and what in {*PASSING, "Stop", "NeedyStop"}), where
        found = template_of(WORLD)
        load(found, folder.reader())
        assert_same(found, merged(WORLD))


def failing_loads(rank: int, world: int, place: Place, what: str) -> dict[str, tuple[Raised, float]]:
    """Loads in each of which one rank raises, and one after them that goes well."""
    dcp.save(state_of(rank), storage_writer=place.writer())
    seen = {}
    for where, on in LOADS.items():
        reader = place.reader()
        put_in(reader, rank, where, what, on)
        planner = Loading(where if rank == on else "", what)
        begun = time.monotonic()
        found = raised_in(lambda: dcp.load(template_of(world), storage_reader=reader, planner=planner))  # noqa: B023
        seen[where] = found, time.monotonic() - begun
        assert reader._budget.held == 0
        assert reader.report is None or rank != on
        dist.barrier()
    whole = template_of(world)
    dcp.load(whole, storage_reader=place.reader())
    assert_same(whole, merged(world))
    return seen


@pytest.mark.parametrize("what", slow_but("Needy"))
def test_a_load(request: pytest.FixtureRequest, ranks: RankPool, what: str) -> None:
    """In the planner, the callback or the store of one rank: all ranks raise it, and the next load goes well."""
    place = place_of(request, "local")
    check(ranks.run(failing_loads, WORLD, plain(place), what), what, LOADS)


def failing_plan(rank: int, world: int, place: Place, what: str, kind: str) -> tuple[Raised, float]:
    """A save or a load whose coordinator raises where only torch's own code is around it."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    where = "create_global_plan" if rank == 0 else ""
    begun = time.monotonic()
    if kind == "save":
        found = raised_in(
            lambda: dcp.save(
                state_of(rank, 1),
                storage_writer=FsspecStorageWriter(place.url, overwrite=True),
                planner=Saving(where, what),
                process_group=group,
            )
        )
    else:
        found = raised_in(
            lambda: dcp.load(
                template_of(world),
                storage_reader=FsspecStorageReader(place.url),
                planner=Loading(where, what),
                process_group=group,
            )
        )
    took = time.monotonic() - begun
    dist.barrier()
    return found, took


@pytest.mark.parametrize("kind", ["save", "load"])
@pytest.mark.parametrize("what", slow_but(of=("Needy", "Stop", "KeyboardInterrupt")))
def test_the_coordinators_plan(request: pytest.FixtureRequest, ranks: RankPool, what: str, kind: str) -> None:
    """An error of the coordinator's planner between our hooks is torch's to send: the others have it, or end by the
    group's time-out where it cannot be sent; nothing was written, and the old checkpoint loads.
    """
    place = place_of(request, "local")
    ranks.run(save_first, WORLD, plain(place))
    before = place.files()
    for rank, (raised, seconds) in enumerate(ranks.run(failing_plan, WORLD, plain(place), what, kind)):
        assert seconds < 15
        if what in PASSING:
            assert raised.of == {0: what}, (rank, raised)
        else:
            assert raised.type != "AssertionError", (rank, raised)
    assert place.files() == before
    found = template_of(WORLD)
    load(found, place.reader())
    assert_same(found, merged(WORLD))


def save_first(rank: int, world: int, place: Place) -> None:
    dcp.save(state_of(rank), storage_writer=place.writer())
