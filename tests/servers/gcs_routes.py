"""The JSON API of the strict GCS server: one request in, one reply out, under one lock."""

from __future__ import annotations

import email.parser
import email.policy
import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.servers.gcs_hashes import Hashed, Hashing, check_hashes, hashed
from tests.servers.gcs_listing import list_objects
from tests.servers.gcs_objects import Bucket, StoredObject, World, check_live
from tests.servers.gcs_refusal import Refusal
from tests.servers.gcs_resumable import Resumable
from tests.servers.gcs_xml import XML_PATH, get_object, put_object

__all__ = ["Api", "Call", "Reply"]

MOST_SOURCES = 32
MOST_BATCHED = 100
LONGEST_HEAD = 64 * 1024
MIB = 1024 * 1024


@dataclass
class Call:
    """One request.

    Attributes:
        method: the verb.
        target: path and query as sent.
        headers: with lower-case names.
        body: as far as it came.
        complete: false where it broke off.
        origin: scheme and host of the server.
        content: of a whole upload: what was said of the object, and its bytes.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | bytearray = b""
    complete: bool = True
    origin: str = ""
    content: tuple[dict[str, Any], Hashed] | None = None

    @property
    def path(self) -> str:
        """The path, still percent-encoded."""
        return urlsplit(self.target).path

    @property
    def params(self) -> dict[str, str]:
        """The query."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty one is ``{}``."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError:
            raise Refusal(400, "Parse Error") from None
        if not isinstance(value, dict):
            raise Refusal(400, "Parse Error")
        return value


