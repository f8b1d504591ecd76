"""S3 and what speaks its protocol, through s3fs.

s3fs gives the session (credentials, profiles, regions, endpoints) and the event loop; the requests are made here, one
for each call, on its aiobotocore client: see :mod:`dcp_storage.stores.s3_session` for why.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from dcp_storage.errors import (
    InvalidLocationError,
    ObjectExistsError,
    ObjectTooShortError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.names import new_token
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, check_name, total
from dcp_storage.stores.asking import READ_TIMEOUT, Request
from dcp_storage.stores.location import without_password
from dcp_storage.stores.s3_bodies import body_of, checksum_of, date_of, fill, next_piece, part_of
from dcp_storage.stores.s3_errors import code_of, field_of, status_of, translated
from dcp_storage.stores.s3_listing import list_folders, list_objects, list_uploads
from dcp_storage.stores.s3_session import S3Client, S3Session, s3fs_options
from dcp_storage.stores.s3_upload import S3Upload, abort_each

__all__ = ["Place", "S3Store", "open_s3"]

T = TypeVar("T")

MIB = 1024 * 1024
AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")


class Place(Protocol):
    """What :func:`open_s3` needs of a location."""

    @property
    def url(self) -> str:
        """The folder's URL."""

    @property
    def path(self) -> str:
        """Bucket and key, ``bucket/a/folder``."""


def open_s3(
    place: Place,
    storage_options: Mapping[str, Any] | None = None,
    *,
    max_concurrency: int,
    deadline: float = 300.0,
) -> S3Store:
    """Opens a folder of a bucket; sends no request.

    Args:
        place: the location.
        storage_options: for s3fs, as the user gave them; not changed. Retries and timeouts that they do not set are
            set so that only our own layer retries.
        max_concurrency: requests in flight at once, from all threads.
        deadline: seconds after which one request is given up; after 60 without a byte of its answer it is so anyway.

    Raises:
        InvalidLocationError: the location has no bucket.
        ValueError: an option that cannot be used.
    """
    options = s3fs_options(storage_options, max_concurrency=max_concurrency, silence=min(deadline, READ_TIMEOUT))
    bucket, _, key = place.path.lstrip("/").partition("/")
    if bucket.startswith("arn:"):  # an access point, whose name may hold slashes
        bucket, key, _ = S3Session(options, bucket).filesystem().split_path(place.path)
    url = without_password(place.url).rstrip("/")
    if not bucket:
        raise InvalidLocationError(f"{url!r} names no bucket.", path=url)
    return S3Store(url, bucket, key, options, max_concurrency=max_concurrency, deadline=deadline)


