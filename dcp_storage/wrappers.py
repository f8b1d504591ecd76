"""Retry and limits: wrappers, Store in, Store out.

The order matters: ``RetryingStore(LimitedStore(store, 16))``. A request that waits before its next try then holds no
slot, so that a slow corner of the store does not stop the rest.

:class:`RequestStore` is the common base, also of the test kit's wrappers: every request, those of the uploads
included, goes through one method.
"""

from __future__ import annotations

import abc
import random as random_numbers
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dcp_storage.errors import StoreError
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, WrappedStore, total

__all__ = ["LimitedStore", "Request", "RequestStore", "RetryingStore"]

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One call on its way to a store.

    Attributes:
        operation: name of the method of :class:`~dcp_storage.store.Store` or :class:`~dcp_storage.store.Upload`.
        name: the object's name, None where the call has none or several.
        names: all names of a call that takes several.
        nbytes: bytes sent or asked for; 0 for ``read``, whose size only the answer tells.
        offset: first byte, for ``read_into`` and ``write_part``.
    """

    operation: str
    name: str | None = None
    names: tuple[str, ...] = ()
    nbytes: int = 0
    offset: int | None = None


class RequestStore(WrappedStore, abc.ABC):
    """A wrapper through whose :meth:`request` every call passes, also those of its uploads.

    Only :meth:`~dcp_storage.store.Store.close` goes straight through: it is no request.
    """

    @abc.abstractmethod
    def request(self, request: Request, call: Callable[[], T]) -> T:
        """Makes ``call``, which may be made several times, and returns or raises what it does."""

    def outgoing(self, buffers: Buffers) -> Buffers:
        """The bytes that really go to the inner store, asked once before :meth:`request`; the caller's own here."""
        return buffers

    @property
    def create_if_absent(self) -> Atomicity:
        return self.request(Request("create_if_absent"), lambda: self.inner.create_if_absent)

    def make_folder(self) -> None:
        self.request(Request("make_folder"), self.inner.make_folder)

    def entries(self) -> list[Entry]:
        return self.request(Request("entries"), self.inner.entries)

    def folders(self) -> list[str]:
        return self.request(Request("folders"), self.inner.folders)

    def size(self, name: str) -> int:
        return self.request(Request("size", name), lambda: self.inner.size(name))

    def read(self, name: str, *, limit: int) -> bytes:
        return self.request(Request("read", name), lambda: self.inner.read(name, limit=limit))

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        request = Request("read_into", name, nbytes=total(buffers), offset=offset)
        self.request(request, lambda: self.inner.read_into(name, offset, buffers))

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        sent = self.outgoing(buffers)
        self.request(Request("put", name, nbytes=total(sent)), lambda: self.inner.put(name, sent, crc32=crc32))

    def create(self, name: str, data: bytes) -> None:
        self.request(Request("create", name, nbytes=len(data)), lambda: self.inner.create(name, data))

    def upload(self, name: str) -> Upload:
        return RequestUpload(self, name, self.request(Request("upload", name), lambda: self.inner.upload(name)))

    def delete(self, names: Iterable[str]) -> None:
        given = tuple(names)  # a generator would be empty at the second try
        self.request(Request("delete", names=given), lambda: self.inner.delete(given))

    def open_uploads(self) -> list[Entry]:
        return self.request(Request("open_uploads"), self.inner.open_uploads)

    def abort_uploads(self, names: Iterable[str]) -> None:
        given = tuple(names)
        self.request(Request("abort_uploads", names=given), lambda: self.inner.abort_uploads(given))

    def now(self) -> float:
        return self.request(Request("now"), self.inner.now)

    def make_durable(self, names: Iterable[str]) -> None:
        given = tuple(names)
        self.request(Request("make_durable", names=given), lambda: self.inner.make_durable(given))


class RequestUpload(Upload):
    """The upload of a :class:`RequestStore`: each call passes through the store's :meth:`RequestStore.request`."""

    def __init__(self, store: RequestStore, name: str, inner: Upload) -> None:
        self.store = store
        self.name = name
        self.inner = inner

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        sent = self.store.outgoing(buffers)
        request = Request("write_part", self.name, nbytes=total(sent), offset=offset)
        self.store.request(request, lambda: self.inner.write_part(number, offset, sent, crc32=crc32))

    def complete(self) -> None:
        self.store.request(Request("complete", self.name), self.inner.complete)

    def abort(self) -> None:
        self.store.request(Request("abort", self.name), self.inner.abort)