@dataclass
class Reply:
    """One answer."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @classmethod
    def of(cls, value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
        """A JSON answer."""
        kind = {"Content-Type": "application/json; charset=UTF-8"}
        return cls(status, {**kind, **(headers or {})}, json.dumps(value).encode())


class Api:
    """The buckets, the objects, the open sessions, and what may be asked of them.

    Attributes:
        ignores_conditions: whether whole uploads are written whatever their preconditions, as some emulators do.
    """

    def __init__(self, *, with_md5: bool = True) -> None:
        self.ignores_conditions = False
        self.world = World(with_md5=with_md5)
        self.sessions: dict[str, Resumable] = {}
        self._rewrites: dict[str, tuple[str, int]] = {}
        item = r"/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)"
        other = r"/b/(?P<to_bucket>[^/]+)/o/(?P<to_name>[^/]+)"
        storage = r"(?:/download)?/storage/v1"
        self._routes: list[tuple[str, str, Callable[..., Reply]]] = [
            ("POST", r"/storage/v1/b", self._make_bucket),
            ("GET", r"/storage/v1/b", self._list_buckets),
            ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)", self._get_bucket),
            ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)/o", self._list),
            ("POST", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", self._upload),
            ("PUT|POST|DELETE", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", self._session),
            ("GET", rf"{storage}{item}", self._get),
            ("PATCH", rf"/storage/v1{item}", self._patch),
            ("DELETE", rf"/storage/v1{item}", self._delete),
            ("POST", rf"/storage/v1{item}/compose", self._compose),
            ("POST", rf"/storage/v1{item}/copyTo{other}", self._copy),
            ("POST", rf"/storage/v1{item}/rewriteTo{other}", self._rewrite),
            ("POST", rf"/storage/v1{item}/moveTo/o/(?P<to_name>[^/]+)", self._move),
            ("POST", r"/batch/storage/v1", self._batch),
            ("GET|HEAD|PUT", XML_PATH, self._xml),
        ]

    def answer(self, call: Call) -> Reply:
        """Does what was asked, or says why not."""
        try:
            if call.path == "/batch/storage/v1":  # its parts take the lock one by one, as they are not atomic together
                return self._batch(call)
            if call.path.startswith("/upload/") and call.complete and call.method == "POST":
                call.content = self._content(call)  # copied and hashed while others go on
            with self.world.lock:
                return self._dispatch(call)
        except Refusal as refusal:
            if refusal.status == 304:
                return Reply(304)
            return Reply.of(refusal.resource, refusal.status, refusal.headers)

    def _dispatch(self, call: Call) -> Reply:
        session = "upload_id" in call.params
        known = False
        for methods, pattern, work in self._routes:
            match = re.fullmatch(pattern, call.path)
            if match is None or (work in (self._session, self._upload) and session != (work == self._session)):
                continue
            known = True
            if call.method in methods.split("|"):
                if not call.complete and work != self._session:
                    raise Refusal(400, "The body broke off.")
                return work(call, **{key: unquote(value) for key, value in match.groupdict().items()})
        raise Refusal(405 if known else 404, "Not Found")

    def _xml(self, call: Call, bucket: str, name: str) -> Reply:
        if call.method == "PUT":
            return Reply(*put_object(self.world, bucket, name, call.headers, call.body))
        return Reply(*get_object(self.world, bucket, name, call.headers))

    # -- buckets

    def _make_bucket(self, call: Call) -> Reply:
        return Reply.of(self.world.make_bucket(str(call.json().get("name", ""))).resource())

    def _list_buckets(self, call: Call) -> Reply:
        return Reply.of({"kind": "storage#buckets", "items": [b.resource() for b in self.world.buckets.values()]})

    def _get_bucket(self, call: Call, bucket: str) -> Reply:
        return Reply.of(self.world.bucket(bucket).resource())

    def _list(self, call: Call, bucket: str) -> Reply:
        return Reply.of(list_objects(self.world.bucket(bucket), call.params))

    # -- uploads

    def _upload(self, call: Call, bucket: str) -> Reply:
        there = self.world.bucket(bucket)
        params = call.params
        if params.get("uploadType") == "resumable":
            return self._begin(call, there)
        if call.content is None:
            raise Refusal(400, f"Unknown uploadType {params.get('uploadType')!r}")
        resource, data = call.content
        name = str(params.get("name") or resource.get("name") or "")
        check_hashes(data, resource, call.headers.get("x-goog-hash"))
        if not self.ignores_conditions:
            check_live(there.objects.get(name), params)
        return _described(there, self.world.write(there, name, data, resource))

    def _content(self, call: Call) -> tuple[dict[str, Any], Hashed] | None:
        """What a whole upload says of its object, and the object's bytes; None where it is another request."""
        kind = call.params.get("uploadType")
        if kind == "media":
            resource: dict[str, Any] = {"contentType": call.headers.get("content-type", "application/octet-stream")}
            data = bytes(call.body)
        elif kind == "multipart":
            resource, data = _two_parts(call)
        else:
            return None
        return resource, hashed(data, with_md5=self.world.with_md5)

    def _begin(self, call: Call, bucket: Bucket) -> Reply:
        resource, params = call.json(), call.params
        name = str(params.get("name") or resource.get("name") or "")
        if not name:
            raise Refusal(400, "Required: name")
        check_live(bucket.objects.get(name), params)
        if "x-upload-content-type" in call.headers:
            resource = {"contentType": call.headers["x-upload-content-type"], **resource}
        token = secrets.token_urlsafe(24)
        self.sessions[token] = Resumable(bucket.name, name, resource, params, Hashing(self.world.with_md5))
        query = f"uploadType=resumable&upload_id={token}"
        return Reply(200, {"Location": f"{call.origin}{call.path}?{query}", "X-GUploader-UploadID": token})

    def _session(self, call: Call, bucket: str) -> Reply:
        session = self.sessions.get(call.params["upload_id"])
        if session is None or session.bucket != bucket:
            raise Refusal(404, "No such upload.")
        content_range = call.headers.get("content-range")
        if call.method == "DELETE":
            session.cancel()
        if not call.complete:
            session.cut(content_range, call.body)
            raise Refusal(400, "The body broke off.")
        made = session.put(self.world, content_range, call.body, call.headers.get("x-goog-hash"))
        if made is None:
            return Reply(308, session.range)
        return _described(self.world.bucket(bucket), made)

    # -- objects

    def _get(self, call: Call, bucket: str, name: str) -> Reply:
        there = self.world.bucket(bucket)
        params = call.params
        found = there.live(name, params)
        check_live(found, params, reads=True)
        if params.get("alt") != "media":
            if call.path.startswith("/download"):
                raise Refusal(400, "Downloads want alt=media.")
            return _described(there, found)
        headers = {
            "Content-Type": str(found.fields.get("contentType", "application/octet-stream")),
            "x-goog-hash": found.hash_header,
            "x-goog-generation": str(found.generation),
            "x-goog-metageneration": str(found.metageneration),
            "x-goog-stored-content-length": str(len(found.data)),
        }
        return _ranged(found.data, call.headers.get("range"), headers)

    def _patch(self, call: Call, bucket: str, name: str) -> Reply:
        there = self.world.bucket(bucket)
        found = there.live(name, call.params)
        check_live(found, call.params)
        found.fields.update({key: call.json()[key] for key in ("metadata", "contentType") if key in call.json()})
        found.metageneration += 1
        return _described(there, found)

    def _delete(self, call: Call, bucket: str, name: str) -> Reply:
        there = self.world.bucket(bucket)
        found = there.live(name, call.params)
        check_live(found, call.params)
        del there.objects[name]
        return Reply(204)

    def _compose(self, call: Call, bucket: str, name: str) -> Reply:
        there = self.world.bucket(bucket)
        order = call.json()
        sources = order.get("sourceObjects")
        if not isinstance(sources, list) or not 1 <= len(sources) <= MOST_SOURCES:
            raise Refusal(400, f"The number of source components must be between 1 and {MOST_SOURCES}.")
        found = []
        for source in sources:
            pinned = {"generation": str(source["generation"])} if "generation" in source else {}
            one = there.live(str(source.get("name")), pinned)
            check_live(one, {key: str(value) for key, value in source.get("objectPreconditions", {}).items()})
            found.append(one)
        check_live(there.objects.get(name), call.params)
        count = sum(one.components or 1 for one in found)
        data = b"".join(one.data for one in found)
        return _described(there, self.world.write(there, name, data, order.get("destination", {}), components=count))

    def _copy(self, call: Call, bucket: str, name: str, to_bucket: str, to_name: str) -> Reply:
        made = self._duplicate(call, bucket, name, to_bucket, to_name)
        return _described(self.world.bucket(to_bucket), made)

    def _move(self, call: Call, bucket: str, name: str, to_name: str) -> Reply:
        made = self._duplicate(call, bucket, name, bucket, to_name)
        if name != to_name:
            del self.world.bucket(bucket).objects[name]
        return _described(self.world.bucket(bucket), made)

    def _duplicate(self, call: Call, bucket: str, name: str, to_bucket: str, to_name: str) -> StoredObject:
        there, params = self.world.bucket(to_bucket), call.params
        source = self._source(call, bucket, name)
        check_live(there.objects.get(to_name), params)
        return self.world.write(
            there, to_name, source.data, {**source.fields, **call.json()}, components=source.components
        )

    def _source(self, call: Call, bucket: str, name: str) -> StoredObject:
        pinned = {"generation": call.params["sourceGeneration"]} if "sourceGeneration" in call.params else {}
        source = self.world.bucket(bucket).live(name, pinned)
        check_live(source, call.params, prefix="ifSource")
        return source

    def _rewrite(self, call: Call, bucket: str, name: str, to_bucket: str, to_name: str) -> Reply:
        source = self._source(call, bucket, name)
        size = len(source.data)
        most = call.params.get("maxBytesRewrittenPerCall", str(size))
        if not most.isdigit() or ("maxBytesRewrittenPerCall" in call.params and int(most) % MIB):
            raise Refusal(400, "maxBytesRewrittenPerCall must be a multiple of 1 MiB.")
        about = f"{bucket}/{name}/{source.generation}>{to_bucket}/{to_name}"
        token, done = call.params.get("rewriteToken"), 0
        if token is not None:
            known = self._rewrites.pop(token, None)
            if known is None or known[0] != about:
                raise Refusal(400, "Invalid rewriteToken")
            done = known[1]
        done = min(size, done + int(most))
        status = {"kind": "storage#rewriteResponse", "totalBytesRewritten": str(done), "objectSize": str(size)}
        if done < size:
            token = secrets.token_urlsafe(12)
            self._rewrites[token] = (about, done)
            return Reply.of({**status, "done": False, "rewriteToken": token})
        made = self._duplicate(call, bucket, name, to_bucket, to_name)
        return Reply.of({**status, "done": True, "resource": made.resource(to_bucket)})

    # -- several requests in one

    def _batch(self, call: Call) -> Reply:
        parts = _mime_parts(call)
        if len(parts) > MOST_BATCHED:
            raise Refusal(400, f"At most {MOST_BATCHED} calls in a batch.")
        boundary = f"batch_{secrets.token_hex(12)}"
        out = b""
        for headers, content in parts:
            head, _, body = content.replace(b"\r\n", b"\n").partition(b"\n\n")
            first, *rest = head.decode().strip().split("\n")
            method, target = first.split(" ")[:2]
            inner_headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in rest)}
            inner = Call(method, target, inner_headers, body)
            if inner.path.startswith(("/upload", "/download", "/batch")) or inner.params.get("alt") == "media":
                reply = Reply.of(Refusal(400, "Uploads and downloads cannot be batched.").resource, 400)
            else:
                reply = self.answer(inner)
            lines = [f"--{boundary}", "Content-Type: application/http"]
            if "content-id" in headers:
                lines.append(f"Content-ID: <response-{headers['content-id'].strip('<>')}>")
            lines += ["", f"HTTP/1.1 {reply.status} X", *(f"{k}: {v}" for k, v in reply.headers.items()), "", ""]
            out += "\r\n".join(lines).encode() + reply.body + b"\r\n"
        return Reply(200, {"Content-Type": f"multipart/mixed; boundary={boundary}"}, out + f"--{boundary}--".encode())


