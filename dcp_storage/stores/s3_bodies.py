"""Bytes between the caller's memory and the wire, each copied once."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from dcp_storage.store import Buffers, total

__all__ = ["Body", "body_of", "checksum_of", "date_of", "fill", "next_piece", "part_of"]

SENT = 512 * 1024  # bytes per write to the socket
PIECE = 256 * 1024  # bytes per read where the HTTP library does not hand out what it received


class Body(Payload):
    """Buffers as one request body that never joins them.

    To aiohttp it is a payload, to botocore a file: botocore wants to know its length, reads it where it must sign it,
    and seeks where it sends it again.

    Args:
        buffers: the bytes, in order.
    """

    _autoclose = True  # nothing to close

    def __init__(self, buffers: Buffers) -> None:
        super().__init__(None)
        self._buffers = [b for b in buffers if b.nbytes]
        self._size: int = total(buffers)
        self._at = 0

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """All of it as text; aiohttp asks every payload for that."""
        return b"".join(self._buffers).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Sends it, copied piece by piece, so that nothing below keeps the caller's memory."""
        for buffer in self._buffers:
            for at in range(0, buffer.nbytes, SENT):
                await writer.write(bytes(buffer[at : at + SENT]))

    def read(self, size: int = -1) -> bytes:
        """The next bytes, for botocore."""
        stop = self._size if size < 0 else min(self._at + size, self._size)
        out, start = [], 0
        for buffer in self._buffers:
            first, last = max(self._at - start, 0), min(stop - start, buffer.nbytes)
            if first < last:
                out.append(buffer[first:last])
            start += buffer.nbytes
        self._at = stop
        return b"".join(out)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place, for botocore."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at


def body_of(buffers: Buffers) -> Body:
    """The buffers as one request body."""
    return Body(buffers)


def checksum_of(crc32: int | None) -> dict[str, str]:
    """The request argument that lets the server check the body: the CRC-32, big-endian, in base64."""
    return {} if crc32 is None else {"ChecksumCRC32": base64.b64encode(crc32.to_bytes(4, "big")).decode("ascii")}


def date_of(answer: Mapping[str, Any]) -> float | None:
    """The server's clock in an answer's ``Date`` header, seconds since the epoch; None where there is none."""
    text = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    if text is None:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None


def part_of(content_range: str) -> tuple[int, int | None] | None:
    """Start and whole size (None: not said) in a ``Content-Range`` header; None where it makes no sense.

    An answer 416 has ``bytes */size``, which counts as starting at 0.
    """
    match = re.fullmatch(r"bytes\s+(?:(\d+)-\d+|\*)/(\d+|\*)", content_range.strip())
    if match is None:
        return None
    return int(match[1] or 0), None if match[2] == "*" else int(match[2])


async def next_piece(body: Any) -> bytes:
    """The next bytes of a response, as the socket delivered them; empty at its end."""
    raw = body.raw_stream
    if not isinstance(raw, aiohttp.ClientResponse):
        piece: bytes = await body.read(PIECE)
        return piece
    while True:  # not body.read(), which joins what has arrived into one more copy
        piece, chunk_ended = await raw.content.readchunk()
        if piece or not chunk_ended:
            return piece


async def fill(body: Any, buffers: Buffers, wanted: int) -> int:
    """Copies the first ``wanted`` bytes of a response into ``buffers``; returns how many did not come."""
    targets = iter([b for b in buffers if b.nbytes])
    target = memoryview(b"")
    missing = wanted
    while missing:
        piece = memoryview(await next_piece(body))[:missing]
        if not piece:
            break
        missing -= len(piece)
        while piece:
            target = target or next(targets)
            size = min(len(piece), len(target))
            target[:size] = piece[:size]
            piece, target = piece[size:], target[size:]
    return missing
