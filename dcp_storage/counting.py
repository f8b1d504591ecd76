"""A wrapper that counts what goes to the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dcp_storage.store import Store
from dcp_storage.wrappers import Request, RequestStore

__all__ = ["CountingStore"]

T = TypeVar("T")


class CountingStore(RequestStore):
    """Counts the requests that reach the inner store, tries of retried ones included.

    Args:
        inner: the store that does the work.

    Attributes:
        requests: how many there were.
        bytes_read: bytes that ``read`` and ``read_into`` brought back.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = 0
        self.bytes_read = 0
        self._lock = threading.Lock()

    def request(self, request: Request, call: Callable[[], T]) -> T:
        with self._lock:
            self.requests += 1
        found = call()
        read = len(found) if isinstance(found, bytes) else request.nbytes if request.operation == "read_into" else 0
        with self._lock:
            self.bytes_read += read
        return found
