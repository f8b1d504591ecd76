"""Saves that go on behind the training: handles, how many are in flight, whom their errors reach."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from dcp_storage.errors import CheckpointError, portable
from dcp_storage.exchange_rounds import timeout_of
from dcp_storage.options import SaveReport
from dcp_storage.state_ranks import Ranks, unwrapped
from dcp_storage.state_save import Leaf
from dcp_storage.state_staging import Buffers

__all__ = ["AsyncSave", "IfBusy", "Savers", "at_exit"]

IfBusy = Literal["wait", "skip"]
"""What to do where as many saves are in flight as may be: wait for the oldest, or leave this save out."""

_LOOK = 1.0  # seconds after which one who waits looks again

Write = Callable[[Ranks, list[Leaf]], SaveReport]


class AsyncSave:
    """A save that goes on behind the training.

    Attributes:
        path: where it goes.
        skipped: whether it was left out, as another one was still going on.
    """

    def __init__(self, path: str | None, *, skipped: bool = False) -> None:
        self.path = path
        self.skipped = skipped
        self._gate = threading.Lock()  # taken until it has ended
        self._over = skipped
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._told = False
        if not skipped:
            self._gate.acquire()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is committed.

        Args:
            timeout: seconds to wait at most; None waits for as long as it takes.

        Raises:
            TimeoutError: it is still going on.
            CheckpointError: the save failed.
        """
        self._join(timeout)
        if not self._over:
            raise TimeoutError(f"The save to {self.path} is still going on after {timeout} s.")
        self._told = True
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Waits as :meth:`wait` does, and raises the same.

        Returns:
            The report of the save; None where it was left out.
        """
        self.wait(timeout)
        return self._report

    def _join(self, timeout: float | None = None) -> None:
        """Waits until it has ended, or for so many seconds.

        Not by an Event or by ``Thread.join``: Ctrl-C inside of these may leave a lock taken (CPython issue 29988), so
        that the save could never say that it has ended, or have a thread taken for ended that is not. Here, if Ctrl-C
        comes after the gate was passed and before it is open again, it is never needed again.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._over:
            left = _LOOK if until is None else min(until - time.monotonic(), _LOOK)
            if left <= 0:
                return
            if self._gate.acquire(timeout=left):
                self._gate.release()

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        self._report, self._error = report, error
        self._over = True
        self._gate.release()

    def _is_untold(self) -> bool:
        return self.done and not self._told and self._error is not None

    def _untold(self) -> BaseException | None:
        """The error that nobody has seen yet; from now on somebody has."""
        if not self._is_untold():
            return None
        self._told = True
        return self._error


@dataclass
class _Slot:
    """What one save in flight has for itself."""

    ranks: Ranks
    buffers: Buffers = field(default_factory=Buffers)
    handle: AsyncSave | None = None
    turn: int = 0

    @property
    def is_free(self) -> bool:
        """Whether nobody reads its memory."""
        return self.handle is None or self.handle.done


