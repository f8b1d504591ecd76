"""One line to each rank that a load exchanges bytes with: threads that send, listen, and tell who failed.

Between two ranks there is a line in each direction. On it come messages with bytes, how much more may be sent the
other way, a sign of life now and then, and in the end one last message, which says that the sender is done, or which
rank has failed. A rank listens until the last message, also when it has failed itself: so no sender ever waits for
somebody who has stopped listening, every rank hears of a failure, and nothing is left in the group. docs/design/006 has
the argument.
"""

from __future__ import annotations

import pickle
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from dcp_storage.errors import CheckpointError
from dcp_storage.exchange_rounds import Meeting
from dcp_storage.exchange_wire import Wire, WireError

__all__ = ["Failure", "Links", "Sink"]

_HEAD = struct.Struct("<qqq")
_BEAT, _DATA, _LAST, _LIMIT = 0, 1, 2, 3
_PATIENCE = 1.5  # a silent rank is named after one deadline; this long until its line is given up, closing all others


class Sink(Protocol):
    """Takes what comes in."""

    def room(self, number: int, size: int) -> memoryview:
        """Memory for a segment; waits for some, for nothing but other segments' memory. Must not raise."""

    def arrived(self, number: int, run: memoryview) -> None:
        """The segment is in the memory that :meth:`room` gave."""

    def allowed(self, peer: int, limit: int) -> None:
        """Another rank takes segments with lower numbers than this from now on."""


@dataclass(frozen=True)
class Failure:
    """Why an exchange ended early.

    Attributes:
        rank: who failed, in the group.
        text: what happened, to go on from "rank 3 ".
        error: the error itself, where it is this rank's own.
        key: the state-dict key that it was about.
    """

    rank: int
    text: str
    error: BaseException | None = None
    key: str | None = None


@dataclass(frozen=True)
class _Task:
    kind: int
    number: int
    run: memoryview
    sent: Callable[[], None]


class Links:
    """The lines of one load.

    Args:
        meeting: the load.
        peers: the ranks at the other ends; each of them names this rank, too.
        sink: takes what comes in.
        failed: called once, on any thread, when a rank has failed.
    """

    def __init__(self, meeting: Meeting, peers: Iterable[int], sink: Sink, failed: Callable[[], None]) -> None:
        self._meeting = meeting
        self._sink = sink
        self._failed = failed
        self._wire = Wire(meeting.group, meeting.token, meeting.deadline * _PATIENCE, channel=1)
        self._lock = threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[_Task | None]] = {peer: queue.SimpleQueue() for peer in peers}
        self._ended: set[int] = set()
        self._waiting: dict[int, float] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, args=(peer,), name=f"dcp_storage-{what}-{peer}", daemon=True)
            for peer in self._queues
            for what, work in (("listen", self._listen), ("speak", self._speak))
        ]
        self._watcher = threading.Thread(target=self._watch, name="dcp_storage-watch", daemon=True)
        self.failure: Failure | None = None

    def start(self) -> None:
        """Begins to listen."""
        for thread in (*self._threads, self._watcher):
            thread.start()

    def tell(self, limit: int) -> None:
        """Tells all others that this rank takes segments with lower numbers than this."""
        for peer in self._queues:
            self._put(peer, _Task(_LIMIT, limit, memoryview(b""), lambda: None))

    def send(self, peer: int, number: int, run: memoryview, sent: Callable[[], None]) -> None:
        """Sends a segment when its turn comes.

        Args:
            peer: to whom.
            number: of the segment.
            run: its bytes, unchanged until ``sent``.
            sent: called once, on any thread, when they are not needed any more, whatever became of them.
        """
        self._put(peer, _Task(_DATA, number, run, sent))

    def _put(self, peer: int, task: _Task) -> None:
        with self._lock:
            ended = peer in self._ended
            if not ended:
                self._queues[peer].put(task)
        if ended:
            task.sent()

    def fail(self, error: CheckpointError) -> None:
        """This rank cannot go on: all others are told. Only the first failure counts."""
        self._note(Failure(self._meeting.rank, f"failed: {error}", error, error.key))

    def finish(self) -> None:
        """Says the last word on every line, waits for everybody else's, and ends all threads."""
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._over.set()
        self._watcher.join()

    def _note(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        for tasks in self._queues.values():
            tasks.put(None)
        self._failed()

    def _listen(self, peer: int) -> None:
        head = bytearray(_HEAD.size)
        try:
            while True:
                self._receive(peer, memoryview(head))
                kind, number, size = _HEAD.unpack(head)
                if kind == _DATA:
                    run = self._sink.room(number, size)
                    self._receive(peer, run)
                    self._sink.arrived(number, run)
                elif kind == _LIMIT:
                    self._sink.allowed(peer, number)
                elif kind == _LAST:
                    if size:
                        told = bytearray(size)
                        self._receive(peer, memoryview(told))
                        self._note(Failure(*pickle.loads(told)))
                    return
        except WireError as error:
            self._note(Failure(peer, f"was lost: {error.reason}"))

    def _receive(self, peer: int, run: memoryview) -> None:
        self._waiting[peer] = time.monotonic()
        try:
            self._wire.receive(peer, run)
        finally:
            del self._waiting[peer]

    def _speak(self, peer: int) -> None:
        tasks = self._queues[peer]
        task: _Task | None = None
        try:
            while True:
                try:
                    task = tasks.get(timeout=self._meeting.deadline / 4)
                except queue.Empty:
                    self._say(peer, _BEAT, 0, 0)
                    continue
                if task is None:
                    break
                if self.failure is None:
                    self._say(peer, task.kind, task.number, task.run.nbytes)
                    self._wire.send(peer, task.run)
                task.sent()
                task = None
            failure = self.failure
            told = b"" if failure is None else pickle.dumps((failure.rank, failure.text, None, failure.key))
            self._say(peer, _LAST, 0, len(told))
            self._wire.send(peer, memoryview(bytearray(told)))
        except WireError as error:
            self._note(Failure(peer, f"was lost: {error.reason}"))
        finally:
            with self._lock:
                self._ended.add(peer)
            while task is not None or not tasks.empty():
                if task is not None:
                    task.sent()
                task = tasks.get() if not tasks.empty() else None

    def _say(self, peer: int, kind: int, number: int, size: int) -> None:
        self._wire.send(peer, memoryview(bytearray(_HEAD.pack(kind, number, size))))

    def _watch(self) -> None:
        deadline = self._meeting.deadline
        while not self._over.wait(min(deadline / 10, 1.0)):
            now = time.monotonic()
            for peer, since in list(self._waiting.items()):
                if now - since > deadline:
                    self._note(Failure(peer, f"has been silent for {deadline:g} s"))