class _Probe:
    """What is known of a bucket's create-if-absent. For the event loop only."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.answer: Atomicity | None = None


class S3Store(Store):
    """A folder of an S3 bucket.

    Args:
        url: the folder's URL, for messages.
        bucket: the bucket's name.
        key: the folder's key in the bucket; empty for the whole bucket.
        options: for ``S3FileSystem``, from :func:`~dcp_storage.stores.s3_session.s3fs_options`.
        max_concurrency: most deletes in flight at once.
        deadline: seconds after which one request is given up.
    """

    parallel_parts = True
    min_part_size = 5 * MIB
    max_parts = 10_000
    remote = True

    def __init__(
        self,
        url: str,
        bucket: str,
        key: str,
        options: Mapping[str, Any],
        *,
        max_concurrency: int = 16,
        deadline: float = 300.0,
    ) -> None:
        self.url = url
        self._bucket = bucket
        folder = key.rstrip("/")
        self._prefix = f"{folder}/" if folder else ""
        self._max_concurrency = max_concurrency
        self._session = S3Session(options, bucket, deadline)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _request(self, operation: str, name: str | None = None, *, changes: bool = False) -> Request:
        return Request(operation, self.url, self._bucket, name, changes)

    def _call(self, request: Request, work: Callable[[S3Client], Awaitable[T]]) -> T:
        with translated(request):
            return self._session.call(work)

    # -- create-if-absent

    @property
    def create_if_absent(self) -> Atomicity:
        """Atomic on AWS. Behind another endpoint a scratch object is created twice, once per process and bucket."""
        return self._call(self._request("create_if_absent", changes=True), self._find_atomicity)

    def _known_atomicity(self, client: S3Client) -> Atomicity | None:
        host = urlsplit(client.endpoint).hostname or ""
        return Atomicity.ATOMIC if host.endswith(AWS_HOSTS) else self._probe_of(client).answer

    def _probe_of(self, client: S3Client) -> _Probe:
        probe: _Probe = client.kept.setdefault(f"create_if_absent {self._bucket}", _Probe())
        return probe

    async def _find_atomicity(self, client: S3Client) -> Atomicity:
        probe = self._probe_of(client)
        async with probe.lock:
            known = self._known_atomicity(client)
            if known is None:
                known = probe.answer = await self._probe(client)
        return known

    async def _probe(self, client: S3Client) -> Atomicity:
        scratch = {"Bucket": self._bucket, "Key": self._key(f".claim.{new_token()}")}
        answers = True
        try:
            await client.send("put_object", **scratch, Body=body_of([]), IfNoneMatch="*")
            await client.send("put_object", **scratch, Body=body_of([]), IfNoneMatch="*")
        except asyncio.TimeoutError:
            answers = False  # another request would wait as long; what may be left is a claim, which prune sweeps
            raise
        except ClientError as error:
            if status_of(error) == 412:
                return Atomicity.ATOMIC
            if status_of(error) == 501:  # the header is known and refused
                return Atomicity.NONE
            raise
        finally:
            if answers:
                await client.send("delete_object", **scratch)
        return Atomicity.NONE

    def create(self, name: str, data: bytes) -> None:
        request = self._request("create", name, changes=True)
        target = {"Bucket": self._bucket, "Key": self._key(name)}

        async def work(client: S3Client) -> None:
            known = self._known_atomicity(client)
            if known is not Atomicity.ATOMIC and await self._exists(client, target):
                raise self._exists_error(request, None)
            condition = {} if known is Atomicity.NONE else {"IfNoneMatch": "*"}
            body = body_of([memoryview(data)])
            try:
                checksum = checksum_of(zlib.crc32(data))
                answer = await client.send("put_object", **target, Body=body, **checksum, **condition)
            except ClientError as error:
                if status_of(error) == 412:
                    raise self._exists_error(request, error) from error
                raise
            field_of(request, answer, "ETag")

        self._call(request, work)

    async def _exists(self, client: S3Client, target: Mapping[str, str]) -> bool:
        try:
            await client.send("head_object", **target)
        except ClientError as error:
            if status_of(error) == 404:  # a missing bucket as well: the write that follows will say so
                return False
            raise
        return True

    def _exists_error(self, request: Request, error: BaseException | None) -> ObjectExistsError:
        return ObjectExistsError(
            f"create of {self.url}/{request.name} failed: there is an object of this name.",
            operation="create",
            path=self.url,
            key=request.name,
            cause=error,
        )

    # -- the folder

    def make_folder(self) -> None:
        """Nothing to do: folders are not real on S3. Whether there is a bucket, the next request finds out."""

    def now(self) -> float:
        """The ``Date`` of the server's answer to a listing of one key; whole seconds."""
        request = self._request("now")
        date = date_of(self._call(request, lambda client: self._glance(client, request)))
        if date is None:
            raise request.error("the server's answer has no Date header that can be read.")
        return date

    async def _glance(self, client: S3Client, request: Request) -> dict[str, Any]:
        # Not HEAD, which cannot say whether the bucket or the right to see it is missing.
        answer = await client.send("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
        field_of(request, answer, "IsTruncated")
        return answer

    def entries(self) -> list[Entry]:
        request = self._request("entries")
        return self._call(request, lambda client: list_objects(client, request, self._prefix))

    def folders(self) -> list[str]:
        request = self._request("folders")
        return self._call(request, lambda client: list_folders(client, request, self._prefix))

    def open_uploads(self) -> list[Entry]:
        request = self._request("open_uploads")
        found = self._call(request, lambda client: list_uploads(client, request, self._prefix))
        return [Entry(u.key[len(self._prefix) :], 0, u.begun) for u in found]

    def abort_uploads(self, names: Iterable[str]) -> None:
        request = self._request("abort_uploads", changes=True)
        keys = {self._key(name) for name in names}

        async def work(client: S3Client) -> None:
            found = await list_uploads(client, request, self._prefix)
            failures = await abort_each(client, request, [(u.key, u.upload_id) for u in found if u.key in keys])
            if failures:
                raise failures[0]

        if keys:
            self._call(request, work)

    # -- objects

    def size(self, name: str) -> int:
        target = {"Bucket": self._bucket, "Key": self._key(name)}
        request = self._request("size", name)
        answer = self._call(request, lambda client: client.send("head_object", **target))
        return int(field_of(request, answer, "ContentLength"))

    def read(self, name: str, *, limit: int) -> bytes:
        target = {"Bucket": self._bucket, "Key": self._key(name)}
        request = self._request("read", name)

        async def work(client: S3Client) -> bytes:
            answer = await client.send("get_object", **target)
            size = answer.get("ContentLength")  # None where the server sends it in chunks
            pieces: list[bytes] = []
            held = 0
            async with answer["Body"] as body:
                while (size or 0) <= limit and held <= limit and (piece := await next_piece(body)):
                    pieces.append(piece)
                    held += len(piece)
            if (size or held) > limit:
                raise UntrustedDataError(
                    f"{self.url}/{name} has {size or held} bytes or more; more than {limit} are not read.",
                    path=self.url,
                    name=name,
                )
            if size is not None and held != size:
                raise request.error(f"{held} of {size} bytes came.", transient=True)
            return b"".join(pieces)

        return self._call(request, work)

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        wanted = total(buffers)
        target = {"Bucket": self._bucket, "Key": self._key(name)}
        if not wanted:
            return
        request = self._request("read_into", name)
        end = offset + wanted

        async def work(client: S3Client) -> None:
            try:
                answer = await client.send("get_object", **target, Range=f"bytes={offset}-{end - 1}")
            except ClientError as error:
                if status_of(error) != 416:
                    raise
                raise self._too_short(request, end, _size_in(error), error) from error
            async with answer["Body"] as body:
                self._check_range(request, answer, offset, end)
                missing = await fill(body, buffers, wanted)
            if missing:
                raise request.error(f"{wanted - missing} of {wanted} bytes came.", transient=True)

        self._call(request, work)

    def _check_range(self, request: Request, answer: Mapping[str, Any], offset: int, end: int) -> None:
        """Raises unless the answer begins at ``offset`` and the object reaches to ``end``."""
        # rclone says 200 to a range, and says in Content-Range what it sends.
        if answer["ResponseMetadata"]["HTTPStatusCode"] == 206 or "ContentRange" in answer:
            place = part_of(answer.get("ContentRange", ""))
        else:
            place = (0, answer.get("ContentLength"))  # the whole object
        if place is None or place[0] != offset:
            raise request.error(f"bytes from {offset} on were asked for, other ones came.")
        size = place[1]
        if size is not None and size < end:
            raise self._too_short(request, end, size, None)

    def _too_short(
        self, request: Request, wanted: int, found: int | None, error: BaseException | None
    ) -> ObjectTooShortError:
        return ObjectTooShortError(
            f"{self.url}/{request.name} ends at byte {'?' if found is None else found}, before byte {wanted}.",
            operation=request.operation,
            path=self.url,
            key=request.name,
            wanted=wanted,
            found=found,
            cause=error,
        )

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        target = {"Bucket": self._bucket, "Key": self._key(name)}
        request = self._request("put", name, changes=True)

        async def work(client: S3Client) -> None:
            answer = await client.send("put_object", **target, Body=body_of(buffers), **checksum_of(crc32))
            field_of(request, answer, "ETag")

        self._call(request, work)

    def upload(self, name: str) -> Upload:
        """Begins an object of several parts; the first request is sent with the first part."""
        return S3Upload(self._session, self._key(name), url=self.url, bucket=self._bucket, name=name)

    def delete(self, names: Iterable[str]) -> None:
        # One request each: DeleteObjects wants a checksum that some servers do not know, or know only another of.
        targets = [(name, self._key(name)) for name in names]

        async def work(client: S3Client) -> list[StoreError]:
            free = asyncio.Semaphore(self._max_concurrency)
            failures: list[StoreError] = []

            async def one(name: str, key: str) -> None:
                async with free:
                    try:
                        with translated(self._request("delete", name, changes=True)):
                            await client.send("delete_object", Bucket=self._bucket, Key=key)
                    except StoreError as error:
                        cause = error.__cause__
                        if not (isinstance(cause, ClientError) and code_of(cause) == "NoSuchKey"):
                            failures.append(error)

            await asyncio.gather(*(one(name, key) for name, key in targets))
            return failures

        if targets:
            failures = self._call(self._request("delete", changes=True), work)
            if failures:
                # What cannot be helped by another try comes first, so that nobody tries in vain.
                raise min(failures, key=lambda failure: failure.transient)

    def close(self) -> None:
        self._session.close()


def _size_in(error: Any) -> int | None:
    """The object's size in an answer 416, where the server says it."""
    said = error.response.get("Error", {}).get("ActualObjectSize")
    if said is not None and str(said).isdigit():
        return int(said)
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    place = part_of(headers.get("content-range", ""))
    return None if place is None else place[1]
