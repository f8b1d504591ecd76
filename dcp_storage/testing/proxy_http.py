"""As much of HTTP/1.1 as a proxy needs: where a message's head and its body end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Head", "NoMoreError", "Pipe", "read_head"]

PIECE = 256 * 1024
MOST_HEAD = 64 * 1024


class NoMoreError(Exception):
    """The other side ended the connection between two messages, or within one."""


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or an answer.

    Attributes:
        raw: as it came, with the empty line.
        first: the first line's three words.
        headers: names in lower case.
    """

    raw: bytes
    first: tuple[str, str, str]
    headers: dict[str, str]

    @property
    def method(self) -> str:
        """Of a request."""
        return self.first[0]

    @property
    def target(self) -> str:
        """Path and query of a request, as sent."""
        return self.first[1]

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.first[1])

    @property
    def is_head(self) -> bool:
        """Whether the answer to this request has no body."""
        return self.method == "HEAD"

    @property
    def length(self) -> int | None:
        """Bytes of the body, None where the head does not say."""
        text = self.headers.get("content-length")
        return None if text is None else int(text)

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks that say their size."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def expects(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends the body."""
        return self.headers.get("expect", "").lower() == "100-continue"

    @property
    def closes(self) -> bool:
        """Whether the connection ends after this message."""
        return self.headers.get("connection", "").lower() == "close" or self.first[0] == "HTTP/1.0"

    def without(self, name: str) -> bytes:
        """The head as it came, less one header."""
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(one for one in lines if not one.lower().startswith(name.encode() + b":"))


class Pipe:
    """Moves bytes from one socket to another.

    Args:
        source: read from.
        target: written to.
        moved: told of every run of bytes before it is passed on; holds it back where the link is slow.
    """

    def __init__(self, source: socket.socket, target: socket.socket, moved: Callable[[int], None]) -> None:
        self.source = source
        self.target = target
        self._moved = moved
        self._ahead = bytearray()  # read, and not yet passed on
        self._piece = memoryview(bytearray(PIECE))

    def line_to(self, end: bytes, limit: int = MOST_HEAD) -> bytes:
        """Everything up to and with ``end``; not passed on."""
        while (at := self._ahead.find(end)) < 0:
            if len(self._ahead) > limit:
                raise NoMoreError
            self._more()
        stop = at + len(end)
        out = bytes(self._ahead[:stop])
        del self._ahead[:stop]
        return out

    def _more(self) -> None:
        data = self.source.recv(65536)
        if not data:
            raise NoMoreError
        self._ahead += data

    def _next(self, most: int | None) -> memoryview | bytes:
        if self._ahead:
            data = bytes(self._ahead[:most])
            del self._ahead[: len(data)]
            return data
        room = PIECE if most is None else min(most, PIECE)
        count = self.source.recv_into(self._piece[:room])
        return self._piece[:count]

    def move(self, count: int, *, on: bool = True) -> None:
        """Moves exactly ``count`` bytes; ``on=False`` throws them away."""
        while count:
            data = self._next(count)
            if not data:
                raise NoMoreError
            count -= len(data)
            if on:
                self._moved(len(data))
                self.target.sendall(data)

    def move_body(self, head: Head, *, of_head: bool = False) -> None:
        """Moves the body that belongs to ``head``; ``of_head``: the answer to a HEAD, which has none."""
        if of_head:
            return
        answer = head.first[0].startswith("HTTP/")
        if answer and (head.status in (204, 304) or head.status < 200):
            return
        if head.chunked:
            self._move_chunks()
        elif head.length is not None:
            self.move(head.length)
        elif answer:  # to the end of the connection
            while data := self._next(None):
                self._moved(len(data))
                self.target.sendall(data)
            raise NoMoreError

    def _move_chunks(self) -> None:
        while True:
            line = self.line_to(b"\r\n")
            self.target.sendall(line)
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            self.move(size + 2)
        while (line := self.line_to(b"\r\n")) != b"\r\n":
            self.target.sendall(line)
        self.target.sendall(line)

    def discard_body(self, head: Head) -> None:
        """Reads the body that belongs to a request and throws it away."""
        if not head.chunked:
            self.move(head.length or 0, on=False)
            return
        while size := int(self.line_to(b"\r\n").split(b";")[0], 16):
            self.move(size + 2, on=False)
        while self.line_to(b"\r\n") != b"\r\n":
            pass


def read_head(pipe: Pipe) -> Head:
    """The next message's head.

    Raises:
        NoMoreError: there is none.
    """
    raw = pipe.line_to(b"\r\n\r\n")
    lines = raw.decode("latin-1").split("\r\n")
    first, second, third = ([*lines[0].split(" ", 2), "", ""])[:3]
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (one.partition(":") for one in lines[1:] if one)
    }
    return Head(raw, (first, second, third), headers)
