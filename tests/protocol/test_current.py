"""What a folder holds now: the highest commit that stands, its manifest and files, and who is to blame."""

from __future__ import annotations

import dataclasses
import errno
import json
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_storage.commit import Attempt, Steps, begin
from dcp_storage.commit_object import new_commit
from dcp_storage.current import blame, check_sizes, list_commits, nothing_committed, read_current, read_manifest
from dcp_storage.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NotCommittedError,
    ObjectNotFoundError,
    StoreError,
)
from dcp_storage.fence import delete_folder
from dcp_storage.reading import read_checkpoint
from dcp_storage.records import ManifestRef, encode_commit
from dcp_storage.store import Entry, Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import FailingListing, Fault, FaultyStore
from dcp_storage.testing.recording import RecordingStore
from tests.protocol.acting import body_of, commit_now, once
from tests.protocol.oracle import Hooked, files_of, reader_on, save_to, writer_on

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


def put(store: Store, name: str, body: bytes = b"") -> None:
    store.put(name, [memoryview(body)])


def put_commit(store: Store, number: int, author: str = A, *, void: bool = False) -> None:
    ref = None if void else ManifestRef(".manifest", number, number)
    name = ".commit" if number == 1 else f".commit.{number}"
    put(store, name, encode_commit(new_commit(number, author, manifest=ref)))


def later_format(store: Store, name: str) -> None:
    body = json.dumps({"format": 2}).encode()[:-1]
    put(store, name, body + b',"crc32":' + str(zlib.crc32(body)).encode() + b"}")


class Counted(DictStore):
    """Lists in an order that is no help."""

    def entries(self) -> list[Entry]:
        return sorted(super().entries(), key=lambda e: e.name[::-1])


def test_the_highest_is_by_number_not_by_text() -> None:
    """Of commits 1 to 11 the eleventh counts, although ``.commit.9`` sorts behind it."""
    store = Counted()
    for number in (9, 1, 11, 2, 10):
        put_commit(store, number)
    current = read_current(store)
    assert current is not None
    assert (current.number, current.commit.number) == (11, 11)
    assert list_commits(store.entries()) == [11, 10, 9, 2, 1]


def test_names_that_only_look_like_commits_do_not_count() -> None:
    """``.commit.1``, ``.commit.02`` and a temporary ``.commit.<token>`` are no commits."""
    store = DictStore()
    put_commit(store, 1)
    body = encode_commit(new_commit(99, B, manifest=None))
    for name in (".commit.1", ".commit.02", f".commit.{A}", ".commit.99.bak"):
        put(store, name, body)
    current = read_current(store)
    assert current is not None
    assert (current.number, current.commit.author) == (1, A)


@pytest.mark.parametrize("torn", [b"", b"{", encode_commit(new_commit(2, B, manifest=None))[:-1], b"x" * 70_000])
def test_a_torn_highest_commit_is_absent_to_readers_and_taken_to_writers(torn: bytes) -> None:
    """Readers see the commit below a torn one; a save aims above it."""
    store = DictStore()
    put_commit(store, 1)
    put(store, ".commit.2", torn)
    current = read_current(store)
    assert current is not None
    assert current.number == 1
    attempt = Attempt(store, B, overwrite=True)
    begin(attempt, Steps())
    assert attempt.number == 2
    assert attempt.current == current


def test_a_folder_with_a_torn_commit_only_has_none() -> None:
    """Nothing is committed where the only commit object is torn, and a save there need not overwrite."""
    store = DictStore()
    put(store, ".commit", b"{")
    assert read_current(store) is None
    attempt = Attempt(store, B)
    begin(attempt, Steps())
    assert (attempt.number, attempt.plain) == (1, False)


def test_a_void_is_the_current_state() -> None:
    """A void above a commit counts: what it voids is not found below it."""
    store = DictStore()
    put_commit(store, 1)
    put_commit(store, 2, void=True)
    current = read_current(store)
    assert current is not None
    assert (current.number, current.commit.state) == (2, "void")


def test_a_highest_commit_of_a_later_format_is_not_passed_over() -> None:
    """A later version committed: the older commit below must not be taken for the newest."""
    store = DictStore()
    put_commit(store, 1)
    later_format(store, ".commit.2")
    with pytest.raises(IncompatibleCheckpointError):
        read_current(store)
    with pytest.raises(IncompatibleCheckpointError):
        begin(Attempt(store, B, overwrite=True), Steps())


def test_an_outage_is_no_empty_folder() -> None:
    """A listing that fails raises, transient or not."""
    store = DictStore()
    put_commit(store, 1)
    with pytest.raises(StoreError, match="down"):
        read_current(FailingListing(store, lambda: StoreError("down", transient=True)))
    with pytest.raises(StoreError, match="broken"):
        read_current(FailingListing(store, lambda: StoreError("broken", errno=errno.EIO)))


def test_a_commit_that_cannot_be_read_is_not_passed_over() -> None:
    """A store error at the highest commit raises; the commit below is not taken for the newest."""
    store = DictStore()
    put_commit(store, 1)
    put_commit(store, 2, B)
    faulty = FaultyStore(store, [Fault("read", nth=None, name=r"\.commit\.2")])
    with pytest.raises(StoreError):
        read_current(faulty)


