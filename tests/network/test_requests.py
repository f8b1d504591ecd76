"""What one request may take, and what it does not ask for."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
from collections.abc import Callable, Iterator

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


@pytest.fixture
def dripping() -> Iterator[str]:
    """The URL of a server that answers anything by one byte each 0.2 seconds, for ever."""
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            for byte in itertools.chain(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n", itertools.repeat(120)):
                if done.wait(0.2):
                    return
                connection.sendall(bytes([byte]))

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("what", ["probe", "listing", "read"])
def test_an_answer_that_drips(dripping: str, scheme: str, what: str) -> None:
    """An answer that never ends, a byte now and then, is given up at the deadline, not at a multiple of it."""
    options = {"endpoint_url": dripping, "token": "anon"}
    if scheme == "s3":
        options = {"endpoint_url": dripping, "key": "k", "secret": "s"}
    store = open_store(parse_location(f"{scheme}://bucket/run"), options, deadline=4.0)
    calls: dict[str, Callable[[], object]] = {
        "probe": lambda: store.create_if_absent,
        "listing": store.entries,
        "read": lambda: store.read("a", limit=100),
    }
    errors: list[StoreError] = []

    def ask() -> None:
        with pytest.raises(StoreError) as caught:
            calls[what]()
        errors.append(caught.value)

    assert seconds(ask) < 7.5
    assert errors[0].errno == errno.ETIMEDOUT
    assert not str(errors[0]).endswith((":", ": "))


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
