"""Every invariant of DESIGN section 3: it holds, and with the protection behind it taken away it does not.

Each scenario runs twice, with a named fault of the test kit and without, and gives a verdict that is computed from the
files alone (``tests/protocol/oracle.py``), or from what ``dcp.save`` and ``dcp.load`` did. The table of all rows is
printed at the end.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.fence import Sweep, delete_folder, fence_prune, prune_folder
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faults import FAULTS, HEALTHY, NamedFault
from dcp_storage.testing.faulty import FailingListing, Fault, FaultyStore
from dcp_storage.wrappers import Request
from tests.protocol.oracle import (
    BrokenError,
    Hooked,
    Killed,
    attempt_to,
    files_of,
    highest,
    loaded,
    reader_on,
    save_to,
    writer_on,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@dataclass(frozen=True)
class Verdict:
    """Whether the invariant held, and what was seen."""

    held: bool
    saw: str


Scenario = Callable[[NamedFault, Path], Verdict]

GRACE = 3600.0
ONE_TRY = SaveOptions(attempts=1)


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


def _refused(operation: str, name: str) -> Callable[[NamedFault, Path], Verdict]:
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


ROWS: tuple[tuple[str, str, Scenario], ...] = (
    ("I1", "commit-by-put", two_saves_race),
    ("I2", "commit-before-manifest", crash_before_manifest),
    ("I2", "no-second-listing", folder_not_shared),
    ("I2", "no-fsync", power_loss),
    ("I3", "old-files-first", killed_anywhere),
    ("I3", "shared-names", two_saves_share_names),
    ("I4", "no-clean-up", disk_full),
    ("I5", "ignores-if-absent", two_saves_race),
    ("I5", "delete-without-void", delete_while_saving),
    ("I6", "no-read-back", reply_lost),
    ("I7", "commit-errors-logged", _refused("create", r"\.commit")),
    ("I7", "write-errors-logged", _refused("put", r"__0_0\.distcp")),
    ("I8", "no-sizes", short_file),
    ("I8", "no-blocks", flipped_byte),
    ("I9", "no-allow-list", hostile_object),
    ("I10", "outage-is-empty", outage),
    ("I11", "prune-without-fence", prune_at_commit),
    ("I11", "prune-lists-late", prune_pauses),
    ("I11", "prune-ignores-ages", prune_young),
    ("I11", "prune-forgets-live", prune_live),
    ("I11", "takes-everything", foreign_files),
)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """The rows that were run; printed past pytest's capture when the module is done."""
    rows: list[tuple[str, ...]] = []
    yield rows
    head = ("", "switched off", "without the protection", "with it")
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(line.rstrip() for line in lines))


@pytest.mark.parametrize(("invariant", "name", "scenario"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_invariant_needs_its_protection(
    invariant: str, name: str, scenario: Scenario, tmp_path: Path, table: list[tuple[str, ...]]
) -> None:
    """In the same scenario the invariant holds, and fails when its protection is switched off by a named fault."""
    fault = FAULTS[name]
    places = tmp_path / "without", tmp_path / "with"
    for place in places:
        place.mkdir()
    without, within = scenario(fault, places[0]), scenario(HEALTHY, places[1])
    said = [("held: " if verdict.held else "BROKEN: ") + verdict.saw for verdict in (without, within)]
    table.append((invariant, name, *said))
    assert fault.invariant == invariant
    assert within.held, within.saw
    assert not without.held, without.saw


def test_every_invariant_and_every_fault_has_a_row() -> None:
    """The table covers I1 to I11, and the kit ships no fault that no test uses."""
    assert {row[0] for row in ROWS} == {f"I{number}" for number in range(1, 12)}
    assert {row[1] for row in ROWS} == set(FAULTS)


def test_a_healthy_run_changes_no_step() -> None:
    """``HEALTHY`` hands a writer and a reader back with the steps they had, so that 'with it' is the real library."""
    store = DictStore()
    writer, reader = FsspecStorageWriter("/nowhere"), FsspecStorageReader("/nowhere")
    steps = writer._steps, reader._steps
    HEALTHY.in_writer(writer)
    HEALTHY.in_reader(reader)
    assert (writer._steps, reader._steps) == steps
    assert HEALTHY.store(store) is store
    assert dataclasses.replace(HEALTHY).prune_steps[3] is fence_prune
    assert highest({}) == (0, None)
    assert not issubclass(CheckpointError, AssertionError)
