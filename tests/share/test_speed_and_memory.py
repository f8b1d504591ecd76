"""Sharing is faster where the store is the bottleneck, and takes no more memory than it was given."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.callbacks import Callback

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions
from dcp_storage.store import Store
from dcp_storage.testing.ranks import RankPool
from dcp_storage.wrappers import Request, RequestStore
from tests.share import MIB, recording, save_from, source

T = TypeVar("T")

LATENCY, CONNECTION, ALL = 0.02, 60e6, 240e6
LARGE = 24 * MIB  # elements of 8 bytes
SHAPES = {f"w{k}": (1024, 1024) for k in range(16)}


class Shaped(RequestStore):
    """A link with a latency, and a rate for each request and for all requests of all ranks together.

    The ranks are as many as share the whole, so each of them gets its part of it.
    """

    def __init__(self, inner: Store, ranks: int) -> None:
        super().__init__(inner)
        self.remote = True
        self.rate = ALL / ranks
        self.free = 0.0
        self.lock = threading.Lock()

    def request(self, request: Request, call: Callable[[], T]) -> T:
        begun = time.monotonic()
        found = call()
        with self.lock:
            self.free = max(self.free, begun) + request.nbytes / self.rate
            end = max(self.free, begun + request.nbytes / CONNECTION) + LATENCY
        time.sleep(max(end - time.monotonic(), 0))
        return found


def replica(rank: int, world: int, url: str, share: bool) -> float:
    options = LoadOptions(share_reads=share, deadline=60.0)
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD)
    recording(reader, lambda store: Shaped(store, world))
    state: dict[str, Any] = {name: torch.full(shape, -7.0) for name, shape in SHAPES.items()}
    dist.barrier()
    begun = time.monotonic()
    dcp.load(state, storage_reader=reader)
    took = time.monotonic() - begun
    assert all(torch.equal(value, source(name, SHAPES[name])) for name, value in state.items())
    assert reader.report is not None
    assert reader.report.shared is share
    return took


@pytest.mark.slow
def test_four_replicas_load_twice_as_fast(tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """64 MiB on four replicas over 60 MB/s per connection and 240 MB/s for all: the best of three, at least twice."""
    ranks.run(save_from, 1, str(tmp_path / "one"), SHAPES, ((), ()))
    best = {}
    for share in (False, True):
        rounds = [max(ranks.run(replica, 4, str(tmp_path / "one"), share, timeout=60)) for _ in range(3)]
        best[share] = min(rounds)
    with capsys.disabled():
        print(f"\nalone {best[False]:.2f} s, shared {best[True]:.2f} s: {best[False] / best[True]:.2f} times")
    assert best[False] >= 2 * best[True]


class Slow(Callback):  # type: ignore[misc]  # fsspec is not annotated
    """Takes a while to be told of what has arrived."""

    def relative_update(self, inc: int = 1) -> None:
        time.sleep(0.002)


def peak(rank: int, world: int, small: str, large: str, budget: int) -> tuple[int, bool]:
    """Bytes that the peak of a shared load lies above that of a warm-up, the target not counted."""
    options = LoadOptions(share_reads=True, deadline=60.0, memory_budget=budget)
    state = {"large": torch.full((LARGE,), -7)}
    before = 0
    for url, wanted in ((small, {"small": torch.zeros(MIB, dtype=torch.uint8)}), (large, state)):
        callback = Slow() if rank else None
        reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD, callback=callback)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dcp.load(wanted, storage_reader=reader)
    above = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return above, torch.equal(state["large"], torch.arange(LARGE))


def save_bytes(rank: int, world: int, small: str, large: str) -> None:
    dcp.save({"small": torch.zeros(MIB, dtype=torch.uint8)}, storage_writer=FsspecStorageWriter(small))
    dcp.save({"large": torch.arange(LARGE)}, storage_writer=FsspecStorageWriter(large))


@pytest.mark.slow
def test_an_exchange_keeps_to_its_budget(tmp_path: Path, ranks: RankPool) -> None:
    """192 MiB on two replicas, one of them slow to take what it gets: above a warm-up less than budget and 64 MiB each.

    The quick one would read its half, and hold it until it is sent.
    """
    budget = 4 * MIB
    folders = str(tmp_path / "small"), str(tmp_path / "large")
    ranks.run(save_bytes, 1, *folders)
    for above, good in ranks.run(peak, 2, *folders, budget, timeout=90):
        assert good
        assert above <= budget + 64 * MIB
