"""The GCS store against a server that behaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import itertools
import os
import re
import secrets
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec.asyn
import gcsfs.core
import pytest

from dcp_storage.errors import (
    InvalidLocationError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.names import is_ours
from dcp_storage.store import Atomicity, Buffers
from dcp_storage.stores.gcs import GcsStore, open_gcs
from dcp_storage.stores.gcs_crc32c import combine_all, crc32c_of, crc32c_text
from dcp_storage.stores.gcs_session import gcsfs_options
from tests.servers.gcs import GcsServer, Hook, gcs_server
from tests.servers.gcs_folder import GcsFolder

MIB = 1024 * 1024
ODD_NAMES = ["[1]", "a?b", "*", "a b", "#1", "50%", "%41", "ünï-çødé-日本", "a+b", "a&b", "a=b;c", "~'!(),$@:", "<x>"]


def pieces(*parts: bytes) -> Buffers:
    return [memoryview(part) for part in parts]


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    """One strict server for the module."""
    with gcs_server() as running:
        yield running


@pytest.fixture
def folder(server: GcsServer) -> GcsFolder:
    """A folder in a new bucket; the server's log is empty."""
    server.reset()
    return GcsFolder.new(server)


@pytest.fixture
def store(folder: GcsFolder) -> GcsStore:
    """The store of the folder."""
    return folder.open()


class TestChecksums:
    def test_check_value(self) -> None:
        """The CRC-32C of "123456789" is E3069283, however the bytes are cut."""
        data = b"123456789"
        for cut in range(10):
            assert crc32c_of(pieces(data[:cut], data[cut:])) == 0xE3069283
            parts = [(crc32c_of(pieces(part)), len(part)) for part in (data[:cut], data[cut:])]
            assert combine_all(parts) == 0xE3069283
        assert crc32c_text(0xE3069283) == "4waSgw=="
        assert combine_all([]) == crc32c_of([]) == 0

    def test_long_pieces(self) -> None:
        """Sums of pieces longer than what is copied at once come together to that of the whole."""
        data = secrets.token_bytes(2 * MIB + 3)
        cuts = [0, 1, 700_000, 700_000, MIB + 9, len(data)]
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        whole = crc32c_of(pieces(data))
        assert crc32c_of(pieces(*parts)) == whole
        assert combine_all([(crc32c_of(pieces(part)), len(part)) for part in parts]) == whole


class TestObjects:
    def test_put(self, folder: GcsFolder, store: GcsStore) -> None:
        """What put wrote, of several buffers, is there byte for byte, of one request."""
        data = secrets.token_bytes(3 * MIB + 7)
        store.put("a", pieces(data[:5], b"", data[5:]))
        assert folder.get("a") == data
        assert folder.names() == ["run/step-1/a"]
        assert isinstance(folder.server, GcsServer)
        assert len(folder.server.seen) == 1

    def test_large(self, folder: GcsFolder, store: GcsStore) -> None:
        """An object of 64 MiB is put whole, uploaded in eight parts at once, and read in ranges."""
        data = secrets.token_bytes(64 * MIB)
        store.put("put", pieces(data))
        upload = store.upload("parts")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            each = [(n + 1, n * 8 * MIB, [memoryview(data)[n * 8 * MIB :][: 8 * MIB]]) for n in range(8)]
            list(pool.map(lambda part: upload.write_part(*part), reversed(each)))
        upload.complete()
        target = bytearray(len(data))
        for name in ("put", "parts"):
            store.read_into(name, 0, [memoryview(target)[: 5 * MIB], memoryview(target)[5 * MIB :]])
            assert target == data
            target[:] = bytes(len(data))
        assert len(folder.names()) == 2

    def test_read_over_the_limit(self, folder: GcsFolder, store: GcsStore) -> None:
        """Exactly the limit is read, one byte more refused."""
        folder.set("a", b"123456")
        assert store.read("a", limit=6) == b"123456"
        with pytest.raises(UntrustedDataError) as caught:
            store.read("a", limit=5)
        assert caught.value.name == "a"

    @pytest.mark.parametrize(("offset", "wanted"), [(4, 3), (6, 1), (100, 5), (0, 7)])
    def test_too_short(self, folder: GcsFolder, store: GcsStore, offset: int, wanted: int) -> None:
        """Bytes past the end raise with the end that was wanted and the size that was found."""
        folder.set("a", b"123456")
        with pytest.raises(ObjectTooShortError) as caught:
            store.read_into("a", offset, [memoryview(bytearray(wanted))])
        error = caught.value
        assert (error.wanted, error.found, error.transient) == (offset + wanted, 6, False)

    @pytest.mark.parametrize("operation", ["size", "read", "read_into"])
    def test_missing_object(self, store: GcsStore, operation: str) -> None:
        """A missing object is ObjectNotFoundError with the name and the operation."""
        calls: dict[str, Callable[[], Any]] = {
            "size": lambda: store.size("gone"),
            "read": lambda: store.read("gone", limit=10),
            "read_into": lambda: store.read_into("gone", 0, [memoryview(bytearray(1))]),
        }
        with pytest.raises(ObjectNotFoundError) as caught:
            calls[operation]()
        error = caught.value
        assert (error.key, error.operation, error.errno, error.transient) == ("gone", operation, errno.ENOENT, False)

    def test_never_compressed(self, server: GcsServer, store: GcsStore) -> None:
        """No answer may come compressed, since ranges count the bytes that are stored."""
        store.put("a", pieces(b"1"))
        store.read("a", limit=1)
        store.read_into("a", 0, [memoryview(bytearray(1))])
        assert server.encodings == {"identity"}


