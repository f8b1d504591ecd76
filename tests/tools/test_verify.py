"""What verify finds: every kind of damage, where it is, and nothing where nothing is wrong."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.callbacks import Callback
from torch.distributed.checkpoint import FileSystemReader

from dcp_storage import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    FsspecStorageWriter,
    LoadOptions,
    NotCommittedError,
    SaveOptions,
    StoreError,
    verify,
)
from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.records import FileRecord, Manifest, ManifestRef, encode_manifest
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.tools.opening import Folder
from dcp_storage.tools.verify import verify_folder
from tests.e2e import ALONE, Place, assert_same, like, place_of, save
from tests.tools import SLOW_MOTO, flip, folder_of, make, remove, state

pytestmark = pytest.mark.filterwarnings(ALONE)

MIB = 1 << 20


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    place = place_of(request, getattr(request, "param", "local"))
    make(place, "committed")
    return place


everywhere = pytest.mark.parametrize("place", ["local", "moto", "gcs"], indirect=True)


def look(place: Place, depth: str = "sizes", **options: Any) -> Any:
    return verify(place.url, depth, storage_options=place.options, **options)


def found(report: Any) -> list[tuple[str, str | None, str | None]]:
    return [(p.kind, p.file, p.key) for p in report.problems]


@everywhere
@pytest.mark.parametrize("depth", ["commit", "sizes", "data"])
def test_a_whole_checkpoint_is_ok_at_every_depth(place: Place, depth: str) -> None:
    """Nothing is found where nothing is wrong; at depth data every byte of every file is read."""
    report = look(place, depth)
    assert (report.ok, report.problems, report.warnings, report.commit) == (True, [], [], 1)
    sizes = {name: size for name, size in place.files().items() if name.endswith(".distcp")}
    assert (report.files, report.nbytes) == (len(sizes), sum(sizes.values()))
    assert report.bytes_read == (sum(sizes.values()) if depth == "data" else 0)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


@everywhere
def test_all_damage_is_found_with_its_place(place: Place) -> None:
    """Altered bytes in blocks and in what surrounds them, and a short file, are all found at once."""
    items = {item["key"]: item for item in place.manifest()["items"]}
    names = [record["name"] for record in place.manifest()["files"]]
    large, matrix = items["large"], items["matrix"]
    block = large["block"]
    start = large["offset"] + large["payload_offset"]
    for at in (start + 5, start + block + 7, start + 20 * block):
        flip(place, names[large["file"]], at)
    flip(place, names[large["file"]], large["offset"] + 40)
    wanted = {
        ("altered", names[large["file"]], "large", start, start + 2 * block),
        ("altered", names[large["file"]], "large", start + 20 * block, start + 21 * block),
        ("altered", names[large["file"]], "large", large["offset"], large["offset"] + large["length"]),
    }
    assert large["file"] != matrix["file"]
    place.set(names[matrix["file"]], place.get(names[matrix["file"]])[:-1])
    report = look(place, "data")
    altered = {p.advice for p in report.problems if p.kind == "altered" and p.key == "large"}
    assert {tuple(int(word) for word in advice.split() if word.isdigit())[:2] for advice in altered} == {
        (first, last) for _, _, _, first, last in wanted
    }
    assert ("short", names[matrix["file"]], None) in [(k, f, None) for k, f, _ in found(report)]
    short = next(p for p in report.problems if p.kind == "short")
    size = place.files()[names[matrix["file"]]]
    assert (short.wanted, short.found) == (size + 1, size)
    assert not report.ok
    assert all(p.advice for p in report.problems)


@pytest.mark.parametrize("key", ["large", "small", "matrix", "object"])
def test_one_altered_bit_is_found_and_named(place: Place, key: str) -> None:
    """One bit anywhere in a key's own bytes is found with file and key, and the CRC-32s say wanted and found."""
    item = next(item for item in place.manifest()["items"] if item["key"] == key)
    name = place.manifest()["files"][item["file"]]["name"]
    flip(place, name, item["offset"] + item.get("payload_offset", 0) + item["payload_length"] - 1)
    report = look(place, "data")
    assert found(report) == [("altered", name, key)]
    assert report.problems[0].wanted == item["blocks"][-1]
    assert report.problems[0].found != report.problems[0].wanted


