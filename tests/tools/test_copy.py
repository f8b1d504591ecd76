"""Copying between stores: what arrives is the same, checked, committed last; what must not be copied is refused."""

from __future__ import annotations

import json
import resource
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
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    FsspecStorageWriter,
    InvalidLocationError,
    NotCommittedError,
    SaveOptions,
    StoreError,
    adopt,
    copy,
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
from dcp_storage.tools.copy import copy_folder
from dcp_storage.tools.opening import Folder
from tests.e2e import ALONE, Place, assert_same, like, load, place_of, save
from tests.tools import flip, folder_of, make, remove, state

pytestmark = pytest.mark.filterwarnings(ALONE)

MIB = 1 << 20
SMALL = SaveOptions(part_size=64 * 1024, memory_budget=1 << 20, max_concurrency=4)
OWN = {".commit", ".manifest", ".metadata"}


def pair(request: pytest.FixtureRequest, kinds: str) -> tuple[Place, Place]:
    first, _, second = kinds.partition(" to ")
    return place_of(request, first).child("src"), place_of(request, second).child("dst")


@pytest.fixture
def places(request: pytest.FixtureRequest) -> tuple[Place, Place]:
    src, dst = pair(request, getattr(request, "param", "local to local"))
    make(src, "committed")
    return src, dst


def cp(places: tuple[Place, Place], **options: Any) -> Any:
    src, dst = places
    return copy(src.url, dst.url, src_options=src.options, dst_options=dst.options, **options)


def check(place: Place, wanted: dict[str, Any]) -> None:
    """Every byte is as committed, and loading gives the values."""
    report = verify(place.url, "data", storage_options=place.options)
    assert (report.ok, report.warnings) == (True, [])
    found = like(wanted)
    load(found, place.reader())
    assert_same(found, wanted)


KINDS = ["local to local", "memory to memory", "local to moto", "moto to ministack", "gcs to moto", "local to gcs"]


@pytest.mark.parametrize("places", KINDS, indirect=True)
def test_what_arrives_is_the_same(places: tuple[Place, Place]) -> None:
    """Between any two stores: the same files under the same names, the same values, and nothing besides."""
    src, dst = places
    report = cp(places, options=SMALL)
    assert (report.commit, report.already_there, report.files_resumed) == (1, False, 0)
    assert (report.files_sent, report.bytes_sent) == (len(src.shards()), sum(src.files()[n] for n in src.shards()))
    assert set(dst.files()) == OWN | set(src.shards())
    assert {name: dst.get(name) for name in src.shards()} == {name: src.get(name) for name in src.shards()}
    check(dst, state())
    assert dst.uploads() == []
    ours, theirs = (json.loads(place.get(".commit")) for place in places)
    assert (ours["world_size"], ours["torch"]) == (theirs["world_size"], theirs["torch"])
    assert ours["author"] != theirs["author"]


def test_stock_torch_reads_the_copy(places: tuple[Place, Place]) -> None:
    """The view for stock readers is written at the destination."""
    cp(places)
    found = like(state())
    dcp.load(found, storage_reader=FileSystemReader(places[1].url), no_dist=True)
    assert_same(found, state())


def test_a_copy_run_again_does_nothing(places: tuple[Place, Place]) -> None:
    """Where the same checkpoint is committed already, nothing is sent, with and without overwrite."""
    cp(places)
    before = places[1].files()
    for overwrite in (False, True):
        report = cp(places, overwrite=overwrite)
        assert (report.already_there, report.files_sent, report.commit) == (True, 0, 1)
    assert places[1].files() == before


def test_another_checkpoint_is_not_replaced_unless_asked(places: tuple[Place, Place]) -> None:
    """A live checkpoint refuses the copy before a byte is written; with overwrite it is replaced, and its files go."""
    src, dst = places
    other = {"other": torch.arange(5)}
    save(other, dst.writer())
    before = {name: dst.get(name) for name in dst.files()}
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        cp(places)
    assert {name: dst.get(name) for name in dst.files()} == before
    report = cp(places, overwrite=True)
    assert report.commit == 2
    check(dst, state())
    assert "__0_0.distcp" not in dst.files()
    assert len(dst.shards()) == len(src.shards())


def test_a_damaged_copy_of_the_same_is_replaced_by_overwrite(places: tuple[Place, Place]) -> None:
    """A destination that lost a file is not taken for the same checkpoint; overwrite makes it whole."""
    cp(places)
    remove(places[1], places[1].shards()[0])
    with pytest.raises(CheckpointExistsError):
        cp(places)
    assert cp(places, overwrite=True).commit == 2
    check(places[1], state())


