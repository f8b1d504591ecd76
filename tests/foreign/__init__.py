"""Filesystems that nobody wrote a store for, and object stores with habits of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dcp_storage.store import Store
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store
from tests.e2e import Place

if TYPE_CHECKING:  # ranks import this module, too, and need no server
    from tests.servers.azurite import Azurite
    from tests.servers.endpoint import S3Endpoint
    from tests.servers.fake_gcs import FakeGcs
    from tests.servers.ftp import FtpServer
    from tests.servers.gcs import GcsServer

__all__ = ["opened", "place_on"]


@contextmanager
def opened(url: str, options: Mapping[str, Any] | None = None) -> Iterator[Store]:
    """The store that a writer or reader with this URL and these ``storage_options`` would use."""
    store = open_store(parse_location(url), options)
    try:
        yield store
    finally:
        store.close()


def place_on(request: pytest.FixtureRequest, kind: str) -> Place:
    """A new folder.

    Args:
        request: of the test, for its fixtures.
        kind: ``"local"``, ``"dir"``, or the name of a server's fixture.
    """
    name = secrets.token_hex(6)
    if kind == "local":
        return Place(f"{request.getfixturevalue('tmp_path')}/{name}")
    if kind == "dir":
        return Place(f"dir::file://{request.getfixturevalue('tmp_path')}/{name}")
    if kind == "ftp":
        ftp: FtpServer = request.getfixturevalue(kind)
        return Place(f"{ftp.url}/{name}/step-1", ftp.storage_options)
    if kind == "azurite":
        azurite: Azurite = request.getfixturevalue(kind)
        azurite.make_container(name)
        return Place(f"az://{name}/run/step-1", azurite.storage_options)
    if kind in {"strict", "fake_gcs"}:
        gcs: GcsServer | FakeGcs = request.getfixturevalue(kind)
        gcs.make_bucket(name)
        return Place(f"gs://{name}/run/step-1", gcs.storage_options)
    server: S3Endpoint = request.getfixturevalue(kind)
    make_bucket: Callable[[S3Endpoint], str] = request.getfixturevalue("bucket")
    return Place(f"s3://{make_bucket(server)}/run/step-1", server.storage_options, server)
