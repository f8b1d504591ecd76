"""Several ranks with a gloo process group, started in milliseconds.

A :class:`RankPool` keeps one warm process that has imported torch, and forks the ranks of each run from it: new
processes, a new process group, none of the seconds that importing torch costs. Linux only; nothing outlives the pool.

Example::

    def sums(rank, world, start):
        tensor = torch.tensor([start + rank])
        dist.all_reduce(tensor)
        return tensor.item()

    with RankPool() as pool:
        assert pool.run(sums, 4, 10) == [46] * 4
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal as signals
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["RankFailure", "RankPool", "RanksFailed", "RanksTimedOut"]

START_SECONDS = 120.0
MARGIN_SECONDS = 15.0
"""How much longer than a run's time-out the warm process may take to say so."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: which one.
        type: qualified name of the exception's class; ``"signal"`` or ``"exit"`` where there was none.
        message: its text.
        traceback: the formatted traceback, with causes; empty where there was no exception.
        exception: the exception itself where it pickles, else None.
        signal: the number of the signal that killed the rank, None where none did.
        exit_code: what the rank exited with where it left no result, else None.
    """

    rank: int
    type: str
    message: str
    traceback: str = ""
    exception: BaseException | None = None
    signal: int | None = None
    exit_code: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type}: {self.message}\n{self.traceback}"


class RanksFailed(Exception):  # noqa: N818 - reads as what happened, beside RanksTimedOut
    """Some ranks of a run failed.

    Attributes:
        failures: by rank.
    """

    def __init__(self, failures: dict[int, RankFailure]) -> None:
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        parts = [f"ranks {sorted(self.failures)} failed", *(str(self.failures[rank]) for rank in sorted(self.failures))]
        return "\n".join(parts)


class RanksTimedOut(Exception):  # noqa: N818 - see RanksFailed
    """Some ranks were still running at the time-out, and were killed.

    Attributes:
        seconds: the time-out.
        running: rank to the stacks of its threads, as far as it could still write them.
        failures: by rank, of those that had failed before.
    """

    def __init__(self, seconds: float, running: dict[int, str], failures: dict[int, RankFailure]) -> None:
        super().__init__(seconds, running, failures)
        self.seconds = seconds
        self.running = running
        self.failures = failures

    def __str__(self) -> str:
        parts = [f"ranks {sorted(self.running)} were still running after {self.seconds} s"]
        parts += [f"rank {rank} was at:\n{self.running[rank]}" for rank in sorted(self.running)]
        parts += [str(self.failures[rank]) for rank in sorted(self.failures)]
        return "\n".join(parts)


class RankPool:
    """A context manager that runs functions on ranks. One run at a time; further threads wait.

    Ranks see the warm process's modules: code that changes while the pool lives is not seen. Their output goes where
    that of this process went when the pool began.

    Args:
        preload: dotted names of further modules to import once, e.g. those that the test modules import. A module
            that starts threads on import is refused when the pool begins.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.preload = tuple(preload)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RankPool:
        ours, theirs = multiprocessing.Pipe()
        self._connection = ours
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dcp_storage.testing.ranks_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then closes the pool
            )
        ours.send((list(sys.path), self.preload))
        self._receive(START_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the warm process and all ranks. May be called again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(MARGIN_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def run(
        self,
        fn: Callable[..., object],
        world: int,
        *args: object,
        timeout: float = 60.0,
        init: bool = True,
        env: Mapping[str, str] | None = None,
        strict_warnings: bool = False,
        allow_failures: bool = False,
    ) -> list[Any]:
        """Calls ``fn(rank, world, *args)`` on every rank, each a process of its own.

        Args:
            fn: a function at the top level of an importable module (or a static method of a class there).
            world: how many ranks.
            args: pickled to the ranks.
            timeout: seconds for the whole run, and for each collective in it.
            init: whether the ranks get a gloo process group.
            env: environment variables to set in the ranks.
            strict_warnings: whether warnings are errors while ``fn`` runs; else Python's default filters hold.
            allow_failures: whether a failed rank's :class:`RankFailure` takes its place in the list.

        Returns:
            What each rank returned, by rank.

        Raises:
            RanksFailed: a rank raised or died, and ``allow_failures`` is false.
            RanksTimedOut: a rank was still running at the time-out. All are killed.
            ValueError: ``fn`` cannot be found by name, or ``world`` is less than 1.
            RuntimeError: the pool is not open, or its warm process died.
        """
        if world < 1:
            raise ValueError(f"world must be 1 or more, not {world}")
        address = _address(fn)
        with self._lock, tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            request = {
                **address,
                "folder": folder,
                "args": pickle.dumps(args),
                "world": world,
                "timeout": timeout,
                "init": init,
                "env": dict(env or {}),
                "strict_warnings": strict_warnings,
                "path": list(sys.path),
            }
            if self._connection is None:
                raise RuntimeError("the pool is not open: use it in a with statement")
            self._connection.send(request)
            codes: dict[int, int | None] = self._receive(timeout + MARGIN_SECONDS)
            results, failures, running = _outcomes(Path(folder), codes)
        if running:
            raise RanksTimedOut(timeout, running, failures)
        if failures and not allow_failures:
            raise RanksFailed(failures)
        return [failures.get(rank, results.get(rank)) for rank in range(world)]

    def _receive(self, seconds: float) -> Any:
        if self._connection is None or self._process is None:
            raise RuntimeError("the pool is not open: use it in a with statement")
        try:
            if not self._connection.poll(seconds):
                self._process.kill()
                raise RuntimeError(f"the warm process of the rank pool did not answer within {seconds} s")
            return self._connection.recv()
        except BaseException as error:
            # Also after a KeyboardInterrupt: the next run would otherwise read this one's answer.
            process = self._process
            self.close()
            if isinstance(error, EOFError):
                code = process.returncode
                raise RuntimeError(f"the warm process of the rank pool ended with status {code}") from error
            raise


def _address(fn: Callable[..., object]) -> dict[str, str]:
    """Where a rank finds ``fn``. Raises ValueError if it cannot."""
    qualname = getattr(fn, "__qualname__", "<no name>")
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__" or "<" in qualname:
        raise ValueError(f"{fn!r} is no function at the top level of a module that ranks can import")
    return {"module": module.__name__, "qualname": qualname, "file": str(file)}


def _outcomes(
    folder: Path, codes: Mapping[int, int | None]
) -> tuple[dict[int, object], dict[int, RankFailure], dict[int, str]]:
    results: dict[int, object] = {}
    failures: dict[int, RankFailure] = {}
    running: dict[int, str] = {}
    for rank, code in codes.items():
        if code is None:
            stack = folder / f"stack-{rank}"
            running[rank] = stack.read_text(errors="replace") if stack.exists() else ""
        elif code < 0:
            message = f"killed by {signals.Signals(-code).name}"
            failures[rank] = RankFailure(rank, "signal", message, signal=-code)
        elif not (folder / f"result-{rank}").exists():
            message = f"exited with status {code} and left no result"
            failures[rank] = RankFailure(rank, "exit", message, exit_code=code)
        else:
            good, *rest = pickle.loads((folder / f"result-{rank}").read_bytes())
            if good:
                results[rank] = pickle.loads(rest[0])
            else:
                kind, message, trace, pickled = rest
                exception = None if pickled is None else pickle.loads(pickled)
                failures[rank] = RankFailure(rank, kind, message, trace, exception)
    return results, failures, running
