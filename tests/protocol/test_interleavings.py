"""A search over interleavings of the real code: saves, delete, prune and a reader on one folder, request by request.

The same search, with one protection taken out by a named fault of the test kit, must find a violation: that shows that
it looks where it matters. A failure prints its seed and every request; ``play(scenario, seed)`` plays it again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dcp_storage.commit import Steps
from dcp_storage.current import blame
from dcp_storage.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from dcp_storage.fence import delete_folder, drop_commits, prune_folder
from dcp_storage.reading import read_checkpoint, sizes_of_files
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faults import FAULTS, HEALTHY, NamedFault
from tests.protocol.acting import Saver, body_of, commit_now
from tests.protocol.schedule import Actor, Run, ViolationError

SCHEDULES = 400
"""Schedules of each scenario, with and without a fault."""

SIZE = len(body_of("x"))
OLD = "o" * 16


def token(name: str) -> str:
    return name.lower() * 16


# -- folders -----------------------------------------------------------------------------------------------------------


def clean() -> DictStore:
    store = DictStore()
    store.put("notes.txt", [memoryview(b"mine")])
    return store


def old() -> DictStore:
    store = clean()
    commit_now(store, OLD)
    return store


def old_with_orphans() -> DictStore:
    store = old()
    for name in (f"__0_0.{'q' * 16}.distcp", f".manifest.{'q' * 16}", ".claim"):
        store.put(name, [memoryview(body_of("q" * 16))])
    return store


def leftovers() -> DictStore:
    store = clean()
    for name in (".claim", "__0_0.distcp", ".manifest"):
        store.put(name, [memoryview(body_of("q" * 16))])
    return store


def half_deleted() -> DictStore:
    store = old()
    kept = {name: store.objects.held[store.folder, name].body for name in ("__0_0.distcp", "__1_0.distcp", ".manifest")}
    delete_folder(store)
    for name, body in kept.items():
        store.put(name, [memoryview(body)])
    return store


# -- actors ------------------------------------------------------------------------------------------------------------


def save(name: str, fault: NamedFault, *, overwrite: bool) -> Actor:
    steps = fault.save(Steps())

    def work(store: Store) -> str:
        return Saver(fault.store(store), token(name), overwrite, steps).save().token

    return Actor(token(name), work)


def delete(fault: NamedFault) -> Actor:
    return Actor("D", lambda store: delete_folder(store, fault.delete_steps).token)


def prune(name: str, fault: NamedFault) -> Actor:
    # Commit objects are swept after the grace only, which here is nothing: that one step is left out.
    steps = tuple(step for step in fault.prune_steps if step is not drop_commits)

    def work(store: Store) -> str | None:
        sweep = prune_folder(store, grace=0, steps=steps)
        return sweep.token if sweep.fenced else None

    return Actor(name, work)


def read(fault: NamedFault) -> Actor:
    def work(store: Store) -> list[str]:
        checkpoint = read_checkpoint(store, require_commit=True)
        records = checkpoint.manifest.files
        sizes_of_files(store, checkpoint, [record.name for record in records])
        found = []
        for record in records:
            body = bytearray(record.size)
            try:
                store.read_into(record.name, 0, [memoryview(body)])
            except (ObjectNotFoundError, ObjectTooShortError) as error:
                raise blame(store, checkpoint.number, CorruptCheckpointError("gone", cause=error)) from error
            if zlib.crc32(body) != record.crc32:
                raise blame(store, checkpoint.number, CorruptCheckpointError("altered"))
            found.append(body.decode())
        return found

    return Actor("R", work)


@dataclass(frozen=True)
class Scenario:
    """A folder and who works on it.

    Attributes:
        folder: makes the folder.
        actors: makes them, with a fault.
        may_vanish: whether a reader may rightly find nothing.
    """

    folder: Callable[[], DictStore]
    actors: Callable[[NamedFault], list[Actor]]
    may_vanish: bool = True


SCENARIOS: dict[str, Scenario] = {
    "clean: two saves, a reader": Scenario(
        clean, lambda f: [save("A", f, overwrite=False), save("B", f, overwrite=False), read(f)]
    ),
    "clean: two saves, a prune": Scenario(
        clean, lambda f: [save("A", f, overwrite=False), save("B", f, overwrite=True), prune("P", f)]
    ),
    "clean: a save, a replacing save, a delete": Scenario(
        clean, lambda f: [save("A", f, overwrite=False), save("B", f, overwrite=True), delete(f)]
    ),
    "old: two replacing saves, a reader": Scenario(
        old, lambda f: [save("A", f, overwrite=True), save("B", f, overwrite=True), read(f)], may_vanish=False
    ),
    "old: a replacing save, a delete, a reader": Scenario(
        old, lambda f: [save("A", f, overwrite=True), delete(f), read(f)]
    ),
    "old: a replacing save, a delete, a prune": Scenario(
        old, lambda f: [save("A", f, overwrite=True), delete(f), prune("P", f)]
    ),
    "orphans: a replacing save, a prune, a reader": Scenario(
        old_with_orphans, lambda f: [save("A", f, overwrite=True), prune("P", f), read(f)], may_vanish=False
    ),
    "orphans: a prune, a delete, a save": Scenario(
        old_with_orphans, lambda f: [prune("P", f), delete(f), save("A", f, overwrite=False)]
    ),
    "leftovers: two saves, a prune": Scenario(
        leftovers, lambda f: [save("A", f, overwrite=False), save("B", f, overwrite=False), prune("P", f)]
    ),
    "half deleted: two prunes, a save": Scenario(
        half_deleted, lambda f: [prune("P", f), prune("Q", f), save("A", f, overwrite=False)]
    ),
}

FOUND: dict[str, str] = {
    "commit-by-put": "old: two replacing saves, a reader",
    "commit-before-manifest": "clean: two saves, a reader",
    "old-files-first": "old: two replacing saves, a reader",
    "shared-names": "clean: two saves, a reader",
    "ignores-if-absent": "old: a replacing save, a delete, a reader",
    "delete-without-void": "old: a replacing save, a delete, a reader",
    "no-read-back": "clean: two saves, a reader",
    "commit-errors-logged": "old: two replacing saves, a reader",
    "prune-without-fence": "leftovers: two saves, a prune",
    "prune-lists-late": "orphans: a replacing save, a prune, a reader",
    "prune-forgets-live": "orphans: a replacing save, a prune, a reader",
    "takes-everything": "orphans: a prune, a delete, a save",
}
"""Each fault, and a scenario in which the search must find it."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between tries of a commit take no time here."""
    monkeypatch.setattr("dcp_storage.commit_object.time.sleep", lambda seconds: None)


