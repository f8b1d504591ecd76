"""What doctor finds out of every server of the tests, and of stores that break one promise on purpose."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from dcp_storage import CheckpointManager, CheckpointNotFoundError, StoreError, doctor, prune
from dcp_storage.store import Atomicity, Entry, Store
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore, IgnoresIfAbsent
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.tools.bench import bench_folder
from dcp_storage.tools.doctor import Diagnosis, doctor_folder
from dcp_storage.tools.opening import Folder
from tests.e2e import Place, place_of
from tests.servers.azurite import Azurite
from tests.servers.fake_gcs import FakeGcs
from tests.servers.ftp import FtpServer
from tests.servers.gcs_folder import GcsFolder
from tests.tools import folder_of

T = TypeVar("T")
MIB = 1 << 20


def wrong(report: Diagnosis) -> set[str]:
    return {answer.question for answer in report.answers if answer.ok is False}


def noted(report: Diagnosis) -> set[str]:
    return {answer.question for answer in report.answers if answer.ok is None}


@pytest.mark.parametrize(
    ("kind", "notes"),
    [
        ("local", {"checksum", "create-in-parts"}),
        ("memory", {"checksum", "create-in-parts"}),
        pytest.param("moto", {"checksum"}, marks=pytest.mark.slow),
        ("ministack", set()),
        ("gcs", {"checksum"}),
    ],
)
def test_stores_that_keep_their_promises_are_called_fit(
    request: pytest.FixtureRequest, kind: str, notes: set[str]
) -> None:
    """Nothing is wrong with these; what they do not check is noted; and nothing is left behind."""
    place = place_of(request, kind)
    place.set("before.txt", b"mine")
    report = doctor(place.url, storage_options=place.options)
    assert (report.ok, wrong(report), report.create_if_absent) == (True, set(), "atomic")
    assert noted(report) == notes
    assert all(answer.means and answer.found for answer in report.answers)
    assert set(report.latency) == {"write", "read", "list"}
    assert set(report.throughput) == {"write", "read"}
    assert set(place.files()) == {"before.txt"}
    assert place.uploads() == []
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seaweedfs", "rclone"])
def test_other_s3_servers_are_told_apart(request: pytest.FixtureRequest, kind: str) -> None:
    """Seaweedfs refuses a second create; rclone does not, and is found out. Nothing is left on either."""
    place = place_of(request, kind)
    report = doctor(place.url, storage_options=place.options)
    assert wrong(report) == ({"create"} if kind == "rclone" else set())
    assert report.ok is (kind == "seaweedfs")
    assert place.files() == {}


@pytest.mark.slow
def test_a_run_on_rclone_is_pruned(request: pytest.FixtureRequest) -> None:
    """Where the server lists uploads in a way of its own, prune finds those of dead saves, on the user's word."""
    place = place_of(request, "rclone")
    assert place.server is not None
    manager = CheckpointManager(place.url, storage_options=place.options, assume_single_writer=True, keep_latest=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the store cannot refuse a second writer
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((8,), float(step))})
    assert manager.steps() == [2]
    bucket, _, key = manager.path(2).removeprefix("s3://").partition("/")
    name = f"{key}/__0_0.aaaaaaaaaaaaaaaa.distcp"
    begun = place.server.client.create_multipart_upload(Bucket=bucket, Key=name)
    place.server.client.upload_part(Bucket=bucket, Key=name, UploadId=begun["UploadId"], PartNumber=1, Body=b"x")
    assert [item["Key"] for item in place.server.open_uploads(bucket)] == [name]
    word: dict[str, Any] = {"storage_options": place.options, "assume_single_writer": True, "grace": timedelta(0)}
    time.sleep(1.1)  # the server counts whole seconds
    assert prune(place.url, **word).uploads == 1
    report = prune(place.url, apply=True, **word)
    assert (report.ok, report.uploads, prune(place.url, **word).uploads) == (True, 1, 0)
    assert place.server.open_uploads(bucket) == []


@pytest.mark.slow
def test_fake_gcs_is_asked(fake_gcs: FakeGcs) -> None:
    """fake-gcs-server refuses small second creates, and composes over what is there; nothing is left."""
    folder = GcsFolder.new(fake_gcs)
    report = doctor(folder.url, storage_options=fake_gcs.storage_options)
    assert "create" not in wrong(report)
    assert folder.names() == []


@pytest.mark.slow
def test_ftp_is_found_out(ftp: FtpServer) -> None:
    """Over FTP nothing refuses a second writer, and doctor says what that means."""
    (Path(ftp.root) / "run").mkdir()
    report = doctor(f"{ftp.url}/run", storage_options=ftp.storage_options)
    assert "create" in wrong(report)
    assert [p.kind for p in report.problems if p.kind == "create"] == ["create"]
    assert list((Path(ftp.root) / "run").iterdir()) == []


@pytest.mark.slow
def test_azurite_is_found_out(azurite: Azurite) -> None:
    """Through adlfs create is look-then-write, so it is not refused by the store."""
    azurite.make_container("doctor")
    report = doctor("az://doctor/run", storage_options=azurite.storage_options)
    assert "create" in wrong(report)
    assert azurite.names("doctor") == []


