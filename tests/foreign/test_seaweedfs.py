"""SeaweedFS, a third S3 server: save, load, overwrite, delete, and kill -9 of the server between two saves."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from dcp_storage import CheckpointExistsError, NotCommittedError
from dcp_storage.fence import delete_folder
from tests.e2e import ALONE, Place, assert_same, failure, like, load, save, small_state
from tests.foreign import opened
from tests.servers import S3Endpoint
from tests.servers.launchers import free_port

pytestmark = [pytest.mark.filterwarnings(ALONE), pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
KEY, SECRET = "seaweed-key", "seaweed-secret"


@contextmanager
def _weed(data: Path, ports: dict[str, int]) -> Iterator[S3Endpoint]:
    """The server on ``data``, which may hold what an earlier one left; ends by SIGKILL."""
    (data / "objects").mkdir(exist_ok=True)
    rights = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (data / "s3.json").write_text(json.dumps({"identities": [rights]}), encoding="utf-8")
    command = [
        os.environ.get("WEED_BIN") or str(ROOT / ".venv-seaweed" / "bin" / "weed"),
        *("server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data / 'objects'}", "-filer", "-s3"),
        *(f"-{name}={port}" for name, port in ports.items()),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={data / 's3.json'}"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=1000", "-master.telemetry=false"),
    ]
    with (data / "log").open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    endpoint = S3Endpoint("seaweedfs", f"http://127.0.0.1:{ports['s3.port']}", KEY, SECRET)
    try:
        _wait(process, endpoint)
        yield endpoint
    finally:
        process.kill()
        process.wait(timeout=10)
        for port in ports.values():
            for number in (port, port + 10_000):
                for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{number}.sock"):
                    left.unlink()


def _wait(process: subprocess.Popen[bytes], endpoint: S3Endpoint) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        try:
            if "ready" not in [found["Name"] for found in endpoint.client.list_buckets()["Buckets"]]:
                endpoint.make_bucket("ready")
            endpoint.client.put_object(Bucket="ready", Key="ready", Body=b"ready")
            endpoint.client.get_object(Bucket="ready", Key="ready")["Body"].read()
        except (BotoCoreError, ClientError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("seaweedfs did not answer in time")


def test_save_load_overwrite_delete(seaweedfs: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
    """The whole life of a checkpoint: saved plainly, refused, replaced, deleted, and then not there."""
    place = Place(f"s3://{bucket(seaweedfs)}/run/step-1", seaweedfs.storage_options, seaweedfs)
    save(small_state(1), place.writer())
    assert sorted(place.files()) == [".commit", ".manifest", ".metadata", "__0_0.distcp"]
    assert json.loads(place.get(".commit")).get("single_writer", False) is False
    failure(CheckpointExistsError, lambda: save(small_state(2), place.writer()))
    save(small_state(3), place.writer(overwrite=True))
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(3))
    with opened(place.url, place.options) as store:
        delete_folder(store)
    failure(NotCommittedError, lambda: load(found, place.reader()))
    assert (place.shards(), place.uploads()) == ([], [])


def test_what_was_committed_survives_kill_9(tmp_path: Path) -> None:
    """The server is killed after a save and started again; that save loads, the next one works, and so once more."""
    ports = {name: free_port() for name in PORTS}
    for step in (1, 2):
        with _weed(tmp_path, ports) as endpoint:
            if step == 1:
                endpoint.make_bucket("kept")
            place = Place("s3://kept/run", endpoint.storage_options, endpoint)
            for earlier in range(1, step):
                found = like(small_state())
                load(found, place.child(f"step-{earlier}").reader())
                assert_same(found, small_state(earlier))
            save(small_state(step), place.child(f"step-{step}").writer())
    with _weed(tmp_path, ports) as endpoint:
        for step in (1, 2):
            found = like(small_state())
            load(found, Place(f"s3://kept/run/step-{step}", endpoint.storage_options).reader())
            assert_same(found, small_state(step))
