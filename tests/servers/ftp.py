"""Starting and stopping an FTP server (pyftpdlib) on a folder of this machine."""

from __future__ import annotations

import ftplib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.launchers import free_port

__all__ = ["FtpServer", "ftp_server"]

HOST = "127.0.0.1"
START_SECONDS = 30.0


@dataclass(frozen=True)
class FtpServer:
    """A running server.

    Attributes:
        port: where it listens.
        root: the folder that clients see as ``/``.
    """

    port: int
    root: Path

    user = "tests"
    password = "ftp-secret"

    @property
    def url(self) -> str:
        """The URL of the root, without the user."""
        return f"ftp://{HOST}:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for fsspec's FTPFileSystem; a new dict each time."""
        return {"username": self.user, "password": self.password, "timeout": 20}


@contextmanager
def ftp_server(root: Path, log: Path, port: int | None = None) -> Iterator[FtpServer]:
    """Runs a server as a process, which is killed at the end.

    Args:
        root: the folder that it serves.
        log: the file for what it says.
        port: where it listens; None for a free one.
    """
    server = FtpServer(port or free_port(), root)
    command = [
        *(sys.executable, "-W", "ignore", "-m", "pyftpdlib", "--interface", HOST, "--port", str(server.port)),
        *("--directory", str(root), "--write", "--username", server.user, "--password", server.password),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait(process, server, log)
        yield server
    finally:
        process.kill()
        process.wait(timeout=10)


def _wait(process: subprocess.Popen[bytes], server: FtpServer, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with ftplib.FTP(timeout=5) as client:
                client.connect(HOST, server.port)
                client.login(server.user, server.password)
        except OSError:
            time.sleep(0.05)
        else:
            return
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"the FTP server did not answer within {START_SECONDS} s: {said}")
