"""The faults: what takes effect, what is raised, at which call."""

from __future__ import annotations

import errno
import multiprocessing
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from dcp_storage.store import Atomicity, WrappedStore
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import FailingListing, Fault, FaultyStore, IgnoresIfAbsent, StaleListing


def names(store: DictStore) -> list[str]:
    return sorted(entry.name for entry in store.entries())


def put(store: FaultyStore, name: str, data: bytes = b"x") -> None:
    store.put(name, [memoryview(data)])


@pytest.mark.parametrize(
    ("when", "there", "transient", "number"),
    [
        ("before", [], False, errno.EIO),
        ("after", ["a"], False, errno.EIO),
        ("lost", ["a"], True, errno.ETIMEDOUT),
        ("late", [], True, errno.ETIMEDOUT),
    ],
)
def test_a_fault_takes_effect_when_it_says(
    when: Literal["before", "after", "lost", "late"], there: list[str], transient: bool, number: int
) -> None:
    """Before: no effect. After: effect and a definite error. Lost: effect and an ambiguous one. Late: only that."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("put", when=when)])
    with pytest.raises(StoreError) as caught:
        put(store, "a")
    assert names(inner) == there
    error = caught.value
    assert (error.transient, error.ambiguous, error.errno) == (transient, transient, number)
    assert (error.operation, error.key) == ("put", "a")
    assert [(fired.fault.when, fired.request.name) for fired in store.fired] == [(when, "a")]


def test_the_nth_matching_call_is_hit_and_no_other() -> None:
    """A fault counts the calls of its operation and names only."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("put", nth=2, name=r"__\d+_0\.distcp")])
    for name in ("a", "__0_0.distcp", "b", "x__1_0.distcp"):
        put(store, name)
    store.create("__2_0.distcp", b"x")
    with pytest.raises(StoreError, match="injected"):
        put(store, "__1_0.distcp")
    put(store, "__1_0.distcp")
    assert len(store.fired) == 1
    assert len(names(inner)) == 6


def test_a_fault_without_a_number_hits_each_call() -> None:
    """A nth of None never wears out."""
    store = FaultyStore(DictStore(), [Fault("entries", nth=None)])
    for _ in range(3):
        with pytest.raises(StoreError):
            store.entries()
    assert len(store.fired) == 3


def test_any_operation_can_be_meant() -> None:
    """An asterisk counts every call, those of uploads too, but not a look at a property."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("*", nth=4)])
    assert store.create_if_absent is Atomicity.ATOMIC
    store.make_folder()
    upload = store.upload("a")
    upload.write_part(1, 0, [memoryview(b"x")])
    with pytest.raises(StoreError) as caught:
        upload.complete()
    assert caught.value.operation == "complete"
    upload.complete()
    assert names(inner) == ["a"]


def test_calls_with_several_names_match_by_any_of_them() -> None:
    """A delete is hit if one of its names matches."""
    store = FaultyStore(DictStore(), [Fault("delete", name="b")])
    store.delete(["a", "bb"])
    with pytest.raises(StoreError):
        store.delete(["a", "b"])


def test_the_error_can_be_chosen() -> None:
    """The factory's exception is raised, whatever it is."""
    store = FaultyStore(DictStore(), [Fault("put", error=lambda: OSError(errno.ENOSPC, "No space left"))])
    with pytest.raises(OSError, match="No space left") as caught:
        put(store, "a")
    assert caught.value.errno == errno.ENOSPC


def test_a_duplicate_is_applied_again_when_delivered() -> None:
    """A duplicated put answers at once and overwrites later, with the bytes it had when it was called."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("put", when="duplicate")])
    memory = bytearray(b"first")
    store.put("a", [memoryview(memory)])
    memory[:] = b"XXXXX"
    put(store, "a", b"second")
    assert inner.read("a", limit=10) == b"second"
    assert store.deliver_late() == 1
    assert inner.read("a", limit=10) == b"first"
    assert store.deliver_late() == 0


def test_a_late_effect_comes_after_so_many_calls() -> None:
    """A request that was given up takes effect before the second call after it."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("put", when="late", late_after=2)])
    with pytest.raises(StoreError):
        put(store, "a")
    assert store.entries() == []
    assert [entry.name for entry in store.entries()] == ["a"]


def test_the_answer_to_a_late_effect_reaches_nobody_but_the_test() -> None:
    """A duplicated create meets its own first effect; its error is kept, not raised."""
    store = FaultyStore(DictStore(), [Fault("create", when="duplicate")])
    store.create("a", b"x")
    assert store.deliver_late() == 1
    assert [type(error) for error in store.late_errors] == [ObjectExistsError]


