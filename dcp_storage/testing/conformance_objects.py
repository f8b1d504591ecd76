"""Conformance of objects: put, read, list, delete, names, errors, the clock. See ``conformance.py``."""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Callable
from functools import partial

import pytest

from dcp_storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Buffers, Store
from dcp_storage.testing.conformance_tools import (
    CLOCK_SECONDS,
    NAMES,
    SLOW_SECONDS,
    at_once,
    missing,
    noise,
    pieces,
    put,
    read,
    sizes,
)

__all__ = ["ObjectConformance"]


class ObjectConformance:
    """The tests of whole objects and ranges; the fixtures are those of ``StoreConformance``."""

    def test_a_fresh_folder_is_empty(self, store: Store) -> None:
        """A folder that nobody has made lists as empty, and so it does when it is made, once or twice."""
        assert store.entries() == []
        store.make_folder()
        store.make_folder()
        assert store.entries() == []
        assert store.open_uploads() == []

    def test_what_is_put_is_read(self, store: Store, second: Store) -> None:
        """An object put from several buffers, empty ones among them, reads back whole, at once and elsewhere too."""
        data = noise(100_003)
        store.put("object", pieces(data, 0, 1, 40_000, 0, 17))
        assert read(store, "object") == data
        assert read(second, "object") == data
        assert store.size("object") == second.size("object") == len(data)

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        """An object of no bytes is listed, has a size, and reads as nothing."""
        store.put("empty", [])
        assert sizes(store) == {"empty": 0}
        assert store.size("empty") == 0
        assert store.read("empty", limit=0) == b""
        store.read_into("empty", 0, [memoryview(bytearray())])

    def test_ranges_fill_their_buffers_only(self, store: Store) -> None:
        """A range at any offset fills its buffers in order, and no byte beside them."""
        data = noise(5000)
        put(store, "object", data)
        for offset, lengths in (
            (0, (5000,)),
            (0, (1, 0, 7)),
            (1234, (0, 3000, 1)),
            (4999, (1,)),
            (5000, (0,)),
            (3, ()),
        ):
            target = bytearray(b"\xee" * 6000)
            places, start = [], 100
            for size in lengths:
                places.append((start, size))
                start += size + 10
            store.read_into("object", offset, [memoryview(target)[at : at + size] for at, size in places])
            wanted = bytearray(b"\xee" * 6000)
            position = offset
            for at, size in places:
                wanted[at : at + size] = data[position : position + size]
                position += size
            assert target == wanted

    def test_thousands_of_buffers_are_one_request(self, store: Store) -> None:
        """More buffers than a system call takes are written and read like one."""
        data = noise(3 * 2500)
        store.put("object", pieces(data, *[3] * 2499))
        target = bytearray(len(data))
        store.read_into("object", 0, [memoryview(target)[at : at + 3] for at in range(0, len(data), 3)])
        assert read(store, "object") == target == data

    def test_a_range_beyond_the_end_raises(self, store: Store) -> None:
        """A range that ends after the object raises, with the wanted end, wherever it begins."""
        put(store, "object", noise(100))
        for offset, size in ((80, 21), (99, 50), (100, 1), (5000, 1), (0, 101)):
            with pytest.raises(ObjectTooShortError) as caught:
                store.read_into("object", offset, [memoryview(bytearray(size))])
            assert caught.value.wanted == offset + size
            assert caught.value.found in {None, 100}

    def test_reading_keeps_to_the_limit(self, store: Store) -> None:
        """An object of exactly the limit is read; one byte more is refused as untrusted."""
        put(store, "object", noise(100))
        assert len(store.read("object", limit=100)) == 100
        with pytest.raises(UntrustedDataError):
            store.read("object", limit=99)

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        """Size, read and ranges of a missing name raise ObjectNotFoundError, in an empty folder and beside others."""
        for _ in range(2):
            for call in (
                lambda: store.size("missing"),
                lambda: store.read("missing", limit=10),
                lambda: store.read_into("missing", 0, [memoryview(bytearray(1))]),
            ):
                with pytest.raises(ObjectNotFoundError):
                    call()
            put(store, "missing.not", b"x")

    def test_a_put_replaces(self, store: Store, second: Store) -> None:
        """A second put of a name replaces the object whole, also by a smaller one, for every reader at once."""
        for data in (noise(5000, 1), noise(20, 2), noise(20, 3), b""):
            put(store, "object", data)
            assert read(second, "object") == data
            assert sizes(second) == {"object": len(data)}
            assert second.size("object") == len(data)

    def test_nothing_is_answered_from_a_cache(self, store: Store, second: Store) -> None:
        """What another client changes after a look is seen by the next look: new, replaced and deleted objects."""
        assert missing(store, "object")
        put(second, "object", b"one")
        assert (sizes(store), store.size("object"), read(store, "object")) == ({"object": 3}, 3, b"one")
        put(second, "object", b"other")
        assert (sizes(store), store.size("object"), read(store, "object")) == ({"object": 5}, 5, b"other")
        second.delete(["object"])
        assert missing(store, "object")

    def test_a_listing_is_whole(self, store: Store, second: Store) -> None:
        """Every object is listed once, with its size and a time of the store's clock, for every client."""
        wanted = {f"__{number}_0.distcp": number for number in range(40)}
        for name, size in wanted.items():
            put(store, name, bytes(size))
        entries = second.entries()
        assert sorted((entry.name, entry.size) for entry in entries) == sorted(wanted.items())
        now = second.now()
        assert all(entry.modified is None or abs(entry.modified - now) < SLOW_SECONDS for entry in entries)

    def test_other_folders_are_left_out(self, store: Store, below: Store | None, beside: Store | None) -> None:
        """A listing has nothing of sub-folders, nor of folders whose path begins like this one's."""
        put(store, "object", b"mine")
        for other in (below, beside):
            if other is not None:
                other.make_folder()
                put(other, "object", b"theirs!")
                put(other, "another", b"theirs!")
                assert sizes(other) == {"object": 7, "another": 7}
        assert sizes(store) == {"object": 4}
        assert read(store, "object") == b"mine"

    def test_no_character_is_special(self, store: Store, second: Store) -> None:
        """Names with glob, URL, shell and non-ASCII characters are plain names, each its own object."""
        for number, name in enumerate(NAMES):
            put(store, name, str(number).encode())
        assert sorted(sizes(second)) == sorted(NAMES)
        for number, name in enumerate(NAMES):
            assert read(store, name) == str(number).encode()
            target = bytearray(1)
            store.read_into(name, 0, [memoryview(target)])
            assert target == str(number)[:1].encode()
            assert store.size(name) == len(str(number))

    def test_special_names_are_created_uploaded_and_deleted(self, store: Store) -> None:
        """A special name works for a create, an upload and a delete, and touches no other name."""
        neighbours = ("a", "b", "aXb", "a b")
        for name in neighbours:
            put(store, name, b"neighbour")
        for name in ("[ab]", "a?b", "*", "a%20b", "a#b", "%41", "?", "日本 *"):
            store.create(name, b"created")
            assert read(store, name) == b"created"
            store.delete([name])
            upload = store.upload(name)
            upload.write_part(1, 0, pieces(b"uploaded"))
            upload.complete()
            assert read(store, name) == b"uploaded"
            store.delete([name])
            assert sorted(sizes(store)) == sorted(neighbours)

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\nb", "a\0", "n" * 256])
    def test_names_that_leave_the_folder_are_refused(self, store: Store, name: str) -> None:
        """Every method that takes a name refuses one that is no plain path component."""
        for call in (
            lambda: store.size(name),
            lambda: store.read(name, limit=10),
            lambda: store.read_into(name, 0, [memoryview(bytearray(1))]),
            lambda: store.put(name, pieces(b"x")),
            lambda: store.create(name, b"x"),
            lambda: store.upload(name),
            lambda: store.delete([name]),
        ):
            with pytest.raises(UntrustedDataError):
                call()

    def test_buffers_are_not_kept(self, store: Store) -> None:
        """The caller may use its memory for something else as soon as a put or a part returns."""
        memory = bytearray(b"a" * 1000)
        store.put("put", [memoryview(memory)])
        upload = store.upload("upload")
        upload.write_part(1, 0, [memoryview(memory)])
        memory[:] = b"b" * 1000
        upload.complete()
        assert read(store, "put") == b"a" * 1000
        assert read(store, "upload") == b"a" * 1000

    def test_the_right_crc_is_accepted(self, store: Store) -> None:
        """A put and a part with the CRC-32 of their bytes are written."""
        data = noise(3000)
        store.put("put", pieces(data, 7), crc32=zlib.crc32(data))
        upload = store.upload("upload")
        upload.write_part(1, 0, pieces(data, 7), crc32=zlib.crc32(data))
        upload.complete()
        assert read(store, "put") == read(store, "upload") == data

    def test_readers_see_the_old_or_the_new(self, store: Store, second: Store) -> None:
        """While an object is replaced again and again, every read gets one whole body of those that were put."""
        bodies = [noise(50_000, 1), noise(70_001, 2)]
        put(store, "object", bodies[0])

        done = threading.Event()

        def write() -> object:
            try:
                for number in range(20):
                    put(store, "object", bodies[number % 2])
            finally:
                done.set()
            return None

        def look() -> object:
            whole = read(second, "object") in bodies
            while whole and not done.is_set():
                whole = read(second, "object") in bodies
            return whole

        assert at_once([write, look, look]) == [None, True, True]

    def test_a_delete_removes_what_is_there(self, store: Store, second: Store) -> None:
        """A delete removes all that it names, from any iterable; missing names, first or in between, are no error."""
        store.delete([])
        store.delete(["missing"])
        for number in range(12):
            put(store, f"object-{number}", b"x")
        store.delete(name for name in ("missing", "object-1", "also missing", *(f"object-{n}" for n in range(2, 11))))
        assert sorted(sizes(second)) == ["object-0", "object-11"]
        store.delete(["object-0", "object-1"])
        assert sorted(sizes(second)) == ["object-11"]

    def test_the_clock_is_that_of_the_entries(self, store: Store) -> None:
        """The store's time lies beside that of an object written now, goes on, and leaves no object behind."""
        before = store.now()
        put(store, "object", b"x")
        after = store.now()
        assert before - CLOCK_SECONDS <= after
        entries = store.entries()
        assert [entry.name for entry in entries] == ["object"]
        entry = entries[0]
        assert entry.modified is None or before - CLOCK_SECONDS <= entry.modified <= after + CLOCK_SECONDS

    def test_errors_say_what_failed_and_travel(self, store: Store) -> None:
        """Errors name the operation and the object, are not worth a retry, and pickle whole."""
        put(store, "object", b"12345")
        buffers: Buffers = [memoryview(bytearray(9))]
        calls: list[tuple[str, str, type[StoreError], Callable[[], object]]] = [
            ("size", "gone", ObjectNotFoundError, lambda: store.size("gone")),
            ("read", "gone", ObjectNotFoundError, lambda: store.read("gone", limit=9)),
            ("read_into", "gone", ObjectNotFoundError, lambda: store.read_into("gone", 0, buffers)),
            ("read_into", "object", ObjectTooShortError, lambda: store.read_into("object", 0, buffers)),
            ("create", "object", ObjectExistsError, lambda: store.create("object", b"x")),
        ]
        for operation, name, kind, call in calls:
            with pytest.raises(kind) as caught:
                call()
            error = caught.value
            assert (error.operation, error.key, error.transient) == (operation, name, False)
            twin = pickle.loads(pickle.dumps(error))
            assert (type(twin), str(twin), twin.__dict__) == (type(error), str(error), error.__dict__)
            assert twin.errno == error.errno

    def test_many_threads_do_not_mix(self, store: Store, second: Store) -> None:
        """Sixteen threads that put and read objects of their own all get their own bytes back."""

        def work(who: int) -> object:
            for turn in range(3):
                data = noise(20_000 + who, who * 10 + turn)
                (store if who % 2 else second).put(f"object-{who}", pieces(data, who))
                target = bytearray(10_000)
                store.read_into(f"object-{who}", 5000, [memoryview(target)[:who], memoryview(target)[who:]])
                if read(second, f"object-{who}") != data or target != data[5000:15_000]:
                    return f"{who} got other bytes in turn {turn}"
            return None

        assert at_once([partial(work, who) for who in range(16)]) == [None] * 16
        assert sizes(store) == {f"object-{who}": 20_000 + who for who in range(16)}