def _described(bucket: Bucket, found: StoredObject) -> Reply:
    return Reply.of(found.resource(bucket.name))


def _ranged(data: bytes, wanted: str | None, headers: dict[str, str]) -> Reply:
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if match is None or not (match[1] or match[2]):
        return Reply(200, headers, data)
    if match[1]:
        first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if match[2] and int(match[2]) < first:
            return Reply(200, headers, data)  # no valid range: as if there were none
    else:
        first, last = max(len(data) - int(match[2]), 0), len(data) - 1
    if first >= len(data) or last < first:
        raise Refusal(416, "Request range not satisfiable", {"Content-Range": f"bytes */{len(data)}"})
    return Reply(206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1])


def _boundary(call: Call) -> bytes:
    about = email.parser.Parser(policy=email.policy.HTTP).parsestr(
        f"Content-Type: {call.headers.get('content-type', '')}\r\n\r\n"
    )
    boundary = about.get_boundary()
    if about.get_content_maintype() != "multipart" or not boundary:
        raise Refusal(400, "A multipart body and its boundary are wanted.")
    return b"--" + boundary.encode()


def _part(body: bytes | bytearray, start: int, end: int) -> tuple[dict[str, str], bytes]:
    """Headers and content of the part whose boundary ends at ``start`` and which ends at ``end``."""
    most = min(end, start + LONGEST_HEAD)  # the content may be large
    first = body.find(b"\n", start, most) + 1
    ends = [
        (at, width) for mark, width in ((b"\r\n\r\n", 4), (b"\n\n", 2)) if (at := body.find(mark, start, most)) >= 0
    ]
    if not first or not ends:
        raise Refusal(400, "A part has no end of its headers.")
    at, width = min(ends)
    lines = (line.partition(":") for line in body[first:at].decode("utf-8").splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in lines}, bytes(memoryview(body)[at + width : end])


