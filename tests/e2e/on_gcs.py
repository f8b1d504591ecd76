"""The place of a checkpoint on the strict GCS server, and its content without a request."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.e2e import Place
from tests.servers.gcs import GcsServer
from tests.servers.gcs_folder import GcsFolder
from tests.servers.leftovers import open_on_gcs

__all__ = ["GcsPlace", "gcs_place"]


@dataclass(frozen=True, kw_only=True)
class GcsPlace(Place):
    """A folder of a bucket on the strict server.

    Attributes:
        folder: the oracle's view of it.
    """

    folder: GcsFolder = field(repr=False)

    def child(self, name: str) -> Place:
        """The folder ``name`` in this one."""
        return GcsPlace(f"{self.url}/{name}", self.options, folder=self.folder.at(f"{self.folder.key}/{name}"))

    def files(self) -> dict[str, int]:
        """Name → bytes of every object in the folder and below it."""
        prefix = f"{self.folder.key}/"
        found = [name.removeprefix(prefix) for name in self.folder.names() if name.startswith(prefix)]
        return {name: len(self.folder.get(name)) for name in found}

    def get(self, name: str) -> bytes:
        """The bytes of one object."""
        return self.folder.get(name)

    def set(self, name: str, data: bytes) -> None:
        """Writes one object, behind the library's back."""
        self.folder.set(name, data)

    def uploads(self) -> list[str]:
        """The open sessions and the parts that are not composed, of the bucket."""
        assert isinstance(self.folder.server, GcsServer)
        return [text for text in open_on_gcs(self.folder.server) if f" {self.folder.bucket}/" in text.partition(":")[2]]


def gcs_place(request: pytest.FixtureRequest) -> GcsPlace:
    """A new folder in a new bucket."""
    server: GcsServer = request.getfixturevalue("strict")
    folder = GcsFolder.new(server)
    return GcsPlace(folder.url, server.storage_options, folder=folder)
