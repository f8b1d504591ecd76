"""One writer, one reader, for a whole run: what stays, what changes, what travels."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.callbacks import Callback

from dcp_storage import CheckpointExistsError, FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.errors import InvalidLocationError
from tests.e2e import ALONE, assert_same, failure, like, load, place_of, save, small_state

pytestmark = pytest.mark.filterwarnings(ALONE)

SAVE_OPTIONS = SaveOptions(part_size=1 << 20, attempts=2, deadline=9.0, shard_size=1 << 22, assume_single_writer=True)
LOAD_OPTIONS = LoadOptions(part_size=1 << 20, attempts=2, deadline=9.0, max_gap=17, trusted_globals=("a.b",))


def a_writer(**more: Any) -> FsspecStorageWriter:
    return FsspecStorageWriter(storage_options={"key": "k"}, overwrite=True, options=SAVE_OPTIONS, **more)


def a_reader(**more: Any) -> FsspecStorageReader:
    return FsspecStorageReader(storage_options={"key": "k"}, require_commit=False, options=LOAD_OPTIONS, **more)


def test_reset_keeps_every_option_of_a_writer() -> None:
    """After a reset only the place is another; a reset without a place keeps it."""
    callback = Callback()
    writer = a_writer(callback=callback)
    assert writer.checkpoint_id is None
    for place in ("/run/step-1", "/run/step-2"):
        writer.reset(place)
        writer.reset()
        assert writer.checkpoint_id == place
        assert writer.storage_options == {"key": "k"}
        assert writer.overwrite is True
        assert writer.options is SAVE_OPTIONS
        assert writer.callback is callback


def test_reset_keeps_every_option_of_a_reader() -> None:
    """The same of a reader."""
    callback = Callback()
    reader = a_reader(callback=callback)
    assert reader.checkpoint_id is None
    for place in ("/run/step-1", "/run/step-2"):
        reader.reset(place)
        reader.reset()
        assert reader.checkpoint_id == place
        assert reader.storage_options == {"key": "k"}
        assert reader.require_commit is False
        assert reader.options is LOAD_OPTIONS
        assert reader.callback is callback


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_one_writer_and_one_reader_serve_three_steps(request: pytest.FixtureRequest, kind: str) -> None:
    """With ``checkpoint_id`` each call has its own place, and the writer's credentials go along."""
    root = place_of(request, kind)
    writer = FsspecStorageWriter(storage_options=root.options)
    reader = FsspecStorageReader(storage_options=root.options)
    steps = [root.child(f"step-{step}") for step in range(3)]
    for step, place in enumerate(steps):
        save(small_state(step), writer, checkpoint_id=place.url)
        assert writer.checkpoint_id == place.url
        assert writer.report is not None
        assert writer.report.path == place.url
    for step, place in enumerate(steps):
        found = like(small_state(step))
        load(found, reader, checkpoint_id=place.url)
        assert_same(found, small_state(step))


def test_a_failed_save_leaves_the_writer_usable(tmp_path: Path) -> None:
    """After a refused save the same writer saves elsewhere, and its report is of the save that succeeded."""
    writer = FsspecStorageWriter(tmp_path / "one")
    save(small_state(1), writer)
    failure(CheckpointExistsError, lambda: save(small_state(2), writer))
    save(small_state(3), writer, checkpoint_id=tmp_path / "two")
    found = like(small_state())
    load(found, FsspecStorageReader(tmp_path / "two"))
    assert_same(found, small_state(3))
    assert writer.report is not None
    assert writer.report.path == str(tmp_path / "two")


@pytest.mark.parametrize("cls", [FsspecStorageWriter, FsspecStorageReader])
@pytest.mark.parametrize(
    ("place", "good"),
    [
        ("/run/step-1", True),
        ("run/step-1", True),
        (Path("run/step-1"), True),
        ("file:///run/step-1", True),
        ("memory://run/step-1", True),
        ("s3://bucket/run/step-1", True),
        ("s3://bucket", True),
        ("", False),
        ("s3://", False),
        ("s3:/bucket/run", False),
        (Path("s3://bucket/run"), False),
        ("nonsense://bucket/run", False),
    ],
)
def test_a_checkpoint_id_is_judged_by_its_kind(cls: Any, place: str | Path, good: bool) -> None:
    """DCP is told which places can be used; those that cannot are refused at once, as a ValueError too."""
    assert cls.validate_checkpoint_id(place) is good
    if good:
        cls(place)
    else:
        with pytest.raises(InvalidLocationError) as caught:
            cls(place)
        assert isinstance(caught.value, ValueError)
        assert caught.value.kind == "location"
        with pytest.raises(InvalidLocationError):
            cls().reset(place)


def test_a_writer_without_a_place_says_so() -> None:
    """A save or load that nobody gave a place fails with one sentence."""
    failure(InvalidLocationError, lambda: save({"a": torch.ones(1)}, FsspecStorageWriter()))


def test_a_reader_without_a_place_says_so() -> None:
    """A load that nobody gave a place fails with one sentence, typed."""
    failure(InvalidLocationError, lambda: load({"a": torch.ones(1)}, FsspecStorageReader()))


def test_a_writer_travels_without_its_callback(tmp_path: Path) -> None:
    """A pickled writer keeps its place and every option, drops callback and report, and still saves."""
    writer = a_writer(callback=Callback())
    save(small_state(1), writer, checkpoint_id=tmp_path / "one")
    again: FsspecStorageWriter = pickle.loads(pickle.dumps(writer))
    assert again.checkpoint_id == str(tmp_path / "one")
    assert (again.storage_options, again.overwrite, again.options) == ({"key": "k"}, True, SAVE_OPTIONS)
    assert again.callback is None
    assert again.report is None
    save(small_state(2), again)
    found = like(small_state())
    load(found, FsspecStorageReader(tmp_path / "one"))
    assert_same(found, small_state(2))


def test_a_reader_travels_without_its_callback(tmp_path: Path) -> None:
    """A pickled reader keeps its place and every option, drops callback and report, and still loads."""
    save(small_state(1), FsspecStorageWriter(tmp_path / "one"))
    reader = a_reader(callback=Callback())
    load(like(small_state()), reader, checkpoint_id=tmp_path / "one")
    again: FsspecStorageReader = pickle.loads(pickle.dumps(reader))
    assert again.checkpoint_id == str(tmp_path / "one")
    assert (again.storage_options, again.require_commit, again.options) == ({"key": "k"}, False, LOAD_OPTIONS)
    assert again.callback is None
    assert again.report is None
    found = like(small_state())
    load(found, again)
    assert_same(found, small_state(1))


def test_torch_gets_its_metadata_back(tmp_path: Path) -> None:
    """``dcp.save`` returns torch's own Metadata, with the place and a save id in it."""
    metadata = dcp.save({"a": torch.ones(2)}, storage_writer=FsspecStorageWriter(tmp_path / "one"), no_dist=True)
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == str(tmp_path / "one")
    assert metadata.storage_meta.save_id
    assert set(metadata.state_dict_metadata) == {"a"}
