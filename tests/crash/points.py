"""The points at which a process is killed, or a reply lost, or a request kept for later."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

__all__ = ["MODES", "REPEATS", "Kept", "Mode", "Point", "Seam", "kill_this", "plain"]

T = TypeVar("T")

Mode = Literal["before", "after", "lost", "refused", "again", "late"]
MODES: tuple[Mode, ...] = ("before", "after", "lost", "refused", "again", "late")
"""``before``: killed when the call begins. ``after``: killed when it is done. ``lost``: done, and the caller gets an
error. ``refused``: not done, and the caller gets an error. ``again``: done and answered, and done once more later.
``late``: the process is killed, and the request, which was on its way, is done only later."""

REPEATS: frozenset[Mode] = frozenset({"again", "late"})
"""The modes in which something is done after the process has ended."""

_TOKEN = re.compile(r"(?<![a-z0-9])[a-z][a-z0-9]{15}(?![a-z0-9])")
_FOLDER = re.compile(r"(?<![a-z0-9])t\d{5}(?![a-z0-9])")  # one token in two thousand has such letters in it
_UPLOAD = re.compile(r"(uploadId|upload_id)=[^&]*")


@dataclass(frozen=True, order=True)
class Point:
    """The ``nth`` call of a kind.

    Attributes:
        what: the call, tokens and the trial's folder left out, so that it is the same in every run.
        nth: from 1; calls of one kind that are made on several threads are told apart by nothing else.
    """

    what: str
    nth: int

    def __str__(self) -> str:
        return f"{self.what} #{self.nth}"


def plain(text: str) -> str:
    """A call without what is different in every run: tokens, upload ids, the trial's folder."""
    return _UPLOAD.sub(r"\1=*", _TOKEN.sub("*", _FOLDER.sub("T", text)))


@dataclass(frozen=True)
class Kept:
    """A call of a store in plain data, to be made again by another process.

    Attributes:
        operation: the method of ``Store`` or ``Upload``.
        folder: the store's URL.
        name: the object.
        names: the objects, where there are several.
        data: what is written.
        offset: first byte, for ``write_part``.
    """

    operation: str
    folder: str
    name: str | None = None
    names: tuple[str, ...] = ()
    data: bytes = b""
    offset: int = 0


def kill_this() -> None:
    """SIGKILL to this process; does not return."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a signal to a process is not in time for every thread of it


@dataclass
class Seam:
    """Counts the calls of one process, and acts at one of them.

    Attributes:
        at: where; None only counts.
        mode: what happens there.
        kept: the file that a call is written to which is to be made later.
        points: every call so far, in the order in which they began.
    """

    at: Point | None
    mode: Mode
    kept: Path
    points: list[Point] = field(default_factory=list)
    fired: bool = False
    _seen: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def through(
        self,
        what: str,
        call: Callable[[], T],
        *,
        error: Callable[[bool], BaseException],
        keep: Callable[[], Kept] | None = None,
    ) -> T:
        """Makes a call, or not.

        Args:
            what: its kind, already :func:`plain`.
            call: makes it.
            error: what the caller gets in its place; told whether the call was done.
            keep: the call as plain data, where it can be made later.
        """
        with self._lock:
            self._seen[what] = nth = self._seen.get(what, 0) + 1
            point = Point(what, nth)
            self.points.append(point)
            if point != self.at:
                mode = None
            else:
                mode, self.fired = self.mode, True
        if mode is None:
            return call()
        if mode in REPEATS and keep is not None:
            self.kept.write_bytes(pickle.dumps(keep()))
        if mode in ("before", "late"):
            kill_this()
        if mode == "refused":
            raise error(False)
        answer = call()
        if mode == "after":
            kill_this()
        if mode == "lost":
            raise error(True)
        return answer