@pytest.mark.parametrize("numbers", [[1], [1, 2], [1, 2, 3, 9], [3, 4], [8], [5, 13]])
def test_without_the_right_to_list_numbers_are_probed_upwards(numbers: list[int]) -> None:
    """Where listing is forbidden the highest commit is found, also above a few numbers that were swept."""
    store = DictStore()
    for number in numbers:
        put_commit(store, number)
    current = read_current(FailingListing(store))
    assert current is not None
    assert current.number == numbers[-1]


def test_a_probe_that_finds_nothing_says_nothing_is_there() -> None:
    """Without the right to list, an empty folder has no commit; a void is found as one."""
    store = DictStore()
    assert read_current(FailingListing(store)) is None
    put_commit(store, 1)
    put_commit(store, 2, void=True)
    current = read_current(FailingListing(store))
    assert current is not None
    assert current.commit.state == "void"


def test_a_probe_does_not_take_an_outage_for_an_end() -> None:
    """While probing, a read that fails raises instead of ending the search."""
    store = DictStore()
    put_commit(store, 1)
    put_commit(store, 2, B)
    faulty = FaultyStore(store, [Fault("read", nth=None, name=r"\.commit\.2")])
    with pytest.raises(StoreError):
        read_current(FailingListing(faulty))


# -- the manifest and the files ----------------------------------------------------------------------------------------


def saved() -> tuple[DictStore, dict[str, bytes]]:
    store = DictStore()
    commit_now(store, A)
    return store, files_of(store)


def test_the_manifest_of_a_commit_is_read() -> None:
    """The manifest that was committed comes back."""
    store, files = saved()
    current = read_current(store)
    assert current is not None
    manifest = read_manifest(store, current)
    assert [record.name for record in manifest.files] == ["__0_0.distcp", "__1_0.distcp"]
    assert json.loads(files[".manifest"])["files"][0]["crc32"] == zlib.crc32(body_of(A))


@pytest.mark.parametrize("damage", ["gone", "short", "long", "altered"])
def test_a_manifest_that_is_not_what_was_committed_is_corrupt(damage: str) -> None:
    """A manifest that is gone, short, long or altered is named, with what was wanted and found."""
    store, files = saved()
    body = files[".manifest"]
    current = read_current(store)
    assert current is not None
    ref = current.commit.manifest
    assert ref is not None
    wrong = {"gone": b"", "short": body[:-1], "long": body + b" ", "altered": body.replace(b"k0", b"k9")}[damage]
    if damage == "gone":
        store.delete([".manifest"])
    else:
        put(store, ".manifest", wrong)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_manifest(store, current)
    assert caught.value.file == ".manifest"
    if damage == "short":
        assert (caught.value.wanted, caught.value.found) == (len(body), len(body) - 1)
    if damage == "altered":
        assert (caught.value.wanted, caught.value.found) == (ref.crc32, zlib.crc32(wrong))


@pytest.mark.parametrize("listing", [True, False], ids=["listed", "asked one by one"])
def test_sizes_of_files_are_checked(listing: bool) -> None:
    """A wanted file that is missing, short or long is named with both sizes; others are not looked at."""
    store, _ = saved()
    current = read_current(store)
    assert current is not None
    manifest = read_manifest(store, current)
    seen: Store = store if listing else FailingListing(store)
    names = [record.name for record in manifest.files]
    check_sizes(seen, manifest, names)
    for body, found in ((body_of(A)[:-1], 31), (body_of(A) + b"+", 33), (b"", 0)):
        put(store, "__1_0.distcp", body)
        with pytest.raises(CorruptCheckpointError) as caught:
            check_sizes(seen, manifest, names)
        assert (caught.value.file, caught.value.wanted, caught.value.found) == ("__1_0.distcp", 32, found)
    store.delete(["__1_0.distcp"])
    with pytest.raises(CorruptCheckpointError) as caught:
        check_sizes(seen, manifest, names)
    assert (caught.value.file, caught.value.wanted, caught.value.found) == ("__1_0.distcp", 32, None)
    check_sizes(seen, manifest, ["__0_0.distcp"])


def test_sizes_are_checked_by_one_listing() -> None:
    """However many files are wanted, one listing tells all their sizes."""
    store, _ = saved()
    current = read_current(store)
    assert current is not None
    manifest = read_manifest(store, current)
    recording = RecordingStore(store)
    check_sizes(recording, manifest, [record.name for record in manifest.files] * 3)
    assert recording.operations() == ["entries"]


def test_sizes_do_not_take_an_outage_for_missing_files() -> None:
    """A listing that fails for another reason than a missing right raises as it is."""
    store, _ = saved()
    current = read_current(store)
    assert current is not None
    down = FailingListing(store, lambda: StoreError("down", transient=True))
    with pytest.raises(StoreError, match="down"):
        check_sizes(down, read_manifest(store, current), ["__0_0.distcp"])


