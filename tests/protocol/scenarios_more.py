"""Scenarios of invariants I8 to I11: damaged, hostile and unreachable checkpoints, deletes and prunes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.fence import Sweep, delete_folder, fence_prune, prune_folder
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faults import NamedFault
from dcp_storage.testing.faulty import FailingListing
from tests.protocol.oracle import (
    Hooked,
    attempt_to,
    files_of,
    reader_on,
    save_to,
    writer_on,
)
from tests.protocol.scenarios import Verdict, kind, once, state, version_in

__all__ = [
    "flipped_byte",
    "foreign_files",
    "hostile_object",
    "outage",
    "prune_at_commit",
    "prune_live",
    "prune_pauses",
    "prune_young",
    "short_file",
]

GRACE = 3600.0
ONE_TRY = SaveOptions(attempts=1)


# -- I8 ----------------------------------------------------------------------------------------------------------------


def short_file(fault: NamedFault, folder: Path) -> Verdict:
    """One of two files is short: the load says so before it changes any tensor."""
    saved = save_to(FsspecStorageWriter(folder, options=SaveOptions(shard_size=1)), state(1))
    victim = sorted(folder.glob("__*.distcp"))[-1]
    victim.write_bytes(victim.read_bytes()[:-1])
    target = {"w": torch.full((3, 4), -7.0), "b": torch.full((5,), -7), "note": {"version": -7}}
    raised = attempt_to(
        lambda: dcp.load(target, storage_reader=fault.in_reader(FsspecStorageReader(folder)), no_dist=True)
    )
    untouched = bool((target["w"] == -7).all() and (target["b"] == -7).all())  # type: ignore[attr-defined]
    found = (getattr(raised, "file", None), getattr(raised, "found", None))
    held = saved is None and untouched and found == (victim.name, victim.stat().st_size)
    return Verdict(held, f"load {kind(raised)}, tensors {'untouched' if untouched else 'changed'}")


def flipped_byte(fault: NamedFault, folder: Path) -> Verdict:
    """One payload byte is another: the load names the key and the file."""
    saved = save_to(FsspecStorageWriter(folder), state(1))
    victim = folder / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    data[data.index(state(1)["w"].numpy().tobytes()) + 5] ^= 0x10
    victim.write_bytes(data)
    target = {"w": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int64), "note": {"version": 0}}
    raised = attempt_to(
        lambda: dcp.load(target, storage_reader=fault.in_reader(FsspecStorageReader(folder)), no_dist=True)
    )
    held = (
        saved is None and isinstance(raised, CorruptCheckpointError) and (raised.key, raised.file) == ("w", victim.name)
    )
    return Verdict(held, f"load {kind(raised)}")


# -- I9 ----------------------------------------------------------------------------------------------------------------


class _MakesFolder:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def hostile_object(fault: NamedFault, folder: Path) -> Verdict:
    """An object entry asks for a call: it is refused, and the call is not made."""
    made = folder / "made-by-the-checkpoint"
    saved = save_to(FsspecStorageWriter(folder / "step"), {"x": _MakesFolder(made)})
    reader = fault.in_reader(FsspecStorageReader(folder / "step"))
    raised = attempt_to(lambda: dcp.load({"x": "anything"}, storage_reader=reader, no_dist=True))
    held = saved is None and isinstance(raised, UntrustedDataError) and not made.exists()
    return Verdict(held, f"load {kind(raised)}, the call was {'made' if made.exists() else 'not made'}")


# -- I10 ---------------------------------------------------------------------------------------------------------------


def outage(fault: NamedFault, folder: Path) -> Verdict:
    """Listing fails for a while: neither a load nor a save takes the folder for an empty one."""
    store = DictStore()
    saved = save_to(writer_on(store), state(1))

    def down(inner: Store) -> Store:
        return FailingListing(inner, lambda: StoreError("503", operation="entries", transient=True))

    reader = reader_on(down(store), fault, options=LoadOptions(attempts=1))
    target = {"w": torch.zeros(3, 4)}
    read = attempt_to(lambda: dcp.load(target, storage_reader=reader, no_dist=True))
    written = save_to(writer_on(down(store), fault, options=ONE_TRY), state(2))
    there = version_in(store)
    empty = isinstance(read, (CheckpointNotFoundError, AssertionError))
    held = (
        saved is None
        and isinstance(read, StoreError)
        and not empty
        and isinstance(written, StoreError)
        and there == "1"
    )
    return Verdict(held, f"load {kind(read)}, save {kind(written)}, committed: {there}")


# -- I11 ---------------------------------------------------------------------------------------------------------------


def prune_at_commit(fault: NamedFault, folder: Path) -> Verdict:
    """A prune without grace runs just before a save commits. Whoever is first wins: nothing torn is ever committed."""
    store = DictStore()
    prune = lambda: prune_folder(store, grace=0, steps=fault.prune_steps)  # noqa: E731
    raised = save_to(writer_on(Hooked(store, before=once("create", ".commit", prune))), state(1))
    there = version_in(store)
    held = there == ("1" if raised is None else "nothing")
    return Verdict(held, f"save {kind(raised)}, committed: {there}")


def prune_pauses(fault: NamedFault, folder: Path) -> Verdict:
    """A prune pauses behind its fence while a new save begins: what that save wrote stays."""
    store = DictStore()
    store.put("__3_0.distcp", [memoryview(b"of a dead attempt")])
    sweep, steps = Sweep(store), fault.prune_steps
    behind = steps.index(fence_prune) + 1
    for step in steps[:behind]:
        step(sweep)

    def go_on() -> None:
        for step in steps[behind:]:
            step(sweep)

    raised = save_to(writer_on(Hooked(store, before=once("create", ".commit.2", go_on))), state(1))
    there = version_in(store)
    return Verdict(raised is None and there == "1", f"save {kind(raised)}, committed: {there}")


def prune_young(fault: NamedFault, folder: Path) -> Verdict:
    """A prune with an hour of grace meets a save under way: it leaves it alone, and the save commits."""
    store = DictStore()
    prune = lambda: prune_folder(store, grace=GRACE, steps=fault.prune_steps)  # noqa: E731
    raised = save_to(writer_on(Hooked(store, before=once("create", ".commit", prune))), state(1))
    there = version_in(store)
    return Verdict(raised is None and there == "1", f"save {kind(raised)}, committed: {there}")


def prune_live(fault: NamedFault, folder: Path) -> Verdict:
    """A prune of a folder with a checkpoint and an orphan takes the orphan only."""
    store = DictStore()
    saved = save_to(writer_on(store), state(1))
    orphan = "__0_0.abcdefghijklmnop.distcp"
    store.put(orphan, [memoryview(b"orphan")])
    attempt_to(lambda: prune_folder(store, grace=0, steps=fault.prune_steps))
    there, gone = version_in(store), orphan not in files_of(store)
    return Verdict(saved is None and gone and there == "1", f"orphan {'gone' if gone else 'there'}, committed: {there}")


def foreign_files(fault: NamedFault, folder: Path) -> Verdict:
    """A delete and a prune of a folder with somebody's own files in it leave those as they are."""
    store = DictStore()
    foreign = {"notes.txt": b"mine", "model.distcp": b"mine too", "__init__.py": b"", ".manifest.json": b"{}"}
    for name, body in foreign.items():
        store.put(name, [memoryview(body)])
    saved = save_to(writer_on(store), state(1))
    delete_folder(store, fault.delete_steps)
    store.put(".claim", [memoryview(b"{}")])
    prune_folder(store, grace=0, steps=fault.prune_steps)
    left = {name: body for name, body in files_of(store).items() if not name.startswith(".commit")}
    gone = sorted(foreign.keys() - left.keys())
    return Verdict(saved is None and left == foreign, f"foreign files gone: {', '.join(gone) or 'none'}")
