"""A proxy for HTTP that spoils chosen requests or their answers."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["Fault", "FaultyHTTP", "faulty_http"]

Kind = Literal["lost reply", "lost request", "cut", "status", "delay", "reply"]


@dataclass
class Fault:
    """Something that goes wrong with the requests that match.

    Attributes:
        kind: ``"lost reply"`` (done, but the connection ends without an answer), ``"lost request"`` (not done),
            ``"cut"`` (the answer ends midway), ``"status"`` (answered with ``status``, not done), ``"delay"`` (done
            after ``seconds``), ``"reply"`` (done, then answered with ``status`` and ``body``).
        matches: decides by method and request target (path and query as sent).
        times: how often; then requests go through.
        status: for ``"status"`` and ``"reply"``.
        body: for ``"status"`` and ``"reply"``.
        headers: extra headers for ``"status"`` and ``"reply"``.
        seconds: for ``"delay"``.
    """

    kind: Kind
    matches: Callable[[str, str], bool]
    times: int = 1
    status: int = 503
    body: bytes = b"<Error><Code>SlowDown</Code><Message>m</Message></Error>"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class FaultyHTTP:
    """The running proxy.

    Attributes:
        url: where it listens.
        faults: what goes wrong; may be changed at any time.
        seen: method and target of every request that came in, in order.
        headers: the headers of the same requests, names in lower case.
    """

    def __init__(self, upstream: str) -> None:
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def handle_any(self) -> None:
                with contextlib.suppress(ConnectionError):  # the client may hang up, as after a time-out
                    proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 - the names http.server wants

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                """Tests read ``seen`` instead."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _take(self, method: str, target: str, headers: dict[str, str]) -> Fault | None:
        with self._lock:
            self.seen.append((method, target))
            self.headers.append(headers)
            for fault in self.faults:
                if fault.times > 0 and fault.matches(method, target):
                    fault.times -= 1
                    return fault
        return None

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        headers_in = {name.lower(): value for name, value in handler.headers.items()}
        fault = self._take(handler.command, handler.path, headers_in)
        kind = None if fault is None else fault.kind
        handler.close_connection = kind is not None
        if kind == "lost request":
            return
        if fault is not None and kind == "delay":
            time.sleep(fault.seconds)
        status, answer = 0, b""
        headers: list[tuple[str, str]] = []
        if kind != "status":
            status, headers, answer = self._forward(handler, body)
        if kind == "lost reply":
            return
        if fault is not None and kind in ("status", "reply"):
            status, answer = fault.status, fault.body
            headers = [*fault.headers.items(), ("Content-Length", str(len(answer)))]
        handler.send_response_only(status)
        for name, value in headers:
            handler.send_header(name, value)
        if handler.close_connection:
            handler.send_header("Connection", "close")
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer[: len(answer) // 2] if kind == "cut" else answer)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self._upstream, timeout=30)
        try:
            headers = {name: value for name, value in handler.headers.items() if name.lower() != "expect"}
            connection.request(handler.command, handler.path, body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read()
            drop = {"connection", "transfer-encoding"}
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in drop]
            if not any(name.lower() == "content-length" for name, _ in kept):
                kept.append(("Content-Length", str(len(answer))))
            return response.status, kept, answer
        finally:
            connection.close()


@contextmanager
def faulty_http(upstream: str) -> Iterator[FaultyHTTP]:
    """Runs a proxy in front of ``upstream`` (a URL) in threads of this process."""
    proxy = FaultyHTTP(upstream)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        thread.join(timeout=10)
        proxy.server.server_close()
