"""Retry and limits, by a clock that the tests turn."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from dcp_storage.errors import ObjectNotFoundError, StoreError
from dcp_storage.store import Store, WrappedStore
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.wrappers import LimitedStore, Request, RequestStore, RetryingStore

T = TypeVar("T")


def busy() -> StoreError:
    return StoreError("503 slow down", operation="put", key="a", errno=errno.EAGAIN, transient=True)


class Time:
    """A clock that only sleeping, and what a test adds, moves on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def retrying(inner: Store, clock: Time, **options: float) -> RetryingStore:
    given = {"random": lambda: 1.0, **options}
    return RetryingStore(inner, clock=lambda: clock.now, sleep=clock.sleep, **given)  # type: ignore[arg-type]


def every_call(store: Store) -> dict[str, Callable[[], object]]:
    """One call of each operation that may be tried again, on objects that are there."""
    store.put("a", [memoryview(b"body")])
    ended = store.upload("ended")
    ended.write_part(1, 0, [memoryview(b"x")])
    upload = store.upload("b")
    upload.write_part(1, 0, [memoryview(b"x")])
    return {
        "create_if_absent": lambda: store.create_if_absent,
        "make_folder": store.make_folder,
        "entries": store.entries,
        "folders": store.folders,
        "size": lambda: store.size("a"),
        "read": lambda: store.read("a", limit=10),
        "read_into": lambda: store.read_into("a", 0, [memoryview(bytearray(2))]),
        "put": lambda: store.put("a", [memoryview(b"body")]),
        "delete": lambda: store.delete(name for name in ("a", "c")),
        "open_uploads": store.open_uploads,
        "abort_uploads": lambda: store.abort_uploads(name for name in ("c",)),
        "now": store.now,
        "upload": lambda: store.upload("c"),
        "write_part": lambda: upload.write_part(1, 0, [memoryview(b"y")]),
        "complete": upload.complete,
        "abort": ended.abort,
    }


OPERATIONS = tuple(every_call(DictStore()))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_idempotent_operation_is_tried_again(operation: str) -> None:
    """An operation that fails twice for a passing reason succeeds at the third try, and two retries are counted."""
    # every_call itself puts once, and begins two uploads with a part each, before the call that is to fail
    first = {"put": 2, "upload": 3, "write_part": 3}.get(operation, 1)
    faults = [Fault(operation, nth=nth, error=busy) for nth in (first, first + 1)]
    faulty = FaultyStore(DictStore(), faults)
    clock = Time()
    store = retrying(faulty, clock)
    every_call(store)[operation]()
    assert len(faulty.fired) == 2
    assert store.retries == 2
    assert len(clock.slept) == 2


