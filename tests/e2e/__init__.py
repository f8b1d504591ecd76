"""What the end-to-end tests share: places to save to, their content seen past the library, comparisons bit for bit."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_storage import CheckpointError, FsspecStorageReader, FsspecStorageWriter

if TYPE_CHECKING:  # ranks import this module, too, and need no server
    from tests.servers.endpoint import S3Endpoint

__all__ = [
    "ALONE",
    "Place",
    "assert_same",
    "assert_sentence",
    "bits",
    "clear_plan_caches",
    "failure",
    "failures_of",
    "like",
    "load",
    "place_of",
    "raised_by",
    "save",
    "small_state",
]

E = TypeVar("E", bound=BaseException)

ALONE = "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
"""What torch warns of whenever ``no_dist=True``, also where that is what was asked for."""


@dataclass(frozen=True)
class Place:
    """A folder for one checkpoint, and its content as another program sees it.

    Attributes:
        url: the path or URL that writer and reader are given.
        options: their ``storage_options``.
        server: the S3 server, None elsewhere.
    """

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    server: S3Endpoint | None = None

    def writer(self, **options: Any) -> FsspecStorageWriter:
        """A new writer for this folder."""
        return FsspecStorageWriter(self.url, storage_options=self.options, **options)

    def reader(self, **options: Any) -> FsspecStorageReader:
        """A new reader of this folder."""
        return FsspecStorageReader(self.url, storage_options=self.options, **options)

    def child(self, name: str) -> Place:
        """The folder ``name`` in this one."""
        return Place(f"{self.url}/{name}", self.options, self.server)

    def files(self) -> dict[str, int]:
        """Name → bytes of every object in the folder; of S3 by a plain botocore client."""
        if self.server is not None:
            bucket, prefix = self._key("")
            pages = self.server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            found = [item for page in pages for item in page.get("Contents", [])]
            return {item["Key"].removeprefix(prefix): item["Size"] for item in found}
        if self.url.startswith("memory://"):
            root = "/" + self.url.removeprefix("memory://").strip("/") + "/"
            held = fsspec.filesystem("memory").store
            return {path.removeprefix(root): len(body.getvalue()) for path, body in held.items() if root in path}
        return _files_in(self._folder())

    def get(self, name: str) -> bytes:
        """The bytes of one object."""
        if self.server is not None:
            bucket, key = self._key(name)
            body: bytes = self.server.client.get_object(Bucket=bucket, Key=key)["Body"].read()
            return body
        if self.url.startswith("memory://"):
            return bytes(fsspec.filesystem("memory").cat_file(f"{self.url}/{name}"))
        return (self._folder() / name).read_bytes()

    def set(self, name: str, data: bytes) -> None:
        """Writes one object, behind the library's back."""
        if self.server is not None:
            bucket, key = self._key(name)
            self.server.client.put_object(Bucket=bucket, Key=key, Body=data)
        elif self.url.startswith("memory://"):
            fsspec.filesystem("memory").pipe_file(f"{self.url}/{name}", data)
        else:
            self._folder().mkdir(parents=True, exist_ok=True)
            (self._folder() / name).write_bytes(data)

    def remove(self, name: str) -> None:
        """Removes one object, behind the library's back."""
        if self.server is not None:
            bucket, key = self._key(name)
            self.server.client.delete_object(Bucket=bucket, Key=key)
        else:
            (self._folder() / name).unlink()

    def uploads(self) -> list[str]:
        """Keys of the open multipart uploads of the bucket; elsewhere there are none to list."""
        if self.server is None:
            return []
        return [item["Key"] for item in self.server.open_uploads(self._key("")[0])]

    def shards(self) -> list[str]:
        """Names of the shard files, sorted."""
        return sorted(name for name in self.files() if name.endswith(".distcp"))

    def commits(self) -> list[str]:
        """Names of the commit objects, sorted."""
        return sorted(name for name in self.files() if name.startswith(".commit"))

    def manifest(self) -> dict[str, Any]:
        """The committed manifest as plain JSON."""
        name = json.loads(self.get(self.commits()[-1]))["manifest"]["name"]
        return cast("dict[str, Any]", json.loads(self.get(name)))

    def _key(self, name: str) -> tuple[str, str]:
        bucket, _, key = self.url.removeprefix("s3://").partition("/")
        return bucket, f"{key}/{name}"

    def _folder(self) -> Path:
        return Path(self.url.removeprefix("file://"))


