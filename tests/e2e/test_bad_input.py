"""What cannot be meant or cannot be done: the right class, one clear sentence, nothing written, nothing lost."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    FsspecStorageReader,
    FsspecStorageWriter,
    NotCommittedError,
    SaveOptions,
    StoreError,
)
from dcp_storage.errors import InvalidLocationError, ObjectNotFoundError
from dcp_storage.fence import delete_folder
from dcp_storage.session import open_folder
from dcp_storage.stores.location import parse_location
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, assert_sentence, failure, like, load, place_of, raised_by, save
from tests.e2e import small_state as state_of
from tests.servers.endpoint import S3Endpoint

pytestmark = pytest.mark.filterwarnings(ALONE)


def delete(place: Place) -> None:
    """Deletes the checkpoint by the commit protocol."""
    opened = open_folder(parse_location(place.url), place.options, SaveOptions())
    delete_folder(opened.store)
    opened.store.close()


def is_untouched(template: dict[str, Any]) -> bool:
    """Whether every tensor still holds the sentinel and every object is still None."""
    flat = [*template.pop("model").values(), *template.values()] if "model" in template else [*template.values()]
    return all(v is None or bool((v == v.new_full((1,), -7)).all()) for v in flat)


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    """A file in the place of the folder, or of one above it, fails the save and the load as ENOTDIR, and stays."""
    (tmp_path / "file").write_bytes(b"mine")
    place = Place(f"{tmp_path}/file{below}")
    for call in (lambda: save(state_of(), place.writer()), lambda: load(like(state_of()), place.reader())):
        error = failure(StoreError, call)
        assert error.errno == errno.ENOTDIR
        assert "file" in str(error)
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def save_without_rights(rank: int, world: int, folder: str) -> dict[int, BaseException]:
    user = os.geteuid()
    if user == 0:  # root may write everywhere
        os.seteuid(65534)
    try:
        return raised_by(lambda: save(state_of(), FsspecStorageWriter(folder)))
    finally:
        os.seteuid(user)


def test_a_folder_that_may_not_be_written(tmp_path: Path, ranks: RankPool) -> None:
    """Without the right to write the save fails as EACCES, typed, and nothing was written."""
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut").chmod(0o500)
    (outcome,) = ranks.run(save_without_rights, 1, str(tmp_path / "shut" / "step-1"), init=False)
    assert type(outcome[0]) is StoreError
    assert outcome[0].errno == errno.EACCES
    assert_sentence(str(outcome[0]))
    assert list((tmp_path / "shut").iterdir()) == []


@pytest.mark.parametrize("kind", ["moto", "ministack"])
def test_a_bucket_that_is_not_there(request: pytest.FixtureRequest, kind: str) -> None:
    """A save to a missing bucket fails typed and does not make it; a load says that there is no checkpoint."""
    server: S3Endpoint = request.getfixturevalue(kind)
    place = Place("s3://no-such-bucket-here/run/step-1", server.storage_options, server)
    error = failure(ObjectNotFoundError, lambda: save(state_of(), place.writer()))
    assert "no-such-bucket-here" in str(error)
    template = like(state_of())
    failure(CheckpointNotFoundError, lambda: load(template, place.reader()))
    assert is_untouched(template)
    assert "no-such-bucket-here" not in [b["Name"] for b in server.client.list_buckets()["Buckets"]]


@pytest.mark.parametrize(
    ("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"), ("hf", "huggingface_hub")]
)
def test_a_scheme_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    """The sentence names what to install, and torch is told that the place cannot be used."""
    monkeypatch.setitem(sys.modules, package, None)  # an import of it now fails, whether it is installed or not
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, scheme, raising=False)
    place = f"{scheme}://bucket/run/step-1"
    for cls in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(InvalidLocationError) as caught:
            cls(place)
        assert "pip install" in str(caught.value) or package in str(caught.value)
        assert ("dcp-storage[s3]" in str(caught.value)) is (scheme == "s3")
        assert_sentence(str(caught.value))
        assert not cls.validate_checkpoint_id(place)


@pytest.mark.parametrize("place", ["nonsense://bucket/run", "S4://bucket/run", Path("s3://bucket/run"), "s3:/b/k"])
def test_a_scheme_that_nobody_knows_and_a_url_that_pathlib_rewrote(
    place: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are refused when the writer or reader is made, and no local folder of that name comes into being."""
    monkeypatch.chdir(tmp_path)
    for cls in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(InvalidLocationError) as caught:
            cls(place)
        assert_sentence(str(caught.value))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "ministack"])
