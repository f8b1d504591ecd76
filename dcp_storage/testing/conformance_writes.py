"""Conformance of creates and uploads. See ``conformance.py``."""

from __future__ import annotations

import threading
from functools import partial
from typing import ClassVar

import pytest

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from dcp_storage.store import Atomicity, Store
from dcp_storage.testing.conformance_tools import (
    SLOW_SECONDS,
    at_once,
    missing,
    noise,
    open_names,
    put,
    read,
    send,
    sizes,
    three_parts,
)

__all__ = ["WriteConformance"]


class WriteConformance:
    """The tests of create-if-absent and of uploads; the fixtures are those of ``StoreConformance``.

    Attributes:
        uploads_last: whether an upload that was begun and left stays until somebody aborts it, so that
            ``open_uploads`` must list it (as on S3).
    """

    uploads_last: ClassVar[bool] = False

    def test_a_create_writes_once(self, store: Store, second: Store) -> None:
        """A create of a taken name raises ObjectExistsError and changes nothing; of a free one it writes."""
        store.create("object", b"first")
        for taken in (store, second):
            with pytest.raises(ObjectExistsError):
                taken.create("object", b"other")
            assert read(taken, "object") == b"first"
        put(store, "put", b"first")
        with pytest.raises(ObjectExistsError):
            store.create("put", b"other")
        store.delete(["object"])
        store.create("object", noise(64 * 1024))
        assert read(second, "object") == noise(64 * 1024)

    def test_racing_creates_have_one_winner(self, store: Store, second: Store) -> None:
        """Of eight creates at once exactly one succeeds where that is promised, and its body is there."""
        promised = store.create_if_absent
        for number in range(10):
            name = f"race-{number}"

            answers = at_once([partial((store, second)[who % 2].create, name, b"by %d" % who) for who in range(8)])
            winners = [who for who, answer in enumerate(answers) if answer is None]
            assert len(winners) == 1 if promised is Atomicity.ATOMIC else winners
            assert read(store, name) in [b"by %d" % who for who in winners]
        assert store.create_if_absent is promised

    def test_a_created_object_is_seen_whole_or_not_at_all(self, store: Store, second: Store) -> None:
        """A reader beside an atomic create sees no object, or the whole body."""
        body = noise(60_000)
        allowed = {None, body} if store.create_if_absent is Atomicity.ATOMIC else None
        for number in range(10):
            name = f"race-{number}"
            done = threading.Event()

            def create(name: str = name, done: threading.Event = done) -> object:
                try:
                    return store.create(name, body)
                finally:
                    done.set()

            def look(name: str = name, done: threading.Event = done) -> object:
                seen: set[bytes | None] = set()
                while not done.is_set():
                    try:
                        seen.add(read(second, name))
                    except ObjectNotFoundError:
                        seen.add(None)
                return seen

            created, seen = at_once([create, look])
            assert created is None
            assert isinstance(seen, set)
            assert allowed is None or seen <= allowed
            assert read(second, name) == body

    def test_an_upload_is_the_sum_of_its_parts(self, store: Store, second: Store) -> None:
        """Parts of several sizes, sent in order, make one object when the upload completes."""
        parts = three_parts(store)
        upload = store.upload("object")
        send(upload, parts)
        upload.complete()
        assert read(second, "object") == b"".join(parts)
        assert sizes(second) == {"object": sum(map(len, parts))}
        assert open_names(second) == []

    def test_parts_are_sent_at_once_and_in_any_order(self, store: Store) -> None:
        """Where parts may be sent in parallel the order does not matter; two uploads do not mix anywhere."""
        parts, others = three_parts(store), three_parts(store, 10)
        upload, other = store.upload("object"), store.upload("other")
        if store.parallel_parts:
            send(upload, parts, 3)
            sends = [partial(send, upload, parts, number) for number in (2, 1)]
            sends += [partial(send, other, others, number) for number in (3, 2, 1)]
            assert at_once(sends) == [None] * 5
        else:
            assert at_once([partial(send, upload, parts), partial(send, other, others)]) == [None] * 2
        assert at_once([upload.complete, other.complete]) == [None] * 2
        assert read(store, "object") == b"".join(parts)
        assert read(store, "other") == b"".join(others)

    def test_a_part_sent_again_replaces(self, store: Store) -> None:
        """A part number that is written again counts once, with the later bytes."""
        parts = three_parts(store)
        upload = store.upload("object")
        for number in (1, 2, 3):
            send(upload, [bytes(len(part)) for part in parts], number)
            send(upload, parts, number)
        upload.complete()
        assert read(store, "object") == b"".join(parts)

    def test_an_upload_is_invisible_before_it_completes(self, store: Store, second: Store) -> None:
        """Remote stores show nothing of an open upload, or the old object; on disk a growing file may be seen."""
        put(store, "old", b"old")
        uploads = [store.upload("new"), store.upload("old")]
        for upload in uploads:
            send(upload, three_parts(store))
        if store.remote:
            assert missing(second, "new")
            assert read(second, "old") == b"old"
        for upload in uploads:
            upload.complete()
        assert read(second, "new") == read(second, "old") == b"".join(three_parts(store))

    def test_an_aborted_upload_leaves_nothing(self, store: Store, second: Store) -> None:
        """After an abort, before or after parts, once or twice, there is no object and no open upload."""
        for numbers in ((), (1,), (1, 2, 3)):
            upload = store.upload("object")
            if numbers:
                send(upload, three_parts(store), *numbers)
            for _ in range(2):
                upload.abort()
                assert missing(second, "object")
                assert open_names(second) == []
        put(store, "object", b"later")
        assert sizes(second) == {"object": 5}

    def test_completing_again_is_fine(self, store: Store) -> None:
        """A complete whose first reply may have been lost finds the object there and returns."""
        upload = store.upload("object")
        send(upload, three_parts(store))
        upload.complete()
        upload.complete()
        assert read(store, "object") == b"".join(three_parts(store))
        assert open_names(store) == []

    def test_an_abort_after_complete_leaves_nothing(self, store: Store, second: Store) -> None:
        """An abort takes back an object that a complete may have made."""
        upload = store.upload("object")
        send(upload, three_parts(store))
        upload.complete()
        upload.abort()
        assert missing(second, "object")
        assert open_names(second) == []

    def test_open_uploads_are_listed_and_aborted_by_name(self, store: Store, second: Store) -> None:
        """Uploads that were left open are listed with the time they began, and those that are named are ended."""
        uploads = {name: store.upload(name) for name in ("left [1]", "kept")}
        for upload in uploads.values():
            send(upload, three_parts(store), 1)
        listed = second.open_uploads()
        assert sorted(entry.name for entry in listed) in ([["kept", "left [1]"]] + [[]] * (not self.uploads_last))
        now = second.now()
        for entry in listed:
            assert entry.size == 0
            assert entry.modified is None or abs(entry.modified - now) < SLOW_SECONDS
        second.abort_uploads(["left [1]", "never begun"])
        assert "left [1]" not in open_names(store)
        if listed:
            with pytest.raises(StoreError):
                uploads["left [1]"].complete()
            assert missing(store, "left [1]")
        uploads["left [1]"].abort()
        send(uploads["kept"], three_parts(store), 2, 3)
        uploads["kept"].complete()
        assert sizes(store) == {"kept": sum(map(len, three_parts(store)))}
        assert open_names(second) == []
