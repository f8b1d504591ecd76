"""A loopback S3 server for benchmarks: the verbs, no work.

It keeps objects in memory and checks nothing: no signatures, no checksums. What it costs is the copy between the
socket and memory, so that a benchmark on two cores measures the client; its memory is touched before the first request
and used again (:mod:`benchmarks.light_memory`). Every other server that can be had here burns more CPU on a PUT than
the client does. It counts requests and bytes, says how much CPU it used (``GET /_stats``), and enforces
``If-None-Match: *`` on PUT and CompleteMultipartUpload, since the commit rests on that.

Not a model of S3: nothing is proven with it, only timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.light_memory import Body, Object, Pool

__all__ = ["main"]


@dataclass
class Request:
    """One request, its body read."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Body


@dataclass
class Answer:
    """What is sent back."""

    status: int = 200
    body: list[memoryview] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # of a HEAD's would-be body
    of: Object | None = None  # which must stay while it is sent


def _xml(text: str, status: int = 200) -> Answer:
    data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Answer(status, [memoryview(data)], {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Answer:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


class Server:
    """The buckets, and the verbs on them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.buckets: dict[str, dict[str, Object]] = {}
        self.uploads: dict[str, tuple[str, str, dict[int, Object]]] = {}
        self.numbers = itertools.count(1)
        self.requests: dict[str, int] = {}
        self.bytes_in = 0
        self.bytes_out = 0

    def stats(self) -> Answer:
        data = {
            "requests": self.requests,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "cpu": time.process_time(),
        }
        return Answer(200, [memoryview(json.dumps(data).encode())], {"Content-Type": "application/json"})

    def answer(self, request: Request) -> Answer:
        if request.bucket == "_stats":
            return self.stats()
        with self.lock:
            self.requests[request.method] = self.requests.get(request.method, 0) + 1
            self.bytes_in += request.body.size
            return self._answer(request)

    def _answer(self, request: Request) -> Answer:
        if not request.bucket:
            names = "".join(f"<Bucket><Name>{escape(b)}</Name></Bucket>" for b in self.buckets)
            return _xml(f"<ListAllMyBucketsResult><Buckets>{names}</Buckets></ListAllMyBucketsResult>")
        if not request.key:
            return self._bucket(request)
        objects = self.buckets.get(request.bucket)
        if objects is None:
            return _error(404, "NoSuchBucket")
        if request.method in ("GET", "HEAD"):
            return self._get(request, objects)
        if request.method == "DELETE":
            if "uploadId" in request.query:
                self.uploads.pop(request.query["uploadId"], None)
            else:
                objects.pop(request.key, None)
            return Answer(204)
        if request.method == "POST":
            return self._post(request, objects)
        return self._put(request, objects)

    def _bucket(self, request: Request) -> Answer:
        if request.method == "PUT":
            self.buckets.setdefault(request.bucket, {})
            return Answer()
        objects = self.buckets.get(request.bucket)
        if objects is None:
            return _error(404, "NoSuchBucket")
        if request.method == "HEAD":
            return Answer()
        if request.method == "POST":  # DeleteObjects
            for part in b"".join(request.body.pieces).decode().split("<Key>")[1:]:
                objects.pop(part.split("</Key>")[0], None)
            return _xml("<DeleteResult/>")
        if "uploads" in request.query:
            rows = "".join(
                f"<Upload><Key>{escape(key)}</Key><UploadId>{uid}</UploadId><Initiated>{_time(0)}</Initiated></Upload>"
                for uid, (bucket, key, _) in self.uploads.items()
                if bucket == request.bucket and key.startswith(request.query.get("prefix", ""))
            )
            return _xml(
                f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{rows}</ListMultipartUploadsResult>"
            )
        if "location" in request.query:
            return _xml("<LocationConstraint/>")
        return self._list(request.query, objects)

    @staticmethod
    def _list(query: dict[str, str], objects: dict[str, Object]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rows, folders = [], set()
        for key in sorted(k for k in objects if k.startswith(prefix)):
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + head + delimiter)
                continue
            one = objects[key]
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{one.size}</Size><ETag>{one.etag}</ETag>"
                f"<LastModified>{_time(one.modified)}</LastModified></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)]
        count = f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        return _xml(f"<ListBucketResult><Prefix>{escape(prefix)}</Prefix>{count}{''.join(rows)}</ListBucketResult>")

    def _get(self, request: Request, objects: dict[str, Object]) -> Answer:
        found = objects.get(request.key)
        if found is None:
            return _error(404, "NoSuchKey") if request.method == "GET" else Answer(404)
        size = found.size
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if request.method == "HEAD":
            return Answer(200, [], headers, size)
        start, stop, status = 0, size, 200
        wanted = request.headers.get("range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else size - int(last)
            stop = min(int(last) + 1, size) if first and last else size
            if start >= size:
                return Answer(416, [], {"Content-Range": f"bytes */{size}"})
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.bytes_out += stop - start
        return Answer(status, found.span(start, stop), headers, of=found)

    def _post(self, request: Request, objects: dict[str, Object]) -> Answer:
        if "uploads" in request.query:
            uid = f"upload-{next(self.numbers)}"
            self.uploads[uid] = (request.bucket, request.key, {})
            return _xml(
                f"<InitiateMultipartUploadResult><Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
                f"<UploadId>{uid}</UploadId></InitiateMultipartUploadResult>"
            )
        held = self.uploads.get(request.query.get("uploadId", ""))
        if held is None:
            return _error(404, "NoSuchUpload")
        if request.headers.get("if-none-match") == "*" and request.key in objects:
            return _error(412, "PreconditionFailed")
        del self.uploads[request.query["uploadId"]]
        bodies = [body for _, part in sorted(held[2].items()) for body in part.bodies]
        made = objects[request.key] = Object(bodies, f'"{next(self.numbers)}"')
        return _xml(
            f"<CompleteMultipartUploadResult><Key>{escape(request.key)}</Key>"
            f"<ETag>{made.etag}</ETag></CompleteMultipartUploadResult>"
        )

    def _put(self, request: Request, objects: dict[str, Object]) -> Answer:
        made = Object([request.body], f'"{next(self.numbers)}"')
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            bucket, _, key = unquote(source).lstrip("/").partition("/")
            old = self.buckets.get(bucket, {}).get(key.partition("?")[0])
            if old is None:
                return _error(404, "NoSuchKey")
            objects[request.key] = made = Object(old.bodies, made.etag)
            return _xml(
                f"<CopyObjectResult><ETag>{made.etag}</ETag>"
                f"<LastModified>{_time(made.modified)}</LastModified></CopyObjectResult>"
            )
        if "uploadId" in request.query:
            held = self.uploads.get(request.query["uploadId"])
            if held is None:
                return _error(404, "NoSuchUpload")
            held[2][int(request.query["partNumber"])] = made
        elif request.headers.get("if-none-match") == "*" and request.key in objects:
            return _error(412, "PreconditionFailed")
        else:
            objects[request.key] = made
        return Answer(200, [], {"ETag": made.etag})


class _Connection:
    """Reads requests from one socket and sends the answers."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server = server
        self.sock = sock
        self.ahead = bytearray()

    def serve(self) -> None:
        with contextlib.suppress(OSError, EOFError), self.sock:
            while True:
                head = self._until(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ", 2)
                headers = {k.lower(): v.strip() for k, _, v in (one.partition(":") for one in lines[1:])}
                if headers.get("expect", "").lower() == "100-continue":
                    self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = self._body(headers)
                parts = urlsplit(target)
                bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
                query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
                answer = self.server.answer(Request(method, bucket, key, query, headers, body))
                self._send(answer, head_only=method == "HEAD")
                if headers.get("connection", "").lower() == "close":
                    return

    def _until(self, end: bytes) -> bytes:
        while (at := self.ahead.find(end)) < 0:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.ahead += data
        out = bytes(self.ahead[:at])
        del self.ahead[: at + len(end)]
        return out

    def _exactly(self, size: int, body: Body) -> None:
        """Reads this many bytes to the end of a body."""
        have = min(size, len(self.ahead))
        body.add(self.ahead[:have])
        del self.ahead[:have]
        # The kernel waits for a whole piece, and not this thread again and again; a TLS socket knows no such flag.
        flags = 0 if isinstance(self.sock, ssl.SSLSocket) else socket.MSG_WAITALL
        while have < size:
            got = self.sock.recv_into(body.room(size - have), 0, flags)
            if not got:
                raise EOFError
            body.filled(got)
            have += got

    def _body(self, headers: dict[str, str]) -> Body:
        body = Body(self.server.pool)
        signed = "aws-chunked" in headers.get("content-encoding", "")
        signed |= headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._chunks(body)
            if not signed:
                return body
            inner = _Connection(self.server, self.sock)  # S3's own chunks, with a checksum behind them, inside HTTP's
            inner.ahead = bytearray().join(body.pieces)
            content = Body(self.server.pool)
            inner._chunks(content)
            return content
        if signed:
            self._chunks(body)
        else:
            self._exactly(int(headers.get("content-length", "0")), body)
        return body

    def _chunks(self, body: Body) -> None:
        while size := int(self._until(b"\r\n").split(b";")[0], 16):
            self._exactly(size, body)
            self._until(b"\r\n")
        while self._until(b"\r\n"):
            pass

    def _send(self, answer: Answer, *, head_only: bool) -> None:
        length = answer.length if answer.length is not None else sum(b.nbytes for b in answer.body)
        lines = [f"HTTP/1.1 {answer.status} X", f"Date: {formatdate(usegmt=True)}", "x-amz-request-id: 0"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if answer.status != 204:
            lines.append(f"Content-Length: {length}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        body = [] if head_only else answer.body
        if length < 65536:
            self.sock.sendall(head + b"".join(body))
            return
        self.sock.sendall(head)
        for piece in body:
            self.sock.sendall(piece)


def main() -> None:
    """Serves until it is stopped; prints its port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cert", help="PEM with certificate and key: serve HTTPS")
    parser.add_argument("--memory", type=int, default=0, help="bytes to make ready before the first request")
    options = parser.parse_args()
    server = Server(Pool(options.memory))
    listener = socket.create_server(("127.0.0.1", options.port), backlog=256)
    context = None
    if options.cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.cert)
    print(listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def serve(sock: socket.socket = sock) -> None:
            try:
                wrapped = context.wrap_socket(sock, server_side=True) if context else sock
            except (ssl.SSLError, OSError):
                sock.close()
                return
            _Connection(server, wrapped).serve()

        threading.Thread(target=serve, daemon=True).start()


if __name__ == "__main__":
    main()