def test_a_folder_with_nothing_in_it(request: pytest.FixtureRequest, kind: str) -> None:
    """A missing folder is no checkpoint; the load says so, leaves the template alone, and makes nothing."""
    place = place_of(request, kind)
    template = like(state_of())
    error = failure(CheckpointNotFoundError, lambda: load(template, place.reader()))
    assert isinstance(error, FileNotFoundError)
    assert place.url in str(error)
    assert is_untouched(template)
    assert place.files() == {}
    if kind == "local":
        assert not Path(place.url).exists()
        Path(place.url).mkdir()
        failure(CheckpointNotFoundError, lambda: load(like(state_of()), place.reader()))


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_foreign_files_are_no_checkpoint_and_stay(request: pytest.FixtureRequest, kind: str) -> None:
    """Other people's files are no checkpoint; saving beside them, replacing and deleting leaves each as it was."""
    place = place_of(request, kind)
    foreign = {"notes.txt": b"mine", "model.safetensors": b"theirs", ".commit.old": b"no number", "__x_0.distcp": b"x"}
    for name, data in foreign.items():
        place.set(name, data)
    error = failure(CheckpointNotFoundError, lambda: load(like(state_of()), place.reader()))
    assert ".commit.old" in str(error) or "notes.txt" in str(error)
    save(state_of(1), place.writer())
    assert "__0_0.distcp" in place.files()
    save(state_of(2), place.writer(overwrite=True))
    found = like(state_of())
    load(found, place.reader())
    assert_same(found, state_of(2))
    delete(place)
    assert {name: place.get(name) for name in foreign} == foreign
    assert sorted(place.files()) == sorted([*foreign, ".commit", ".commit.2", ".commit.3"])


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_a_checkpoint_without_a_commit(request: pytest.FixtureRequest, kind: str) -> None:
    """Files of a save that never committed are refused, whether a commit is required or not."""
    place = place_of(request, kind)
    save(state_of(), place.writer())
    opened = open_folder(parse_location(place.url), place.options, SaveOptions())
    opened.store.delete([".commit", ".metadata"])
    opened.store.close()
    for required in (True, False):
        template = like(state_of())
        error = failure(
            NotCommittedError,
            lambda t=template, r=required: load(t, place.reader(require_commit=r)),  # type: ignore[misc]
        )
        assert "never committed" in str(error)
        assert isinstance(error, CheckpointNotFoundError)
        assert is_untouched(template)


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "ministack"])
def test_a_deleted_checkpoint(request: pytest.FixtureRequest, kind: str) -> None:
    """A void is no checkpoint, in either way of loading; saving there again works, and then loads."""
    place = place_of(request, kind)
    save(state_of(1), place.writer())
    delete(place)
    assert sorted(place.files()) == [".commit", ".commit.2"]
    for required in (True, False):
        reader = place.reader(require_commit=required)
        error = failure(NotCommittedError, lambda r=reader: load(like(state_of()), r))  # type: ignore[misc]
        assert "deleted" in str(error)
    save(state_of(2), place.writer())
    assert place.commits() == [".commit", ".commit.2", ".commit.3"]
    found = like(state_of())
    load(found, place.reader())
    assert_same(found, state_of(2))


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "ministack"])
def test_a_checkpoint_is_not_overwritten_by_default(request: pytest.FixtureRequest, kind: str) -> None:
    """A second save is refused before any byte is written, as FileExistsError too, and says what would allow it."""
    place = place_of(request, kind)
    save(state_of(1), place.writer())
    before = {name: place.get(name) for name in place.files()}
    error = failure(CheckpointExistsError, lambda: save(state_of(2), place.writer()))
    assert isinstance(error, FileExistsError)
    assert "overwrite=True" in str(error)
    assert {name: place.get(name) for name in place.files()} == before


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "ministack"])
def test_overwrite_replaces_and_tidies(request: pytest.FixtureRequest, kind: str) -> None:
    """With overwrite the new values load, and of the old save only its commit object stays."""
    place = place_of(request, kind)
    for step in range(3):
        save(state_of(step), place.writer(overwrite=True))
    found = like(state_of())
    load(found, place.reader())
    assert_same(found, state_of(2))
    names = place.files()
    assert place.commits() == [".commit", ".commit.2", ".commit.3"]
    assert len(place.shards()) == 1
    assert len([name for name in names if name.startswith(".manifest")]) == 1
    assert ".claim" not in names


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"asynchronous": True}], ids=["unknown", "asynchronous"])
def test_storage_options_that_cannot_be_used(moto: S3Endpoint, options: dict[str, Any]) -> None:
    """Options that the filesystem does not take fail typed, with their name in the sentence."""
    place = Place("s3://bucket/run", {**moto.storage_options, **options})
    for call in (lambda: save(state_of(), place.writer()), lambda: load(like(state_of()), place.reader())):
        error = raised_by(call)[0]
        assert isinstance(error, (InvalidLocationError, StoreError)), repr(error)
        assert next(iter(options)) in str(error)