class RetryingStore(RequestStore):
    """Tries a request again that failed for a passing reason (``StoreError.transient``).

    Waits with exponential backoff and full jitter: before try ``n + 1`` a random time up to
    ``min(cap, base * 2 ** (n - 1))`` seconds. What is raised in the end is the last error, with ``attempts`` set and
    the message extended. :meth:`~dcp_storage.store.Store.create` is tried once only: a second try cannot tell its own
    first from a stranger's, so the commit protocol reads back instead.

    Args:
        inner: the store that does the work.
        attempts: most tries of one request, 1 or more.
        deadline: seconds for one request with all its tries and waits. No wait ends and no try begins after it; a
            try that runs is not cut off, that is for the time-outs of the client below.
        base: the first wait is at most that long, seconds.
        cap: longest wait, seconds.
        clock: seconds, monotonic.
        sleep: waits so many seconds.
        random: uniform in [0, 1).

    Raises:
        ValueError: ``attempts`` is less than 1.

    Attributes:
        retries: how many tries beyond the first were made, over all requests.
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 6,
        deadline: float = 300.0,
        base: float = 0.1,
        cap: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = random_numbers.random,
    ) -> None:
        super().__init__(inner)
        if attempts < 1:
            raise ValueError(f"attempts must be 1 or more, not {attempts}")
        self.attempts = attempts
        self.deadline = deadline
        self.base = base
        self.cap = cap
        self.retries = 0
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._lock = threading.Lock()

    def request(self, request: Request, call: Callable[[], T]) -> T:
        if request.operation == "create":
            return call()
        begun = self._clock()
        attempt = 1
        while True:
            try:
                return call()
            except StoreError as error:
                spent = self._clock() - begun
                pause = self._random() * min(self.cap, self.base * 2 ** min(attempt - 1, 32))
                # A wait that would reach the deadline is not begun: the try after it would come too late.
                if not error.transient or attempt >= self.attempts or spent + pause >= self.deadline:
                    _finish(error, attempt, spent)
                    raise
            self._sleep(pause)
            attempt += 1
            with self._lock:
                self.retries += 1

    def upload(self, name: str) -> Upload:
        doubtful = False

        def begin() -> Upload:
            nonlocal doubtful
            try:
                return self.inner.upload(name)
            except StoreError as error:
                doubtful = doubtful or error.ambiguous
                raise

        return _RetryingUpload(self, name, self.request(Request("upload", name), begin), doubtful)


class _RetryingUpload(RequestUpload):
    """Knows whether an earlier try to begin may have left an upload that nobody holds."""

    def __init__(self, store: RequestStore, name: str, inner: Upload, doubtful: bool) -> None:
        super().__init__(store, name, inner)
        self.doubtful = doubtful

    def abort(self) -> None:
        super().abort()
        if self.doubtful:  # the reply to a beginning was lost: without its id, only the name finds that upload
            self.store.abort_uploads([self.name])


def _finish(error: StoreError, attempts: int, seconds: float) -> None:
    error.attempts = attempts
    if attempts > 1 or error.transient:
        error.message = f"{error.message} ({attempts} attempt{'s' * (attempts > 1)} over {seconds:.1f} s)"
        error.args = (error.message,)


class LimitedStore(RequestStore):
    """At most ``limit`` requests to the inner store at once, over all threads and uploads; others wait their turn.

    Args:
        inner: the store that does the work.
        limit: requests at once, 1 or more.

    Raises:
        ValueError: ``limit`` is less than 1.
    """

    def __init__(self, inner: Store, limit: int) -> None:
        super().__init__(inner)
        if limit < 1:
            raise ValueError(f"limit must be 1 or more, not {limit}")
        self.limit = limit
        self._slots = threading.BoundedSemaphore(limit)

    def request(self, request: Request, call: Callable[[], T]) -> T:
        with self._slots:
            return call()
