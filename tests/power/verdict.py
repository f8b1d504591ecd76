"""What a folder says after a power loss, by plain JSON and zlib: cheap enough for every single state."""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from tests.crash.values import BrokenError

__all__ = ["commit_in", "identity"]

_COMMIT = re.compile(r"\.commit(?:\.([1-9][0-9]*))?")
_CHECK = b',"crc32":'


@functools.lru_cache(maxsize=4096)
def _crc32(data: bytes) -> int:
    return zlib.crc32(data)


def commit_in(files: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The highest commit object whose body is whole; None where there is none. A torn one counts for nothing."""
    found = {int(match[1] or 1): name for name in files if (match := _COMMIT.fullmatch(name))}
    for number in sorted(found, reverse=True):
        body = files[found[number]]
        head, mark, check = body.rpartition(_CHECK)
        if mark and check == b"%d}" % zlib.crc32(head):
            said: dict[str, Any] = json.loads(body)
            return said
    return None


def identity(files: Mapping[str, bytes], truth: Mapping[str, bytes]) -> int | None:
    """Which checkpoint is committed: the CRC-32 of its manifest; None where nothing is, or it was deleted.

    Args:
        files: what is in the folder.
        truth: the bytes of files whose CRC-32 no manifest has (adopted ones).

    Raises:
        BrokenError: something is committed, and not all of it is there and right.
    """
    said = commit_in(files)
    if said is None or said["state"] == "void":
        return None
    ref = said["manifest"]
    body = files.get(ref["name"])
    if body is None or len(body) != ref["size"] or _crc32(body) != ref["crc32"]:
        raise BrokenError(f"commit {said['number']} stands, but its manifest {ref['name']} is gone or altered")
    for record in _files_of(body):
        data = files.get(record["name"])
        if data is None:
            raise BrokenError(f"commit {said['number']} stands, but {record['name']} is gone")
        known = record.get("crc32")
        right = len(data) == record["size"] and (
            data == truth.get(record["name"]) if known is None else _crc32(data) == known
        )
        if not right:
            raise BrokenError(f"commit {said['number']} stands, but {record['name']} is altered")
    found: int = ref["crc32"]
    return found


@functools.lru_cache(maxsize=256)
def _files_of(manifest: bytes) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(manifest)["files"])