def place_of(request: pytest.FixtureRequest, kind: str) -> Place:
    """A new folder.

    Args:
        request: of the test, for its fixtures.
        kind: ``"local"``, ``"file-url"``, ``"memory"``, ``"gcs"``, ``"moto"`` or ``"ministack"``.
    """
    if kind == "gcs":
        from tests.e2e.on_gcs import gcs_place

        return gcs_place(request)
    if kind == "memory":
        return Place(f"memory://{secrets.token_hex(6)}/step-1")
    if kind in {"local", "file-url"}:
        folder = request.getfixturevalue("tmp_path") / "step-1"
        return Place(f"file://{folder}" if kind == "file-url" else str(folder))
    server: S3Endpoint = request.getfixturevalue(kind)
    make_bucket: Callable[[S3Endpoint], str] = request.getfixturevalue("bucket")
    return Place(f"s3://{make_bucket(server)}/run/step-1", server.storage_options, server)


def save(state: dict[str, Any], writer: FsspecStorageWriter, **options: Any) -> None:
    """Saves from this process alone."""
    dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: dict[str, Any], reader: FsspecStorageReader, **options: Any) -> None:
    """Loads into this process alone."""
    dcp.load(state, storage_reader=reader, no_dist=True, **options)


def failures_of(error: CheckpointException) -> dict[int, BaseException]:
    """Rank → what it raised."""
    return {rank: failed[0] for rank, failed in error.failures.items()}


def raised_by(call: Callable[[], object]) -> dict[int, BaseException]:
    """What every rank raised in ``call``, which must fail."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return failures_of(caught.value)


def failure(kind: type[E], call: Callable[[], object]) -> E:
    """The error of ``call`` in this one process, which must be of exactly this class."""
    error = raised_by(call)[0]
    assert type(error) is kind, repr(error)
    if isinstance(error, CheckpointError):
        assert_sentence(str(error))
    return error


def assert_sentence(text: str) -> None:
    """A message for people: on one line, not too long, without a traceback."""
    assert text.strip()
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 600


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, in order, as bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def assert_same(found: Any, wanted: Any, at: str = "state") -> None:
    """Both hold the same values, of the same types; tensors bit for bit."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert (found.dtype, tuple(found.shape)) == (wanted.dtype, tuple(wanted.shape)), at
        assert bits(found) == bits(wanted), at
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted), at
        for key, value in wanted.items():
            assert_same(found[key], value, f"{at}[{key!r}]")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), at
        for number, value in enumerate(wanted):
            assert_same(found[number], value, f"{at}[{number}]")
    else:
        assert type(found) is type(wanted), at
        assert found == wanted, at


def like(state: Any, fill: float = -7) -> Any:
    """A template of a state: tensors full of a sentinel, None for objects."""
    if isinstance(state, torch.Tensor):
        return torch.full(state.shape, fill, dtype=torch.float32).to(state.dtype)
    if isinstance(state, Mapping):
        return {key: like(value, fill) for key, value in state.items()}
    if isinstance(state, list):
        return [like(value, fill) for value in state]
    return None


def _files_in(folder: Path) -> dict[str, int]:
    # A rank at work beside us may rename or remove a file between the listing and the stat: it is then not there.
    found: dict[str, int] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            found[file.name] = file.stat().st_size
    return found


def small_state(seed: int = 0) -> dict[str, Any]:
    """Some tensors and objects, other values for another seed."""
    random = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(37, 19, generator=random),
            "bias": torch.randn(19, generator=random, dtype=torch.float64),
            "half": torch.randn(5, 7, generator=random).to(torch.bfloat16),
        },
        "ids": torch.randint(-(2**60), 2**60, (101,), generator=random),
        "step": 500_000 + seed,
        "name": f"run-{seed}",
    }


def clear_plan_caches() -> None:
    """Forgets the plans that planners keep on their class, for all saves of a process."""
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{cache}").clear()
