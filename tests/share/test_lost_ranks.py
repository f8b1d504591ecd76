"""``DCP.load`` raises the error that names the rank, also where torch's own collectives fail before it."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_storage import DCP, CheckpointError, FsspecStorageReader, LoadOptions
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.share import MIB, recording, save_from

SHAPES = {f"w{k}": (256, 1024) for k in range(12)}
BAD = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> str:
    """A checkpoint that one rank has saved."""
    folder = str(tmp_path_factory.mktemp("saved") / "one")
    ranks.run(save_from, 1, folder, SHAPES, ((), ()))
    return folder


def load(rank: int, world: int, url: str, what: str) -> tuple[CheckpointError, float]:
    """The error of a load on whose way a rank is lost, and the seconds that it took."""
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {"note": None}
    options = LoadOptions(
        share_reads=what != "gone", deadline=1.0 if what == "absent" else 30.0, max_concurrency=2, memory_budget=8 * MIB
    )
    reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD if what != "gone" else None)
    store = dist.distributed_c10d._get_default_store()
    if rank == BAD and what == "killed":
        recording(reader, lambda store: FaultyStore(store, [Fault("read_into", nth=2, action="kill")]))
    elif rank == BAD and what == "absent":
        # It lives until the others have given it up; if they do not, they hear of it when it is gone.
        end = time.monotonic() + 20
        while store.add("done", 0) < world - 1 and time.monotonic() < end:
            time.sleep(0.1)
        os._exit(3)
    elif rank == BAD:
        os._exit(3)
    begun = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        DCP.load(state, storage_reader=reader)
    took = time.monotonic() - begun
    store.add("done", 1)
    return caught.value, took


@pytest.mark.parametrize("what", ["killed", "absent"])
def test_a_lost_rank_is_named(ranks: RankPool, saved: str, what: str) -> None:
    """Killed in the exchange, or never there: every other rank raises, in seconds, an error that names it."""
    found = ranks.run(load, 4, saved, what, timeout=60, allow_failures=True)
    assert isinstance(found[BAD], RankFailure)
    for rank in (0, 1, 3):
        error, seconds = found[rank]
        assert error.kind == "peer"
        assert f"rank {BAD} " in str(error)
        assert error.rank == rank
        assert seconds < 15


def test_a_rank_that_is_gone_is_no_bare_error_of_torch(ranks: RankPool, saved: str) -> None:
    """Where nothing is shared nobody can name it: still an error of this package, with the checkpoint's path."""
    found = ranks.run(load, 4, saved, "gone", timeout=60, allow_failures=True)
    for rank in (0, 1, 3):
        error, _ = found[rank]
        assert (error.kind, error.path) == ("peer", saved)
