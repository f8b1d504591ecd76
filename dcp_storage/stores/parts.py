"""The bookkeeping of an upload's parts: which bytes each one covers."""

from __future__ import annotations

import errno
import threading

from dcp_storage.errors import StoreError

__all__ = ["Parts"]


class Parts:
    """The places of the parts that were sent; a part sent again takes the place of its first try. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, number: int, offset: int, size: int) -> None:
        """Notes part ``number``: ``size`` bytes from byte ``offset`` on."""
        with self._lock:
            self._places[number] = (offset, size)

    def size(self, *, operation: str, url: str, name: str) -> int:
        """The object's size in bytes.

        Raises:
            StoreError: ``EINVAL``, as parts are missing, or overlap, or leave gaps.
        """
        with self._lock:
            places = sorted(self._places.items())
        end = 0
        for wanted, (number, (offset, size)) in enumerate(places, start=1):
            if number != wanted or offset != end:
                raise StoreError(
                    f"{operation} failed for {name!r} in {url}: part {wanted} should begin at byte {end}, but what was "
                    f"sent is part {number} at byte {offset}.",
                    operation=operation,
                    errno=errno.EINVAL,
                    path=url,
                    key=name,
                )
            end += size
        return end
