"""Two racing creators on every store that declares create-if-absent atomic: one wins, in each of 200 rounds."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from dcp_storage.errors import ObjectExistsError
from dcp_storage.store import Atomicity, Store
from dcp_storage.testing.conformance_tools import at_once, read
from dcp_storage.testing.dictstore import DictStore
from tests.foreign import opened
from tests.servers import S3Endpoint

ROUNDS = 200


def _pair(request: pytest.FixtureRequest, kind: str, stack: contextlib.ExitStack) -> list[Store]:
    if kind == "dict":
        first = DictStore(folder="run")
        return [first, DictStore(first.objects, folder="run")]
    options = {}
    if kind == "local":
        url = str(request.getfixturevalue("tmp_path") / "run")
    elif kind == "memory":
        url = f"memory://{secrets.token_hex(6)}/run"
    else:
        server: S3Endpoint = request.getfixturevalue(kind)
        make_bucket: Callable[[S3Endpoint], str] = request.getfixturevalue("bucket")
        url, options = f"s3://{make_bucket(server)}/run", server.storage_options
    return [stack.enter_context(opened(url, options)) for _ in range(2)]


@pytest.fixture(
    params=[
        "local",
        "memory",
        "dict",
        pytest.param("moto", marks=pytest.mark.slow),
        pytest.param("ministack", marks=pytest.mark.slow),
        pytest.param("seaweedfs", marks=pytest.mark.slow),
    ]
)
def stores(request: pytest.FixtureRequest) -> Iterator[list[Store]]:
    """Two stores of one folder."""
    with contextlib.ExitStack() as stack:
        made = _pair(request, request.param, stack)
        made[0].make_folder()
        yield made


def test_one_of_two_creators_wins(stores: list[Store]) -> None:
    """Of two creates of one name at once exactly one returns, the other raises ObjectExistsError, and it is there."""
    assert [store.create_if_absent for store in stores] == [Atomicity.ATOMIC] * 2
    bodies = [b"by the first", b"by the second one"]
    for number in range(ROUNDS):
        name = f"race-{number}"
        answers = at_once([partial(store.create, name, body) for store, body in zip(stores, bodies, strict=True)])
        winners = [body for body, answer in zip(bodies, answers, strict=True) if answer is None]
        losers = [answer for answer in answers if answer is not None]
        assert len(winners) == len(losers) == 1, f"round {number}: {answers}"
        assert isinstance(losers[0], ObjectExistsError)
        assert read(stores[number % 2], name) == winners[0]
    assert len(stores[0].entries()) == ROUNDS
