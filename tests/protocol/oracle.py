"""What a folder holds, found out by hand: plain JSON, plain zlib, plain torch.load; nothing of the code under test."""

from __future__ import annotations

import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faults import HEALTHY, NamedFault
from dcp_storage.wrappers import Request, RequestStore

__all__ = [
    "BrokenError",
    "Hooked",
    "Killed",
    "attempt_to",
    "files_of",
    "folder_of",
    "highest",
    "loaded",
    "reader_on",
    "save_to",
    "stock_view",
    "writer_on",
]

T = TypeVar("T")


class BrokenError(Exception):
    """A folder says that something is committed, and it is not whole."""


class Killed(BaseException):
    """The process is gone: nothing that runs afterwards may reach the store."""


# -- what is there -----------------------------------------------------------------------------------------------------


def files_of(place: DictStore | Path) -> dict[str, bytes]:
    """Every file in a folder, by name."""
    if isinstance(place, Path):
        return {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()} if place.exists() else {}
    with place.objects.lock:
        return {name: held.body for (folder, name), held in place.objects.held.items() if folder == place.folder}


def highest(files: Mapping[str, bytes]) -> tuple[int, dict[str, Any] | None]:
    """The number of the highest commit object and what it says; (0, None) where there is none."""
    numbers = {1: ".commit"} if ".commit" in files else {}
    for name in files:
        if re.fullmatch(r"\.commit\.[1-9][0-9]*", name) and name != ".commit.1":
            numbers[int(name[8:])] = name
    if not numbers:
        return 0, None
    said: dict[str, Any] = json.loads(files[numbers[max(numbers)]])
    return max(numbers), said


def loaded(files: Mapping[str, bytes]) -> dict[str, Any] | None:
    """Every value of the committed checkpoint, with its tensors; None where nothing is committed.

    Raises:
        BrokenError: something is committed and not whole.
    """
    _, said = highest(files)
    if said is None or said["state"] == "void":
        return None
    ref = said["manifest"]
    body = files.get(ref["name"])
    if body is None or len(body) != ref["size"] or zlib.crc32(body) != ref["crc32"]:
        raise BrokenError(f"the manifest {ref['name']} is gone or changed")
    manifest = json.loads(body)
    for record in manifest["files"]:
        found = files.get(record["name"])
        if found is None or len(found) != record["size"] or zlib.crc32(found) != record["crc32"]:
            raise BrokenError(f"the file {record['name']} is gone or changed")
    values = {}
    for item in manifest["items"]:
        file = files[manifest["files"][item["file"]]["name"]]
        raw = file[item["offset"] : item["offset"] + item["length"]]
        values[item["key"]] = torch.load(io.BytesIO(raw), weights_only=True)
    return values


def stock_view(files: Mapping[str, bytes]) -> set[str] | None:
    """The files that ``.metadata`` names; None where there is no such file."""
    if ".metadata" not in files:
        return None
    metadata = pickle.loads(files[".metadata"])
    return {info.relative_path for info in metadata.storage_data.values()}


# -- getting there -----------------------------------------------------------------------------------------------------


class Hooked(RequestStore):
    """Calls a function before and one after each request.

    Args:
        inner: the store that does the work.
        before: called with the request; what it raises is what the caller gets, and nothing is sent.
        after: called with the request once it has taken effect.
    """

    def __init__(
        self,
        inner: Store,
        before: Callable[[Request], None] = lambda request: None,
        after: Callable[[Request], None] = lambda request: None,
    ) -> None:
        super().__init__(inner)
        self.before = before
        self.after = after

    def request(self, request: Request, call: Callable[[], T]) -> T:
        self.before(request)
        answer = call()
        self.after(request)
        return answer


def folder_of(store: Store) -> DictStore:
    """The dict under any number of wrappers."""
    while not isinstance(store, DictStore):
        store = store.inner  # type: ignore[attr-defined]
    return store


def writer_on(store: Store, fault: NamedFault = HEALTHY, **options: Any) -> FsspecStorageWriter:
    """A writer whose folder is this store, whatever its path says."""
    writer = FsspecStorageWriter("/nowhere", **options)
    writer._opener = lambda location, storage_options, max_concurrency: store
    return fault.in_writer(writer)


def reader_on(store: Store, fault: NamedFault = HEALTHY, **options: Any) -> FsspecStorageReader:
    """A reader whose folder is this store, whatever its path says."""
    reader = FsspecStorageReader("/nowhere", **options)
    reader._opener = lambda location, storage_options, max_concurrency: store
    return fault.in_reader(reader)


def attempt_to(call: Callable[[], object]) -> BaseException | None:
    """What a call raised, out of torch's wrapping; None where it returned."""
    try:
        call()
    except CheckpointException as error:
        failure: BaseException = error.failures[min(error.failures)][0]
        return failure
    except (Exception, Killed) as error:  # noqa: BLE001 - the error is the result
        return error
    return None


def save_to(writer: FsspecStorageWriter, state: dict[str, Any]) -> BaseException | None:
    """One ``dcp.save`` without ranks; what it raised, None where it returned."""
    return attempt_to(lambda: dcp.save(dict(state), storage_writer=writer, no_dist=True))
