"""The steps of a run, from commits alone: which there are, which is the latest, and what the other folders hold.

A run is a folder whose sub-folders ``step-<n>`` are checkpoints, with any number of leading zeros. Other folders and
files in it are left alone. Nothing is answered from a cache, and a listing that fails raises (invariant I10).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fsspec.callbacks import Callback

from dcp_storage import names
from dcp_storage.current import Current, list_commits, read_current
from dcp_storage.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError, NotCommittedError
from dcp_storage.options import LoadOptions, SaveOptions
from dcp_storage.session import Opened
from dcp_storage.store import Entry
from dcp_storage.tools.describe import COMMITTED, DAMAGED, NOTHING, RANK_BY_RANK, STOCK, UNFINISHED, VOID
from dcp_storage.tools.opening import Folder, folder_at

__all__ = ["Latest", "Run", "StepFolder", "open_run", "step_name", "step_number"]

T = TypeVar("T")
U = TypeVar("U")

_STEP = re.compile(r"step-([0-9]+)")
_NOT_OVER = (UNFINISHED, DAMAGED, STOCK, RANK_BY_RANK)


def step_name(step: int) -> str:
    """The name of a step's folder as this package makes it, e.g. ``step-00000007``.

    Raises:
        TypeError: ``step`` is no int.
        ValueError: it is negative.
    """
    if type(step) is not int:
        raise TypeError(f"A step is an int, not {step!r}.")
    if step < 0:
        raise ValueError(f"A step is not negative, as {step} is.")
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The step that a folder of this name holds; None where it is no step's folder."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class StepFolder:
    """What one look at a step's folder found: one listing, and at most one read of a commit.

    Attributes:
        step: its number.
        name: the folder's name.
        url: the folder.
        state: ``committed``, ``void`` (deleted), ``unfinished``, ``stock``, ``rank-by-rank``, ``damaged`` (its commit
            cannot be read) or ``nothing``.
        current: the highest commit that stands; None where there is none.
        entries: the listing.
        pinned: whether it is pinned.
        error: what keeps the commit from being read, None where nothing does.
    """

    step: int
    name: str
    url: str
    state: str
    current: Current | None = None
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    pinned: bool = False
    error: CheckpointError | None = None

    @property
    def ours(self) -> list[Entry]:
        """The files in it that are ours by name, commit objects included."""
        return [e for e in self.entries if names.is_ours(e.name)]

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are ours."""
        return sum(e.size for e in self.ours)

    @property
    def modified(self) -> float | None:
        """When the newest of them was written, seconds since the epoch by the store's clock."""
        return max((e.modified for e in self.ours if e.modified is not None), default=None)

    def says(self) -> str:
        """What the folder holds, in a few words that go after its name."""
        files = f"{len(self.ours)} file{'s' * (len(self.ours) != 1)}"
        return {
            COMMITTED: "is committed",
            VOID: "was deleted",
            UNFINISHED: f"is unfinished ({files} of a save that never committed, or is still running)",
            STOCK: "was written by stock torch and has no commit; adopt it",
            RANK_BY_RANK: "was saved without collectives, rank by rank",
            DAMAGED: "has a commit object that cannot be read",
            NOTHING: "holds no checkpoint",
        }[self.state]


@dataclass(frozen=True)
class Latest:
    """The newest committed step.

    Attributes:
        found: its folder; None where the run holds none and nothing that could be one.
        passed_over: newer folders that hold something but no commit that stands, newest first.
    """

    found: StepFolder | None
    passed_over: tuple[StepFolder, ...]

    def warnings(self) -> list[str]:
        """A sentence for each newer step that was passed over."""
        used = f"step {self.found.step} is used" if self.found else "no step is used"
        return [f"{f.url} {f.says()}; {used}." for f in self.passed_over]