class TestListing:
    def test_entries(self, folder: GcsFolder, store: GcsStore) -> None:
        """Entries has names, sizes and the server's times of the folder's own objects, and nothing beside or below."""
        before = time.time()
        folder.set("a", b"123")
        for key in ["run/step-1/", "run/step-1/sub/b", "run/step-10/c", "run/step-1", "other"]:
            folder.server.set(folder.bucket, key, b"1")
        (entry,) = store.entries()
        assert (entry.name, entry.size) == ("a", 3)
        assert entry.modified is not None
        assert before - 2 <= entry.modified <= time.time() + 2

    def test_more_than_a_page(self, folder: GcsFolder, store: GcsStore) -> None:
        """2,100 objects, more than two pages of 1,000, are all listed."""
        names = [f"n{number:04d}" for number in range(2100)]
        for name in names:
            folder.set(name, b"1")
        assert sorted(entry.name for entry in store.entries()) == names

    def test_sub_folders_cost_nothing(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """What lies in sub-folders is not paged through."""
        for number in range(1500):
            folder.set(f"sub/n{number}", b"")
        folder.set("z", b"1")
        assert [entry.name for entry in store.entries()] == ["z"]
        assert len(server.seen) == 1

    def test_whole_bucket(self, folder: GcsFolder) -> None:
        """A location without a key is the bucket itself."""
        store = folder.at("").open()
        store.put("top", pieces(b"1"))
        assert folder.names() == ["top"]
        assert [entry.name for entry in store.entries()] == ["top"]

    @pytest.mark.parametrize("key", ["run [1]*?", "a b+c/50%/ü#&", "x//y", "a%2Fb"])
    def test_odd_folders(self, folder: GcsFolder, key: str) -> None:
        """No character of the folder's key or of a name is special."""
        odd = folder.at(key)
        store = odd.open()
        for name in ODD_NAMES:
            store.put(name, pieces(name.encode()))
            assert odd.get(name) == name.encode()
            assert store.read(name, limit=100) == name.encode()
        assert odd.names() == sorted(f"{key}/{name}" for name in ODD_NAMES)
        assert sorted(entry.name for entry in store.entries()) == sorted(ODD_NAMES)
        store.delete(ODD_NAMES)
        assert odd.names() == []

    @pytest.mark.parametrize(
        "call",
        [
            lambda s: s.entries(),
            lambda s: s.folders(),
            lambda s: s.open_uploads(),
            lambda s: s.now(),
            lambda s: s.put("a", pieces(b"1")),
            lambda s: s.create("a", b"1"),
            lambda s: s.read("a", limit=1),
            lambda s: s.upload("a").write_part(1, 0, pieces(b"1")),
        ],
    )
    def test_missing_bucket(self, server: GcsServer, call: Callable[[Any], Any]) -> None:
        """A bucket that does not exist is ObjectNotFoundError that names it, and is not made."""
        with pytest.raises(ObjectNotFoundError) as caught:
            call(GcsFolder(server, bucket="no-such-bucket").open())
        assert "'no-such-bucket'" in caught.value.message
        assert "no-such-bucket" not in server.api.world.buckets

    def test_now(self, store: GcsStore) -> None:
        """Now is the server's clock, comparable with the times of a listing."""
        store.put("a", pieces(b"1"))
        assert abs(store.now() - time.time()) < 3
        assert abs(store.now() - (store.entries()[0].modified or 0)) < 3


class TestCreate:
    def test_create(self, folder: GcsFolder, store: GcsStore) -> None:
        """Create writes a free name and refuses a taken one, whose bytes stay."""
        store.create("c", b"first")
        with pytest.raises(ObjectExistsError) as caught:
            store.create("c", b"second")
        assert (caught.value.key, caught.value.errno) == ("c", errno.EEXIST)
        assert folder.get("c") == b"first"

    def test_probe(self, server: GcsServer, folder: GcsFolder) -> None:
        """A server that refuses the second create is atomic; it is asked once, and nothing is left behind."""
        store = folder.open()
        assert store.create_if_absent is Atomicity.ATOMIC
        assert folder.names() == []
        keys = {target.rpartition("/o/")[2] for method, target in server.seen if method == "DELETE"}
        assert [bool(re.fullmatch(r"run%2Fstep-1%2F\.claim\.[a-z][a-z0-9]{15}", key)) for key in keys] == [True]
        asked = len(server.seen)
        assert store.create_if_absent is folder.at("other").open().create_if_absent is Atomicity.ATOMIC
        assert len(server.seen) == asked

    def test_server_without_conditions(self, server: GcsServer, folder: GcsFolder) -> None:
        """A server that writes twice is found out, nothing is left behind, and create still looks first."""
        server.api.ignores_conditions = True
        store = folder.open()
        assert store.create_if_absent is Atomicity.NONE
        assert folder.names() == []
        store.create("c", b"first")
        with pytest.raises(ObjectExistsError):
            store.create("c", b"second")
        assert folder.get("c") == b"first"

    def test_atomic_at_google(self, folder: GcsFolder) -> None:
        """At Google's own address nothing is asked."""
        store = open_gcs(folder, {"token": "anon"}, max_concurrency=4)
        assert store.create_if_absent is Atomicity.ATOMIC

    def test_emulator_variable(self, folder: GcsFolder, server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """STORAGE_EMULATOR_HOST leads to another server, which is probed."""
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        server.api.ignores_conditions = True
        store = open_gcs(folder, {"token": "anon", "project": "emulator"}, max_concurrency=4)
        assert store.create_if_absent is Atomicity.NONE

    def test_race(self, folder: GcsFolder) -> None:
        """Of 8 threads with 4 clients that create one name, in each of 20 rounds one wins, and its bytes are there."""
        stores = [folder.open(client=number) for number in range(1, 5)]
        assert stores[0].create_if_absent is Atomicity.ATOMIC

        def attempt(name: str, author: int) -> int | None:
            try:
                stores[author % 4].create(name, str(author).encode())
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
    @pytest.mark.parametrize(("count", "composes"), [(1, 1), (32, 1), (33, 3), (70, 4)])
    def test_many_parts(self, server: GcsServer, folder: GcsFolder, store: GcsStore, count: int, composes: int) -> None:
        """Any number of parts is composed, 32 at a time, in their order; nothing else is left."""
        data = secrets.token_bytes(count * 100 - 50)
        upload = store.upload("big")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            each = [(n + 1, n * 100, pieces(data[n * 100 : (n + 1) * 100])) for n in range(count)]
            list(pool.map(lambda part: upload.write_part(*part), each))
        upload.complete()
        assert folder.get("big") == data
        assert folder.names() == ["run/step-1/big"]
        assert server.count("POST", "/compose") == composes

    def test_no_parts(self, folder: GcsFolder, store: GcsStore) -> None:
        """An upload of no parts is an empty object."""
        store.upload("empty").complete()
        assert folder.get("empty") == b""

    @pytest.mark.parametrize("name", ["__0_1.distcp", "__12_3.abcdefghijklmno1.distcp", ".manifest", ".metadata"])
    def test_parts_have_names_of_ours(self, store: GcsStore, name: str) -> None:
        """The parts of a file of ours are files of ours, so that prune may remove what a kill left."""
        upload = store.upload(name)
        upload.write_part(1, 0, pieces(b"1"))
        (entry,) = store.entries()
        assert entry.name.startswith(f"{name}.")
        assert is_ours(entry.name)
        upload.abort()

    def test_intermediate_names(self, server: GcsServer, store: GcsStore) -> None:
        """So are the intermediate objects of many parts, and they belong to the open upload."""
        upload = store.upload("__0_0.distcp")
        for number in range(33):
            upload.write_part(number + 1, number, pieces(b"1"))
        server.hooks = [Hook("status", lambda method, target: method == "DELETE", times=35)]
        with pytest.raises(OSError, match="503"):
            upload.complete()
        names = [entry.name for entry in store.entries()]
        assert len(names) == 36
        assert all(is_ours(name) for name in names)
        assert [entry.name for entry in store.open_uploads()] == ["__0_0.distcp"]
        server.hooks = []
        store.abort_uploads(["__0_0.distcp"])
        assert [entry.name for entry in store.entries()] == ["__0_0.distcp"]
        upload.complete()
        assert store.read("__0_0.distcp", limit=99) == b"1" * 33

    def test_gap(self, folder: GcsFolder, store: GcsStore) -> None:
        """A missing part number is refused instead of a shorter object."""
        upload = store.upload("big")
        upload.write_part(2, 1, pieces(b"x"))
        with pytest.raises(OSError, match="part 1") as caught:
            upload.complete()
        assert caught.value.errno == errno.EINVAL
        upload.abort()
        assert folder.names() == []

    def test_abort_after_complete(self, folder: GcsFolder, store: GcsStore) -> None:
        """Abort takes a completed object away again, and leaves an older one where nothing was completed."""
        folder.set("old", b"old")
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"x"))
        upload.complete()
        other = store.upload("old")
        other.write_part(1, 0, pieces(b"x"))
        for ended in (upload, other):
            ended.abort()
            ended.abort()
        assert folder.names() == ["run/step-1/old"]

    @pytest.mark.leaves_uploads("of another name and another folder")
    def test_foreign_parts(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """Uploads are told apart by their notes: two of one name are two, other objects are none."""
        for name in (".manifest.abcdefghijklmno1", "big.abcdefghijklmno1"):
            folder.set(name, b"no part")
        before = time.time()
        for key in ("run/step-1", "run/step-1/sub"):
            for name in ("big", "big", "bigger"):
                folder.at(key).open().upload(name).write_part(1, 0, pieces(b"x"))
        found = store.open_uploads()
        assert sorted(entry.name for entry in found) == ["big", "big", "bigger"]
        assert all(e.size == 0 and abs((e.modified or 0) - before) < 5 for e in found)
        store.abort_uploads(["big", "never", ".manifest"])
        assert [entry.name for entry in store.open_uploads()] == ["bigger"]
        left = [entry.name for entry in store.entries() if not entry.name.startswith("bigger")]
        assert sorted(left) == [".manifest.abcdefghijklmno1", "big.abcdefghijklmno1"]
        assert len(folder.at("run/step-1/sub").open().open_uploads()) == 3

    def test_changed_part(self, folder: GcsFolder, store: GcsStore) -> None:
        """A part that somebody has written over is not taken: the upload fails, and nothing is made."""
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"mine"))
        (entry,) = store.entries()
        folder.set(entry.name, b"this")
        with pytest.raises(ObjectNotFoundError):
            upload.complete()
        assert [entry.name for entry in store.entries()] == [entry.name]
        upload.abort()
        assert folder.names() == []


