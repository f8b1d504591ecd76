"""Fixtures for the object stores; import them into a ``conftest.py``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from tests.servers.endpoint import S3Endpoint
from tests.servers.gcs import GcsServer, gcs_server
from tests.servers.launchers import ministack_server, moto_server, seaweedfs_server

__all__ = ["bucket", "ministack", "moto", "seaweedfs", "strict"]


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Endpoint]:
    """One moto for the whole run."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """One ministack for the whole run."""
    with ministack_server(tmp_path_factory.mktemp("ministack")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """One seaweedfs for the whole run; takes seconds to start."""
    with seaweedfs_server(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def strict() -> Iterator[GcsServer]:
    """One strict GCS server for the whole run."""
    with gcs_server() as server:
        yield server


@pytest.fixture
def bucket() -> Callable[[S3Endpoint], str]:
    """Makes a new bucket on a server and returns its name, unlike any other of the run."""

    def make(endpoint: S3Endpoint) -> str:
        name = f"bucket-{secrets.token_hex(6)}"
        endpoint.make_bucket(name)
        return name

    return make