@pytest.mark.parametrize(("damage", "kind"), [("remove", "missing"), ("short", "short"), ("long", "long")])
def test_sizes_find_files_that_are_not_as_committed(place: Place, damage: str, kind: str) -> None:
    """A missing, a short and a long file are found by the listing, with both sizes; depth commit does not look."""
    name = place.shards()[0]
    data = place.get(name)
    if damage == "remove":
        remove(place, name)
    else:
        place.set(name, data[:-3] if damage == "short" else data + b"xyz")
    report = look(place)
    assert [(p.kind, p.file, p.wanted) for p in report.problems] == [(kind, name, len(data))]
    assert report.problems[0].found == {"missing": None, "short": len(data) - 3, "long": len(data) + 3}[kind]
    assert look(place, "commit").ok


def test_several_ranges_are_read_in_small_parts_alike(place: Place) -> None:
    """Parts smaller than items and borders that fall anywhere change nothing of what is found."""
    item = next(item for item in place.manifest()["items"] if item["key"] == "matrix")
    name = place.manifest()["files"][item["file"]]["name"]
    flip(place, name, item["offset"] + item["length"] - 1)
    flip(place, name, item["offset"] + item["payload_offset"] + 77)
    options = LoadOptions(part_size=64 * 1024, memory_budget=130_000, max_concurrency=3)
    small, large = look(place, "data", options=options), look(place, "data")
    assert small.problems == large.problems
    assert len(small.problems) == 2


def test_a_sample_is_a_share_and_repeatable(tmp_path: Path) -> None:
    """A share of 10% reads about that much, the same blocks each time, and other ones for another seed."""
    place = Place(str(tmp_path / "c"))
    save({str(n): torch.randn(100_000) for n in range(10)}, place.writer())
    stores: list[RecordingStore] = []

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        stores.append(RecordingStore(open_store(location, options, max_concurrency=concurrency)))
        return stores[-1]

    plain = folder_of(place)
    folder = Folder(plain.location, {}, plain.options, opener)
    reports = [verify_folder(folder, "data", sample=0.1, seed=seed) for seed in (0, 0, 1)]
    places = [sorted((c.name or "", c.offset or 0) for c in store.of("read_into")) for store in stores]
    assert places[0] == places[1] != places[2]
    whole = reports[0].nbytes
    assert all(0.05 * whole < report.bytes_read < 0.2 * whole for report in reports)
    assert look(place, "data", sample=1.0).bytes_read > 0.9 * whole


def test_a_sample_of_all_finds_an_altered_block(place: Place) -> None:
    """What a full sample reads is judged like everything."""
    item = next(item for item in place.manifest()["items"] if item["key"] == "large")
    name = place.manifest()["files"][item["file"]]["name"]
    flip(place, name, item["offset"] + item["payload_offset"])
    assert found(look(place, "data", sample=1.0)) == [("altered", name, "large")]


def test_bytes_altered_on_the_way_are_no_damage(place: Place) -> None:
    """A range that comes altered once, and right when it is asked for again, is not reported."""

    class Noisy(RecordingStore):
        def read_into(self, name: str, offset: int, buffers: Any) -> None:
            super().read_into(name, offset, buffers)
            if len(self.of("read_into")) == 1:
                buffers[0][5000] ^= 1

    stores = []

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        stores.append(Noisy(open_store(location, options, max_concurrency=concurrency)))
        return stores[-1]

    plain = folder_of(place)
    report = verify_folder(Folder(plain.location, {}, plain.options, opener), "data")
    assert report.ok
    assert len(stores[0].of("read_into")) == report.files + 1