class TestOptions:
    def test_no_other_class(self, store: GcsStore) -> None:
        """The filesystem is gcsfs's plain one, which speaks no gRPC, and the environment is left alone."""
        store.put("a", pieces(b"1"))
        assert type(store._session.filesystem()) is gcsfs.core.GCSFileSystem
        assert "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT" not in os.environ

    def test_timeouts(self) -> None:
        """Time-outs are set where the user sets none; the user's stay, and their dicts are not changed."""
        timeout = gcsfs_options({"token": "anon"})["session_kwargs"]["timeout"]
        assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (None, 10, 60)
        mine = {"session_kwargs": {"timeout": 3, "trust_env": True}}
        assert gcsfs_options(mine)["session_kwargs"] == {"timeout": 3, "trust_env": True}
        assert mine == {"session_kwargs": {"timeout": 3, "trust_env": True}}

    def test_the_users_filesystem(self, folder: GcsFolder) -> None:
        """The filesystem that the user makes of the same options is another object, with another session."""
        options = {**folder.server.storage_options, "block_size": 9 << 20}
        users = gcsfs.core.GCSFileSystem(**options)
        store = folder.open(options)
        store.put("a", pieces(b"1"))
        assert users.cat(f"{folder.path}/a") == b"1"
        assert users.session is not store._session.filesystem().session

    @pytest.mark.parametrize(
        "options",
        [
            {"asynchronous": True},
            {"access": "everything"},
            {"token": 7},
            {"token": {"type": "nothing"}},
            {"session_kwargs": {"no_such_option": 1}},
        ],
    )
    def test_impossible_options(self, folder: GcsFolder, options: dict[str, Any]) -> None:
        """Options that gcsfs cannot use are refused with a sentence, at the latest by the first call."""
        with pytest.raises(ValueError, match=r"storage_options"):
            folder.open(options).entries()

    @pytest.mark.parametrize("endpoint", ["127.0.0.1:9", "localhost", "http://127.0.0.1:99999"])
    def test_no_endpoint(self, folder: GcsFolder, endpoint: str) -> None:
        """An endpoint_url that is no URL of a server is an error at once: asking again does not help."""
        with pytest.raises(StoreError) as caught:
            folder.open({"endpoint_url": endpoint}).entries()
        assert not caught.value.transient

    def test_requester_pays(self, server: GcsServer, folder: GcsFolder) -> None:
        """The project that pays is named in every request."""
        store = folder.open({"requester_pays": "payer"})
        store.put("a", pieces(b"1"))
        store.entries()
        store.delete(["a"])
        assert len(server.seen) == 3
        assert all("userProject=payer" in target for _, target in server.seen)

    def test_no_bucket(self, server: GcsServer) -> None:
        """A location without a bucket is refused."""
        with pytest.raises(InvalidLocationError):
            GcsFolder(server, "", "").open()


