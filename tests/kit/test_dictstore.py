"""What the in-memory store has beyond the contract: a clock to turn, shared objects, refusals."""

from __future__ import annotations

import pytest

from dcp_storage.errors import StoreError
from dcp_storage.testing.dictstore import DictStore


def test_the_clock_can_be_turned() -> None:
    """Objects and uploads carry the time of the given clock, and advancing makes them older."""
    store = DictStore(DictStore.Objects(clock=lambda: 1000.0))
    store.put("a", [])
    store.upload("b")
    store.objects.advance(50)
    store.put("c", [])
    assert {entry.name: entry.modified for entry in store.entries()} == {"a": 1000.0, "c": 1050.0}
    assert [entry.modified for entry in store.open_uploads()] == [1000.0]
    assert store.now() == 1050.0


def test_objects_are_shared_only_where_that_is_said() -> None:
    """Two stores of the same objects and folder are one; without shared objects they know nothing of each other."""
    store = DictStore()
    store.put("a", [memoryview(b"x")])
    assert DictStore(store.objects).read("a", limit=1) == b"x"
    assert DictStore(store.objects, folder="other").entries() == []
    assert DictStore().entries() == []


def test_uploads_keep_the_rules_of_object_stores() -> None:
    """Small parts, too many parts, empty parts, gaps and a wrong CRC are refused, as a real store would."""
    store = DictStore(min_part_size=4, max_parts=2)
    small = store.upload("small")
    small.write_part(1, 0, [memoryview(b"abc")])
    small.write_part(2, 3, [memoryview(b"d")])
    gap = store.upload("gap")
    gap.write_part(2, 4, [memoryview(b"abcd")])
    hole = store.upload("hole")
    hole.write_part(1, 0, [memoryview(b"abcd")])
    hole.write_part(2, 5, [memoryview(b"abcd")])
    for upload in (small, gap, hole):
        with pytest.raises(StoreError):
            upload.complete()
    for number, data, crc32 in ((3, b"x", None), (0, b"x", None), (1, b"", None), (1, b"x", 1)):
        with pytest.raises(StoreError):
            gap.write_part(number, 0, [memoryview(data)], crc32=crc32)
    with pytest.raises(StoreError, match="CRC-32"):
        store.put("a", [memoryview(b"x")], crc32=1)
    assert store.entries() == []


def test_an_upload_that_was_ended_takes_no_more() -> None:
    """After an abort, parts and a complete are refused and nothing appears."""
    store = DictStore()
    upload = store.upload("a")
    upload.write_part(1, 0, [memoryview(b"x")])
    upload.abort()
    with pytest.raises(StoreError):
        upload.write_part(1, 0, [memoryview(b"x")])
    with pytest.raises(StoreError):
        upload.complete()
    assert store.entries() == []


def test_an_abort_takes_back_only_its_own_object() -> None:
    """An abort after complete leaves alone what somebody else has put there since."""
    store = DictStore()
    upload = store.upload("a")
    upload.write_part(1, 0, [memoryview(b"x")])
    upload.complete()
    store.put("a", [memoryview(b"newer")])
    upload.abort()
    assert store.read("a", limit=10) == b"newer"