class Run:
    """A run on any store.

    Args:
        folder: the run's root.
        callback: an fsspec Callback that is told of folders done, where many are looked at.

    Attributes:
        requests: requests that were sent so far.
        retries: of these, how many were tried again.
    """

    def __init__(self, folder: Folder, callback: Callback | None = None) -> None:
        self.folder = folder
        self.callback = callback
        self.requests = 0
        self.retries = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The run's root."""
        return self.folder.location.url

    def folders(self) -> dict[int, list[str]]:
        """The folders by step, ascending; one listing. Several folders may stand for one number."""
        with self.opened(self.folder) as opened:
            found: dict[int, list[str]] = {}
            for name in sorted(opened.store.folders()):
                step = step_number(name)
                if step is not None:
                    found.setdefault(step, []).append(name)
        return dict(sorted(found.items()))

    def look(self, step: int, name: str) -> StepFolder:
        """What a step's folder holds: one listing, and one read where there is a commit object."""
        return self._look(self.folder.child(name), step)

    def look_itself(self) -> StepFolder:
        """What the root itself holds, as if it were a checkpoint; its step is -1."""
        return self._look(self.folder, -1)

    def _look(self, folder: Folder, step: int) -> StepFolder:
        with self.opened(folder) as opened:
            store = opened.store
            entries = tuple(store.entries())
            numbers = list_commits(entries)
            current, error = None, None
            if numbers:
                try:
                    current = read_current(store, numbers)
                except IncompatibleCheckpointError as later:
                    error = later
        pinned = any(e.name == names.PIN for e in entries)
        state = _state_of(entries, current, torn=bool(numbers))
        return StepFolder(step, folder.name, folder.location.url, state, current, entries, pinned, error)

    def look_at(self, which: Iterable[tuple[int, str]]) -> list[StepFolder]:
        """Looks at several folders, some at once."""
        return self.at_once(lambda each: self.look(*each), which)

    def survey(self) -> list[StepFolder]:
        """All folders of steps that hold anything, ascending."""
        found = self.look_at((step, name) for step, named in self.folders().items() for name in named)
        return [f for f in found if f.state != NOTHING]

    def steps(self) -> list[int]:
        """The committed steps, ascending.

        Raises:
            CheckpointError: two folders stand for one number, and both are committed.
            StoreError: the store failed.
        """
        by_step: dict[int, list[StepFolder]] = {}
        for found in self.survey():
            by_step.setdefault(found.step, []).append(found)
        return [step for step, found in by_step.items() if self._the_one(found).state == COMMITTED]

    def latest(self, below: int | None = None, *, under_way: int | None = None) -> Latest:
        """The newest committed step: one listing, and at most two requests for each folder looked at, newest first.

        Args:
            below: only steps below this one count.
            under_way: a step that the caller is saving now; it is left out as long as it is not committed.

        Raises:
            NotCommittedError: no step is committed, but there are some that are unfinished or of another kind.
            IncompatibleCheckpointError: the newest commit is of a later format.
            CheckpointError: two folders stand for its number, and both are committed.
            StoreError: the store failed. An outage is never taken for an empty run.
        """
        passed: list[StepFolder] = []
        for step, named in reversed(self.folders().items()):
            if below is not None and step >= below:
                continue
            found = self._the_one([self.look(step, name) for name in named])
            if found.error is not None:
                raise found.error
            if found.state == COMMITTED:
                return Latest(found, tuple(passed))
            if found.state in _NOT_OVER and step != under_way:
                passed.append(found)
        if passed and below is None:
            raise NotCommittedError(
                f"{self.url}: no step of this run is committed: {_few([f'{f.name} {f.says()}' for f in passed])}. "
                "To begin anew, use another folder, or remove what is there.",
                path=self.url,
            )
        return Latest(None, tuple(passed))

    def find(self, step: int) -> StepFolder:
        """The committed folder of a step.

        Raises:
            CheckpointNotFoundError: there is no folder for it, or it holds nothing.
            NotCommittedError: it is not committed.
            IncompatibleCheckpointError: its commit is of a later format.
            CheckpointError: two folders stand for it, and both are committed.
        """
        step_name(step)
        named = self.folders().get(step, [])
        found = self._the_one([self.look(step, name) for name in named]) if named else None
        if found is None or found.state == NOTHING:
            raise CheckpointNotFoundError(f"{self.url}: there is no checkpoint of step {step}.", path=self.url)
        if found.error is not None:
            raise found.error
        if found.state != COMMITTED:
            raise NotCommittedError(f"{found.url} {found.says()}.", path=found.url)
        return found

    def name_for(self, step: int) -> str:
        """The name of the folder that a step has, or would be saved to; one listing.

        Raises:
            CheckpointError: two folders stand for it, and both are committed.
        """
        canonical = step_name(step)
        named = self.folders().get(step, [])
        if len(named) < 2:
            return named[0] if named else canonical
        looks = [self.look(step, name) for name in named]
        kept = self._the_one(looks)
        return kept.name if kept.state == COMMITTED or canonical not in named else canonical

    def at_once(self, work: Callable[[T], U], given: Iterable[T]) -> list[U]:
        """``work`` on each, as many at once as the options allow; in the order given. The first error is raised after
        those under way have ended, and no more are begun.
        """
        todo = list(given)
        done: list[U] = []
        if self.callback is not None:
            self.callback.set_size((self.callback.size or 0) + len(todo))
        pool = ThreadPoolExecutor(max(min(self.folder.options.max_concurrency, len(todo)), 1))
        try:
            for found in pool.map(work, todo):
                done.append(found)
                if self.callback is not None:
                    self.callback.relative_update(1)
            return done
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def opened(self, folder: Folder) -> _Counted:
        """Opens a folder for a ``with`` block, and counts its requests here."""
        return _Counted(self, folder)

    def count(self, opened: Opened) -> None:
        """Adds the requests of a folder that was opened."""
        with self._lock:
            self.requests += opened.counting.requests
            self.retries += opened.retrying.retries

    def _the_one(self, found: list[StepFolder]) -> StepFolder:
        committed = [f for f in found if f.state == COMMITTED]
        if len(committed) > 1:
            raise CheckpointError(
                f"{self.url}: {' and '.join(f.name for f in committed)} both hold a committed checkpoint of step "
                f"{committed[0].step}. Delete one of them, or move it out of this folder.",
                path=self.url,
                key=committed[0].name,
                kind="two-folders",
            )
        ranked = sorted(found, key=lambda f: (f.state != COMMITTED, f.state not in _NOT_OVER, f.state == NOTHING))
        return ranked[0]


class _Counted:
    """A folder that is open, in a ``with`` block."""

    def __init__(self, run: Run, folder: Folder) -> None:
        self.run = run
        self.folder = folder

    def __enter__(self) -> Opened:
        self.held = self.folder.open()
        return self.held

    def __exit__(self, *error: object) -> None:
        self.run.count(self.held)
        self.held.store.close()


def open_run(
    root: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> Run:
    """The run at a path or URL; sends nothing.

    Raises:
        InvalidLocationError: the path cannot name a folder.
    """
    return Run(folder_at(root, storage_options, options))


def _state_of(entries: Iterable[Entry], current: Current | None, *, torn: bool) -> str:
    if current is not None:
        return COMMITTED if current.commit.manifest is not None else VOID
    if torn:
        return DAMAGED
    listed = {e.name for e in entries}
    if any(names.rank_commit(name) is not None for name in listed):
        return RANK_BY_RANK
    if names.STOCK_VIEW in listed:
        return STOCK
    return UNFINISHED if any(names.blocks_claim(name) for name in listed) else NOTHING


def _few(said: list[str]) -> str:
    more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more
