"""The load pipeline on a store in memory: what is filled, what is read, and what is left when any call fails."""

from __future__ import annotations

import errno
import random
import threading
from typing import Any

import pytest
import torch

from dcp_storage.budget import Budget
from dcp_storage.codec import encode, encode_object
from dcp_storage.errors import CorruptCheckpointError, StoreError
from dcp_storage.load import Counters, Wanted, run
from dcp_storage.records import WrittenItem
from dcp_storage.save import Source
from dcp_storage.save import run as save_run
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.recording import RecordingStore

KIB = 1024
TENSORS = {
    "large": torch.arange(120_000, dtype=torch.float32).reshape(300, 400),
    "half": torch.arange(30_000, dtype=torch.float32).to(torch.bfloat16),
    "scalar": torch.tensor(5, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
    "columns": torch.arange(60_000, dtype=torch.int16).reshape(200, 300).T,
}
OBJECT = random.Random(2).randbytes(70_000)


@pytest.fixture
def saved() -> tuple[DictStore, dict[str, WrittenItem]]:
    """A store with two files of the tensors above and an object."""
    store = DictStore()
    sources = [
        Source(key, (0,) * value.dim(), None, lambda value=value: encode(value))  # type: ignore[misc]
        for key, value in TENSORS.items()
    ]
    sources.append(Source("object", None, None, lambda: encode_object([memoryview(OBJECT)])))
    written = save_run(
        store, [("one", sources[:2]), ("two", sources[2:])], rank=0, budget=Budget(1 << 30), part_size=1 << 20,
        max_concurrency=1, left_behind=[], sent=lambda count: None,
    )  # fmt: skip
    return store, {each.item.key: each for each in written}


class Wants:
    """What a planner wants and what it was told."""

    def __init__(self, items: dict[str, WrittenItem]) -> None:
        self.items = items
        self.wanted: list[Wanted] = []
        self.done: list[tuple[str, Any]] = []
        self.threads: set[threading.Thread] = set()

    def add(self, key: str, target: torch.Tensor, at: tuple[int, ...] | None = None) -> torch.Tensor:
        """A box of a tensor, beginning at ``at``, as large as the target."""
        lengths = tuple(target.shape)

        def give() -> torch.Tensor:
            self.threads.add(threading.current_thread())
            return target

        self._add(key, at or (0,) * len(lengths), lengths, give)
        return target

    def add_object(self) -> None:
        self._add("object", None, None, None)

    def _add(self, key: str, at: Any, lengths: Any, target: Any) -> None:
        def done(value: Any) -> None:
            self.threads.add(threading.current_thread())
            self.done.append((key, bytes(value) if isinstance(value, memoryview) else value))

        self.wanted.append(Wanted(self.items[key].name, self.items[key].item, at, lengths, target, done))


def load(store: Store, wants: Wants, budget: Budget, **options: Any) -> Counters:
    counters = Counters()
    defaults: dict[str, Any] = {"part_size": 64 * KIB, "max_gap": 1000, "max_concurrency": 3}
    run(store, wants.wanted, budget=budget, counters=counters, **{**defaults, **options})
    return counters


def all_of(wants: Wants) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Everything, into plain targets, strided targets, and slices; target beside what it must hold."""
    out = {}
    for key, value in TENSORS.items():
        out[key] = wants.add(key, torch.full(value.shape, -7).to(value.dtype)), value
        wide = torch.full((*value.shape[:-1], 2 * max(value.shape[-1:], default=1)), -7).to(value.dtype)
        if value.dim():
            out[f"{key}-strided"] = wants.add(key, wide[..., ::2]), value
    out["cast"] = wants.add("large", torch.full((300, 400), -7, dtype=torch.float64)), TENSORS["large"].double()
    out["rows"] = wants.add("large", torch.full((20, 400), -7.0), (100, 0)), TENSORS["large"][100:120]
    out["box"] = wants.add("large", torch.full((20, 30), -7.0), (100, 50)), TENSORS["large"][100:120, 50:80]
    out["corner"] = (
        wants.add("columns", torch.full((5, 7), -7, dtype=torch.int16), (295, 193)),
        (TENSORS["columns"][295:, 193:]),
    )
    out["middle"] = (
        wants.add("half", torch.full((11,), -7, dtype=torch.bfloat16), (12_345,)),
        (TENSORS["half"][12_345:12_356]),
    )
    wants.add_object()
    return out


@pytest.mark.parametrize("budget", [20 * KIB, 100 * KIB, 1 << 30])
@pytest.mark.parametrize("part_size", [64 * KIB, 1 << 30])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_target_is_filled(saved: Any, budget: int, part_size: int, concurrency: int) -> None:
    """Whole tensors, slices, strided and cast targets and an object all hold what was saved; each is told once."""
    store, items = saved
    wants, held = Wants(items), Budget(budget)
    targets = all_of(wants)
    load(store, wants, held, part_size=part_size, max_concurrency=concurrency)
    for name, (target, wanted) in targets.items():
        assert target.dtype is wanted.dtype
        assert torch.equal(target, wanted), name
    assert len(wants.done) == len(wants.wanted)
    assert ("object", OBJECT) in wants.done
    assert wants.threads == {threading.current_thread()}
    assert held.held == 0


def test_only_what_is_needed_is_read(saved: Any) -> None:
    """Rows of a tensor cost their blocks, not the tensor; the counters say so, and so does the store."""
    store, items = saved
    recording, wants = RecordingStore(store), Wants(items)
    wants.add("large", torch.zeros(20, 400), (100, 0))
    counters = load(recording, wants, Budget(1 << 30))
    assert counters.bytes_needed == 20 * 400 * 4
    block = items["large"].item.block
    assert counters.bytes_read == recording.bytes_read() <= counters.bytes_needed + 2 * block
    assert recording.operations() == ["read_into"]


def test_neighbours_share_a_request(saved: Any) -> None:
    """Items that lie close together are one ranged read; where gaps may not be read they are several."""
    store, items = saved
    for gap, most in ((10_000, 1), (0, 3)):
        recording, wants = RecordingStore(store), Wants(items)
        for key in ("scalar", "columns"):
            wants.add(key, torch.zeros(TENSORS[key].shape, dtype=TENSORS[key].dtype))
        wants.add_object()
        load(recording, wants, Budget(1 << 30), max_gap=gap, part_size=1 << 30)
        assert len(recording.of("read_into")) == most


def test_a_range_is_not_larger_than_a_part(saved: Any) -> None:
    """Ranges keep to the part size, which is rounded to whole blocks."""
    store, items = saved
    recording, wants = RecordingStore(store), Wants(items)
    wants.add("large", torch.zeros(300, 400))
    load(recording, wants, Budget(1 << 30), part_size=70_000)
    sizes = [call.nbytes for call in recording.of("read_into")]
    assert max(sizes) == 4 * 16 * KIB
    assert sum(sizes) == 480_000


@pytest.mark.parametrize("budget", [20 * KIB, 1 << 30])
@pytest.mark.parametrize("nth", [1, 2, 4, 7])
def test_a_read_that_fails_ends_the_load(saved: Any, nth: int, budget: int) -> None:
    """Whichever read fails: its error is raised, nobody waits for ever, and the budget is given back."""
    inner, items = saved
    store, wants, held = FaultyStore(inner, [Fault("read_into", nth=nth)]), Wants(items), Budget(budget)
    targets = all_of(wants)
    with pytest.raises(StoreError, match="injected") as caught:
        load(store, wants, held)
    assert caught.value.errno == errno.EIO
    assert held.held == 0
    told = [value.data_ptr() for _, value in wants.done if isinstance(value, torch.Tensor) and value.numel()]
    for target, wanted in targets.values():
        if target.numel() and target.data_ptr() in told:
            assert torch.equal(target, wanted)  # the planner never hears of what is not whole


@pytest.mark.parametrize("nth", [1, 3])
def test_a_hanging_read_does_not_hide_an_error(saved: Any, nth: int) -> None:
    """A slow read and a failing one: the error is raised after the slow one has come back, not before."""
    inner, items = saved
    faults = [Fault("read_into", nth=nth, action="delay", seconds=0.3), Fault("read_into", nth=nth + 1)]
    store, wants, held = FaultyStore(inner, faults), Wants(items), Budget(30 * KIB)
    all_of(wants)
    with pytest.raises(StoreError, match="injected"):
        load(store, wants, held)
    assert held.held == 0


def test_a_planner_that_fails_ends_the_load(saved: Any) -> None:
    """An error of a target or of ``done`` is raised as it is, and the budget is given back."""
    store, items = saved
    for where in ("target", "done"):

        def bad(*_: Any) -> Any:
            raise KeyError("the planner's own")

        wants, held = Wants(items), Budget(100 * KIB)
        all_of(wants)
        middle = wants.wanted[4]
        wants.wanted[4] = Wanted(
            middle.file, middle.item, middle.offsets, middle.lengths,
            bad if where == "target" else middle.target, bad if where == "done" else middle.done,
        )  # fmt: skip
        with pytest.raises(KeyError, match="the planner's own"):
            load(store, wants, held)
        assert held.held == 0


def test_a_file_that_is_gone_is_corrupt(saved: Any) -> None:
    """A missing file is named with the key."""
    store, items = saved
    store.delete(["one"])
    wants = Wants(items)
    all_of(wants)
    with pytest.raises(CorruptCheckpointError, match="one") as caught:
        load(store, wants, Budget(1 << 30))
    assert caught.value.file == "one"
    assert caught.value.key in {"large", "half"}


def test_a_file_that_is_short_is_corrupt(saved: Any) -> None:
    """A cut file is named with the key, the end that was wanted, and the end that was found."""
    store, items = saved
    data = store.read("one", limit=1 << 30)
    store.put("one", [memoryview(data)[:-20_000]])
    wants = Wants(items)
    all_of(wants)
    with pytest.raises(CorruptCheckpointError, match="too short") as caught:
        load(store, wants, Budget(1 << 30))
    assert (caught.value.file, caught.value.key, caught.value.found) == ("one", "half", len(data) - 20_000)
    assert isinstance(caught.value.wanted, int)
    assert len(data) - 20_000 < caught.value.wanted <= len(data)


@pytest.mark.parametrize("key", ["large", "half", "columns", "object"])
def test_altered_bytes_are_looked_at_twice(saved: Any, key: str) -> None:
    """A flip on the store is corrupt; a flip on the way is read again and does no harm."""
    store, items = saved
    record = items[key].item
    data = bytearray(store.read(items[key].name, limit=1 << 30))
    data[record.offset + record.payload_offset + record.payload_length // 2] ^= 1

    class Flips(RecordingStore):
        """Alters the first answers that hold the byte."""

        left = 1

        def read_into(self, name: str, offset: int, buffers: Any) -> None:
            super().read_into(name, offset, buffers)
            if self.left:
                self.left -= 1
                next(buffer for buffer in buffers if buffer.nbytes)[0] ^= 1

    flips, wants, held = Flips(store), Wants(items), Budget(1 << 30)
    if key == "object":
        wants.add_object()
    else:
        wants.add(key, torch.zeros(TENSORS[key].shape, dtype=TENSORS[key].dtype))
    load(flips, wants, held)
    value = wants.done[0][1]
    assert value == OBJECT if key == "object" else torch.equal(value, TENSORS[key])
    store.put(items[key].name, [memoryview(bytes(data))])
    wants.done.clear()
    with pytest.raises(CorruptCheckpointError) as caught:
        load(store, wants, held)
    assert (caught.value.key, caught.value.file) == (key, items[key].name)
    assert wants.done == []
    assert held.held == 0


def test_nothing_wanted_is_no_work(saved: Any) -> None:
    """No items, no requests."""
    store, items = saved
    recording = RecordingStore(store)
    load(recording, Wants(items), Budget(10))
    assert recording.operations() == []


def test_two_loads_share_one_budget(saved: Any) -> None:
    """Two pipelines at once, the budget smaller than either needs: both go through, none waits for ever."""
    store, items = saved
    held = Budget(20 * KIB)
    both = [Wants(items), Wants(items)]
    targets = [all_of(wants) for wants in both]
    threads = [threading.Thread(target=load, args=(store, wants, held), daemon=True) for wants in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for each in targets:
        assert all(torch.equal(target, wanted) for target, wanted in each.values())
    assert held.held == 0
