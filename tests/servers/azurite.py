"""Starting and stopping Azurite, Microsoft's own emulator of Azure Blob Storage; it runs on Node."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from azure.core.exceptions import AzureError
from azure.storage.blob import BlobServiceClient

from tests.servers.launchers import free_port

__all__ = ["Azurite", "azurite_server"]

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
ACCOUNT = "testaccount"
KEY = "dGVzdC1rZXktb2YtdGhlLWF6dXJpdGUtdGVzdHM="


@dataclass(frozen=True)
class Azurite:
    """A running server; everything in its memory.

    Attributes:
        port: where it listens.
    """

    port: int

    @property
    def connection_string(self) -> str:
        """What Azure's clients need."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://{HOST}:{self.port}/{ACCOUNT};"
        )

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for adlfs; a new dict each time."""
        return {"connection_string": self.connection_string}

    @cached_property
    def client(self) -> BlobServiceClient:
        """Azure's own blocking client: the oracle, which shares no code with adlfs."""
        return BlobServiceClient.from_connection_string(
            self.connection_string, retry_total=0, connection_timeout=5, read_timeout=20
        )

    def make_container(self, name: str) -> None:
        """Makes a container."""
        self.client.create_container(name)

    def names(self, container: str) -> list[str]:
        """The names of all blobs of a container, sorted."""
        return sorted(self.client.get_container_client(container).list_blob_names())


@contextmanager
def azurite_server(log: Path) -> Iterator[Azurite]:
    """Runs a server as a process; ``AZURITE_BIN``, or the one that npm put into ``.venv-azurite``.

    Args:
        log: the file for what it says.
    """
    server = Azurite(free_port())
    script = os.environ.get("AZURITE_BIN") or str(ROOT / ".venv-azurite" / "node_modules" / ".bin" / "azurite-blob")
    command = [
        *(script, "--blobHost", HOST, "--blobPort", str(server.port), "--inMemoryPersistence"),
        *("--skipApiVersionCheck", "--disableTelemetry", "--silent"),
    ]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=log.parent
        )
    try:
        _wait(process, server, log)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait(timeout=10)


def _wait(process: subprocess.Popen[bytes], server: Azurite, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            server.make_container("ready")
        except AzureError:
            time.sleep(0.1)
        else:
            return
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"Azurite did not answer within {START_SECONDS} s: {said}")