def examined(place: Place, wrap: Any) -> Diagnosis:
    plain = folder_of(place)

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        store: Store = wrap(open_store(location, options, max_concurrency=concurrency))
        return store

    return doctor_folder(Folder(plain.location, plain.storage_options, plain.options, opener))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "run").mkdir()
    return Place(str(tmp_path / "run"))


def test_a_store_that_says_none_is_found_out(place: Place) -> None:
    """A store whose create replaces is wrong, and so said."""
    report = examined(place, IgnoresIfAbsent)
    assert "create" in wrong(report)
    assert "two jobs" in report.problems[0].advice.lower()


class Liar(RecordingStore):
    """Says that its create is atomic, and replaces."""

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.ATOMIC

    def create(self, name: str, data: bytes) -> None:
        self.put(name, [memoryview(data)])


class Stale(RecordingStore):
    """Its second listing of a folder is its first."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.first: list[Entry] | None = None

    def entries(self) -> list[Entry]:
        if self.first is None:
            self.first = super().entries()
        return self.first


class Halves(RecordingStore):
    """Reports half of each size."""

    def size(self, name: str) -> int:
        return super().size(name) // 2


class Shifted(RecordingStore):
    """Ranges come one byte late."""

    def read_into(self, name: str, offset: int, buffers: Any) -> None:
        super().read_into(name, offset + 1, buffers)


class Undead(RecordingStore):
    """Deletes nothing."""

    def delete(self, names: Any) -> None:
        list(names)


class Keeps(RecordingStore):
    """An upload that was begun stays open for ever."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.begun: list[str] = []

    def upload(self, name: str) -> Any:
        self.begun.append(name)
        return super().upload(name)

    def open_uploads(self) -> list[Entry]:
        return [Entry(name, 0, 0.0) for name in self.begun]


class LongAgo(RecordingStore):
    """Its clock is an hour ahead of its files."""

    def now(self) -> float:
        return super().now() + 3600


@pytest.mark.parametrize(
    ("store", "question"),
    [
        (Liar, "create"),
        (Stale, "list"),
        (Halves, "write"),
        (Shifted, "range"),
        (Undead, "delete"),
        (Keeps, "abort"),
        (LongAgo, "clock"),
    ],
)
def test_each_broken_promise_is_found_out(place: Place, store: Any, question: str) -> None:
    """A store that breaks one promise is wrong in that answer, with what it means."""
    report = examined(place, store)
    assert question in wrong(report)
    problem = next(p for p in report.problems if p.kind == question)
    assert problem.advice
    assert not report.ok


def test_nothing_is_left_behind_when_a_question_fails(place: Place) -> None:
    """A request that fails is an answer, not the end, and all scratch names are removed."""
    report = examined(place, lambda store: FaultyStore(store, [Fault("size", nth=2), Fault("create", nth=1)]))
    assert "create" in wrong(report)
    assert place.files() == {}


def test_a_store_that_cannot_be_written_to_raises(place: Place) -> None:
    """Without a first write there is nothing to examine: the store's own error comes out."""
    with pytest.raises(StoreError):
        examined(place, lambda store: FaultyStore(store, [Fault("put", nth=None)]))
    assert place.files() == {}


def test_a_local_folder_is_not_made(tmp_path: Path) -> None:
    """A folder that is not there is not made for a question."""
    with pytest.raises(CheckpointNotFoundError):
        doctor(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


class Interrupted(RecordingStore):
    """Ctrl-C comes at some requests, counted from 1: just before a delete, just after any other."""

    def __init__(self, inner: Store, at: set[int]) -> None:
        super().__init__(inner)
        self.at = at
        self.count = itertools.count(1)  # requests come from several threads

    def request(self, request: Any, call: Callable[[], T]) -> T:
        hit = next(self.count) in self.at
        if hit and request.operation == "delete":
            os.kill(os.getpid(), signal.SIGINT)
        try:
            return super().request(request, call)
        finally:
            if hit and request.operation != "delete":
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("tool", ["doctor", "bench"])
def test_ctrl_c_leaves_nothing(place: Place, tool: str) -> None:
    """Interrupted in the middle, and once more while it cleans up, it ends as interrupted and leaves no object."""
    plain = folder_of(place)

    def under(at: set[int]) -> Folder:
        def opener(location: Any, options: Any, concurrency: int) -> Store:
            return Interrupted(open_store(location, options, max_concurrency=concurrency), at)

        return Folder(plain.location, plain.storage_options, plain.options, opener)

    def ask(at: set[int]) -> None:
        doctor_folder(under(at)) if tool == "doctor" else bench_folder(under(at), 0.2, 512 * MIB)

    for at in (2, 9):  # so many requests there are in any case; how many more, time decides
        for again in ({at}, {at, at + 1}):  # the one after an interrupt is of the cleaning
            with pytest.raises(KeyboardInterrupt):
                ask(again)
            assert place.files() == {}, again
