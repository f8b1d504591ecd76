"""The object stores for this folder's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dcp_storage.stores.s3 import S3Store, open_s3
from tests.servers import FaultyHTTP, S3Endpoint, faulty_http


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts a server that takes seconds")


@dataclass(frozen=True)
class Folder:
    """A folder in a new bucket of a server; a location for ``open_s3``, and the oracle's view of it."""

    server: S3Endpoint
    bucket: str
    key: str = "run/step-1"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def path(self) -> str:
        return f"{self.bucket}/{self.key}"

    def open(self, options: Mapping[str, Any] | None = None, *, endpoint: str | None = None) -> S3Store:
        """The store, straight or through a proxy; ``options`` on top of the server's."""
        server = self.server if endpoint is None else self.server.behind(endpoint)
        return open_s3(self, {**server.storage_options, **(options or {})}, max_concurrency=8)

    def get(self, name: str) -> bytes:
        """An object's bytes by a plain botocore client."""
        data: bytes = self.server.client.get_object(Bucket=self.bucket, Key=f"{self.key}/{name}")["Body"].read()
        return data

    def set(self, name: str, data: bytes) -> None:
        """Writes an object by a plain botocore client."""
        self.server.client.put_object(Bucket=self.bucket, Key=f"{self.key}/{name}", Body=data)

    def keys(self) -> list[str]:
        """All keys of the bucket by a plain botocore client."""
        found = self.server.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return [item["Key"] for item in found]

    def uploads(self) -> list[str]:
        """Keys of all open uploads of the bucket by a plain botocore client."""
        found = self.server.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [item["Key"] for item in found]


@pytest.fixture(params=["moto", "ministack"])
def server(request: pytest.FixtureRequest) -> S3Endpoint:
    """Each S3 server that starts fast."""
    endpoint: S3Endpoint = request.getfixturevalue(request.param)
    return endpoint


@pytest.fixture
def folder(server: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> Folder:
    """A folder in a new bucket."""
    return Folder(server, bucket(server))


@pytest.fixture(scope="session")
def proxies() -> Iterator[Callable[[S3Endpoint], FaultyHTTP]]:
    """One proxy for each server for the whole run, since each URL costs a new client."""
    running: dict[str, FaultyHTTP] = {}
    with contextlib.ExitStack() as stack:

        def of(endpoint: S3Endpoint) -> FaultyHTTP:
            url = endpoint.endpoint_url
            if url not in running:
                running[url] = stack.enter_context(faulty_http(url))
            return running[url]

        yield of


@pytest.fixture
def proxy(server: S3Endpoint, proxies: Callable[[S3Endpoint], FaultyHTTP]) -> FaultyHTTP:
    """A proxy in front of the server that breaks what a test tells it to."""
    running = proxies(server)
    running.faults = []
    running.seen.clear()
    running.headers.clear()
    return running
