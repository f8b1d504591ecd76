"""The S3 store against servers that behave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import re
import secrets
import select
import time
import zlib
from collections.abc import Callable
from typing import Any

import fsspec.asyn
import pytest
from s3fs import S3FileSystem

from dcp_storage.errors import (
    InvalidLocationError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.store import Atomicity, Buffers, Store
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store
from dcp_storage.stores.s3 import S3Store, open_s3
from dcp_storage.stores.s3_session import s3fs_options
from dcp_storage.testing.conformance import StoreConformance
from tests.servers import S3Endpoint
from tests.stores.conftest import Folder

MIB = 1024 * 1024
ODD_NAMES = ["[1]", "a?b", "*", "a b", "#1", "50%", "%41", "ünï-çødé-日本", "a+b", "a&b", "a=b;c", "~'!(),$@:", "<x>"]


def pieces(*parts: bytes) -> Buffers:
    return [memoryview(part) for part in parts]


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(range(size % 251))


class TestObjects:
    def test_put_then_read_by_another_client(self, folder: Folder) -> None:
        """What put wrote, of several buffers with a right CRC, another client reads byte for byte."""
        data = pattern(3 * MIB + 7)
        folder.open().put("a", pieces(data[:5], b"", data[5:]), crc32=zlib.crc32(data))
        assert folder.get("a") == data
        assert folder.keys() == ["run/step-1/a"]

    def test_put_replaces(self, folder: Folder) -> None:
        """A second put replaces the object."""
        store = folder.open()
        store.put("a", pieces(b"old and longer"))
        store.put("a", pieces(b"new"))
        assert folder.get("a") == b"new"

    def test_put_of_nothing(self, folder: Folder) -> None:
        """An empty object is an object."""
        store = folder.open()
        store.put("empty", [], crc32=0)
        assert store.size("empty") == 0
        assert store.read("empty", limit=0) == b""
        assert [(e.name, e.size) for e in store.entries()] == [("empty", 0)]

    def test_size_and_read(self, folder: Folder) -> None:
        """Size and read tell of what another client wrote; exactly at the limit is allowed."""
        folder.set("a", b"12345")
        store = folder.open()
        assert store.size("a") == 5
        assert store.read("a", limit=5) == b"12345"

    def test_read_over_the_limit(self, folder: Folder) -> None:
        """One byte over the limit is refused."""
        folder.set("a", b"123456")
        with pytest.raises(UntrustedDataError) as caught:
            folder.open().read("a", limit=5)
        assert caught.value.name == "a"

    def test_read_into_fills_exactly(self, folder: Folder) -> None:
        """read_into fills several buffers with the bytes from the offset on and touches nothing else."""
        data = pattern(2 * MIB)
        folder.set("a", data)
        target = bytearray(b"\xee" * (MIB + 20))
        view = memoryview(target)
        folder.open().read_into("a", 333, [view[10:11], view[11:11], view[11 : 10 + MIB]])
        assert bytes(target[10 : 10 + MIB]) == data[333 : 333 + MIB]
        assert bytes(target[:10]) == bytes(target[10 + MIB :]) == b"\xee" * 10

    def test_read_into_to_the_last_byte(self, folder: Folder) -> None:
        """The last byte of an object can be read."""
        folder.set("a", b"123456")
        target = bytearray(2)
        folder.open().read_into("a", 4, [memoryview(target)])
        assert bytes(target) == b"56"

    @pytest.mark.parametrize(("offset", "wanted"), [(4, 3), (6, 1), (100, 5)])
    def test_too_short(self, folder: Folder, offset: int, wanted: int) -> None:
        """Bytes past the end raise with the end that was wanted and the size that was found."""
        folder.set("a", b"123456")
        with pytest.raises(ObjectTooShortError) as caught:
            folder.open().read_into("a", offset, [memoryview(bytearray(wanted))])
        assert caught.value.wanted == offset + wanted
        assert caught.value.found in (6, None)
        assert caught.value.found == 6 or offset >= 6
        assert not caught.value.transient

    def test_too_short_because_empty(self, folder: Folder) -> None:
        """Reading a byte of an empty object says that it is too short."""
        folder.set("a", b"")
        with pytest.raises(ObjectTooShortError):
            folder.open().read_into("a", 0, [memoryview(bytearray(1))])

    @pytest.mark.parametrize("operation", ["size", "read", "read_into"])
    def test_missing_object(self, folder: Folder, operation: str) -> None:
        """A missing object is ObjectNotFoundError with the name and the operation."""
        store = folder.open()
        calls: dict[str, Callable[[], Any]] = {
            "size": lambda: store.size("gone"),
            "read": lambda: store.read("gone", limit=10),
            "read_into": lambda: store.read_into("gone", 0, [memoryview(bytearray(1))]),
        }
        with pytest.raises(ObjectNotFoundError) as caught:
            calls[operation]()
        error = caught.value
        assert (error.key, error.operation, error.errno, error.transient) == ("gone", operation, errno.ENOENT, False)

    def test_delete(self, folder: Folder) -> None:
        """Delete removes the named objects, leaves the others, and takes missing names for done."""
        for name in [f"x{i}" for i in range(20)] + ["keep"]:
            folder.set(name, b"1")
        folder.open().delete([f"x{i}" for i in range(20)] + ["never"])
        assert folder.keys() == ["run/step-1/keep"]

    @pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "a\nb"])
    def test_refused_names(self, folder: Folder, name: str) -> None:
        """A name that is not one path component is refused before any request."""
        store = folder.open()
        with pytest.raises(UntrustedDataError):
            store.put(name, pieces(b"1"))
        assert folder.keys() == []


class TestListing:
    def test_entries(self, folder: Folder) -> None:
        """Entries has names, sizes and the server's times of the folder's own objects, and nothing beside or below."""
        before = time.time()
        folder.set("a", b"123")
        for key in ["run/step-1/", "run/step-1/sub/b", "run/step-10/c", "run/step-1", "other"]:
            client = folder.server.client
            client.put_object(Bucket=folder.bucket, Key=key, Body=b"1")
        (entry,) = folder.open().entries()
        assert (entry.name, entry.size) == ("a", 3)
        assert entry.modified is not None
        assert before - 2 <= entry.modified <= time.time() + 2

    def test_empty_folder(self, folder: Folder) -> None:
        """A folder that holds nothing is empty."""
        assert folder.open().entries() == []

    def test_whole_bucket(self, folder: Folder) -> None:
        """A location without a key is the bucket itself."""
        store = Folder(folder.server, folder.bucket, "").open()
        store.put("top", pieces(b"1"))
        assert folder.keys() == ["top"]
        assert [e.name for e in store.entries()] == ["top"]

    @pytest.mark.slow
    def test_more_than_a_page(self, folder: Folder) -> None:
        """1,100 objects, more than one page of 1,000, are all listed."""
        store = folder.open()
        names = [f"n{i:04d}" for i in range(1100)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, pieces(b"1")), names))
        assert sorted(e.name for e in store.entries()) == names

    @pytest.mark.slow
    def test_more_than_a_page_of_folders(self, folder: Folder) -> None:
        """1,100 sub-folders, more than one page of 1,000, are each listed once, those with odd keys left out."""
        names = [f"step-{i:04d}" for i in range(1100)]
        for name in (*names, "step-0000", "", "a\\b"):
            folder.set(f"{name}/object", b"1")
        folder.set("step-0001/", b"")
        assert sorted(folder.open().folders()) == names

    def test_odd_names(self, folder: Folder) -> None:
        """No character in a name is special: written, listed, read, uploaded and deleted under exactly that name."""
        store = folder.open()
        for name in ODD_NAMES:
            store.put(name, pieces(name.encode()))
        assert sorted(folder.keys()) == sorted(f"run/step-1/{name}" for name in ODD_NAMES)
        assert sorted(e.name for e in store.entries()) == sorted(ODD_NAMES)
        for name in ODD_NAMES:
            assert store.read(name, limit=100) == name.encode()
            upload = store.upload(name)
            upload.write_part(1, 0, pieces(b"part"))
            assert [e.name for e in store.open_uploads()] == [name]
            upload.complete()
        assert [e.size for e in store.entries()] == [4] * len(ODD_NAMES)
        store.delete(ODD_NAMES)
        assert folder.keys() == []

    @pytest.mark.parametrize("key", ["run [1]*?", "a b+c/50%/ü#&", "x//y"])
    def test_odd_folders(self, folder: Folder, key: str) -> None:
        """No character in the folder's key is special either."""
        odd = Folder(folder.server, folder.bucket, key)
        store = odd.open()
        store.put("a", pieces(b"1"))
        assert folder.keys() == [f"{key}/a"]
        assert [e.name for e in store.entries()] == ["a"]

    @pytest.mark.parametrize(
        "call",
        [
            lambda s: s.entries(),
            lambda s: s.folders(),
            lambda s: s.now(),
            lambda s: s.put("a", pieces(b"1")),
            lambda s: s.create("a", b"1"),
            lambda s: s.read("a", limit=1),
            lambda s: s.upload("a").write_part(1, 0, pieces(b"1")),
        ],
    )
    def test_missing_bucket(self, server: S3Endpoint, call: Callable[[Any], Any]) -> None:
        """A bucket that does not exist is ObjectNotFoundError that names it, and is not made."""
        store = Folder(server, "no-such-bucket-here").open()
        with pytest.raises(ObjectNotFoundError) as caught:
            call(store)
        assert "there is no bucket 'no-such-bucket-here'" in caught.value.message

    def test_make_folder(self, folder: Folder) -> None:
        """make_folder leaves nothing behind, since folders are not real."""
        folder.open().make_folder()
        assert folder.keys() == []

    def test_now(self, folder: Folder) -> None:
        """Now is the server's clock, comparable with the times of a listing."""
        store = folder.open()
        store.put("a", pieces(b"1"))
        assert abs(store.now() - time.time()) < 3
        assert abs(store.now() - (store.entries()[0].modified or 0)) < 3


