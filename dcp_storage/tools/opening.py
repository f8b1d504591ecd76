"""Opening a checkpoint's folder for the tools."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_storage.options import LoadOptions, SaveOptions
from dcp_storage.session import Opened, OpenStore, open_folder
from dcp_storage.stores.location import Location, parse_location

__all__ = ["Folder", "folder_at"]


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder, or the folder of a run, as a tool sees it.

    Attributes:
        location: where it is.
        storage_options: for fsspec.
        options: concurrency, retries and deadlines.
        opener: opens the bare store; the test kit hands over one that wraps it.
    """

    location: Location
    storage_options: Mapping[str, Any]
    options: SaveOptions | LoadOptions
    opener: OpenStore | None = None

    def open(self) -> Opened:
        """The folder's store, with retry, limit and counting around it."""
        more = {"opener": self.opener} if self.opener else {}
        return open_folder(self.location, self.storage_options, self.options, **more)

    @property
    def name(self) -> str:
        """The folder's own name, the last part of its path."""
        return self.location.path.rpartition("/")[2]

    def parent(self) -> Folder:
        """The folder that this one lies in.

        Raises:
            InvalidLocationError: it lies in none.
        """
        return Folder(self.location.parent(), self.storage_options, self.options, self.opener)

    def child(self, name: str) -> Folder:
        """A folder in this one, opened with the same options; on S3 and GCS by the same connections.

        Raises:
            UntrustedDataError: the name is not a plain path component.
        """
        return Folder(self.location.child(name), self.storage_options, self.options, self.opener)


def folder_at(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> Folder:
    """The folder at a path or URL.

    Raises:
        InvalidLocationError: the path cannot name a folder.
    """
    return Folder(parse_location(path), dict(storage_options or {}), options)
