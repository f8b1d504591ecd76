"""The memory of an exchange: pages that are used again, and how far ahead other ranks may run."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["EVERYTHING", "Held", "Spare", "Window"]

EVERYTHING = 1 << 62
"""More than the number of any segment."""


class Spare:
    """Keeps memory that is done with: fresh pages cost more than the copy into them.

    Args:
        most: bytes that are kept at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[int, list[bytearray]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bytearray:
        """Memory of exactly ``size`` bytes, with anything in it."""
        with self._lock:
            row = self._kept.get(size)
            if row:
                self._size -= size
                return row.pop()
        return bytearray(size)

    def keep(self, memory: bytearray) -> None:
        """Takes memory back."""
        with self._lock:
            if self._size + len(memory) <= self._most:
                self._size += len(memory)
                self._kept.setdefault(len(memory), []).append(memory)


@dataclass(frozen=True)
class Held:
    """An item that is of no use before all of it is here.

    Attributes:
        first: the number of the first segment that holds some of it.
        last: the number of the last one.
        size: bytes that are held from the first one's arrival on.
    """

    first: int
    last: int
    size: int


class Window:
    """Lets in as many items that have to be held as fit, in the order of their segments, and one at least.

    A segment in which an item that was let in ends may also hold the beginning of the next one. So what is held is the
    room, or one item, and what begins in one segment more.

    Args:
        items: all that have to be held.
        room: bytes for them.

    Attributes:
        limit: segments with lower numbers may come; it never goes down.
    """

    def __init__(self, items: Iterable[Held], room: int) -> None:
        self._items = sorted(items, key=lambda item: item.first)
        self._room = room
        self._held = 0
        self._next = 0
        self._last = -1
        self.limit = 0
        self._admit()

    def free(self, size: int) -> bool:
        """An item of this size is held no longer; whether the limit has risen."""
        self._held -= size
        before = self.limit
        self._admit()
        return self.limit > before

    def _admit(self) -> None:
        while self._next < len(self._items):
            item = self._items[self._next]
            if self._held and self._held + item.size > self._room:
                self.limit = max(item.first, self._last + 1)
                return
            self._held += item.size
            self._last = max(self._last, item.last)
            self._next += 1
        self.limit = EVERYTHING
