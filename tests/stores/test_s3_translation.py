"""The S3 store where replies get lost, bodies are cut and servers fail: what is raised, and what is left."""

from __future__ import annotations

import base64
import errno
import os
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from dcp_storage.store import Atomicity, Buffers
from dcp_storage.stores.s3 import S3Store
from tests.servers import Fault, FaultyHTTP
from tests.servers.faulty_http import Kind
from tests.stores.conftest import Folder

MIB = 1024 * 1024
LISTING = b"<ListBucketResult><Name>b</Name><Prefix>run/step-1/</Prefix>%s</ListBucketResult>"


def pieces(data: bytes) -> Buffers:
    return [memoryview(data)]


def on(method: str, part: str = "") -> Callable[[str, str], bool]:
    """Requests of this method whose target holds ``part``."""
    return lambda sent, target: sent == method and part in target


def caught(call: Callable[[], Any]) -> StoreError:
    with pytest.raises(StoreError) as info:
        call()
    return info.value


READS: dict[str, Callable[[S3Store], Any]] = {
    "entries": lambda s: s.entries(),
    "folders": lambda s: s.folders(),
    "size": lambda s: s.size("a"),
    "read": lambda s: s.read("a", limit=10),
    "read_into": lambda s: s.read_into("a", 0, [memoryview(bytearray(1))]),
    "now": lambda s: s.now(),
    "open_uploads": lambda s: s.open_uploads(),
}
WRITES: dict[str, Callable[[S3Store], Any]] = {
    "put": lambda s: s.put("a", pieces(b"1")),
    "create": lambda s: s.create("new", b"1"),
    "delete": lambda s: s.delete(["a"]),
    "write_part": lambda s: s.upload("a").write_part(1, 0, pieces(b"1")),
}


