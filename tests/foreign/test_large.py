"""A tensor of 1 GiB to and from S3 and GCS under a budget of 64 MiB: every element is right, memory stays bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import LoadOptions, SaveOptions
from dcp_storage.options import MIB
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place
from tests.servers import S3Endpoint
from tests.servers.gcs import GcsServer
from tests.servers.gcs_folder import GcsFolder

pytestmark = [pytest.mark.filterwarnings(ALONE), pytest.mark.slow, pytest.mark.timeout(400)]

SIDE = 1 << 14  # of a square of four bytes each: 1 GiB
BUDGET = 64 * MIB
ALLOWANCE = 64 * MIB
"""What may be held beyond the budget: the bodies of the parts in flight, and what the client libraries buffer."""


@pytest.fixture
def alone() -> Iterator[RankPool]:
    """A process of its own: one in which other tests have run has memory left over that would not count."""
    with RankPool(preload=("pytest", "dcp_storage")) as pool:
        yield pool


def _bytes_of(field: str) -> int:
    """A field of this process's status, e.g. its peak of resident memory (``VmHWM``)."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, field
    return int(found[1]) * 1024


def _grown(work: Callable[[], object]) -> int:
    """How far the peak of resident memory in ``work`` lies above what was resident before."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _bytes_of("VmRSS")
    work()
    return _bytes_of("VmHWM") - before


def saved_and_loaded(rank: int, world: int, small: Place, large: Place) -> dict[str, int]:
    """Both ways with 1 MiB, then with 1 GiB; by how much memory grew in the large save and in each large load."""

    def save(place: Place, tensor: torch.Tensor) -> None:
        writer = place.writer(options=SaveOptions(memory_budget=BUDGET))
        dcp.save({"weight": tensor}, storage_writer=writer, no_dist=True)

    def load(place: Place, tensor: torch.Tensor) -> None:
        reader = place.reader(options=LoadOptions(memory_budget=BUDGET))
        dcp.load({"weight": tensor}, storage_reader=reader, no_dist=True)

    few = torch.arange(SIDE << 4, dtype=torch.int32).reshape(SIDE, -1)  # 1 MiB
    save(small, few)
    load(small, torch.zeros_like(few))
    weight = torch.arange(SIDE * SIDE, dtype=torch.int32).reshape(SIDE, SIDE)
    grown = {"save": _grown(lambda: save(large, weight))}
    found = torch.full((SIDE, SIDE), -1, dtype=torch.int32)
    grown["load"] = _grown(lambda: load(large, found))
    assert torch.equal(found, weight)
    # Across the order of its memory nothing can be read straight into a target: every byte is staged.
    grown["load, staged"] = _grown(lambda: load(large, found.fill_(-1).t()))
    assert torch.equal(found.t(), weight)
    return grown


def _hold(alone: RankPool, place: Place) -> None:
    (grown,) = alone.run(saved_and_loaded, 1, place.child("small"), place.child("large"), init=False, timeout=350)
    print("MiB above the tensors:", {name: round(size / MIB, 1) for name, size in grown.items()})
    assert max(grown.values()) <= BUDGET + ALLOWANCE, grown


def test_on_s3(alone: RankPool, seaweedfs: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
    """On S3 both ways take no more memory beyond the tensor than the budget and 64 MiB."""
    place = Place(f"s3://{bucket(seaweedfs)}/run", seaweedfs.storage_options)
    _hold(alone, place)
    place = Place(place.url, place.options, seaweedfs)
    assert place.uploads() == []


def test_on_gcs(alone: RankPool, strict: GcsServer) -> None:
    """On GCS both ways take no more memory beyond the tensor than the budget and 64 MiB, and one object is left."""
    folder = GcsFolder.new(strict, "run")
    _hold(alone, Place(folder.url, strict.storage_options))
    names = [name.removeprefix("run/large/") for name in folder.names() if name.startswith("run/large/")]
    assert names == [".commit", ".manifest", ".metadata", "__0_0.distcp"]
