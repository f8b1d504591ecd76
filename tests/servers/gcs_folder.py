"""A folder in a bucket of a GCS server, for the store's tests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_storage.stores.gcs import GcsStore, open_gcs
from tests.servers.fake_gcs import FakeGcs
from tests.servers.gcs import GcsServer

__all__ = ["GcsFolder"]


@dataclass(frozen=True)
class GcsFolder:
    """A folder; a location for ``open_gcs``, and the oracle's view of it.

    Attributes:
        server: the server.
        key: the folder's key.
        bucket: its bucket, a new one.
    """

    server: GcsServer | FakeGcs
    key: str = "run/step-1"
    bucket: str = field(default_factory=lambda: f"bucket-{secrets.token_hex(6)}")

    @classmethod
    def new(cls, server: GcsServer | FakeGcs, key: str = "run/step-1") -> GcsFolder:
        """A folder in a bucket that is made here."""
        folder = cls(server, key)
        server.make_bucket(folder.bucket)
        return folder

    @property
    def url(self) -> str:
        return f"gs://{self.path}"

    @property
    def path(self) -> str:
        return f"{self.bucket}/{self.key}"

    def at(self, key: str) -> GcsFolder:
        """Another folder of the same bucket."""
        return GcsFolder(self.server, key, self.bucket)

    def open(self, options: Mapping[str, Any] | None = None, *, client: int = 1) -> GcsStore:
        """A store; ``options`` on top of the server's. Another ``client`` has a session and a memory of its own."""
        mine = {**self.server.storage_options, "block_size": client << 20, **(options or {})}
        return open_gcs(self, mine, max_concurrency=8)

    def get(self, name: str) -> bytes:
        """An object's bytes, without the store."""
        return self.server.get(self.bucket, f"{self.key}/{name}")

    def set(self, name: str, data: bytes) -> None:
        """Writes an object, without the store."""
        self.server.set(self.bucket, f"{self.key}/{name}", data)

    def names(self) -> list[str]:
        """All names of the bucket, without the store."""
        return self.server.names(self.bucket)
