"""What the killed processes do. Ranks import this module: it needs no server and no pytest."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_storage import FsspecStorageWriter, SaveOptions
from dcp_storage.errors import CheckpointError
from dcp_storage.fence import prune_folder
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.stores.location import Location, parse_location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faults import FAULTS, HEALTHY, NamedFault
from dcp_storage.tools.adopt import adopt_folder
from dcp_storage.tools.copy import copy_folder
from dcp_storage.tools.delete import RETIRE, delete_at, sweep_with
from dcp_storage.tools.opening import Folder
from dcp_storage.tools.prune import prune_at
from dcp_storage.tools.retention import Rule
from dcp_storage.wrappers import RetryingStore
from tests.crash.points import Mode, Point, Seam
from tests.crash.seams import AtStore, at_syscalls
from tests.crash.values import PART, SHARD, state

__all__ = ["ASYNC", "NEW", "OPTIONS", "Job", "Outcome", "do", "save_on_ranks"]

NEW = 2
"""The version that a save writes."""

ASYNC = ("one", "two")
"""The folders of two saves that are in flight at once."""

OPTIONS = SaveOptions(part_size=PART, shard_size=SHARD, max_concurrency=4, attempts=4, deadline=20)


@dataclass(frozen=True)
class Job:
    """What a process is to do, and where it is cut.

    Attributes:
        work: a name in the table of works.
        url: the folder.
        options: for fsspec.
        notes: a folder for what the process leaves to the trial.
        seam: ``store``, ``disk`` or ``http`` (which is cut outside).
        at: where; None only counts.
        mode: what happens there.
        fault: name of the protection that is taken out; empty for none.
        source: for a copy.
        rank: which rank is cut.
    """

    work: str
    url: str
    options: Mapping[str, Any]
    notes: str
    seam: str
    at: Point | None = None
    mode: Mode = "before"
    fault: str = ""
    source: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a process ended that was not killed.

    Attributes:
        points: every call that passed the seam.
        fired: whether the point was reached.
        errors: class name of what each piece of work raised, None where it returned.
        messages: their texts.
    """

    points: tuple[Point, ...]
    fired: bool
    errors: tuple[str | None, ...]
    messages: tuple[str, ...] = ()


@dataclass
class _Cut:
    """Opens stores with the seam in them."""

    job: Job
    seam: Seam
    fault: NamedFault = field(init=False)

    def __post_init__(self) -> None:
        self.fault = FAULTS[self.job.fault] if self.job.fault else HEALTHY

    def opener(self, location: Location, options: Mapping[str, Any], max_concurrency: int) -> Store:
        """In place of the library's own."""
        store: Store
        if location.protocol == "file":
            calls = self.fault.calls(Syscalls())
            if self.job.seam == "disk":
                calls = at_syscalls(calls, self.seam, str(Path(self.job.url).parent))
            store = LocalStore(location.path, calls=calls)
        else:
            store = open_store(location, options, max_concurrency=max_concurrency)
            store.min_part_size = PART  # neither of the servers minds, and S3's 5 MiB would only take time
        store = self.fault.store(store)
        if self.job.seam != "store":
            return store
        label = location.url.removeprefix(self.job.url).strip("/")
        return AtStore(store, self.seam, f"{label} " if label else "")

    def writer(self, url: str | None) -> FsspecStorageWriter:
        """A writer that is cut."""
        writer = FsspecStorageWriter(url, storage_options=self.job.options, overwrite=True, options=OPTIONS)
        writer._steps = self.fault.save(writer._steps)
        writer._opener = self.opener
        return writer

    def folder(self) -> Folder:
        """The folder, for a tool that is cut."""
        return Folder(parse_location(self.job.url), self.job.options, OPTIONS, self.opener)


def _save(cut: _Cut) -> None:
    dcp.save(dict(state(NEW)), storage_writer=cut.writer(cut.job.url), no_dist=True)


def _delete(cut: _Cut) -> None:
    if cut.job.fault:
        opened = cut.folder().open()
        sweep_with(cut.fault.delete(RETIRE), opened.store, 0, False)
    else:
        delete_at(cut.folder(), grace=0, force=False, assume_single_writer=False)


def _prune(cut: _Cut) -> None:
    if cut.job.fault:
        prune_folder(cut.folder().open().store, grace=0, steps=cut.fault.prune_steps)
    else:
        prune_at(cut.folder(), Rule(), grace=0, apply=True, assume_single_writer=False)


def _adopt(cut: _Cut) -> None:
    adopt_folder(cut.folder())


def _copy(cut: _Cut) -> None:
    source = Folder(parse_location(cut.job.source), cut.job.options, OPTIONS)
    copy_folder(source, cut.folder(), True, OPTIONS)


_WORKS: dict[str, Callable[[_Cut], None]] = {
    "save": _save,
    "delete": _delete,
    "prune": _prune,
    "adopt": _adopt,
    "copy": _copy,
}


def do(rank: int, world: int, job: Job) -> Outcome:
    """Does a job in a process that may not live to tell."""
    warnings.simplefilter("ignore")
    Path(job.notes, "pid").write_text(str(os.getpid()), encoding="ascii")
    seam = Seam(job.at, job.mode, Path(job.notes, "kept"))
    cut = _Cut(job, seam)
    twice = job.work == "async"
    return _outcome(seam, _save_twice(cut) if twice else [_raised(lambda: _WORKS[job.work](cut))])


def save_on_ranks(rank: int, world: int, job: Job) -> Outcome:
    """One rank of a save by several; only rank ``job.rank`` is cut."""
    warnings.simplefilter("ignore")
    mine = rank == job.rank
    if mine:
        Path(job.notes, "pid").write_text(str(os.getpid()), encoding="ascii")
    seam = Seam(job.at if mine else None, job.mode, Path(job.notes, f"kept-{rank}"))
    writer = _Cut(job, seam).writer(job.url)
    return _outcome(seam, [_raised(lambda: dcp.save(dict(state(NEW, rank)), storage_writer=writer))])


def _save_twice(cut: _Cut) -> list[BaseException | None]:
    """Two asynchronous saves of one writer, both in flight."""
    _make_common(cut.job)
    writer = cut.writer(None)
    futures = [
        cast(
            "Future[Any]",
            dcp.async_save(
                dict(state(NEW + number)), storage_writer=writer, checkpoint_id=f"{cut.job.url}/{name}", no_dist=True
            ),
        )
        for number, name in enumerate(ASYNC)
    ]
    return [_raised(functools.partial(future.result, 60)) for future in futures]


def _make_common(job: Job) -> None:
    """What two saves share (the folder above, what is known of the bucket), so that no race decides who makes it."""
    location = parse_location(f"{job.url}/{ASYNC[0]}")
    if location.protocol == "file":
        Path(job.url).mkdir(parents=True)
    else:
        # Opened as the saves open theirs, so that what is found out counts for them; with retries, as in a save.
        store = open_store(location, job.options, max_concurrency=OPTIONS.max_concurrency)
        _ = RetryingStore(store, attempts=OPTIONS.attempts, deadline=OPTIONS.deadline).create_if_absent


def _raised(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except CheckpointException as error:
        failure: BaseException = error.failures[min(error.failures)][0]
        return failure
    except CheckpointError as error:
        return error
    return None


def _outcome(seam: Seam, raised: list[BaseException | None]) -> Outcome:
    return Outcome(
        tuple(seam.points),
        seam.fired,
        tuple(None if error is None else type(error).__name__ for error in raised),
        tuple("" if error is None else str(error) for error in raised),
    )
