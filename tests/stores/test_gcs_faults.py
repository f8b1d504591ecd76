"""The GCS store against a server that misbehaves: one request for each call, and what is raised says what happened."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import google.auth.credentials
import google.auth.exceptions
import pytest

import dcp_storage.stores.gcs
import dcp_storage.stores.gcs_upload
from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from dcp_storage.store import Buffers
from dcp_storage.stores.gcs import GcsStore
from dcp_storage.wrappers import RetryingStore
from tests.servers.gcs import GcsServer, Hook, gcs_server
from tests.servers.gcs_folder import GcsFolder

MIB = 1024 * 1024
BIG = 9 * MIB  # large enough for a resumable second try

CALLS: dict[str, Callable[[Any], Any]] = {
    "entries": lambda s: s.entries(),
    "folders": lambda s: s.folders(),
    "now": lambda s: s.now(),
    "size": lambda s: s.size("a"),
    "read": lambda s: s.read("a", limit=10),
    "read_into": lambda s: s.read_into("a", 0, [memoryview(bytearray(2))]),
    "put": lambda s: s.put("a", pieces(b"12")),
    "create": lambda s: s.create("new", b"12"),
    "delete": lambda s: s.delete(["a"]),
    "write_part": lambda s: s.upload("big").write_part(1, 0, pieces(b"12")),
}
CHANGES = frozenset({"put", "create", "delete", "write_part"})


def pieces(*parts: bytes) -> Buffers:
    return [memoryview(part) for part in parts]


def verb(wanted: str, part: str = "") -> Callable[[str, str], bool]:
    """Matches requests by verb and a text in their target."""
    return lambda method, target: method == wanted and part in target


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    """One strict server for the module."""
    with gcs_server() as running:
        yield running


@pytest.fixture
def folder(server: GcsServer) -> Iterator[GcsFolder]:
    """A folder in a new bucket, with an object ``a``; afterwards no session of it is open."""
    server.reset()
    folder = GcsFolder.new(server)
    folder.set("a", b"old")
    yield folder
    assert [name for name in server.open_sessions() if name.startswith(folder.key)] == []


@pytest.fixture
def store(server: GcsServer, folder: GcsFolder) -> GcsStore:
    """The store of the folder, which knows that the server is atomic."""
    store = folder.open()
    assert store.create_if_absent
    server.reset()
    return store


@pytest.mark.parametrize("operation", CALLS)
class TestEveryCall:
    def test_unavailable(self, server: GcsServer, store: GcsStore, operation: str) -> None:
        """A 503 is passing, after one request; a change that met it may have been done."""
        server.hooks = [Hook("status", times=99)]
        with pytest.raises(StoreError) as caught:
            CALLS[operation](store)
        error = caught.value
        assert (error.operation, error.transient, error.ambiguous) == (operation, True, operation in CHANGES)
        assert len(server.seen) == 1

    @pytest.mark.parametrize("kind", ["lost reply", "lost request"])
    def test_no_answer(self, server: GcsServer, store: GcsStore, operation: str, kind: Any) -> None:
        """A connection that ends without an answer is passing, after one request, and ambiguous for changes."""
        server.hooks = [Hook(kind, times=99)]
        with pytest.raises(StoreError) as caught:
            CALLS[operation](store)
        assert (caught.value.transient, caught.value.ambiguous) == (True, operation in CHANGES)
        assert len(server.seen) == 1
        twin = pickle.loads(pickle.dumps(caught.value))
        assert (str(twin), twin.__dict__) == (str(caught.value), caught.value.__dict__)
        server.hooks = []
        store.abort_uploads(["big"])

    def test_refused_connection(self, folder: GcsFolder, operation: str) -> None:
        """Where nobody listens it is passing, and nothing can have been done, save what create looks for first."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
            store = folder.open({"endpoint_url": f"http://127.0.0.1:{taken.getsockname()[1]}"})
            with pytest.raises(StoreError) as caught:
                CALLS[operation](store)
        error = caught.value
        assert (error.transient, error.ambiguous, error.errno) == (True, False, errno.ECONNREFUSED)

    def test_silence(self, server: GcsServer, folder: GcsFolder, operation: str) -> None:
        """A server that says nothing for longer than the time-out is passing, with ETIMEDOUT."""
        server.hooks = [Hook("delay", seconds=1.0, times=99)]
        with pytest.raises(StoreError) as caught:
            CALLS[operation](folder.open({"requests_timeout": 0.2}))
        assert (caught.value.transient, caught.value.errno) == (True, errno.ETIMEDOUT)
        if operation == "write_part":  # it arrives all the same, after its client has gone
            store, until = folder.open(client=2), time.monotonic() + 20
            server.hooks = []
            while not store.open_uploads() and time.monotonic() < until:
                time.sleep(0.05)
            store.abort_uploads(["big"])

    def test_retried_from_outside(self, server: GcsServer, store: GcsStore, operation: str) -> None:
        """With the one layer of retries on top, two failures are got over (a create is for its caller to look at)."""
        if operation == "create":
            server.hooks = [Hook("status", times=1)]
            with pytest.raises(StoreError):
                CALLS[operation](RetryingStore(store, attempts=6, base=0.01))
            assert len(server.seen) == 1
        else:
            server.hooks = [Hook("status", times=2)]
            CALLS[operation](RetryingStore(store, attempts=6, base=0.01))
            assert len(server.seen) == 3
        store.abort_uploads(["big"])


