"""Saving to and loading from every kind of place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from tests.e2e import ALONE, Place, assert_same, like, load, place_of, save, small_state

pytestmark = pytest.mark.filterwarnings(ALONE)

KINDS = ["local", "file-url", "memory", "moto", "ministack"]
ODD = ["[1]", "a?b", "*", "a b", "a#b", "100%", "%41", "grün 日本", "a&b=c+d", "{a,b}"]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request, request.param)


def test_what_is_saved_is_loaded(place: Place) -> None:
    """Every value comes back bit for bit, by a new reader, and one commit object says that it may."""
    state = small_state()
    save(state, place.writer())
    assert place.commits() == [".commit"]
    found = like(state)
    load(found, place.reader())
    assert_same(found, state)


def test_the_names_of_a_first_save_are_the_plain_ones(place: Place) -> None:
    """A folder that nobody else uses ends with exactly the files of format 1, and no claim."""
    save(small_state(), place.writer())
    assert set(place.files()) == {"__0_0.distcp", ".manifest", ".commit", ".metadata"}


def test_a_save_reports_what_it_did(place: Place) -> None:
    """The report counts the files and bytes that are there, names the commit, and knows its phases."""
    writer = place.writer()
    assert writer.report is None
    save(small_state(), writer)
    report = writer.report
    assert report is not None
    assert report.ok
    assert report.warnings == []
    assert (report.files, report.commit, report.single_writer) == (1, 1, False)
    assert report.bytes_written == place.files()["__0_0.distcp"]
    assert report.requests >= 5
    assert report.retries == 0
    assert set(report.seconds) == {"begin", "write", "commit"}
    assert all(0 <= seconds < 60 for seconds in report.seconds.values())
    assert report.to_dict()["ok"] is True


def test_a_load_reports_what_it_did(place: Place) -> None:
    """The report lists the keys, and counts at least the bytes of the tensors and at most the folder's."""
    state = small_state()
    save(state, place.writer())
    reader = place.reader()
    assert reader.report is None
    load(like(state), reader)
    report = reader.report
    assert report is not None
    assert report.ok
    assert report.loaded == ["ids", "model.bias", "model.half", "model.weight", "name", "step"]
    raw = 37 * 19 * 4 + 19 * 8 + 5 * 7 * 2 + 101 * 8
    files = place.files()
    assert raw < report.bytes_needed <= files["__0_0.distcp"]
    assert report.bytes_needed + files[".manifest"] <= report.bytes_read <= sum(files.values()) + 64 * 1024
    assert report.commit == 1
    assert report.requests >= 4
    assert set(report.seconds) == {"metadata", "plan", "sizes", "read"}


def test_a_pathlike_is_a_place(tmp_path: Path) -> None:
    """A pathlib path of a local folder does, also one whose parents are missing."""
    folder = tmp_path / "run" / "step-1"
    state = small_state()
    save(state, FsspecStorageWriter(folder))
    assert (folder / ".commit").is_file()
    found = like(state)
    load(found, FsspecStorageReader(folder))
    assert_same(found, state)


def test_a_relative_path_is_meant_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is of the folder that was current when it was given, not of a later one."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    writer = FsspecStorageWriter("step-1")
    monkeypatch.chdir(tmp_path / "two")
    save({"a": torch.arange(3)}, writer)
    assert (tmp_path / "one" / "step-1" / ".commit").is_file()
    assert list((tmp_path / "two").iterdir()) == []


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "ministack"])
def test_no_character_is_special(request: pytest.FixtureRequest, kind: str) -> None:
    """Folders and keys with glob, URL and non-ASCII characters are plain names, each its own."""
    root = place_of(request, kind)
    for number, name in enumerate(ODD):
        save({odd: torch.full((3,), number) for odd in ODD}, root.child(name).writer())
    for number, name in enumerate(ODD):
        place = root.child(name)
        assert place.commits() == [".commit"], name
        found = {odd: torch.zeros(3, dtype=torch.int64) for odd in ODD}
        load(found, place.reader())
        assert all(value.tolist() == [number] * 3 for value in found.values())


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_a_slash_at_the_end_changes_nothing(request: pytest.FixtureRequest, kind: str) -> None:
    """A trailing slash names the same folder."""
    place = place_of(request, kind)
    save({"a": torch.arange(5)}, Place(place.url + "/", place.options).writer())
    assert place.commits() == [".commit"]
    found = {"a": torch.zeros(5, dtype=torch.int64)}
    load(found, place.reader())
    assert found["a"].tolist() == [0, 1, 2, 3, 4]