def test_an_upload_can_complete_late() -> None:
    """A complete that was given up makes the object visible long after."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("complete", when="late")])
    upload = store.upload("a")
    upload.write_part(1, 0, [memoryview(b"x")])
    with pytest.raises(StoreError):
        upload.complete()
    assert names(inner) == []
    store.deliver_late()
    assert names(inner) == ["a"]


def test_a_delay_delays_and_goes_on() -> None:
    """A delayed call takes that long and then has its effect."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("put", action="delay", seconds=0.05)])
    begun = time.monotonic()
    put(store, "a")
    assert time.monotonic() - begun >= 0.05
    assert names(inner) == ["a"]


@pytest.mark.parametrize(("when", "there"), [("before", []), ("after", ["a"])])
def test_a_hanging_call_waits_for_its_release(when: Literal["before", "after"], there: list[str]) -> None:
    """A call hangs before or after its effect until it is released, and then returns."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("put", when=when, action="hang")])
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(put, store, "a")
        try:
            store.wait_fired()
            time.sleep(0.05)
            assert not call.done()
            assert names(inner) == there
        finally:
            store.release()
        call.result(20)
    assert names(inner) == ["a"]


def test_waiting_for_a_fault_that_never_fires_ends() -> None:
    """The wait for a fault is bounded."""
    with pytest.raises(TimeoutError, match="0 of 1"):
        FaultyStore(DictStore(), [Fault("put")]).wait_fired(timeout=0.01)


class OnDisk(WrappedStore):
    """Leaves a trace of every put that outlives the process."""

    def __init__(self, folder: str) -> None:
        super().__init__(DictStore())
        self.folder = folder

    def put(self, name: str, buffers: object, *, crc32: int | None = None) -> None:
        Path(self.folder, name).write_bytes(b"x")


def puts_three(when: Literal["before", "after"], folder: str) -> None:
    store = FaultyStore(OnDisk(folder), [Fault("put", nth=2, when=when, action="kill")])
    for name in ("a", "b", "c"):
        put(store, name)


@pytest.mark.parametrize(("when", "there"), [("before", ["a"]), ("after", ["a", "b"])])
def test_a_kill_ends_the_process_there(when: Literal["before", "after"], there: list[str], tmp_path: Path) -> None:
    """The process dies by SIGKILL before or after the effect of exactly that call."""
    process = multiprocessing.get_context("spawn").Process(target=puts_three, args=(when, str(tmp_path)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_faults_that_make_no_sense_are_refused() -> None:
    """A fault that could never do what it says is an error where it is written."""
    with pytest.raises(ValueError, match="nth"):
        Fault("put", nth=0)
    with pytest.raises(ValueError, match="action"):
        Fault("put", when="lost", action="kill")
    with pytest.raises(ValueError, match="writes"):
        Fault("read_into", when="duplicate")
    with pytest.raises(ValueError, match="writes"):
        Fault("*", when="late")


def test_a_store_that_ignores_if_absent_overwrites() -> None:
    """The named fault claims to be atomic and lets the second create win."""
    store = IgnoresIfAbsent(DictStore())
    assert store.create_if_absent is Atomicity.ATOMIC
    store.create("a", b"first")
    store.create("a", b"second")
    assert store.read("a", limit=10) == b"second"


def test_a_stale_listing_stays_until_it_is_refreshed() -> None:
    """New objects are read but not listed, deleted ones listed but not read."""
    inner = DictStore()
    inner.put("old", [])
    store = StaleListing(inner)
    store.put("new", [])
    store.delete(["old"])
    assert [entry.name for entry in store.entries()] == ["old"]
    DictStore(inner.objects, folder=f"{inner.folder}/sub").put("object", [])
    assert store.folders() == []
    assert store.size("new") == 0
    with pytest.raises(ObjectNotFoundError):
        store.size("old")
    store.refresh()
    assert [entry.name for entry in store.entries()] == ["new"]
    assert store.folders() == ["sub"]


def test_a_failing_listing_raises_and_the_rest_works() -> None:
    """Only the listing fails, by default as without the right to list."""
    store = FailingListing(DictStore())
    store.put("a", [])
    assert store.size("a") == 0
    with pytest.raises(StoreError) as caught:
        store.entries()
    assert (caught.value.errno, caught.value.operation, caught.value.transient) == (errno.EACCES, "entries", False)
    with pytest.raises(StoreError) as caught:
        store.folders()
    assert (caught.value.errno, caught.value.operation, caught.value.transient) == (errno.EACCES, "folders", False)
    for call in ("entries", "folders"):
        with pytest.raises(TimeoutError):
            getattr(FailingListing(DictStore(), TimeoutError), call)()