class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "reason", "number", "transient", "ambiguous"),
        [
            (400, "invalid", errno.EINVAL, False, False),
            (401, "authError", errno.EACCES, False, False),
            (403, "forbidden", errno.EACCES, False, False),
            (403, "rateLimitExceeded", None, True, False),
            (403, "quotaExceeded", errno.EDQUOT, False, False),
            (404, "notFound", errno.ENOENT, False, False),
            (405, "methodNotAllowed", errno.EOPNOTSUPP, False, False),
            (408, "uploadBrokenConnection", None, True, True),
            (409, "conflict", None, True, False),
            (412, "conditionNotMet", errno.EINVAL, False, False),
            (429, "rateLimitExceeded", None, True, False),
            (500, "backendError", None, True, True),
            (501, "notImplemented", errno.EOPNOTSUPP, False, False),
            (507, "full", errno.ENOSPC, False, False),
        ],
    )
    def test_put(
        self,
        server: GcsServer,
        store: GcsStore,
        status: int,
        reason: str,
        number: int | None,
        transient: bool,
        ambiguous: bool,
    ) -> None:
        """Status and reason decide; a body that is not the usual JSON changes nothing of that."""
        told = json.dumps({"error": {"code": status, "message": "m", "errors": [{"reason": reason}]}}).encode()
        for body in (told, b"Service says no", b'{"error": "text"}', b"[]"):
            if body is not told and status == 403 and reason != "forbidden":
                continue
            server.hooks = [Hook("status", status=status, body=body)]
            with pytest.raises(StoreError) as caught:
                store.put("a", pieces(b"1"))
            error = caught.value
            assert (error.errno, error.transient, error.ambiguous) == (number, transient, ambiguous)
            assert error.key == "a"

    @pytest.mark.parametrize("operation", ["entries", "put", "size"])
    def test_no_json(self, server: GcsServer, store: GcsStore, operation: str) -> None:
        """A success whose body is no JSON, as a proxy might send, is passing."""
        server.hooks = [Hook("reply", status=200, body=b"<html>")]
        with pytest.raises(StoreError) as caught:
            CALLS[operation](store)
        assert caught.value.transient

    def test_broken_page(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A listing whose second page fails raises, instead of being shorter."""
        for number in range(1001):
            folder.set(f"n{number}", b"")
        server.hooks = [Hook("status", verb("GET", "pageToken"))]
        with pytest.raises(StoreError, match="503"):
            store.entries()
        assert len(store.entries()) == 1002

    def test_broken_page_of_folders(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A listing of sub-folders whose second page fails raises, instead of being shorter; odd keys are left out."""
        for number in range(1001):
            folder.set(f"n{number}/object", b"")
        for odd in ("/object", "a\\b/object", "n1/", "n1/more"):
            folder.set(odd, b"")
        server.hooks = [Hook("status", verb("GET", "pageToken"))]
        with pytest.raises(StoreError, match="503"):
            store.folders()
        assert sorted(store.folders()) == sorted(f"n{number}" for number in range(1001))

    @pytest.mark.parametrize("operation", ["read", "read_into"])
    def test_cut_answer(self, server: GcsServer, store: GcsStore, operation: str) -> None:
        """A download that ends midway is passing."""
        server.hooks = [Hook("cut reply")]
        with pytest.raises(StoreError) as caught:
            CALLS[operation](store)
        assert caught.value.transient

    def test_other_range(self, server: GcsServer, store: GcsStore) -> None:
        """Bytes from another place than was asked for are not taken."""
        server.hooks = [Hook("reply", status=206, body=b"ld", headers={"Content-Range": "bytes 1-2/3"})]
        with pytest.raises(StoreError) as caught:
            CALLS["read_into"](store)
        assert not caught.value.transient

    def test_smaller_range(self, server: GcsServer, store: GcsStore) -> None:
        """Fewer bytes than were asked for, of an object that has them, are passing."""
        server.hooks = [Hook("reply", status=206, body=b"o", headers={"Content-Range": "bytes 0-0/3"})]
        with pytest.raises(StoreError, match="1 of 2 bytes") as caught:
            CALLS["read_into"](store)
        assert caught.value.transient

    def test_some_deletes_fail(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """Where some of many deletes fail the others are done, and what cannot be helped is raised first."""
        for name in ("b", "c", "d"):
            folder.set(name, b"")
        server.hooks = [Hook("status", verb("DELETE", "%2Fb")), Hook("status", verb("DELETE", "%2Fc"), status=403)]
        with pytest.raises(StoreError) as caught:
            store.delete(["a", "b", "c", "d"])
        assert (caught.value.key, caught.value.transient) == ("c", False)
        assert folder.names() == ["run/step-1/b", "run/step-1/c"]


class TestWholeObjects:
    def test_half_a_put(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A put that breaks midway leaves the old object."""
        server.hooks = [Hook("half request")]
        with pytest.raises(StoreError) as caught:
            store.put("a", pieces(bytes(BIG)))
        assert caught.value.ambiguous
        assert folder.get("a") == b"old"

    def test_lost_reply_of_a_create(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A create whose reply is lost says that it may have been done, not that the name is taken."""
        server.hooks = [Hook("lost reply", verb("POST"))]
        with pytest.raises(StoreError) as caught:
            store.create("c", b"mine")
        assert (isinstance(caught.value, ObjectExistsError), caught.value.ambiguous) == (False, True)
        assert folder.get("c") == b"mine"

    @pytest.mark.parametrize("operation", ["put", "create", "write_part"])
    def test_wrong_crc32c(
        self, folder: GcsFolder, store: GcsStore, operation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bytes that do not match their CRC-32C are refused by the server, for good, and leave nothing."""
        for module in (dcp_storage.stores.gcs, dcp_storage.stores.gcs_upload):
            monkeypatch.setattr(module, "crc32c_of", lambda buffers: 1)
        with pytest.raises(StoreError) as caught:
            CALLS[operation](store)
        assert (caught.value.errno, caught.value.transient) == (errno.EINVAL, False)
        assert folder.names() == ["run/step-1/a"]
        assert folder.get("a") == b"old"


class TestUpload:
    def test_resumed_part(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A part that breaks again and again goes on where the server has got to, and then composes as any other."""
        data = secrets.token_bytes(BIG)
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"head"))
        server.reset()
        for kind, method in (("half request", "POST"), ("half request", "PUT"), ("half request", "PUT")):
            # The middle one: the question how far it is goes through, the bytes break off.
            server.hooks = [Hook(kind, verb(method))] if method == "POST" else [_second_put(server, kind)]  # type: ignore[arg-type]
            with pytest.raises(StoreError) as caught:
                upload.write_part(2, 4, pieces(data[:100], data[100:]))
            assert caught.value.transient
        server.hooks, server.received = [], 0
        upload.write_part(2, 4, pieces(data[:100], data[100:]))
        assert 0 < server.received <= BIG // 4 + 512 * 1024
        upload.complete()
        assert folder.get("big") == b"head" + data
        assert folder.names() == ["run/step-1/a", "run/step-1/big"]

    def test_lost_reply_of_the_last_chunk(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A session that was finished without our knowing is found finished, and nothing is sent again."""
        data = secrets.token_bytes(BIG)
        upload = store.upload("big")
        server.hooks = [Hook("half request", verb("POST")), Hook("lost reply", verb("PUT"))]
        for _ in range(2):
            with pytest.raises(StoreError):
                upload.write_part(1, 0, pieces(data))
        server.received = 0
        upload.write_part(1, 0, pieces(data))
        assert server.received == 0
        upload.complete()
        assert folder.get("big") == data

    def test_lost_session(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A session that is gone is passing: the next try begins another."""
        data = secrets.token_bytes(BIG)
        upload = store.upload("big")
        server.hooks = [Hook("half request", verb("POST")), Hook("status", verb("PUT"), status=410)]
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                upload.write_part(1, 0, pieces(data))
            assert caught.value.transient
        for session in server.api.sessions.values():
            session.cancelled = True
        upload.write_part(1, 0, pieces(data))
        upload.complete()
        assert folder.get("big") == data

    def test_other_bytes(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """A part that is sent again with other bytes does not go on with the old ones' session."""
        data, other = secrets.token_bytes(BIG), secrets.token_bytes(BIG)
        upload = store.upload("big")
        server.hooks = [Hook("half request", verb("POST")), Hook("half request", verb("PUT"))]
        for _ in range(2):
            with pytest.raises(StoreError):
                upload.write_part(1, 0, pieces(data))
        upload.write_part(1, 0, pieces(other))
        assert server.open_sessions() == []
        upload.complete()
        assert folder.get("big") == other

    def test_resumed_with_a_wrong_crc32c(
        self, server: GcsServer, folder: GcsFolder, store: GcsStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A resumable upload is held against its CRC-32C too."""
        monkeypatch.setattr(dcp_storage.stores.gcs_upload, "crc32c_of", lambda buffers: 1)
        upload = store.upload("big")
        server.hooks = [Hook("half request", verb("POST"))]
        with pytest.raises(StoreError):
            upload.write_part(1, 0, pieces(bytes(BIG)))
        with pytest.raises(StoreError) as caught:
            upload.write_part(1, 0, pieces(bytes(BIG)))
        assert not caught.value.transient
        upload.abort()
        assert folder.names() == ["run/step-1/a"]

    def test_abort_with_an_open_session(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """Abort cancels the open session and removes every part, those of lost replies too, at the second call too."""
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"1"))
        server.hooks = [Hook("lost reply", verb("POST")), Hook("half request", verb("PUT"))]
        for _ in range(2):
            with pytest.raises(StoreError):
                upload.write_part(2, 1, pieces(bytes(BIG)))
        assert len(server.open_sessions()) == 1
        assert len(folder.names()) == 3
        server.hooks = [Hook("status", verb("DELETE"), times=2)]
        with pytest.raises(StoreError) as caught:
            upload.abort()
        assert caught.value.transient
        upload.abort()
        assert server.open_sessions() == []
        assert folder.names() == ["run/step-1/a"]
        assert store.open_uploads() == []

    @pytest.mark.parametrize("count", [1, 33])
    def test_lost_reply_of_complete(self, server: GcsServer, folder: GcsFolder, store: GcsStore, count: int) -> None:
        """A complete whose reply is lost, at any of its requests, can be called again until it says that it is done."""
        upload = store.upload("big")
        for number in range(count):
            upload.write_part(number + 1, number, pieces(b"%d" % (number % 10)))
        server.hooks = [Hook("lost reply", verb("POST", "compose"), times=2), Hook("lost reply", verb("DELETE"))]
        failures: list[StoreError] = []
        while len(failures) < 5:
            try:
                upload.complete()
                break
            except StoreError as error:
                failures.append(error)
        assert 2 <= len(failures) < 5
        assert {(error.transient, error.ambiguous) for error in failures} == {(True, True)}
        assert folder.get("big") == b"".join(b"%d" % (number % 10) for number in range(count))
        assert folder.names() == ["run/step-1/a", "run/step-1/big"]

    def test_abort_after_a_lost_complete(self, server: GcsServer, folder: GcsFolder, store: GcsStore) -> None:
        """An object that a complete made without our knowing is taken away by abort."""
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"1"))
        server.hooks = [Hook("lost reply", verb("POST", "compose"))]
        with pytest.raises(StoreError):
            upload.complete()
        assert folder.get("big") == b"1"
        upload.abort()
        assert folder.names() == ["run/step-1/a"]

    def test_aborted_by_somebody_else(self, folder: GcsFolder, store: GcsStore) -> None:
        """An upload whose parts somebody removed fails, and the older object of that name stays."""
        upload = store.upload("a")
        upload.write_part(1, 0, pieces(b"new"))
        store.abort_uploads(["a"])
        with pytest.raises(ObjectNotFoundError):
            upload.complete()
        assert folder.get("a") == b"old"

    def test_wrong_composition(self, folder: GcsFolder, store: GcsStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A composed object with another CRC-32C than its parts' sums say is an error, and abort removes it."""
        upload = store.upload("big")
        upload.write_part(1, 0, pieces(b"1"))
        with monkeypatch.context() as patched:
            patched.setattr(dcp_storage.stores.gcs_upload, "combine_all", lambda pieces: 1)
            with pytest.raises(StoreError) as caught:
                upload.complete()
        assert (caught.value.errno, caught.value.transient) == (errno.EIO, False)
        upload.abort()
        assert folder.names() == ["run/step-1/a"]


def _second_put(server: GcsServer, kind: Any) -> Hook:
    """Breaks the first PUT that carries bytes: the first of all, or that after the question how far it is."""
    asked = any(method == "PUT" for method, _ in server.seen)
    left = [1 if asked else 0]

    def matches(method: str, target: str) -> bool:
        if method != "PUT":
            return False
        left[0] -= 1
        return left[0] < 0

    return Hook(kind, matches)


class Credentials(google.auth.credentials.Credentials):
    """Credentials that another server issued; ``fails`` is what their renewal raises."""

    def __init__(self, token: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.token = token
        self.renewals = 0
        self.fails: Exception | None = None
        self.threads: set[str] = set()

    def refresh(self, request: object) -> None:
        self.renewals += 1
        self.threads.add(threading.current_thread().name)
        if self.fails is not None:
            raise self.fails
        self.token = f"fresh-{self.renewals}"


class TestCredentials:
    def test_renewed_once(self, server: GcsServer, folder: GcsFolder) -> None:
        """Where the token is no longer taken, it is renewed once for all, and every call is done, creates too."""
        credentials = Credentials("stale")
        server.tokens = {"fresh-1"}
        store = folder.open({"token": credentials})
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: store.put(f"p{number}", pieces(b"1")), range(8)))
        store.create("c", b"1")
        assert store.read("a", limit=10) == b"old"
        assert credentials.renewals == 1
        until = time.monotonic() + 5
        while credentials.threads & {thread.name for thread in threading.enumerate()}:
            assert time.monotonic() < until
        assert not any("fsspec" in name for name in credentials.threads)
        assert len(folder.names()) == 10

    def test_never_good(self, server: GcsServer, folder: GcsFolder) -> None:
        """A token that is refused after its renewal is EACCES, after two requests."""
        server.tokens = {"another"}
        with pytest.raises(StoreError) as caught:
            folder.open({"token": Credentials("stale")}).entries()
        assert (caught.value.errno, caught.value.transient) == (errno.EACCES, False)
        assert "credentials" in caught.value.message
        assert len(server.seen) == 2

    def test_anonymous(self, server: GcsServer, store: GcsStore) -> None:
        """Without credentials 401 is EACCES, after one request."""
        server.tokens = {"another"}
        with pytest.raises(StoreError) as caught:
            store.entries()
        assert (caught.value.errno, len(server.seen)) == (errno.EACCES, 1)

    @pytest.mark.parametrize(
        ("failure", "transient"),
        [
            (google.auth.exceptions.TransportError("no route"), True),  # type: ignore[no-untyped-call]
            (google.auth.exceptions.RefreshError("revoked"), False),  # type: ignore[no-untyped-call]
        ],
    )
    def test_renewal_fails(self, server: GcsServer, folder: GcsFolder, failure: Exception, transient: bool) -> None:
        """A renewal that fails for want of a network is passing, one that is refused is not; nothing was changed."""
        credentials = Credentials("stale")
        credentials.fails = failure
        server.tokens = {"fresh-1"}
        with pytest.raises(StoreError) as caught:
            folder.open({"token": credentials}).put("p", pieces(b"1"))
        assert (caught.value.transient, caught.value.ambiguous) == (transient, False)
        assert caught.value.errno == (None if transient else errno.EACCES)
