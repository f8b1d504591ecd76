"""The save pipeline on a store in memory: what arrives, and what is left when any call fails."""

from __future__ import annotations

import io
import random
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_storage.budget import Budget
from dcp_storage.codec import Encoded, encode, encode_object
from dcp_storage.errors import StoreError
from dcp_storage.records import WrittenItem
from dcp_storage.save import Source, run
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore

KIB = 1024


def tensor(number: int, size: int = 50_000) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(number).randbytes(size)), dtype=torch.uint8)


def source(key: str, encode_it: Callable[[], Encoded]) -> Source:
    return Source(key, (0,), None, encode_it)


def three_files() -> list[tuple[str, list[Source]]]:
    """One file of several parts, one of a single small object, one of two tensors."""
    return [
        ("__0_0.distcp", [source("a", lambda: encode(tensor(1, 300_000)))]),
        ("__0_1.distcp", [source("b", lambda: encode_object([memoryview(b"small")]))]),
        ("__0_2.distcp", [source("c", lambda: encode(tensor(3))), source("d", lambda: encode(tensor(4)))]),
    ]


def stock(value: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def save(store: Store, files: Any, budget: Budget, **options: Any) -> list[WrittenItem]:
    defaults: dict[str, Any] = {
        "rank": 3, "part_size": 64 * KIB, "max_concurrency": 3, "left_behind": [], "sent": lambda count: None,
    }  # fmt: skip
    return run(store, files, budget=budget, **{**defaults, **options})


def body(store: DictStore, name: str) -> bytes:
    return store.read(name, limit=1 << 30)


class InOrder(DictStore):
    """Takes the parts of an upload one at a time, in order, and says so if it is given others."""

    parallel_parts = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.busy: set[str] = set()

    def upload(self, name: str) -> Any:
        inner, outer = super().upload(name), self

        class Ordered(type(inner)):  # type: ignore[misc]
            def write_part(self, number: int, *args: Any, **kwargs: Any) -> None:
                assert name not in outer.busy
                outer.busy.add(name)
                super().write_part(number, *args, **kwargs)
                outer.calls.append((name, number))
                outer.busy.remove(name)

        inner.__class__ = Ordered
        return inner


@pytest.mark.parametrize("budget", [1, 100_000, 1 << 30])
@pytest.mark.parametrize("make", [DictStore, InOrder])
def test_the_files_are_their_items_in_a_row(make: type[DictStore], budget: int) -> None:
    """Bytes, sizes, places and CRC-32s of files, items, payloads and blocks are those of the whole bytes."""
    store, held = make(), Budget(budget)
    told: list[int] = []
    written = save(store, three_files(), held, sent=told.append)
    wanted = {
        "__0_0.distcp": [stock(tensor(1, 300_000))],
        "__0_1.distcp": [b"small"],
        "__0_2.distcp": [stock(tensor(3)), stock(tensor(4))],
    }
    assert {entry.name for entry in store.entries()} == set(wanted)
    assert [each.item.key for each in written] == ["a", "b", "c", "d"]
    for name, items in wanted.items():
        whole = b"".join(items)
        assert body(store, name) == whole
        mine = [each for each in written if each.name == name]
        (shard,) = [each.shard for each in mine if each.shard is not None]
        assert mine[0].shard is shard
        assert (shard.name, shard.size, shard.crc32, shard.rank) == (name, len(whole), zlib.crc32(whole), 3)
        at = 0
        for each, data in zip(mine, items, strict=True):
            item = each.item
            assert (item.offset, item.length, item.crc32) == (at, len(data), zlib.crc32(data))
            payload = data[item.payload_offset : item.payload_offset + item.payload_length]
            assert item.payload_crc32 == zlib.crc32(payload)
            assert item.blocks == tuple(
                zlib.crc32(payload[low : low + item.block]) for low in range(0, len(payload), item.block)
            )
            at += len(data)
    assert sum(told) == sum(len(data) for items in wanted.values() for data in items)
    assert store.open_uploads() == []
    assert held.held == 0


def test_parts_go_in_order_where_they_must() -> None:
    """On a store without parallel parts each upload gets 1, 2, 3, … one at a time."""
    store = InOrder()
    save(store, three_files(), Budget(1 << 30), max_concurrency=8)
    parts: dict[str, list[int]] = {}
    for name, number in store.calls:
        parts.setdefault(name, []).append(number)
    assert parts["__0_0.distcp"] == [1, 2, 3, 4, 5]
    assert all(numbers == sorted(numbers) for numbers in parts.values())


def test_parts_are_not_smaller_than_the_store_takes() -> None:
    """A part size below the store's least is raised to it."""
    store = DictStore(min_part_size=100_000)
    save(store, three_files(), Budget(1 << 30))
    assert body(store, "__0_0.distcp") == stock(tensor(1, 300_000))


def test_no_files_are_no_work() -> None:
    """A rank with nothing to save sends nothing."""
    store = FaultyStore(DictStore(), [Fault("*")])
    assert save(store, [], Budget(10)) == []
    assert store.fired == []


WRITES = ["put", "upload", "write_part", "complete"]


@pytest.mark.parametrize("budget", [1, 1 << 30])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize("operation", WRITES)
def test_nothing_is_left_of_a_save_that_failed(operation: str, nth: int, when: Any, budget: int) -> None:
    """Whichever call fails, before or after its effect: the error is raised, no file, no upload, no budget stays."""
    inner, held = DictStore(), Budget(budget)
    store = FaultyStore(inner, [Fault(operation, nth=nth, when=when)])
    left: list[str] = []
    happens = nth <= {"put": 1, "upload": 2, "write_part": 7, "complete": 2}[operation]
    if happens:
        with pytest.raises(StoreError, match="injected") as caught:
            save(store, three_files(), held, left_behind=left)
        assert caught.value.operation == operation
        assert inner.entries() == []
    else:
        assert len(save(store, three_files(), held, left_behind=left)) == 4
    assert len(store.fired) == happens
    assert inner.open_uploads() == []
    assert left == []
    assert held.held == 0


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_nothing_is_left_when_an_item_cannot_be_made(at: int) -> None:
    """An error of ``encode`` is raised as it is, whichever item it was, and nothing stays."""

    def broken() -> Encoded:
        raise KeyError("no such value")

    sources = [source(key, lambda: encode(tensor(1, 200_000))) for key in "abc"]
    sources.insert(at, source("bad", broken))
    store, held = DictStore(), Budget(100_000)
    with pytest.raises(KeyError, match="no such value"):
        save(store, [("__0_0.distcp", sources[:2]), ("__0_1.distcp", sources[2:])], held)
    assert store.entries() == []
    assert store.open_uploads() == []
    assert held.held == 0


@pytest.mark.parametrize("operation", ["abort", "delete", "abort_uploads"])
def test_what_could_not_be_removed_is_told(operation: str) -> None:
    """Where the clean-up fails, too, the first error is raised, the rest is tried, and a sentence says what is left."""
    inner, held = DictStore(), Budget(1 << 30)
    store = FaultyStore(inner, [Fault("write_part", nth=2), Fault(operation, nth=None)])
    told: list[str] = []
    with pytest.raises(StoreError, match="write_part"):
        save(store, three_files(), held, left_behind=told)
    assert len(told) == 1
    assert operation in told[0]
    assert held.held == 0
    if operation == "abort":
        assert inner.entries() == []
    if operation == "delete":
        assert inner.open_uploads() == []


def test_an_upload_whose_beginning_was_lost_is_aborted() -> None:
    """The reply to the beginning is lost, so nobody holds the upload: it is found by its name."""
    inner = DictStore()
    store = FaultyStore(inner, [Fault("upload", when="after")])
    with pytest.raises(StoreError, match="upload"):
        save(store, three_files(), Budget(1 << 30))
    assert inner.open_uploads() == []


def test_an_error_does_not_wait_for_the_rest_to_be_made() -> None:
    """After a part has failed no further item is asked for."""
    asked = []

    def make(number: int) -> Encoded:
        asked.append(number)
        return encode(tensor(number, 200_000))

    files = [
        (f"__0_{number}.distcp", [source(str(number), lambda number=number: make(number))])  # type: ignore[misc]
        for number in range(200)
    ]
    store, held = FaultyStore(DictStore(), [Fault("write_part", nth=1)]), Budget(200_000)
    with pytest.raises(StoreError, match="write_part"):
        save(store, files, held)
    assert len(asked) < 20
    assert held.held == 0


def test_two_saves_share_one_budget() -> None:
    """Two pipelines at once, the budget smaller than a part of either: both go through, none waits for ever."""
    held = Budget(1000)
    stores = [DictStore(), DictStore()]
    threads = [threading.Thread(target=save, args=(store, three_files(), held), daemon=True) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [len(store.entries()) for store in stores] == [3, 3]
    assert held.held == 0
