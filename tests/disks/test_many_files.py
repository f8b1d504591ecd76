"""A save of many files: how many it has open at once, and how much memory it takes."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, SaveOptions
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE

MIB = 1 << 20


def save_many(rank: int, world: int, folder: str, count: int, nbytes: int) -> tuple[int, bool]:
    """Saves a tensor a file where few may be open; the bytes of memory on top, and whether what was saved is there."""
    torch.set_num_threads(1)
    values = torch.arange(nbytes // 4 + count, dtype=torch.float32)
    state = {f"t{number}": values[number : number + nbytes // 4] for number in range(count)}
    dcp.save({"w": values}, storage_writer=FsspecStorageWriter(f"{folder}/warm"), no_dist=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100,) * 2)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak()
    options = SaveOptions(shard_size=1, memory_budget=32 * MIB)
    dcp.save(state, storage_writer=FsspecStorageWriter(f"{folder}/c", options=options), no_dist=True)
    grown = _peak() - before
    into = {"t7": torch.zeros(nbytes // 4)}
    dcp.load(into, storage_reader=FsspecStorageReader(f"{folder}/c"), no_dist=True)
    return grown, torch.equal(into["t7"], state["t7"])


def _peak() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(line)


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize(("count", "nbytes"), [(400, 20_000), (150, 1_200_000), (30, 9_000_000)])
def test_many_files(tmp_path: Path, ranks: RankPool, count: int, nbytes: int) -> None:
    """A hundred open files and the budget are enough for any number of small, of large and of larger files."""
    ((grown, right),) = ranks.run(save_many, 1, str(tmp_path), count, nbytes)
    assert right
    assert grown <= (32 + 64) * MIB
