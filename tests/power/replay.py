"""Records a piece of work on a disk, and looks at every state that a power loss at any moment may leave of it."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageWriter
from dcp_storage.fence import Step
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.stores.location import Location, parse_location
from dcp_storage.testing.faults import HEALTHY, NamedFault
from dcp_storage.tools.adopt import adopt_folder
from dcp_storage.tools.delete import RETIRE, sweep_with
from dcp_storage.tools.opening import Folder
from dcp_storage.tools.prune import prune_at
from dcp_storage.tools.retention import Rule
from tests.crash.values import BrokenError, state
from tests.crash.work import OPTIONS
from tests.power.disk import Disk, Operation
from tests.power.recorder import Recorder, materialize
from tests.power.verdict import identity

__all__ = ["FOLDER", "WAYS", "WORKS", "Found", "Recording", "record", "replay", "replay_after_kills", "seen_states"]

FOLDER = "run/step-1"
"""Where the checkpoint is on the disk that is recorded; neither folder is there before a first save."""

WAYS: dict[str, tuple[str, ...]] = {"link": (), "rename": ("link",), "exclusive": ("link", "rename_new")}
"""How a commit gets its name → the calls that the filesystem does not have."""

ENOUGH = 20
"""So many broken states say what is to be said; no more are looked for."""

Change = Callable[[Syscalls], Syscalls]


@dataclass(frozen=True)
class Recording:
    """What a piece of work did to a disk.

    Attributes:
        start: the disk before it.
        log: what was done.
        old: the checkpoint before it, as :func:`~tests.power.verdict.identity` names it.
        new: the one after it.
        truth: the bytes of files whose CRC-32 no manifest has.
    """

    start: Disk
    log: list[Operation]
    old: int | None
    new: int | None
    truth: Mapping[str, bytes]


@dataclass
class Found:
    """What a replay has looked at.

    Attributes:
        moments: at how many moments the power went.
        choices: how many choices of what is lost and what is kept there are, at all moments together.
        looked: how many of these were looked at.
        states: how many different folders these make.
        old: of these, the old checkpoint.
        new: the new one.
        none: plainly none.
        broken: what is wrong.
    """

    moments: int = 0
    choices: int = 0
    looked: int = 0
    states: int = 0
    old: int = 0
    new: int = 0
    none: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Counts another one in."""
        for item in dataclasses.fields(Found):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


# -- the work ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ground:
    """Where work is done: a folder, the system calls below it, the protection that is missing."""

    folder: Path
    calls: Syscalls
    fault: NamedFault

    def opener(self, location: Location, options: Mapping[str, Any], max_concurrency: int) -> Store:
        return self.fault.store(LocalStore(location.path, calls=self.calls))

    def tool(self) -> Folder:
        return Folder(parse_location(self.folder), {}, OPTIONS, self.opener)


def _save(ground: _Ground, version: int = 2) -> None:
    writer = FsspecStorageWriter(ground.folder, overwrite=True, options=OPTIONS)
    writer._steps = ground.fault.save(writer._steps)
    writer._opener = ground.opener
    four_files = {**state(version, 0), **state(version, 1)}
    dcp.save(four_files, storage_writer=writer, no_dist=True)


def _delete(ground: _Ground) -> None:
    steps: tuple[Step, ...] = ground.fault.delete(RETIRE)
    sweep_with(steps, ground.tool().open().store, 0, False)


def _prune(ground: _Ground) -> None:
    prune_at(ground.tool(), Rule(), grace=0, apply=True, assume_single_writer=False)


def _adopt(ground: _Ground) -> None:
    adopt_folder(ground.tool())


WORKS: dict[str, Callable[[_Ground], None]] = {"save": _save, "delete": _delete, "prune": _prune, "adopt": _adopt}
"""By name."""


