"""S3, GCS and Azure with obstore moving the bytes: ``engine="obstore"``.

Only what moves data goes through obstore, at a fraction of the CPU: ``put``, the parts of uploads, ``read``,
``read_into``, ``size``. Everything that the commit protocol stands on (create, listings, deletes, open uploads, the
clock) stays with the fsspec store of the same folder, which this one wraps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import obstore

from dcp_storage.errors import UntrustedDataError
from dcp_storage.store import Buffers, Store, Upload, WrappedStore, check_name, total
from dcp_storage.stores.location import Location
from dcp_storage.stores.obstore_errors import NoRangesError, Request, translated
from dcp_storage.stores.obstore_options import Clients, GcsSource, S3Source, check_gcs, check_s3, check_key, runs_here
from dcp_storage.stores.obstore_upload import StreamUpload

__all__ = ["ObstoreStore", "open_obstore"]

T = TypeVar("T")
Uploader = Callable[[Clients, str, Callable[[str], Request]], Upload]

CHUNK = 1 << 20  # bytes of an answer that obstore gathers before it hands them over


def open_obstore(
    location: Location, storage_options: Mapping[str, Any], *, max_concurrency: int, chained: bool = False
) -> Store:
    """Opens a folder of a bucket; sends no request.

    Args:
        location: where it is.
        storage_options: for s3fs or gcsfs, as the user gave them; not changed.
        max_concurrency: requests in flight at once.
        chained: whether the location is a chain, which obstore does not know.

    Raises:
        ValueError: obstore has no counterpart for the location or for one of the options.
    """
    protocol = location.protocol
    if chained or protocol not in ("s3", "s3a", "gs", "gcs"):
        raise ValueError(f'engine="obstore" serves s3:// and gs://; use engine="fsspec" for {protocol}://')
    if protocol in ("s3", "s3a"):
        from dcp_storage.stores.s3 import open_s3
        from dcp_storage.stores.s3_session import s3fs_options

        options = s3fs_options(storage_options, max_concurrency=max_concurrency)
        s3 = open_s3(location, storage_options, max_concurrency=max_concurrency)
        check_s3(options, s3.bucket)
        return ObstoreStore(s3, S3Source(s3.session, s3.bucket, options), s3.bucket, s3.prefix, uploader=None)
    raise AssertionError