def play(name: str, seed: int, fault: NamedFault = HEALTHY) -> None:
    """Plays one schedule of a scenario; raises ViolationError where an invariant was broken."""
    scenario = SCENARIOS[name]
    Run(scenario.folder(), scenario.actors(fault), seed, SIZE, may_vanish=scenario.may_vanish).play()


def first_violation(name: str, fault: NamedFault) -> str | None:
    """What the first schedule shows that breaks an invariant; None where none does."""
    for seed in range(SCHEDULES):
        try:
            play(name, seed, fault)
        except ViolationError as error:
            return str(error)
    return None


SOME = 4  # of them in every run; all of them in CI


@pytest.mark.parametrize(
    "name", [n if k < SOME else pytest.param(n, marks=pytest.mark.slow) for k, n in enumerate(SCENARIOS)]
)
def test_no_schedule_breaks_an_invariant(name: str) -> None:
    """Whatever the order of requests, with a kill and a fault of the wire: every invariant holds after each request."""
    for seed in range(SCHEDULES):
        play(name, seed)


@pytest.mark.parametrize("name", FOUND)
def test_the_search_finds_a_protection_that_is_missing(name: str) -> None:
    """With one protection taken out the same search sees an invariant broken."""
    assert first_violation(FOUND[name], FAULTS[name]) is not None


def test_a_seed_plays_the_same_schedule_again() -> None:
    """What a failure prints can be played again, request by request."""
    name, fault = "old: two replacing saves, a reader", FAULTS["old-files-first"]
    told = first_violation(name, fault)
    assert told is not None
    assert told == first_violation(name, fault)