class TestCreate:
    def test_create(self, folder: Folder) -> None:
        """Create writes a free name and refuses a taken one, whose bytes stay."""
        store = folder.open()
        store.create("c", b"first")
        with pytest.raises(ObjectExistsError) as caught:
            store.create("c", b"second")
        assert (caught.value.key, caught.value.errno) == ("c", errno.EEXIST)
        assert folder.get("c") == b"first"

    def test_atomic_behind_an_endpoint(self, folder: Folder) -> None:
        """Both servers refuse the second create, so the probe says atomic and leaves nothing behind."""
        assert folder.open().create_if_absent is Atomicity.ATOMIC
        assert folder.keys() == []

    def test_race(self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
        """Of 8 threads that create one name, in each of 20 rounds exactly one wins, and its bytes are there.

        Not on moto, which looks for the name and then writes it, in two steps that its threads interleave.
        """
        folder = Folder(ministack, bucket(ministack))
        store = folder.open()
        assert store.create_if_absent is Atomicity.ATOMIC

        def attempt(name: str, author: int) -> int | None:
            try:
                store.create(name, str(author).encode())
            except ObjectExistsError:
                return None
            return author

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for turn in range(20):
                name = f"r{turn}"
                results = list(pool.map(attempt, [name] * 8, range(8)))
                winners = [author for author in results if author is not None]
                assert len(winners) == 1
                assert folder.get(name) == str(winners[0]).encode()


class TestUpload:
    @pytest.mark.parametrize("crcs", [True, False])
    def test_parts_in_any_order(self, folder: Folder, crcs: bool) -> None:
        """Parts sent at once from several threads, of different sizes, make the object; nothing shows before."""
        data = pattern(11 * MIB + 3)
        cuts = [0, 5 * MIB, 11 * MIB, len(data)]
        store = folder.open()
        upload = store.upload("big")

        def send(number: int) -> None:
            piece = data[cuts[number - 1] : cuts[number]]
            crc = zlib.crc32(piece) if crcs else None
            upload.write_part(number, cuts[number - 1], pieces(piece[:9], piece[9:]), crc32=crc)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(send, [3, 1, 2]))
        assert store.entries() == []
        assert [e.name for e in store.open_uploads()] == ["big"]
        upload.complete()
        assert folder.get("big") == data
        assert folder.uploads() == []

    def test_one_upload_of_many_threads(self, folder: Folder) -> None:
        """Parts that arrive together begin one upload, not one each."""
        store = folder.open()
        upload = store.upload("big")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: upload.write_part(n, n - 1, pieces(b"x")), range(1, 9)))
        assert folder.uploads() == ["run/step-1/big"]
        upload.abort()

    def test_part_again(self, folder: Folder) -> None:
        """Writing a part number again replaces the part."""
        upload = folder.open().upload("big")
        upload.write_part(1, 0, pieces(b"wrong"))
        upload.write_part(1, 0, pieces(b"right part"))
        upload.complete()
        upload.complete()
        assert folder.get("big") == b"right part"

    def test_no_parts(self, folder: Folder) -> None:
        """An upload of no parts is an empty object."""
        folder.open().upload("empty").complete()
        assert folder.get("empty") == b""

    def test_gap(self, folder: Folder) -> None:
        """A missing part number is refused instead of a shorter object."""
        upload = folder.open().upload("big")
        upload.write_part(2, 1, pieces(b"x"))
        with pytest.raises(ValueError, match="gaps"):
            upload.complete()
        upload.abort()
        assert folder.uploads() == []

    @pytest.mark.parametrize("parts", [0, 1])
    def test_abort(self, folder: Folder, parts: int) -> None:
        """Abort leaves neither an object nor an upload, and can be called again."""
        upload = folder.open().upload("big")
        for number in range(1, parts + 1):
            upload.write_part(number, 0, pieces(b"x"))
        upload.abort()
        upload.abort()
        assert folder.keys() == []
        assert folder.uploads() == []

    @pytest.mark.leaves_uploads("of the other name")
    def test_abort_finds_uploads_it_does_not_know(self, folder: Folder) -> None:
        """Abort ends every upload of its very name, and none of a name that only begins alike."""
        client = folder.server.client
        for key in ["big", "big", "bigger"]:
            client.create_multipart_upload(Bucket=folder.bucket, Key=f"run/step-1/{key}")
        folder.open().upload("big").abort()
        assert folder.uploads() == ["run/step-1/bigger"]

    def test_abort_after_complete(self, folder: Folder) -> None:
        """Abort after a complete takes the object away again."""
        upload = folder.open().upload("big")
        upload.write_part(1, 0, pieces(b"x"))
        upload.complete()
        upload.abort()
        assert folder.keys() == []

    def test_complete_of_a_foreign_abort(self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
        """Completing an upload that somebody aborted fails, also where an older object of the same size is there."""
        folder = Folder(ministack, bucket(ministack))  # moto answers 500 instead of NoSuchUpload
        folder.set("big", b"old!")
        store = folder.open()
        time.sleep(1.1)
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"new!"))
        store.abort_uploads(["big"])
        with pytest.raises(ObjectNotFoundError):
            upload.complete()
        assert folder.get("big") == b"old!"

    @pytest.mark.leaves_uploads("of other names and other folders")
    def test_open_and_abort_uploads(self, folder: Folder) -> None:
        """open_uploads lists this folder's uploads alone; abort_uploads ends the named ones alone."""
        client = folder.server.client
        for key in ["run/step-1/a", "run/step-1/a", "run/step-1/b", "run/step-1/sub/a", "run/step-10/a"]:
            client.create_multipart_upload(Bucket=folder.bucket, Key=key)
        store = folder.open()
        found = store.open_uploads()
        assert sorted(e.name for e in found) == ["a", "a", "b"]
        assert all(e.size == 0 and e.modified is not None for e in found)
        store.abort_uploads(["a", "never"])
        assert sorted(folder.uploads()) == ["run/step-1/b", "run/step-1/sub/a", "run/step-10/a"]


