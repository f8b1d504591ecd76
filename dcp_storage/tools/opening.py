"""Opening a checkpoint's folder for the tools."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dcp_storage.errors import CheckpointNotFoundError, InvalidLocationError, StoreError
from dcp_storage.options import LoadOptions, SaveOptions
from dcp_storage.session import Opened, OpenStore, open_folder
from dcp_storage.stores.location import Location, parse_location, without_password
from dcp_storage.wrappers import Request, RequestStore

__all__ = ["Folder", "folder_at", "must_be_there"]

T = TypeVar("T")


class _Folders(RequestStore):
    """Tells a path that is a file from a store that fails: the one is a slip of the user, the other is not."""

    def request(self, request: Request, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreError as error:
            if error.errno != errno.ENOTDIR:
                raise
            raise _no_folder(self.url, error) from error


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
        opened = open_folder(self.location, self.storage_options, self.options, **more)
        return dataclasses.replace(opened, store=_Folders(opened.store))

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


def must_be_there(folder: Folder) -> None:
    """Refuses a local folder that is not there, for tools that try a store out and would have to leave it behind.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        InvalidLocationError: it is a file.
        StoreError: it cannot be looked at.
    """
    url = folder.location.url
    if folder.location.protocol != "file":
        return
    try:
        mode = Path(folder.location.path).stat().st_mode
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{url}: there is no such folder; make it first, so that nothing has to be left behind.", path=url
        ) from error
    except NotADirectoryError as error:
        raise _no_folder(url, error) from error
    except OSError as error:
        raise StoreError(f"{url} cannot be looked at: {error.strerror}.", path=url, cause=error) from error
    if not stat.S_ISDIR(mode):
        raise _no_folder(url, None)


def _no_folder(url: str, cause: BaseException | None) -> InvalidLocationError:
    shown = without_password(url)
    return InvalidLocationError(
        f"{shown} is no folder: it is a file, or lies below one. Give the folder that the file is in.",
        path=shown,
        cause=cause,
    )
