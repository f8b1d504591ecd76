"""``dcp.async_save`` in process mode: torch's own background process saves with the writer that was sent to it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_storage import CheckpointExistsError, FsspecStorageWriter, SaveOptions
from dcp_storage.errors import ObjectNotFoundError, StoreError
from dcp_storage.options import KIB
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, failures_of, like, load, place_of, save, small_state
from tests.processes import plain
from tests.servers import Fault, S3Endpoint, faulty_http
from tests.servers.gcs import GcsServer, Hook

pytestmark = pytest.mark.filterwarnings(ALONE)

SECONDS = 90  # most of it for torch's process to start and import torch
ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1"}  # else torch asks the resolver for this host's full name


def in_process(state: dict[str, Any], writer: FsspecStorageWriter, checkpoint_id: str | None = None) -> None:
    """One save in torch's background process; other values in the tensors right after the call do not count."""
    future = cast(
        "Future[Any]",
        dcp.async_save(
            state,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ),
    )
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(-1)
    future.result(SECONDS)


def refused_then_good(rank: int, world: int, place: Place) -> tuple[dict[int, BaseException], Any]:
    """Into a folder that is taken, then into a free one, by the same writer."""
    writer = place.writer()
    with pytest.raises(CheckpointException) as caught:
        in_process(own(rank), writer)
    in_process(own(rank), writer, place.child("below").url)
    return failures_of(caught.value), writer.report


def own(rank: int) -> dict[str, Any]:
    return {**small_state(1), f"own-{rank}": torch.arange(5000) + rank}


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("local", 1),
        pytest.param("moto", 1, marks=pytest.mark.slow),
        pytest.param("gcs", 1, marks=pytest.mark.slow),
        pytest.param("moto", 2, marks=pytest.mark.slow),
        pytest.param("gcs", 2, marks=pytest.mark.slow),
    ],
)
def test_a_refused_save_and_a_good_one(request: pytest.FixtureRequest, ranks: RankPool, kind: str, world: int) -> None:
    """A refusal arrives typed from the other process, with its path; the next save of the writer commits the values
    of its call with the writer's options, and there is no report of it in this process.
    """
    place = place_of(request, kind)
    save(small_state(7), place.writer())
    before = {name: place.get(name) for name in place.files()}
    outcomes = ranks.run(refused_then_good, world, plain(place), timeout=110, env=ENVIRONMENT)
    for errors, report in outcomes:
        assert list(errors) == [0]
        assert type(errors[0]) is CheckpointExistsError
        assert errors[0].path == place.url
        assert report is None
    below = place.child("below")
    assert {name: place.get(name) for name in before} == before
    assert below.commits() == [".commit"]
    assert place.uploads() == []
    wanted = {**small_state(1), **{f"own-{rank}": torch.arange(5000) + rank for rank in range(world)}}
    found = like(wanted)
    load(found, below.reader())
    assert_same(found, wanted)


@contextmanager
def broken(request: pytest.FixtureRequest, kind: str) -> Iterator[Place]:
    """A new place, whose server answers 503 when a shard is to be made: put on S3, composed of its parts on GCS."""
    place = place_of(request, kind)
    bucket = place.url.split("/")[2]

    def matches(method: str, target: str) -> bool:
        return method in ("PUT", "POST") and f"/{bucket}/" in target and ".distcp" in target

    if kind == "gcs":
        server: GcsServer = request.getfixturevalue("strict")
        server.hooks.append(Hook("status", matches, times=99))
        yield place
        server.hooks.clear()
        return
    endpoint: S3Endpoint = request.getfixturevalue(kind)
    with faulty_http(endpoint.endpoint_url) as proxy:
        proxy.faults.append(Fault("status", matches, times=99))
        yield replace(place, options=endpoint.behind(proxy.url).storage_options)


def failed_then_good(rank: int, world: int, bad: list[Place], good: Place) -> tuple[list[BaseException], Any]:
    """One save to each of the bad places and one to the good one, by the same writer."""
    writer = FsspecStorageWriter(storage_options=good.options, options=SaveOptions(attempts=2, part_size=64 * KIB))
    errors = []
    for place in bad:
        with pytest.raises(CheckpointException) as caught:
            in_process(several_parts(), writer, place.url)
        errors.append(failures_of(caught.value)[0])
    in_process(several_parts(), writer, good.url)
    return errors, writer.report


def several_parts() -> dict[str, Any]:
    return {**small_state(1), "large": torch.arange(40_000)}


@pytest.mark.parametrize("kind", [pytest.param("moto", marks=pytest.mark.slow), "gcs"])
def test_failed_saves_and_a_good_one(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """A missing bucket and a server that fails midway arrive typed and leave nothing; the writer then saves well."""
    with broken(request, kind) as faulty:
        url = f"{faulty.url.partition('://')[0]}://no-such-bucket/run"
        good = replace(place_of(request, kind), options=faulty.options)
        bad = [Place(url, faulty.options), faulty]
        ((errors, report),) = ranks.run(
            failed_then_good, 1, [plain(one) for one in bad], plain(good), timeout=110, env=ENVIRONMENT
        )
        found = like(several_parts())
        load(found, good.reader())
    missing, failed = errors
    assert type(missing) is ObjectNotFoundError
    assert "no-such-bucket" in str(missing)
    assert type(failed) is StoreError
    assert (failed.path, failed.key, failed.attempts) == (faulty.url, "__0_0.distcp", 2)
    assert report is None
    assert (faulty.shards(), faulty.commits(), faulty.uploads()) == ([], [], [])
    assert (good.commits(), good.uploads()) == ([".commit"], [])
    assert_same(found, several_parts())
