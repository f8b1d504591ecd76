"""``DCP.load`` decides by itself whether reads are shared, and reads the manifest once either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_storage.reader
import dcp_storage.state
from dcp_storage import DCP
from dcp_storage.options import LoadReport
from dcp_storage.session import Opened, open_folder
from dcp_storage.testing.ranks import RankPool
from dcp_storage.testing.recording import RecordingStore
from tests.share import save_from, source

SMALL = {"w": (256, 1024)}
LARGE = {"w": (17 * 256, 1024)}  # 17 MiB: a second replica saves more than the threshold


def load(rank: int, world: int, url: str, shape: tuple[int, int]) -> tuple[bool, LoadReport, list[str]]:
    """A load of two replicas; the store, a local one, is taken for one that is not of this machine."""
    made: list[RecordingStore] = []

    def opening(*args: Any, **options: Any) -> Opened:
        opened = open_folder(*args, **options)
        made.append(RecordingStore(opened.store))
        opened.store = made[-1]
        return opened

    dcp_storage.reader.open_folder = opening  # type: ignore[attr-defined]  # in a process of its own
    dcp_storage.state._HERE = ()  # type: ignore[assignment]
    state: dict[str, Any] = {"w": torch.zeros(shape), "note": None}
    report = DCP.load(state, checkpoint_id=url)
    names = [call.name or "" for store in made for call in store.of("read")]
    return torch.equal(state["w"], source("w", shape)), report, names


@pytest.mark.parametrize(("shapes", "shared"), [(SMALL, False), (LARGE, True)])
def test_the_manifest_is_read_once(
    tmp_path: Path, ranks: RankPool, shapes: dict[str, tuple[int, int]], shared: bool
) -> None:
    """Two replicas: the large one is shared and the small one not, and one rank reads commit and manifest, once."""
    ranks.run(save_from, 1, str(tmp_path / "one"), shapes, ((), ()))
    found = ranks.run(load, 2, str(tmp_path / "one"), shapes["w"])
    size = torch.Size(shapes["w"]).numel() * 4
    assert [(good, report.shared, report.warnings) for good, report, _ in found] == [(True, shared, [])] * 2
    assert sorted(name for _, _, names in found for name in names) == [".commit", ".manifest"]
    assert sum(report.bytes_read for _, report, _ in found) == pytest.approx(size if shared else 2 * size, rel=0.05)
