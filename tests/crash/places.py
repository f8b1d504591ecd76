"""The three kinds of store, past the library: what is in a folder, what is open in it, and how it is set up."""

from __future__ import annotations

import abc
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_storage.stores.local import LocalStore
from dcp_storage.testing.faults import HEALTHY, NamedFault
from tests.crash.gate import Gate
from tests.crash.points import Kept
from tests.servers.endpoint import S3Endpoint
from tests.servers.gcs import GcsServer
from tests.servers.leftovers import PART_NOTE

__all__ = ["GcsPlace", "LocalPlace", "Place", "S3Place", "apply_kept"]


class Place(abc.ABC):
    """A store, with one folder for each trial.

    Attributes:
        name: for the table.
        seams: where a process can be cut on it.
        gate: the proxy before the server; None on a disk.
        waits: seconds until what was written counts as older than now by the store's clock.
        uploads_last: whether open uploads outlive a process.
    """

    name: str
    seams: tuple[str, ...]
    gate: Gate | None = None
    waits: float = 0.0
    uploads_last = True

    def __init__(self) -> None:
        self._count = 0

    def number(self) -> str:
        """The name of a new trial's folder, unlike any other's."""
        self._count += 1
        return f"t{self._count:05d}"

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec, straight to the server."""
        return {}

    @property
    def cut_options(self) -> dict[str, Any]:
        """For fsspec, through the gate."""
        return {}

    @abc.abstractmethod
    def url(self, trial: str) -> str:
        """The folder of a trial."""

    @abc.abstractmethod
    def names(self, url: str) -> set[str]:
        """Names of all that is in a folder."""

    @abc.abstractmethod
    def read(self, url: str, name: str) -> bytes:
        """One object."""

    @abc.abstractmethod
    def write(self, url: str, name: str, data: bytes) -> None:
        """Writes one object."""

    @abc.abstractmethod
    def clear(self, url: str) -> None:
        """Removes the objects in a folder and below; an upload that was left open stays."""

    def open_uploads(self, url: str) -> list[str]:
        """Names of the uploads that are open in a folder."""
        return []

    def leave_upload(self, url: str, name: str) -> None:  # noqa: B027 - a disk knows no uploads
        """Begins an upload that nobody ends."""

    def files(self, url: str) -> dict[str, bytes]:
        """All that is in a folder."""
        return {name: self.read(url, name) for name in self.names(url)}

    def fill(self, url: str, files: Mapping[str, bytes]) -> None:
        """Puts files into a folder."""
        for name, data in files.items():
            self.write(url, name, data)


class LocalPlace(Place):
    """A folder of this machine.

    Args:
        base: an empty folder.
    """

    name = "local"
    seams = ("store", "disk")
    uploads_last = False

    def __init__(self, base: Path) -> None:
        super().__init__()
        base.mkdir(parents=True, exist_ok=True)
        self._base = base

    def url(self, trial: str) -> str:
        return str(self._base / trial / "run")

    def names(self, url: str) -> set[str]:
        return {path.name for path in Path(url).iterdir() if path.is_file()} if Path(url).is_dir() else set()

    def read(self, url: str, name: str) -> bytes:
        return Path(url, name).read_bytes()

    def write(self, url: str, name: str, data: bytes) -> None:
        Path(url).mkdir(parents=True, exist_ok=True)
        Path(url, name).write_bytes(data)

    def clear(self, url: str) -> None:
        shutil.rmtree(Path(url).parent, ignore_errors=True)


def apply_kept(kept: Kept, fault: NamedFault = HEALTHY) -> None:
    """Does a call of a local store that was kept, as this process; what it is refused with is nobody's."""
    store = fault.store(LocalStore(kept.folder))
    if kept.operation == "put":
        store.put(kept.name or "", [memoryview(kept.data)])
    elif kept.operation == "create":
        try:
            store.create(kept.name or "", kept.data)
        except FileExistsError:
            return
    elif kept.operation == "delete":
        store.delete(kept.names)
    elif kept.operation == "write_part":
        path = Path(kept.folder, kept.name or "")
        if path.exists():  # pages that a dead process had written, and that reach the file only now
            fd = os.open(path, os.O_WRONLY)
            try:
                os.pwrite(fd, kept.data, kept.offset)
            finally:
                os.close(fd)
    else:
        raise ValueError(f"{kept.operation} cannot be made again")


