"""The figures of a load's report are those that are counted at the store, at a callback, and from the shapes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.callbacks import Callback
from torch.distributed.checkpoint import FileSystemWriter

from dcp_storage import FsspecStorageReader, LoadOptions
from dcp_storage.options import LoadReport
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE
from tests.share import KIB, NOTE, Layout, fixed, recording, save_from, source, target_for

pytestmark = pytest.mark.filterwarnings(ALONE)

SHAPES = {"large": (512, 1024), "odd": (37, 1001), "point": ()}
ELEMENTS = 512 * 1024 + 37 * 1001 + 1
ALL: Layout = ((), ())


@dataclass(frozen=True)
class Counted:
    """What was seen of one rank's load.

    Attributes:
        good: whether every element is right.
        read: bytes out of the store, by the name of the object.
        requests: that the store got.
        size: what the callback was told to expect.
        value: what it was told has come.
        wall: seconds of the load.
        report: the load's.
    """

    good: bool
    read: dict[str, int]
    requests: int
    size: int
    value: int
    wall: float
    report: LoadReport

    @property
    def data(self) -> int:
        """Bytes out of the shards."""
        return sum(count for name, count in self.read.items() if name.endswith(".distcp"))


def counted(rank: int, world: int, url: str, layout: Layout, options: LoadOptions, stock: bool) -> Counted:
    """A load into a layout, with the object."""
    callback = Callback()
    reader = FsspecStorageReader(
        url, options=options, process_group=dist.group.WORLD, require_commit=not stock, callback=callback
    )
    stores = recording(reader)
    state: dict[str, Any] = {
        name: target_for(torch.full_like(source(name, shape), -7), layout) for name, shape in SHAPES.items()
    }
    state["note"] = None
    begun = time.monotonic()
    dcp.load(state, storage_reader=reader)
    wall = time.monotonic() - begun
    good = state.pop("note") == NOTE and all(
        torch.equal(fixed(value), fixed(target_for(source(name, SHAPES[name]), layout)))
        for name, value in state.items()
    )
    assert reader.report is not None
    read: dict[str, int] = {}
    for call in (call for store in stores for call in store.calls if call.operation in {"read", "read_into"}):
        read[call.name or ""] = read.get(call.name or "", 0) + call.nbytes
    requests = sum(len(store.calls) for store in stores)
    return Counted(good, read, requests, callback.size or 0, callback.value, wall, reader.report)


def hold(found: list[Counted], shared: bool) -> None:
    """What is so of every load."""
    for rank, each in enumerate(found):
        report = each.report
        assert each.good
        assert report.shared is shared
        assert report.bytes_read == sum(each.read.values())
        assert report.requests == each.requests
        assert report.retries == 0
        assert {"metadata", "read"} <= set(report.seconds) <= {"metadata", "sizes", "plan", "meet", "read"}
        assert ("meet" in report.seconds) is shared
        assert {"sizes", "plan"} <= set(report.seconds) or rank
        assert sum(report.seconds.values()) - report.seconds.get("meet", 0.0) <= each.wall
        assert min(report.seconds.values()) >= 0
        assert each.size <= each.value <= each.size + 64 * KIB


def metadata_of(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in (".commit", ".manifest"))


def object_of(folder: Path) -> int:
    """Bytes of the object's item, as stock torch sees it."""
    storage = dcp.FileSystemReader(folder).read_metadata().storage_data
    return next(int(info.length) for index, info in storage.items() if index.fqn == "note")


@pytest.mark.parametrize("shared", [True, False])
def test_the_figures_of_two_replicas(tmp_path: Path, ranks: RankPool, shared: bool) -> None:
    """What one rank received is what the other one read for it; needed is what both hold; all of it was checked."""
    folder = tmp_path / "one"
    ranks.run(save_from, 2, str(folder), SHAPES, ((2,), ("S0",)))
    found = ranks.run(counted, 2, str(folder), ALL, LoadOptions(share_reads=shared, deadline=30.0), False)
    hold(found, shared)
    needed, metadata = ELEMENTS * 4 + object_of(folder), metadata_of(folder)
    first, second = found
    assert [each.report.bytes_needed for each in found] == [needed] * 2
    assert [each.report.bytes_unchecked for each in found] == [0] * 2
    assert sum(first.read.values()) - first.data == metadata
    assert sum(second.read.values()) == second.data
    assert first.report.bytes_received == (second.data if shared else 0)
    assert metadata <= second.report.bytes_received - (first.data if shared else 0) < metadata + 16 * KIB
    assert [each.value for each in found] == [first.data + second.data if shared else each.data for each in found]


@pytest.mark.parametrize("shared", [True, False])
def test_the_figures_of_slices_that_stock_torch_saved(tmp_path: Path, ranks: RankPool, shared: bool) -> None:
    """Looking for the place of the numbers counts as reading; what no sum is known for is counted on all who got it."""
    folder = tmp_path / "one"
    state: dict[str, Any] = {name: source(name, shape) for name, shape in SHAPES.items()} | {"note": NOTE}
    dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    layout: Layout = ((2, 2), ("R", "S0"))
    found = ranks.run(counted, 4, str(folder), layout, LoadOptions(share_reads=shared, deadline=30.0), True)
    hold(found, shared)
    for each in found:
        assert each.report.bytes_unchecked == 256 * 1024 * 4  # half of the large one; the small ones are read whole
        assert each.report.bytes_unchecked < each.report.bytes_needed
        assert len(each.report.warnings) == 1
