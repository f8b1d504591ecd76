"""Manifests that are well formed and lie: a load ends with an error that says so."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import LoadOptions
from dcp_storage.commit_object import new_commit
from dcp_storage.errors import CheckpointError
from dcp_storage.records import ManifestRef, encode_commit
from dcp_storage.testing.dictstore import DictStore
from tests.protocol.oracle import attempt_to, files_of, reader_on, save_to, writer_on

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

W = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def item(body: dict[str, Any], key: str = "w") -> dict[str, Any]:
    found: dict[str, Any] = next(i for i in body["items"] if i["key"] == key)
    return found


def _item(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: item(body).update(changes)


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no item": lambda body: body["items"].remove(item(body)),
    "another file's name": lambda body: body["files"][0].update(name="notes.txt", size=10**6),
    "a file that is not there": lambda body: body["files"][0].update(name="__9_9.distcp"),
    "a longer file": lambda body: body["files"][0].update(size=10**12),
    "another dtype": _item(dtype="float64"),
    "no such dtype": _item(dtype="float7"),
    "a dtype that is a module": _item(dtype="distributed"),
    "a larger shape": _item(shape=[2**40, 2**20]),
    "another shape of as many elements": _item(shape=[6, 4]),
    "strides that stay in one place": _item(stride=[0, 0]),
    "items that overlap": lambda body: item(body).update(offset=item(body, "x")["offset"] + 1, blocks=[]),
    "wide strides": _item(stride=[2**60, 2**60], blocks=[]),
    "other sums": _item(blocks=[1]),
    "small blocks": _item(block=1, blocks=[1] * 96),
    "a transform": _item(transforms=["zstd"], dtype=None, shape=None),
    "an object": lambda body: body["entries"].update(w={"kind": "bytes"}),
    "an unknown layout": lambda body: body["entries"]["w"].update(layout="os"),
    "a huge tensor": lambda body: body["entries"]["w"].update(
        size=[2**40, 6], chunks=[{"offsets": [0, 0], "sizes": [2**40, 6]}]
    ),
    "a chunk elsewhere": lambda body: body["entries"]["w"].update(
        size=[8, 6], chunks=[{"offsets": [4, 0], "sizes": [4, 6]}]
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_manifest_ends_in_one_of_our_errors(lie: Callable[[dict[str, Any]], None]) -> None:
    """A committed manifest whose facts do not fit the files or each other: refused, typed, within bounds of memory."""
    store = DictStore()
    assert save_to(writer_on(store), {"w": W, "x": torch.ones(3)}) is None
    body = json.loads(files_of(store)[".manifest"])
    lie(body)
    data = json.dumps(body).encode()
    store.put(".manifest", [memoryview(data)])
    commit = new_commit(1, "a", manifest=ManifestRef(".manifest", len(data), zlib.crc32(data)))
    store.put(".commit", [memoryview(encode_commit(commit))])
    target = {"w": torch.full((4, 6), -1.0)}
    reader = reader_on(store, options=LoadOptions(attempts=1, memory_budget=2**20, part_size=2**16))
    raised = attempt_to(lambda: dcp.load(target, storage_reader=reader, no_dist=True))
    # The default planner finds some of these before any hook of ours, with a ValueError of its own.
    assert isinstance(raised, (CheckpointError, ValueError)), repr(raised)
