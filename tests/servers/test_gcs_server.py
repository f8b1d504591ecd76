"""The strict GCS server against what Google publishes of the JSON API, by plain requests and by the real gcsfs."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import google_crc32c
import pytest
from gcsfs.core import GCSFileSystem

from dcp_storage.testing.proxy import Proxy
from tests.servers.gcs import GcsServer, Hook, gcs_server

pytestmark = pytest.mark.leaves_uploads("the server itself is tested: sessions are begun to see what it says of them")

KIB_256 = 256 * 1024
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    """One server for the module."""
    with gcs_server() as running:
        yield running


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Any  # by name in any case, None for one that is not there
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        reason: str = self.json["error"]["errors"][0]["reason"]
        return reason


@dataclass(frozen=True)
class Client:
    """A bucket and plain requests to it."""

    server: GcsServer
    bucket: str

    def ask(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answered:
        connection = http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=20)
        try:
            connection.request(method, target, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return Answered(response.status, response.headers, response.read())
        finally:
            connection.close()

    def at(self, name: str, tail: str = "", **params: Any) -> str:
        query = f"?{urlencode(params)}" if params else ""
        return f"/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}{tail}{query}"

    def media(self, name: str, data: bytes, headers: Mapping[str, str] | None = None, **params: Any) -> Answered:
        query = urlencode({"uploadType": "media", "name": name, **params})
        return self.ask("POST", f"/upload/storage/v1/b/{self.bucket}/o?{query}", data, headers)

    def multipart(self, resource: Mapping[str, object], data: bytes, **params: Any) -> Answered:
        query = urlencode({"uploadType": "multipart", **params})
        head = f"--xx\r\nContent-Type: application/json\r\n\r\n{json.dumps(resource)}\r\n--xx\r\n\r\n".encode()
        return self.ask(
            "POST",
            f"/upload/storage/v1/b/{self.bucket}/o?{query}",
            head + data + b"\r\n--xx--\r\n",
            {"Content-Type": "multipart/related; boundary=xx"},
        )

    def begin(self, name: str, resource: Mapping[str, object] | None = None, **params: Any) -> Answered:
        query = urlencode({"uploadType": "resumable", "name": name, **params})
        body = json.dumps(resource or {}).encode()
        return self.ask("POST", f"/upload/storage/v1/b/{self.bucket}/o?{query}", body)

    def session(self, name: str, resource: Mapping[str, object] | None = None, **params: Any) -> str:
        location: str = self.begin(name, resource, **params).headers["Location"]
        return location.removeprefix(self.server.url)

    def chunk(
        self, session: str, data: bytes, content_range: str, headers: Mapping[str, str] | None = None
    ) -> Answered:
        return self.ask("PUT", session, data, {"Content-Range": content_range, **(headers or {})})

    def get(self, name: str, range_: str | None = None, **params: Any) -> Answered:
        headers = {} if range_ is None else {"Range": range_}
        return self.ask("GET", self.at(name, alt="media", **params), headers=headers)

    def listing(self, **params: Any) -> Answered:
        return self.ask("GET", f"/storage/v1/b/{self.bucket}/o?{urlencode(params)}")

    def compose(self, name: str, sources: list[Any], **params: Any) -> Answered:
        return self.ask("POST", self.at(name, "/compose", **params), json.dumps({"sourceObjects": sources}).encode())


@pytest.fixture
def client(server: GcsServer) -> Client:
    """A new bucket on a server without faults."""
    server.hooks, server.tokens = [], None
    name = f"bucket-{secrets.token_hex(6)}"
    server.make_bucket(name)
    return Client(server, name)


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


class TestBuckets:
    def test_insert_and_get(self, client: Client) -> None:
        """A bucket can be made once (409 then), asked for, and one that is missing is 404 for every verb."""
        assert client.ask("POST", "/storage/v1/b?project=p", b'{"name": "another-one"}').json["name"] == "another-one"
        assert client.ask("POST", "/storage/v1/b?project=p", b'{"name": "another-one"}').status == 409
        assert client.ask("POST", "/storage/v1/b?project=p", b'{"name": "No"}').status == 400
        assert client.ask("GET", "/storage/v1/b/another-one").json["kind"] == "storage#bucket"
        missing = Client(client.server, "missing-bucket")
        answers = [missing.media("a", b"1"), missing.begin("a"), missing.listing(), missing.get("a")]
        assert [answer.status for answer in answers] == [404] * 4

    def test_unknown(self, client: Client) -> None:
        """An unknown path is 404, a known one with a wrong verb 405, and errors have code and reason."""
        assert client.ask("GET", "/storage/v1/nothing").status == 404
        answer = client.ask("DELETE", "/storage/v1/b")
        assert (answer.status, answer.json["error"]["code"], answer.reason) == (405, 405, "methodNotAllowed")


class TestObjects:
    def test_resource(self, client: Client) -> None:
        """The resource has size as text, generation, metageneration, times and both hashes."""
        data = b"123456789"
        made = client.media("a/b", data, {"Content-Type": "text/plain"}).json
        assert client.ask("GET", client.at("a/b")).json == made
        assert (made["name"], made["bucket"], made["size"]) == ("a/b", client.bucket, "9")
        assert made["crc32c"] == "4waSgw=="  # E3069283, the check value of CRC-32C
        assert made["md5Hash"] == md5(data)
        assert (made["metageneration"], made["contentType"]) == ("1", "text/plain")
        assert int(made["generation"]) > 0
        assert (
            abs(time.mktime(time.strptime(made["updated"][:19], "%Y-%m-%dT%H:%M:%S")) - time.mktime(time.gmtime())) < 5
        )
        assert made["timeCreated"] == made["updated"]

    def test_generations_grow(self, client: Client) -> None:
        """Each write is a new, greater generation; a patch counts the metageneration on."""
        first, second = (int(client.media("a", b"1").json["generation"]) for _ in range(2))
        assert second > first
        patched = client.ask("PATCH", client.at("a"), b'{"metadata": {"k": "v"}}').json
        assert (patched["generation"], patched["metageneration"]) == (str(second), "2")
        assert patched["metadata"] == {"k": "v"}

    def test_media_headers(self, client: Client) -> None:
        """A download carries x-goog-hash, generation and a Date of now."""
        made = client.media("a", b"123").json
        answer = client.get("a")
        assert answer.headers["x-goog-hash"] == f"crc32c={crc32c(b'123')},md5={md5(b'123')}"
        assert answer.headers["x-goog-generation"] == made["generation"]
        assert abs(parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()) < 3

    @pytest.mark.parametrize(
        ("asked", "status", "body", "content_range"),
        [
            (None, 200, b"0123456789", None),
            ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
            ("bytes=8-", 206, b"89", "bytes 8-9/10"),
            ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
            ("bytes=-3", 206, b"789", "bytes 7-9/10"),
            ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
            ("bytes=4-2", 200, b"0123456789", None),
            ("bytes=10-", 416, None, "bytes */10"),
            ("bytes=-0", 416, None, "bytes */10"),
        ],
    )
    def test_ranges(
        self, client: Client, asked: str | None, status: int, body: bytes | None, content_range: str | None
    ) -> None:
        """Ranges are answered 206 with their place, beyond the end 416 with the size (RFC 9110)."""
        client.media("a", b"0123456789")
        answer = client.get("a", asked)
        assert (answer.status, answer.headers["Content-Range"]) == (status, content_range)
        assert body is None or answer.body == body

    def test_delete(self, client: Client) -> None:
        """A delete answers 204, a second one 404, and one of another generation 404."""
        made = client.media("a", b"1").json
        assert client.ask("DELETE", client.at("a", generation=int(made["generation"]) + 1)).status == 404
        answers = [client.ask("DELETE", client.at("a", generation=made["generation"])) for _ in range(2)]
        assert [answer.status for answer in answers] == [204, 404]

    @pytest.mark.parametrize("name", ["a/b", "a b", "%41", "a%2Fb", "?", "#", "日本", "a+b", "[1]*"])
    def test_odd_names(self, client: Client, name: str) -> None:
        """Every character of a name counts as itself."""
        assert client.media(name, name.encode()).json["name"] == name
        assert client.get(name).body == name.encode()
        assert [item["name"] for item in client.listing().json["items"]] == [name]


class TestHashes:
    def test_multipart(self, client: Client) -> None:
        """Right hashes in the resource are taken, wrong or malformed ones refused with 400, and nothing is written."""
        data = b"\r\n--x\n\n--yx\x00\r\n\r\n-xx" * 5
        good = client.multipart({"name": "a", "crc32c": crc32c(data), "md5Hash": md5(data)}, data)
        assert (good.status, client.get("a").body) == (200, data)
        for wrong in ({"crc32c": crc32c(b"?")}, {"md5Hash": md5(b"?")}, {"crc32c": "!"}, {"crc32c": 7}):
            answer = client.multipart({"name": "b", **wrong}, data)
            assert (answer.status, answer.reason) == (400, "invalid")
        assert client.get("b").status == 404

    def test_header(self, client: Client) -> None:
        """x-goog-hash of a media upload is held against the bytes."""
        assert client.media("a", b"1", {"x-goog-hash": f"crc32c={crc32c(b'1')},md5={md5(b'1')}"}).status == 200
        assert client.media("b", b"1", {"x-goog-hash": f"crc32c={crc32c(b'2')}"}).status == 400
        assert client.media("b", b"1", {"x-goog-hash": f"md5={md5(b'2')}"}).status == 400
        assert client.get("b").status == 404

    def test_resumable(self, client: Client) -> None:
        """Hashes given when a session began, or with the last chunk, are held against all its bytes."""
        session = client.session("a", {"crc32c": crc32c(b"right")})
        assert client.chunk(session, b"wrong", "bytes 0-4/5").status == 400
        assert (
            client.chunk(client.session("a"), b"wrong", "bytes 0-4/5", {"x-goog-hash": "crc32c=AAAAAA=="}).status == 400
        )
        assert client.get("a").status == 404
        session = client.session("a", {"crc32c": crc32c(b"right"), "md5Hash": md5(b"right")})
        assert client.chunk(session, b"right", "bytes 0-4/5").status == 200


class TestPreconditions:
    """Each verb with each precondition: what holds is done; what does not is 412, or 304 for reads."""

    def changes(self, client: Client, name: str, params: Mapping[str, object]) -> dict[str, int]:
        """The status of every verb that writes under ``name``, each on an object in the same state."""
        there = client.get(name).status == 200
        statuses = {}
        for verb in ("media", "multipart", "begin", "compose", "copyTo", "rewriteTo", "moveTo", "patch", "delete"):
            current = client.ask("GET", client.at(name)).json.get("generation", 0)
            asked: dict[str, Any] = {key: (current if value == "live" else value) for key, value in params.items()}
            client.media("source", b"source")
            if verb == "media":
                answer = client.media(name, b"new", **asked)
            elif verb == "multipart":
                answer = client.multipart({"name": name}, b"new", **asked)
            elif verb == "begin":
                answer = client.begin(name, **asked)
            elif verb == "compose":
                answer = client.compose(name, [{"name": "source"}], **asked)
            elif verb in ("copyTo", "rewriteTo", "moveTo"):
                bucket = "" if verb == "moveTo" else f"/b/{client.bucket}"
                tail = f"/{verb}{bucket}/o/{quote(name, safe='')}"
                answer = client.ask("POST", client.at("source", tail, **asked), b"{}")
            elif verb == "patch":
                answer = client.ask("PATCH", client.at(name, **asked), b"{}")
            else:
                answer = client.ask("DELETE", client.at(name, **asked))
            statuses[verb] = answer.status
            if there:
                client.media(name, b"old")
            else:
                client.ask("DELETE", client.at(name))
        return statuses

    @pytest.mark.parametrize(
        ("params", "there", "missing"),
        [
            ({"ifGenerationMatch": 0}, 412, 200),
            ({"ifGenerationMatch": "live"}, 200, None),
            ({"ifGenerationMatch": 7}, 412, 412),
            ({"ifGenerationNotMatch": 0}, 200, 412),
            ({"ifGenerationNotMatch": "live"}, 412, None),
            ({"ifGenerationNotMatch": 7}, 200, 200),
            ({"ifMetagenerationMatch": 1}, 200, 412),
            ({"ifMetagenerationMatch": 2}, 412, 412),
            ({"ifMetagenerationNotMatch": 1}, 412, 412),
            ({"ifGenerationMatch": "x"}, 400, 400),
        ],
    )
    def test_writes(self, client: Client, params: Mapping[str, object], there: int, missing: int | None) -> None:
        """On every verb that writes, where the object is there and where it is not."""
        client.media("a", b"old")
        found = self.changes(client, "a", params)
        assert {verb: 200 if status == 204 else status for verb, status in found.items()} == dict.fromkeys(found, there)
        if missing is not None:
            found = self.changes(client, "none", params)
            wanted = dict.fromkeys(found, missing)
            # Without an object there is nothing to patch or delete, whatever the condition.
            assert found == {**wanted, "patch": 404, "delete": 404}

    def test_reads(self, client: Client) -> None:
        """A read whose Match fails is 412, whose NotMatch fails 304, in both forms."""
        generation = client.media("a", b"1").json["generation"]
        for target in (client.at("a"), client.at("a", alt="media")):
            more = "&" if "?" in target else "?"
            for query, status in (
                (f"ifGenerationMatch={generation}", 200),
                ("ifGenerationMatch=7", 412),
                (f"ifGenerationNotMatch={generation}", 304),
                ("ifGenerationNotMatch=7", 200),
                ("ifMetagenerationMatch=2", 412),
                ("ifMetagenerationNotMatch=1", 304),
                ("generation=7", 404),
            ):
                assert client.ask("GET", f"{target}{more}{query}").status == status

    def test_end_of_a_resumable_upload(self, client: Client) -> None:
        """A precondition that held at the beginning is checked again at the end; the object that came first stays."""
        session = client.session("a", ifGenerationMatch=0)
        client.media("a", b"first")
        answer = client.chunk(session, b"late", "bytes 0-3/4")
        assert (answer.status, answer.reason, client.get("a").body) == (412, "conditionNotMet", b"first")

    def test_sources(self, client: Client) -> None:
        """Preconditions on the source of a copy and on the sources of a compose."""
        generation = client.media("source", b"1").json["generation"]
        tail = f"/copyTo/b/{client.bucket}/o/a"
        assert client.ask("POST", client.at("source", tail, ifSourceGenerationMatch=7), b"{}").status == 412
        assert client.ask("POST", client.at("source", tail, ifSourceGenerationMatch=generation), b"{}").status == 200
        pinned = {"name": "source", "objectPreconditions": {"ifGenerationMatch": "7"}}
        assert client.compose("b", [pinned]).status == 412
        assert client.compose("b", [{"name": "source", "generation": "7"}]).status == 404
        assert client.compose("b", [{"name": "source", "generation": generation}]).status == 200


class TestResumable:
    def test_three_chunks(self, client: Client) -> None:
        """Two chunks of 256 KiB are answered 308 with what is kept, the last one 200; nothing shows before."""
        data = secrets.token_bytes(2 * KIB_256 + 77)
        session = client.session("a")
        for number in (0, 1):
            start = number * KIB_256
            answer = client.chunk(session, data[start : start + KIB_256], f"bytes {start}-{start + KIB_256 - 1}/*")
            assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{start + KIB_256 - 1}")
            assert client.get("a").status == 404
        size = len(data)
        answer = client.chunk(session, data[2 * KIB_256 :], f"bytes {2 * KIB_256}-{size - 1}/{size}")
        assert (answer.status, answer.json["size"], client.get("a").body) == (200, str(size), data)
        assert client.chunk(session, b"", f"bytes */{size}").json == answer.json

    def test_one_request(self, client: Client) -> None:
        """All bytes at once, with or without Content-Range; and an empty object."""
        assert client.ask("PUT", client.session("a"), b"12345").status == 200
        assert client.chunk(client.session("b"), b"12345", "bytes 0-4/5").status == 200
        assert client.chunk(client.session("c"), b"", "bytes */0").status == 200
        assert [client.get(name).body for name in "abc"] == [b"12345", b"12345", b""]

    def test_status(self, client: Client) -> None:
        """A query is 308: without Range while nothing is kept, then with it; at an unknown size too."""
        session = client.session("a")
        answer = client.chunk(session, b"", "bytes */*")
        assert (answer.status, answer.headers["Range"]) == (308, None)
        client.chunk(session, bytes(KIB_256), f"bytes 0-{KIB_256 - 1}/{MIB}")
        answer = client.chunk(session, b"", f"bytes */{MIB}")
        assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{KIB_256 - 1}")

    def test_size_said_at_last(self, client: Client) -> None:
        """An upload of unknown size ends when its size is said and all is kept."""
        session = client.session("a")
        client.chunk(session, bytes(KIB_256), f"bytes 0-{KIB_256 - 1}/*")
        assert client.chunk(session, b"", f"bytes */{KIB_256}").status == 200
        assert client.get("a").body == bytes(KIB_256)

    @pytest.mark.parametrize(
        ("data", "content_range"),
        [
            (bytes(1000), "bytes 0-999/*"),
            (bytes(KIB_256 + 1), f"bytes 0-{KIB_256}/{MIB}"),
            (bytes(KIB_256), f"bytes {KIB_256}-{2 * KIB_256 - 1}/{MIB}"),
            (bytes(5), "bytes 0-5/6"),
            (bytes(5), "bytes 0-4/3"),
            (bytes(5), "bytes=0-4/5"),
            (bytes(5), "bytes */5"),
        ],
    )
    def test_broken_rules(self, client: Client, data: bytes, content_range: str) -> None:
        """Odd chunk sizes, a gap, a wrong length, a reach beyond the end, nonsense: 400, and nothing is kept."""
        session = client.session("a")
        assert client.chunk(session, data, content_range).status == 400
        assert client.chunk(session, b"", "bytes */*").headers["Range"] is None

    def test_overlap(self, client: Client) -> None:
        """Bytes at offsets that are kept already are ignored."""
        session = client.session("a")
        client.chunk(session, b"a" * KIB_256, f"bytes 0-{KIB_256 - 1}/*")
        assert client.chunk(session, b"b" * (KIB_256 + 1), f"bytes 0-{KIB_256}/{KIB_256 + 1}").status == 200
        assert client.get("a").body == b"a" * KIB_256 + b"b"

    def test_another_size(self, client: Client) -> None:
        """The size of an upload cannot change."""
        session = client.session("a")
        client.chunk(session, bytes(KIB_256), f"bytes 0-{KIB_256 - 1}/{MIB}")
        assert client.chunk(session, b"", f"bytes */{2 * MIB}").status == 400

    def test_cancel(self, client: Client) -> None:
        """Cancelling answers 499; the session is then gone, and so is a second cancel."""
        session = client.session("a")
        client.chunk(session, bytes(KIB_256), f"bytes 0-{KIB_256 - 1}/*")
        assert client.ask("DELETE", session).status == 499
        assert client.chunk(session, b"", "bytes */*").status == 410
        assert client.ask("DELETE", session).status == 410
        assert client.get("a").status == 404
        assert client.ask("PUT", session.replace("upload_id=", "upload_id=x"), b"1").status == 404

    def test_cut_chunk(self, client: Client) -> None:
        """Of a chunk whose connection breaks, whole 256 KiB are kept, and the upload goes on from there."""
        data = secrets.token_bytes(MIB)
        session = client.session("a")
        head = f"PUT {session} HTTP/1.1\r\nHost: x\r\nContent-Length: {MIB}\r\n"
        head += f"Content-Range: bytes 0-{MIB - 1}/{MIB}\r\n\r\n"
        parts = urlsplit(client.server.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as raw:
            raw.sendall(head.encode() + data[:600_000])
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(10) == b""
        answer = client.chunk(session, b"", f"bytes */{MIB}")
        assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{2 * KIB_256 - 1}")
        rest = f"bytes {2 * KIB_256}-{MIB - 1}/{MIB}"
        assert client.chunk(session, data[2 * KIB_256 :], rest).status == 200
        assert client.get("a").body == data

    def test_open_sessions(self, client: Client) -> None:
        """The server's own list of sessions has those that neither ended nor were cancelled."""
        open_one, ended, cancelled = (client.session(name) for name in ("open", "ended", "cancelled"))
        client.ask("PUT", ended, b"1")
        client.ask("DELETE", cancelled)
        assert [name for name in client.server.open_sessions() if name in ("open", "ended", "cancelled")] == ["open"]
        client.ask("DELETE", open_one)