@pytest.mark.parametrize("places", ["local to local", "local to moto", "local to gcs"], indirect=True)
@pytest.mark.parametrize("where", ["block", "frame"])
def test_a_damaged_source_is_never_committed(places: tuple[Place, Place], where: str) -> None:
    """An altered byte at the source stops the copy with its place; the destination has no commit and no open upload."""
    src, dst = places
    item = next(item for item in src.manifest()["items"] if item["key"] == "large")
    name = src.manifest()["files"][item["file"]]["name"]
    flip(src, name, item["offset"] + (item["payload_offset"] + 9 if where == "block" else 3))
    with pytest.raises(CorruptCheckpointError) as caught:
        cp(places, options=SMALL)
    assert (caught.value.file, caught.value.key, caught.value.path) == (name, "large", src.url)
    assert ".commit" not in dst.files()
    assert name not in dst.files()
    assert dst.uploads() == []


def test_a_source_with_a_file_missing_is_refused_at_once(places: tuple[Place, Place]) -> None:
    """Sizes are looked at before anything is written."""
    remove(places[0], places[0].shards()[0])
    with pytest.raises(CorruptCheckpointError):
        cp(places)
    assert places[1].files() == {}


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("nothing", CheckpointNotFoundError, "no checkpoint"),
        ("unfinished", NotCommittedError, "never committed"),
        ("void", NotCommittedError, "deleted"),
        ("stock", NotCommittedError, "adopt it first"),
        ("damaged", CorruptCheckpointError, "manifest"),
    ],
)
def test_what_is_not_committed_is_not_copied(
    request: pytest.FixtureRequest, kind: str, error: type[Exception], says: str
) -> None:
    """A source without a commit that stands is refused with what to do, and nothing is written."""
    src, dst = pair(request, "local to local")
    make(src, kind)
    with pytest.raises(error, match=says):
        cp((src, dst))
    assert dst.files() == {}


def _save_alone(rank: int, world: int, path: str) -> None:
    dcp.save({f"of-{rank}": torch.ones(3)}, storage_writer=FsspecStorageWriter(path), use_collectives=False)


def test_rank_by_rank_is_not_copied(ranks: RankPool, tmp_path: Path) -> None:
    """What was saved without collectives has no commit of the whole, and the error says so."""
    ranks.run(_save_alone, 2, str(tmp_path / "src"))
    with pytest.raises(NotCommittedError, match="without collectives"):
        copy(tmp_path / "src", tmp_path / "dst")


def test_an_adopted_checkpoint_is_copied(request: pytest.FixtureRequest) -> None:
    """After adopt, with or without CRC-32s, a stock checkpoint is copied like any."""
    for data in (False, True):
        src, dst = pair(request, "local to memory")
        src = src.child(str(data))
        make(src, "stock")
        adopt(src.url, data=data)
        copy(src.url, dst.url)
        found = like(state())
        load(found, dst.reader())
        assert_same(found, state())


def test_one_folder_is_not_copied_onto_itself(places: tuple[Place, Place]) -> None:
    """The same place as source and destination is refused."""
    with pytest.raises(InvalidLocationError, match="itself"):
        copy(places[0].url, places[0].url)


def test_empty_and_many_files_are_copied(request: pytest.FixtureRequest) -> None:
    """A state of many small files, empty tensors among them, arrives whole."""
    for kinds in ("local to moto", "moto to local"):
        src, dst = pair(request, kinds)
        many = {f"t{n}": torch.full((n % 7, 3), n) for n in range(8)}
        save(many, src.writer(options=SaveOptions(shard_size=1)))
        cp((src, dst), options=SMALL)
        check(dst, many)


def test_progress_and_report_are_told(places: tuple[Place, Place]) -> None:
    """A callback hears of all bytes; the report is plain data with seconds by phase and the requests of both stores."""
    callback = Callback()
    report = cp(places, callback=callback)
    assert (callback.size, callback.value) == (report.nbytes, report.nbytes)
    assert set(report.seconds) == {"source", "begin", "send", "commit"}
    assert report.requests > 10
    assert json.loads(json.dumps(report.to_dict()))["source"] == places[0].url


def opened_with(place: Place, wrap: Any) -> Folder:
    plain = folder_of(place)

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        store: Store = wrap(open_store(location, options, max_concurrency=concurrency))
        return store

    return Folder(plain.location, plain.storage_options, SaveOptions(max_concurrency=1, attempts=1), opener)


