"""A progress bar for what takes longer than two seconds, on a terminal only."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from fsspec.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bar", "wants_bars"]

_PATIENCE = 2.0  # seconds of silence first


def wants_bars() -> bool:
    """Whether a bar would be seen: standard error is a terminal, and this is no CI job."""
    return sys.stderr.isatty() and os.environ.get("CI", "").lower() not in ("1", "true", "yes")


class Bar(Callback):  # type: ignore[misc]
    """An fsspec Callback and context manager that draws to standard error, from two seconds after it began.

    Also where nothing was told yet, as where a store does not answer: what is waited for is shown without an end.

    Args:
        says: what is being done.
        in_bytes: whether it counts bytes, or steps.
        console: where it draws; standard error by default. A console that is no terminal is drawn nothing.
    """

    def __init__(self, says: str, *, in_bytes: bool = True, console: Console | None = None) -> None:
        super().__init__()
        self._says = says
        self._in_bytes = in_bytes
        self._console = console or Console(stderr=True)
        self._shown = console is not None or wants_bars()
        self._begun = time.monotonic()
        self._progress: Progress | None = None
        self._task: Any = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        """Called by fsspec's Callback after each change of size or value, on any thread."""
        if not self._shown or time.monotonic() - self._begun < _PATIENCE:
            return
        self._draw()

    def _draw(self) -> None:
        with self._lock:
            if not self._shown:  # it has ended meanwhile
                return
            if self._progress is None:
                count = DownloadColumn(binary_units=True) if self._in_bytes else MofNCompleteColumn()
                columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
                self._progress = Progress(*columns, console=self._console, transient=True)
                self._task = self._progress.add_task(self._says, total=self.size)
                self._progress.start()
            self._progress.update(self._task, completed=self.value, total=self.size)

    def __enter__(self) -> Bar:
        if self._shown:
            self._timer = threading.Timer(_PATIENCE, self._draw)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._shown = False
            if self._progress is not None:
                self._progress.stop()