class TestChecksums:
    def test_wrong_crc_of_a_put(self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
        """A body that does not match its CRC is refused, for good, and leaves nothing (moto does not check)."""
        folder = Folder(ministack, bucket(ministack))
        with pytest.raises(StoreError) as caught:
            folder.open().put("a", pieces(b"123"), crc32=zlib.crc32(b"124"))
        assert (caught.value.errno, caught.value.transient) == (errno.EIO, False)
        assert folder.keys() == []

    def test_wrong_crc_of_a_part(self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> None:
        """A part that does not match its CRC is refused (moto does not check)."""
        folder = Folder(ministack, bucket(ministack))
        upload = folder.open().upload("a")
        with pytest.raises(StoreError) as caught:
            upload.write_part(1, 0, pieces(b"123"), crc32=1)
        assert (caught.value.errno, caught.value.transient) == (errno.EIO, False)
        upload.abort()
        assert folder.uploads() == []


@pytest.mark.slow
class TestSeaweed:
    @pytest.fixture
    def folder(self, seaweedfs: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> Folder:
        return Folder(seaweedfs, bucket(seaweedfs))

    @pytest.mark.parametrize("wrong", [{"secret": "wrong"}, {"key": "unknown"}])
    @pytest.mark.parametrize(
        "call",
        [
            lambda s: s.entries(),
            lambda s: s.size("a"),
            lambda s: s.read_into("a", 0, [memoryview(bytearray(1))]),
            lambda s: s.put("a", pieces(b"1")),
            lambda s: s.create("a", b"1"),
        ],
    )
    def test_wrong_credentials(self, folder: Folder, wrong: dict[str, str], call: Callable[[Any], Any]) -> None:
        """Wrong credentials are EACCES, not worth another try, and the message speaks of credentials."""
        folder.set("a", b"1")
        with pytest.raises(StoreError) as caught:
            call(folder.open(wrong))
        error = caught.value
        assert (error.errno, error.transient, error.ambiguous) == (errno.EACCES, False, False)
        assert "credentials" in error.message

    @pytest.mark.parametrize("signed", [True, False])
    def test_payload_signing(self, folder: Folder, signed: bool) -> None:
        """A server that checks signatures takes bodies with and without a hash in them, and checks the CRC of both."""
        store = folder.open({"config_kwargs": {"s3": {"payload_signing_enabled": signed}}})
        data = os.urandom(MIB)
        store.put("a", pieces(data[:7], b"", data[7:]), crc32=zlib.crc32(data))
        assert folder.get("a") == data
        with pytest.raises(StoreError) as caught:
            store.put("b", pieces(data), crc32=zlib.crc32(data) ^ 1)
        assert not caught.value.transient
        assert [e.name for e in store.entries()] == ["a"]

    def test_wrong_crc(self, folder: Folder) -> None:
        """A body and a part that do not match their CRC are refused."""
        store = folder.open()
        with pytest.raises(StoreError) as caught:
            store.put("a", pieces(b"123"), crc32=1)
        assert (caught.value.errno, caught.value.transient) == (errno.EIO, False)
        upload = store.upload("a")
        with pytest.raises(StoreError) as caught:
            upload.write_part(1, 0, pieces(b"123"), crc32=1)
        assert (caught.value.errno, caught.value.transient) == (errno.EIO, False)
        upload.abort()
        assert folder.keys() == []

    def test_the_rest(self, folder: Folder) -> None:
        """Odd names, uploads with CRCs, ranges, create and abort work where signatures are checked."""
        store = folder.open()
        assert store.create_if_absent is Atomicity.ATOMIC
        for name in ODD_NAMES:
            store.put(name, pieces(b"1"), crc32=zlib.crc32(b"1"))
        assert sorted(e.name for e in store.entries()) == sorted(ODD_NAMES)
        store.delete(ODD_NAMES)
        data = pattern(6 * MIB)
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(data[: 5 * MIB]), crc32=zlib.crc32(data[: 5 * MIB]))
        upload.write_part(2, 5 * MIB, pieces(data[5 * MIB :]), crc32=zlib.crc32(data[5 * MIB :]))
        upload.complete()
        target = bytearray(MIB)
        store.read_into("big", 4 * MIB + 1, [memoryview(target)])
        assert bytes(target) == data[4 * MIB + 1 : 5 * MIB + 1]
        with pytest.raises(ObjectTooShortError):
            store.read_into("big", 6 * MIB, [memoryview(target)])
        other = store.upload("other")
        other.write_part(1, 0, pieces(b"x"))
        other.abort()
        assert store.open_uploads() == []
        assert [e.name for e in store.entries()] == ["big"]


class TestOptions:
    def test_defaults(self) -> None:
        """What the user did not set is set: one attempt, time-outs, a pool for all requests, no CRCs of botocore's."""
        config = s3fs_options({"key": "k"}, max_concurrency=32)["config_kwargs"]
        assert config["retries"] == {"total_max_attempts": 1, "mode": "standard"}
        assert (config["connect_timeout"], config["read_timeout"], config["max_pool_connections"]) == (10, 60, 32)
        assert config["request_checksum_calculation"] == "when_required"
        assert config["response_checksum_validation"] == "when_required"

    def test_the_users_stay(self) -> None:
        """What the user set stays, beside our defaults, and the user's dicts are not changed."""
        mine = {"config_kwargs": {"retries": {"max_attempts": 7}, "read_timeout": 3}, "anon": True}
        options = s3fs_options(mine, max_concurrency=4)
        assert options["anon"] is True
        assert options["config_kwargs"]["retries"] == {"max_attempts": 7}
        assert options["config_kwargs"]["read_timeout"] == 3
        assert options["config_kwargs"]["connect_timeout"] == 10
        assert mine == {"config_kwargs": {"retries": {"max_attempts": 7}, "read_timeout": 3}, "anon": True}

    @pytest.mark.parametrize(
        ("users", "wanted"),
        [
            ({}, {"payload_signing_enabled": False}),
            ({"s3": None}, {"payload_signing_enabled": False}),
            ({"s3": {"addressing_style": "path"}}, {"payload_signing_enabled": False, "addressing_style": "path"}),
            ({"s3": {"payload_signing_enabled": True}}, {"payload_signing_enabled": True}),
        ],
    )
    def test_payload_signing(self, users: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Bodies are not hashed unless the user wants it; the other settings for S3 stay, and none is changed."""
        mine = {"config_kwargs": dict(users)}
        assert s3fs_options(mine, max_concurrency=4)["config_kwargs"]["s3"] == wanted
        assert mine == {"config_kwargs": users}

    @pytest.mark.parametrize("signed", [True, False])
    def test_what_is_signed_is_sent(self, folder: Folder, signed: bool) -> None:
        """A body, hashed for its signature or not, arrives whole in a put, a create and a part."""
        store = folder.open({"config_kwargs": {"s3": {"payload_signing_enabled": signed}}})
        store.put("a", pieces(b"ab", b"", b"cde"), crc32=zlib.crc32(b"abcde"))
        store.create("b", b"fgh")
        upload = store.upload("c")
        upload.write_part(1, 0, pieces(b"i" * MIB, b"j"))
        upload.complete()
        assert store.read("a", limit=9) == b"abcde"
        assert store.read("b", limit=9) == b"fgh"
        assert store.read("c", limit=2 * MIB) == b"i" * MIB + b"j"

    @pytest.mark.parametrize(
        "options",
        [
            {"no_such_option": 1},
            {"session": "x"},
            {"client_kwargs": "x"},
            {"client_kwargs": {"no_such_option": 1}},
            {"config_kwargs": "x"},
            {"config_kwargs": {"no_such_option": 1}},
            {"config_kwargs": {"s3": "x"}},
            {"client_kwargs": {"endpoint_url": "localhost:9"}},
        ],
    )
    def test_impossible_options(self, server: S3Endpoint, options: dict[str, Any]) -> None:
        """Options that s3fs or botocore cannot use are refused with a sentence, at the latest by the first call."""
        place = parse_location("s3://bucket/run")
        with pytest.raises(InvalidLocationError, match="storage_options"):
            open_store(place, {**server.storage_options, **options}).entries()

    @pytest.mark.parametrize("options", [{"token": 5}, {"key": 1}])
    def test_options_met_late(self, server: S3Endpoint, options: dict[str, Any]) -> None:
        """Credentials that are no text, met only when a request is signed, are a StoreError at once."""
        store = open_store(parse_location("s3://bucket/run"), {**server.storage_options, **options})
        with pytest.raises(StoreError, match="storage option") as caught:
            store.entries()
        assert not caught.value.transient

    def test_asynchronous(self) -> None:
        """An asynchronous filesystem, which has no loop of its own, is refused with a sentence."""
        with pytest.raises(ValueError, match="asynchronous"):
            s3fs_options({"asynchronous": True}, max_concurrency=4)

    def test_the_users_filesystem(self, folder: Folder) -> None:
        """The filesystem that the user made of the same options is another object and keeps its settings."""
        users = S3FileSystem(**folder.server.storage_options)
        before = dict(users.config_kwargs)
        store = folder.open()
        store.put("a", pieces(b"1"))
        store.close()
        assert users.config_kwargs == before
        assert users.cat(f"{folder.path}/a") == b"1"

    def test_additional_arguments(self, folder: Folder) -> None:
        """s3_additional_kwargs reach the requests that know them, and no others."""
        store = folder.open({"s3_additional_kwargs": {"Metadata": {"who": "me"}}})
        store.put("a", pieces(b"1"))
        assert store.read("a", limit=1) == b"1"
        upload = store.upload("b")
        upload.write_part(1, 0, pieces(b"1"))
        upload.complete()
        client = folder.server.client
        for name in "ab":
            assert client.head_object(Bucket=folder.bucket, Key=f"run/step-1/{name}")["Metadata"] == {"who": "me"}

    def test_no_bucket(self, server: S3Endpoint) -> None:
        """A location without a bucket is refused."""
        with pytest.raises(InvalidLocationError):
            open_s3(Folder(server, "", ""), server.storage_options, max_concurrency=4)


class TestThreadsLoopsAndForks:
    def test_inside_a_running_loop(self, folder: Folder) -> None:
        """The store works inside a coroutine that asyncio.run drives, and in its threads."""
        store = folder.open()

        async def main() -> None:
            store.put("a", pieces(b"1"))
            await asyncio.to_thread(store.put, "b", pieces(b"2"))

        asyncio.run(main())
        assert [folder.get(name) for name in "ab"] == [b"1", b"2"]

    def test_on_the_loop_of_fsspec(self, folder: Folder) -> None:
        """On fsspec's own loop, where it would wait for itself, it raises at once."""
        store = folder.open()
        store.put("a", pieces(b"1"))

        async def inside() -> None:
            store.size("a")

        future = asyncio.run_coroutine_threadsafe(inside(), fsspec.asyn.get_loop())
        with pytest.raises(RuntimeError, match="own event loop"):
            future.result(timeout=10)

    def test_after_fork(self, folder: Folder) -> None:
        """A child forked after the parent used the store works with it within seconds, and so does the parent."""
        store = folder.open()
        store.put("parent", pieces(b"1"))
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store.put("child", pieces(b"2"))
                os.write(send, ",".join(sorted(e.name for e in store.entries())).encode())
            finally:
                os._exit(0)
        os.close(send)
        ready, _, _ = select.select([receive], [], [], 20)
        if not ready:
            os.kill(child, 9)
        os.waitpid(child, 0)
        said = os.read(receive, 1000)
        os.close(receive)
        assert said == b"child,parent"
        store.put("later", pieces(b"3"))
        assert sorted(e.name for e in store.entries()) == ["child", "later", "parent"]

    def test_scratch_name(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        """The probe's scratch object has a name of ours: .claim, a dot, and a token of 16."""
        seen: list[str] = []
        store = folder.open()
        names = type(store)._key

        def watched(self: Any, name: str) -> str:
            seen.append(name)
            return names(self, name)

        monkeypatch.setattr(type(store), "_key", watched)
        assert store.create_if_absent is Atomicity.ATOMIC
        assert [bool(re.fullmatch(r"\.claim\.[a-z][a-z0-9]{15}", name)) for name in seen] == [True]


class _Conformance(StoreConformance):
    uploads_last = True

    @pytest.fixture
    def store(self, folder: Folder) -> S3Store:
        return folder.open()

    @pytest.fixture
    def second(self, folder: Folder) -> S3Store:
        return folder.open({"use_listings_cache": False})

    @pytest.fixture
    def below(self, folder: Folder) -> S3Store:
        return Folder(folder.server, folder.bucket, f"{folder.key}/below").open()

    @pytest.fixture
    def inside(self, folder: Folder) -> Callable[[str], Store]:
        return lambda name: Folder(folder.server, folder.bucket, f"{folder.key}/{name}").open()

    @pytest.fixture
    def beside(self, folder: Folder) -> S3Store:
        return Folder(folder.server, folder.bucket, f"{folder.key}0").open()


class TestConformance(_Conformance):
    """What every store must do; not on moto, which dates every open upload to one day in 2010."""

    @pytest.fixture
    def folder(self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> Folder:
        return Folder(ministack, bucket(ministack))


@pytest.mark.slow
class TestSeaweedConformance(_Conformance):
    """The same where signatures are checked."""

    @pytest.fixture
    def folder(self, seaweedfs: S3Endpoint) -> Folder:
        # The launcher's bucket for all: each new one takes several of the server's volumes.
        return Folder(seaweedfs, "ready", f"run/{secrets.token_hex(6)}")
