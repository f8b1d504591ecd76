"""S3 and GCS with obstore moving the bytes: ``engine="obstore"``.

Only what moves data goes through obstore, at a fraction of the CPU: ``put``, the parts of uploads, ``read``,
``read_into``, and ``size``. Everything that the commit protocol stands on (create, listings, deletes, open uploads, the
clock) stays with the fsspec store of the same folder, which this one wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import obstore

from dcp_storage.errors import UntrustedDataError
from dcp_storage.store import Buffers, Store, Upload, WrappedStore, check_name, total
from dcp_storage.stores.asking import READ_TIMEOUT, Request
from dcp_storage.stores.location import Location
from dcp_storage.stores.obstore_errors import NoRangesError, translated
from dcp_storage.stores.obstore_options import Clients, GcsSource, S3Source, Source, check_gcs, check_s3, runs_here
from dcp_storage.stores.obstore_upload import StreamUpload

__all__ = ["Begin", "ObstoreStore", "open_obstore"]

Begin = Callable[..., Upload]
"""Begins an upload: ``begin(clients=..., key=..., request=...)``."""

CHUNK = 1 << 20  # bytes of an answer that obstore gathers before it hands them over


def open_obstore(
    location: Location,
    storage_options: Mapping[str, Any] | None = None,
    *,
    max_concurrency: int = 16,
    chained: bool = False,
    deadline: float = 300.0,
) -> ObstoreStore:
    """Opens a folder of a bucket; sends no request.

    Args:
        location: where it is.
        storage_options: for s3fs or gcsfs, as the user gave them; not changed.
        max_concurrency: requests in flight at once.
        chained: whether the location is a chain of filesystems, which obstore does not know.
        deadline: seconds after which one request is given up; after 60 without a byte of its answer it is so anyway.

    Raises:
        InvalidLocationError: the location has no bucket.
        ValueError: obstore has no counterpart for the location or for one of the options.
    """
    kind = location.protocol
    if kind in ("s3", "s3a") and not chained:
        from dcp_storage.stores.s3 import open_s3
        from dcp_storage.stores.s3_session import s3fs_options

        options = s3fs_options(storage_options, max_concurrency=max_concurrency, silence=min(deadline, READ_TIMEOUT))
        s3 = open_s3(location, storage_options, max_concurrency=max_concurrency, deadline=deadline)
        check_s3(options, s3._bucket)
        source: Source = S3Source(s3._session, s3._bucket, options)
        begin: Begin = partial(StreamUpload, inner=s3, max_concurrency=max_concurrency)
        return ObstoreStore(s3, source, s3._bucket, s3._prefix, begin)
    if kind in ("gs", "gcs") and not chained:
        from dcp_storage.stores.gcs import open_gcs
        from dcp_storage.stores.gcs_session import gcsfs_options
        from dcp_storage.stores.obstore_gcs import ObstoreGcsUpload

        check_gcs(gcsfs_options(storage_options))
        gcs = open_gcs(location, storage_options, max_concurrency=max_concurrency, deadline=deadline)
        begin = partial(ObstoreGcsUpload, session=gcs._session)
        return ObstoreStore(gcs, GcsSource(gcs._session), gcs._bucket, gcs._prefix, begin, parallel_parts=True)
    raise ValueError(f'engine="obstore" serves s3:// and gs:// alone; use engine="fsspec" for {location.protocol}://')


class ObstoreStore(WrappedStore):
    """A folder of a bucket.

    In a process that was forked from one which had opened such a store, obstore cannot run; there everything goes
    through the inner store.

    Args:
        inner: the fsspec store of the folder.
        source: what obstore's clients are made of.
        bucket: the bucket's name.
        prefix: what stands before each name in the bucket; empty or with a slash at its end.
        begin: begins an upload.
        parallel_parts: whether its parts may be sent at once and in any order.

    Raises:
        ValueError: the prefix has an empty part, ``.`` or ``..``, which obstore's paths cannot have.
    """

    def __init__(
        self,
        inner: Store,
        source: Source,
        bucket: str,
        prefix: str,
        begin: Begin,
        *,
        parallel_parts: bool = False,
    ) -> None:
        super().__init__(inner)
        if {"", ".", ".."} & set(prefix.split("/")[:-1]):
            raise ValueError(f'obstore has no path for the key {prefix!r}; use engine="fsspec"')
        self.parallel_parts = parallel_parts
        self._bucket = bucket
        self._prefix = prefix
        self._begin = begin
        self._clients = Clients(source)

    def _request(self, operation: str, name: str, *, changes: bool = False) -> Request:
        return Request(operation, self.url, self._bucket, name, changes)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def size(self, name: str) -> int:
        key, request = self._key(name), self._request("size", name)
        if not runs_here():
            return self.inner.size(name)
        client = self._clients.for_reading(request)
        with translated(request):
            return obstore.head(client, key)["size"]

    def read(self, name: str, *, limit: int) -> bytes:
        key, request = self._key(name), self._request("read", name)
        if not runs_here():
            return self.inner.read(name, limit=limit)
        client = self._clients.for_reading(request)
        with translated(request):
            answer = obstore.get(client, key)
            size = answer.meta["size"]
            if size > limit:
                raise UntrustedDataError(
                    f"{self.url}/{name} has {size} bytes; more than {limit} are not read.", path=self.url, name=name
                )
            data = bytes(answer.bytes())
        if len(data) != size:
            raise request.error(f"{len(data)} of {size} bytes came.", transient=True)
        return data

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        key, request = self._key(name), self._request("read_into", name)
        wanted = total(buffers)
        if not wanted:
            return
        if not runs_here():
            self.inner.read_into(name, offset, buffers)
            return
        client = self._clients.for_reading(request)
        end = offset + wanted
        try:
            with translated(request, end=end):
                answer = obstore.get(client, key, options={"range": (offset, end)})
                start, stop = answer.range
                size = answer.meta["size"]
                if start != offset:
                    raise request.error(f"bytes from {offset} on were asked for, other ones came.")
                if stop < end:
                    raise request.too_short(end, size if size < end else None)
                missing = _fill(answer.stream(min_chunk_size=CHUNK), buffers, wanted)
        except NoRangesError:
            self.inner.read_into(name, offset, buffers)
            return
        if missing:
            raise request.error(f"{wanted - missing} of {wanted} bytes came.", transient=True)

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        """Writes the object in one request; ``crc32`` cannot be sent."""
        key, request = self._key(name), self._request("put", name, changes=True)
        if not runs_here():
            self.inner.put(name, buffers, crc32=crc32)
            return
        client = self._clients.for_writing(request)
        body = [buffer for buffer in buffers if buffer.nbytes]
        with translated(request):
            obstore.put(client, key, body or b"", use_multipart=False)

    def upload(self, name: str) -> Upload:
        """Begins an object of several parts; the first request is sent with a part."""
        key = self._key(name)
        if not runs_here():
            return self.inner.upload(name)
        return self._begin(
            clients=self._clients, key=key, request=lambda operation: self._request(operation, name, changes=True)
        )


def _fill(chunks: Any, buffers: Buffers, wanted: int) -> int:
    """Copies the first ``wanted`` bytes of an answer into ``buffers``; returns how many did not come."""
    targets = iter([buffer for buffer in buffers if buffer.nbytes])
    target = memoryview(b"")
    missing = wanted
    for chunk in chunks:
        piece = memoryview(chunk)[:missing]
        missing -= len(piece)
        while piece:
            target = target or next(targets)
            count = min(len(piece), len(target))
            target[:count] = piece[:count]
            piece, target = piece[count:], target[count:]
    return missing
