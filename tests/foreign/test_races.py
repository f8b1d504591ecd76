"""Of two racing creators one wins, 200 times, on every store that declares ``atomic``; the others declare otherwise."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dcp_storage.errors import ObjectExistsError
from dcp_storage.store import Atomicity, Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.conformance_tools import at_once, read
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.ranks import RankPool
from tests.e2e import Place
from tests.foreign import opened, place_on
from tests.processes import plain
from tests.servers.gcs import GcsServer
from tests.stores.local_kit import WAYS

ROUNDS = 200
SECONDS = 500  # SeaweedFS takes more than a second for some rounds
TOGETHER = 0.0005  # seconds ahead of which both racers know when to begin

SLOW = (pytest.mark.slow, pytest.mark.timeout(SECONDS + 60))


def store_of(place: Place, way: str) -> AbstractContextManager[Store]:
    """The store of a place; on local disk by one of its three ways to create."""
    if not way:
        return opened(place.url, place.options)
    return contextlib.closing(LocalStore(place.url, calls=Syscalls(**WAYS[way])))


def racing(rank: int, world: int, place: Place, way: str) -> list[bool]:
    """Creates each name at the same moment as the other racer; whether this one won, by round."""
    begin, won = torch.zeros(1, dtype=torch.float64), []
    with store_of(place, way) as store:
        store.make_folder()
        assert store.create_if_absent is Atomicity.ATOMIC
        for number in range(ROUNDS):
            dist.barrier()
            if rank == 0:
                begin.fill_(time.monotonic() + TOGETHER)  # of one clock for all processes
            dist.broadcast(begin, 0)
            while time.monotonic() < begin.item():
                pass
            try:
                store.create(f"race-{number}", f"by {rank}, in {number}".encode())
            except ObjectExistsError:
                won.append(False)
            else:
                won.append(True)
        dist.barrier()
    return won


@pytest.mark.parametrize(
    "kind",
    [
        "local link",
        "local rename",
        "local exclusive",
        "strict",
        pytest.param("fake_gcs", marks=SLOW),
        # Not moto, a mock that looks and then writes: under load two racers of one round in some hundreds both won.
        pytest.param("ministack", marks=SLOW),
        pytest.param("seaweedfs", marks=SLOW),
    ],
)
def test_one_of_two_processes_wins(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """Of two processes that create one name at once exactly one succeeds, the other finds it taken, and whose it is
    stands in it.
    """
    kind, _, way = kind.partition(" ")
    place = place_on(request, kind)
    first, second = ranks.run(racing, 2, plain(place), way, timeout=SECONDS)
    assert [a + b for a, b in zip(first, second, strict=True)] == [1] * ROUNDS
    with opened(place.url, place.options) as store:
        assert len(store.entries()) == ROUNDS
        for number, first_won in enumerate(first):
            assert read(store, f"race-{number}") == f"by {0 if first_won else 1}, in {number}".encode()


@pytest.fixture(params=["local", "memory", "dict"])
def stores(request: pytest.FixtureRequest) -> Iterator[list[Store]]:
    """Two stores of one folder, in this process."""
    if request.param == "dict":
        first = DictStore(folder="run")
        yield [first, DictStore(first.objects, folder="run")]
        return
    url = place_on(request, "local").url if request.param == "local" else f"memory://{secrets.token_hex(6)}/run"
    with opened(url) as one, opened(url) as other:
        yield [one, other]


def test_one_of_two_threads_wins(stores: list[Store]) -> None:
    """So it is with two threads, also on the stores that no other process sees."""
    stores[0].make_folder()
    assert [store.create_if_absent for store in stores] == [Atomicity.ATOMIC] * 2
    bodies = [b"by the first", b"by the second one"]
    for number in range(ROUNDS):
        name = f"race-{number}"
        answers = at_once([partial(store.create, name, body) for store, body in zip(stores, bodies, strict=True)])
        winners = [body for body, answer in zip(bodies, answers, strict=True) if answer is None]
        losers = [answer for answer in answers if answer is not None]
        assert len(winners) == len(losers) == 1, f"round {number}: {answers}"
        assert isinstance(losers[0], ObjectExistsError)
        assert read(stores[number % 2], name) == winners[0]
    assert len(stores[0].entries()) == ROUNDS


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        ("dir", Atomicity.UNKNOWN),
        ("ftp", Atomicity.UNKNOWN),
        pytest.param("azurite", Atomicity.UNKNOWN, marks=SLOW),
        pytest.param("rclone", Atomicity.NONE, marks=SLOW),
    ],
)
def test_who_cannot_promise_it_says_so(request: pytest.FixtureRequest, kind: str, declared: Atomicity) -> None:
    """A filesystem that nobody wrote a store for is unknown; a server that ignores the condition is none."""
    place = place_on(request, kind)
    with opened(place.url, place.options) as store:
        store.make_folder()
        assert store.create_if_absent is declared
        store.create("taken", b"first")
        with pytest.raises(ObjectExistsError):  # it looks first, at least
            store.create("taken", b"second")
        assert read(store, "taken") == b"first"


def test_a_gcs_server_without_conditions(strict: GcsServer, request: pytest.FixtureRequest) -> None:
    """GCS behind an endpoint that ignores preconditions is found out by the probe, which leaves nothing."""
    place = place_on(request, "strict")
    strict.api.ignores_conditions = True
    try:
        with opened(place.url, place.options) as store:
            assert store.create_if_absent is Atomicity.NONE
            assert store.entries() == []
    finally:
        strict.api.ignores_conditions = False