class FailsAfterReadingNames(WrappedStore):
    """Uses up the names it is given before its first failure."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.failed = False

    def given(self, names: Iterable[str]) -> list[str]:
        read = list(names)
        if not self.failed:
            self.failed = True
            raise busy()
        return read

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(self.given(names))

    def abort_uploads(self, names: Iterable[str]) -> None:
        self.inner.abort_uploads(self.given(names))


def test_names_from_a_generator_survive_a_retry() -> None:
    """All names are deleted, or their uploads aborted, also when the first try had read the generator to its end."""
    inner = DictStore()
    for name in ("a", "b", "c"):
        inner.put(name, [])
        inner.upload(name)
    retrying(FailsAfterReadingNames(inner), Time()).delete(name for name in ("a", "b"))
    assert [entry.name for entry in inner.entries()] == ["c"]
    retrying(FailsAfterReadingNames(inner), Time()).abort_uploads(name for name in ("a", "b"))
    assert [entry.name for entry in inner.open_uploads()] == ["c"]


def test_a_create_is_never_tried_again() -> None:
    """A create with a lost reply raises that very error after one try."""
    inner = DictStore()
    faulty = FaultyStore(inner, [Fault("create", when="lost")])
    clock = Time()
    store = retrying(faulty, clock)
    with pytest.raises(StoreError) as caught:
        store.create("a", b"mine")
    assert caught.value.ambiguous
    assert caught.value.attempts == 1
    assert (clock.slept, store.retries) == ([], 0)
    assert inner.read("a", limit=10) == b"mine"


@pytest.mark.parametrize(
    "error",
    [
        lambda: StoreError("403", operation="size", errno=errno.EACCES),
        lambda: ObjectNotFoundError("404", operation="size"),
        lambda: KeyError("a fault of the code"),
    ],
)
def test_lasting_errors_are_raised_at_once(error: Callable[[], BaseException]) -> None:
    """What trying again cannot help comes out unchanged after one try."""
    clock = Time()
    store = retrying(FaultyStore(DictStore(), [Fault("size", nth=None, error=error)]), clock)
    with pytest.raises(type(error())) as caught:
        store.size("a")
    assert str(caught.value) == str(error())
    assert clock.slept == []


def test_a_lasting_error_after_a_passing_one_ends_the_tries() -> None:
    """Not-found at the second try is raised with both tries counted."""
    store = retrying(FaultyStore(DictStore(), [Fault("size", error=busy)]), Time())
    with pytest.raises(ObjectNotFoundError, match=r"\(2 attempts over 0\.1 s\)") as caught:
        store.size("a")
    assert caught.value.attempts == 2


def test_the_last_error_tells_the_attempts() -> None:
    """After the last try the error itself is raised, with the number of tries and the seconds, and pickles so."""
    clock = Time()
    faulty = FaultyStore(DictStore(), [Fault("put", nth=None, error=busy)])
    with pytest.raises(StoreError) as caught:
        retrying(faulty, clock).put("a", [])
    assert len(faulty.fired) == 6
    assert caught.value.attempts == 6
    assert str(caught.value) == "503 slow down (6 attempts over 3.1 s)"
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.attempts, twin.key, twin.errno) == (str(caught.value), 6, "a", errno.EAGAIN)


def test_waits_double_up_to_the_cap() -> None:
    """Without jitter the waits are base, twice that, and so on, never more than the cap."""
    clock = Time()
    store = retrying(FaultyStore(DictStore(), [Fault("now", nth=None, error=busy)]), clock, attempts=8, base=0.5, cap=6)
    with pytest.raises(StoreError):
        store.now()
    assert clock.slept == [0.5, 1, 2, 4, 6, 6, 6]


def test_jitter_is_full() -> None:
    """A wait is the drawn fraction of the whole interval, from nothing on."""
    clock = Time()
    drawn = iter([0.0, 0.25, 0.5])
    store = RetryingStore(
        FaultyStore(DictStore(), [Fault("now", nth=None, error=busy)]),
        attempts=4,
        base=8.0,
        clock=lambda: clock.now,
        sleep=clock.sleep,
        random=lambda: next(drawn, 0.0),
    )
    with pytest.raises(StoreError):
        store.now()
    assert clock.slept == [0.0, 4.0, 10.0]


def test_no_wait_passes_the_deadline() -> None:
    """A wait that would reach the deadline is not begun, however many tries are left."""
    clock = Time()
    faulty = FaultyStore(DictStore(), [Fault("now", nth=None, error=busy)])
    store = retrying(faulty, clock, attempts=100, deadline=10.0, base=1.0)
    with pytest.raises(StoreError, match=r"\(4 attempts over 7\.0 s\)"):
        store.now()
    assert clock.slept == [1, 2, 4]
    assert clock.now < 1010


def test_slow_tries_count_towards_the_deadline() -> None:
    """The time that tries take is part of the deadline, and each request has a deadline of its own."""
    clock = Time()

    def slow() -> StoreError:
        clock.now += 60
        return busy()

    store = retrying(FaultyStore(DictStore(), [Fault("now", nth=None, error=slow)]), clock, deadline=100.0)
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            store.now()
        assert caught.value.attempts == 2


def test_an_upload_whose_beginning_was_lost_is_aborted_too() -> None:
    """An abort ends also the upload that an earlier try had begun before its reply was lost."""
    inner = DictStore()
    store = retrying(FaultyStore(inner, [Fault("upload", when="lost")]), Time())
    inner.upload("another's")
    upload = store.upload("a")
    upload.write_part(1, 0, [memoryview(b"x")])
    assert [entry.name for entry in inner.open_uploads()] == ["another's", "a", "a"]
    upload.abort()
    assert [entry.name for entry in inner.open_uploads()] == ["another's"]


def test_an_abort_lists_no_uploads_without_need() -> None:
    """Only a lost beginning makes an abort look for uploads by name."""
    recording = RecordingStore(DictStore())
    store = retrying(FaultyStore(recording, [Fault("upload", error=busy)]), Time())
    store.upload("a").abort()
    assert recording.operations() == ["upload", "abort"]


def test_retries_are_counted_over_threads() -> None:
    """Every retry of many threads is counted once."""
    faulty = FaultyStore(DictStore(), [Fault("now", nth=n, error=busy) for n in range(1, 400, 2)])
    store = RetryingStore(faulty, attempts=1000, base=0.0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: store.now(), range(200)))
    assert store.retries == len(faulty.fired) == 200


def test_arguments_are_checked() -> None:
    """No attempts, or no slots, would be a store that never asks."""
    with pytest.raises(ValueError, match="attempts"):
        RetryingStore(DictStore(), attempts=0)
    with pytest.raises(ValueError, match="limit"):
        LimitedStore(DictStore(), 0)


def test_properties_are_those_of_the_inner_store() -> None:
    """A wrapper promises what the inner store does: part sizes, parallel parts, atomic creates."""
    inner = DictStore(min_part_size=77, max_parts=5)
    store: Store = RetryingStore(LimitedStore(RecordingStore(FaultyStore(inner, [])), 2))
    assert (store.url, store.min_part_size, store.max_parts) == (inner.url, 77, 5)
    assert (store.parallel_parts, store.remote) == (True, True)
    assert store.create_if_absent is inner.create_if_absent


class Gauge(RequestStore):
    """Knows how many requests were inside at most, and holds each for a moment."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()

    def request(self, request: Request, call: Callable[[], T]) -> T:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            time.sleep(0.005)
            return call()
        finally:
            with self.lock:
                self.inside -= 1


