"""A store that writes down every call, so that a test can count requests and bytes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcp_storage.errors import Cause
from dcp_storage.store import Store
from dcp_storage.wrappers import Request, RequestStore

__all__ = ["Call", "RecordingStore"]

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One finished call.

    Attributes:
        operation: name of the method of ``Store`` or ``Upload``.
        name: the object's name, None where the call has none or several.
        nbytes: bytes sent, asked for, or (``read``) received.
        offset: first byte, for ``read_into`` and ``write_part``.
        names: all names of ``delete`` and ``abort_uploads``.
        ok: whether it returned.
        error: qualified name of the class of what it raised, None where it returned.
        started: place in the order in which calls began, from 0.
    """

    operation: str
    name: str | None
    nbytes: int
    offset: int | None
    names: tuple[str, ...]
    ok: bool
    error: str | None
    started: int


class RecordingStore(RequestStore):
    """Hands every call on and keeps a :class:`Call` of it. Reading ``create_if_absent`` is not recorded.

    Args:
        inner: the store that does the work.

    Attributes:
        calls: the finished calls, in the order in which they ended.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self._lock = threading.Lock()
        self._starts = itertools.count()

    def request(self, request: Request, call: Callable[[], T]) -> T:
        if request.operation == "create_if_absent":
            return call()
        with self._lock:
            started = next(self._starts)
        error: str | None = None
        nbytes = request.nbytes
        try:
            answer = call()
            if isinstance(answer, bytes):
                nbytes = len(answer)
            return answer
        except BaseException as raised:
            error = Cause.of(raised).type
            raise
        finally:
            done = Call(
                request.operation, request.name, nbytes, request.offset, request.names, error is None, error, started
            )
            with self._lock:
                self.calls.append(done)

    def operations(self) -> list[str]:
        """The operations of all finished calls, in the order in which they ended."""
        with self._lock:
            return [call.operation for call in self.calls]

    def of(self, operation: str) -> list[Call]:
        """The finished calls of one operation, in the order in which they ended."""
        with self._lock:
            return [call for call in self.calls if call.operation == operation]

    def bytes_read(self) -> int:
        """Bytes that ``read`` and ``read_into`` brought back; failed calls count nothing."""
        return sum(call.nbytes for operation in ("read", "read_into") for call in self.of(operation) if call.ok)
