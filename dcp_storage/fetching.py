"""One ranged read of committed bytes: what is gone or short is corrupt, and named."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_storage.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from dcp_storage.store import Store

__all__ = ["fetch"]


def fetch(store: Store, file: str, offset: int, buffers: Sequence[memoryview], key: str | None) -> None:
    """Reads a range that was committed.

    Args:
        store: the folder.
        file: name of the file.
        offset: first byte.
        buffers: what is filled.
        key: a state-dict key that is in the range, for errors.

    Raises:
        CorruptCheckpointError: the file is gone or ends before the range does.
        StoreError: the store failed otherwise.
    """
    size = sum(b.nbytes for b in buffers)
    try:
        store.read_into(file, offset, buffers)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(
            f"{store.url}: {file} is gone, of which bytes {offset} to {offset + size} were to be read"
            f"{'' if key is None else f' for {key!r:.200}'}.",
            path=store.url,
            file=file,
            key=key,
            offset=offset,
            wanted=offset + size,
            cause=error,
        ) from error
    except ObjectTooShortError as error:
        raise CorruptCheckpointError(
            f"{store.url}: {file} is too short: bytes up to {offset + size} were committed, "
            f"{'it ends before' if error.found is None else f'it has {error.found}'}"
            f"{'' if key is None else f' (key {key!r:.200})'}.",
            path=store.url,
            file=file,
            key=key,
            offset=offset,
            wanted=offset + size,
            found=error.found,
            cause=error,
        ) from error
