"""Where the machine plays: a folder, what is in it past the library, and the time of its store."""

from __future__ import annotations

import abc
import os
import secrets
import shutil
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from dcp_storage.store import Store
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.dictstore import DictStore
from tests.machine.model import Seen

if TYPE_CHECKING:
    from tests.servers.endpoint import S3Endpoint

__all__ = ["Bed", "DictBed", "LocalBed", "MemoryBed", "S3Bed"]


class Bed(abc.ABC):
    """One folder, new for every run of the machine.

    Attributes:
        loses: whether requests can lose their reply or arrive late, as over a network.
        ages: whether time can be made to pass.
        exact: whether its times tell two requests apart; else what depends on that is not the same in each replay.
    """

    loses = True
    ages = True
    exact = True
    none = 0.0
    """The grace, in seconds, that spares nothing; below zero where the store's clock counts whole seconds."""

    @abc.abstractmethod
    def open(self) -> Store:
        """A store of its own for one who works on the folder."""

    @abc.abstractmethod
    def snapshot(self) -> dict[str, Seen]:
        """Every file, by name."""

    @abc.abstractmethod
    def put(self, name: str, body: bytes) -> None:
        """Writes a file, behind the library's back."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, behind the library's back."""

    def now(self) -> float:
        """The store's time."""
        return time.time()

    def tick(self) -> None:  # noqa: B027 - a real clock ticks by itself
        """A moment passes, long enough to be seen in the times of files, where that costs nothing."""

    def age(self, seconds: float) -> None:
        """Lets so much time pass."""
        raise ValueError(f"time cannot pass in {self!r}")

    def close(self) -> None:  # noqa: B027 - a dict is gone by itself
        """Throws everything away."""


class DictBed(Bed):
    """A dict; its clock ticks once for every request."""

    def __init__(self) -> None:
        self.store = DictStore(DictStore.Objects(clock=lambda: 1e9))

    def open(self) -> Store:
        return DictStore(self.store.objects)

    def snapshot(self) -> dict[str, Seen]:
        held = self.store.objects.held
        return {name: Seen(each.body, each.modified) for (_, name), each in held.items()}

    def put(self, name: str, body: bytes) -> None:
        self.store.put(name, [memoryview(body)])

    def remove(self, name: str) -> None:
        self.store.delete([name])

    def now(self) -> float:
        return self.store.now()

    def tick(self) -> None:
        self.store.objects.advance(1.0)

    def age(self, seconds: float) -> None:
        self.store.objects.advance(seconds)


class MemoryBed(Bed):
    """A folder of fsspec's ``memory://``."""

    def __init__(self) -> None:
        self.url = f"memory://{secrets.token_hex(6)}/step-1"
        self.root = "/" + self.url.removeprefix("memory://") + "/"

    def open(self) -> Store:
        return open_store(parse_location(self.url), {})

    def snapshot(self) -> dict[str, Seen]:
        return {
            path.removeprefix(self.root): Seen(file.getvalue(), file.modified.timestamp())
            for path, file in self._held().items()
        }

    def put(self, name: str, body: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(self.root + name, body)

    def remove(self, name: str) -> None:
        fsspec.filesystem("memory").rm_file(self.root + name)

    def age(self, seconds: float) -> None:
        for file in self._held().values():
            file.modified -= timedelta(seconds=seconds)

    def close(self) -> None:
        for path in self._held():
            fsspec.filesystem("memory").rm_file(path)

    def _held(self) -> dict[str, Any]:
        return {path: file for path, file in fsspec.filesystem("memory").store.items() if path.startswith(self.root)}


class LocalBed(Bed):
    """A folder on a disk. Nothing is lost on the way to it; time passes by setting back the times of the files.

    Args:
        above: where the folder is made.
    """

    loses = False
    exact = False

    def __init__(self, above: Path) -> None:
        self.folder = above / secrets.token_hex(6)

    def open(self) -> Store:
        return open_store(parse_location(self.folder), {})

    def snapshot(self) -> dict[str, Seen]:
        return {file.name: Seen(file.read_bytes(), file.stat().st_mtime) for file in self._files()}

    def put(self, name: str, body: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(body)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def age(self, seconds: float) -> None:
        for file in self._files():
            then = file.stat().st_mtime - seconds
            os.utime(file, (then, then))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self) -> list[Path]:
        return [file for file in self.folder.iterdir() if file.is_file()] if self.folder.is_dir() else []


class S3Bed(Bed):
    """A folder of a bucket, seen by a plain botocore client. Its server's time cannot be made to pass.

    Args:
        server: the S3 server.
        bucket: on it.
    """

    ages = False
    exact = False
    none = -2.0

    def __init__(self, server: S3Endpoint, bucket: str) -> None:
        self.server = server
        self.bucket = bucket
        self.key = f"{secrets.token_hex(6)}/step-1"
        self._bodies: dict[tuple[str, str], bytes] = {}

    def open(self) -> Store:
        return open_store(parse_location(f"s3://{self.bucket}/{self.key}"), self.server.storage_options)

    def snapshot(self) -> dict[str, Seen]:
        listed = self.server.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.key}/").get("Contents", [])
        seen = {}
        for item in listed:
            which = item["Key"], item["ETag"]
            if which not in self._bodies:
                got = self.server.client.get_object(Bucket=self.bucket, Key=item["Key"])
                self._bodies[which] = got["Body"].read()
            modified = item["LastModified"].timestamp()
            seen[item["Key"].removeprefix(f"{self.key}/")] = Seen(self._bodies[which], modified)
        return seen

    def put(self, name: str, body: bytes) -> None:
        self.server.client.put_object(Bucket=self.bucket, Key=f"{self.key}/{name}", Body=body)

    def remove(self, name: str) -> None:
        self.server.client.delete_object(Bucket=self.bucket, Key=f"{self.key}/{name}")

    def now(self) -> float:
        return datetime.now(timezone.utc).timestamp()
