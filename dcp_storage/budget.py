"""A budget of bytes, shared by all saves or loads of one writer or reader."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """At most ``total`` bytes held at once; one holder larger than that goes through when it is alone.

    Args:
        total: bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._held = 0
        self._free = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    def try_acquire(self, size: int) -> bool:
        """Takes ``size`` bytes if they are free at once."""
        with self._free:
            if self._held and self._held + size > self.total:
                return False
            self._held += size
            return True

    def acquire(self, size: int) -> None:
        """Waits until ``size`` bytes are free and takes them. Whoever holds some must not need more to let go."""
        with self._free:
            self._free.wait_for(lambda: not self._held or self._held + size <= self.total)
            self._held += size

    def wait(self, size: int, or_else: Callable[[], bool]) -> None:
        """Waits until ``size`` bytes are free, without taking them, or ``or_else`` is true after a :meth:`wake`."""
        with self._free:
            self._free.wait_for(lambda: not self._held or self._held + size <= self.total or or_else())

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        with self._free:
            self._free.notify_all()

    def release(self, size: int) -> None:
        """Gives ``size`` bytes back."""
        with self._free:
            self._held -= size
            self._free.notify_all()
