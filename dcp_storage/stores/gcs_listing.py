"""All pages of GCS's listing; a page that is missing is an error, never a shorter list (invariant I10)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from dcp_storage.store import Entry, is_name
from dcp_storage.stores.asking import Request
from dcp_storage.stores.gcs_session import GcsClient
from dcp_storage.stores.gcs_upload import UPLOAD_NOTE

__all__ = ["OpenPart", "list_folders", "list_objects", "list_parts"]

PAGE = "1000"
TIME = re.compile(r"(\d+-\d+-\d+T\d+:\d+:\d+)(\.\d+)?(Z|[+-]\d+:\d+)")


@dataclass(frozen=True)
class OpenPart:
    """A part of an upload that has not removed it yet.

    Attributes:
        key: its key in the bucket.
        name: the name of the object that it is for.
        upload: the token of the upload.
        made: seconds since the epoch, None where the server does not say.
    """

    key: str
    name: str
    upload: str
    made: float | None


async def list_objects(client: GcsClient, request: Request, prefix: str) -> list[Entry]:
    """The objects directly under ``prefix`` (a folder's, with its slash; empty for the bucket)."""
    return [
        Entry(name, int(item.get("size", 0)), _seconds(item.get("updated")))
        async for name, item in _items(client, request, prefix, "name,size,updated")
    ]


async def list_parts(client: GcsClient, request: Request, prefix: str) -> list[OpenPart]:
    """The parts of open uploads directly under ``prefix``, whoever sent them."""
    found: list[OpenPart] = []
    async for name, item in _items(client, request, prefix, "name,timeCreated,metadata"):
        upload = (item.get("metadata") or {}).get(UPLOAD_NOTE)
        owner, dot, _ = name.rpartition(".")
        if upload is not None and dot:
            found.append(OpenPart(item["name"], owner, upload, _seconds(item.get("timeCreated"))))
    return found


async def list_folders(client: GcsClient, request: Request, prefix: str) -> list[str]:
    """The names of the folders directly under ``prefix``: what the names below it share up to their next slash."""
    found: dict[str, None] = {}  # a server may name a folder on the page where it begins and on the next
    async for page in _pages(client, request, prefix, "prefixes"):
        for shared in page.get("prefixes", ()):
            name = _under(request, prefix, shared).removesuffix("/")
            if is_name(name):
                found[name] = None
    return list(found)


async def _items(
    client: GcsClient, request: Request, prefix: str, fields: str
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    async for page in _pages(client, request, prefix, f"items({fields})"):
        for item in page.get("items", ()):
            name = _under(request, prefix, item["name"])
            if name and "/" not in name:  # the key that ends with the slash is a console's marker of a folder
                yield name, item


async def _pages(client: GcsClient, request: Request, prefix: str, fields: str) -> AsyncIterator[dict[str, Any]]:
    params = {"prefix": prefix, "delimiter": "/", "maxResults": PAGE, "fields": f"nextPageToken,{fields}"}
    place = None
    while True:
        page: dict[str, Any] = (await client.send("GET", client.url("b", request.bucket, "o"), params)).json()
        yield page
        following = page.get("nextPageToken")
        if not following:
            return
        if following == place:
            raise request.error("the server says that the listing goes on, but not from where.")
        place = params["pageToken"] = following


def _under(request: Request, prefix: str, key: str) -> str:
    if not key.startswith(prefix):
        raise request.error(f"the server listed {key!r}, which is not under {prefix!r}.")
    return key[len(prefix) :]


def _seconds(text: str | None) -> float | None:
    """A time like ``2026-11-30T05:35:15.123Z``, with any number of digits, or none, after the seconds."""
    match = TIME.fullmatch(text or "")
    if match is None:
        return None
    whole = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    return whole.astimezone(timezone.utc).timestamp() + float(match[2] or 0)
