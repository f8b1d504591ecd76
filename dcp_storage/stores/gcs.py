"""Google Cloud Storage, through gcsfs.

gcsfs gives credentials, the HTTP session and the event loop; the requests are made here, one for each call:
see :mod:`dcp_storage.stores.gcs_session` for why, and for how gRPC is kept out of it. Large objects are composed of
parts: :mod:`dcp_storage.stores.gcs_upload`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar

import aiohttp

from dcp_storage.errors import InvalidLocationError, ObjectTooShortError, StoreError, UntrustedDataError
from dcp_storage.names import new_token
from dcp_storage.store import Atomicity, Buffers, Entry, Store, Upload, check_name, total
from dcp_storage.stores.asking import READ_TIMEOUT, Request
from dcp_storage.stores.gcs_crc32c import crc32c_of
from dcp_storage.stores.gcs_errors import Refused, translated
from dcp_storage.stores.gcs_listing import list_folders, list_objects, list_parts
from dcp_storage.stores.gcs_sending import CREATE, send_whole
from dcp_storage.stores.gcs_session import GcsClient, GcsSession, gcsfs_options
from dcp_storage.stores.gcs_upload import GcsUpload, delete_keys
from dcp_storage.stores.s3_bodies import fill, next_piece, part_of

__all__ = ["GcsStore", "Place", "open_gcs"]

T = TypeVar("T")

MEDIA = {"alt": "media"}


class Place(Protocol):
    """What :func:`open_gcs` needs of a location."""

    @property
    def url(self) -> str:
        """The folder's URL, without secrets."""

    @property
    def path(self) -> str:
        """Bucket and key, ``bucket/a/folder``."""


def open_gcs(
    place: Place,
    storage_options: Mapping[str, Any] | None = None,
    *,
    max_concurrency: int,
    deadline: float = 300.0,
) -> GcsStore:
    """Opens a folder of a bucket; sends no request.

    Args:
        place: the location.
        storage_options: for gcsfs, as the user gave them; not changed. Time-outs that they do not set are set.
        max_concurrency: most deletes in flight at once.
        deadline: seconds after which one request is given up; after 60 without a byte of its answer it is so anyway.

    Raises:
        InvalidLocationError: the location has no bucket.
        ValueError: an option that cannot be used.
    """
    options = gcsfs_options(storage_options, silence=min(deadline, READ_TIMEOUT))
    bucket, _, key = place.path.lstrip("/").partition("/")
    if not bucket:
        raise InvalidLocationError(f"{place.url!r} names no bucket.", path=place.url)
    return GcsStore(place.url.rstrip("/"), bucket, key, options, max_concurrency=max_concurrency, deadline=deadline)


class _Probe:
    """What is known of a bucket's create-if-absent. For the event loop only."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.answer: Atomicity | None = None


class _Body:
    """A response as :func:`~dcp_storage.stores.s3_bodies.fill` wants it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.raw_stream = response


