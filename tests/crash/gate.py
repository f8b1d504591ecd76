"""A proxy between a process and its object store that cuts the process at a request, or keeps a request for later.

Requests are taken in whole before anything is decided: one that a killed process had sent in part never reaches the
server, and one that was sent in whole can be sent again, byte for byte, when its process is long gone.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from dcp_storage.testing.proxy import Proxy, Shape
from dcp_storage.testing.proxy_http import Head, NoMoreError, Pipe, read_head
from tests.crash.points import REPEATS, Mode, Point, plain

__all__ = ["Gate"]

SETTLE_SECONDS = 20.0
_NAME = re.compile(rb'"name": ?"([^"]*)"')


class _Caught:
    """Stands for a socket that is written to."""

    def __init__(self) -> None:
        self.data = bytearray()

    def sendall(self, data: bytes | memoryview) -> None:
        self.data += data


@dataclass
class _Plan:
    at: Point | None = None
    mode: Mode = "before"
    pid: Path = Path()
    points: list[Point] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    fired: bool = False
    kept: bytes = b""


class Gate(Proxy):
    """Listens on loopback, for one process at a time.

    Args:
        upstream: the server's URL.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._plan = _Plan()
        self._open = 0

    def __enter__(self) -> Gate:
        super().__enter__()
        return self

    def arm(self, at: Point | None, mode: Mode, pid: Path) -> None:
        """What the next process is to meet.

        Args:
            at: where; None only counts.
            mode: what happens there.
            pid: the file in which the process says its number.
        """
        with self._lock:
            self._plan = _Plan(at, mode, pid)

    def settle(self) -> tuple[tuple[Point, ...], bool, bytes]:
        """Waits until nothing of an ended process is on its way any more.

        Returns:
            All its requests, whether the point was among them, and the request that was kept.

        Raises:
            TimeoutError: a connection is still open.
        """
        until, quiet = time.monotonic() + SETTLE_SECONDS, 0
        while quiet < 3:
            with self._lock:
                quiet = 0 if self._open else quiet + 1
            if time.monotonic() > until:
                raise TimeoutError(f"{self._open} connections of an ended process are still open")
            time.sleep(0.002)
        with self._lock:
            plan = self._plan
        return tuple(plan.points), plan.fired, plan.kept

    def send(self, request: bytes) -> None:
        """Sends a kept request to the server and waits for its answer, whatever that is."""
        with socket.create_connection(self._upstream, timeout=30) as server:
            server.sendall(request)
            answer, caught = Pipe(server, cast(socket.socket, _Caught()), lambda count: None), _Caught()
            head = read_head(answer)
            answer.target = cast(socket.socket, caught)
            try:
                answer.move_body(head, of_head=request.startswith(b"HEAD "))
            except NoMoreError:  # a body that ends with its connection
                return

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._open += 1
        try:
            super()._serve(client)
        finally:
            with self._lock:
                self._open -= 1

    def _exchange(self, up: Pipe, down: Pipe, shape: Shape) -> bool:
        head = read_head(up)
        request = self._whole_request(head, up)
        plan, mode = self._note(head, request)
        if mode in ("before", "late"):
            self._kill(plan)
            raise NoMoreError
        if mode == "refused":
            raise NoMoreError
        answer_head, answer, whole = self._ask(head, request, down)
        if mode == "after":
            self._kill(plan)
            raise NoMoreError
        if mode == "lost":
            raise NoMoreError
        up.source.sendall(answer)
        return whole and not (head.closes or answer_head.closes)

    def _whole_request(self, head: Head, up: Pipe) -> bytes:
        if head.expects:
            up.source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        server, body = up.target, _Caught()
        up.target = cast(socket.socket, body)
        try:
            up.move_body(head)
        finally:
            up.target = server
        return head.without("expect") + bytes(body.data)

    def _ask(self, head: Head, request: bytes, down: Pipe) -> tuple[Head, bytes, bool]:
        """Has the server answer; whether the connection to it lives on."""
        down.source.sendall(request)
        answer = read_head(down)
        while answer.status == 100:
            answer = read_head(down)
        client, body, whole = down.target, _Caught(), True
        down.target = cast(socket.socket, body)
        try:
            down.move_body(answer, of_head=head.is_head)
        except NoMoreError:
            whole = False
        finally:
            down.target = client
        return answer, answer.raw + bytes(body.data), whole

    def _note(self, head: Head, request: bytes) -> tuple[_Plan, Mode | None]:
        what = _kind_of(head, request)
        with self._lock:
            plan = self._plan
            plan.seen[what] = nth = plan.seen.get(what, 0) + 1
            point = Point(what, nth)
            plan.points.append(point)
            if point != plan.at:
                return plan, None
            plan.fired = True
            if plan.mode in REPEATS:
                plan.kept = request
            return plan, plan.mode

    @staticmethod
    def _kill(plan: _Plan) -> None:
        os.kill(int(plan.pid.read_text(encoding="ascii")), signal.SIGKILL)


def _kind_of(head: Head, request: bytes) -> str:
    """A request in words that are the same in every run."""
    parts = urlsplit(head.target)
    path = "/".join(unquote(part) for part in parts.path.split("/"))
    bucket_or_not = re.sub(r"/crash-[0-9a-f]+/?", "/", path)
    said = ""
    if head.method == "POST" and "uploadType=" in parts.query:  # the name of a GCS object is in the body
        body = request[request.index(b"\r\n\r\n") :]
        found = _NAME.search(body[:4096])
        said = " " + found[1].decode() if found else ""
    query = unquote(parts.query)
    return plain(f"{head.method} {bucket_or_not}{'?' if query else ''}{re.sub(r'crash-[0-9a-f]+', 'B', query)}{said}")
