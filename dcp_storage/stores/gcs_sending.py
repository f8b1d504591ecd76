"""Whole objects on their way to GCS: in one request, or through a resumable session that outlives a broken one."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_storage.store import Buffers, total
from dcp_storage.stores.asking import Request
from dcp_storage.stores.gcs_crc32c import crc32c_text
from dcp_storage.stores.gcs_session import Answer, GcsClient

__all__ = ["CREATE", "ResumableSession", "pieces_from", "send_whole"]

PIECE = 1 << 18  # bytes: one write to the socket
CREATE = {"ifGenerationMatch": "0"}
"""The parameter that lets a write happen only where the name is free."""

DONE = re.compile(r"bytes=0-(\d+)")
RESUME = frozenset({308})


async def pieces_from(buffers: Buffers, start: int = 0) -> AsyncIterator[bytes]:
    """The bytes from ``start`` on, copied piece by piece, so that nothing below keeps the caller's memory."""
    for buffer in buffers:
        if start >= buffer.nbytes:
            start -= buffer.nbytes
            continue
        for at in range(start, buffer.nbytes, PIECE):
            yield bytes(buffer[at : at + PIECE])
        start = 0


async def send_whole(
    client: GcsClient,
    bucket: str,
    key: str,
    buffers: Buffers,
    *,
    crc32c: int,
    metadata: Mapping[str, str] | None = None,
    condition: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Writes an object in one multipart request, which GCS holds against ``crc32c``; returns its resource."""
    resource = _resource(key, crc32c, metadata)
    boundary = secrets.token_hex(20)
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    async def body() -> AsyncIterator[bytes]:
        yield head
        async for piece in pieces_from(buffers):
            yield piece
        yield tail

    answer = await client.send(
        "POST",
        client.url("b", bucket, "o", upload=True),
        {"uploadType": "multipart", **(condition or {})},
        body=body,
        size=len(head) + total(buffers) + len(tail),
        headers={"Content-Type": f"multipart/related; boundary={boundary}"},
    )
    return answer.json()


def _resource(key: str, crc32c: int, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    resource: dict[str, Any] = {"name": key, "crc32c": crc32c_text(crc32c), "contentType": "application/octet-stream"}
    if metadata:
        resource["metadata"] = dict(metadata)
    return resource


@dataclass
class ResumableSession:
    """An object whose bytes may arrive over several connections.

    GCS cannot list sessions; one that is neither finished nor cancelled ends by itself after a week and shows nothing.

    Attributes:
        uri: where its bytes go.
        key: the object's key.
        size: its bytes.
        crc32c: their CRC-32C, which GCS checks at the end.
        sent: whether bytes were sent before, so that GCS may have kept some.
    """

    uri: str
    key: str
    size: int
    crc32c: int
    sent: bool = False

    @classmethod
    async def begin(
        cls, client: GcsClient, bucket: str, key: str, *, size: int, crc32c: int, metadata: Mapping[str, str]
    ) -> ResumableSession:
        """Begins a session; nothing is visible under ``key`` before its last byte."""
        answer = await client.send(
            "POST",
            client.url("b", bucket, "o", upload=True),
            {"uploadType": "resumable", "name": key},
            json=_resource(key, crc32c, metadata),
            headers={"X-Upload-Content-Type": "application/octet-stream", "X-Upload-Content-Length": str(size)},
        )
        return cls(answer.headers["Location"], key, size, crc32c)

    async def send(self, client: GcsClient, request: Request, buffers: Buffers) -> dict[str, Any]:
        """Sends what is missing and returns the object's resource; may be called again after a failure."""
        start = 0
        if self.sent:
            answer = await client.send("PUT", self.uri, headers={"Content-Range": f"bytes */{self.size}"}, also=RESUME)
            if answer.status != 308:
                return answer.json()
            start = self._kept(request, answer)
        self.sent = True
        answer = await client.send(
            "PUT",
            self.uri,
            body=lambda: pieces_from(buffers, start),
            size=self.size - start,
            headers={"Content-Range": f"bytes {start}-{self.size - 1}/{self.size}"},
            also=RESUME,
        )
        if answer.status == 308:  # it kept less than was sent; the next try goes on from there
            raise request.error(f"{self._kept(request, answer)} of {self.size} bytes were kept.", transient=True)
        return answer.json()

    def _kept(self, request: Request, answer: Answer) -> int:
        """How many bytes from the start an answer 308 says are kept."""
        said = answer.headers.get("Range")
        if said is None:
            return 0
        match = DONE.fullmatch(said.strip())
        if match is None or int(match[1]) >= self.size:
            raise request.error(f"the server says that it keeps {said!r} of {self.size} bytes.")
        return int(match[1]) + 1

    async def cancel(self, client: GcsClient) -> None:
        """Ends the session; one that has ended is no error. An object that it has made stays."""
        await client.send("DELETE", self.uri, also=frozenset({404, 410, 499}))
