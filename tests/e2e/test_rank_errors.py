"""What fails on one rank fails on all, typed and with its key, and leaves nothing of the failing rank."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcp_storage import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    FsspecStorageReader,
    FsspecStorageWriter,
    SaveOptions,
    StoreError,
)
from dcp_storage.session import OpenStore
from dcp_storage.store import Store
from dcp_storage.stores.location import Location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, assert_sentence, failure, like, load, place_of, raised_by, save
from tests.e2e import small_state as state_of

pytestmark = pytest.mark.filterwarnings(ALONE)

SECONDS = 30.0
LARGE = 3 << 20  # float32 elements: 12 MiB, several parts on S3


class Unpicklable(Exception):  # noqa: N818 - the name says what matters
    """Cannot cross a process border."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


class Bad(DefaultSavePlanner):
    """Fails when it is asked for the second tensor, when the first is under way already."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn.startswith("second"):
            raise self.error
        return super().resolve_data(write_item)


class BadLoad(DefaultLoadPlanner):
    """Fails when it is asked where the second tensor should go."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if read_item.dest_index.fqn.startswith("second"):
            raise Unpicklable("no place for it")
        return cast("torch.Tensor", super().resolve_tensor(read_item))


def faulty(faults: Sequence[Fault]) -> OpenStore:
    """Opens the real store with faults around it."""

    def opener(location: Location, options: Mapping[str, Any], most: int) -> Store:
        return FaultyStore(open_store(location, options, max_concurrency=most), faults)

    return opener


def own(rank: int) -> dict[str, Any]:
    return {f"first-{rank}": torch.full((LARGE,), float(rank)), f"second-{rank}": torch.ones(10), f"third-{rank}": 3}


def save_with_faults(
    rank: int, world: int, url: str, options: dict[str, Any], planners: dict[int, Exception], faults: dict[int, Any]
) -> tuple[dict[int, BaseException], float]:
    writer = FsspecStorageWriter(
        url, storage_options=options, options=SaveOptions(part_size=1 << 20, attempts=2, deadline=10.0)
    )
    if rank in faults:
        writer._opener = faulty(faults[rank])
    planner = Bad(planners[rank]) if rank in planners else DefaultSavePlanner()
    begun = time.monotonic()
    errors = raised_by(lambda: dcp.save(own(rank), storage_writer=writer, planner=planner))
    spent = time.monotonic() - begun
    dist.barrier()
    assert writer._budget.held == 0
    assert writer.report is None or rank not in {*planners, *faults}
    return errors, spent


def check_nothing_left(place: Place, failing: int) -> None:
    names = place.files()
    assert not [name for name in names if name.startswith(f"__{failing}_")], names
    assert place.commits() == []
    assert not [name for name in names if name.startswith((".manifest", ".metadata"))]
    assert place.uploads() == []


@pytest.mark.parametrize("kind", ["local", "moto"])
@pytest.mark.parametrize("error", [KeyError("nothing of that name"), Unpicklable("gone")], ids=["plain", "unpicklable"])
def test_a_planner_that_raises(request: pytest.FixtureRequest, ranks: RankPool, kind: str, error: Exception) -> None:
    """Rank 2's planner raises half-way: all four ranks get our error with key and cause; nothing of rank 2 is left."""
    place = place_of(request, kind)
    planners = {2: Unpicklable if isinstance(error, Unpicklable) else KeyError}
    outcomes = ranks.run(save_with_bad_planner, 4, place.url, place.options, planners)
    for errors, spent in outcomes:
        assert list(errors) == [2]
        raised = errors[2]
        assert type(raised) is CheckpointError
        assert (raised.kind, raised.key, raised.path) == ("hook", "second-2", place.url)
        assert raised.cause is not None
        assert raised.cause.type.endswith(type(error).__name__)
        assert "of that name" in raised.cause.message
        assert_sentence(str(raised))
        assert spent < SECONDS
    check_nothing_left(place, 2)


def save_with_bad_planner(
    rank: int, world: int, url: str, options: dict[str, Any], planners: dict[int, type[Exception]]
) -> Any:
    made = {failing: kind("nothing of that name") for failing, kind in planners.items()}
    return save_with_faults(rank, world, url, options, made, {})


FAULTS = {
    "upload": Fault("upload", nth=None, name="__2_.*"),
    "part": Fault("write_part", nth=2, name="__2_.*"),
    "complete": Fault("complete", nth=None, name="__2_.*"),
    "complete-after": Fault("complete", nth=1, name="__2_.*", when="after"),
    "folder": Fault("make_folder", nth=None),
}


