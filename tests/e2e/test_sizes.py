"""Options at their edges, many parts, many tensors, progress."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.callbacks import Callback

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from tests.e2e import ALONE, assert_same, like, load, place_of, save

pytestmark = pytest.mark.filterwarnings(ALONE)

MIB = 1 << 20
KIB = 1 << 10


class Counting(Callback):  # type: ignore[misc]
    """Adds up what it is told; slow enough to lose counts if it were told from two threads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.inside = threading.Lock()
        self.collisions = 0

    def relative_update(self, inc: int = 1) -> None:
        if not self.inside.acquire(blocking=False):
            self.collisions += 1
            return
        try:
            time.sleep(0.002)
            self.total += inc
        finally:
            self.inside.release()


def mixed() -> dict[str, Any]:
    """About 9 MiB: one large tensor, slices that are not in one run, small ones, an object of 100 KB."""
    return {
        "large": torch.arange(MIB, dtype=torch.float64),
        "matrix": torch.arange(200_000, dtype=torch.int32).reshape(1000, 200),
        "small": torch.arange(3),
        "text": "x" * 100_000,
    }


def matrix_template() -> dict[str, Any]:
    """Targets that cannot be read into directly, so that staging is needed."""
    out: dict[str, Any] = like(mixed())
    out["large"] = torch.full((2 * MIB,), -7.0, dtype=torch.float64)[::2]
    out["matrix"] = torch.full((200, 1000), -7, dtype=torch.int32).T
    return out


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_a_callback_is_told_every_byte(request: pytest.FixtureRequest, kind: str) -> None:
    """Progress adds up to the bytes written and to the payload bytes read, never from two threads at once."""
    place = place_of(request, kind)
    counting = Counting()
    writer = place.writer(callback=counting, options=SaveOptions(part_size=64 * KIB))
    save(mixed(), writer)
    assert writer.report is not None
    assert counting.total == writer.report.bytes_written == sum(place.files()[name] for name in place.shards())
    assert counting.collisions == 0
    assert counting.size is not None
    assert abs(counting.size - counting.total) < 120_000
    counting = Counting()
    reader = place.reader(callback=counting, options=LoadOptions(part_size=64 * KIB))
    found = like(mixed())
    load(found, reader)
    assert_same(found, mixed())
    assert counting.collisions == 0
    assert reader.report is not None
    metadata = place.files()[".manifest"] + place.files()[".commit"]
    assert counting.total == reader.report.bytes_read - metadata
    assert counting.size is not None
    assert counting.size <= counting.total < counting.size + 64 * KIB


@pytest.mark.parametrize("budget", [1000, 100 * KIB, MIB])
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_budget_smaller_than_a_tensor(
    request: pytest.FixtureRequest, kind: str, budget: int, concurrency: int
) -> None:
    """Whatever the budget, save and load go through, and all of it is given back."""
    place = place_of(request, kind)
    writer = place.writer(options=SaveOptions(memory_budget=budget, part_size=64 * KIB, max_concurrency=concurrency))
    save(mixed(), writer)
    for template in (like(mixed()), matrix_template()):
        reader = place.reader(
            options=LoadOptions(memory_budget=budget, part_size=64 * KIB, max_concurrency=concurrency)
        )
        load(template, reader)
        assert_same(template, mixed())
        assert reader._budget.held == 0
    assert writer._budget.held == 0


@pytest.mark.parametrize("budget", [1, 1000])
def test_a_small_budget_does_not_multiply_what_is_read(tmp_path: Path, budget: int) -> None:
    """A budget below one checksum block makes the load wait, not read the same block over and over."""
    save({"a": torch.arange(20_000, dtype=torch.float64)}, FsspecStorageWriter(tmp_path / "one"))
    found = {"a": torch.full((40_000,), -7.0, dtype=torch.float64)[::2]}
    reader = FsspecStorageReader(tmp_path / "one", options=LoadOptions(memory_budget=budget))
    load(found, reader)
    assert found["a"].tolist() == list(range(20_000))
    assert reader.report is not None
    assert reader.report.bytes_needed == 160_000
    assert reader.report.bytes_read < 2 * 160_000 + 10_000


