"""Scenarios of invariants I1 to I7: saves that race, die, fail or lose a reply, each with a verdict from outside."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcp_storage import FsspecStorageWriter, SaveOptions
from dcp_storage.errors import (
    StoreError,
)
from dcp_storage.fence import delete_folder
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faults import NamedFault
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.wrappers import Request
from tests.protocol.oracle import (
    BrokenError,
    Hooked,
    Killed,
    files_of,
    loaded,
    save_to,
    writer_on,
)

__all__ = [
    "Disk",
    "Scenario",
    "Verdict",
    "crash_before_manifest",
    "delete_while_saving",
    "disk_full",
    "folder_not_shared",
    "killed_anywhere",
    "kind",
    "once",
    "power_loss",
    "reply_lost",
    "state",
    "two_saves_race",
    "two_saves_share_names",
    "version_in",
    "write_refused",
]


@dataclass(frozen=True)
class Verdict:
    """Whether the invariant held, and what was seen."""

    held: bool
    saw: str


Scenario = Callable[[NamedFault, Path], Verdict]


def state(version: int) -> dict[str, Any]:
    """Two tensors and an object, every value different in every version."""
    return {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4) + 100 * version,
        "b": torch.full((5,), version, dtype=torch.int64),
        "note": {"version": version},
    }


def version_in(store: DictStore | Path) -> str:
    """Which version is committed: its number, ``nothing``, or in what way it is broken."""
    try:
        values = loaded(files_of(store))
    except BrokenError as error:
        return f"broken: {error}"
    if values is None:
        return "nothing"
    for version in range(10):
        wanted = state(version)
        if (
            torch.equal(values["w"], wanted["w"])
            and torch.equal(values["b"], wanted["b"])
            and values.get("note.version", values.get("note")) in (version, {"version": version})
        ):
            return str(version)
    return "broken: a mixture"


def kind(error: BaseException | None) -> str:
    """What became of a call, in a word."""
    return "returned" if error is None else type(error).__name__


def once(operation: str, name: str, action: Callable[[], object]) -> Callable[[Request], None]:
    """Acts at the first request of an operation (one of several, with ``|``) on a name."""
    left = [action]

    def hook(request: Request) -> None:
        if left and request.operation in operation.split("|") and request.name == name:
            left.pop()()

    return hook


# -- I1 ----------------------------------------------------------------------------------------------------------------


def two_saves_race(fault: NamedFault, folder: Path) -> Verdict:
    """A second save commits between the first one's manifest and commit; the first must not commit over it."""
    store = DictStore()
    second: list[BaseException | None] = []
    rival = once("create|put", ".commit", lambda: second.append(save_to(writer_on(store), state(2))))
    # The hook sits above the faulty store, so that the fault is in the first save only.
    writer = writer_on(Hooked(fault.store(store), before=rival))
    writer._steps = fault.save(writer._steps)
    first = save_to(writer, state(1))
    there = version_in(store)
    held = second == [None] and first is not None and there == "2"
    return Verdict(held, f"first {kind(first)}, second {kind(second[0])}, committed: {there}")


# -- I2 ----------------------------------------------------------------------------------------------------------------


def crash_before_manifest(fault: NamedFault, folder: Path) -> Verdict:
    """The manifest cannot be written. Then nothing may be committed."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("put", nth=None, name=r"\.manifest.*")])
    raised = save_to(writer_on(faulty, fault), state(1))
    there = version_in(store)
    return Verdict(raised is not None and there == "nothing", f"save {kind(raised)}, committed: {there}")


class _Elsewhere(DictStore):
    """A folder of which one rank's files land on another machine."""

    def put(self, name: str, buffers: Any, *, crc32: int | None = None) -> None:
        if not name.startswith("__"):
            super().put(name, buffers, crc32=crc32)


def folder_not_shared(fault: NamedFault, folder: Path) -> Verdict:
    """What a rank wrote is not where the coordinator looks. Then nothing may be committed."""
    store = _Elsewhere()
    raised = save_to(writer_on(store, fault), state(1))
    there = version_in(store)
    return Verdict(raised is not None and there == "nothing", f"save {kind(raised)}, committed: {there}")


