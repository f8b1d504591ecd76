"""Stores that take away one protection of what is above them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dcp_storage.errors import StoreError
from dcp_storage.store import Buffers, Entry, Store, Upload, WrappedStore

__all__ = ["LeavesRubbish", "LogsFailedWrites", "OutageIsEmpty"]


class LeavesRubbish(WrappedStore):
    """Removes nothing and aborts nothing, as if nobody had asked for it."""

    def upload(self, name: str) -> Upload:
        return _NeverAborted(self.inner.upload(name))

    def delete(self, names: Iterable[str]) -> None:
        """Does nothing."""

    def abort_uploads(self, names: Iterable[str]) -> None:
        """Does nothing."""


class _NeverAborted(Upload):
    def __init__(self, inner: Upload) -> None:
        self.inner = inner

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.write_part(number, offset, buffers, crc32=crc32)

    def complete(self) -> None:
        self.inner.complete()

    def abort(self) -> None:
        """Does nothing."""


class LogsFailedWrites(WrappedStore):
    """Writes a line into a log where a file could not be written, and goes on."""

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        try:
            self.inner.put(name, buffers, crc32=crc32)
        except StoreError:
            logging.getLogger(__name__).exception("could not write %s", name)


class OutageIsEmpty(WrappedStore):
    """Takes a listing that failed for an empty folder.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.hidden = 0

    def entries(self) -> list[Entry]:
        try:
            return self.inner.entries()
        except StoreError:
            self.hidden += 1
            return []

    def folders(self) -> list[str]:
        try:
            return self.inner.folders()
        except StoreError:
            self.hidden += 1
            return []
