"""Commit objects around fuzzed bytes: with a check that is right, so that what lies behind it is reached."""

from __future__ import annotations

import json
import zlib
from typing import Final

__all__ = ["MANIFEST", "commit_of", "sealed"]

MANIFEST: Final = (
    b'{"format":1,"files":[{"name":"__0_0.distcp","size":900,"crc32":null,"rank":0}],'
    b'"items":[{"key":"n","file":0,"offset":0,"length":900,"payload_length":900,"block":16384,"blocks":[9]}],'
    b'"entries":{"n":{"kind":"bytes"}}}'
)
"""A small manifest."""


def sealed(body: bytes) -> bytes:
    """A commit's JSON with its check at the end, by the words of the format: the CRC-32 of all before it."""
    head = body[:-1]
    return head + b',"crc32":' + str(zlib.crc32(head)).encode() + b"}"


def commit_of(manifest: bytes, *, name: str = ".manifest", rank: int | None = None) -> bytes:
    """A commit object, whole, of a manifest."""
    body = {
        "format": 1,
        "state": "committed",
        "number": 1,
        "author": "abcdefghijklmnop",
        "time": "2026-01-02T03:04:05.678+00:00",
        "world_size": 2,
        "manifest": {"name": name, "size": len(manifest), "crc32": zlib.crc32(manifest)},
        **({} if rank is None else {"rank": rank, "label": "abc"}),
    }
    return sealed(json.dumps(body).encode())
