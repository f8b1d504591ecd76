"""From a folder to a checkpoint that can be read: its commit and manifest, or what stock torch left."""

from __future__ import annotations

import dataclasses
import errno
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_storage import names
from dcp_storage.codec import dtype_named
from dcp_storage.coverage import check_whole
from dcp_storage.current import blame, check_sizes, list_commits, nothing_committed, read_current, read_standing
from dcp_storage.errors import CorruptCheckpointError, NotCommittedError, ObjectNotFoundError, StoreError
from dcp_storage.lone import holds_lone_ranks, read_rank
from dcp_storage.pickles import load_metadata, load_object
from dcp_storage.placing import Check, check_blocks, product
from dcp_storage.records import MAX_MANIFEST, ItemRecord, Manifest, TensorEntry
from dcp_storage.store import Store
from dcp_storage.torchview import manifest_from_stock

__all__ = ["RANK_BY_RANK", "Checkpoint", "LoadSteps", "read_checkpoint", "read_rank_checkpoint", "sizes_of_files"]

_LARGEST_OBJECT = 1 << 30
_OVERHEAD = 1 << 20  # what torch.save puts around a tensor, generously

RANK_BY_RANK = "rank-by-rank"
"""The kind of the error that says that every rank has to read its own metadata."""


@dataclass
class Checkpoint:
    """A checkpoint that can be read.

    Attributes:
        number: its commit's number; None for one that stock torch wrote.
        identity: CRC-32 of its manifest (0 without one); of the label where every rank has a manifest of its own.
        of_rank: whether it is the part of one rank, saved without collectives.
        manifest: all that it is.
        bytes_read: bytes that were read to know this.
        items: index → item.
    """

    number: int | None
    identity: int
    manifest: Manifest
    bytes_read: int
    of_rank: bool = False
    items: Mapping[MetadataIndex, ItemRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.items = {
            MetadataIndex(item.key, None if item.offsets is None else torch.Size(item.offsets)): item
            for item in self.manifest.items
        }

    def file_of(self, item: ItemRecord) -> str:
        """The name of the file that an item is in."""
        return self.manifest.files[item.file].name

    def limit_of(self, item: ItemRecord) -> int:
        """Most bytes that an item can have once its stream extensions are undone: those of its tensor and some more."""
        entry = self.manifest.entries.get(item.key)
        dtype = dtype_named(entry.dtype) if isinstance(entry, TensorEntry) else None
        if not isinstance(entry, TensorEntry) or dtype is None:
            return _LARGEST_OBJECT
        sizes = [product(chunk.sizes) for chunk in entry.chunks]
        return max(sizes, default=0) * dtype.itemsize + _OVERHEAD


def read_checkpoint(store: Store, *, require_commit: bool, trusted_globals: Sequence[Any] = ()) -> Checkpoint:
    """Finds the highest commit and reads its manifest; or reads what stock torch wrote, if that is allowed.

    Raises:
        CheckpointNotFoundError: the folder holds no checkpoint.
        NotCommittedError: it holds files, but no commit that stands; says what there is and what to do. Of kind
            :data:`RANK_BY_RANK` where every rank committed for itself.
        CheckpointReplacedError: the checkpoint was replaced between two of the reads. Load again.
        CorruptCheckpointError: the manifest is gone or not what was committed.
        IncompatibleCheckpointError: it is of a later format.
        StoreError: the store failed. An outage is never taken for an empty folder.
    """
    try:
        current = read_current(store)
    except ObjectNotFoundError as error:  # the bucket itself
        raise nothing_committed(store, None) from error
    if current is not None and current.commit.manifest is not None:
        manifest = read_standing(store, current)
        ref = current.commit.manifest
        return Checkpoint(current.number, ref.crc32, manifest, ref.size)
    if current is not None:
        raise nothing_committed(store, current)
    try:
        entries = store.entries()
    except StoreError as error:
        if error.errno != errno.EACCES:
            raise
        raise nothing_committed(store, None) from error
    listed = {e.name for e in entries}
    stock_rank = not require_commit and names.STOCK_VIEW not in listed and any(map(names.is_stock_view, listed))
    if holds_lone_ranks(entries) or stock_rank:
        raise NotCommittedError(
            f"{store.url}: saved without collectives, rank by rank; there is no commit of the whole.",
            path=store.url,
            kind=RANK_BY_RANK,
        )
    if require_commit:
        raise nothing_committed(store, None)
    return _read_stock(store, names.STOCK_VIEW, trusted_globals)


def read_rank_checkpoint(
    store: Store, rank: int, *, require_commit: bool, trusted_globals: Sequence[Any] = ()
) -> Checkpoint:
    """The part of one rank in a checkpoint that was saved without collectives; raises as :func:`read_checkpoint`."""
    if require_commit or holds_lone_ranks(store.entries()):
        commit, manifest = read_rank(store, rank)
        ref = commit.manifest
        label = zlib.crc32((commit.label or "").encode())
        return Checkpoint(None, label, manifest, ref.size if ref else 0, of_rank=True)
    return dataclasses.replace(_read_stock(store, names.rank_view_name(rank), trusted_globals), of_rank=True)


def _read_stock(store: Store, view: str, trusted_globals: Sequence[Any]) -> Checkpoint:
    entries = store.entries()
    sizes = {e.name: e.size for e in entries}
    if view not in sizes or list_commits(entries):
        raise nothing_committed(store, None)
    data = store.read(view, limit=min(sizes[view], MAX_MANIFEST))
    metadata = load_metadata(data, trusted_globals=trusted_globals, path=store.url)
    try:
        manifest = manifest_from_stock(metadata, sizes)
    except CorruptCheckpointError as error:
        error.path = store.url
        raise
    if view == names.STOCK_VIEW:  # any other is of one rank's part
        check_whole(manifest, path=store.url, file=view)
    return Checkpoint(None, 0, manifest, len(data))


def sizes_of_files(store: Store, checkpoint: Checkpoint, wanted: Iterable[str]) -> None:
    """Checks the wanted files by one listing; if one is not right, says whether the checkpoint was replaced.

    Raises:
        CorruptCheckpointError: a file is missing, short or long.
        CheckpointReplacedError: because another save committed meanwhile.
    """
    try:
        check_sizes(store, checkpoint.manifest, wanted)
    except CorruptCheckpointError as error:
        found = blame(store, checkpoint.number, error)
        if found is error:
            raise
        raise found from error


@dataclass(frozen=True)
class LoadSteps:
    """What a load rests on; the test kit exchanges some to show what each is for.

    Attributes:
        check_sizes: looks at the wanted files before any tensor changes (invariant I8).
        check_blocks: compares bytes with their CRC-32 (invariant I8).
        load_object: unpickles through the allow-list (invariant I9).
    """

    check_sizes: Callable[[Store, Checkpoint, Iterable[str]], None] = sizes_of_files
    check_blocks: Check = check_blocks
    load_object: Callable[..., Any] = load_object
