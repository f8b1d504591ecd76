"""The obstore engine: the contract on S3 and GCS, what is raised when requests fail, and what is carried over."""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from google.oauth2.credentials import Credentials

from dcp_storage import (
    CheckpointExistsError,
    FsspecStorageReader,
    FsspecStorageWriter,
    InvalidLocationError,
    LoadOptions,
    SaveOptions,
)
from dcp_storage.errors import ObjectNotFoundError, ObjectTooShortError, StoreError, UntrustedDataError
from dcp_storage.options import MIB
from dcp_storage.store import Atomicity, Buffers, Store
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.obstore_store import ObstoreStore
from dcp_storage.stores.opening import open_store
from dcp_storage.testing import conformance
from dcp_storage.testing.proxy import Fault as ProxyFault
from dcp_storage.testing.proxy import Proxy
from dcp_storage.wrappers import RetryingStore
from tests.e2e import ALONE, assert_same, like, load, save, small_state
from tests.servers import Fault, FaultyHTTP, S3Endpoint, faulty_http
from tests.servers.faulty_http import Kind
from tests.servers.gcs import GcsServer, Hook
from tests.servers.gcs_folder import GcsFolder
from tests.stores.conftest import Folder

PART = 5 * MIB


def opened(
    folder: Folder | GcsFolder, options: dict[str, Any] | None = None, *, endpoint: str | None = None
) -> ObstoreStore:
    """The store through obstore, straight or through a proxy."""
    mine = {**folder.server.storage_options, **(options or {})}
    if endpoint is not None and isinstance(folder, Folder):
        mine = {**folder.server.behind(endpoint).storage_options, **(options or {})}
    elif endpoint is not None:
        mine["endpoint_url"] = endpoint
    store = open_store(parse_location(folder.url), mine, max_concurrency=4, engine="obstore")
    assert isinstance(store, ObstoreStore)
    return store


def pieces(*parts: bytes) -> Buffers:
    return [memoryview(part) for part in parts]


def on(method: str, part: str = "") -> Callable[[str, str], bool]:
    """Requests of this method whose target holds ``part``."""
    return lambda sent, target: sent == method and part in target


def caught(call: Callable[[], Any]) -> StoreError:
    with pytest.raises(StoreError) as info:
        call()
    return info.value


@pytest.fixture
def server(ministack: S3Endpoint) -> S3Endpoint:
    """One server: what differs between servers is tested for s3fs, and obstore speaks to them alike."""
    return ministack


class _Conformance(conformance.StoreConformance):
    @pytest.fixture
    def folder(self) -> Folder | GcsFolder:
        raise AssertionError("each class has its own")

    @pytest.fixture
    def store(self, folder: Folder | GcsFolder) -> Iterator[Store]:
        store = opened(folder)
        yield store
        assert store.open_uploads() == []
        store.close()

    @pytest.fixture
    def second(self, folder: Folder | GcsFolder) -> Store:
        return opened(folder, {"use_listings_cache": False})

    def at(self, folder: Folder | GcsFolder, key: str) -> Store:
        return opened(folder.at(key) if isinstance(folder, GcsFolder) else Folder(folder.server, folder.bucket, key))

    @pytest.fixture
    def below(self, folder: Folder | GcsFolder) -> Store:
        return self.at(folder, f"{folder.key}/below")

    @pytest.fixture
    def inside(self, folder: Folder | GcsFolder) -> Callable[[str], Store]:
        return lambda name: self.at(folder, f"{folder.key}/{name}")

    @pytest.fixture
    def beside(self, folder: Folder | GcsFolder) -> Store:
        return self.at(folder, f"{folder.key}0")


class TestConformanceS3(_Conformance):
    """What every store must do, on S3; ``uploads_last`` is false since the newest part is held back."""

    @pytest.fixture
    def folder(self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]) -> Folder:
        return Folder(ministack, bucket(ministack), "run [1]/step-1")


