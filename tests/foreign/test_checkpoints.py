"""Saving to and loading from filesystems that nobody wrote a store for: what holds, what is said, what is recorded."""

from __future__ import annotations

import json
import secrets
import warnings
from pathlib import Path

import pytest

from dcp_storage import CheckpointExistsError, FsspecStorageReader, FsspecStorageWriter, SaveOptions
from tests.e2e import ALONE, Place, assert_same, failure, like, load, save, small_state
from tests.foreign import opened, place_on
from tests.servers.ftp import FtpServer

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture(
    params=[
        "dir",
        "ftp",
        pytest.param("azurite", marks=pytest.mark.slow),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    """A folder for a checkpoint on each store that cannot promise create-if-absent."""
    return place_on(request, request.param)


def _names(place: Place) -> list[str]:
    with opened(place.url, place.options) as store:
        return sorted(entry.name for entry in store.entries())


def _commit(place: Place, name: str = ".commit") -> dict[str, object]:
    with opened(place.url, place.options) as store:
        found: dict[str, object] = json.loads(store.read(name, limit=1 << 16))
        return found


def test_what_one_writer_can_do(place: Place) -> None:
    """A save loads back bit for bit, warns once, records single_writer; an overwrite needs the user's word."""
    writer = FsspecStorageWriter(place.url, storage_options=place.options, overwrite=True)
    with pytest.warns(UserWarning, match="does not promise create-if-absent") as said:
        save(small_state(1), writer)
    assert len([one for one in said if "create-if-absent" in str(one.message)]) == 1
    assert writer.report is not None
    assert writer.report.single_writer
    assert _commit(place)["single_writer"] is True
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(1))

    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        failure(CheckpointExistsError, lambda: save(small_state(2), writer))
    assert not [one for one in again if "create-if-absent" in str(one.message)]
    load(found, place.reader())
    assert_same(found, small_state(1))

    before = set(_names(place))
    with pytest.warns(UserWarning, match="create-if-absent"):
        save(small_state(3), place.writer(overwrite=True, options=SaveOptions(assume_single_writer=True)))
    assert _commit(place, ".commit.2")["single_writer"] is True
    load(found, place.reader())
    assert_same(found, small_state(3))
    assert [name for name in _names(place) if name in before and not name.startswith((".commit", ".metadata"))] == []


def test_a_second_step_beside_the_first(place: Place) -> None:
    """One writer saves two steps to two folders; each loads back as its own, and both commits stand."""
    steps = [place.child("one"), place.child("two")]
    writer = FsspecStorageWriter(storage_options=place.options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number, step in enumerate(steps):
            save(small_state(number), writer, checkpoint_id=step.url)
    assert len([one for one in said if "create-if-absent" in str(one.message)]) == 1
    reader = FsspecStorageReader(storage_options=place.options)
    for number, step in enumerate(steps):
        found = like(small_state())
        load(found, reader, checkpoint_id=step.url)
        assert_same(found, small_state(number))


def test_an_ftp_server_s_files(ftp: FtpServer) -> None:
    """What ftp wrote lies on the server's disk under the names of the format, and nothing else does."""
    folder = f"run [1] {secrets.token_hex(3)}"
    with pytest.warns(UserWarning, match="create-if-absent"):
        save(small_state(), FsspecStorageWriter(f"{ftp.url}/{folder}", storage_options=ftp.storage_options))
    names = sorted(path.name for path in (ftp.root / folder).iterdir())
    assert [name.split(".")[1] for name in names if not name.startswith("__")] == ["commit", "manifest", "metadata"]
    assert [name.rpartition(".")[2] for name in names if name.startswith("__")] == ["distcp"]


def test_a_local_folder_seen_through_dir(tmp_path: Path) -> None:
    """What ``dir://`` wrote is a checkpoint for whoever opens the folder itself."""
    with pytest.warns(UserWarning, match="create-if-absent"):
        save(small_state(5), FsspecStorageWriter(f"dir::file://{tmp_path}/run"))
    found = like(small_state())
    load(found, FsspecStorageReader(tmp_path / "run"))
    assert_same(found, small_state(5))
