"""A fork after the filesystem was used: the child has none of its threads, and saves and loads all the same."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable

import pytest
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, like, load, place_of, save, small_state
from tests.processes import plain, round_trip

pytestmark = pytest.mark.filterwarnings(ALONE)

SECONDS = 20.0  # within which a child must be done


def in_child(work: Callable[[], None]) -> float:
    """Forks, works in the child, and returns how many seconds that took; raises if it failed or took too long."""
    child = multiprocessing.get_context("fork").Process(target=work)
    begun = time.monotonic()
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        raise TimeoutError(f"the child was not done after {SECONDS} s")
    if child.exitcode != 0:
        raise ChildProcessError(f"the child ended with {child.exitcode}")
    return time.monotonic() - begun


def used_before(rank: int, world: int, place: Place) -> list[float]:
    """The parent saves and loads; then a child, the parent again, a second child, and a child of a child."""
    round_trip(place.child("parent"), 1)
    seconds = [in_child(lambda: round_trip(place.child("child"), 2))]
    round_trip(place.child("parent-again"), 3)
    seconds.append(in_child(lambda: round_trip(place.child("second-child"), 4)))
    seconds.append(in_child(lambda: deeper(place)))
    return seconds


def deeper(place: Place) -> None:
    round_trip(place.child("third-child"), 5)
    in_child(lambda: round_trip(place.child("grandchild"), 6))


@pytest.mark.parametrize("kind", ["local", "moto", "gcs"])
def test_a_child_after_use_in_the_parent(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """Children forked after the parent saved and loaded do both within seconds, and the parent goes on."""
    place = place_of(request, kind)
    (seconds,) = ranks.run(used_before, 1, plain(place), init=False)
    assert max(seconds) < SECONDS
    for name, seed in [("child", 2), ("second-child", 4), ("grandchild", 6)]:
        found = like(small_state())
        load(found, place.child(name).reader())
        assert_same(found, small_state(seed))


def same_objects(rank: int, world: int, place: Place) -> None:
    """The very writer and reader that the parent used are used in the child, and after that by the parent."""
    writer, reader = (
        FsspecStorageWriter(storage_options=place.options),
        FsspecStorageReader(storage_options=place.options),
    )

    def work(name: str, seed: int) -> None:
        url = place.child(name).url
        save(small_state(seed), writer, checkpoint_id=url)
        found = like(small_state())
        load(found, reader, checkpoint_id=url)
        assert_same(found, small_state(seed))

    work("one", 1)
    in_child(lambda: work("two", 2))
    work("three", 3)


@pytest.mark.parametrize("kind", ["local", "moto", "gcs"])
def test_a_writer_and_a_reader_that_were_used_before_the_fork(
    request: pytest.FixtureRequest, ranks: RankPool, kind: str
) -> None:
    """A writer and a reader outlive a fork on both sides of it."""
    ranks.run(same_objects, 1, plain(place_of(request, kind)), init=False)


def after_pickling(rank: int, world: int, place: Place, writer: StorageWriter, reader: StorageReader) -> int:
    """Both were pickled to come here."""
    assert isinstance(writer, FsspecStorageWriter)
    assert isinstance(reader, FsspecStorageReader)
    assert (writer.report, reader.report) == (None, None)
    assert (writer.checkpoint_id, reader.checkpoint_id) == (place.url, place.url)
    assert writer.options == SaveOptions(part_size=1 << 20, label="kept")
    assert reader.options == LoadOptions(max_gap=1, trusted_globals=["collections.Counter"])
    assert writer.overwrite
    save(small_state(2), writer)
    found = like(small_state())
    load(found, reader)
    assert_same(found, small_state(2))
    return os.getpid()


@pytest.mark.parametrize("kind", ["local", "moto", "gcs"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_they_pickle(request: pytest.FixtureRequest, ranks: RankPool, kind: str, used: bool) -> None:
    """A writer and a reader, new or used, arrive in another process with all their options and work there."""
    place = plain(place_of(request, kind))
    writer = place.writer(overwrite=True, options=SaveOptions(part_size=1 << 20, label="kept"))
    reader = place.reader(options=LoadOptions(max_gap=1, trusted_globals=["collections.Counter"]))
    if used:
        save(small_state(1), writer)
        load(like(small_state()), reader)
    (other,) = ranks.run(after_pickling, 1, place, writer, reader, init=False)
    assert other != os.getpid()
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(reader))))
    found = like(small_state())
    load(found, again)
    assert_same(found, small_state(2))
