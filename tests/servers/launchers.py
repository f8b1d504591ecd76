"""Starting and stopping the object stores that the tests run against; loopback only, every wait bounded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from moto.server import ThreadedMotoServer

from tests.servers.endpoint import S3Endpoint

__all__ = ["free_port", "ministack_server", "moto_server", "seaweedfs_server"]

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0


def free_port() -> int:
    """A port that nothing listens on at this moment, also not 10,000 above it (seaweedfs takes both)."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind((HOST, 0))
            port: int = low.getsockname()[1]
            try:
                high.bind((HOST, port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def moto_server() -> Iterator[S3Endpoint]:
    """Runs moto in a thread of this process: everything in memory; checks neither credentials nor checksums."""
    server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Endpoint("moto", f"http://{host}:{port}", "test", "test-secret")
    finally:
        server.stop()


@contextmanager
def ministack_server(data_dir: Path) -> Iterator[S3Endpoint]:
    """Runs ministack, which checks checksums and conditions but no credentials.

    Args:
        data_dir: an empty folder for its data and its log.
    """
    port = free_port()
    command = [os.environ.get("MINISTACK_BIN") or str(ROOT / ".venv-ministack" / "bin" / "ministack")]
    environment = {
        "BIND_HOST": HOST,
        "GATEWAY_PORT": str(port),
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(data_dir / "objects"),
    }
    with _process(command, environment, data_dir / "ministack.log", f"http://{HOST}:{port}") as url:
        yield S3Endpoint("ministack", url, "test", "test-secret")


@contextmanager
def seaweedfs_server(data_dir: Path) -> Iterator[S3Endpoint]:
    """Runs seaweedfs, which checks credentials, checksums and conditions.

    Args:
        data_dir: an empty folder for its data, its settings and its log.
    """
    key, secret = "seaweed-key", "seaweed-secret"
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    settings = data_dir / "s3.json"
    settings.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    objects = data_dir / "objects"
    objects.mkdir()
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [
        os.environ.get("WEED_BIN") or str(ROOT / ".venv-seaweed" / "bin" / "weed"),
        "server",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-dir={objects}",
        f"-master.port={ports['master']}",
        f"-volume.port={ports['volume']}",
        "-filer",
        f"-filer.port={ports['filer']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={settings}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=1000",
        "-master.telemetry=false",
    ]
    try:
        with _process(command, {}, data_dir / "weed.log", f"http://{HOST}:{ports['s3']}") as url:
            endpoint = S3Endpoint("seaweedfs", url, key, secret)
            _wait_for_writes(endpoint)
            yield endpoint
    finally:
        for port in ports.values():
            for number in (port, port + 10_000):
                for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{number}.sock"):
                    left.unlink()


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path, url: str) -> Iterator[str]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        _wait_for_answer(process, log, url)
        yield url
    finally:
        process.kill()  # the data is thrown away, and seaweedfs takes its time to end in order
        process.wait(timeout=10)


def _wait_for_answer(process: subprocess.Popen[bytes], log: Path, url: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as answer:  # any answer will do, 403 too
            answer.close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not answer at {url} within {START_SECONDS} s: {_tail(log)}")


def _wait_for_writes(endpoint: S3Endpoint) -> None:
    """It answers before it has a volume to write to."""
    client = endpoint.client
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"ready")
        except client.exceptions.ClientError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]
