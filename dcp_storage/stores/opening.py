"""From a location to the store that serves it; the one place that opens filesystems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsspec

from dcp_storage.errors import CheckpointError, InvalidLocationError
from dcp_storage.store import Store
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.location import Location, without_password
from dcp_storage.stores.memory import MemoryStore
from dcp_storage.stores.remote import FsspecStore
from dcp_storage.stores.translate import store_error

__all__ = ["open_store"]


def open_store(
    location: Location,
    storage_options: Mapping[str, Any] | None = None,
    *,
    max_concurrency: int = 16,
    engine: str = "fsspec",
    deadline: float = 300.0,
) -> Store:
    """Opens the folder; makes nothing in it.

    Args:
        location: from :func:`~dcp_storage.stores.location.parse_location`.
        storage_options: what fsspec's filesystem takes, untouched. A local folder needs none and ignores them, but for
            ``direct_io`` (default True): False keeps what is saved in the page cache.
        max_concurrency: most requests at once, for stores that keep a pool of connections.
        engine: what moves the bytes of S3 and GCS, ``"fsspec"`` or ``"obstore"``; local disk and ``memory://`` have
            stores of their own, whatever is said here.
        deadline: seconds that a request may take with its retries; on S3 and GCS one that takes longer, or that for 60
            seconds gets no byte of its answer, is given up, where the user's options say nothing else.

    Raises:
        InvalidLocationError: the filesystem or the engine does not take these options, or a package that it needs is
            missing.
        StoreError: the filesystem could not be reached.
    """
    options = dict(storage_options or {})
    shown = without_password(location.url)
    chained = location.url != f"{location.protocol}://{location.path}"
    try:
        if location.protocol == "file":
            return LocalStore(location.path, direct=_flag(options, "direct_io"))
        if location.protocol == "memory":
            return MemoryStore(location.path, fs=fsspec.filesystem("memory", **options))
        if engine == "obstore":
            from dcp_storage.stores.obstore_store import open_obstore

            return open_obstore(location, options, max_concurrency=max_concurrency, chained=chained, deadline=deadline)
        if location.protocol in ("s3", "s3a") and not chained:
            from dcp_storage.stores.s3 import open_s3

            return open_s3(location, options, max_concurrency=max_concurrency, deadline=deadline)
        if location.protocol in ("gs", "gcs") and not chained:
            from dcp_storage.stores.gcs import open_gcs

            return open_gcs(location, options, max_concurrency=max_concurrency, deadline=deadline)
        return _open_generic(location, options, shown, chained=chained)
    except CheckpointError:
        raise
    except ImportError as error:
        advice = " pip install 'dcp-storage[obstore]'." if error.name == "obstore" else ""
        raise InvalidLocationError(
            f"{shown!r} cannot be opened, as a package is missing: {error}.{advice}", path=shown, cause=error
        ) from error
    except (TypeError, ValueError) as error:
        raise InvalidLocationError(
            f"{shown!r} cannot be opened with these storage_options ({type(error).__name__}: {error}).",
            path=shown,
            cause=error,
        ) from error
    except Exception as error:
        raise store_error(error, "open_store", shown) from error


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name, True)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")
    return value


def _open_generic(location: Location, options: dict[str, Any], shown: str, *, chained: bool) -> Store:
    if chained:
        fs, path = fsspec.core.url_to_fs(location.url, **options)
        if location.url.partition("::")[0] in ("dir", "dir://"):
            path = ""  # fsspec hands the folder out twice: as the filesystem's root and as the path in it
        return FsspecStore(fs, path, shown)
    # url_to_fs would take "::" in a folder's name for a chain, so its two steps are taken here for a single link.
    kind = fsspec.get_filesystem_class(location.protocol)
    fs = kind(**{**kind._get_kwargs_from_urls(location.url), **options})
    path = kind._strip_protocol(location.url)
    last = location.path.rpartition("/")[2]
    if "/" in location.path and not path.endswith(last):
        raise InvalidLocationError(
            f"{type(fs).__name__} reads {shown!r} as the path {path!r}: its folder name has characters that this "
            f"filesystem takes for something else.",
            path=shown,
        )
    return FsspecStore(fs, path, shown)
