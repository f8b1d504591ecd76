"""The servers for this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.azurite import Azurite, azurite_server
from tests.servers.endpoint import S3Endpoint
from tests.servers.fake_gcs import FakeGcs, fake_gcs_server
from tests.servers.ftp import FtpServer, ftp_server
from tests.servers.rclone import rclone_server


@pytest.fixture(scope="session")
def ftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FtpServer]:
    """One FTP server for the whole run."""
    base = tmp_path_factory.mktemp("ftp")
    (base / "root").mkdir()
    with ftp_server(base / "root", base / "log") as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """One Azurite for the whole run; takes seconds to start."""
    with azurite_server(tmp_path_factory.mktemp("azurite") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """One ``rclone serve s3`` for the whole run."""
    with rclone_server(tmp_path_factory.mktemp("rclone")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    """One fake-gcs-server for the whole run."""
    with fake_gcs_server(tmp_path_factory.mktemp("fake-gcs") / "log") as server:
        yield server