def _lacking(calls: Syscalls, way: str) -> Syscalls:
    def missing(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if "link" in WAYS[way]:
        calls = dataclasses.replace(calls, link=missing)
    return dataclasses.replace(calls, rename_new=unknown) if "rename_new" in WAYS[way] else calls


def record(
    work: str,
    before: Mapping[str, bytes],
    root: Path,
    *,
    way: str = "link",
    synced: bool = True,
    fault: NamedFault = HEALTHY,
    change: Change = lambda calls: calls,
) -> Recording:
    """Does a piece of work and writes down what it asked of the disk.

    Args:
        work: a name in :data:`WORKS`.
        before: the files in the folder before it.
        root: an empty folder that stands for the disk.
        way: how a commit gets its name.
        synced: whether what is there before is certain, bytes and all.
        fault: the protection that is missing.
        change: changes the system calls, above the recorder.
    """
    start = Disk.holding({f"{FOLDER}/{name}": data for name, data in before.items()}, synced=synced)
    materialize(start, root)
    recorder = Recorder(root, start)
    WORKS[work](_Ground(root / FOLDER, _lacking(fault.calls(change(recorder.calls())), way), fault))
    after = {path.name: path.read_bytes() for path in (root / FOLDER).iterdir()}
    return Recording(start, recorder.log, identity(before, before), identity(after, before), before)


# -- the power loss ----------------------------------------------------------------------------------------------------


def _moments(recording: Recording) -> Iterator[tuple[int, Disk]]:
    disk = recording.start.copy()
    yield 0, disk
    for number, operation in enumerate(recording.log, start=1):
        disk.do(operation)
        yield number, disk


def seen_states(recording: Recording, most: int) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Every state of the folder that a power loss may leave, each once, with the moment at which it first may."""
    seen: set[int] = set()
    for moment, disk in _moments(recording):
        for files in disk.states(FOLDER, most):
            key = hash(frozenset(files.items()))
            if key not in seen:
                seen.add(key)
                yield moment, files


def replay(recording: Recording, most: int) -> Found:
    """Has the power go after each operation, and looks at all that may be left.

    Args:
        recording: what was done.
        most: up to so many choices at one moment all are looked at; of more those that differ in one or two names.
    """
    found = Found()
    seen: set[int] = set()
    for moment, disk in _moments(recording):
        found.moments += 1
        found.choices += disk.possible(FOLDER)
        over = moment == len(recording.log)
        allowed = {recording.new} if over else {recording.old, recording.new}
        for files in disk.states(FOLDER, most):
            found.looked += 1
            key = hash(frozenset(files.items()))
            if key in seen and not over:
                continue
            new_here = key not in seen
            seen.add(key)
            _judge(found, files, recording, allowed, f"after operation {moment} of {len(recording.log)}", new_here)
            if len(found.broken) >= ENOUGH:
                return found
    return found


def _judge(
    found: Found, files: Mapping[str, bytes], recording: Recording, allowed: set[int | None], at: str, count: bool
) -> None:
    try:
        which = identity(files, recording.truth)
    except BrokenError as error:
        found.broken.append(f"{at}: {error}")
        return
    if which not in allowed:
        found.broken.append(f"{at}: checkpoint {which} is committed, which may be {allowed}")
    if count:
        found.states += 1
        found.none += which is None
        found.old += which is not None and which == recording.old
        found.new += which is not None and which == recording.new and which != recording.old


def replay_after_kills(
    recording: Recording, root: Path, most: int, *, change: Change = lambda calls: calls, every: int = 1
) -> Found:
    """Kills the work after each operation, saves anew, and has the power go when that save has returned.

    What the killed process had not synced is still not certain then, though everybody could see it.

    Args:
        recording: the work that is killed.
        root: an empty folder for the disks.
        most: as for :func:`replay`.
        change: changes the system calls of the second save.
        every: only at every so manyeth operation.
    """
    found = Found()
    for moment, disk in _moments(recording):
        if moment % every:
            continue
        here = root / f"{moment}"
        materialize(disk, here)
        recorder = Recorder(here, disk)
        _save(_Ground(here / FOLDER, change(recorder.calls()), HEALTHY), 3)
        after = {path.name: path.read_bytes() for path in (here / FOLDER).iterdir()}
        second = Recording(disk.copy(), recorder.log, None, identity(after, {}), recording.truth)
        end = disk.copy()
        for operation in recorder.log:
            end.do(operation)
        found.moments += 1
        found.choices += end.possible(FOLDER)
        seen: set[int] = set()
        for files in end.states(FOLDER, most):
            found.looked += 1
            key = hash(frozenset(files.items()))
            if key not in seen:
                seen.add(key)
                at = f"killed after operation {moment} of {len(recording.log)}, saved anew, then"
                _judge(found, files, second, {second.new}, at, True)
        shutil.rmtree(here)
    return found
