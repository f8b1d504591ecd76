"""One multipart upload to S3, whatever replies get lost on the way."""

from __future__ import annotations

import asyncio
import errno
import zlib
from dataclasses import dataclass

from botocore.exceptions import ClientError

from dcp_storage.errors import StoreError
from dcp_storage.store import Buffers, Upload, total
from dcp_storage.stores.asking import Request
from dcp_storage.stores.s3_bodies import body_of, checksum_of, date_of
from dcp_storage.stores.s3_errors import code_of, field_of, status_of, translated
from dcp_storage.stores.s3_listing import list_uploads
from dcp_storage.stores.s3_session import S3Client, S3Session

__all__ = ["S3Upload", "abort_each"]


@dataclass(frozen=True)
class _Part:
    size: int
    answer: dict[str, str]  # what CompleteMultipartUpload wants to hear of it


class S3Upload(Upload):
    """An object in parts. The upload begins with the first part, since that decides whether parts carry CRC-32s.

    Args:
        session: where requests are sent.
        key: the object's key in the bucket.
        url: the folder, for messages.
        bucket: its bucket.
        name: the object's name in the folder.
    """

    def __init__(self, session: S3Session, key: str, *, url: str, bucket: str, name: str) -> None:
        self._session = session
        self._object = {"Bucket": bucket, "Key": key}
        self._key = key
        self._url, self._bucket, self._name = url, bucket, name
        self._beginning: asyncio.Lock | None = None
        self._upload_id: str | None = None
        self._begun_at: float | None = None
        self._with_crcs = False
        self._begin_lost = False
        self._complete_sent = False
        self._complete_lost = False
        self._completed = False
        self._parts: dict[int, _Part] = {}

    def _request(self, operation: str) -> Request:
        return Request(operation, self._url, self._bucket, self._name, changes=True)

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        request = self._request("write_part")

        async def work(client: S3Client) -> None:
            upload_id = await self._begin(client, request, with_crcs=crc32 is not None)
            crc = crc32
            if self._with_crcs and crc is None:  # S3 wants one of every part or of none
                for buffer in buffers:
                    crc = zlib.crc32(buffer, crc or 0)
            checksum = checksum_of(crc if self._with_crcs else None)
            answer = await client.send(
                "upload_part",
                **self._object,
                UploadId=upload_id,
                PartNumber=number,
                Body=body_of(buffers),
                **checksum,
            )
            self._parts[number] = _Part(total(buffers), {"ETag": field_of(request, answer, "ETag"), **checksum})

        with translated(request):
            self._session.call(work)

    async def _begin(self, client: S3Client, request: Request, *, with_crcs: bool) -> str:
        # Made on the loop, where nothing runs between these two lines: parts may come from several threads at once.
        self._beginning = self._beginning or asyncio.Lock()
        async with self._beginning:
            if self._upload_id is None:
                algorithm = {"ChecksumAlgorithm": "CRC32"} if with_crcs else {}
                try:
                    with translated(request):
                        answer = await client.send("create_multipart_upload", **self._object, **algorithm)
                        upload_id: str = field_of(request, answer, "UploadId")
                except StoreError as error:
                    self._begin_lost |= error.ambiguous
                    raise
                self._upload_id = upload_id
                self._begun_at = date_of(answer)
                self._with_crcs = with_crcs
            return self._upload_id

    def complete(self) -> None:
        request = self._request("complete")
        parts = [{"PartNumber": number, **self._parts[number].answer} for number in sorted(self._parts)]
        if len(parts) != max(self._parts, default=0):
            raise ValueError(f"{self._name}: parts must be numbered from 1 without gaps, not {sorted(self._parts)}.")

        async def work(client: S3Client) -> None:
            self._complete_sent = True
            if not parts:  # S3 has no upload without parts
                await client.send("put_object", **self._object, Body=body_of([]))
            elif not self._completed:
                await self._finish(client, request, parts)
            self._completed = True
            if self._begin_lost:  # an upload whose id never reached us; the name is ours alone
                await self._sweep(client, request, tolerated=(errno.EOPNOTSUPP, errno.EACCES))

        with translated(request):
            self._session.call(work)

    async def _finish(self, client: S3Client, request: Request, parts: list[dict[str, object]]) -> None:
        arguments = {**self._object, "UploadId": self._upload_id}
        try:
            with translated(request):
                made = await client.send("complete_multipart_upload", **arguments, MultipartUpload={"Parts": parts})
                field_of(request, made, "ETag")
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, ClientError) and status_of(cause) == 409:
                # AWS: the upload is over, all parts have to be sent again. Asking once more cannot help.
                raise request.error("the server refused it for a conflict.", cause, errno=errno.EBUSY) from cause
            gone = isinstance(cause, ClientError) and code_of(cause) == "NoSuchUpload"
            # After a lost reply any answer may mean "done": moto, for one, answers 500 to a second complete.
            if not ((gone or self._complete_lost) and await self._is_there(client, request)):
                self._complete_lost |= error.ambiguous
                raise

    async def _is_there(self, client: S3Client, request: Request) -> bool:
        """Whether the object is what an earlier complete, whose reply was lost, must have made of our parts."""
        try:
            answer = await client.send("head_object", **self._object)
        except ClientError as error:
            if status_of(error) == 404:
                return False
            raise
        # An older object under this name may have the same size, but not a later date than our beginning.
        since = self._begun_at or 0.0
        size = sum(part.size for part in self._parts.values())
        made = field_of(request, answer, "LastModified").timestamp()
        return bool(field_of(request, answer, "ContentLength") == size and made >= since)

    def abort(self) -> None:
        request = self._request("abort")

        async def work(client: S3Client) -> None:
            failures: list[StoreError] = []
            if self._upload_id is not None:
                failures += await abort_each(client, request, [(self._key, self._upload_id)])
            try:
                await self._sweep(client, request, tolerated=(errno.EOPNOTSUPP,))
            except StoreError as error:
                failures.append(error)
            if self._complete_sent:  # last: after the aborts no late complete can bring the object back
                with translated(request):
                    await client.send("delete_object", **self._object)
            if failures:
                raise failures[0]

        with translated(request):
            self._session.call(work)

    async def _sweep(self, client: S3Client, request: Request, *, tolerated: tuple[int, ...]) -> None:
        """Aborts every open upload of this key. ``tolerated``: errnos of a listing that cannot be had."""
        try:
            with translated(request):
                found = await list_uploads(client, request, self._key)
        except StoreError as error:
            if error.errno in tolerated:
                return
            raise
        failures = await abort_each(client, request, [(u.key, u.upload_id) for u in found if u.key == self._key])
        if failures:
            raise failures[0]


async def abort_each(client: S3Client, request: Request, uploads: list[tuple[str, str]]) -> list[StoreError]:
    """Aborts uploads, given as key and upload id; one that is gone is no failure. Returns what failed."""
    failures: list[StoreError] = []
    for key, upload_id in uploads:
        try:
            with translated(request):
                await client.send("abort_multipart_upload", Bucket=request.bucket, Key=key, UploadId=upload_id)
        except StoreError as error:
            cause = error.__cause__
            if not (isinstance(cause, ClientError) and status_of(cause) == 404 and code_of(cause) != "NoSuchBucket"):
                failures.append(error)
    return failures