class GcsStore(Store):
    """A folder of a GCS bucket.

    Args:
        url: the folder's URL, for messages.
        bucket: the bucket's name.
        key: the folder's key in the bucket; empty for the whole bucket.
        options: for ``GCSFileSystem``, from :func:`~dcp_storage.stores.gcs_session.gcsfs_options`.
        max_concurrency: most deletes in flight at once.
        deadline: seconds after which one request is given up.
    """

    parallel_parts = True
    min_part_size = 1
    max_parts = 1024  # composed in two rounds of 32
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
        self._session = GcsSession(options, url, deadline)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _request(self, operation: str, name: str | None = None, *, changes: bool = False) -> Request:
        return Request(operation, self.url, self._bucket, name, changes)

    def _call(self, request: Request, work: Callable[[GcsClient], Awaitable[T]]) -> T:
        with translated(request):
            return self._session.call(work)

    # -- create-if-absent

    @property
    def create_if_absent(self) -> Atomicity:
        """Atomic at Google. Behind another endpoint a scratch object is created twice, once per process and bucket."""
        return self._call(self._request("create_if_absent", changes=True), self._find_atomicity)

    def _known_atomicity(self, client: GcsClient) -> Atomicity | None:
        return Atomicity.ATOMIC if client.on_google else self._probe_of(client).answer

    def _probe_of(self, client: GcsClient) -> _Probe:
        probe: _Probe = client.kept.setdefault(f"create_if_absent {self._bucket}", _Probe())
        return probe

    async def _find_atomicity(self, client: GcsClient) -> Atomicity:
        probe = self._probe_of(client)
        async with probe.lock:
            known = self._known_atomicity(client)
            if known is None:
                known = probe.answer = await self._probe(client)
        return known

    async def _probe(self, client: GcsClient) -> Atomicity:
        scratch = self._key(f".claim.{new_token()}")
        answer, answers = Atomicity.NONE, True
        failures: dict[str, StoreError] = {}
        try:
            await send_whole(client, self._bucket, scratch, [], crc32c=0, condition=CREATE)
            await send_whole(client, self._bucket, scratch, [], crc32c=0, condition=CREATE)
        except asyncio.TimeoutError:
            answers = False  # another request would wait as long; what may be left is a claim, which prune sweeps
            raise
        except Refused as error:
            if error.status != 412:
                raise
            answer = Atomicity.ATOMIC
        finally:
            if answers:
                failures = await delete_keys(client, {scratch: self._request("create_if_absent", changes=True)})
        if failures:
            raise failures[scratch]
        return answer

    def create(self, name: str, data: bytes) -> None:
        request = self._request("create", name, changes=True)
        key = self._key(name)
        body = [memoryview(data)]
        crc32c = crc32c_of(body)

        async def work(client: GcsClient) -> None:
            if self._known_atomicity(client) is not Atomicity.ATOMIC and await self._exists(client, key):
                raise request.exists()
            try:
                await send_whole(client, self._bucket, key, body, crc32c=crc32c, condition=CREATE)
            except Refused as error:
                if error.status == 412:
                    raise request.exists(error) from error
                raise

        self._call(request, work)

    async def _exists(self, client: GcsClient, key: str) -> bool:
        try:
            await client.send("GET", client.url("b", self._bucket, "o", key), {"fields": "name"})
        except Refused as error:
            if error.status == 404:  # a missing bucket as well: the write that follows will say so
                return False
            raise
        return True

    # -- the folder

    def make_folder(self) -> None:
        """Nothing to do: folders are not real on GCS. Whether there is a bucket, the next request finds out."""

    def now(self) -> float:
        """The ``Date`` of the server's answer to a listing of one name; whole seconds."""
        request = self._request("now")
        text = self._call(request, self._glance)
        try:
            return parsedate_to_datetime(text or "").timestamp()
        except ValueError as error:
            raise request.error("the server's answer has no Date header that can be read.", error) from error

    async def _glance(self, client: GcsClient) -> str | None:
        params = {"prefix": self._prefix, "maxResults": "1", "fields": "items(name)"}
        answer = await client.send("GET", client.url("b", self._bucket, "o"), params)
        return answer.headers.get("Date")

    def entries(self) -> list[Entry]:
        """All objects of the folder; parts of open uploads are objects too."""
        request = self._request("entries")
        return self._call(request, lambda client: list_objects(client, request, self._prefix))

    def folders(self) -> list[str]:
        request = self._request("folders")
        return self._call(request, lambda client: list_folders(client, request, self._prefix))

    def open_uploads(self) -> list[Entry]:
        """Uploads whose parts are still there, found by the note that each part carries.

        Resumable sessions cannot be listed; they show nothing, and GCS ends them after a week.
        """
        request = self._request("open_uploads")
        found: dict[tuple[str, str], list[float]] = {}
        for part in self._call(request, lambda client: list_parts(client, request, self._prefix)):
            found.setdefault((part.name, part.upload), []).extend(() if part.made is None else (part.made,))
        return [Entry(name, 0, min(made, default=None)) for (name, _), made in found.items()]

    def abort_uploads(self, names: Iterable[str]) -> None:
        request = self._request("abort_uploads", changes=True)
        wanted = {check_name(name) for name in names}

        async def work(client: GcsClient) -> dict[str, StoreError]:
            parts = await list_parts(client, request, self._prefix)
            requests = {part.key: request for part in parts if part.name in wanted}
            return await delete_keys(client, requests, at_once=self._max_concurrency)

        if wanted:
            _raise_worst(self._call(request, work))

    # -- objects

    def size(self, name: str) -> int:
        key = self._key(name)

        async def work(client: GcsClient) -> int:
            answer = await client.send("GET", client.url("b", self._bucket, "o", key), {"fields": "size"})
            return int(answer.json().get("size", 0))

        return self._call(self._request("size", name), work)

    def read(self, name: str, *, limit: int) -> bytes:
        key = self._key(name)
        request = self._request("read", name)

        async def work(client: GcsClient) -> bytes:
            async with client.open("GET", client.url("b", self._bucket, "o", key), MEDIA) as response:
                size = response.content_length  # None where the server sends it in chunks
                body = _Body(response)
                pieces: list[bytes] = []
                held = 0
                while (size or 0) <= limit and held <= limit and (piece := await next_piece(body)):
                    pieces.append(piece)
                    held += len(piece)
            if (size or held) > limit:
                raise UntrustedDataError(
                    f"{self.url}/{name} has {size or held} bytes or more; more than {limit} are not read.",
                    path=self.url,
                    name=name,
                )
            return b"".join(pieces)  # aiohttp raises where the answer is shorter than it says

        return self._call(request, work)

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        key = self._key(name)
        wanted = total(buffers)
        if not wanted:
            return
        request = self._request("read_into", name)
        end = offset + wanted

        async def work(client: GcsClient) -> None:
            url, header = client.url("b", self._bucket, "o", key), {"Range": f"bytes={offset}-{end - 1}"}
            try:
                async with client.open("GET", url, MEDIA, headers=header) as response:
                    self._check_range(request, response, offset, end)
                    missing = await fill(_Body(response), buffers, wanted)
            except Refused as error:
                if error.status != 416:
                    raise
                place = part_of(error.headers.get("Content-Range", ""))
                raise self._too_short(request, end, None if place is None else place[1], error) from error
            if missing:
                raise request.error(f"{wanted - missing} of {wanted} bytes came.", transient=True)

        self._call(request, work)

    def _check_range(self, request: Request, response: aiohttp.ClientResponse, offset: int, end: int) -> None:
        """Raises unless the answer begins at ``offset`` and the object reaches to ``end``."""
        place: tuple[int, int | None] | None = (0, response.content_length)  # the whole object
        if response.status == 206:
            place = part_of(response.headers.get("Content-Range", ""))
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
        """Writes the object in one request; GCS checks it by CRC-32C, which is made here (``crc32`` it cannot use)."""
        key, crc32c = self._key(name), crc32c_of(buffers)

        async def work(client: GcsClient) -> None:
            await send_whole(client, self._bucket, key, buffers, crc32c=crc32c)

        self._call(self._request("put", name, changes=True), work)

    def upload(self, name: str) -> Upload:
        """Begins an object of several parts; the first request is sent with the first part."""
        return GcsUpload(self._session, self._key(name), url=self.url, bucket=self._bucket, name=name)

    def delete(self, names: Iterable[str]) -> None:
        requests = {self._key(name): self._request("delete", name, changes=True) for name in names}

        async def work(client: GcsClient) -> dict[str, StoreError]:
            return await delete_keys(client, requests, at_once=self._max_concurrency)

        if requests:
            _raise_worst(self._call(self._request("delete", changes=True), work))

    def close(self) -> None:
        self._session.close()


def _raise_worst(failures: Mapping[str, StoreError]) -> None:
    """Raises the first failure that cannot be helped by another try, or else the first."""
    if failures:
        raise min(failures.values(), key=lambda failure: failure.transient)
