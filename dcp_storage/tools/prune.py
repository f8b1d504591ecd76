"""Pruning a run, or one checkpoint's folder: steps that a rule lets go, and what dead attempts left."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fsspec.callbacks import Callback

from dcp_storage import names
from dcp_storage.current import list_commits
from dcp_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CommitUnknownError,
    CorruptCheckpointError,
    StoreError,
)
from dcp_storage.fence import Sweep, choose_all, prune_folder
from dcp_storage.options import LoadOptions
from dcp_storage.tools.delete import FINISH, RETIRE, seconds_of, still_committed, sweep_with
from dcp_storage.tools.describe import COMMITTED, DAMAGED, NOTHING, VOID
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport, problem_of
from dcp_storage.tools.retention import Choice, Rule, choose
from dcp_storage.tools.runs import Run, StepFolder

__all__ = ["PruneReport", "Pruned", "prune", "prune_at", "retire", "sweep"]

_HARMLESS = ("pinned", "in-use")


@dataclass
class Pruned:
    """What becomes, or would become, of one folder.

    Attributes:
        folder: its name.
        step: the step that it holds; None where the folder is no step of a run.
        action: ``delete`` (a committed step that the rule lets go), ``finish`` (the rest of a delete that was killed),
            ``sweep`` (leftovers of dead attempts, old commit objects, stale uploads) or ``keep`` (nothing to do).
        frees: bytes in what is removed; those of open uploads are not known.
        files: how many files are removed.
        uploads: how many open uploads are aborted.
        why: a sentence, where something was left alone.
    """

    folder: str
    step: int | None
    action: str = "keep"
    frees: int = 0
    files: int = 0
    uploads: int = 0
    why: str = ""


@dataclass
class PruneReport(ToolReport):
    """What a prune did, or would do.

    Attributes:
        applied: whether anything was changed; False for a dry run.
        deleted: committed steps that go, ascending.
        kept: committed steps that stay, ascending.
        frees: bytes in all that is removed.
        files: how many files that are.
        uploads: open uploads that are aborted.
        folders: what becomes of each folder, ascending.
    """

    applied: bool = False
    deleted: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    frees: int = 0
    files: int = 0
    uploads: int = 0
    folders: list[Pruned] = field(default_factory=list)


def prune(
    root: str | os.PathLike[str],
    *,
    keep_latest: int | None = None,
    keep_every: int | None = None,
    keep: Iterable[int] = (),
    grace: timedelta = timedelta(days=7),
    apply: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    assume_single_writer: bool = False,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    callback: Callback | None = None,
) -> PruneReport:
    """Deletes the steps of a run that a rule lets go, and what dead attempts left in its folders; a dry run by default.

    What it never deletes: the last good checkpoint (the newest whole one), one that is being saved or replaced, a
    pinned one, one that stock torch wrote or that was saved without collectives, and files and folders that are not
    ours by name. Everything is deleted behind a fence, so a save that began before can only fail, not be lost.

    Args:
        root: a run, whose folders are ``step-<n>``, or one checkpoint's folder.
        keep_latest: keep so many of the newest committed steps. Default: no step is deleted.
        keep_every: keep every step that this number divides; without ``keep_latest`` the newest one too.
        keep: keep these steps too.
        grace: leftovers, commit objects and open uploads go once they are older than this by the store's clock. It must
            be longer than any pause of a writer that is still to be believed. Default 7 days.
        apply: False only finds out what would be done. Default False.
        storage_options: handed to fsspec.
        assume_single_writer: needed on stores that cannot refuse a second create: your word that no job writes here
            now. Default False.
        options: concurrency, retries and deadlines.
        callback: an fsspec Callback that is told of folders looked at, and pruned.

    Returns:
        The report; ``ok`` is False where a damaged step was found, or a folder could not be pruned.

    Raises:
        CheckpointNotFoundError: there is neither a run nor a checkpoint.
        CheckpointError: the store cannot hold off a save under way (kind ``single-writer``).
        StoreError: the store failed. What was done is done; the next prune goes on.
    """
    return prune_at(
        folder_at(root, storage_options, options),
        Rule(keep_latest, keep_every, frozenset(keep)),
        grace=seconds_of(grace),
        apply=apply,
        assume_single_writer=assume_single_writer,
        callback=callback,
    )


def prune_at(
    folder: Folder,
    rule: Rule,
    *,
    grace: float,
    apply: bool,
    assume_single_writer: bool,
    callback: Callback | None = None,
) -> PruneReport:
    """As :func:`prune`, of a folder that may be opened through a wrapper; the grace in seconds."""
    run = Run(folder, callback)
    report = PruneReport(run.url, applied=apply)
    word = assume_single_writer
    which = [(step, name) for step, named in run.folders().items() for name in named]
    choice = Choice()
    if which:
        found = run.look_at(which)
        choice = choose(run, found, rule)
        report.folders += retire(run, choice, report, grace=grace, apply=apply, assume_single_writer=word)
        gone = {f.name for f in choice.gone}
        rest = [f for f in found if f.name not in gone and f.state != NOTHING]
        swept = run.at_once(lambda f: sweep(run, f, grace=grace, apply=apply, assume_single_writer=word), rest)
    else:
        found = [_itself(run)]
        if not rule.keeps_all:
            report.warn(f"{run.url} is one checkpoint and no run: no step of it can be deleted by a rule.")
        swept = [sweep(run, found[0], grace=grace, apply=apply, assume_single_writer=word)]
    for pruned, error in swept:
        pruned.why = pruned.why or choice.spared.get(pruned.folder, "")
        report.folders.append(pruned)
        if error is not None:
            report.problems.append(problem_of(error))
    report.folders.sort(key=lambda p: (p.step or 0, p.folder))
    report.deleted = sorted(p.step for p in report.folders if p.action == "delete" and p.step is not None)
    report.kept = sorted({f.step for f in found if f.state == COMMITTED and which} - set(report.deleted))
    report.frees = sum(p.frees for p in report.folders)
    report.files = sum(p.files for p in report.folders)
    report.uploads = sum(p.uploads for p in report.folders)
    report.requests, report.retries = run.requests, run.retries
    return report


def retire(
    run: Run, choice: Choice, report: ToolReport, *, grace: float, apply: bool, assume_single_writer: bool
) -> list[Pruned]:
    """Deletes the steps that go, each after a look whether the good one that stays is still there.

    Args:
        run: the run.
        choice: which steps go.
        report: gets a problem for every damaged step, and for every one that could not be deleted.
        grace: seconds; a step beside which files younger than this lie, which its commit does not name, stays.
        apply: False only finds out what would be done.
        assume_single_writer: the user's word for stores that cannot refuse a second create.
    """
    report.problems += [problem_of(error) for error in choice.damaged]
    steps = RETIRE if apply else RETIRE[: RETIRE.index(choose_all) + 1]

    def one(found: StepFolder) -> tuple[Pruned, CheckpointError | None]:
        pruned = Pruned(found.name, found.step)
        if apply and (choice.good is None or not still_committed(run, choice.good)):
            gone = CheckpointError(
                f"{run.url}: the good step that was to stay is gone; nothing more is deleted.",
                path=run.url,
                kind="last-good",
            )
            return _left(pruned, gone), gone
        with run.opened(run.folder.child(found.name)) as opened:
            try:
                done = sweep_with(steps, opened.store, grace, assume_single_writer)
            except (CheckpointReplacedError, CheckpointNotFoundError) as lost:
                return _left(pruned, lost), None
            except CheckpointError as error:
                return _left(pruned, error), _serious(error)
        return _note(pruned, "delete", done), None

    results = run.at_once(one, choice.gone)
    report.problems += [problem_of(error) for _, error in results if error is not None]
    return [pruned for pruned, _ in results]


def sweep(
    run: Run, found: StepFolder, *, grace: float, apply: bool, assume_single_writer: bool
) -> tuple[Pruned, CheckpointError | None]:
    """Removes what dead attempts left in one folder, and finishes a delete that was killed.

    Returns:
        What became of it, and what kept it from being pruned.
    """
    inside = found.step >= 0
    pruned = Pruned(found.name, found.step if inside else None)
    if found.state == DAMAGED and any(e.name == names.STOCK_VIEW for e in found.entries):
        # The stock view is written after a commit only: what cannot be read now was a checkpoint once.
        torn = CorruptCheckpointError(
            f"{found.url}: its commit object cannot be read, and is left alone with all files. Restore it from a copy.",
            path=found.url,
            file=names.commit_name(max(list_commits(found.entries))),
        )
        return _left(pruned, torn), torn
    loose = any(names.is_ours(e.name) and not names.commit_number(e.name) for e in found.entries)
    with run.opened(run.folder.child(found.name) if inside else run.folder) as opened:
        try:
            if found.state == VOID and loose:
                steps = FINISH if apply else FINISH[:2]
                done = sweep_with(steps, opened.store, grace, assume_single_writer)
                if done.doomed:
                    return _note(pruned, "finish", done), None
            done = prune_folder(opened.store, grace=grace, apply=apply, assume_single_writer=assume_single_writer)
        except CheckpointReplacedError as lost:
            return _left(pruned, lost), None
        except CheckpointError as error:
            return _left(pruned, error), _serious(error)
    if found.state == VOID and not done.why and not done.old_commits:
        done.why = "deleted; its commit objects hold late writers off until they are older than the grace"
    return _note(pruned, "sweep", done), None


def _serious(error: CheckpointError) -> CheckpointError | None:
    """The error where it goes into the report, None where it is only a reason; raises what ends the prune."""
    if error.kind == "single-writer" or (isinstance(error, StoreError) and not isinstance(error, CommitUnknownError)):
        raise error
    return None if error.kind in _HARMLESS else error


def _left(pruned: Pruned, error: CheckpointError) -> Pruned:
    pruned.why = str(error)
    return pruned


def _note(pruned: Pruned, action: str, done: Sweep) -> Pruned:
    pruned.frees = done.frees
    pruned.files = len(done.doomed) + len(done.old_commits)
    pruned.uploads = len(done.uploads)
    pruned.why = done.why
    pruned.action = action if pruned.files or pruned.uploads else "keep"
    return pruned


def _itself(run: Run) -> StepFolder:
    """The folder as a checkpoint.

    Raises:
        CheckpointNotFoundError: it holds nothing of ours.
    """
    found = run.look_itself()
    if found.state == NOTHING:
        raise CheckpointNotFoundError(
            f"{run.url}: there is neither a run (folders step-<n>) nor a checkpoint here.", path=run.url
        )
    return found
