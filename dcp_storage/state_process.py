"""Writing a staged state from another process, so that the training's interpreter has nothing to do with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, _save_state_dict, async_save
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_storage.errors import CheckpointError, portable
from dcp_storage.options import SaveReport
from dcp_storage.state_ranks import Ranks, unwrapped

__all__ = ["save_in_process"]


class _Staged(AsyncStager):
    """For values that are copies already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


def save_in_process(
    ranks: Ranks, flat: dict[str, Any], writer: StorageWriter, planner: SavePlanner, path: str | None
) -> SaveReport | None:
    """Saves in another process and waits for it.

    With a process group it is torch's own background process, one for each rank, which lives on for the next save;
    without one, a process of this save's.

    Args:
        ranks: who saves.
        flat: staged values; they travel through shared memory.
        writer: pickled to the other process.
        planner: pickled to it, too.
        path: the checkpoint, for errors.

    Returns:
        The writer's report, where it can be had.

    Raises:
        CheckpointError: the save failed, or its process died.
    """
    with unwrapped(ranks, "Saving", path):
        if not ranks.alone:
            with _deaf_to_ctrl_c():
                future: Any = async_save(
                    flat,
                    storage_writer=writer,
                    planner=planner,
                    process_group=ranks.group,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                    async_stager=_Staged(),
                )
            future.result()
            return None
        return _alone(flat, writer, planner, path)


def _alone(flat: dict[str, Any], writer: StorageWriter, planner: SavePlanner, path: str | None) -> SaveReport | None:
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, flat, writer, planner, path), daemon=True)
    with _deaf_to_ctrl_c():
        process.start()
    theirs.close()
    try:
        error, report = ours.recv()
    except EOFError:
        process.join()
        error, report = None, None
        raise CheckpointError(
            f"{path}: the process that was saving ended with status {process.exitcode} and said nothing.",
            path=path,
            kind="process",
        ) from None
    finally:
        ours.close()
    process.join()
    if error is not None:
        raise error
    return report if isinstance(report, SaveReport) else None


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes begun here are not interrupted by Ctrl-C, which a terminal sends to all of its processes.

    It is meant for the training, whose end waits for what is being saved. A process inherits what the thread that
    begins it holds back; that thread is one of ours, so that nothing changes for the program.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # beginning a process would begin this one first, and that ends what is held back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(
    answer: Connection, flat: dict[str, Any], writer: StorageWriter, planner: SavePlanner, path: str | None
) -> None:
    try:
        with unwrapped(Ranks(0, 1, None, True), "Saving", path):
            _save_state_dict(flat, writer, None, 0, True, planner)
        answer.send((None, getattr(writer, "report", None)))
    except BaseException as error:  # noqa: BLE001 - sent to the process that waits for it
        answer.send((portable(error, "Saving", path=path), None))
