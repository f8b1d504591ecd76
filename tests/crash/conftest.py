"""The stores of the crash tests, each with the processes that are killed on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.crash.gate import Gate
from tests.crash.places import GcsPlace, LocalPlace, S3Place
from tests.crash.trials import PRELOAD
from tests.servers.endpoint import S3Endpoint
from tests.servers.gcs import GcsServer

__all__ = ["crew", "gcs_place", "local_place", "s3_place"]


@pytest.fixture(scope="session")
def crew() -> Iterator[RankPool]:
    """Forks the processes that are killed; has imported all that they need."""
    with RankPool(preload=PRELOAD) as pool:
        yield pool


@pytest.fixture
def local_place(tmp_path: Path) -> LocalPlace:
    """A folder of this machine."""
    return LocalPlace(tmp_path / "disk")


@pytest.fixture
def s3_place(ministack: S3Endpoint) -> Iterator[S3Place]:
    """A bucket of ministack behind a gate."""
    with Gate(ministack.endpoint_url) as gate:
        yield S3Place(ministack, gate)


@pytest.fixture
def gcs_place(strict: GcsServer) -> Iterator[GcsPlace]:
    """A bucket of the strict server behind a gate."""
    with Gate(strict.url) as gate:
        yield GcsPlace(strict, gate)
