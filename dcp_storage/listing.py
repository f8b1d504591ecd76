"""What a checkpoint holds, from its manifest alone: key, shape, dtype. Importing this module does not import torch."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_storage import names
from dcp_storage.current import nothing_committed, read_current, read_standing
from dcp_storage.errors import ObjectNotFoundError, StoreError
from dcp_storage.options import LoadOptions
from dcp_storage.records import BytesEntry, TensorEntry
from dcp_storage.session import checked_options, guard, open_folder
from dcp_storage.stores.location import parse_location

if TYPE_CHECKING:
    from dcp_storage.records import Manifest
    from dcp_storage.store import Store

__all__ = ["SavedKey", "list_keys"]


@dataclass(frozen=True)
class SavedKey:
    """One key of a checkpoint.

    Attributes:
        key: as it is in the state dict.
        shape: of the whole tensor; None for a Python object.
        dtype: e.g. ``"bfloat16"``; None for a Python object.
        nbytes: bytes that the item or items of the key take on the store.
        chunks: in how many pieces it was saved.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    nbytes: int
    chunks: int

    @property
    def elements(self) -> int | None:
        """The number of elements; None for a Python object."""
        return None if self.shape is None else math.prod(self.shape)


def list_keys(
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    storage_options: Mapping[str, Any] | None = None,
    require_commit: bool = True,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> list[SavedKey]:
    """Lists the keys of a checkpoint: reads its commit and its manifest, and nothing else.

    Needs no torch, except for a checkpoint without a commit (``require_commit=False``), whose metadata is torch's.

    Args:
        path: as for :class:`~dcp_storage.FsspecStorageReader`.
        prefix: only keys that begin so. Default: all.
        storage_options: handed to fsspec untouched.
        require_commit: whether a folder without any commit object is refused. False also lists what stock torch wrote.
        options: attempts, deadline and ``trusted_globals``.

    Returns:
        The keys, sorted.

    Raises:
        CheckpointNotFoundError: the folder holds no checkpoint that stands; says what is there.
        CorruptCheckpointError: the manifest is not what was committed.
        TypeError: ``options`` are no LoadOptions, or ``prefix`` is no string.
        InvalidLocationError: ``path`` cannot name a folder.
        StoreError: the store failed.
    """
    if not isinstance(options, LoadOptions):
        raise TypeError(f"options must be LoadOptions, not {type(options).__name__}.")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, not {prefix!r}.")
    location = parse_location(path)
    with guard("list_keys", location):
        opened = open_folder(location, checked_options(storage_options), options)
        try:
            manifest = _manifest(opened.store, options, require_commit=require_commit)
        finally:
            opened.store.close()
    sizes: dict[str, int] = {}
    for item in manifest.items:
        sizes[item.key] = sizes.get(item.key, 0) + item.length
    return [
        _saved(key, entry, sizes.get(key, 0))
        for key, entry in sorted(manifest.entries.items())
        if key.startswith(prefix)
    ]


def _manifest(store: Store, options: LoadOptions, *, require_commit: bool) -> Manifest:
    try:
        current = read_current(store)
    except ObjectNotFoundError as error:  # the bucket itself
        raise nothing_committed(store, None) from error
    if current is not None and current.commit.manifest is not None:
        return read_standing(store, current)
    if current is not None or (require_commit and not _is_by_rank(store)):
        raise nothing_committed(store, current)
    from dcp_storage.reading import read_checkpoint  # imports torch, whose own metadata this is, or says what there is

    return read_checkpoint(store, require_commit=require_commit, trusted_globals=options.trusted_globals).manifest


def _is_by_rank(store: Store) -> bool:
    """Whether single ranks have committed, which leaves no list of the whole."""
    try:
        return any(names.rank_commit(entry.name) is not None for entry in store.entries())
    except StoreError as error:
        if error.errno != errno.EACCES:
            raise
        return False  # without the right to list there is nothing to see


def _saved(key: str, entry: TensorEntry | BytesEntry, nbytes: int) -> SavedKey:
    if isinstance(entry, BytesEntry):
        return SavedKey(key, None, None, nbytes, 1)
    return SavedKey(key, entry.size, entry.dtype, nbytes, len(entry.chunks))