def test_sizes_of_ten_thousand_files_cost_one_listing(tmp_path: Path) -> None:
    """However many files there are, depth sizes makes one listing, and asks for no file alone."""
    folder = tmp_path / "c"
    place = Place(str(folder))
    make(place, "committed")
    manifest = msgspec.json.decode(place.get(".manifest"), type=Manifest)
    more = tuple(FileRecord(f"__{n}_7.distcp", 1, None, n) for n in range(10_000))
    for record in more:
        (folder / record.name).write_bytes(b"x")
    data = encode_manifest(msgspec.structs.replace(manifest, files=manifest.files + more))
    ref = ManifestRef(".manifest.abcdefghijklmnop", len(data), zlib.crc32(data))
    store = LocalStore(str(folder))
    store.put(ref.name, [memoryview(data)])
    create_commit(store, new_commit(2, "abcdefghijklmnop", manifest=ref, world_size=10_000))
    stores: list[RecordingStore] = []

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        stores.append(RecordingStore(open_store(location, options, max_concurrency=concurrency)))
        return stores[-1]

    plain = folder_of(place)
    report = verify_folder(Folder(plain.location, {}, plain.options, opener), "sizes")
    assert (report.ok, report.files) == (True, 10_000 + len(manifest.files))
    operations = stores[0].operations()
    assert operations.count("entries") == 1
    assert set(operations) == {"entries", "read"}
    assert operations.count("read") == 3  # commit, manifest, view


def test_a_damaged_manifest_is_a_problem(place: Place) -> None:
    """A manifest with an altered byte is named, at every depth; nothing is raised."""
    flip(place, ".manifest", 33)
    for depth in ("commit", "sizes", "data"):
        report = look(place, depth)
        assert found(report) == [("manifest", ".manifest", None)]
    remove(place, ".manifest")
    assert found(look(place)) == [("manifest", ".manifest", None)]


def test_a_torn_commit_is_a_problem(place: Place) -> None:
    """A later commit that cannot be read is named, beside what still stands; the only one likewise."""
    place.set(".commit.2", b"{torn")
    assert found(look(place)) == [("torn-commit", ".commit.2", None)]
    place.set(".commit", b"{torn")
    assert found(look(place)) == [("torn-commit", ".commit.2", None)]


@everywhere
def test_a_missing_view_is_a_warning_and_repaired(place: Place) -> None:
    """Without ``.metadata`` ok stays true; repair writes it, and stock torch then loads the checkpoint."""
    remove(place, ".metadata")
    report = look(place)
    assert (report.ok, report.repaired, len(report.warnings)) == (True, False, 1)
    report = look(place, repair=True)
    assert (report.ok, report.repaired) == (True, True)
    assert look(place).warnings == []
    if place.server is None and not place.url.startswith("gs"):
        target = like(state())
        dcp.load(target, storage_reader=FileSystemReader(place.url), no_dist=True)
        assert_same(target["matrix"], state()["matrix"])


def test_a_stale_view_is_a_warning_and_repaired(place: Place) -> None:
    """A view of the checkpoint before the last, garbage, and a huge view are stale; repair makes each right."""
    old = place.get(".metadata")
    save({"other": torch.ones(3)}, place.writer(overwrite=True))
    for view in (old, b"garbage", b"\0" * (4 * len(old))):
        place.set(".metadata", view)
        report = look(place)
        assert (report.ok, len(report.warnings)) == (True, 1)
        assert look(place, "commit", repair=True).repaired
        assert look(place).warnings == []


def test_a_view_that_another_torch_pickled_is_not_stale(place: Place) -> None:
    """Only what the view says counts, not how it was pickled."""
    view = pickle.loads(place.get(".metadata"))
    place.set(".metadata", pickle.dumps(view, protocol=2))
    assert look(place).warnings == []