class Disk:
    """Which bytes and names of a local folder would outlive a power loss, seen from its system calls."""

    def __init__(self) -> None:
        self.dirty: set[int] = set()
        self.unnamed: set[str] = set()
        self.paths: dict[int, str] = {}
        self.at_commit: list[str] = []
        self.after: list[str] = []

    def calls(self) -> Syscalls:
        return Syscalls(
            open=self.open, write=self.write, fsync=self.fsync, link=self.link, replace=self.replace, mkdir=self.mkdir
        )

    def open(self, path: str, flags: int, mode: int) -> int:
        fresh = flags & os.O_CREAT and not Path(path).exists()
        fd = os.open(path, flags, mode)
        self.paths[fd] = path
        if fresh:
            self.unnamed.add(path)
        return fd

    def write(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        self.dirty.add(os.fstat(fd).st_ino)
        return os.pwritev(fd, pieces, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        path = self.paths[fd]
        if Path(path).is_dir():
            self.unnamed = {name for name in self.unnamed if str(Path(name).parent) != path}
        else:
            self.dirty.discard(os.fstat(fd).st_ino)

    def link(self, existing: str, new: str) -> None:
        if Path(new).name == ".commit":
            self.at_commit = self.not_durable(Path(new).parent)
        os.link(existing, new)
        self.unnamed.add(new)

    def replace(self, source: str, target: str) -> None:
        Path(source).replace(target)
        self.unnamed.add(target)

    def mkdir(self, path: str, mode: int) -> None:
        Path(path).mkdir(mode)
        self.unnamed.add(path)

    def not_durable(self, folder: Path) -> list[str]:
        """The files of a save, and its folders, that a power loss would take or empty."""
        files = [p for p in folder.iterdir() if p.name.startswith(("__", ".manifest", ".commit"))]
        whole = [p for p in files if not (p.name.startswith(".commit.") or p.name.count(".manifest.") > 0)]
        lost = {p.name for p in whole if p.stat().st_ino in self.dirty or str(p) in self.unnamed}
        return sorted(lost | {p.name for p in (folder, *folder.parents) if str(p) in self.unnamed})


def power_loss(fault: NamedFault, folder: Path) -> Verdict:
    """At the moment of the commit every file, its name and its folders are on the disk; later the commit is too."""
    disk, place = Disk(), folder / "run" / "step-1"
    writer = FsspecStorageWriter(place)
    writer._opener = lambda location, options, limit: LocalStore(location.path, calls=fault.calls(disk.calls()))
    raised = save_to(writer, state(1))
    lost = disk.at_commit + disk.not_durable(place)
    held = raised is None and version_in(place) == "1" and not lost
    return Verdict(held, f"save {kind(raised)}, not on the disk: {', '.join(lost) or 'nothing'}")


# -- I3 ----------------------------------------------------------------------------------------------------------------


def killed_anywhere(fault: NamedFault, folder: Path) -> Verdict:
    """An overwriting save is killed before each of its store calls in turn; the old or the new one is there, whole."""
    for at in range(100):
        store = DictStore()
        if save_to(writer_on(store), state(1)) is not None:
            return Verdict(False, "the first save failed")
        left = [at]

        def die(request: Request, left: list[int] = left) -> None:
            if left[0] <= 0:
                raise Killed
            left[0] -= 1

        raised = save_to(writer_on(Hooked(store, before=die), fault, overwrite=True), state(2))
        there = version_in(store)
        if there not in ("1", "2"):
            return Verdict(False, f"killed at call {at}: {there}")
        if raised is None:
            return Verdict(there == "2" and at > 8, f"old or new after a kill at any of {at} calls")
    return Verdict(False, "the save never ended")


def two_saves_share_names(fault: NamedFault, folder: Path) -> Verdict:
    """Another save writes its files while ours is under way, and dies. What we committed must be ours."""
    store = DictStore()

    def die(request: Request) -> None:
        if request.name is not None and request.name.startswith((".manifest", ".commit")):
            dead.append(request)
        if dead:
            raise Killed

    dead: list[Request] = []
    rival = writer_on(Hooked(store, before=die), fault)
    hook = once("put|create", ".commit", lambda: save_to(rival, state(2)))
    raised = save_to(writer_on(Hooked(store, before=hook), fault), state(1))
    there = version_in(store)
    return Verdict(bool(dead) and raised is None and there == "1", f"save {kind(raised)}, committed: {there}")


# -- I4 ----------------------------------------------------------------------------------------------------------------


def disk_full(fault: NamedFault, folder: Path) -> Verdict:
    """The third part of the second file meets a full disk; nothing of the rank stays, no open upload either."""
    store = DictStore()
    full = Fault("write_part", nth=3, error=lambda: StoreError("full", operation="write_part", errno=errno.ENOSPC))
    options = SaveOptions(shard_size=1, part_size=64 * 1024, attempts=1)
    large = {"a": torch.ones(10), "z": torch.ones(100_000)}
    raised = save_to(writer_on(FaultyStore(store, [full]), fault, options=options), large)
    left = sorted(name for name in files_of(store) if name != ".claim")
    uploads = [upload.name for upload in store.objects.uploads]
    held = getattr(raised, "errno", None) == errno.ENOSPC and not left and not uploads
    return Verdict(held, f"save {kind(raised)}, left: {', '.join(left) or 'nothing'}, open uploads: {len(uploads)}")


# -- I5 ----------------------------------------------------------------------------------------------------------------


def delete_while_saving(fault: NamedFault, folder: Path) -> Verdict:
    """A checkpoint is deleted while a save that began before is still writing; the late save must not come alive."""
    store = DictStore()
    first = save_to(writer_on(store), state(1))
    hook = once("create", ".commit.2", lambda: delete_folder(store, fault.delete_steps))
    late = save_to(writer_on(Hooked(store, before=hook), overwrite=True), state(2))
    there = version_in(store)
    return Verdict(
        first is None and late is not None and there == "nothing", f"late save {kind(late)}, committed: {there}"
    )


# -- I6 ----------------------------------------------------------------------------------------------------------------


def reply_lost(fault: NamedFault, folder: Path) -> Verdict:
    """The commit is made and the reply is lost: the save must say that it committed."""
    store = DictStore()
    faulty = FaultyStore(store, [Fault("create", name=r"\.commit", when="lost")])
    raised = save_to(writer_on(faulty, fault), state(1))
    there = version_in(store)
    return Verdict(raised is None and there == "1", f"save {kind(raised)}, committed: {there}")


# -- I7 ----------------------------------------------------------------------------------------------------------------


def write_refused(operation: str, name: str) -> Callable[[NamedFault, Path], Verdict]:
    def refused(fault: NamedFault, folder: Path) -> Verdict:
        """The store refuses one write, in whatever thread: the caller gets type, errno and name."""
        store = DictStore()
        error = StoreError("no", operation=operation, errno=errno.EACCES, key="told")
        faulty = FaultyStore(store, [Fault(operation, name=name, error=lambda: error)])
        raised = save_to(writer_on(faulty, fault), state(1))
        told = (type(raised), getattr(raised, "errno", None), getattr(raised, "key", None))
        return Verdict(
            told == (StoreError, errno.EACCES, "told"), f"save {kind(raised)}, committed: {version_in(store)}"
        )

    return refused
