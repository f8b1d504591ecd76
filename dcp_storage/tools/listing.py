"""The steps of a run in a list: what each folder holds, its size, age and versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fsspec.callbacks import Callback

from dcp_storage import names
from dcp_storage.errors import CheckpointNotFoundError
from dcp_storage.options import LoadOptions
from dcp_storage.tools.describe import COMMITTED, NOTHING, VOID
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport
from dcp_storage.tools.runs import Run, StepFolder

__all__ = ["Line", "Listing", "list_folder", "list_run"]


@dataclass(frozen=True)
class Line:
    """One folder of a run.

    Attributes:
        step: the step.
        folder: the folder's name.
        state: ``committed``, ``void`` (deleted), ``unfinished``, ``stock``, ``rank-by-rank`` or ``damaged``.
        commit: number of the highest commit; None where there is none.
        nbytes: bytes of all files of ours in it, leftovers included.
        files: how many shard files.
        modified: when the newest file was written, seconds since the epoch by the store's clock; None where the store
            does not say.
        time: when it committed, UTC, by the author's clock; None where it did not.
        world_size: ranks of the save; None where it is not known.
        torch: version of torch that saved.
        package: version of this package that saved.
        single_writer: whether the store could not promise create-if-absent.
        pinned: whether it is pinned.
    """

    step: int
    folder: str
    state: str
    commit: int | None
    nbytes: int
    files: int
    modified: float | None
    time: str | None
    world_size: int | None
    torch: str | None
    package: str | None
    single_writer: bool
    pinned: bool


@dataclass
class Listing(ToolReport):
    """The folders of a run that hold anything, ascending.

    Attributes:
        latest: the newest committed step; None where no step is committed.
        steps: a line for each folder.
        hidden: folders of deleted steps that :meth:`folded` left out.
    """

    latest: int | None = None
    steps: list[Line] = field(default_factory=list)
    hidden: int = 0

    def folded(self) -> Listing:
        """The same without the folders of deleted steps in which nothing but that is said."""
        steps = [line for line in self.steps if line.state != VOID or line.files]
        return replace(self, steps=steps, hidden=len(self.steps) - len(steps))


def list_run(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    callback: Callback | None = None,
) -> Listing:
    """Lists the steps of a run: one listing of the root, and two requests for each step.

    Args:
        root: the run's folder, whose sub-folders are ``step-<n>``.
        storage_options: handed to fsspec.
        options: concurrency and retries.
        callback: an fsspec Callback that is told of folders looked at.

    Raises:
        CheckpointNotFoundError: there are no steps; says so where the folder is itself a checkpoint.
        StoreError: the store failed.
    """
    return list_folder(folder_at(root, storage_options, options), callback)


def list_folder(folder: Folder, callback: Callback | None = None) -> Listing:
    """As :func:`list_run`, of a folder that may be opened through a wrapper."""
    run = Run(folder, callback)
    found = run.survey()
    if not found:
        itself = run.look_itself()
        raise CheckpointNotFoundError(
            f"{run.url}: there are no steps here (folders named step-<n>)."
            if itself.state == NOTHING
            else f"{run.url} is no run: it is a folder of one checkpoint, which {itself.says()}. Ask show, or verify.",
            path=run.url,
        )
    report = Listing(run.url, steps=[_line(each) for each in found])
    report.latest = max((line.step for line in report.steps if line.state == COMMITTED), default=None)
    for each in found:
        if each.error is not None:
            report.warn(str(each.error))
    report.requests, report.retries = run.requests, run.retries
    return report


def _line(found: StepFolder) -> Line:
    commit = found.current.commit if found.current is not None else None
    live = commit is not None and commit.manifest is not None
    return Line(
        step=found.step,
        folder=found.name,
        state=found.state,
        commit=found.current.number if found.current is not None else None,
        nbytes=found.nbytes,
        files=sum(1 for e in found.ours if e.name.endswith(".distcp") and names.is_ours(e.name)),
        modified=found.modified,
        time=commit.time if commit is not None and live else None,
        world_size=commit.world_size if commit is not None and live else None,
        torch=commit.torch if commit is not None and live else None,
        package=commit.package if commit is not None and live else None,
        single_writer=commit is not None and commit.single_writer,
        pinned=found.pinned,
    )
