"""Whole checkpoints on GCS: the strict server of the tests behind the real gcsfs."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_storage import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FsspecStorageReader,
    FsspecStorageWriter,
    NotCommittedError,
    SaveOptions,
)
from dcp_storage.errors import ObjectNotFoundError
from dcp_storage.fence import delete_folder, prune_folder
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, assert_same, failure, like, load, save, small_state
from tests.servers.gcs import GcsServer, gcs_server
from tests.servers.gcs_folder import GcsFolder

pytestmark = pytest.mark.filterwarnings(ALONE)

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with gcs_server() as running:
        yield running


@pytest.fixture
def folder(server: GcsServer) -> GcsFolder:
    return GcsFolder.new(server)


def writer_of(folder: GcsFolder, **options: Any) -> FsspecStorageWriter:
    return FsspecStorageWriter(folder.url, storage_options=folder.server.storage_options, **options)


def reader_of(folder: GcsFolder, **options: Any) -> FsspecStorageReader:
    return FsspecStorageReader(folder.url, storage_options=folder.server.storage_options, **options)


def names_in(folder: GcsFolder) -> list[str]:
    return [name.removeprefix("run/step-1/") for name in folder.names()]


def test_a_save_comes_back_and_is_committed(folder: GcsFolder) -> None:
    """What was saved to gs:// is loaded again, bit for bit, under an atomic commit and the plain names."""
    writer = writer_of(folder)
    save(small_state(), writer)
    found = like(small_state())
    load(found, reader_of(folder))
    assert_same(found, small_state())
    assert names_in(folder) == [".commit", ".manifest", ".metadata", "__0_0.distcp"]
    commit = json.loads(folder.get(".commit"))
    assert (commit["state"], commit["single_writer"]) == ("committed", False)


def test_a_large_tensor_is_composed_and_leaves_no_parts(folder: GcsFolder) -> None:
    """A tensor of many parts is one object in the end, equal in every element, and its parts are gone."""
    state = {"big": torch.arange(3 * MIB, dtype=torch.float32), "small": torch.ones(3)}
    save(state, writer_of(folder, options=SaveOptions(part_size=256 * 1024)))
    found = like(state)
    load(found, reader_of(folder))
    assert_same(found, state)
    assert names_in(folder) == [".commit", ".manifest", ".metadata", "__0_0.distcp"]


def test_a_second_save_is_refused_and_an_overwrite_replaces(folder: GcsFolder) -> None:
    """Without overwrite the first stays; with it the second commits as number 2 and the first one's files go."""
    save({"a": torch.ones(5)}, writer_of(folder))
    failure(CheckpointExistsError, lambda: save({"a": torch.zeros(5)}, writer_of(folder)))
    save({"a": torch.full((5,), 2.0)}, writer_of(folder, overwrite=True))
    found = {"a": torch.zeros(5)}
    load(found, reader_of(folder))
    assert torch.equal(found["a"], torch.full((5,), 2.0))
    assert {".commit", ".commit.2"} <= set(names_in(folder))
    assert len([name for name in names_in(folder) if name.endswith(".distcp")]) == 1


def test_an_altered_byte_is_named(folder: GcsFolder) -> None:
    """A flipped byte of a shard is found, with the key and the file."""
    save({"a": torch.ones(5000)}, writer_of(folder))
    item = json.loads(folder.get(".manifest"))["items"][0]
    data = bytearray(folder.get("__0_0.distcp"))
    data[item["offset"] + item["payload_offset"] + 77] ^= 1
    folder.set("__0_0.distcp", bytes(data))
    error = failure(CorruptCheckpointError, lambda: load({"a": torch.zeros(5000)}, reader_of(folder)))
    assert (error.key, error.file) == ("a", "__0_0.distcp")


def test_deleting_leaves_commits_only(folder: GcsFolder) -> None:
    """After a delete a load says so; a prune with no grace leaves nothing at all but commit objects."""
    save({"a": torch.ones(5)}, writer_of(folder))
    delete_folder(folder.open())
    failure(NotCommittedError, lambda: load({"a": torch.zeros(5)}, reader_of(folder)))
    prune_folder(folder.open(), grace=0)
    assert all(name.startswith(".commit") for name in names_in(folder))


def test_an_empty_place_and_a_missing_bucket(server: GcsServer, folder: GcsFolder) -> None:
    """Nothing there is said as that; a bucket that does not exist is named, and not made by a save."""
    failure(CheckpointNotFoundError, lambda: load({"a": torch.zeros(5)}, reader_of(folder)))
    nowhere = FsspecStorageWriter("gs://no-such-bucket/run", storage_options=server.storage_options)
    error = failure(ObjectNotFoundError, lambda: save({"a": torch.ones(5)}, nowhere))
    assert error.errno == errno.ENOENT
    assert "no-such-bucket" in str(error)


def _stock_load(rank: int, world: int, url: str, options: dict[str, Any]) -> torch.Tensor:
    found = {"a": torch.zeros(1000)}
    dcp.load(found, storage_reader=FsspecReader(url, **options), no_dist=True)
    return found["a"]


def test_stock_torch_reads_it(folder: GcsFolder, ranks: RankPool) -> None:
    """Stock FsspecReader loads what was saved to gs://, every element."""
    state = {"a": torch.arange(1000, dtype=torch.float32)}
    save(state, writer_of(folder))
    env = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    options = folder.server.storage_options
    (found,) = ranks.run(_stock_load, 1, folder.url, options, init=False, env=env)
    assert torch.equal(found, state["a"])


def _save_and_load(rank: int, world: int, url: str, options: dict[str, Any]) -> bool:
    state = {f"own-{rank}": torch.full((1000,), float(rank)), "all": torch.arange(50)}
    dcp.save(state, storage_writer=FsspecStorageWriter(url, storage_options=options))
    found = {f"own-{rank}": torch.zeros(1000), "all": torch.zeros(50, dtype=torch.int64)}
    dcp.load(found, storage_reader=FsspecStorageReader(url, storage_options=options))
    return all(torch.equal(found[key], state[key]) for key in state)


def test_four_ranks_save_and_load(folder: GcsFolder, ranks: RankPool) -> None:
    """Four ranks save to one folder on GCS, and each gets its own and the shared tensor back."""
    assert ranks.run(_save_and_load, 4, folder.url, folder.server.storage_options) == [True] * 4
    assert len([name for name in names_in(folder) if name.endswith(".distcp")]) == 4
