"""The short measurement: bounded, advises what was best, leaves nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dcp_storage import CheckpointNotFoundError, StoreError, bench
from dcp_storage.store import Store
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.tools.bench import Figure, _least, bench_folder
from dcp_storage.tools.opening import Folder, folder_at
from tests.e2e import place_of
from tests.tools import SLOW_MOTO

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["local", SLOW_MOTO])
def test_it_measures_advises_and_leaves_nothing(request: pytest.FixtureRequest, kind: str) -> None:
    """Every setting is measured both ways, the advice is one that was tried, and no object stays."""
    place = place_of(request, kind)
    place.set("mine.txt", b"mine")
    report = bench(place.url, seconds=0.5, storage_options=place.options)
    tried = {(f.what, f.concurrency, f.part_size) for f in report.figures}
    assert {(what, c, 4 * MIB) for what in ("write", "read") for c in (1, 4, 8, 16, 32)} <= tried
    sizes = {size for _, _, size in tried} | {size for _, size in report.skipped}
    assert sizes == {MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB}
    assert report.max_concurrency in {c for _, c, _ in tried}
    assert report.part_size in {size for _, _, size in tried}
    assert str(report.max_concurrency) in report.says
    assert report.write > 0
    assert report.read > 0
    assert set(place.files()) == {"mine.txt"}
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def wrapped(path: Path, wrap: Any) -> Folder:
    def opener(location: Any, options: Any, concurrency: int) -> Store:
        store: Store = wrap(open_store(location, options, max_concurrency=concurrency))
        return store

    plain = folder_at(path)
    return Folder(plain.location, {}, plain.options, opener)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    """With few bytes, settings that need more requests in flight than they pay for are left out and named."""
    report = bench(tmp_path, seconds=20.0, max_bytes=64 * MIB)
    assert sum(f.nbytes for f in report.figures if f.what == "write") <= 64 * MIB
    assert all(f.nbytes >= f.concurrency * f.part_size for f in report.figures if f.what == "write")
    assert (32, 4 * MIB) in report.skipped
    assert "32 of 4 MiB" in report.says


def test_bytes_and_seconds_are_bounded(tmp_path: Path) -> None:
    """No more bytes are written than allowed and the time is about as asked."""
    stores: list[RecordingStore] = []

    def wrap(store: Store) -> Store:
        stores.append(RecordingStore(store))
        return stores[-1]

    begun = time.monotonic()
    bench_folder(wrapped(tmp_path, wrap), 1.0, 64 * MIB)
    assert time.monotonic() - begun < 20
    assert 0 < sum(call.nbytes for call in stores[0].of("write_part")) <= 64 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Where the store fails in the middle, the error comes out and what was written is removed."""
    with pytest.raises(StoreError):
        bench_folder(wrapped(tmp_path, lambda store: FaultyStore(store, [Fault("read_into", nth=9)])), 0.5, 64 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_the_least_that_comes_near_the_best_is_advised() -> None:
    """Of settings within a tenth of the best for writes and reads alike, the smallest; else the best for both."""

    def figures(speeds: dict[int, tuple[float, float]]) -> list[Figure]:
        return [
            Figure(what, c, MIB, int(speed * 1000), 1000.0)
            for c, pair in speeds.items()
            for what, speed in zip(("write", "read"), pair, strict=True)
        ]

    def least(speeds: dict[int, tuple[float, float]]) -> int:
        return _least(figures(speeds), lambda f: f.concurrency)

    assert least({1: (10, 10), 4: (92, 95), 8: (100, 100), 16: (99, 101)}) == 4
    assert least({1: (100, 50), 4: (70, 80), 8: (50, 100)}) == 4


def test_wrong_arguments_and_folders_are_refused(tmp_path: Path) -> None:
    """Too little time or too few bytes, and a local folder that is not there, are errors."""
    with pytest.raises(ValueError, match="seconds"):
        bench(tmp_path, seconds=0)
    with pytest.raises(ValueError, match="max_bytes"):
        bench(tmp_path, max_bytes=MIB)
    with pytest.raises(CheckpointNotFoundError):
        bench(tmp_path / "absent")