class S3Place(Place):
    """A bucket of an S3 server.

    Args:
        server: the server.
        gate: before it.
    """

    seams = ("store", "http")
    waits = 1.1

    def __init__(self, server: S3Endpoint, gate: Gate) -> None:
        super().__init__()
        self.name = f"s3 ({server.name})"
        self.gate = gate
        self._server = server
        self._client = server.client
        self._bucket = f"crash-{secrets.token_hex(6)}"
        self._client.create_bucket(Bucket=self._bucket)

    @property
    def options(self) -> dict[str, Any]:
        return self._server.storage_options

    @property
    def cut_options(self) -> dict[str, Any]:
        assert self.gate is not None
        return self._server.behind(self.gate.url).storage_options

    def url(self, trial: str) -> str:
        return f"s3://{self._bucket}/{trial}/run"

    def _key(self, url: str, name: str = "") -> str:
        return f"{url.removeprefix(f's3://{self._bucket}/')}/{name}"

    def _listed(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def names(self, url: str) -> set[str]:
        prefix = self._key(url)
        return {key.removeprefix(prefix) for key in self._listed(prefix)}

    def read(self, url: str, name: str) -> bytes:
        body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(url, name))["Body"].read()
        return body

    def write(self, url: str, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._key(url, name), Body=data)

    def clear(self, url: str) -> None:
        prefix = self._key(url).rpartition("/run")[0] + "/"
        keys = [{"Key": key} for key in self._listed(prefix)]
        if keys:
            self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})

    def _uploads(self, prefix: str) -> list[dict[str, Any]]:
        found = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix)
        return [item for item in found.get("Uploads", ()) if item["Key"].startswith(prefix)]

    def open_uploads(self, url: str) -> list[str]:
        prefix = self._key(url)
        return [item["Key"].removeprefix(prefix) for item in self._uploads(prefix)]

    def leave_upload(self, url: str, name: str) -> None:
        key = self._key(url, name)
        begun = self._client.create_multipart_upload(Bucket=self._bucket, Key=key)
        self._client.upload_part(
            Bucket=self._bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"left by a dead attempt"
        )


class GcsPlace(Place):
    """A bucket of the strict GCS server.

    Args:
        server: the server.
        gate: before it.
    """

    name = "gcs (strict)"
    seams = ("store", "http")
    waits = 1.1

    def __init__(self, server: GcsServer, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self._server = server
        self._bucket = f"crash-{secrets.token_hex(6)}"
        server.make_bucket(self._bucket)

    @property
    def options(self) -> dict[str, Any]:
        return self._server.storage_options

    @property
    def cut_options(self) -> dict[str, Any]:
        assert self.gate is not None
        return {**self._server.storage_options, "endpoint_url": self.gate.url}

    def url(self, trial: str) -> str:
        return f"gs://{self._bucket}/{trial}/run"

    def _key(self, url: str, name: str = "") -> str:
        return f"{url.removeprefix(f'gs://{self._bucket}/')}/{name}"

    def names(self, url: str) -> set[str]:
        prefix = self._key(url)
        return {key.removeprefix(prefix) for key in self._server.names(self._bucket) if key.startswith(prefix)}

    def read(self, url: str, name: str) -> bytes:
        return self._server.get(self._bucket, self._key(url, name))

    def write(self, url: str, name: str, data: bytes) -> None:
        self._server.set(self._bucket, self._key(url, name), data)

    def clear(self, url: str) -> None:
        prefix = self._key(url).rpartition("/run")[0] + "/"
        with self._server.api.world.lock:
            held = self._server.api.world.bucket(self._bucket).objects
            for key in [key for key in held if key.startswith(prefix)]:
                del held[key]

    def open_uploads(self, url: str) -> list[str]:
        prefix = self._key(url)
        with self._server.api.world.lock:
            held = self._server.api.world.bucket(self._bucket).objects.values()
            parts = [one.name for one in held if PART_NOTE in (one.fields.get("metadata") or {})]
        return [name.removeprefix(prefix) for name in parts if name.startswith(prefix)]

    def leave_upload(self, url: str, name: str) -> None:
        with self._server.api.world.lock:
            world = self._server.api.world
            key = f"{self._key(url, name)}.{'p' * 16}"
            world.write(world.bucket(self._bucket), key, b"left", {"metadata": {PART_NOTE: "u" * 16}})
