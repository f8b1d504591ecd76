"""The process that :class:`~dcp_storage.testing.ranks.RankPool` forks its ranks from.

Started as ``python -m dcp_storage.testing.ranks_worker FD``. It imports torch once, stays single-threaded (forking a
process with threads can copy a held lock), and forks the ranks of one run after another. Linux only.

Nothing outlives it: ranks get SIGKILL when it dies, it ends when its pipe closes, and as the subreaper it inherits,
kills and reaps whatever a rank leaves behind.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from dcp_storage.errors import Cause

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STACK_SECONDS = 1.0
WARM = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",  # a first redistribute of a DTensor imports it: 2 s in every rank
)


@dataclass(frozen=True)
class _Run:
    """One run as :class:`~dcp_storage.testing.ranks.RankPool` asks for it, in plain data."""

    folder: str
    file: str
    module: str
    qualname: str
    args: bytes
    world: int
    timeout: float
    init: bool
    env: dict[str, str]
    strict_warnings: bool
    path: list[str]


def main(argv: Sequence[str]) -> None:
    """Serves runs until the pipe closes.

    Args:
        argv: the number of the inherited pipe. Its first message is ``sys.path`` and the names of further modules to
            import before the first fork; its first answer is ``"ready"``.

    Raises:
        RuntimeError: an import has started a thread.
    """
    connection = Connection(int(argv[0]))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.path[:], preload = connection.recv()
    for name in (*preload, *WARM):
        importlib.import_module(name)
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads > 1:
            raise RuntimeError(f"importing {name} left {threads} threads; it is not safe to fork")
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise touch, and so copy, every page of torch
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        answer = _run(connection, _Run(**request))
        if answer is None:
            return
        connection.send(answer)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def _run(connection: Connection, run: _Run) -> dict[int, int | None] | None:
    """Forks the ranks and waits; exit codes by rank, None for one that was killed at the time-out.

    Returns None if the pool has gone away.
    """
    warm = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, tuple[int, int]] = {}
    codes: dict[int, int | None] = {}
    end = time.monotonic() + run.timeout
    try:
        for rank in range(run.world):
            pid = os.fork()
            if pid == 0:
                _be_rank(connection, warm, run, rank)
            running[os.pidfd_open(pid)] = (pid, rank)
        while running:
            ready = wait([connection, *running], max(0.0, end - time.monotonic()))
            if connection in ready:  # nothing is sent during a run: this is its end
                return None
            if not ready:
                _dump_stacks(run, running)
                codes.update({rank: None for _, rank in running.values()})
                return codes
            for fd in [fd for fd in running if fd in ready]:
                pid, rank = running.pop(fd)
                os.close(fd)
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return codes
    finally:
        for fd in running:
            os.close(fd)
        _sweep()


def _dump_stacks(run: _Run, running: dict[int, tuple[int, int]]) -> None:
    for pid, _ in running.values():
        os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_SECONDS
    files = [Path(run.folder, f"stack-{rank}") for _, rank in running.values()]
    while time.monotonic() < end and not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.01)
    time.sleep(0.05)  # a file that is not empty may still grow


def _sweep() -> None:
    """Kills and reaps all children; their own orphans become children of this process, so go on until none is left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _be_rank(connection: Connection, warm: int, run: _Run, rank: int) -> NoReturn:
    status = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == warm:  # else it died before the line above
            connection.close()
            answer = pickle.dumps(_answer(run, rank))
            partial = Path(run.folder, f"partial-{rank}")
            partial.write_bytes(answer)
            partial.rename(Path(run.folder, f"result-{rank}"))
            status = 0
    except BaseException:  # noqa: BLE001 - nothing may climb into the warm process's own code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no exit handlers, no waiting for threads: those of the warm process are not ours


def _answer(run: _Run, rank: int) -> tuple[Any, ...]:
    """``(True, pickled result)``, or ``(False, type, message, traceback, pickled exception or None)``."""
    try:
        with Path(run.folder, f"stack-{rank}").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            return True, pickle.dumps(_call(run, rank))
    except BaseException as error:  # noqa: BLE001 - CheckpointException and SystemExit are results of a rank, too
        cause = Cause.of(error)
        return False, cause.type, cause.message, "".join(traceback.format_exception(error)), _pickled(error)


def _call(run: _Run, rank: int) -> object:
    os.environ.update(run.env)
    sys.path[:] = run.path
    function = _function(run)
    args = pickle.loads(run.args)
    if run.init:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{run.folder}/rendezvous",
            rank=rank,
            world_size=run.world,
            timeout=timedelta(seconds=run.timeout),
        )
        dist.barrier()  # a rank that is done at once must not hang up on one that still connects
    if run.strict_warnings:
        warnings.resetwarnings()
        warnings.simplefilter("error")
    return function(rank, run.world, *args)


def _function(run: _Run) -> Callable[..., object]:
    found = importlib.util.find_spec(run.module)
    if found is None or found.origin is None or Path(found.origin).resolve() != Path(run.file).resolve():
        # pytest can load test modules under names that the import system does not know
        found = importlib.util.spec_from_file_location(run.module, run.file)
        if found is None or found.loader is None:
            raise ImportError(f"{run.file} cannot be imported as {run.module}")
        module = importlib.util.module_from_spec(found)
        sys.modules[run.module] = module
        found.loader.exec_module(module)
    target: Any = importlib.import_module(run.module)
    for part in run.qualname.split("."):
        target = getattr(target, part)
    function: Callable[..., object] = target
    return function


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - a foreign __reduce__ may do anything; the text of the error gets through anyway
        return None
    return pickled


if __name__ == "__main__":
    main(sys.argv[1:])
