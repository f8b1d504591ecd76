"""The proxy shapes and breaks what goes through it, and nothing else."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from dcp_storage.testing.proxy import Fault, Proxy, Shape

BODY = bytes(range(256)) * 4096  # 1 MiB


class Handler(BaseHTTPRequestHandler):
    """Keeps what is PUT, sends it back in one piece or in chunks."""

    protocol_version = "HTTP/1.1"
    kept: ClassVar[list[bytes]] = []

    def do_PUT(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if len(data) < int(self.headers["Content-Length"]):
                self.close_connection = True
                return
        self.kept.append(data)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/chunks":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at in range(0, len(BODY), 100_000):
                piece = BODY[at : at + 100_000]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(BODY)

    do_HEAD = do_GET  # noqa: N815 - the name http.server wants

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """The tests read ``kept``."""


@pytest.fixture
def upstream() -> Iterator[str]:
    """A server that keeps and sends bodies."""
    Handler.kept.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def connect(proxy: Proxy, timeout: float = 10) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=timeout)


def ask(
    connection: http.client.HTTPConnection, method: str, target: str, body: bytes | None = None
) -> tuple[int, bytes]:
    connection.request(method, target, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_everything_passes_unchanged(upstream: str) -> None:
    """Bodies of both kinds, both ways, and answers without one, go through on one connection, and are seen."""
    with Proxy(upstream) as proxy:
        connection = connect(proxy)
        assert ask(connection, "PUT", "/a", BODY) == (200, b"")
        connection.request("PUT", "/b", iter([BODY[:10], BODY[10:]]), encode_chunked=True)
        assert connection.getresponse().read() == b""
        assert ask(connection, "HEAD", "/c") == (200, b"")
        assert ask(connection, "GET", "/d") == (200, BODY)
        assert ask(connection, "GET", "/chunks") == (200, BODY)
        connection.close()
    assert Handler.kept == [BODY, BODY]
    assert proxy.seen == [("PUT", "/a"), ("PUT", "/b"), ("HEAD", "/c"), ("GET", "/d"), ("GET", "/chunks")]
    assert proxy.bytes_down >= 2 * len(BODY)


def test_the_client_is_asked_to_go_on(upstream: str) -> None:
    """A client that waits for leave to send its body gets it."""
    with Proxy(upstream) as proxy:
        connection = connect(proxy)
        connection.putrequest("PUT", "/e")
        connection.putheader("Content-Length", "4")
        connection.putheader("Expect", "100-continue")
        connection.endheaders()
        assert connection.sock.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.send(b"body")
        assert connection.getresponse().read() == b""
        connection.close()
    assert Handler.kept == [b"body"]


def test_each_answer_waits(upstream: str) -> None:
    """Three requests on a link of 50 ms take 150 ms."""
    with Proxy(upstream, Shape(latency=0.05)) as proxy:
        connection = connect(proxy)
        start = time.monotonic()
        for _ in range(3):
            ask(connection, "HEAD", "/")
        assert time.monotonic() - start >= 0.15
        connection.close()


@pytest.mark.parametrize("shape", [Shape(rate=8e6), Shape(total_rate=8e6)])
def test_bytes_are_held_back(upstream: str, shape: Shape) -> None:
    """1 MiB at 8 MB/s takes an eighth of a second at least, and so does the way up."""
    with Proxy(upstream, shape) as proxy:
        connection = connect(proxy)
        for method, body in (("GET", None), ("PUT", BODY)):
            start = time.monotonic()
            ask(connection, method, "/", body)
            assert time.monotonic() - start >= 0.12
        connection.close()


def test_the_rate_is_of_each_connection(upstream: str) -> None:
    """Four connections at 8 MB/s each are done in the time of one; with one rate for all they take four times that."""
    took = []
    for shape in (Shape(rate=8e6), Shape(total_rate=8e6)):
        with Proxy(upstream, shape) as proxy:

            def get(proxy: Proxy = proxy) -> None:
                connection = connect(proxy)
                assert ask(connection, "GET", "/") == (200, BODY)
                connection.close()

            threads = [threading.Thread(target=get) for _ in range(4)]
            start = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=20)
            took.append(time.monotonic() - start)
    assert took[1] >= 0.5
    assert took[0] < took[1]


@pytest.mark.parametrize(
    ("kind", "kept"), [("reset before", 0), ("cut request", 0), ("reset after", 1), ("cut answer", 1), ("status", 0)]
)
def test_a_fault_happens_once(upstream: str, kind: str, kept: int) -> None:
    """A faulted request is lost, cut or refused, done by the server or not, as asked; the next one goes through."""
    with Proxy(upstream) as proxy:
        proxy.faults = [Fault(kind, lambda method, target: target == "/f")]  # type: ignore[arg-type]
        connection = connect(proxy)
        if kind == "status":
            assert ask(connection, "PUT", "/f", BODY)[0] == 503
        elif kind == "cut answer":
            Handler.kept.append(b"done")
            with pytest.raises((http.client.HTTPException, OSError)):
                ask(connection, "GET", "/f")
        else:
            with pytest.raises((http.client.HTTPException, OSError)):
                ask(connection, "PUT", "/f", BODY)
        connection.close()
        assert len(Handler.kept) == kept
        connection = connect(proxy)
        assert ask(connection, "PUT", "/f", BODY)[0] == 200
        connection.close()


@pytest.mark.parametrize("kind", ["black hole", "short answer"])
def test_silence(upstream: str, kind: str) -> None:
    """Where an answer never comes, or stops in its middle, the client waits until its own patience ends."""
    with Proxy(upstream) as proxy:
        proxy.faults = [Fault(kind)]  # type: ignore[arg-type]
        connection = connect(proxy, timeout=0.5)
        with pytest.raises(TimeoutError):
            ask(connection, "GET", "/")
        connection.close()
