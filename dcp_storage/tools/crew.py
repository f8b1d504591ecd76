"""Many tasks in flight, within a number of threads and a budget of bytes; the first error stops the rest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from dcp_storage.budget import Budget

__all__ = ["Crew"]


class Crew:
    """A context manager. When its block ends, every task has ended; the first error of a task is raised then.

    Where the block itself raises (an interrupt, say), tasks that have not begun are dropped and the rest awaited.

    Args:
        threads: tasks at once.
        budget: bytes that tasks, waiting ones too, may hold at once; a single larger one goes through alone.

    Attributes:
        failed: set when a task failed or the block raised; a long task should look at it and return.
    """

    def __init__(self, threads: int, budget: int) -> None:
        self.failed = threading.Event()
        self._budget = Budget(budget)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dcp_storage-tool")
        self._futures: deque[Future[None]] = deque()
        self._first: BaseException | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Crew:
        return self

    def do(self, cost: int, task: Callable[[], None]) -> None:
        """Has a task done; waits until its bytes are free.

        Args:
            cost: bytes that the task holds while it runs.
            task: run on another thread, unless something failed before.

        Raises:
            BaseException: what the first task that failed raised.
        """
        self._budget.acquire(cost)
        if self.failed.is_set():
            self._budget.release(cost)
            self._raise()
        self._futures.append(self._pool.submit(self._run, cost, task))
        while self._futures and self._futures[0].done():
            self._futures.popleft()

    def _run(self, cost: int, task: Callable[[], None]) -> None:
        try:
            if not self.failed.is_set():
                task()
        except BaseException as error:  # noqa: BLE001 - raised again on the thread that waits
            with self._lock:
                self._first = self._first or error
            self.failed.set()
        finally:
            self._budget.release(cost)

    def _raise(self) -> None:
        if self._first is not None:
            raise self._first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed.set()  # tasks that have not begun then do nothing
        # Not by joining threads: a join that was interrupted takes its thread for ended ever after.
        try:
            wait(self._futures)
        except BaseException:  # an interrupt while the last tasks run: they are awaited all the same
            self.failed.set()
            wait(self._futures)
            raise
        finally:
            self._pool.shutdown(wait=True)
        if error is None:
            self._raise()
