"""Stores that fail, lie or stall on purpose, each fault with a name.

:class:`FaultyStore` does what a list of :class:`Fault` says, at the n-th call of an operation. The other classes are
stores that break one promise for good: :class:`IgnoresIfAbsent`, :class:`StaleListing`, :class:`FailingListing`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dcp_storage.errors import StoreError
from dcp_storage.store import Atomicity, Buffers, Entry, Store, WrappedStore
from dcp_storage.wrappers import Request, RequestStore

__all__ = ["FailingListing", "Fault", "FaultyStore", "Fired", "IgnoresIfAbsent", "StaleListing"]

T = TypeVar("T")

_REPEATABLE = frozenset(
    ("make_folder", "put", "create", "upload", "write_part", "complete", "abort", "delete", "abort_uploads")
)


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which call.

    Attributes:
        operation: the method of ``Store`` or ``Upload`` that fails; ``"*"`` for any. Reading ``create_if_absent``
            counts only under its own name.
        nth: which matching call, counted from 1 by this store; None for each one.
        name: a regular expression that the whole object name (one of the names, of several) matches; None for any.
        when: ``"before"``: the action takes place and the call has no effect, unless the action lets it go on.
            ``"after"``: the call has its effect, then the action. ``"lost"``: the call has its effect, but what comes
            back is an ambiguous, transient error. ``"duplicate"``: the call has its effect and its answer, and has its
            effect once more later. ``"late"``: an ambiguous, transient error comes back and the call has its effect
            only later. "Later" is ``late_after`` further calls on, or :meth:`FaultyStore.deliver_late`.
        action: ``"raise"`` an error; ``"kill"`` this process with SIGKILL; ``"delay"`` by ``seconds`` and go on;
            ``"hang"`` until :meth:`FaultyStore.release`, or for ``seconds`` where that is not 0, and go on. Only
            ``"raise"`` goes with lost, duplicate and late.
        error: makes what is raised; None for a definite StoreError with ``EIO`` (before, after) or an ambiguous,
            transient one with ``ETIMEDOUT`` (lost, late). It is not used by ``"duplicate"``.
        seconds: see ``action``.
        late_after: see ``when``; None to wait for :meth:`FaultyStore.deliver_late`.

    Raises:
        ValueError: the parts do not go together.
    """

    operation: str
    nth: int | None = 1
    name: str | None = None
    when: Literal["before", "after", "lost", "duplicate", "late"] = "before"
    action: Literal["raise", "kill", "delay", "hang"] = "raise"
    error: Callable[[], BaseException] | None = None
    seconds: float = 0.0
    late_after: int | None = None

    def __post_init__(self) -> None:
        if self.nth is not None and self.nth < 1:
            raise ValueError(f"nth counts from 1, {self.nth} never comes")
        if self.when not in {"before", "after"} and self.action != "raise":
            raise ValueError(f"when={self.when!r} goes only with action='raise', not {self.action!r}")
        if self.when in {"duplicate", "late"} and self.operation not in _REPEATABLE:
            raise ValueError(f"when={self.when!r} needs one operation that writes, not {self.operation!r}")

    def matches(self, request: Request) -> bool:
        """Whether the fault is about this request, the count left aside."""
        if self.operation != request.operation and (self.operation != "*" or request.operation == "create_if_absent"):
            return False
        if self.name is None:
            return True
        names = request.names if request.name is None else (request.name,)
        return any(re.fullmatch(self.name, name) for name in names)


@dataclass(frozen=True)
class Fired:
    """A fault that took place, and the request it hit."""

    fault: Fault
    request: Request


@dataclass
class _Late:
    """An effect that is still on its way."""

    call: Callable[[], object]
    calls_left: int | None


