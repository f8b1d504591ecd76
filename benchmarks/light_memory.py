"""The memory of the light server: touched before the first request and used again.

To find and to clear a page costs more than to fill it, above all in a virtual machine: 1.3 CPU seconds for each GB that
a server receives into new memory, 0.25 into memory that was used before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Body", "Object", "Pool"]

PIECE = 1 << 20
SMALL = 1 << 16


class Pool:
    """Pieces of memory, handed out and taken back.

    Args:
        size: bytes that are touched now; more is made when it is asked for.
    """

    def __init__(self, size: int) -> None:
        self._free = [memoryview(bytearray(b"\1") * PIECE) for _ in range(size // PIECE)]

    def take(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(PIECE))

    def give_back(self, pieces: list[memoryview]) -> None:
        self._free += pieces


class Body:
    """The bytes of one request, in pieces that go back to the pool when nobody needs them any more.

    Args:
        pool: where the pieces come from.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._taken: list[memoryview] = []
        self.pieces: list[memoryview] = []
        self.size = 0
        self._room = memoryview(b"")

    def __del__(self) -> None:
        self._pool.give_back(self._taken)

    def room(self, wanted: int) -> memoryview:
        """Where up to ``wanted`` next bytes may be put; :meth:`filled` says how many were."""
        if not self._room:
            if wanted < SMALL:
                self._room = memoryview(bytearray(wanted))
            else:
                self._room = self._pool.take()
                self._taken.append(self._room)
        return self._room[:wanted]

    def filled(self, count: int) -> None:
        self.pieces.append(self._room[:count])
        self._room = self._room[count:]
        self.size += count

    def add(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            room = self.room(rest.nbytes)
            room[:] = rest[: room.nbytes]
            self.filled(room.nbytes)
            rest = rest[room.nbytes :]


@dataclass
class Object:
    """The bytes of one object, in pieces."""

    bodies: list[Body]
    etag: str
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(body.size for body in self.bodies)

    @property
    def pieces(self) -> list[memoryview]:
        return [piece for body in self.bodies for piece in body.pieces]

    def span(self, start: int, stop: int) -> list[memoryview]:
        out, at = [], 0
        for piece in self.pieces:
            a, b = max(start - at, 0), min(stop - at, piece.nbytes)
            if a < b:
                out.append(piece[a:b])
            at += piece.nbytes
        return out
