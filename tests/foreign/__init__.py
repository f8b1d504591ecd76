"""Filesystems that nobody wrote a store for, and object stores with habits of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dcp_storage.store import Store
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store

__all__ = ["opened"]


@contextmanager
def opened(url: str, options: Mapping[str, Any] | None = None) -> Iterator[Store]:
    """The store that a writer or reader with this URL and these ``storage_options`` would use."""
    store = open_store(parse_location(url), options)
    try:
        yield store
    finally:
        store.close()
