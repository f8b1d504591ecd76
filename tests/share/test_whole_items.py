"""Items that have to be whole before they can be used, as those of stock torch, are bounded in a shared load, too."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_storage import FsspecStorageReader, LoadOptions
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE
from tests.share import MIB, recording

COUNT, SIZE = 48, 2 * MIB  # bytes
SLOW = 1


def value(number: int) -> torch.Tensor:
    """Numbers that no other tensor has at their place."""
    return torch.arange(SIZE // 8) + number


def save(rank: int, world: int, small: str, large: str) -> None:
    dcp.save({"w0": torch.zeros(MIB, dtype=torch.uint8)}, storage_writer=FileSystemWriter(small))
    state = {f"w{k}": value(k) for k in range(COUNT)}
    dcp.save(state, storage_writer=FileSystemWriter(large))


def replica(rank: int, world: int, small: str, large: str, budget: int) -> tuple[list[str], bool, int, int]:
    """Keys that are wrong, whether reads were shared, bytes out of the store, and those of the peak above a warm-up."""
    state: dict[str, Any] = {f"w{k}": torch.full((SIZE // 8,), -7) for k in range(COUNT)}
    options = LoadOptions(share_reads=True, deadline=60.0, memory_budget=budget, max_concurrency=2)
    before = read = 0
    shared = False
    for url, wanted in ((small, {"w0": torch.zeros(MIB, dtype=torch.uint8)}), (large, state)):
        reader = FsspecStorageReader(url, options=options, process_group=dist.group.WORLD, require_commit=False)
        slow = [Fault("read_into", nth=None, action="delay", seconds=0.04)] if rank == SLOW else []
        stores = recording(reader, lambda store, slow=slow: FaultyStore(store, slow))  # type: ignore[misc]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dcp.load(wanted, storage_reader=reader)
        assert reader.report is not None
        shared, read = reader.report.shared, sum(s.bytes_read() for s in stores)
    above = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    wrong = [f"w{k}" for k in range(COUNT) if not torch.equal(state[f"w{k}"], value(k))]
    return wrong, shared, read, above


@pytest.mark.slow
@pytest.mark.filterwarnings(ALONE)
def test_whole_items_keep_to_the_budget(tmp_path: Path, ranks: RankPool) -> None:
    """Two replicas of 96 MiB that stock torch saved, one of them slow: each byte once, and no rank runs far ahead.

    Every tensor has to be whole before its sums can be checked, and half of each comes from the slow rank: the quick
    one would hold all of them at once.
    """
    budget = 4 * MIB
    folders = str(tmp_path / "small"), str(tmp_path / "large")
    ranks.run(save, 1, *folders)
    found = ranks.run(replica, 2, *folders, budget, timeout=90)
    for wrong, shared, _, above in found:
        assert (wrong, shared) == ([], True)
        assert above <= budget + 64 * MIB
    assert sum(each[2] for each in found) <= 1.05 * COUNT * SIZE