def test_leftovers_are_a_warning(place: Place) -> None:
    """Files of dead saves do not touch the checkpoint."""
    place.set("__9_0.abcdefghijklmnop.distcp", b"dead")
    report = look(place)
    assert report.ok
    assert "of no commit: 1 file with 4 B" in report.warnings[0]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nothing", CheckpointNotFoundError),
        ("unfinished", NotCommittedError),
        ("void", NotCommittedError),
        ("stock", NotCommittedError),
    ],
)
@pytest.mark.parametrize("where", ["local", SLOW_MOTO])
def test_what_is_not_committed_is_not_verified(
    request: pytest.FixtureRequest, where: str, kind: str, error: type[Exception]
) -> None:
    """A folder without a commit that stands raises, and never answers ok."""
    place = place_of(request, where)
    make(place, kind)
    with pytest.raises(error):
        look(place)


def test_a_checkpoint_replaced_meanwhile_is_not_called_damaged(place: Place) -> None:
    """Where a save commits while files are read, verify says so instead of naming files that it removed."""

    class Busy(RecordingStore):
        def read_into(self, name: str, offset: int, buffers: Any) -> None:
            if not self.of("read_into"):
                save({"other": torch.ones(3)}, place.writer(overwrite=True))
            super().read_into(name, offset, buffers)

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        return Busy(open_store(location, options, max_concurrency=concurrency))

    plain = folder_of(place)
    with pytest.raises(CheckpointReplacedError):
        verify_folder(Folder(plain.location, {}, LoadOptions(max_concurrency=1), opener), "data")


@pytest.mark.parametrize("operation", ["entries", "read", "read_into"])
def test_an_outage_raises(place: Place, operation: str) -> None:
    """A store that fails is never a problem of the checkpoint."""

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        return FaultyStore(open_store(location, options, max_concurrency=concurrency), [Fault(operation)])

    plain = folder_of(place)
    with pytest.raises(StoreError):
        verify_folder(Folder(plain.location, {}, plain.options, opener), "data")


@pytest.mark.parametrize(
    "wrong", [{"depth": "deep"}, {"sample": 0.5}, {"depth": "data", "sample": 0.0}, {"depth": "data", "sample": 1.5}]
)
def test_wrong_arguments_are_refused(place: Place, wrong: dict[str, Any]) -> None:
    """An unknown depth, a sample without data, and a share out of its range raise ValueError."""
    with pytest.raises(ValueError, match=r"depth|sample"):
        verify(place.url, **wrong)


def test_progress_is_told(place: Place) -> None:
    """A callback hears of all bytes, and of no more."""
    callback = Callback()
    report = look(place, "data", callback=callback)
    assert (callback.size, callback.value) == (report.nbytes, report.nbytes)


def _save_alone(rank: int, world: int, path: str) -> None:
    writer = FsspecStorageWriter(path, options=SaveOptions(shard_size=1))
    dcp.save({f"of-{rank}": torch.full((30,), rank)}, storage_writer=writer, use_collectives=False)


def test_a_checkpoint_saved_rank_by_rank_is_verified(ranks: RankPool, tmp_path: Path) -> None:
    """Without collectives all ranks' files are read, and an altered one is named."""
    place = Place(str(tmp_path / "c"))
    ranks.run(_save_alone, 2, place.url)
    assert look(place, "data").ok
    flip(place, place.shards()[1], 300)
    report = look(place, "data")
    assert [p.kind for p in report.problems] == ["altered"]


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Reading 600 MiB with a budget of 32 MiB takes no more memory than that and 64 MiB."""
    place = Place(str(tmp_path / "c"))
    save({str(n): torch.randn(30 * MIB // 4) for n in range(20)}, place.writer())
    code = (
        "import resource, sys\n"
        "from dcp_storage import LoadOptions, verify\n"
        "options = LoadOptions(memory_budget=32 << 20)\n"
        "verify(sys.argv[1], 'sizes', options=options)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert verify(sys.argv[1], 'data', options=options).ok\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, place.url], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout) * 1024 <= 32 * MIB + 64 * MIB