def refused(rank: int, world: int, url: str, options: dict[str, Any], what: str) -> dict[int, BaseException]:
    state = {**state_of(), f"own-{rank}": torch.ones(10)}
    if what == "save":
        writer = FsspecStorageWriter(url, storage_options=options)
        return raised_by(lambda: dcp.save(state, storage_writer=writer))
    reader = FsspecStorageReader(url, storage_options=options)
    template = like(state)
    errors = raised_by(lambda: dcp.load(template, storage_reader=reader))
    assert is_untouched(template)
    return errors


def nothing(place: Place) -> None:
    """Leaves the folder as it is."""


def a_file(place: Place) -> None:
    Path(place.url).write_bytes(b"mine")


def committed(place: Place) -> None:
    save(state_of(), place.writer())


def uncommitted(place: Place) -> None:
    committed(place)
    place.remove(".commit")
    place.remove(".metadata")


def void(place: Place) -> None:
    committed(place)
    delete(place)


@pytest.mark.parametrize(
    ("kind", "prepare", "what", "wanted"),
    [
        ("local", a_file, "save", StoreError),
        ("local", a_file, "load", StoreError),
        ("local", nothing, "load", CheckpointNotFoundError),
        ("local", committed, "save", CheckpointExistsError),
        ("local", uncommitted, "load", NotCommittedError),
        ("local", void, "load", NotCommittedError),
        ("moto", nothing, "load", CheckpointNotFoundError),
        ("moto", committed, "save", CheckpointExistsError),
        ("moto", uncommitted, "load", NotCommittedError),
    ],
)
def test_every_rank_is_told(
    request: pytest.FixtureRequest,
    ranks: RankPool,
    kind: str,
    prepare: Callable[[Place], None],
    what: str,
    wanted: type[CheckpointError],
) -> None:
    """What is refused is refused on all ranks, typed, in one sentence, and the folder is as before."""
    place = place_of(request, kind)
    prepare(place)
    before = {name: place.get(name) for name in place.files()}
    for outcome in ranks.run(refused, 3, place.url, place.options, what):
        assert outcome
        for error in outcome.values():
            assert type(error) is wanted
            assert error.path == place.url
            assert_sentence(str(error))
    assert {name: place.get(name) for name in place.files()} == before


@pytest.mark.slow
def test_wrong_credentials(seaweedfs: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
    """A server that checks them refuses save and load as EACCES; it never looks like an empty folder."""
    place = Place(f"s3://{bucket(seaweedfs)}/run/step-1", seaweedfs.storage_options, seaweedfs)
    save(state_of(), place.writer())
    before = place.files()
    wrong = Place(place.url, {**seaweedfs.storage_options, "secret": "wrong"})
    for call in (
        lambda: save(state_of(), wrong.writer(overwrite=True)),
        lambda: load(like(state_of()), wrong.reader()),
    ):
        error = failure(StoreError, call)
        assert error.errno == errno.EACCES
    assert place.files() == before
    found = like(state_of())
    load(found, place.reader())
    assert_same(found, state_of())