class TestOneTry:
    @pytest.mark.parametrize("kind", ["lost reply", "lost request", "status"])
    @pytest.mark.parametrize("operation", [*READS, *WRITES])
    def test_each_operation(self, folder: Folder, proxy: FaultyHTTP, operation: str, kind: Kind) -> None:
        """A lost reply, a reset and a 503 raise at once, transient, ambiguous for changes only; nothing is resent."""
        folder.set("a", b"1")
        store = folder.open(endpoint=proxy.url)
        store.entries()  # so that a connection is kept, which aiohttp would use for a second try
        verbs = {"put": "PUT", "create": "PUT", "delete": "DELETE", "write_part": "POST", "size": "HEAD"}
        verb = verbs.get(operation, "GET")
        proxy.faults = [Fault(kind, on(verb), times=100)]
        proxy.seen.clear()
        error = caught(lambda: (READS | WRITES)[operation](store))
        assert (error.operation, error.transient, error.attempts) == (operation, True, 1)
        assert error.ambiguous is (operation in WRITES)
        assert [method for method, _ in proxy.seen].count(verb) == 1
        folder.open().abort_uploads(["a"])

    def test_connection_refused(self, folder: Folder) -> None:
        """Where nothing listens the error is transient, and comes without waiting for a time-out of 60 seconds."""
        begun = time.monotonic()
        error = caught(folder.open(endpoint="http://127.0.0.1:9").entries)
        assert error.transient
        assert time.monotonic() - begun < 30

    def test_read_timeout(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A server that does not answer in time is a transient ETIMEDOUT, ambiguous for a change."""
        store = folder.open({"config_kwargs": {"read_timeout": 0.5}}, endpoint=proxy.url)
        proxy.faults = [Fault("delay", on("PUT"), seconds=1.5)]
        error = caught(lambda: store.put("a", pieces(b"1")))
        assert (error.errno, error.transient, error.ambiguous) == (errno.ETIMEDOUT, True, True)


class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "code", "transient", "number"),
        [
            (400, "RequestTimeout", True, None),
            (429, "TooManyRequests", True, None),
            (500, "InternalError", True, None),
            (502, "", True, None),
            (503, "SlowDown", True, None),
            (504, "", True, None),
            (409, "OperationAborted", True, None),
            (400, "ExpiredToken", True, errno.EACCES),
            (403, "RequestTimeTooSkewed", False, errno.EACCES),
            (403, "AccessDenied", False, errno.EACCES),
            (401, "", False, errno.EACCES),
            (400, "BadDigest", False, errno.EIO),
            (400, "InvalidArgument", False, errno.EINVAL),
            (501, "NotImplemented", False, errno.EOPNOTSUPP),
            (507, "XMinioStorageFull", False, errno.ENOSPC),
        ],
    )
    def test_status_and_code(
        self, folder: Folder, proxy: FaultyHTTP, status: int, code: str, transient: bool, number: int | None
    ) -> None:
        """Status and Code decide what can be tried again and which errno it is; the text plays no part."""
        body = f"<Error><Code>{code}</Code><Message>AccessDenied SlowDown NoSuchKey</Message></Error>".encode()
        proxy.faults = [Fault("status", on("PUT"), status=status, body=body)]
        error = caught(lambda: folder.open(endpoint=proxy.url).put("a", pieces(b"1")))
        assert (error.transient, error.errno) == (transient, number)
        assert error.ambiguous is (transient and status != 409 and code != "ExpiredToken")
        assert not isinstance(error, (ObjectNotFoundError, ObjectExistsError))

    def test_no_credentials(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without any credentials: EACCES, no other try, and the message speaks of credentials."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        error = caught(folder.open({"key": None, "secret": None}).entries)
        assert (error.errno, error.transient) == (errno.EACCES, False)
        assert "credentials" in error.message

    @pytest.mark.parametrize("body", [b"<html>gateway", b"<html><body>gateway</body></html>", b"", b"gateway"])
    @pytest.mark.parametrize("operation", ["entries", "folders", "open_uploads", "now", "write_part", "put", "create"])
    def test_something_else(self, folder: Folder, proxy: FaultyHTTP, operation: str, body: bytes) -> None:
        """A 200 whose body is no answer of S3 is a passing error, above all no empty folder (I10)."""
        folder.set("a", b"1")
        method = {"write_part": "POST", "put": "PUT", "create": "PUT"}.get(operation, "GET")
        proxy.faults = [Fault("status", on(method), status=200, body=body)]
        assert caught(lambda: (READS | WRITES)[operation](folder.open(endpoint=proxy.url))).transient

    @pytest.mark.parametrize("body", [b"", b"<html><body>gateway</body></html>"])
    def test_complete_answered_by_something_else(self, folder: Folder, proxy: FaultyHTTP, body: bytes) -> None:
        """A complete that never arrived is not taken for done because something said 200."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"1"))
        proxy.faults = [Fault("status", on("POST", "uploadId"), status=200, body=body)]
        assert caught(upload.complete).ambiguous
        assert folder.keys() == []
        upload.complete()
        assert folder.get("a") == b"1"

    def test_error_in_a_200(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A complete that is answered 200 with an error inside has failed."""
        store = folder.open(endpoint=proxy.url)
        upload = store.upload("a")
        upload.write_part(1, 0, pieces(b"1"))
        body = b"<Error><Code>InternalError</Code><Message>m</Message></Error>"
        proxy.faults = [Fault("status", on("POST", "uploadId"), status=200, body=body)]
        error = caught(upload.complete)
        assert (error.transient, error.ambiguous) == (True, True)
        upload.complete()
        assert folder.get("a") == b"1"


class TestListing:
    @pytest.mark.parametrize("operation", ["entries", "folders"])
    def test_second_page_fails(self, folder: Folder, proxy: FaultyHTTP, operation: str) -> None:
        """A listing whose second page fails raises; it is never the first page alone."""
        more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
        proxy.faults = [
            Fault("reply", on("GET"), status=200, body=LISTING % more),
            Fault("status", on("GET", "continuation-token=t")),
        ]
        assert caught(lambda: READS[operation](folder.open(endpoint=proxy.url))).transient
        assert len(proxy.seen) == 2

    def test_no_way_on(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A listing that says that it goes on, but not from where, raises."""
        body = LISTING % b"<IsTruncated>true</IsTruncated>"
        proxy.faults = [Fault("reply", on("GET"), status=200, body=body)]
        assert not caught(folder.open(endpoint=proxy.url).entries).transient

    def test_no_progress(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A listing that leads back to the same page raises instead of going round for ever."""
        more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
        proxy.faults = [Fault("reply", on("GET"), times=100, status=200, body=LISTING % more)]
        caught(folder.open(endpoint=proxy.url).entries)
        assert len(proxy.seen) == 2

    def test_cut(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A listing whose body is cut raises."""
        folder.set("a", b"1")
        proxy.faults = [Fault("cut", on("GET"))]
        assert caught(folder.open(endpoint=proxy.url).entries).transient

    def test_uploads_pages(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """The listing of uploads goes on from the marker that the server gives."""
        client = folder.server.client
        client.create_multipart_upload(Bucket=folder.bucket, Key="run/step-1/last")
        page = b"""<ListMultipartUploadsResult>
        <IsTruncated>true</IsTruncated><NextKeyMarker>run/step-1/first</NextKeyMarker>
        <Upload><Key>run/step-1/first</Key><UploadId>i</UploadId></Upload></ListMultipartUploadsResult>"""
        proxy.faults = [Fault("reply", on("GET", "uploads"), status=200, body=page)]
        found = folder.open(endpoint=proxy.url).open_uploads()
        assert [e.name for e in found] == ["first", "last"]
        assert found[0].modified is None
        folder.open().abort_uploads(["last"])

    def test_uploads_without_a_word_on_more(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """As rclone answers: no IsTruncated where nothing follows, and an error that knows of no upload, both whole."""
        page = b"""<ListMultipartUploadsResult><Bucket>%s</Bucket><MaxUploads>1000</MaxUploads>
        <Upload><Key>run/step-1/a</Key><UploadId>i</UploadId></Upload></ListMultipartUploadsResult>"""
        none = b"<Error><Code>NoSuchUpload</Code><Message>NoSuchUpload</Message></Error>"
        proxy.faults = [
            Fault("reply", on("GET", "uploads"), status=200, body=page % folder.bucket.encode()),
            Fault("reply", on("GET", "uploads"), status=404, body=none),
        ]
        store = folder.open(endpoint=proxy.url)
        assert [e.name for e in store.open_uploads()] == ["a"]
        assert store.open_uploads() == []

    @pytest.mark.parametrize(("told", "most"), [("another", 1000), ("", 1000), (None, 1)])
    def test_uploads_that_may_go_on(self, folder: Folder, proxy: FaultyHTTP, told: str | None, most: int) -> None:
        """Without IsTruncated an answer that is not of our bucket, or that is full, is no whole list: it raises."""
        named = (folder.bucket if told is None else told).encode()
        page = b"""<ListMultipartUploadsResult><Bucket>%s</Bucket><MaxUploads>%d</MaxUploads>
        <Upload><Key>run/step-1/a</Key><UploadId>i</UploadId></Upload></ListMultipartUploadsResult>"""
        proxy.faults = [Fault("reply", on("GET", "uploads"), status=200, body=page % (named, most))]
        assert caught(folder.open(endpoint=proxy.url).open_uploads).transient


class TestReads:
    @pytest.mark.parametrize("size", [1000, 3 * MIB])
    def test_cut_body(self, folder: Folder, proxy: FaultyHTTP, size: int) -> None:
        """A body that ends midway is transient, for read and read_into; the next try reads all."""
        data = os.urandom(size)
        folder.set("a", data)
        store = folder.open(endpoint=proxy.url)
        target = bytearray(size)
        proxy.faults = [Fault("cut", on("GET"), times=2)]
        assert caught(lambda: store.read("a", limit=size)).transient
        error = caught(lambda: store.read_into("a", 0, [memoryview(target)]))
        assert (error.transient, error.ambiguous) == (True, False)
        store.read_into("a", 0, [memoryview(target)])
        assert bytes(target) == data

    def test_short_body(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A body that is whole by its own Content-Length, but shorter than asked for, is not taken for the bytes."""
        headers = {"Content-Range": "bytes 0-9/10"}
        proxy.faults = [Fault("status", on("GET"), status=206, body=b"12345", headers=headers)]
        error = caught(
            lambda: folder.open(endpoint=proxy.url).read_into("a", 0, [memoryview(bytearray(10))]),
        )
        assert error.transient

    @pytest.mark.parametrize(
        ("status", "headers"),
        [(206, {"Content-Range": "bytes 0-4/10"}), (206, {}), (200, {})],
    )
    def test_other_bytes(self, folder: Folder, proxy: FaultyHTTP, status: int, headers: dict[str, str]) -> None:
        """An answer that does not begin at the offset asked for is refused."""
        proxy.faults = [Fault("status", on("GET"), status=status, body=b"12345", headers=headers)]
        target = bytearray(5)
        error = caught(lambda: folder.open(endpoint=proxy.url).read_into("a", 5, [memoryview(target)]))
        assert not error.transient
        assert bytes(target) == bytes(5)

    def test_nothing_to_read(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Reading no bytes and deleting no names send no request."""
        store = folder.open(endpoint=proxy.url)
        store.read_into("a", 0, [memoryview(bytearray(0))])
        store.read_into("a", 5, [])
        store.delete([])
        store.abort_uploads([])
        assert proxy.seen == []


class TestCreate:
    def test_lost_reply(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A create whose reply is lost is ambiguous, not a conflict with itself; the next one finds the object."""
        store = folder.open(endpoint=proxy.url)
        assert store.create_if_absent is Atomicity.ATOMIC
        proxy.faults = [Fault("lost reply", on("PUT", "step-1/c"))]
        error = caught(lambda: store.create("c", b"mine"))
        assert (error.transient, error.ambiguous) == (True, True)
        assert not isinstance(error, ObjectExistsError)
        with pytest.raises(ObjectExistsError):
            store.create("c", b"mine")
        assert folder.get("c") == b"mine"

    def test_conflict_in_progress(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A 409 says that another create is under way: it can be tried again, and nothing was written."""
        body = b"<Error><Code>ConditionalRequestConflict</Code><Message>m</Message></Error>"
        proxy.faults = [Fault("status", on("PUT"), status=409, body=body)]
        error = caught(lambda: folder.open(endpoint=proxy.url).create("c", b"1"))
        assert (error.transient, error.ambiguous) == (True, False)
        assert not isinstance(error, ObjectExistsError)

    @pytest.mark.parametrize(("status", "times"), [(200, 2), (501, 1)])
    def test_no_conditions(self, folder: Folder, proxy: FaultyHTTP, status: int, times: int) -> None:
        """Where the second create passes, or the header is unknown, it is NONE; create then looks before it writes."""
        folder.set("taken", b"old")
        store = folder.open(endpoint=proxy.url)
        proxy.faults = [Fault("status", on("PUT", ".claim."), times=times, status=status, body=b"")]
        assert store.create_if_absent is Atomicity.NONE
        assert [method for method, target in proxy.seen if ".claim." in target] == ["PUT"] * times + ["DELETE"]
        with pytest.raises(ObjectExistsError):
            store.create("taken", b"new")
        store.create("free", b"new")
        assert folder.get("taken") == b"old"
        assert folder.get("free") == b"new"

    def test_probed_once(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """All stores of one bucket and one set of options share one probe."""
        stores = [Folder(folder.server, folder.bucket, key).open(endpoint=proxy.url) for key in ("x", "y")]
        assert {store.create_if_absent for store in stores * 2} == {Atomicity.ATOMIC}
        assert len([target for method, target in proxy.seen if method == "PUT"]) == 2
        assert folder.keys() == []

    def test_failed_probe(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A probe that fails says so, leaves no scratch object, and is made again."""
        store = folder.open(endpoint=proxy.url)
        proxy.faults = [Fault("lost reply", on("PUT"))]
        assert caught(lambda: store.create_if_absent).transient
        assert folder.keys() == []
        assert store.create_if_absent is Atomicity.ATOMIC

    def test_looks_first_where_nothing_is_known(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Without a probe, behind an endpoint, create looks at the name before it writes."""
        folder.set("taken", b"old")
        with pytest.raises(ObjectExistsError):
            folder.open(endpoint=proxy.url).create("taken", b"new")
        assert [method for method, _ in proxy.seen] == ["HEAD"]


class TestUploads:
    def test_lost_complete(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A complete whose reply was lost is found to be done by the next call, and not done twice."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"), crc32=zlib.crc32(b"12"))
        proxy.faults = [Fault("lost reply", on("POST", "uploadId"))]
        error = caught(upload.complete)
        assert (error.transient, error.ambiguous) == (True, True)
        upload.complete()
        assert folder.get("a") == b"12"
        assert folder.uploads() == []

    @pytest.mark.parametrize(("status", "code"), [(404, "NoSuchUpload"), (500, "InternalError")])
    def test_second_complete(self, folder: Folder, proxy: FaultyHTTP, status: int, code: str) -> None:
        """Servers answer a second complete in their own ways; the object that is there decides."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        answer = f"<Error><Code>{code}</Code></Error>".encode()
        proxy.faults = [
            Fault("lost reply", on("POST", "uploadId")),
            Fault("status", on("POST", "uploadId"), status=status, body=answer),
        ]
        caught(upload.complete)
        upload.complete()
        assert folder.get("a") == b"12"

    def test_complete_tried_again_below(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Where the user lets botocore retry, an upload that is gone at our first complete is found to be done."""
        retries = {"config_kwargs": {"retries": {"total_max_attempts": 2, "mode": "standard"}}}
        upload = folder.open(retries, endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        answer = b"<Error><Code>NoSuchUpload</Code></Error>"
        proxy.faults = [
            Fault("lost reply", on("POST", "uploadId")),
            Fault("status", on("POST", "uploadId"), status=404, body=answer),
        ]
        upload.complete()
        assert folder.get("a") == b"12"

    @pytest.mark.parametrize("status", [404, 500])
    def test_complete_that_was_lost_on_its_way(self, folder: Folder, proxy: FaultyHTTP, status: int) -> None:
        """A complete that never arrived is not taken for done, whatever the next one is answered."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        answer = b"<Error><Code>NoSuchUpload</Code></Error>"
        proxy.faults = [
            Fault("lost request", on("POST", "uploadId")),
            Fault("status", on("POST", "uploadId"), status=status, body=answer),
        ]
        caught(upload.complete)
        caught(upload.complete)
        upload.abort()
        assert folder.uploads() == []

    def test_abort_after_a_lost_complete(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Abort takes away what a complete made whose reply was lost."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        proxy.faults = [Fault("lost reply", on("POST", "uploadId"))]
        caught(upload.complete)
        assert folder.keys() == ["run/step-1/a"]
        upload.abort()
        assert folder.keys() == []

    def test_abort_before_any_complete(self, folder: Folder) -> None:
        """Abort of an upload that was never completed leaves an object that was there before."""
        folder.set("a", b"old")
        upload = folder.open().upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        upload.abort()
        assert folder.get("a") == b"old"

    @pytest.mark.parametrize("ending", ["complete", "abort"])
    def test_lost_begin(self, folder: Folder, proxy: FaultyHTTP, ending: str) -> None:
        """An upload whose beginning was answered into the void is ended by complete and by abort."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        proxy.faults = [Fault("lost reply", on("POST", "?uploads"))]
        caught(lambda: upload.write_part(1, 0, pieces(b"12")))
        assert folder.uploads() == ["run/step-1/a"]
        upload.write_part(1, 0, pieces(b"12"))
        assert len(folder.uploads()) == 2
        upload.complete() if ending == "complete" else upload.abort()
        assert folder.uploads() == []
        assert folder.keys() == (["run/step-1/a"] if ending == "complete" else [])

    def test_lost_part(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A part whose reply was lost is ambiguous and can be sent again."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        proxy.faults = [Fault("lost reply", on("PUT", "partNumber"))]
        assert caught(lambda: upload.write_part(1, 0, pieces(b"12"))).ambiguous
        upload.write_part(1, 0, pieces(b"12"))
        upload.complete()
        assert folder.get("a") == b"12"

    @pytest.mark.parametrize(("first", "sent"), [(True, 2), (False, 0)])
    def test_crcs_of_some_parts(self, folder: Folder, proxy: FaultyHTTP, first: bool, sent: int) -> None:
        """S3 wants a CRC of every part or of none: the first part decides, and what is missing is made."""
        head, tail = os.urandom(5 * MIB), b"tail"
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(head), crc32=zlib.crc32(head) if first else None)
        upload.write_part(2, len(head), [memoryview(tail)[:1], memoryview(tail)[1:]], crc32=None if first else 1)
        upload.complete()
        assert folder.get("a") == head + tail
        crcs = [headers["x-amz-checksum-crc32"] for headers in proxy.headers if "x-amz-checksum-crc32" in headers]
        wanted = [base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode() for data in (head, tail)]
        assert crcs == wanted[:sent]

    def test_failed_abort(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """An abort that fails raises, and ends the upload when it is called again."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        proxy.faults = [Fault("status", on("DELETE"), times=2)]
        assert caught(upload.abort).transient
        upload.abort()
        assert folder.uploads() == []

    @pytest.mark.parametrize("status", [405, 501])
    def test_no_listing_of_uploads(self, folder: Folder, proxy: FaultyHTTP, status: int) -> None:
        """Where the server cannot list uploads, abort ends the one it knows; open_uploads says that it cannot tell."""
        store = folder.open(endpoint=proxy.url)
        upload = store.upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        proxy.faults = [Fault("status", on("GET", "uploads"), times=100, status=status)]
        upload.abort()
        assert folder.uploads() == []
        assert caught(store.open_uploads).errno == errno.EOPNOTSUPP

    def test_conflict_on_complete(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """A 409 on complete cannot be helped by completing again: AWS wants all parts sent again."""
        upload = folder.open(endpoint=proxy.url).upload("a")
        upload.write_part(1, 0, pieces(b"12"))
        proxy.faults = [Fault("status", on("POST", "uploadId"), status=409)]
        assert not caught(upload.complete).transient
        upload.abort()
        assert folder.uploads() == []


class TestDelete:
    def test_tries_all(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Where one delete fails the others are made all the same, and the error names the one."""
        store = folder.open(endpoint=proxy.url)
        names = [f"n{i:02d}" for i in range(30)]
        for name in names:
            store.put(name, pieces(b"1"))
        proxy.faults = [Fault("status", on("DELETE", "step-1/n01"))]
        error = caught(lambda: store.delete(names))
        assert (error.key, error.transient) == ("n01", True)
        assert folder.keys() == ["run/step-1/n01"]

    def test_the_lasting_failure_first(self, folder: Folder, proxy: FaultyHTTP) -> None:
        """Of a failure that may pass and one that will not, the second is raised."""
        denied = b"<Error><Code>AccessDenied</Code></Error>"
        proxy.faults = [
            Fault("status", on("DELETE", "step-1/a")),
            Fault("status", on("DELETE", "step-1/b"), status=403, body=denied),
        ]
        error = caught(lambda: folder.open(endpoint=proxy.url).delete(["a", "b"]))
        assert (error.key, error.transient) == ("b", False)
