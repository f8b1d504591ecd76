"""What the writer and the reader share: where they point, the store behind it, and one save or load per thread."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_storage.counting import CountingStore
from dcp_storage.errors import InvalidLocationError, portable
from dcp_storage.options import LoadOptions, Report, SaveOptions
from dcp_storage.store import Store
from dcp_storage.stores.location import Location, parse_location
from dcp_storage.stores.opening import open_store
from dcp_storage.wrappers import LimitedStore, RetryingStore

__all__ = ["OpenStore", "Opened", "Pointer", "checked_options", "guard", "open_folder", "phase"]

OpenStore = Callable[[Location, Mapping[str, Any], int], Store]
"""Opens the bare store of a folder; the test kit hands over one that wraps it."""


def checked_options(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the user's ``storage_options``.

    Raises:
        TypeError: they are no mapping.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options must be a mapping, not {type(storage_options).__name__}.")
    return dict(storage_options or {})


@dataclass
class Opened:
    """A folder's store with retry, limit and counting around it."""

    store: Store
    retrying: RetryingStore
    counting: CountingStore

    def count_into(self, report: Report) -> None:
        """Notes the requests and retries so far."""
        report.requests = self.counting.requests
        report.retries = self.retrying.retries


def open_folder(
    location: Location,
    storage_options: Mapping[str, Any],
    options: SaveOptions | LoadOptions,
    opener: OpenStore | None = None,
) -> Opened:
    """Opens a folder with one layer of retries, a limit on requests, and counters."""
    if opener is None:
        bare = open_store(
            location,
            storage_options,
            max_concurrency=options.max_concurrency,
            engine=options.engine,
            deadline=options.deadline,
        )
    else:
        bare = opener(location, storage_options, options.max_concurrency)
    counting = CountingStore(bare)
    limited = LimitedStore(counting, options.max_concurrency)
    retrying = RetryingStore(limited, attempts=options.attempts, deadline=options.deadline)
    return Opened(retrying, retrying, counting)


@dataclass
class Pointer:
    """Where a writer or reader points: a path of each thread's own, else the last one that anybody gave.

    Attributes:
        last: the last location given, in any thread.
    """

    last: Location | None = None
    _own: threading.local = field(default_factory=threading.local)

    def set(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Points this thread, and threads without a path of their own, to a folder."""
        location = parse_location(checkpoint_id)
        self._own.location = location
        self.last = location

    def get(self, what: str) -> Location:
        """This thread's location.

        Raises:
            InvalidLocationError: nobody gave one.
        """
        location = getattr(self._own, "location", None) or self.last
        if location is None:
            raise InvalidLocationError(
                f"This {what} has no path: give it one, or pass checkpoint_id to the call that uses it."
            )
        return location

    def peek(self) -> Location | None:
        """This thread's location, None where nobody gave one."""
        return getattr(self._own, "location", None) or self.last

    def __getstate__(self) -> dict[str, Any]:
        return {"last": self.peek()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.last = state["last"]
        self._own = threading.local()


@contextlib.contextmanager
def guard(doing: str, location: Location | None) -> Iterator[None]:
    """Turns whatever is raised inside a hook into an error of ours that crosses process borders (invariant I7)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and _crosses(error):
            raise  # an interrupt or an exit is nobody's error and stays what it is
        raised = portable(error, doing, path=location.url if location else None)
        if raised is error:
            raise
        raise raised from error


def _crosses(error: BaseException) -> bool:
    """Whether an exception can be sent to another rank; one that cannot would leave the others waiting for it."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 - a foreign __reduce__ or __init__ may do anything
        return False


@contextlib.contextmanager
def phase(report: Report, name: str) -> Iterator[None]:
    """Adds the time that passes inside to a phase of the report."""
    begun = time.monotonic()
    try:
        yield
    finally:
        report.seconds[name] = report.seconds.get(name, 0.0) + time.monotonic() - begun