class TestThreadsLoopsAndForks:
    def test_inside_a_running_loop(self, folder: GcsFolder, store: GcsStore) -> None:
        """The store works inside a coroutine that asyncio.run drives, and in its threads."""

        async def main() -> None:
            store.put("a", pieces(b"1"))
            await asyncio.to_thread(store.put, "b", pieces(b"2"))

        asyncio.run(main())
        assert [folder.get(name) for name in "ab"] == [b"1", b"2"]

    def test_on_the_loop_of_fsspec(self, store: GcsStore) -> None:
        """On fsspec's own loop, where it would wait for itself, it raises at once."""
        store.put("a", pieces(b"1"))

        async def inside() -> None:
            store.size("a")

        future = asyncio.run_coroutine_threadsafe(inside(), fsspec.asyn.get_loop())
        with pytest.raises(RuntimeError, match="own event loop"):
            future.result(timeout=10)

    def test_after_fork(self, store: GcsStore) -> None:
        """A child forked after the parent used the store works with it within seconds, and so does the parent."""
        store.put("parent", pieces(b"1"))
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store.put("child", pieces(b"2"))
                os.write(send, ",".join(sorted(entry.name for entry in store.entries())).encode())
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
        assert sorted(entry.name for entry in store.entries()) == ["child", "later", "parent"]
