"""How many requests it takes to know a run of 1,000 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from dcp_storage import CheckpointManager
from dcp_storage.commit_object import new_commit
from dcp_storage.records import ManifestRef, encode_commit
from dcp_storage.tools.runs import open_run
from tests.runs.kit import MemoryRun, put
from tests.servers.endpoint import S3Endpoint
from tests.servers.faulty_http import faulty_http

STEPS = 1000
COMMIT = encode_commit(new_commit(1, "aaaaaaaaaaaaaaaa", manifest=ManifestRef(".manifest", 1, 1)))


def fill_disk(root: Path) -> None:
    for step in range(STEPS):
        folder = root / f"step-{step:08d}"
        folder.mkdir()
        (folder / ".commit").write_bytes(COMMIT)


def fill_bucket(bucket: str) -> None:
    """Straight into moto, which runs in this process: what is counted is the requests that follow."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for step in range(STEPS):
        backend.put_object(bucket, f"run/step-{step:08d}/.commit", COMMIT)


def test_a_thousand_steps_on_disk(tmp_path: Path) -> None:
    """latest() is one listing and two requests; steps() is one listing and two requests a step."""
    fill_disk(tmp_path)
    run = open_run(tmp_path)
    latest = run.latest()
    assert latest.found is not None
    assert (latest.found.step, run.requests) == (STEPS - 1, 3)
    run = open_run(tmp_path)
    assert run.steps() == list(range(STEPS))
    assert run.requests == 1 + 2 * STEPS


def test_each_step_looked_at_costs_two_requests() -> None:
    """Unfinished and deleted steps on top cost a listing each, and a read where there is a commit; no more."""
    run = MemoryRun()
    run.commit(1, 2, 3)
    run.saver("step-4")
    put(run.at("step-5"), ".metadata")
    assert run.run.latest().found is not None
    assert run.sent() == ["folders", "entries", "entries", "entries", "read"]


@pytest.mark.slow
def test_the_latest_of_a_thousand_steps_on_s3(moto: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
    """As the server counts: one listing with a delimiter, one of the newest folder, one commit; every time."""
    name = bucket(moto)
    fill_bucket(name)
    with faulty_http(moto.endpoint_url) as proxy:
        manager = CheckpointManager(f"s3://{name}/run", storage_options=moto.behind(proxy.url).storage_options)
        for _ in range(2):
            proxy.seen.clear()
            assert manager.latest() == STEPS - 1
            assert len(proxy.seen) == 3
            assert [method for method, _ in proxy.seen] == ["GET"] * 3
            assert "delimiter=%2F" in proxy.seen[0][1]
            assert proxy.seen[2][1].endswith("/.commit")
        moto.client.put_object(Bucket=name, Key=f"run/step-{STEPS}/.commit", Body=COMMIT)
        assert manager.latest() == STEPS


@pytest.mark.slow
def test_the_steps_of_a_thousand_on_s3(moto: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
    """As the server counts: one listing with a delimiter, and two requests a step."""
    name = bucket(moto)
    fill_bucket(name)
    with faulty_http(moto.endpoint_url) as proxy:
        manager = CheckpointManager(f"s3://{name}/run", storage_options=moto.behind(proxy.url).storage_options)
        assert manager.steps() == list(range(STEPS))
        assert len(proxy.seen) == 1 + 2 * STEPS
