"""Millions of inputs in children that may crash, hang or be refused memory, without harm to who counts them.

A child is forked from a process that has imported everything; before each input it notes its number in memory that both
share. When it dies or stays at one number, that input is the fault, and another child goes on behind it.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import resource
import signal
import struct
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.fuzz.judging import FaultError

__all__ = ["Fault", "Tally", "run"]

_ROOM: Final = 1 << 30  # address space that a child may take beyond what it has when it begins
_SLOTS: Final = 32
_NAME: Final = 40
_POLL: Final = 0.05

Trial = Callable[[int], str]
"""Reads the input of a number; returns what became of it, or raises FaultError."""


@dataclass(frozen=True)
class Fault:
    """An input that ended as none may.

    Attributes:
        number: of the input.
        why: what happened.
    """

    number: int
    why: str


@dataclass
class Tally:
    """What became of a run.

    Attributes:
        inputs: how many were read.
        outcomes: outcome → how many.
        faults: those that ended otherwise.
        seconds: it took.
    """

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {count:,}" for name, count in self.outcomes.most_common())
        return f"{self.inputs:,} inputs in {self.seconds:.0f} s ({shown}), {len(self.faults)} faults"


class _Shared:
    """Numbers and a message that a child writes and its parent reads, also when the child is gone."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096 + _SLOTS * (_NAME + 8))
        self._slots: dict[str, int] = {}

    def reset(self) -> None:
        self._memory[:] = bytes(len(self._memory))
        self._slots.clear()

    @property
    def at(self) -> int:
        """The input at work; -1 before the first."""
        return int(struct.unpack_from("<q", self._memory, 0)[0]) - 1

    @at.setter
    def at(self, number: int) -> None:
        struct.pack_into("<q", self._memory, 0, number + 1)

    @property
    def why(self) -> str:
        """What the child said of the input that it ended at."""
        (size,) = struct.unpack_from("<q", self._memory, 8)
        return self._memory[16 : 16 + size].decode("utf-8", "replace")

    @why.setter
    def why(self, text: str) -> None:
        raw = text.encode("utf-8", "replace")[:2000]
        self._memory[16 : 16 + len(raw)] = raw
        struct.pack_into("<q", self._memory, 8, len(raw))

    def count(self, outcome: str) -> None:
        slot = self._slots.setdefault(outcome, len(self._slots))
        place = 4096 + min(slot, _SLOTS - 1) * (_NAME + 8)
        (before,) = struct.unpack_from("<q", self._memory, place)
        struct.pack_into("<q", self._memory, place, before + 1)
        if not before:
            raw = outcome.encode()[:_NAME]
            self._memory[place + 8 : place + 8 + len(raw)] = raw

    def counts(self) -> Iterator[tuple[str, int]]:
        for place in range(4096, len(self._memory), _NAME + 8):
            (count,) = struct.unpack_from("<q", self._memory, place)
            if count:
                yield self._memory[place + 8 : place + 8 + _NAME].rstrip(b"\0").decode(), count


@contextmanager
def _quiet() -> Iterator[None]:
    """In a child: nothing of what a fault prints, and no core of it on the disk."""
    faulthandler.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    yield


def _work(shared: _Shared, trial: Trial, first: int, stop: int, until: float) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _ROOM, resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    for number in range(first, stop):
        if time.monotonic() > until:
            return
        shared.at = number
        shared.count(trial(number))
    shared.at = stop


def _child(shared: _Shared, trial: Trial, first: int, stop: int, until: float) -> int:
    """Forks; 0 is never returned in the child, which ends here."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with _quiet():
            _work(shared, trial, first, stop, until)
        code = 0
    except FaultError as error:
        shared.why = str(error)
    except BaseException as error:  # noqa: BLE001 - a child must end here, whatever came out of an input
        shared.why = f"{type(error).__name__}: {error}"
    finally:
        os._exit(code)


def _watched(shared: _Shared, pid: int, patience: float) -> str | None:
    """Waits for a child to end; why it did not end well. One that stays at an input for too long is killed."""
    seen, since = shared.at, time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if shared.at != seen:
            seen, since = shared.at, time.monotonic()
        elif time.monotonic() - since > patience:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"it did not end within {patience:g} s"
        time.sleep(_POLL)
    if os.WIFSIGNALED(status):
        return f"the process died by {signal.Signals(os.WTERMSIG(status)).name}"
    return shared.why or "the process ended by itself" if os.WEXITSTATUS(status) else None


def run(
    trial: Trial,
    *,
    first: int = 0,
    inputs: int = 1 << 40,
    seconds: float = 1e9,
    patience: float = 20.0,
    most_faults: int = 20,
    progress: Callable[[Tally], None] = lambda tally: None,
    piece: int = 20_000,
) -> Tally:
    """Reads inputs one after the other.

    Args:
        trial: reads one; see :data:`Trial`.
        first: number of the first.
        inputs: how many, at most.
        seconds: how long, at most, and an input more.
        patience: seconds of wall time that one input may take.
        most_faults: after so many it ends.
        progress: told of what there is after each child.
        piece: inputs of one child.
    """
    tally, shared = Tally(), _Shared()
    began = time.monotonic()
    at, stop = first, first + inputs
    while at < stop and time.monotonic() < began + seconds and len(tally.faults) < most_faults:
        shared.reset()
        shared.at = at - 1
        why = _watched(shared, _child(shared, trial, at, min(at + piece, stop), began + seconds), patience)
        reached = max(shared.at, at)
        for outcome, count in shared.counts():
            tally.outcomes[outcome] += count
        if why is None and shared.at < min(at + piece, stop):
            reached = shared.at + 1  # its time was over behind this one
        at = reached
        if why is not None:
            tally.faults.append(Fault(at, why))
            at += 1
        tally.inputs, tally.seconds = at - first, time.monotonic() - began
        progress(tally)
    return tally