class TestConformanceGcs(_Conformance):
    """The same on GCS, whose parts are objects."""

    uploads_last = True

    @pytest.fixture
    def folder(self, strict: GcsServer) -> GcsFolder:
        return GcsFolder.new(strict, "run [1]/step-1")


@pytest.mark.slow
class TestConformanceSeaweed(_Conformance):
    """The same where signatures are checked."""

    @pytest.fixture
    def folder(self, seaweedfs: S3Endpoint) -> Folder:
        return Folder(seaweedfs, "ready", f"run/{secrets.token_hex(6)}")


READS: dict[str, Callable[[Store], Any]] = {
    "size": lambda s: s.size("a"),
    "read": lambda s: s.read("a", limit=10),
    "read_into": lambda s: s.read_into("a", 0, [memoryview(bytearray(1))]),
}
CALLS: dict[str, Callable[[Store], Any]] = {**READS, "put": lambda s: s.put("a", pieces(b"1"))}


class TestFailures:
    @pytest.mark.parametrize("kind", ["lost reply", "lost request", "status"])
    @pytest.mark.parametrize("operation", CALLS)
    def test_each_operation_is_tried_once(self, folder: Folder, proxy: FaultyHTTP, operation: str, kind: Kind) -> None:
        """A lost reply, a reset and a 503 raise at once, transient, ambiguous for a put only; nothing is resent."""
        folder.set("a", b"1")
        store = opened(folder, endpoint=proxy.url)
        store.size("a")  # so that a connection is kept, which an HTTP client might use for a second try
        proxy.faults = [Fault(kind, lambda method, target: True, times=100)]
        proxy.seen.clear()
        error = caught(lambda: CALLS[operation](store))
        assert (error.operation, error.key, error.transient, error.attempts) == (operation, "a", True, 1)
        assert error.ambiguous is (operation == "put")
        assert len(proxy.seen) == 1

    @pytest.mark.parametrize("operation", CALLS)
    def test_a_missing_bucket_is_named(self, ministack: S3Endpoint, operation: str) -> None:
        """A bucket that does not exist is ObjectNotFoundError, which names it."""
        store = opened(Folder(ministack, "no-such-bucket-here"))
        error = caught(lambda: CALLS[operation](store))
        assert isinstance(error, ObjectNotFoundError)
        assert (error.errno, error.transient) == (errno.ENOENT, False)
        assert "'no-such-bucket-here'" in error.message

    @pytest.mark.parametrize(
        ("status", "code", "transient", "number"),
        [
            (400, "RequestTimeout", True, None),
            (429, "TooManyRequests", True, None),
            (408, "", True, None),
            (500, "InternalError", True, None),
            (502, "", True, None),
            (503, "SlowDown", True, None),
            (504, "", True, None),
            (409, "OperationAborted", True, None),
            (400, "ExpiredToken", True, errno.EACCES),
            (403, "RequestTimeTooSkewed", False, errno.EACCES),
            (403, "AccessDenied", False, errno.EACCES),
            (401, "", False, errno.EACCES),
            (400, "InvalidArgument", False, errno.EINVAL),
            (405, "MethodNotAllowed", False, errno.EOPNOTSUPP),
            (501, "NotImplemented", False, errno.EOPNOTSUPP),
            (507, "XMinioStorageFull", False, errno.ENOSPC),
        ],
    )
    def test_status_and_code_decide(
        self, moto: S3Endpoint, proxies: Any, status: int, code: str, transient: bool, number: int | None
    ) -> None:
        """Status and Code decide what can be tried again and which errno it is; the server's text plays no part."""
        proxy: FaultyHTTP = proxies(moto)
        said = "SlowDown AccessDenied Debug source: Status { status: 503, HttpError { kind: Timeout }"
        body = f"<Error><Code>{code}</Code><Message>{said}\n\nDebug source:\n{said}</Message></Error>".encode()
        proxy.faults = [Fault("status", on("PUT"), status=status, body=body)]
        error = caught(lambda: opened(Folder(moto, "b-1"), endpoint=proxy.url).put("a", pieces(b"1")))
        assert (error.transient, error.errno) == (transient, number)
        assert error.ambiguous is (transient and status not in (409, 429) and code != "ExpiredToken")
        assert not isinstance(error, ObjectNotFoundError)

    def test_errors_travel_and_say_no_secret(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """An error pickles whole, keeps what obstore said as its cause, and shows neither key nor secret."""
        proxy.faults = [Fault("status", on("PUT"))]
        error = caught(lambda: opened(folder, endpoint=proxy.url).put("a", pieces(b"1")))
        twin = pickle.loads(pickle.dumps(error))
        assert (type(twin), str(twin), twin.__dict__) == (type(error), str(error), error.__dict__)
        assert error.cause is not None
        assert "obstore" in error.cause.type
        assert folder.server.secret not in f"{error}{error.cause}"
        assert "\n" not in error.message

    def test_a_body_that_is_cut_is_no_data(self, folder: Folder) -> None:
        """An answer that ends midway is a passing error, for a whole object and for a range, never fewer bytes."""
        folder.set("a", os.urandom(3 * MIB))
        with Proxy(folder.server.endpoint_url) as proxy:
            store = opened(folder, endpoint=proxy.url)
            for call in (
                lambda: store.read("a", limit=4 * MIB),
                lambda: store.read_into("a", 5, [memoryview(bytearray(2 * MIB))]),
            ):
                proxy.faults = [ProxyFault("cut answer", on("GET"))]
                error = caught(call)
                assert (error.transient, error.ambiguous) == (True, False)

    def test_a_lost_reply_to_a_put_is_repeated_by_our_layer(self, folder: Folder) -> None:
        """The retries around the store put the object again, and it is there once and whole."""
        with Proxy(folder.server.endpoint_url) as proxy:
            proxy.faults = [ProxyFault("reset after", on("PUT")), ProxyFault("reset before", on("PUT"))]
            retrying = RetryingStore(opened(folder, endpoint=proxy.url), sleep=lambda seconds: None)
            retrying.put("a", pieces(b"12", b"3"))
            assert retrying.retries == 2
        assert folder.get("a") == b"123"

    def test_where_nothing_listens(self, folder: Folder) -> None:
        """A refused connection is transient and not ambiguous, as nothing was sent, and comes at once."""
        begun = time.monotonic()
        error = caught(lambda: opened(folder, endpoint="http://127.0.0.1:9").put("a", pieces(b"1")))
        assert (error.transient, error.ambiguous) == (True, False)
        assert time.monotonic() - begun < 20

    def test_the_users_time_out_counts(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A server that does not answer within ``read_timeout`` is a transient ETIMEDOUT."""
        folder.set("a", b"1")
        store = opened(folder, {"config_kwargs": {"read_timeout": 0.5}}, endpoint=proxy.url)
        proxy.faults = [Fault("delay", on("GET"), seconds=1.5)]
        error = caught(lambda: store.read("a", limit=1))
        assert (error.errno, error.transient, error.ambiguous) == (errno.ETIMEDOUT, True, False)

    def test_a_range_that_is_answered_with_200_is_read(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Where the server does not call its answer a part (rclone), obstore gives up and s3fs reads it."""
        folder.set("a", b"0123456789")
        store = opened(folder, endpoint=proxy.url)
        odd = Fault("reply", on("GET"), times=2, status=200, body=b"456")
        odd.headers = {"ETag": '"x"', "Last-Modified": "Mon, 02 Nov 2026 00:00:00 GMT"}
        odd.headers["Content-Range"] = "bytes 4-6/10"
        proxy.faults = [odd]
        target = bytearray(3)
        store.read_into("a", 4, [memoryview(target)])
        assert target == b"456"

    def test_a_range_beyond_the_end_says_so(self, folder: Folder) -> None:
        """Past the end, across it, and of an empty object: ObjectTooShortError, never transient."""
        folder.set("a", b"123456")
        folder.set("empty", b"")
        store = opened(folder)
        for name, offset, size in (("a", 4, 3), ("a", 6, 1), ("a", 100, 5), ("empty", 0, 1)):
            error = caught(lambda: store.read_into(name, offset, [memoryview(bytearray(size))]))  # noqa: B023
            assert isinstance(error, ObjectTooShortError)
            assert (error.wanted, error.transient) == (offset + size, False)

    def test_more_than_the_limit_is_not_fetched(self, folder: Folder) -> None:
        """An object over the limit is refused before its body is taken."""
        folder.set("a", os.urandom(8 * MIB))
        with Proxy(folder.server.endpoint_url) as proxy:
            with pytest.raises(UntrustedDataError):
                opened(folder, endpoint=proxy.url).read("a", limit=1000)
            assert proxy.bytes_down < 7 * MIB


def send(store: Store, name: str, *parts: bytes) -> Any:
    """Begins an upload and sends parts in order."""
    upload = store.upload(name)
    for number, part in enumerate(parts, 1):
        upload.write_part(number, sum(map(len, parts[: number - 1])), pieces(part))
    return upload


class TestUploadsToS3:
    def test_parts_become_one_object(self, folder: Folder) -> None:
        """What was sent in parts is one object, and nothing of it shows before the end."""
        parts = [os.urandom(PART + 1), os.urandom(PART), os.urandom(77)]
        store = opened(folder)
        upload = send(store, "big", *parts)
        assert folder.keys() == []
        upload.complete()
        upload.complete()
        assert folder.get("big") == b"".join(parts)
        assert folder.uploads() == []

    def test_one_part_is_one_put(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """An upload of a single part, or of none, is a single request."""
        store = opened(folder, endpoint=proxy.url)
        store.upload("none").complete()
        send(store, "one", b"x").complete()
        assert [method for method, _ in proxy.seen] == ["PUT", "PUT"]
        assert (folder.get("none"), folder.get("one")) == (b"", b"x")

    def test_parts_come_in_order(self, folder: Folder) -> None:
        """A part out of its turn is refused for good."""
        upload = opened(folder).upload("big")
        error = caught(lambda: upload.write_part(2, 5, pieces(b"x")))
        assert (error.errno, error.transient) == (errno.EINVAL, False)

    def test_more_than_a_store_takes_is_refused_early(self, folder: Folder) -> None:
        """A part that lies beyond 10,000 parts of the first one's size is refused with EFBIG, before it is sent."""
        store = opened(folder)
        upload = send(store, "big", b"x")
        error = caught(lambda: upload.write_part(2, 10_000 * PART, pieces(b"x")))
        assert error.errno == errno.EINVAL  # a gap
        upload = send(store, "big", b"x")
        upload._offset, upload._number = 10_000 * PART - 1, 7
        assert caught(lambda: upload.write_part(7, 10_000 * PART - 1, pieces(b"xx"))).errno == errno.EFBIG

    def test_a_part_that_fails_in_passing_is_sent_again(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A part is repeated by obstore after a 503 and after a lost reply, since nobody else has its bytes."""
        parts = [os.urandom(PART), os.urandom(PART), b"end"]
        proxy.faults = [Fault("status", on("PUT", "partNumber=1")), Fault("lost reply", on("PUT", "partNumber=2"))]
        send(opened(folder, endpoint=proxy.url), "big", *parts).complete()
        assert folder.get("big") == b"".join(parts)
        assert folder.uploads() == []

    def test_a_refused_part_ends_the_upload(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A part that is refused for good fails the upload, not to be tried again, and an abort leaves nothing."""
        proxy.faults = [Fault("status", on("PUT", "partNumber"), times=9, status=403, body=b"<Error/>")]
        store = opened(folder, endpoint=proxy.url)
        upload = send(store, "big", bytes(PART), bytes(PART))

        def rest() -> None:
            for number in range(3, 40):
                upload.write_part(number, (number - 1) * PART, pieces(bytes(PART)))
            upload.complete()

        assert not caught(rest).transient
        assert not caught(upload.complete).transient
        upload.abort()
        assert (folder.keys(), folder.uploads()) == ([], [])

    @pytest.mark.parametrize("parts", [0, 1, 2, 3])
    def test_an_abort_leaves_nothing(self, folder: Folder, parts: int) -> None:
        """After an abort, once or twice, there is no object and no open upload, however far it had come."""
        upload = send(opened(folder), "big", *[os.urandom(PART)] * parts)
        upload.abort()
        upload.abort()
        assert (folder.keys(), folder.uploads()) == ([], [])

    def test_an_abort_takes_back_a_completed_object(self, folder: Folder) -> None:
        """Abort after a complete takes the object away again."""
        for name, parts in (("one", [b"x"]), ("two", [bytes(PART), b"x"])):
            upload = send(opened(folder), name, *parts)
            upload.complete()
            upload.abort()
        assert (folder.keys(), folder.uploads()) == ([], [])

    def test_an_upload_whose_beginning_got_lost_is_found(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """An upload that began without telling its id is open no longer after an abort."""
        proxy.faults = [Fault("lost reply", on("POST", "uploads"))]
        store = opened(folder, endpoint=proxy.url)
        upload = send(store, "big", bytes(PART), bytes(PART), b"x")
        upload.abort()
        assert (folder.keys(), folder.uploads()) == ([], [])

    def test_a_complete_whose_reply_got_lost_is_found_out(
        self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str], proxies: Any
    ) -> None:
        """The object is there and so the complete returns (moto answers 500 to a second complete)."""
        folder, proxy = Folder(ministack, bucket(ministack)), proxies(ministack)
        folder.set("big", b"old")
        parts = [os.urandom(PART), b"x"]
        upload = send(opened(folder, endpoint=proxy.url), "big", *parts)
        proxy.faults = [Fault("lost reply", on("POST", "uploadId"))]
        upload.complete()
        assert folder.get("big") == b"".join(parts)

    def test_a_complete_of_a_foreign_abort_fails(
        self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]
    ) -> None:
        """Completing an upload that somebody aborted fails, also where an older object of the same size is there."""
        folder = Folder(ministack, bucket(ministack))
        folder.set("big", b"o" * (2 * PART + 1))
        store = opened(folder)
        upload = send(store, "big", bytes(PART), bytes(PART), b"x")
        until = time.monotonic() + 20
        while not folder.uploads() and time.monotonic() < until:
            time.sleep(0.05)
        store.abort_uploads(["big"])
        assert not caught(upload.complete).transient
        assert folder.get("big") == b"o" * (2 * PART + 1)
        upload.abort()


class TestUploadsToGcs:
    def test_a_part_is_one_request_and_may_be_sent_again(self, strict: GcsServer) -> None:
        """A part whose reply got lost raises transient and ambiguous; sent again, it counts once; no part is left."""
        folder = GcsFolder.new(strict)
        store = opened(folder)
        upload = store.upload("big")
        strict.hooks = [Hook("lost reply", on("PUT"))]
        error = caught(lambda: upload.write_part(1, 0, pieces(b"first")))
        assert (error.transient, error.ambiguous, error.operation) == (True, True, "write_part")
        upload.write_part(2, 5, pieces(b", second"))
        upload.write_part(1, 0, pieces(b"first"))
        upload.complete()
        assert folder.get("big") == b"first, second"
        assert folder.names() == [f"{folder.key}/big"]

    def test_bytes_that_changed_on_their_way_are_found(self, strict: GcsServer) -> None:
        """Where a part has not arrived as it was sent, the complete fails by GCS's own CRC-32C of the whole."""
        folder = GcsFolder.new(strict)
        upload = opened(folder).upload("big")
        upload.write_part(1, 0, pieces(b"right"))
        (key,) = folder.names()
        with strict.api.world.lock:
            there = strict.api.world.bucket(folder.bucket).objects[key]
            there.data, there.crc32c = b"wrong", "AAAAAA=="
        assert caught(upload.complete).errno == errno.EIO
        upload.abort()
        assert folder.names() == []

    def test_a_wrong_token_is_refused(self, strict: GcsServer) -> None:
        """A token that the server does not take is EACCES, not worth another try; the right one is sent."""
        folder = GcsFolder.new(strict)
        folder.set("a", b"1")
        try:
            strict.tokens = {"the-right-one"}
            token: Any = Credentials  # google-auth's is not typed
            assert opened(folder, {"token": token("the-right-one")}).read("a", limit=1) == b"1"
            error = caught(lambda: opened(folder, {"token": token("another")}).size("a"))
            assert (error.errno, error.transient) == (errno.EACCES, False)
        finally:
            strict.reset()


class TestCarriedOver:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"config_kwargs": {"proxies": {"http": "p"}}}, "config_kwargs.proxies"),
            ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "config_kwargs.s3.use_accelerate_endpoint"),
            ({"config_kwargs": {"signature_version": "s3"}}, "config_kwargs.signature_version"),
            ({"client_kwargs": {"api_version": "1"}}, "client_kwargs.api_version"),
            ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
            ({"no_such_option": 1}, "no_such_option"),
        ],
    )
    def test_what_cannot_be_is_named(self, options: dict[str, Any], named: str) -> None:
        """An option without a counterpart is a ValueError at once, which names it and says what to do."""
        with pytest.raises(InvalidLocationError, match="fsspec") as info:
            open_store(parse_location("s3://bucket/run"), options, engine="obstore")
        assert isinstance(info.value, ValueError)
        assert named in info.value.message

    def test_what_cannot_be_of_gcsfs_is_named(self) -> None:
        """The same for gcsfs."""
        given: dict[str, dict[str, Any]] = {"session_kwargs.trust_env": {"session_kwargs": {"trust_env": True}}}
        for named, options in {**given, "odd": {"odd": 1}}.items():
            with pytest.raises(ValueError, match=f"{named}.*fsspec"):
                open_store(parse_location("gs://bucket/run"), {"token": "anon", **options}, engine="obstore")

    @pytest.mark.parametrize(
        "url", ["s3://bucket/a//b", "s3://bucket/a/../b", "s3://bucket--use1-az4--x-s3/run", "ftp://host/run"]
    )
    def test_places_that_obstore_cannot_reach(self, url: str) -> None:
        """A key that obstore has no path for, a directory bucket and another filesystem are refused with a sentence."""
        with pytest.raises(ValueError, match='use engine="fsspec"'):
            open_store(parse_location(url), {}, engine="obstore")

    def test_any_other_engine_is_refused(self) -> None:
        """An engine that there is not is a ValueError which names both that there are."""
        for kind in (SaveOptions, LoadOptions):
            assert kind().engine == "fsspec"
            with pytest.raises(ValueError, match='"fsspec" or "obstore"'):
                kind(engine="s3fs")

    def test_local_disk_and_memory_have_their_own(self, tmp_path: Any) -> None:
        """The engine is one of object stores; a local folder and ``memory://`` open as ever."""
        for place in (tmp_path, "memory://obstore/run"):
            plain, engine = (open_store(parse_location(place), engine=kind) for kind in ("fsspec", "obstore"))
            assert type(plain) is type(engine)

    def test_a_profile_is_taken(
        self,
        moto: S3Endpoint,
        bucket: Callable[[S3Endpoint], str],
        tmp_path: Any,
        monkeypatch: pytest.MonkeyPatch,
        proxies: Any,
    ) -> None:
        """Keys, token and region of a profile in the user's files sign the requests, not those of the environment."""
        config, keys = tmp_path / "config", tmp_path / "credentials"
        config.write_text("[profile run]\nregion = eu-west-3\n")
        keys.write_text("[run]\naws_access_key_id = OFPROFILE\naws_secret_access_key = s\naws_session_token = tok\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        proxy: FaultyHTTP = proxies(moto)
        proxy.faults = []
        proxy.headers.clear()
        folder = Folder(moto, bucket(moto))
        options: dict[str, Any] = {
            "key": None,
            "secret": None,
            "profile": "run",
            "client_kwargs": {},
            "endpoint_url": proxy.url,
        }
        opened(folder, options).put("a", pieces(b"1"))
        sent = proxy.headers[-1]
        assert "Credential=OFPROFILE/" in sent["authorization"]
        assert "/eu-west-3/s3/" in sent["authorization"]
        assert sent["x-amz-security-token"] == "tok"

    def test_anonymous_requests_are_not_signed(
        self, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str], proxies: Any
    ) -> None:
        """``anon=True`` sends no signature, as s3fs (moto lets nobody in so)."""
        folder, proxy = Folder(ministack, bucket(ministack)), proxies(ministack)
        proxy.faults = []
        folder.set("a", b"1")
        store = opened(folder, {"anon": True}, endpoint=proxy.url)
        proxy.headers.clear()
        for call in CALLS.values():
            call(store)
        assert [("authorization" in sent) for sent in proxy.headers] == [False] * len(CALLS)

    def test_anonymous_requests_to_gcs_have_no_token(self, strict: GcsServer) -> None:
        """``token="anon"`` sends no token, also where it writes, and looks for none elsewhere."""
        folder = GcsFolder.new(strict)
        with faulty_http(strict.url) as proxy:
            store = opened(folder, {"token": "anon"}, endpoint=proxy.url)
            for call in ("put", *READS):
                CALLS[call](store)
            assert [sent.get("authorization", "Bearer").strip() for sent in proxy.headers] == ["Bearer"] * len(CALLS)

    def test_no_credentials_are_an_error_about_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without any credentials: EACCES, no other try, and the message speaks of credentials."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        store = open_store(parse_location("s3://bucket/run"), {"endpoint_url": "http://127.0.0.1:9"}, engine="obstore")
        error = caught(lambda: store.size("a"))
        assert (error.errno, error.transient, error.operation) == (errno.EACCES, False, "size")
        assert "credentials" in error.message

    def test_encryption_and_payer_are_asked_for(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Server-side encryption and requester-pays go with the requests, as with s3fs."""
        extra = {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}, "requester_pays": True}
        opened(folder, extra, endpoint=proxy.url).put("a", pieces(b"1"))
        sent = proxy.headers[-1]
        assert (sent["x-amz-server-side-encryption"], sent["x-amz-request-payer"]) == ("AES256", "requester")

    def test_the_project_that_pays_is_named(self, strict: GcsServer) -> None:
        """Requester-pays on GCS sends the project."""
        folder = GcsFolder.new(strict)
        store = opened(folder, {"requester_pays": "somebody"})
        request = store._request("size", "a")
        assert store._clients.source.settings(request).client["default_headers"] == {"x-goog-user-project": "somebody"}

    @pytest.mark.slow
    @pytest.mark.parametrize("wrong", [{"secret": "wrong"}, {"key": "unknown"}])
    @pytest.mark.parametrize("operation", CALLS)
    def test_wrong_credentials_are_denied(self, seaweedfs: S3Endpoint, wrong: dict[str, str], operation: str) -> None:
        """Wrong credentials are EACCES, not worth another try."""
        folder = Folder(seaweedfs, "ready", f"run/{secrets.token_hex(6)}")
        folder.set("a", b"1")
        error = caught(lambda: CALLS[operation](opened(folder, wrong)))
        assert (error.errno, error.transient, error.ambiguous) == (errno.EACCES, False, False)


class TestProcesses:
    def test_a_store_travels(self, folder: Folder) -> None:
        """A store that was used pickles, and its twin works."""
        store = opened(folder)
        store.put("a", pieces(b"1"))
        twin: Store = pickle.loads(pickle.dumps(store))
        twin.put("b", pieces(b"2"))
        assert (twin.read("a", limit=1), folder.get("b")) == (b"1", b"2")

    def test_after_fork(self, folder: Folder) -> None:
        """A child forked after the parent used obstore works within seconds, with that store and with a new one."""
        store = opened(folder)
        store.put("parent", pieces(b"1"))
        receive, send_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store.put("child", pieces(b"2"))
                upload = opened(folder).upload("other")
                upload.write_part(1, 0, pieces(b"3"))
                upload.complete()
                os.write(send_end, store.read("child", limit=1) + store.read("other", limit=1))
            finally:
                os._exit(0)
        os.close(send_end)
        ready, _, _ = select.select([receive], [], [], 20)
        if not ready:
            os.kill(child, 9)
        os.waitpid(child, 0)
        said = os.read(receive, 1000)
        os.close(receive)
        assert said == b"23"
        store.put("later", pieces(b"3"))
        assert sorted(e.name for e in store.entries()) == ["child", "later", "other", "parent"]

    def test_many_threads_open_at_once(self, folder: Folder) -> None:
        """Threads that use a fresh store at the same moment get one client and their own bytes."""
        store, gate, wrong = opened(folder), threading.Barrier(8), []

        def work(who: int) -> None:
            gate.wait(20)
            store.put(f"o{who}", pieces(bytes([who]) * 1000))
            if store.read(f"o{who}", limit=1000) != bytes([who]) * 1000:
                wrong.append(who)

        threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert len(store.entries()) == 8


@pytest.mark.filterwarnings(ALONE)
class TestCheckpoints:
    @pytest.mark.parametrize("kind", ["s3", "gs"])
    def test_a_save_comes_back(
        self, kind: str, ministack: S3Endpoint, strict: GcsServer, bucket: Callable[[S3Endpoint], str]
    ) -> None:
        """dcp.save and dcp.load through obstore give the same state, in parts and ranges, under an atomic commit."""
        folder: Folder | GcsFolder = Folder(ministack, bucket(ministack)) if kind == "s3" else GcsFolder.new(strict)
        state = {**small_state(), "big": torch.arange(4 * MIB, dtype=torch.float32)}
        options = folder.server.storage_options

        def writer(engine: str = "obstore") -> FsspecStorageWriter:
            return FsspecStorageWriter(
                folder.url, storage_options=options, options=SaveOptions(engine=engine, part_size=PART)
            )

        first = writer()
        save(state, first)
        assert first.report is not None
        assert not first.report.single_writer
        for engine in ("obstore", "fsspec"):
            found = like(state)
            reader = FsspecStorageReader(
                folder.url, storage_options=options, options=LoadOptions(engine=engine, part_size=3 * MIB)
            )
            load(found, reader)
            assert_same(found, state)
        assert open_store(parse_location(folder.url), options, engine="obstore").create_if_absent is Atomicity.ATOMIC
        with pytest.raises(BaseException, match="overwrite") as info:
            save(state, writer())
        assert CheckpointExistsError.__name__ in str(info.value) or isinstance(info.value, CheckpointExistsError)

    def test_a_save_that_fails_leaves_nothing(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A part that is refused fails the save, and neither files nor open uploads stay behind."""
        proxy.faults = [Fault("status", on("PUT", "partNumber"), times=99, status=403, body=b"<Error/>")]
        writer = FsspecStorageWriter(
            folder.url,
            storage_options=folder.server.behind(proxy.url).storage_options,
            options=SaveOptions(engine="obstore", part_size=PART),
        )
        with pytest.raises(BaseException, match="credentials"):
            save({"big": torch.zeros(4 * MIB)}, writer)
        left = folder.keys()
        assert [key for key in left if key.endswith(".distcp") or ".commit" in key] == []
        assert folder.uploads() == []