class TestListing:
    NAMES = ("a", "a/1", "a/2/x", "a/2/y", "a/3", "b", "c/", "ü")

    @pytest.fixture
    def client(self, client: Client) -> Client:
        for name in self.NAMES:
            client.server.set(client.bucket, name, b"1")
        return client

    def pages(self, client: Client, **params: Any) -> tuple[list[str], list[str], int]:
        names, prefixes, count, token = [], [], 0, None
        while True:
            page = client.listing(**params, **({"pageToken": token} if token else {})).json
            names += [item["name"] for item in page.get("items", ())]
            prefixes += page.get("prefixes", [])
            count += 1
            token = page.get("nextPageToken")
            if token is None:
                return names, prefixes, count

    @pytest.mark.parametrize("size", [1, 2, 3, 1000])
    def test_pages(self, client: Client, size: int) -> None:
        """Pages of any size list every name once, in the order of bytes; prefixes count with the names."""
        assert self.pages(client, maxResults=size) == (list(self.NAMES), [], -(-len(self.NAMES) // size))
        names, prefixes, count = self.pages(client, maxResults=size, prefix="a/", delimiter="/")
        assert (names, prefixes, count) == (["a/1", "a/3"], ["a/2/"], -(-3 // size))
        names, prefixes, _ = self.pages(client, maxResults=size, delimiter="/")
        assert (names, prefixes) == (["a", "b", "ü"], ["a/", "c/"])

    def test_offsets(self, client: Client) -> None:
        """The name at startOffset is listed first, the one at endOffset comes after the last."""
        assert self.pages(client, startOffset="a/2/y", endOffset="c/")[0] == ["a/2/y", "a/3", "b"]

    def test_refusals(self, client: Client) -> None:
        """A foreign page token and a size of nothing are 400."""
        assert client.listing(pageToken="bm90IG91cnM=").status == 400
        assert client.listing(pageToken="!").status == 400
        assert client.listing(maxResults=0).status == 400

    def test_fields(self, client: Client) -> None:
        """What is sent is what ``fields`` asks for."""
        page = client.listing(fields="nextPageToken,items(name,size)", maxResults=1).json
        assert page["items"] == [{"name": "a", "size": "1"}]
        assert set(page) == {"items", "nextPageToken"}

    def test_no_more_than_1000(self, client: Client) -> None:
        """A page has 1,000 names at most, also where more are asked for."""
        for number in range(1001):
            client.server.set(client.bucket, f"m{number:04d}", b"")
        assert len(client.listing(prefix="m", maxResults=5000).json["items"]) == 1000
        assert self.pages(client, prefix="m")[2] == 2


class TestCompose:
    def test_order_and_checksums(self, client: Client) -> None:
        """The sources' bytes in their order; CRC-32C and component count, but no MD5; the sources stay."""
        for name, data in (("a", b"123"), ("b", b"4567"), ("c", b"89")):
            client.media(name, data)
        made = client.compose("sum", [{"name": name} for name in "abc"]).json
        assert client.get("sum").body == b"123456789"
        assert (made["crc32c"], made["componentCount"], "md5Hash" in made) == ("4waSgw==", 3, False)
        again = client.compose("sum", [{"name": "sum"}, {"name": "sum"}]).json
        assert (again["componentCount"], again["size"]) == (6, "18")
        assert client.get("a").body == b"123"
        assert client.get("sum").headers["x-goog-hash"] == f"crc32c={again['crc32c']}"

    @pytest.mark.parametrize(("count", "status"), [(0, 400), (1, 200), (32, 200), (33, 400)])
    def test_how_many(self, client: Client, count: int, status: int) -> None:
        """One to 32 sources."""
        client.media("a", b"1")
        assert client.compose("sum", [{"name": "a"}] * count).status == status

    def test_missing_source(self, client: Client) -> None:
        """A missing source is 404, and nothing is made."""
        client.media("a", b"1")
        assert client.compose("sum", [{"name": "a"}, {"name": "none"}]).status == 404
        assert client.get("sum").status == 404


class TestCopies:
    def test_copy(self, client: Client) -> None:
        """A copy has the same bytes and a generation of its own."""
        made = client.media("a", b"123").json
        copy = client.ask("POST", client.at("a", f"/copyTo/b/{client.bucket}/o/x%2Fb"), b"{}").json
        assert (copy["name"], copy["crc32c"]) == ("x/b", made["crc32c"])
        assert copy["generation"] != made["generation"]

    def test_rewrite(self, client: Client) -> None:
        """A rewrite in steps hands out tokens and shows nothing before the last one."""
        data = secrets.token_bytes(2 * MIB + 5)
        client.media("a", data)
        tail = f"/rewriteTo/b/{client.bucket}/o/b"
        token: dict[str, str] = {}
        done = []
        for _ in range(3):
            answer = client.ask("POST", client.at("a", tail, maxBytesRewrittenPerCall=MIB, **token), b"{}").json
            done.append((answer["done"], int(answer["totalBytesRewritten"])))
            token = {"rewriteToken": answer.get("rewriteToken", "")}
            assert client.get("b").status == (200 if answer["done"] else 404)
        assert done == [(False, MIB), (False, 2 * MIB), (True, len(data))]
        assert client.get("b").body == data
        assert client.ask("POST", client.at("a", tail, rewriteToken="x"), b"{}").status == 400
        assert client.ask("POST", client.at("a", tail, maxBytesRewrittenPerCall=5), b"{}").status == 400

    def test_move(self, client: Client) -> None:
        """A move takes the object away from its old name, in its bucket, and over what was there, unless forbidden."""
        client.media("a b", b"new")
        client.media("x/b", b"old")
        tail = f"/moveTo/o/{quote('x/b', safe='')}"
        assert client.ask("POST", client.at("a b", tail, ifGenerationMatch=0), b"{}").status == 412
        assert client.ask("POST", client.at("a b", tail, ifSourceGenerationMatch=1), b"{}").status == 412
        assert (client.get("a b").body, client.get("x/b").body) == (b"new", b"old")
        answer = client.ask("POST", client.at("a b", tail), b"{}")
        assert (answer.status, answer.json["name"]) == (200, "x/b")
        assert (client.get("a b").status, client.get("x/b").body) == (404, b"new")
        assert client.ask("POST", client.at("a b", tail), b"{}").status == 404


class TestBatch:
    def test_each_part_has_its_answer(self, client: Client) -> None:
        """Calls in a batch are answered one by one under their Content-ID; uploads cannot be batched."""
        client.media("a b", b"1")
        calls = [
            f"DELETE {client.at('a b')} HTTP/1.1\n\n",
            f"DELETE {client.at('a b')} HTTP/1.1\n\n",
            f"PATCH {client.at('none')} HTTP/1.1\nContent-Type: application/json\n\n{{}}",
            f"POST /upload/storage/v1/b/{client.bucket}/o?uploadType=media&name=x HTTP/1.1\n\n1",
        ]
        body = "".join(
            f"--==\nContent-Type: application/http\nContent-ID: <id+{number}>\n\n{call}\n"
            for number, call in enumerate(calls)
        )
        kind = {"Content-Type": 'multipart/mixed; boundary="=="'}
        answer = client.ask("POST", "/batch/storage/v1", (body + "--==--").encode(), kind)
        text = answer.body.decode()
        assert [line.split()[1] for line in text.splitlines() if line.startswith("HTTP/")] == [
            "204",
            "404",
            "404",
            "400",
        ]
        assert [f"<response-id+{number}>" in text for number in range(4)] == [True] * 4
        assert client.get("x").status == 404


class TestFaults:
    def test_hooks(self, client: Client) -> None:
        """Lost requests are not done, lost replies are; a status is answered instead; each as often as it says."""
        client.server.hooks = [Hook("lost request"), Hook("lost reply", times=1), Hook("status", times=2)]
        for _ in range(2):
            with pytest.raises(http.client.RemoteDisconnected):
                client.media("a", b"1")
        assert [client.media("b", b"1").status for _ in range(3)] == [503, 503, 200]
        assert client.server.names(client.bucket) == ["a", "b"]

    def test_cut_replies_and_requests(self, client: Client) -> None:
        """A cut reply is shorter than it says; of half a request nothing is done."""
        client.media("a", b"1234")
        client.server.hooks = [Hook("cut reply", lambda method, target: method == "GET")]
        with pytest.raises(http.client.IncompleteRead):
            client.get("a")
        client.server.hooks = [Hook("half request")]
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            client.media("b", b"1234")
        assert client.server.names(client.bucket) == ["a"]

    def test_delay(self, client: Client) -> None:
        """A delayed request is done all the same."""
        client.server.hooks = [Hook("delay", seconds=0.3)]
        before = time.monotonic()
        assert client.media("a", b"1").status == 200
        assert time.monotonic() - before >= 0.3

    def test_tokens(self, client: Client) -> None:
        """With a set of tokens only requests that carry one of them are taken."""
        client.server.tokens = {"good"}
        assert client.ask("GET", client.at("a"), headers={"Authorization": "Bearer bad"}).reason == "authError"
        assert client.ask("GET", client.at("a"), headers={"Authorization": "Bearer good"}).status == 404

    def test_log(self, client: Client) -> None:
        """Every request is noted with its verb and its target."""
        before = client.server.count("POST", client.bucket)
        client.media("a", b"1")
        assert client.server.seen[-1] == ("POST", f"/upload/storage/v1/b/{client.bucket}/o?uploadType=media&name=a")
        assert client.server.count("POST", client.bucket) == before + 1


class TestGcsfs:
    """The real gcsfs on the server."""

    @pytest.fixture
    def filesystem(self, client: Client) -> GCSFileSystem:
        return GCSFileSystem(**client.server.storage_options, cache_timeout=0, skip_instance_cache=True)

    def test_files(self, client: Client, filesystem: GCSFileSystem) -> None:
        """Whole files, ranges, listings, copies and removals."""
        root = f"{client.bucket}/run"
        filesystem.pipe({f"{root}/a": b"12345", f"{root}/b [1]": b"6"})
        assert filesystem.cat_file(f"{root}/a", 1, 3) == b"23"
        assert filesystem.ls(root, detail=False) == [f"{root}/a", f"{root}/b [1]"]
        assert filesystem.info(f"{root}/a")["size"] == 5
        filesystem.copy(f"{root}/a", f"{root}/c")
        filesystem.merge(f"{root}/sum", [f"{root}/a", f"{root}/c"])
        assert filesystem.cat(f"{root}/sum") == b"1234512345"
        filesystem.rm([f"{root}/a", f"{root}/c", f"{root}/sum"])
        assert client.server.names(client.bucket) == ["run/b [1]"]

    def test_create(self, client: Client, filesystem: GCSFileSystem) -> None:
        """mode="create" refuses a taken name, in one request and through a resumable upload of three chunks."""
        data = secrets.token_bytes(2 * KIB_256 + 7)

        def write(mode: str, content: bytes) -> None:
            with filesystem.open(f"{client.bucket}/big", mode, block_size=KIB_256) as file:
                for start in range(0, len(content), KIB_256):
                    file.write(content[start : start + KIB_256])

        write("xb", data)
        assert client.server.count("POST", "upload_id") == 3
        assert client.get("big").body == data
        with pytest.raises(FileExistsError):
            write("xb", bytes(len(data)))
        with pytest.raises(FileExistsError):
            filesystem.pipe_file(f"{client.bucket}/big", b"1", mode="create")
        assert client.get("big").body == data
        assert "big" not in client.server.open_sessions()

    def test_through_a_proxy(self, client: Client) -> None:
        """A resumable upload stays on the way on which it began: each byte of it goes through the proxy."""
        data = secrets.token_bytes(3 * KIB_256 + 7)
        with Proxy(client.server.url) as proxy:
            options = {**client.server.storage_options, "endpoint_url": proxy.url}
            filesystem = GCSFileSystem(**options, skip_instance_cache=True)
            with filesystem.open(f"{client.bucket}/big", "wb", block_size=KIB_256) as file:
                for start in range(0, len(data), KIB_256):
                    file.write(data[start : start + KIB_256])
            assert proxy.bytes_up >= len(data)
        assert client.get("big").body == data
