"""Fixtures that every test may use: the S3 servers on loopback and a pool of warm rank workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.servers.fixtures import bucket, ministack, moto, seaweedfs

__all__ = ["bucket", "ministack", "moto", "ranks", "seaweedfs"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool that runs a function on any number of real gloo ranks."""
    with RankPool(preload=("pytest", "dcp_storage")) as pool:
        yield pool
