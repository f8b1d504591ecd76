"""All pages of S3's two listings; a page that is missing is an error, never a shorter list (invariant I10)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from dcp_storage.store import Entry, is_name
from dcp_storage.stores.asking import Request
from dcp_storage.stores.s3_errors import code_of, field_of
from dcp_storage.stores.s3_session import S3Client

__all__ = ["OpenUpload", "list_folders", "list_objects", "list_uploads"]


@dataclass(frozen=True)
class OpenUpload:
    """A multipart upload that is neither completed nor aborted.

    Attributes:
        key: the object's key in the bucket.
        upload_id: the server's name of the upload.
        begun: seconds since the epoch by the server's clock, None where it does not say.
    """

    key: str
    upload_id: str
    begun: float | None


async def list_objects(client: S3Client, request: Request, prefix: str) -> list[Entry]:
    """The objects directly under ``prefix`` (a folder's, with its slash; empty for the bucket)."""
    found: list[Entry] = []
    async for page in _pages(client, request, prefix):
        for item in page.get("Contents", ()):
            name = _under(request, prefix, field_of(request, item, "Key"))
            if name and "/" not in name:  # the key that ends with the slash is a console's marker of a folder
                date = item.get("LastModified")
                found.append(Entry(name, field_of(request, item, "Size"), None if date is None else date.timestamp()))
    return found


async def list_folders(client: S3Client, request: Request, prefix: str) -> list[str]:
    """The names of the folders directly under ``prefix``: what the keys below it share up to their next slash."""
    found: dict[str, None] = {}  # a server may name a folder on the page where it begins and on the next
    async for page in _pages(client, request, prefix):
        for item in page.get("CommonPrefixes", ()):
            name = _under(request, prefix, field_of(request, item, "Prefix")).removesuffix("/")
            if is_name(name):
                found[name] = None
    return list(found)


async def _pages(client: S3Client, request: Request, prefix: str) -> AsyncIterator[dict[str, Any]]:
    place: dict[str, str] = {}
    while True:
        # botocore asks for the keys percent-encoded and decodes them, so that every character survives the XML.
        page = await client.send("list_objects_v2", Bucket=request.bucket, Prefix=prefix, Delimiter="/", **place)
        more = field_of(request, page, "IsTruncated")
        yield page
        if not more:
            return
        following = {"ContinuationToken": str(page.get("NextContinuationToken") or "")}
        _check_progress(request, place, following)
        place = following


def _under(request: Request, prefix: str, key: str) -> str:
    if not key.startswith(prefix):
        raise request.error(f"the server listed {key!r}, which is not under {prefix!r}.")
    return key[len(prefix) :]


async def list_uploads(client: S3Client, request: Request, prefix: str) -> list[OpenUpload]:
    """The open uploads of keys that begin with ``prefix`` and have no slash after it, whoever began them."""
    found: list[OpenUpload] = []
    place: dict[str, str] = {}
    asked = {"Bucket": request.bucket, "Prefix": prefix, "Delimiter": "/"}
    while True:
        try:
            page = await client.send("list_multipart_uploads", **asked, **place)
        except ClientError as error:
            # Asked about no upload in particular, only a server that knows of none says so (rclone's does).
            if code_of(error) == "NoSuchUpload" and not place:
                return found
            raise
        for item in page.get("Uploads", ()):
            key: str = field_of(request, item, "Key")
            if key.startswith(prefix) and "/" not in key[len(prefix) :]:
                begun = item.get("Initiated")
                found.append(
                    OpenUpload(key, field_of(request, item, "UploadId"), None if begun is None else begun.timestamp())
                )
        if not _goes_on(request, page):
            return found
        following = {
            "KeyMarker": str(page.get("NextKeyMarker") or ""),
            "UploadIdMarker": str(page.get("NextUploadIdMarker") or ""),
        }
        _check_progress(request, place, following)
        place = following


def _goes_on(request: Request, page: dict[str, Any]) -> bool:
    """Whether more uploads follow. Where the server does not say (rclone's leaves a "false" out), the page must be of
    our bucket, which a gateway's answer is not, and hold fewer than it might.
    """
    held = len(page.get("Uploads", ())) + len(page.get("CommonPrefixes", ()))
    if "IsTruncated" not in page and page.get("Bucket") == request.bucket and held < page.get("MaxUploads", 0):
        return False
    return bool(field_of(request, page, "IsTruncated"))


def _check_progress(request: Request, place: dict[str, str], following: dict[str, str]) -> None:
    if following == place or not any(following.values()):
        raise request.error("the server says that the listing goes on, but not from where.")
