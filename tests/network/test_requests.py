"""What one request may take, and what it does not ask for."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from dcp_storage.errors import StoreError
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store
from tests.e2e import ALONE, place_of
from tests.network import MIB, Link, seconds, state_of
from tests.servers.faulty_http import faulty_http

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of a server that takes connections and never reads from them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("size", [10, 32 * MIB])
def test_a_body_that_nobody_takes(deaf: str, scheme: str, size: int) -> None:
    """A server that takes no byte of a body, small or large, does not hold a request up beyond its deadline."""
    options = {"endpoint_url": deaf, "token": "anon"}
    if scheme == "s3":
        options = {"endpoint_url": deaf, "key": "k", "secret": "s"}
    store = open_store(parse_location(f"{scheme}://bucket/run"), options, deadline=1.0)
    errors: list[StoreError] = []

    def put() -> None:
        with pytest.raises(StoreError) as caught:
            store.put("a", [memoryview(bytes(size))])
        errors.append(caught.value)

    assert seconds(put) < 6
    assert errors[0].transient
    assert errors[0].errno == errno.ETIMEDOUT


def test_no_body_waits_for_consent(request: pytest.FixtureRequest) -> None:
    """No request of a save asks the server first whether it may send its body: that would be a round trip more."""
    place = place_of(request, "ministack")
    assert place.server is not None
    with faulty_http(place.server.endpoint_url) as proxy:
        link = Link(place, proxy, place.server.behind(proxy.url).storage_options)  # type: ignore[arg-type]
        link.save(state_of())
        bodies = [headers for (method, _), headers in zip(proxy.seen, proxy.headers, strict=True) if method == "PUT"]
    assert len(bodies) > 5
    assert not [headers for headers in bodies if "expect" in headers]