def test_a_source_replaced_meanwhile_is_said(places: tuple[Place, Place]) -> None:
    """Where another save commits at the source while it is read, the error is that, and nothing is committed."""
    src, dst = places

    class Busy(RecordingStore):
        def read_into(self, name: str, offset: int, buffers: Any) -> None:
            if not self.of("read_into"):
                save({"other": torch.ones(3)}, src.writer(overwrite=True))
            super().read_into(name, offset, buffers)

    with pytest.raises(CheckpointReplacedError):
        copy_folder(opened_with(src, Busy), folder_of(dst), options=SaveOptions(max_concurrency=1))
    assert ".commit" not in dst.files()


def test_bytes_altered_on_the_way_are_read_again(places: tuple[Place, Place]) -> None:
    """One range that comes altered once does not stop the copy, nor reach the destination."""

    class Noisy(RecordingStore):
        def read_into(self, name: str, offset: int, buffers: Any) -> None:
            super().read_into(name, offset, buffers)
            if len(self.of("read_into")) == 1:
                buffers[0][9000] ^= 1

    copy_folder(opened_with(places[0], Noisy), folder_of(places[1]))
    check(places[1], state())


FAILING = [
    ("local to local", operation) for operation in ("upload", "write_part", "complete", "put", "create", "entries")
]
FAILING += [("local to moto", operation) for operation in ("put", "create")]  # no file here is large enough for parts


@pytest.mark.parametrize(("places", "operation"), FAILING, indirect=["places"])
def test_a_failed_copy_leaves_no_open_upload_and_no_commit(places: tuple[Place, Place], operation: str) -> None:
    """Where the destination fails, what is left is plainly uncommitted, and a second run ends well."""
    src, dst = places
    name = {"create": r"\.commit"}.get(operation)
    broken = opened_with(dst, lambda store: FaultyStore(store, [Fault(operation, nth=None, name=name)]))
    with pytest.raises(StoreError):
        copy_folder(folder_of(src), broken, options=SMALL)
    assert not {n for n in dst.files() if n.startswith(".commit")}
    assert dst.uploads() == []
    cp(places)
    check(dst, state())
    assert set(dst.files()) - OWN - set(dst.shards()) <= {".claim"} | {n for n in dst.files() if ".manifest" in n}


def test_thousands_of_files_are_not_held_open(tmp_path: Path) -> None:
    """Files that wait their turn hold no descriptor: more files than a process may open are copied."""
    src = Place(str(tmp_path / "src"))
    save({str(n): torch.ones(1) for n in range(150)}, src.writer())
    manifest = msgspec.json.decode(src.get(".manifest"), type=Manifest)
    data = src.get("__0_0.distcp")
    whole, items = [], []
    for number, item in enumerate(manifest.items):  # the same items, each in a file of its own
        piece = data[item.offset : item.offset + item.length]
        src.set(f"__0_{number + 1}.distcp", piece)
        whole.append(FileRecord(f"__0_{number + 1}.distcp", len(piece), zlib.crc32(piece), 0))
        items.append(msgspec.structs.replace(item, file=number, offset=0))
    body = encode_manifest(msgspec.structs.replace(manifest, files=tuple(whole), items=tuple(items)))
    src.set(".manifest.abcdefghijklmnop", body)
    ref = ManifestRef(".manifest.abcdefghijklmnop", len(body), zlib.crc32(body))
    create_commit(LocalStore(src.url), new_commit(2, "abcdefghijklmnop", manifest=ref, world_size=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, hard))
    try:
        assert copy(src.url, tmp_path / "dst").files_sent == 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    check(Place(str(tmp_path / "dst")), {str(n): torch.ones(1) for n in range(150)})


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Copying ten times the budget takes no more memory than the budget and 64 MiB."""
    src = Place(str(tmp_path / "src"))
    save({str(n): torch.randn(32 * MIB // 4) for n in range(20)}, src.writer())
    code = (
        "import resource, sys, torch\n"
        "from dcp_storage import SaveOptions, copy\n"
        "import dcp_storage.tools.copy\n"
        "options = SaveOptions(memory_budget=64 << 20)\n"
        "copy(sys.argv[3], sys.argv[4], options=options)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert copy(sys.argv[1], sys.argv[2], options=options).bytes_sent >= 640 << 20\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    warm = Place(str(tmp_path / "warm"))
    save({"w": torch.randn(MIB // 4)}, warm.writer())
    arguments = [src.url, str(tmp_path / "dst"), warm.url, str(tmp_path / "warm-dst")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert int(done.stdout) * 1024 <= 64 * MIB + 64 * MIB