@pytest.mark.parametrize("kind", ["local", "moto"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_one_rank(request: pytest.FixtureRequest, ranks: RankPool, kind: str, fault: str) -> None:
    """A store error of rank 2, at any call of its write, reaches all ranks typed; nothing of rank 2 is left."""
    place = place_of(request, kind)
    outcomes = ranks.run(save_with_faults, 4, place.url, place.options, {}, {2: [FAULTS[fault]]})
    for errors, spent in outcomes:
        assert list(errors) == [2]
        raised = errors[2]
        assert type(raised) is StoreError
        assert raised.path == place.url
        assert raised.key == ("__2_0.distcp" if fault != "folder" else None)
        assert raised.operation == {"part": "write_part", "folder": "make_folder"}.get(fault, fault.partition("-")[0])
        assert raised.errno == 5
        assert spent < SECONDS
    check_nothing_left(place, 2)


def save_two_failing(rank: int, world: int, url: str, options: dict[str, Any]) -> Any:
    planners: dict[int, Exception] = {1: ValueError("one")}
    return save_with_faults(rank, world, url, options, planners, {2: [FAULTS["part"]]})


def test_two_ranks_that_fail_are_both_named(request: pytest.FixtureRequest, ranks: RankPool) -> None:
    """Where two ranks fail for reasons of their own, every rank sees both."""
    place = place_of(request, "local")
    for errors, _ in ranks.run(save_two_failing, 3, place.url, place.options):
        assert {rank: type(error) for rank, error in errors.items()} == {1: CheckpointError, 2: StoreError}
    check_nothing_left(place, 1)
    check_nothing_left(place, 2)


COMMIT_FAULTS: dict[str, tuple[list[Fault], type[CheckpointError]]] = {
    "manifest": ([Fault("put", nth=None, name=r"\.manifest.*")], StoreError),
    "commit": ([Fault("create", nth=None, name=r"\.commit.*")], StoreError),
    "second-listing": ([Fault("entries", nth=3)], StoreError),
    "reply-and-look": (
        [Fault("create", nth=1, name=r"\.commit.*", when="lost"), Fault("read", nth=None, name=r"\.commit.*")],
        CommitUnknownError,
    ),
}


@pytest.mark.parametrize("kind", ["local", "moto"])
@pytest.mark.parametrize("fault", COMMIT_FAULTS)
def test_a_commit_that_fails(request: pytest.FixtureRequest, ranks: RankPool, kind: str, fault: str) -> None:
    """An error of the coordinator in ``finish`` reaches all ranks typed; only a commit of unknown fate stays."""
    place = place_of(request, kind)
    faults, wanted = COMMIT_FAULTS[fault]
    outcomes = ranks.run(save_with_faults, 3, place.url, place.options, {}, {0: faults})
    for errors, spent in outcomes:
        assert {type(error) for error in errors.values()} == {wanted}
        assert spent < SECONDS
    if wanted is CommitUnknownError:
        found = {**like(own(0)), **like(own(2))}
        load(found, place.reader())  # the reply was lost, the commit was made: nothing of it may be gone
        assert_same(found, {**own(0), **own(2)})
    else:
        check_nothing_left(place, 0)


def refused_overwrite(rank: int, world: int, url: str, options: dict[str, Any]) -> dict[int, BaseException]:
    writer = FsspecStorageWriter(url, storage_options=options)
    return raised_by(lambda: dcp.save(own(rank), storage_writer=writer))


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_a_refused_overwrite(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """All ranks are refused before any has written a byte, and the old checkpoint still loads."""
    place = place_of(request, kind)
    save(state_of(), place.writer())
    before = place.files()
    for errors in ranks.run(refused_overwrite, 4, place.url, place.options):
        assert {type(error) for error in errors.values()} == {CheckpointExistsError}
    assert place.files() == before
    found = like(state_of())
    load(found, place.reader())
    assert_same(found, state_of())


def load_with_faults(
    rank: int, world: int, url: str, options: dict[str, Any], kind: str
) -> tuple[dict[int, BaseException], float]:
    reader = FsspecStorageReader(url, storage_options=options)
    planner = None
    if rank == 2 and kind == "planner":
        planner = BadLoad()
    elif rank == 2:
        reader._opener = faulty([Fault("read_into", nth=2)])
    template = cast("dict[str, Any]", like({key: value for k in range(4) for key, value in own(k).items()}))
    begun = time.monotonic()
    errors = raised_by(lambda: dcp.load(template, storage_reader=reader, planner=planner))
    assert reader._budget.held == 0
    return errors, time.monotonic() - begun


def save_own(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    dcp.save(own(rank), storage_writer=FsspecStorageWriter(url, storage_options=options))


@pytest.mark.parametrize("kind", ["planner", "store"])
def test_a_load_that_fails_on_one_rank(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """An error of rank 2 while loading, its planner's or its store's, reaches all ranks typed and with a key."""
    place = place_of(request, "local")
    ranks.run(save_own, 4, place.url, place.options)
    for errors, spent in ranks.run(load_with_faults, 4, place.url, place.options, kind):
        assert list(errors) == [2]
        raised = errors[2]
        assert type(raised) is (CheckpointError if kind == "planner" else StoreError)
        assert raised.key is not None
        assert raised.key.startswith("second-" if kind == "planner" else "__")
        assert spent < SECONDS


def test_an_upload_that_failed_leaves_no_parts(request: pytest.FixtureRequest) -> None:
    """A multipart upload to S3 whose part fails is aborted, and the next save to the folder succeeds."""
    place = place_of(request, "ministack")
    writer = place.writer(options=SaveOptions(part_size=5 << 20, attempts=1))
    writer._opener = faulty([Fault("write_part", nth=2)])
    state = {"large": torch.arange(LARGE, dtype=torch.float32)}
    error = failure(StoreError, lambda: save(state, writer))
    assert (error.operation, error.key) == ("write_part", "__0_0.distcp")
    check_nothing_left(place, 0)
    writer._opener = None
    save(state, writer)
    found = like(state)
    load(found, place.reader())
    assert_same(found, state)