class _Saver:
    """The saves of one process group."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._control = self._own_ranks()
        self._slots: list[_Slot] = []
        self._turn = 0
        self._lock = threading.Lock()
        self.left: list[AsyncSave] = []  # saves of a group that is gone, whose errors nobody has asked for

    def _own_ranks(self) -> Ranks:
        """The same ranks with a gloo group of their own: no collective of ours meets one of the training's."""
        ranks = self._ranks
        if ranks.alone:
            return ranks
        training = ranks.group or dist.group.WORLD
        assert training is not None
        group = dist.new_group(
            dist.get_process_group_ranks(training),
            timeout=timeout_of(training),
            backend="gloo",
            use_local_synchronization=True,
        )
        return Ranks(ranks.rank, ranks.world, group, False)

    def handles(self) -> Iterator[AsyncSave]:
        yield from self.left
        yield from (slot.handle for slot in self._slots if slot.handle is not None)

    def save(
        self, path: str | None, collect: Callable[[], list[Leaf]], write: Write, max_in_flight: int, if_busy: IfBusy
    ) -> AsyncSave:
        with self._lock:  # two threads would copy into the same memory
            return self._save(path, collect, write, max_in_flight, if_busy)

    def _save(
        self, path: str | None, collect: Callable[[], list[Leaf]], write: Write, max_in_flight: int, if_busy: IfBusy
    ) -> AsyncSave:
        while len(self._slots) < max_in_flight:
            self._slots.append(_Slot(self._own_ranks()))
        slot = min(self._slots[:max_in_flight], key=lambda slot: slot.turn)  # the oldest, the same on every rank
        if if_busy == "wait" and slot.handle is not None:
            slot.handle._join()
        asked = self._ask(slot)
        leaves: list[Leaf] = []
        failure: BaseException | None = None
        if slot.is_free:  # copies while the ranks tell each other: the training waits for the longer of the two only
            try:
                found = collect()
                for leaf, copy in zip(found, slot.buffers.stage((leaf.key, leaf.value) for leaf in found), strict=True):
                    leaf.value = copy
                leaves = found
            except BaseException as error:  # noqa: BLE001 - raised below, when no rank is left waiting
                failure = error
        try:
            busy, failed = asked()
        except Exception as broken:
            raise failure or broken from broken
        if failed:
            untold = self._untold_anywhere()
            if failure is not None and not isinstance(failure, Exception):
                raise failure from untold
            raise untold
        if busy:
            if failure is not None:
                raise failure
            return AsyncSave(path, skipped=True)
        self._turn += 1
        slot.turn = self._turn
        handle = slot.handle = AsyncSave(path)
        handle._told = failure is not None  # the caller gets it at once; the thread tells the other ranks
        threading.Thread(
            target=_run, args=(handle, slot.ranks, leaves, failure, write), name="dcp_storage-save", daemon=True
        ).start()
        if failure is not None:
            raise failure
        return handle

    def _ask(self, slot: _Slot) -> Callable[[], tuple[bool, bool]]:
        """Begins to ask whether the slot is taken on any rank, and whether any rank has an error to raise.

        All ranks have to come to the same answer: one that raised or skipped alone would have its next save meet
        another save of the others, and what they write together would be a mixture of two states.

        Returns:
            Waits for the answers to both.
        """
        busy = not slot.is_free
        failed = any(handle._is_untold() for handle in self.handles())  # in this order: one may be ending meanwhile
        found = torch.tensor([busy, failed], dtype=torch.uint8, device="cpu")
        doing = "Looking at the saves in flight"
        work = None
        if not self._control.alone:
            with unwrapped(self._control, doing, None):
                work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._control.group, async_op=True)

        def answer() -> tuple[bool, bool]:
            if work is not None:
                with unwrapped(self._control, doing, None):
                    work.wait()
            return bool(found[0].item()), bool(found[1].item())

        return answer

    def _untold_anywhere(self) -> BaseException:
        """An error that some rank's caller has not seen, for all ranks to raise; this rank's own if there is one."""
        mine = [(handle, handle._untold()) for handle in self.handles()]
        self.left = []
        turns = {slot.turn for slot in self._slots for handle, error in mine if error and slot.handle is handle}
        error = next((error for _, error in mine if error), None)
        told = self._control.gather((turns, None if error is None else _sendable(error)))
        failed: set[int] = set().union(*(numbers for numbers, _ in told))
        for slot in self._slots:
            if slot.turn in failed and slot.handle is not None:  # it is ending on this rank, too: raised once
                slot.handle._join()
                slot.handle._told = True
        return error or next(sent for _, sent in told if sent is not None)


def _sendable(error: BaseException) -> BaseException:
    return portable(error, "Saving") if isinstance(error, Exception) else error


def _run(handle: AsyncSave, ranks: Ranks, leaves: list[Leaf], failure: BaseException | None, write: Write) -> None:
    try:

        def mine() -> None:
            if failure is not None:
                raise failure

        ranks.agree("Collecting the state", handle.path, mine)
        handle._end(write(ranks, leaves), None)
    except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it at wait or at the next save
        handle._end(None, error)


class Savers:
    """All asynchronous saves of this process: who they are, and that none is lost when the interpreter ends.

    There is one object of it in a process, since the interpreter's end is one for all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._savers: dict[Any, _Saver] = {}
        self._pid: int | None = None

    def saver(self, ranks: Ranks) -> _Saver:
        """The saver of a process group; on its first use all ranks of the group come here together."""
        with self._lock:
            if self._pid != os.getpid():  # the threads of a parent are not here
                self._savers, self._pid = {}, os.getpid()
                at_exit(self.finish)
            key: Any = None if ranks.alone else (dist.group.WORLD, ranks.group)
            gone = [k for k in self._savers if k is not None and k[0] is not dist.group.WORLD]
            if key not in self._savers:
                self._savers[key] = _Saver(ranks)
            for old in gone:  # of a default group that was destroyed
                if all(handle.done for handle in self._savers[old].handles()):
                    left = [handle for handle in self._savers.pop(old).handles() if handle._is_untold()]
                    self._savers[key].left += left
            return self._savers[key]

    def finish(self) -> None:
        """Waits for all saves, and shows the errors that nobody has asked for; at the interpreter's end."""
        if self._pid != os.getpid():
            return
        handles = [handle for saver in self._savers.values() for handle in saver.handles()]
        try:
            for handle in handles:
                handle._join()
        except KeyboardInterrupt:
            for handle in handles:
                if not handle.done:
                    lost = f"The asynchronous save to {handle.path} was not waited for, and may not be committed."
                    sys.stderr.write(f"dcp_storage: {lost}\n")
            raise
        finally:
            for handle in handles:
                error = handle._untold()
                if error is not None:
                    sys.excepthook(type(error), error, error.__traceback__)
                    lost = f"The asynchronous save to {handle.path} failed, and the program ended without asking."
                    sys.stderr.write(f"dcp_storage: {lost}\n")


def at_exit(call: Callable[[], None]) -> None:
    """Calls it when the main thread has ended, while threads and executors can still be started.

    ``atexit`` comes too late for that: executors take no work by then, and a save needs some. Handlers registered
    here run last first, so this one before that of ``concurrent.futures``, which was imported earlier.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        raise CheckpointError("This Python cannot wait for saves at its end.", kind="unsupported")
    register(call)
