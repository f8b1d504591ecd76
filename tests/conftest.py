"""What every test may use: the object stores on loopback and a pool of warm rank workers; and what none may leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.servers.fixtures import bucket, ministack, moto, seaweedfs, strict
from tests.servers.leftovers import MARKER, Leftovers

__all__ = ["bucket", "ministack", "moto", "ranks", "seaweedfs", "strict"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.pluginmanager.register(Leftovers(), "leftovers")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool that runs a function on any number of real gloo ranks."""
    # s3fs takes a second to import, else in every rank that needs it. Not gcsfs, which reads the environment that some
    # ranks set when it is imported.
    preload = ("pytest", "dcp_storage.reader", "dcp_storage.writer", "dcp_storage.stores.s3")
    with RankPool(preload=preload) as pool:
        yield pool