def _line_end(body: bytes | bytearray, at: int) -> int:
    """Where the content before a boundary at ``at`` ends: the line break between belongs to the boundary."""
    return at - (2 if body[at - 2 : at] == b"\r\n" else 1)


def _mime_parts(call: Call) -> list[tuple[dict[str, str], bytes]]:
    boundary, body = _boundary(call), call.body
    places = [match.start() for match in re.finditer(rb"(?<![^\n])" + re.escape(boundary), body)]
    if len(places) < 2 or not body.startswith(boundary + b"--", places[-1]):
        raise Refusal(400, "The multipart body does not end with its boundary.")
    width = len(boundary)
    return [_part(body, a + width, _line_end(body, b)) for a, b in itertools.pairwise(places)]


def _two_parts(call: Call) -> tuple[dict[str, Any], bytes]:
    """Resource and content of a multipart upload; the content, which may be large, is not searched."""
    boundary, body = _boundary(call), call.body
    width = len(boundary)
    second, last = body.find(b"\n" + boundary, width) + 1, body.rfind(b"\n" + boundary + b"--") + 1
    if not body.startswith(boundary) or not 0 < second < last:
        raise Refusal(400, "A multipart upload has two parts and ends with its boundary.")
    resource = Call("POST", "", {}, _part(body, width, _line_end(body, second))[1]).json()
    headers, content = _part(body, second + width, _line_end(body, last))
    return {"contentType": headers.get("content-type", "application/octet-stream"), **resource}, content
