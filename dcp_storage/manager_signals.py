"""SIGTERM as a flag: what a scheduler sends before it takes a machine away."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["TermSignal"]


class TermSignal:
    """Notes SIGTERM instead of dying of it, from :meth:`listen` to :meth:`restore`. A handler that was set before is
    called too.

    Attributes:
        seen: whether it came.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None
        self._listening = False

    def listen(self) -> None:
        """Takes SIGTERM over.

        Raises:
            ValueError: not in the main thread, where alone Python lets a program set handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_sigterm=True works in the main thread only, where Python allows signal handlers.")
        self._before = signal.signal(signal.SIGTERM, self._note)
        self._listening = True

    def restore(self) -> None:
        """Puts the handler back that was there before; nothing to do where somebody else has set another since."""
        if self._listening and signal.getsignal(signal.SIGTERM) == self._note:
            # None: it was set by something that is not Python, and cannot be put back; the default is next to it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._listening = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if callable(self._before):
            self._before(number, frame)
