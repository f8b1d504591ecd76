"""Deleting one checkpoint: what may not be deleted, and how a delete that was killed is finished.

The steps are those of :mod:`dcp_storage.fence`, with looks at the same listing put before the fence: at a pin, and at
files that a save under way may have written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dcp_storage import names
from dcp_storage.current import check_sizes, nothing_committed, read_current, read_manifest, read_standing
from dcp_storage.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    InvalidLocationError,
)
from dcp_storage.fence import (
    Step,
    Sweep,
    check_right,
    choose_all,
    drop_files,
    drop_listed_view,
    drop_uploads,
    drop_view,
    fence_prune,
    fence_void,
    list_folder,
)
from dcp_storage.options import LoadOptions
from dcp_storage.store import Entry, Store
from dcp_storage.tools.describe import COMMITTED
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport
from dcp_storage.tools.runs import Run, StepFolder, step_number

__all__ = [
    "FINISH",
    "FORCED",
    "RETIRE",
    "DeleteReport",
    "choose_dead",
    "delete",
    "delete_at",
    "find_whole",
    "is_whole",
    "refuse_busy",
    "refuse_pinned",
    "seconds_of",
    "still_committed",
    "sweep_with",
]


@dataclass
class DeleteReport(ToolReport):
    """What a delete did.

    Attributes:
        commit: number of the void that says that the checkpoint was deleted.
        files: files that were removed.
        frees: bytes in them.
    """

    commit: int | None = None
    files: int = 0
    frees: int = 0


def delete(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    grace: timedelta = timedelta(days=7),
    force: bool = False,
    assume_single_writer: bool = False,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> DeleteReport:
    """Deletes the committed checkpoint in a folder: a void commit first, then its files. Other files stay.

    A delete that was killed is finished by calling it again. What never committed is for ``prune``. Commit objects
    stay until a prune after the grace, since they hold late writers off.

    Args:
        path: the checkpoint's folder.
        storage_options: handed to fsspec.
        grace: a checkpoint beside which there are files younger than this, which its commit does not name, is being
            replaced by a save, and is refused. Default 7 days.
        force: delete it although it is the last good step of its run, or a save may be under way in its folder (that
            save then fails). A pin holds all the same. Default False.
        assume_single_writer: needed on stores that cannot refuse a second create: your word that no other job writes
            here. Default False.
        options: retries and deadlines.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        NotCommittedError: nothing is committed there, or it was deleted before and nothing of it is left.
        CheckpointError: it is pinned (kind ``pinned``), the last good step of its run (``last-good``), a save may be
            under way (``in-use``), or the store cannot hold that off (``single-writer``). Nothing was deleted.
        CheckpointReplacedError: another save, delete or prune was first; nothing was deleted.
        CommitUnknownError: it cannot be known whether the void was made; nothing was deleted.
        CorruptCheckpointError: its manifest cannot be read, so nobody knows whether a save is under way; ``force``.
        StoreError: the store failed; after the void the checkpoint is deleted, and the rest is for the next call.
    """
    return delete_at(
        folder_at(path, storage_options, options),
        grace=seconds_of(grace),
        force=force,
        assume_single_writer=assume_single_writer,
    )


def delete_at(folder: Folder, *, grace: float, force: bool, assume_single_writer: bool) -> DeleteReport:
    """As :func:`delete`, of a folder that may be opened through a wrapper; the grace in seconds."""
    report = DeleteReport(folder.location.url)
    if not force:
        _refuse_last(folder)
    opened = folder.open()
    try:
        sweep = Sweep(opened.store, grace=grace, assume_single_writer=assume_single_writer)
        list_folder(sweep)
        if sweep.current is not None and sweep.live is None:
            sweep = sweep_with(FINISH, opened.store, grace, assume_single_writer)
            if not sweep.doomed:
                raise nothing_committed(opened.store, sweep.current)
        else:
            sweep = sweep_with(FORCED if force else RETIRE, opened.store, grace, assume_single_writer)
        report.commit, report.files, report.frees = sweep.fenced, len(sweep.doomed), sweep.frees
    finally:
        opened.count_into(report)
        opened.store.close()
    return report


def sweep_with(steps: tuple[Step, ...], store: Store, grace: float, assume_single_writer: bool) -> Sweep:
    """Takes the steps of a row, one after another, on one folder."""
    sweep = Sweep(store, grace=grace, assume_single_writer=assume_single_writer)
    for step in steps:
        step(sweep)
    return sweep


def refuse_pinned(sweep: Sweep) -> None:
    """A pinned checkpoint is not deleted by anybody."""
    if any(e.name == names.PIN for e in sweep.listing):
        raise CheckpointError(
            f"{sweep.store.url} is pinned; unpin it first.", path=sweep.store.url, key=names.PIN, kind="pinned"
        )


def refuse_busy(sweep: Sweep) -> None:
    """A folder in which a save may be under way is left alone: one with files, or uploads, that the live commit does
    not name and that are younger than the grace.
    """
    if sweep.live is None:
        raise nothing_committed(sweep.store, sweep.current)
    sweep.horizon = sweep.store.now() - sweep.grace
    named = _named(sweep)
    loose = [e for e in sweep.listing if names.is_ours(e.name) and not names.commit_number(e.name)]
    young = [e.name for e in loose if e.name not in named and not sweep.is_old(e)]
    young += [e.name for e in sweep.store.open_uploads() if names.is_ours(e.name) and not sweep.is_old(e)]
    if young:
        raise CheckpointError(
            f"{sweep.store.url}: a save may be under way here: {', '.join(sorted(set(young))[:3])} is younger than the "
            "grace, and the commit does not name it.",
            path=sweep.store.url,
            key=min(young),
            kind="in-use",
        )


def choose_dead(sweep: Sweep) -> None:
    """For a delete that was killed: files and open uploads that are older than the void, if no younger file is there.

    Whatever was written before the void belongs to what was deleted, or to an attempt that the void has ended, so no
    grace is needed. The store's clock may count whole seconds: what is as old as the void waits for the grace.
    """
    if sweep.current is None or sweep.live is not None:
        return
    listed = {e.name: e for e in sweep.listing}
    if names.PIN in listed or any(names.rank_commit(name) is not None for name in listed):
        return
    void = listed[names.commit_name(sweep.current.number)]
    loose = [e for e in sweep.listing if names.is_ours(e.name) and not names.commit_number(e.name)]

    def is_older(entry: Entry) -> bool:
        return entry.modified is not None and void.modified is not None and entry.modified < void.modified

    if loose and all(map(is_older, loose)):
        sweep.doomed = loose
        sweep.uploads = [e.name for e in sweep.store.open_uploads() if names.is_ours(e.name) and is_older(e)]


RETIRE: tuple[Step, ...] = (
    list_folder,
    refuse_pinned,
    refuse_busy,
    choose_all,
    check_right,
    fence_void,
    drop_view,
    drop_files,
)
"""How prune, retention and ``delete`` take a committed checkpoint."""

FORCED: tuple[Step, ...] = tuple(step for step in RETIRE if step is not refuse_busy)
"""The same, whether or not a save is under way."""

FINISH: tuple[Step, ...] = (
    list_folder,
    choose_dead,
    check_right,
    fence_prune,
    drop_uploads,
    drop_listed_view,
    drop_files,
)
"""How a delete that was killed after its void is finished, behind a void of its own."""


def is_whole(run: Run, found: StepFolder) -> CorruptCheckpointError | IncompatibleCheckpointError | None:
    """What is wrong with a committed step: its manifest is read, and the sizes of its files compared; None if nothing.

    Raises:
        StoreError: the store failed.
    """
    with run.opened(run.folder.child(found.name)) as opened:
        if found.current is None:
            raise nothing_committed(opened.store, None)
        try:
            manifest = read_manifest(opened.store, found.current)
            check_sizes(opened.store, manifest, [record.name for record in manifest.files])
        except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
            return error
    return None


def find_whole(run: Run, newest_first: list[StepFolder]) -> tuple[StepFolder | None, list[CheckpointError]]:
    """The first committed step that is whole, and what is wrong with those before it."""
    wrong: list[CheckpointError] = []
    for found in newest_first:
        error = is_whole(run, found)
        if error is None:
            return found, wrong
        wrong.append(error)
    return None, wrong


def seconds_of(grace: timedelta) -> float:
    """The grace in seconds.

    Raises:
        TypeError: it is no timedelta.
        ValueError: it is negative.
    """
    if not isinstance(grace, timedelta):
        raise TypeError(f"grace is a datetime.timedelta, not {grace!r}.")
    if grace < timedelta(0):
        raise ValueError(f"grace must not be negative, as {grace} is.")
    return grace.total_seconds()


def still_committed(run: Run, found: StepFolder) -> bool:
    """Whether a step is still committed, looked at again."""
    with run.opened(run.folder.child(found.name)) as opened:
        current = read_current(opened.store)
    return current is not None and current.commit.manifest is not None


def _named(sweep: Sweep) -> set[str]:
    if sweep.live is None or sweep.live.commit.manifest is None:
        return set()
    manifest = read_standing(sweep.store, sweep.live)
    return {names.STOCK_VIEW, sweep.live.commit.manifest.name, *(record.name for record in manifest.files)}


def _refuse_last(folder: Folder) -> None:
    """Refuses the last good step of a run; a checkpoint that is no step of one may go."""
    step = step_number(folder.name)
    if step is None:
        return
    try:
        run = Run(folder.parent())
    except InvalidLocationError:
        return  # it lies in no folder
    own = run.look(step, folder.name)
    if own.state != COMMITTED:
        return
    others = [(n, name) for n, named in run.folders().items() for name in named if name != folder.name]
    for n, name in reversed(others):
        other = run.look(n, name)
        if other.state == COMMITTED and is_whole(run, other) is None:
            return
    raise CheckpointError(
        f"{own.url} is the last good step of {run.url}; nothing was deleted. Pass force=True to delete it anyway.",
        path=own.url,
        kind="last-good",
    )
