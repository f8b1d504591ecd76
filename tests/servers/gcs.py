"""A strict server of the Google Cloud Storage JSON API on loopback, with faults to order.

It holds to what Google publishes: preconditions on every verb (and again at the end of a resumable upload), hashes,
ranges, pages, the rules of resumable uploads and of compose. Everything is in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.servers.gcs_refusal import Refusal
from tests.servers.gcs_routes import Api, Call, Reply

__all__ = ["GcsServer", "Hook", "gcs_server"]

PIECE = 256 * 1024


@dataclass
class Hook:
    """Something that goes wrong with the requests that match.

    Attributes:
        kind: ``"lost reply"`` (done, but the connection ends without an answer), ``"lost request"`` (not done),
            ``"half request"`` (the connection breaks after half of the body), ``"cut reply"`` (the answer ends
            midway), ``"status"`` (answered so, not done), ``"reply"`` (done, then answered so), ``"delay"``.
        matches: decides by method and target (path and query as sent).
        times: how often; then requests go through.
        status: for ``"status"`` and ``"reply"``.
        body: likewise.
        headers: extra headers, likewise.
        seconds: for ``"delay"``: before the request is done.
    """

    kind: Literal["lost reply", "lost request", "half request", "cut reply", "status", "reply", "delay"]
    matches: Callable[[str, str], bool] = lambda method, target: True
    times: int = 1
    status: int = 503
    body: bytes = b'{"error": {"code": 503, "message": "m", "errors": [{"reason": "backendError", "message": "m"}]}}'
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class GcsServer:
    """The running server.

    Attributes:
        url: where it listens.
        api: what it holds.
        hooks: what goes wrong; may be changed at any time.
        seen: method and target of every request, in order.
        received: bytes of all bodies that came.
        encodings: what the requests had in ``Accept-Encoding``.
        tokens: the bearer tokens that are taken; None takes every request.
    """

    url: str
    api: Api
    hooks: list[Hook] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] | None = None
    received: int = 0
    encodings: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    name = "strict"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for gcsfs; a new dict each time."""
        return {"endpoint_url": self.url, "token": "anon", "project": "tests"}

    def make_bucket(self, name: str) -> None:
        """Makes a bucket."""
        with self.api.world.lock:
            self.api.world.make_bucket(name)

    # The oracle: what is there, without any request.

    def names(self, bucket: str) -> list[str]:
        """All names of a bucket, sorted."""
        with self.api.world.lock:
            return sorted(self.api.world.bucket(bucket).objects)

    def get(self, bucket: str, name: str) -> bytes:
        """An object's bytes."""
        with self.api.world.lock:
            return self.api.world.bucket(bucket).objects[name].data

    def set(self, bucket: str, name: str, data: bytes) -> None:
        """Writes an object."""
        with self.api.world.lock:
            self.api.world.write(self.api.world.bucket(bucket), name, data, {})

    def open_sessions(self) -> list[str]:
        """Names of the objects whose resumable uploads are neither finished nor cancelled."""
        with self.api.world.lock:
            return sorted(s.name for s in self.api.sessions.values() if s.made is None and not s.cancelled)

    def count(self, method: str, part: str = "") -> int:
        """How many requests came with this method and this text in their target."""
        with self.lock:
            return sum(1 for seen, target in self.seen if seen == method and part in target)

    def reset(self) -> None:
        """Forgets the faults and the requests; the objects stay."""
        with self.lock:
            self.hooks, self.tokens, self.received = [], None, 0
            self.seen.clear()
            self.encodings.clear()
        self.api.ignores_conditions = False

    def receive(self, count: int, encoding: str) -> None:
        """Notes the bytes of a body and what the client accepts."""
        with self.lock:
            self.received += count
            self.encodings.add(encoding)

    def take(self, method: str, target: str) -> Hook | None:
        """Notes a request; what is to go wrong with it."""
        with self.lock:
            self.seen.append((method, target))
            for hook in self.hooks:
                if hook.times > 0 and hook.matches(method, target):
                    hook.times -= 1
                    return hook
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True
    server: _Server

    def handle_any(self) -> None:
        gcs = self.server.gcs
        hook = gcs.take(self.command, self.path)
        kind = None if hook is None else hook.kind
        body, complete = self._body(0.5 if kind == "half request" else 1.0)
        gcs.receive(len(body), self.headers.get("Accept-Encoding", ""))
        headers = {name.lower(): value for name, value in self.headers.items()}
        origin = f"http://{headers['host']}"  # as the client named it: a proxy in front must see what follows, too
        call = Call(self.command, self.path, headers, body, complete, origin)
        self.close_connection = not complete or kind not in (None, "delay") or "close" in headers.get("connection", "")
        if kind == "lost request":
            return
        if hook is not None and kind == "delay":
            time.sleep(hook.seconds)
        if hook is not None and kind == "status":
            reply = Reply(hook.status, dict(hook.headers), hook.body)
        elif gcs.tokens is not None and headers.get("authorization", "").removeprefix("Bearer ") not in gcs.tokens:
            reply = Reply.of(Refusal(401, "Invalid Credentials").resource, 401)
        else:
            reply = gcs.api.answer(call)
        if kind == "lost reply" or not complete:
            return
        if hook is not None and kind == "reply":
            reply = Reply(hook.status, dict(hook.headers), hook.body)
        self._send(reply, cut=kind == "cut reply")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_any  # noqa: N815 - the names http.server wants

    def _send(self, reply: Reply, *, cut: bool) -> None:
        self.send_response_only(reply.status)
        self.send_header("Date", self.date_time_string())
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: len(reply.body) // 2] if cut else reply.body)

    def _body(self, share: float) -> tuple[bytearray, bool]:
        """The body, or this share of it, and whether it is all."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self._chunks(), True
        size = int(self.headers.get("Content-Length", 0))
        wanted = int(size * share)
        body, held, broken = bytearray(wanted), 0, False
        with memoryview(body) as view:
            try:
                while held < wanted and (count := self.rfile.readinto(view[held : held + PIECE])):
                    held += count
            except OSError:
                broken = True
        del body[held:]
        return body, held == size and not broken

    def _chunks(self) -> bytearray:
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Tests read ``seen`` instead."""


class _Server(ThreadingHTTPServer):
    gcs: GcsServer
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def gcs_server(*, with_md5: bool = True) -> Iterator[GcsServer]:
    """Runs a server in threads of this process.

    Args:
        with_md5: whether objects have an MD5; Google's composite ones have none either.
    """
    server = _Server(("127.0.0.1", 0), _Handler)
    server.gcs = GcsServer(f"http://127.0.0.1:{server.server_address[1]}", Api(with_md5=with_md5))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.gcs
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