@pytest.mark.parametrize("part_size", [64 * KIB, 64 * KIB + 13, 300_000])
def test_many_parts_on_local_disk(tmp_path: Path, part_size: int) -> None:
    """Parts of any size give the same file, with the same checksums, as one part."""
    save(mixed(), FsspecStorageWriter(tmp_path / "parts", options=SaveOptions(part_size=part_size)))
    save(mixed(), FsspecStorageWriter(tmp_path / "whole", options=SaveOptions(part_size=64 * MIB)))
    one, other = (tmp_path / name / "__0_0.distcp" for name in ("parts", "whole"))
    assert one.read_bytes() == other.read_bytes()
    manifests = [(tmp_path / name / ".manifest").read_text() for name in ("parts", "whole")]
    assert manifests[0].split('"storage_meta"')[0] == manifests[1].split('"storage_meta"')[0]
    found = like(mixed())
    load(found, FsspecStorageReader(tmp_path / "parts", options=LoadOptions(part_size=64 * KIB)))
    assert_same(found, mixed())


@pytest.mark.parametrize("kind", ["ministack", "moto"])
def test_a_multipart_upload(request: pytest.FixtureRequest, kind: str) -> None:
    """A tensor of 12 MiB in parts of 5 MiB is one object, whole, with no upload left open."""
    place = place_of(request, kind)
    state = {"large": torch.arange(3 * MIB, dtype=torch.float32), "small": torch.arange(5)}
    save(state, place.writer(options=SaveOptions(part_size=5 * MIB)))
    assert place.uploads() == []
    assert place.shards() == ["__0_0.distcp"]
    bucket, key = place._key("__0_0.distcp")
    assert place.server is not None
    etag = place.server.client.head_object(Bucket=bucket, Key=key)["ETag"]
    assert etag.strip('"').endswith("-3")
    found = like(state)
    load(found, place.reader(options=LoadOptions(part_size=MIB)))
    assert_same(found, state)


def test_parts_grow_where_their_number_is_limited(tmp_path: Path) -> None:
    """A store that takes few parts gets larger ones, and the file is whole."""
    from dcp_storage.stores.opening import open_store

    def opener(location: Any, options: Any, most: int) -> Any:
        store = open_store(location, options, max_concurrency=most)
        store.max_parts = 32
        return store

    writer = FsspecStorageWriter(tmp_path / "one", options=SaveOptions(part_size=64 * KIB))
    writer._opener = opener
    save(mixed(), writer)
    found = like(mixed())
    load(found, FsspecStorageReader(tmp_path / "one"))
    assert_same(found, mixed())


@pytest.mark.parametrize("kind", ["moto", "ministack"])
def test_many_small_tensors_take_few_requests(request: pytest.FixtureRequest, kind: str) -> None:
    """2,000 tensors of 4 KB are one upload and a handful of ranged reads, not 2,000."""
    place = place_of(request, kind)
    state = {f"layer-{number}": torch.full((1000,), number, dtype=torch.int32) for number in range(2000)}
    writer, reader = place.writer(), place.reader()
    save(state, writer)
    found = {key: torch.full_like(value, -7) for key, value in state.items()}
    load(found, reader)
    assert all(bool((found[key] == number).all()) for number, key in enumerate(state))
    assert writer.report is not None
    assert reader.report is not None
    assert writer.report.requests < 40
    assert reader.report.requests < 20
    shard = place.files()["__0_0.distcp"]
    assert reader.report.bytes_read <= shard + place.files()[".manifest"] + 64 * KIB


def test_a_file_per_item(tmp_path: Path) -> None:
    """A shard size of one byte gives every item a file of its own, numbered in order."""
    state = {f"tensor-{number:02}": torch.full((10,), number) for number in range(12)}
    save(state, FsspecStorageWriter(tmp_path / "one", options=SaveOptions(shard_size=1)))
    shards = {path.name for path in (tmp_path / "one").glob("*.distcp")}
    assert shards == {f"__0_{number}.distcp" for number in range(12)}
    found = like(state)
    load(found, FsspecStorageReader(tmp_path / "one", options=LoadOptions(max_concurrency=2)))
    assert_same(found, state)


def test_one_writer_saves_in_many_threads(tmp_path: Path) -> None:
    """Four threads share one writer, its budget smaller than one tensor; each folder has its own thread's values."""
    writer = FsspecStorageWriter(options=SaveOptions(memory_budget=100_000, part_size=64 * KIB))
    reader = FsspecStorageReader(options=LoadOptions(memory_budget=100_000, part_size=64 * KIB))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(3):
                state = {"a": torch.full((100_000,), 10.0 * number + round_), "n": number}
                place = tmp_path / f"{number}-{round_}"
                save(state, writer, checkpoint_id=place)
                found: dict[str, Any] = {"a": torch.zeros(2, 100_000).T[:, 0], "n": None}
                load(found, reader, checkpoint_id=place)
                assert_same(found, state)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert (writer._budget.held, reader._budget.held) == (0, 0)