def test_the_limit_holds_over_all_requests_and_uploads() -> None:
    """Puts, reads and parts of several uploads share the slots: all are used, never one more."""
    gauge = Gauge(DictStore())
    store = LimitedStore(gauge, 3)
    uploads = [store.upload(f"upload-{number}") for number in range(4)]

    def work(number: int) -> None:
        store.put(f"object-{number}", [memoryview(b"x")])
        uploads[number % 4].write_part(1 + number // 4, number // 4, [memoryview(b"x")])
        store.read(f"object-{number}", limit=1)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, range(12)))
        list(threads.map(lambda upload: upload.complete(), uploads))
    assert gauge.most == 3
    assert [store.size(f"upload-{number}") for number in range(4)] == [3] * 4


def test_a_failed_request_gives_its_slot_back() -> None:
    """Errors, also those of another kind, do not use up the limit."""
    store = LimitedStore(FaultyStore(DictStore(), [Fault("size", nth=None, error=lambda: KeyError("x"))]), 1)
    for _ in range(3):
        with pytest.raises(KeyError):
            store.size("a")
    assert store.entries() == []


def test_a_waiting_request_holds_no_slot() -> None:
    """With retry outside the limit, others get through while one request waits for its next try."""
    waiting, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waiting.set()
        assert go_on.wait(20)

    limited = LimitedStore(FaultyStore(DictStore(), [Fault("put", name="slow", error=busy)]), 1)
    store = RetryingStore(limited, sleep=sleep)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(store.put, "slow", [memoryview(b"slow")])
        try:
            assert waiting.wait(20)
            threads.submit(store.put, "quick", [memoryview(b"quick")]).result(20)
            assert not slow.done()
        finally:
            go_on.set()
        slow.result(20)
    assert sorted(entry.name for entry in store.entries()) == ["quick", "slow"]


def test_close_reaches_the_inner_store_at_once() -> None:
    """Closing is no request: it goes through every wrapper, and no fault and no slot holds it up."""
    closed: list[str] = []

    class Closing(WrappedStore):
        def close(self) -> None:
            closed.append("inner")

    RetryingStore(LimitedStore(FaultyStore(Closing(DictStore()), [Fault("*", nth=None)]), 1)).close()
    assert closed == ["inner"]
