"""Saves and loads from coroutines and threads: a running loop is neither used nor stopped nor replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed.checkpoint as dcp
import uvloop

from tests.e2e import ALONE, assert_same, like, load, place_of, small_state
from tests.processes import round_trip

pytestmark = pytest.mark.filterwarnings(ALONE)

Run = Callable[[Coroutine[Any, Any, None]], None]
RUNNERS: dict[str, Run] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "gcs"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_in_a_coroutine(request: pytest.FixtureRequest, kind: str, runner: str) -> None:
    """Called inside ``async def`` both work; the loop is the same before and after, and runs its tasks again."""
    place = place_of(request, kind)
    ticks: list[int] = []

    async def tick() -> None:
        while True:
            ticks.append(len(ticks))
            await asyncio.sleep(0.001)

    async def main() -> None:
        loop, other = asyncio.get_running_loop(), asyncio.create_task(tick())
        assert type(loop).__module__.startswith("uvloop") is (runner == "uvloop")
        await asyncio.sleep(0.01)
        round_trip(place, 1)
        assert asyncio.get_running_loop() is loop
        assert loop.is_running()
        before = len(ticks)
        await asyncio.sleep(0.05)
        assert len(ticks) > before
        assert asyncio.all_tasks() == {asyncio.current_task(), other}
        other.cancel()

    RUNNERS[runner](main())


@pytest.mark.parametrize("kind", ["local", "moto", "gcs"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_in_threads_of_a_loop(request: pytest.FixtureRequest, kind: str, runner: str) -> None:
    """Four saves and loads at once by ``asyncio.to_thread`` leave the loop free meanwhile, and do not mix."""
    place = place_of(request, kind)

    async def main() -> None:
        works = [asyncio.to_thread(round_trip, place.child(str(n)), n) for n in range(4)]
        together, ticks = asyncio.gather(*works), 0
        while not together.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await together
        assert ticks > 3

    RUNNERS[runner](main())


@pytest.mark.parametrize("kind", ["local", "moto", "gcs"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_asynchronous_save_from_a_coroutine(request: pytest.FixtureRequest, kind: str, runner: str) -> None:
    """``dcp.async_save`` begun in a coroutine can be awaited there."""
    place = place_of(request, kind)

    async def main() -> None:
        future = dcp.async_save(small_state(3), storage_writer=place.writer(), no_dist=True)
        await asyncio.wait_for(asyncio.wrap_future(cast("Future[Any]", future)), 60)
        found = like(small_state())
        load(found, place.reader())
        assert_same(found, small_state(3))

    RUNNERS[runner](main())


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "gcs"])
def test_in_plain_threads(request: pytest.FixtureRequest, kind: str) -> None:
    """Six threads that begin together, each with a writer, a reader and a folder of its own, do not mix."""
    place, together = place_of(request, kind), threading.Barrier(6)

    def work(number: int) -> None:
        together.wait(30)
        round_trip(place.child(str(number)), number)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, number) for number in range(6)]:
            done.result(90)
