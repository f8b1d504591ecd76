"""A loopback TCP proxy for HTTP/1.1 that shapes what goes through it, and breaks it on request.

Shaping: a wait before each answer, a rate for each connection, a rate for all of them. Faults: requests or answers that
are lost, cut, refused with a status, stalled or shortened, chosen by method and target. It stands between a real client
and a real server; the same proxy serves the benchmarks (``FAULTS`` empty) and the fault tests.

One thread serves one connection and moves bodies in pieces of 256 KiB; it costs about as much CPU as a copy of the
bytes in the kernel each way. Targets are compared as they were sent, percent-encoded.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from dcp_storage.testing.proxy_http import Head, NoMoreError, Pipe, read_head

__all__ = ["Fault", "Proxy", "Shape"]

FaultKind = Literal["reset before", "reset after", "cut request", "cut answer", "short answer", "status", "black hole"]


@dataclass(frozen=True)
class Shape:
    """How slow the link is.

    Attributes:
        latency: seconds between a request's last byte and its answer's first.
        rate: bytes per second of one connection, each way; None: as fast as it goes.
        total_rate: bytes per second of all connections together, each way; None: as fast as it goes.
    """

    latency: float = 0.0
    rate: float | None = None
    total_rate: float | None = None


@dataclass
class Fault:
    """Something that goes wrong with the requests that match.

    Attributes:
        kind: ``"reset before"`` (the server never sees the request), ``"reset after"`` (the server did it, the answer
            is lost), ``"cut request"`` (half of the body arrives at the server), ``"cut answer"`` (the connection ends
            after half of the answer's body), ``"short answer"`` (as before, but the connection stays open and the body
            just stops), ``"status"`` (answered with ``status``, not done), ``"black hole"`` (neither done nor
            answered; the connection stays open).
        matches: decides by method and target.
        times: how often; later requests go through. Negative: always.
        status: for ``"status"``.
        headers: of that answer.
        body: of that answer.
    """

    kind: FaultKind
    matches: Callable[[str, str], bool] = lambda method, target: True
    times: int = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class _Pacer:
    """Holds a stream of bytes back to a rate; for several threads."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_on(self, count: int) -> None:
        if self._rate is None:
            return
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class _BrokenError(Exception):
    """A fault ended this connection."""


class Proxy:
    """Listens on loopback and forwards to one server; a context manager.

    Args:
        upstream: the server's URL, ``http://127.0.0.1:9000``.
        shape: how slow the link is; may be exchanged at any time, for connections that begin later.

    Attributes:
        url: where it listens.
        faults: what goes wrong, the first match counts; may be changed at any time.
        seen: method and target of every request, in order.
    """

    def __init__(self, upstream: str, shape: Shape = Shape()) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.shape = shape
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.bytes_up = 0
        self.bytes_down = 0
        self._lock = threading.Lock()
        self._total = (_Pacer(shape.total_rate), _Pacer(shape.total_rate))
        self._stopped = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="dcp_storage-proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections and stops listening."""
        self._stopped.set()
        self._drop(self._listener)
        with self._lock:
            held = list(self._sockets)
        for one in held:
            self._drop(one)
        self._thread.join(timeout=10)

    @staticmethod
    def _drop(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), name="dcp_storage-proxied", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._upstream, timeout=60)
        except OSError:
            client.close()
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(600)
        with self._lock:
            self._sockets |= {client, server}
        shape = self.shape
        up = Pipe(client, server, self._paced(_Pacer(shape.rate), 0))
        down = Pipe(server, client, self._paced(_Pacer(shape.rate), 1))
        try:
            while not self._stopped.is_set() and self._exchange(up, down, shape):
                pass
        except (NoMoreError, _BrokenError, OSError):
            pass  # either side hung up, or a fault did: the other side must see that, below
        finally:
            with self._lock:
                self._sockets -= {client, server}
            self._drop(client)
            self._drop(server)

    def _paced(self, own: _Pacer, way: int) -> Callable[[int], None]:
        def moved(count: int) -> None:
            own.pass_on(count)
            self._total[way].pass_on(count)
            with self._lock:
                if way:
                    self.bytes_down += count
                else:
                    self.bytes_up += count

        return moved

    def _fault_for(self, head: Head) -> Fault | None:
        with self._lock:
            self.seen.append((head.method, head.target))
            for fault in self.faults:
                if fault.times and fault.matches(head.method, head.target):
                    fault.times -= 1
                    return fault
        return None

    def _exchange(self, up: Pipe, down: Pipe, shape: Shape) -> bool:
        """One request and its answer; whether the connection lives on."""
        head = read_head(up)
        fault = self._fault_for(head)
        kind = fault.kind if fault else None
        if fault is not None and kind in ("reset before", "status", "black hole"):
            self._refuse(fault, head, up, shape)
            return True
        if head.expects:
            time.sleep(shape.latency)
            up.source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        down.source.settimeout(600)
        up.target.sendall(head.without("expect"))
        if kind == "cut request":
            up.move(head.length // 2 if head.length else 0)
            self._reset(up.source)
        whole = True
        try:
            up.move_body(head)
        except (BrokenPipeError, ConnectionResetError):  # a server may answer, and close, before it has read the body
            whole = False
        answer = read_head(down)
        while answer.status == 100:
            answer = read_head(down)
        time.sleep(shape.latency)
        if kind == "reset after":
            self._reset(up.source)
        down.target.sendall(answer.raw)
        if kind in ("cut answer", "short answer") and not head.is_head:
            down.move((answer.length or 0) // 2)
            if kind == "short answer":
                self._stall(up.source)
            self._reset(up.source)
        down.move_body(answer, of_head=head.is_head)
        return whole and not (head.closes or answer.closes)

    def _refuse(self, fault: Fault, head: Head, up: Pipe, shape: Shape) -> None:
        if fault.kind == "reset before":
            self._reset(up.source)
        if fault.kind == "black hole":
            self._stall(up.source)
        if head.expects:
            up.source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        up.discard_body(head)
        time.sleep(shape.latency)
        headers = {"Content-Length": str(len(fault.body)), **fault.headers}
        lines = [f"HTTP/1.1 {fault.status} Faulted", *(f"{name}: {value}" for name, value in headers.items())]
        body = b"" if head.is_head else fault.body
        up.source.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def _stall(self, client: socket.socket) -> None:
        client.settimeout(0.2)
        while not self._stopped.is_set():
            try:
                if not client.recv(65536):
                    break
            except TimeoutError:
                continue
        raise _BrokenError

    @staticmethod
    def _reset(client: socket.socket) -> None:
        """Ends the connection with a TCP reset."""
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        raise _BrokenError
