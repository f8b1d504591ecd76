"""Reads are shared over object stores as they are on a disk: each byte leaves the store once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageReader, LoadOptions, list_keys
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, place_of
from tests.share import NOTE, Layout, fixed, recording, source, target_for

SHAPES = {"large": (512, 1024), "odd": (37, 1001), "point": (), "none": (0, 4)}


def load(rank: int, world: int, url: str, options: dict[str, Any], layout: Layout) -> tuple[bool, bool, int, int]:
    """Whether all is right and was shared, and the bytes out of the store: by the report, and counted at it."""
    reader = FsspecStorageReader(
        url,
        storage_options=options,
        options=LoadOptions(share_reads=True, deadline=60.0),
        process_group=dist.group.WORLD,
    )
    stores = recording(reader)
    state: dict[str, Any] = {
        name: target_for(torch.full_like(source(name, shape), -7), layout) for name, shape in SHAPES.items()
    }
    state["note"] = None
    dcp.load(state, storage_reader=reader)
    good = state.pop("note") == NOTE and all(
        torch.equal(fixed(value), fixed(target_for(source(name, SHAPES[name]), layout)))
        for name, value in state.items()
    )
    assert reader.report is not None
    return good, reader.report.shared, reader.report.bytes_read, sum(store.bytes_read() for store in stores)


@pytest.mark.slow
@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("kind", ["ministack", "gcs"])
def test_each_byte_leaves_an_object_store_once(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """HSDP on four ranks, of what one process saved: no more than the checkpoint and a twentieth, all of it right."""
    place = place_of(request, kind)
    state: dict[str, Any] = {name: source(name, shape) for name, shape in SHAPES.items()} | {"note": NOTE}
    dcp.save(state, storage_writer=place.writer(), no_dist=True)
    assert len(list_keys(place.url, storage_options=place.options)) == len(state)
    found = ranks.run(load, 4, place.url, place.options, ((2, 2), ("R", "S0")), timeout=90)
    assert [each[:2] for each in found] == [(True, True)] * 4
    assert [each[2] for each in found] == [each[3] for each in found]
    files = place.files()
    size = sum(count for name, count in files.items() if name.endswith(".distcp"))
    assert sum(each[3] for each in found) <= 1.05 * size + files[".manifest"] + files[".commit"]
