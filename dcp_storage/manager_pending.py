"""A save in the background, as the manager hands it out."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Protocol

from dcp_storage.errors import portable
from dcp_storage.options import SaveReport
from dcp_storage.state_async import at_exit
from dcp_storage.state_ranks import Ranks

__all__ = ["Background", "FailedSave", "PendingSave", "SaveHandle"]


class _UnderWay:
    """The threads of all saves under way in this process, which the interpreter's end waits for.

    It must wait before the executors of ``concurrent.futures`` are closed: deleting what need not be kept takes some.
    A thread that is no daemon is waited for only after that. There is one object of it in a process, since the
    interpreter's end is one for all, and a manager may be gone by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._pid: int | None = None

    def add(self, thread: threading.Thread) -> None:
        """Has the interpreter's end wait for this thread too."""
        with self._lock:
            if self._pid != os.getpid():  # the threads of a parent are not here
                self._threads, self._pid = set(), os.getpid()
                at_exit(self._wait)
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}

    def _wait(self) -> None:
        if self._pid == os.getpid():
            for thread in self._threads:
                thread.join()


_UNDER_WAY = _UnderWay()


class SaveHandle(Protocol):
    """What ``DCP.async_save`` returns."""

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Waits; the report, or raises what went wrong."""


class FailedSave:
    """Stands for a save that could not begin on this rank, so that its next call meets those of the other ranks.

    Args:
        error: what was raised; the caller has got it.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Raises it again."""
        raise self._error


class PendingSave:
    """One save under way. It counts as a step of the run only once it has committed.

    Args:
        step: which step.
        url: its folder.
        inner: the save.
        then: called once it has committed, in a thread of its own; what it says goes into the report's warnings, and
            is warned of. None for nothing.

    Attributes:
        step: which step.
        url: its folder.
        told: whether its outcome was handed to the caller.
    """

    def __init__(self, step: int, url: str, inner: SaveHandle, then: Callable[[], list[str]] | None) -> None:
        self.step = step
        self.url = url
        self.told = False
        self._inner = inner
        self._then = then
        self._report = SaveReport(url)
        self._error: BaseException | None = None
        atexit.register(self._show)
        self._thread = threading.Thread(target=self._follow, name=f"save of step {step}", daemon=True)
        self._thread.start()
        _UNDER_WAY.add(self._thread)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not, and what need not be kept is deleted."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the step is committed.

        Raises:
            CheckpointError: the save failed.
        """
        self.result()

    def result(self) -> SaveReport:
        """Waits until the step is committed; the report of the save.

        Raises:
            CheckpointError: the save failed.
        """
        self._thread.join()
        self.told = True
        atexit.unregister(self._show)
        if self._error is not None:
            raise self._error
        return self._report

    def _follow(self) -> None:
        try:
            self._report = self._inner.result() or self._report
            if self._then is not None:
                said = self._then()
                self._report.warnings += said
                for sentence in said:
                    warnings.warn(sentence, stacklevel=2)
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread by result()
            self._error = portable(error, "async_save", path=self.url)
        except BaseException as error:  # noqa: BLE001 - likewise, an interrupt as it is
            self._error = error

    def _show(self) -> None:
        """At the interpreter's end: an error that nobody has asked for."""
        if self._error is not None and not self.told:
            sys.excepthook(type(self._error), self._error, self._error.__traceback__)


class Background:
    """The save that a manager has under way, if any."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved; None where none is."""
        return None if self._pending is None or self._pending.done else self._pending.step

    def begin(self, pending: PendingSave) -> PendingSave:
        """Notes a save that has begun."""
        self._pending = pending
        return pending

    def finish(self) -> None:
        """Waits for it, on this rank alone.

        Raises:
            CheckpointError: it failed, and its handle has not said so yet.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.told:
            pending.wait()

    def settle(self, ranks: Ranks) -> None:
        """Waits for it, on all ranks together: what one of them met is raised on all, also what the others did not.

        Raises:
            CheckpointError: it failed on some rank, whose handle has not said so yet.
        """
        if self._pending is not None:
            ranks.agree("Saving in the background", self._pending.url, self.finish)

    def hear(self, ranks: Ranks) -> None:
        """The same, but only where it has ended on all ranks."""
        if self._pending is not None and all(ranks.gather(self._pending.done)):
            self.settle(ranks)
