"""The XML API of the strict GCS server, as far as obstore uses it: whole objects put, read and looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import format_datetime

from tests.servers.gcs_hashes import check_hashes, hashed
from tests.servers.gcs_objects import StoredObject, World, check_live
from tests.servers.gcs_refusal import Refusal

__all__ = ["XML_PATH", "get_object", "put_object"]

XML_PATH = r"/(?!(?:storage|upload|download|batch)/)(?P<bucket>[^/]+)/(?P<name>.+)"
"""The path of an object; the JSON API begins with other words."""

META = "x-goog-meta-"
CONDITION = {"x-goog-if-generation-match": "ifGenerationMatch"}

Answer = tuple[int, dict[str, str], bytes]


def put_object(world: World, bucket: str, name: str, headers: Mapping[str, str], body: bytes | bytearray) -> Answer:
    """Writes an object, on the condition and with the metadata that stand in the headers."""
    there = world.bucket(bucket)
    check_live(there.objects.get(name), {CONDITION[key]: value for key, value in headers.items() if key in CONDITION})
    data = hashed(bytes(body), with_md5=world.with_md5)
    check_hashes(data, {"md5Hash": headers.get("content-md5")}, headers.get("x-goog-hash"))
    noted = {key.removeprefix(META): value for key, value in headers.items() if key.startswith(META)}
    fields = {"contentType": headers.get("content-type", "application/octet-stream")}
    made = world.write(there, name, data, {**fields, **({"metadata": noted} if noted else {})})
    return 200, _described(made), b""


def get_object(world: World, bucket: str, name: str, headers: Mapping[str, str]) -> Answer:
    """An object's bytes, or a range of them."""
    found = world.bucket(bucket).live(name, {})
    size = len(found.data)
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
    if match is None:
        return 200, _described(found), found.data
    first, last = int(match[1]), min(int(match[2] or size), size - 1)
    if first >= size:
        raise Refusal(416, "Request range not satisfiable", {"Content-Range": f"bytes */{size}"})
    return 206, {**_described(found), "Content-Range": f"bytes {first}-{last}/{size}"}, found.data[first : last + 1]


def _described(found: StoredObject) -> dict[str, str]:
    return {
        "Content-Type": str(found.fields.get("contentType", "application/octet-stream")),
        "ETag": f'"{found.md5 or found.generation}"',
        "Last-Modified": format_datetime(found.updated, usegmt=True),
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": str(found.metageneration),
        "x-goog-hash": found.hash_header,
        **{f"{META}{key}": str(value) for key, value in (found.fields.get("metadata") or {}).items()},
    }