class FaultyStore(RequestStore):
    """Hands every call on, save where a fault says otherwise. At most one fault fires at a call: the first that is due.

    Args:
        inner: the store that does the work.
        faults: what goes wrong; each counts its own matching calls.

    Attributes:
        fired: the faults that took place, in order; noted before their action.
        late_errors: what the inner store raised when late effects reached it; nobody waits for those answers.
    """

    def __init__(self, inner: Store, faults: Sequence[Fault]) -> None:
        super().__init__(inner)
        self.faults = tuple(faults)
        self.fired: list[Fired] = []
        self.late_errors: list[StoreError] = []
        self._seen = [0] * len(self.faults)
        self._late: list[_Late] = []
        self._changed = threading.Condition()
        self._released = threading.Event()
        self._copies = any(fault.when in {"duplicate", "late"} for fault in self.faults)

    def outgoing(self, buffers: Buffers) -> Buffers:
        # A late effect needs its bytes when the caller has long used that memory for something else.
        return [memoryview(bytes(buffer)) for buffer in buffers] if self._copies else buffers

    def request(self, request: Request, call: Callable[[], T]) -> T:
        self._deliver(self._due())
        fault = self._next(request)
        if fault is None:
            return call()
        if fault.when == "before":
            self._act(fault, request)
            return call()
        if fault.when in {"duplicate", "late"}:
            with self._changed:
                self._late.append(_Late(call, fault.late_after))
        if fault.when == "late":
            self._act(fault, request)
        answer = call()
        if fault.when != "duplicate":
            self._act(fault, request)
        return answer

    def deliver_late(self) -> int:
        """Lets all late effects take place now, in order, and returns how many there were."""
        with self._changed:
            due, self._late = self._late, []
        self._deliver(due)
        return len(due)

    def release(self) -> None:
        """Lets all calls go on that hang, now and from now on."""
        self._released.set()

    def wait_fired(self, count: int = 1, timeout: float = 10.0) -> None:
        """Waits until ``count`` faults have fired, e.g. until another thread hangs.

        Raises:
            TimeoutError: they had not within ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.fired) >= count, timeout):
                raise TimeoutError(f"{len(self.fired)} of {count} faults fired within {timeout} s")

    def _next(self, request: Request) -> Fault | None:
        with self._changed:
            chosen = None
            for place, fault in enumerate(self.faults):
                if fault.matches(request):
                    self._seen[place] += 1
                    if chosen is None and fault.nth in {None, self._seen[place]}:
                        chosen = fault
            if chosen is not None:
                self.fired.append(Fired(chosen, request))
                self._changed.notify_all()
            return chosen

    def _act(self, fault: Fault, request: Request) -> None:
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "hang":
            self._released.wait(fault.seconds or None)
        elif fault.error is not None:
            raise fault.error()
        else:
            unknown = fault.when in {"lost", "late"}
            raise StoreError(
                f"injected fault: {request.operation} {'lost its reply' if unknown else 'failed'} ({fault.when})",
                operation=request.operation,
                errno=errno.ETIMEDOUT if unknown else errno.EIO,
                transient=unknown,
                ambiguous=unknown,
                key=request.name,
                path=self.url,
            )

    def _due(self) -> list[_Late]:
        with self._changed:
            for late in self._late:
                if late.calls_left is not None:
                    late.calls_left -= 1
            due = [late for late in self._late if late.calls_left is not None and late.calls_left <= 0]
            self._late = [late for late in self._late if late not in due]
            return due

    def _deliver(self, due: Sequence[_Late]) -> None:
        for late in due:
            try:
                late.call()
            except StoreError as error:
                self.late_errors.append(error)


class IgnoresIfAbsent(WrappedStore):
    """A store that claims atomic creates and overwrites silently."""

    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.ATOMIC

    def create(self, name: str, data: bytes) -> None:
        self.inner.put(name, [memoryview(data)])


class StaleListing(WrappedStore):
    """A store whose listing is that of the moment when this object was made, or last refreshed.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._frozen = inner.entries()
        self._folders = inner.folders()

    def entries(self) -> list[Entry]:
        return list(self._frozen)

    def folders(self) -> list[str]:
        return list(self._folders)

    def refresh(self) -> None:
        """Takes the listing of now."""
        self._frozen = self.inner.entries()
        self._folders = self.inner.folders()


class FailingListing(WrappedStore):
    """A store that cannot be listed.

    Args:
        inner: the store that does the work.
        error: makes what is raised; None for a StoreError with ``EACCES``, as without the right to list.
    """

    def __init__(self, inner: Store, error: Callable[[], BaseException] | None = None) -> None:
        super().__init__(inner)
        self._error = error

    def entries(self) -> list[Entry]:
        raise self._refused("entries")

    def folders(self) -> list[str]:
        raise self._refused("folders")

    def _refused(self, operation: str) -> BaseException:
        if self._error is not None:
            return self._error()
        return StoreError(
            f"injected fault: {self.url} may not be listed", operation=operation, errno=errno.EACCES, path=self.url
        )
