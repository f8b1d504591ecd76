"""What no test may leave on a server: multipart uploads, resumable sessions, and parts of an object that was not made.

The servers are found by the fixtures that hand them out, whatever those are called; after each test they are asked,
past the library, what is open. A test that means to leave something says so: ``@pytest.mark.leaves_uploads("why")``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.servers.endpoint import S3Endpoint
from tests.servers.gcs import GcsServer

__all__ = ["MARKER", "Leftovers", "open_on_gcs", "open_on_s3"]

MARKER = "leaves_uploads(reason): what this test leaves open on a server is meant to be"
PART_NOTE = "dcp-storage-upload"
"""The custom metadata of a part on GCS that is not composed yet."""


def open_on_s3(server: S3Endpoint, bucket: str) -> list[str]:
    """Each multipart upload of a bucket that is neither completed nor aborted."""
    found = server.open_uploads(bucket)
    return [f"{server.name}: upload {item['UploadId']} of {bucket}/{item['Key']}" for item in found]


def open_on_gcs(server: GcsServer) -> list[str]:
    """Each resumable session that is neither finished nor cancelled, and each part that is not composed."""
    with server.api.world.lock:
        found = [
            f"{server.name}: session {token} of {session.bucket}/{session.name}"
            for token, session in server.api.sessions.items()
            if session.made is None and not session.cancelled
        ]
        for bucket in server.api.world.buckets.values():
            noted = [o.name for o in bucket.objects.values() if PART_NOTE in (o.fields.get("metadata") or {})]
            found += [f"{server.name}: part of {bucket.name}/{name}" for name in noted]
    return found


class Leftovers:
    """A plugin of pytest: knows the servers that run, and what is open on each.

    It is registered as a whole, since hooks of a ``conftest.py`` hear nothing of fixtures that live for the session.
    """

    def __init__(self) -> None:
        self._servers: list[S3Endpoint | GcsServer] = []
        self._looked: dict[int, int] = {}  # how many of a server's buckets were looked at after an earlier test
        self._known: set[str] = set()  # what an earlier test left, so that it is not blamed on the next one

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Keeps in mind every server that a fixture hands out, for as long as that fixture lives."""
        made = yield
        if isinstance(made, (S3Endpoint, GcsServer)):
            self._servers.append(made)
            fixturedef.addfinalizer(lambda: self._drop(made))
        return made

    def _drop(self, gone: S3Endpoint | GcsServer) -> None:
        """Takes one mention of a server out; it may have others, as fixtures hand on what they got."""
        del self._servers[next(at for at, server in enumerate(self._servers) if server is gone)]

    def left(self) -> list[str]:
        """What is open on the servers now and was not at the last call."""
        found: set[str] = set()
        for server in {id(server): server for server in self._servers}.values():
            if isinstance(server, GcsServer):
                found.update(open_on_gcs(server))
            else:
                made = list(server.buckets)
                for name in made[self._looked.get(id(server), 0) :]:
                    found.update(open_on_s3(server, name))
                self._looked[id(server)] = len(made)
        new = sorted(found - self._known)
        self._known |= found
        return new

    @pytest.fixture(autouse=True)
    def no_open_uploads(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Fails a test after which an upload is open on a server that a fixture started."""
        yield
        left = self.left()
        if left and request.node.get_closest_marker("leaves_uploads") is None:
            raise AssertionError(f"{request.node.nodeid} left open: {left}")
