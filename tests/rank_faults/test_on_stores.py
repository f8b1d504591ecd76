"""One rank of several is killed, or fails, in the middle of a save to S3 and to GCS, whose uploads outlive it."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_storage import NotCommittedError, SaveOptions, StoreError, prune
from dcp_storage.testing.faulty import Fault
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.e2e import ALONE, Place, assert_same, assert_sentence, failure, load, place_of
from tests.processes import plain
from tests.rank_faults import BAD, Opener, Raised, raised_in

pytestmark = [pytest.mark.filterwarnings(ALONE), pytest.mark.slow]

WORLD = 3
PATIENCE = 8.0  # seconds: the group's time-out
SECONDS = 40.0
STORES = ("ministack", "gcs")
LENGTH = 3_000_000  # float32: an upload of three parts of 5 MiB

KILLS = {
    "before its upload": (BAD, Fault("upload", name=r"__.*", action="kill")),
    "in the middle": (BAD, Fault("write_part", nth=2, action="kill")),
    "after its writes": (BAD, Fault("complete", when="after", action="kill")),
    "the coordinator in the middle": (0, Fault("write_part", nth=2, action="kill")),
    "the coordinator before its commit": (0, Fault("create", name=r"\.commit.*", action="kill")),
    "the coordinator after its commit": (0, Fault("create", name=r"\.commit.*", when="after", action="kill")),
}
"""Who is killed, and at which call of its store."""


def state_of(rank: int, version: int = 0) -> dict[str, torch.Tensor]:
    """One tensor that only this rank holds."""
    return {f"w{rank}": torch.arange(LENGTH, dtype=torch.float32) + (1000 * version + rank)}


def merged(version: int = 0) -> dict[str, torch.Tensor]:
    """What all ranks saved."""
    return {key: value for rank in range(WORLD) for key, value in state_of(rank, version).items()}


def templates() -> dict[str, torch.Tensor]:
    """Targets for all of it."""
    return {key: torch.full_like(value, -1.0) for key, value in merged().items()}


def save_all(rank: int, world: int, place: Place, version: int) -> None:
    dcp.save(state_of(rank, version), storage_writer=place.writer(overwrite=True))


def faulty_save(rank: int, world: int, place: Place, on: int, fault: Fault) -> tuple[Raised, float]:
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    options = SaveOptions(part_size=5 << 20, attempts=1, max_concurrency=1)
    writer = place.writer(overwrite=True, options=options)
    if rank == on:
        writer._opener = Opener((fault,))
    begun = time.monotonic()
    found = raised_in(lambda: dcp.save(state_of(rank, 1), storage_writer=writer, process_group=group))
    return found, time.monotonic() - begun


def check_whole(place: Place, version: int) -> None:
    """This version loads, bit for bit."""
    found: dict[str, Any] = templates()
    load(found, place.reader())
    assert_same(found, merged(version))


def check_clean(place: Place) -> None:
    """After a prune there is only what the manifest names, its view and commit objects, and no open upload."""
    prune(place.url, storage_options=place.options, grace=timedelta(0), apply=True)
    named = {".metadata", *place.commits(), *(record["name"] for record in place.manifest()["files"])}
    assert {name for name in place.files() if not name.startswith(".manifest")} == named
    assert len([name for name in place.files() if name.startswith(".manifest")]) == 1
    assert place.uploads() == []


@pytest.mark.parametrize(
    ("when", "old"),
    [(when, True) for when in KILLS] + [("in the middle", False), ("the coordinator after its commit", False)],
)
@pytest.mark.parametrize("store", STORES)
def test_killed(request: pytest.FixtureRequest, ranks: RankPool, store: str, when: str, old: bool) -> None:
    """SIGKILL to one rank: the others raise, soon; old or new is there, whole, new only if the commit was made; the
    next save and a prune leave nothing of it, no upload either.
    """
    place = place_of(request, store)
    if old:
        ranks.run(save_all, WORLD, plain(place), 0)
    on, fault = KILLS[when]
    outcomes = ranks.run(faulty_save, WORLD, plain(place), on, fault, timeout=90, allow_failures=True)
    for rank, outcome in enumerate(outcomes):
        if rank == on:
            assert isinstance(outcome, RankFailure)
            assert outcome.signal == 9
            continue
        raised, seconds = outcome
        assert raised.type in {"RuntimeError", "DistBackendError", "DistNetworkError"}, raised
        assert seconds < SECONDS
    if when == "the coordinator after its commit":
        check_whole(place, 1)
    elif old:
        check_whole(place, 0)
    else:
        failure(NotCommittedError, lambda: load(templates(), place.reader()))
    ranks.run(save_all, WORLD, plain(place), 2)
    check_clean(place)
    check_whole(place, 2)


@pytest.mark.parametrize("on", [BAD, 0])
@pytest.mark.parametrize("store", STORES)
def test_refused(request: pytest.FixtureRequest, ranks: RankPool, store: str, on: int) -> None:
    """A part that the store refuses on one rank: all ranks are told by whom and why; no upload and no file of that
    rank is left, and the old checkpoint stands.
    """
    place = place_of(request, store)
    ranks.run(save_all, WORLD, plain(place), 0)
    before = set(place.files())
    error = functools.partial(StoreError, "The store said no.", operation="write_part", path=place.url)
    fault = Fault("write_part", nth=2, error=error)
    for raised, seconds in ranks.run(faulty_save, WORLD, plain(place), on, fault, timeout=90):
        assert raised.type == "CheckpointException"
        assert raised.of == {on: "StoreError"}
        assert "The store said no." in raised.texts[on]
        assert_sentence(raised.texts[on])
        assert seconds < SECONDS
    left = set(place.files()) - before - {".claim"}
    assert not [name for name in left if name.startswith((f"__{on}_", ".manifest"))]
    assert place.uploads() == []
    check_whole(place, 0)
