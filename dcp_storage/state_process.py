"""Writing a staged state from another process, so that the training's interpreter has nothing to do with it."""

from __future__ import annotations

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


def _child(
    answer: Connection, flat: dict[str, Any], writer: StorageWriter, planner: SavePlanner, path: str | None
) -> None:
    try:
        with unwrapped(Ranks(0, 1, None, True), "Saving", path):
            _save_state_dict(flat, writer, None, 0, True, planner)
        answer.send((None, getattr(writer, "report", None)))
    except BaseException as error:  # noqa: BLE001 - sent to the process that waits for it
        answer.send((portable(error, "Saving", path=path), None))
