"""The recorder: every call once, with its bytes, in the order of its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.recording import Call, RecordingStore


def test_every_call_is_written_down() -> None:
    """Each method of a store and of its uploads leaves one call with names, bytes and offset."""
    store = RecordingStore(DictStore())
    store.make_folder()
    store.put("a", [memoryview(b"abc"), memoryview(b"de")])
    store.size("a")
    store.read("a", limit=100)
    store.read_into("a", 1, [memoryview(bytearray(2)), memoryview(bytearray(1))])
    store.create("b", b"1234")
    upload = store.upload("c")
    upload.write_part(1, 0, [memoryview(b"xy")])
    upload.write_part(2, 2, [memoryview(b"z")])
    upload.complete()
    upload.abort()
    store.entries()
    store.folders()
    store.delete(name for name in ("a", "b"))
    store.open_uploads()
    store.abort_uploads(["d"])
    store.now()
    wanted: list[tuple[str, str | None, int, int | None, tuple[str, ...]]] = [
        ("make_folder", None, 0, None, ()),
        ("put", "a", 5, None, ()),
        ("size", "a", 0, None, ()),
        ("read", "a", 5, None, ()),
        ("read_into", "a", 3, 1, ()),
        ("create", "b", 4, None, ()),
        ("upload", "c", 0, None, ()),
        ("write_part", "c", 2, 0, ()),
        ("write_part", "c", 1, 2, ()),
        ("complete", "c", 0, None, ()),
        ("abort", "c", 0, None, ()),
        ("entries", None, 0, None, ()),
        ("folders", None, 0, None, ()),
        ("delete", None, 0, None, ("a", "b")),
        ("open_uploads", None, 0, None, ()),
        ("abort_uploads", None, 0, None, ("d",)),
        ("now", None, 0, None, ()),
    ]
    assert store.calls == [Call(*each, True, None, place) for place, each in enumerate(wanted)]
    assert store.operations() == [each[0] for each in wanted]
    assert [call.nbytes for call in store.of("write_part")] == [2, 1]
    assert store.bytes_read() == 8


def test_failed_calls_are_written_down_as_such() -> None:
    """A call that raised is there with the class of its error, raises all the same, and brought no bytes back."""
    store = RecordingStore(DictStore())
    store.create("a", b"x")
    with pytest.raises(ObjectExistsError):
        store.create("a", b"y")
    with pytest.raises(ObjectNotFoundError):
        store.read_into("b", 0, [memoryview(bytearray(9))])
    assert [(call.ok, call.error) for call in store.calls] == [
        (True, None),
        (False, "dcp_storage.errors.ObjectExistsError"),
        (False, "dcp_storage.errors.ObjectNotFoundError"),
    ]
    assert store.bytes_read() == 0


def test_order_of_start_and_order_of_end_are_told_apart() -> None:
    """A call that hangs while another one ends comes later in the list, and its start earlier."""
    faulty = FaultyStore(DictStore(), [Fault("size", action="hang", seconds=20)])
    store = RecordingStore(faulty)
    store.put("a", [])
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(store.size, "a")
        faulty.wait_fired()
        store.entries()
        faulty.release()
        assert slow.result(20) == 0
    assert [(call.operation, call.started) for call in store.calls] == [("put", 0), ("entries", 2), ("size", 1)]


def test_looking_at_a_property_is_no_call() -> None:
    """Asking how far creates can be trusted leaves no call."""
    store = RecordingStore(DictStore())
    assert store.create_if_absent.value == "atomic"
    assert store.calls == []


def test_calls_of_many_threads_are_all_there() -> None:
    """Nothing is lost or counted twice when threads call at once."""
    store = RecordingStore(DictStore())
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        gate.wait(20)
        for turn in range(50):
            store.put(f"{number}-{turn}", [])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len({call.name for call in store.calls}) == 400
    assert sorted(call.started for call in store.calls) == list(range(400))