# -- blame -------------------------------------------------------------------------------------------------------------

GONE = CorruptCheckpointError("gone", file="__0_0.distcp", key="w")


def test_blame_stays_where_the_number_has_not_moved() -> None:
    """Something gone from the commit that still counts is corrupt."""
    store, _ = saved()
    assert blame(store, 1, GONE) is GONE
    assert blame(DictStore(), None, GONE) is GONE


@pytest.mark.parametrize("void", [True, False])
def test_blame_goes_to_the_commit_that_came_meanwhile(void: bool) -> None:
    """Something gone after another save committed, or after a delete, is a checkpoint that was replaced."""
    store, _ = saved()
    put_commit(store, 2, B, void=void)
    found = blame(store, 1, GONE)
    assert isinstance(found, CheckpointReplacedError)
    assert (found.key, found.path) == ("w", "dict://folder")
    assert isinstance(blame(store, None, GONE), CheckpointReplacedError)


def test_blame_does_not_go_to_a_torn_commit() -> None:
    """A torn commit is absent to readers: it replaces nothing, and loading again would never help."""
    store, _ = saved()
    put(store, ".commit.2", b"{")
    found = blame(store, 1, GONE)
    assert isinstance(found, CorruptCheckpointError)
    assert found.key == "w"


class ForgetsPlans(DefaultLoadPlanner):
    """A planner that ends with a plan of its own, without what the storage put into it."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(super().finish_plan(central_plan), storage_data=None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_whole_checkpoint_below_a_torn_commit_loads_with_any_planner() -> None:
    """Nothing is wrong with what readers see, so a load succeeds, also where each rank looks at the commit again."""
    store = DictStore()
    assert save_to(writer_on(store), {"w": torch.arange(4)}) is None
    put(store, ".commit.2", b"{")
    for planner in (DefaultLoadPlanner(), ForgetsPlans()):
        target = {"w": torch.zeros(4, dtype=torch.int64)}
        dcp.load(target, storage_reader=reader_on(store), planner=planner, no_dist=True)
        assert target["w"].tolist() == [0, 1, 2, 3]


def test_blame_is_found_without_the_right_to_list() -> None:
    """A reader that may not list still learns whether the file is corrupt or the checkpoint was replaced."""
    store, _ = saved()
    assert blame(FailingListing(store), 1, GONE) is GONE
    put_commit(store, 2, B)
    assert isinstance(blame(FailingListing(store), 1, GONE), CheckpointReplacedError)


def test_a_checkpoint_replaced_between_commit_and_manifest_is_said_to_be_replaced() -> None:
    """A reader that read the commit, and finds its manifest gone after a delete, is told to load again."""
    store, _ = saved()
    hooked = Hooked(store, before=once("read", ".manifest", lambda: delete_folder(store)))
    with pytest.raises(CheckpointReplacedError):
        read_checkpoint(hooked, require_commit=True)


# -- nothing committed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        ([], CheckpointNotFoundError, "nothing in this folder"),
        (["notes.txt"], CheckpointNotFoundError, "notes.txt"),
        (["__0_0.distcp", ".claim"], NotCommittedError, "never committed"),
        ([".metadata", "__0_0.distcp"], NotCommittedError, "require_commit=False"),
        ([".metadata.tmp"], NotCommittedError, "never committed"),
    ],
    ids=["empty", "foreign", "unfinished", "stock", "stock, unfinished"],
)
def test_what_is_there_instead_is_said(names: list[str], kind: type[CheckpointNotFoundError], words: str) -> None:
    """The error tells an empty folder, an unfinished save and a stock checkpoint apart, and what to do."""
    store = DictStore()
    for name in names:
        put(store, name, b"x")
    found = nothing_committed(store, None)
    assert type(found) is kind
    assert words in str(found)
    assert found.path == "dict://folder"


def test_a_deleted_checkpoint_is_said_to_be_deleted() -> None:
    """Below a void the error says when it was deleted."""
    store = DictStore()
    put_commit(store, 2, void=True)
    current = read_current(store)
    assert current is not None
    found = nothing_committed(store, current)
    assert type(found) is NotCommittedError
    assert current.commit.time in str(found)


def test_a_bucket_that_is_not_there_is_no_checkpoint() -> None:
    """A missing bucket is a checkpoint that is not found, with the store's own words."""
    missing = FailingListing(DictStore(), lambda: ObjectNotFoundError("no such bucket", operation="entries"))
    found = nothing_committed(missing, None)
    assert type(found) is CheckpointNotFoundError
    assert "no such bucket" in str(found)


def test_the_folder_of_a_run() -> None:
    """Where there are only folders, as in a run, that is said, and what the last ones are called."""
    objects = DictStore.Objects()
    for number in (9, 10, 11, 12):
        commit_now(DictStore(objects, folder=f"run/step-{number:08d}"), "a" * 16)
    message = nothing_committed(DictStore(objects, folder="run"), None).message
    assert "only 4 folders" in message
    assert "step-00000010, step-00000011, step-00000012" in message
