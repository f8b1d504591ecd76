"""Giving a checkpoint that stock torch wrote a manifest and a commit (DESIGN section 3, Adopt)."""

from __future__ import annotations

import functools
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fsspec.callbacks import Callback

from dcp_storage import names
from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.coverage import check_whole
from dcp_storage.crc import combine_all
from dcp_storage.current import list_commits, nothing_committed, read_current
from dcp_storage.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    NotCommittedError,
    ObjectNotFoundError,
    ObjectTooShortError,
)
from dcp_storage.options import KIB, LoadOptions
from dcp_storage.pickles import load_metadata
from dcp_storage.records import (
    MAX_MANIFEST,
    FileRecord,
    ItemRecord,
    Manifest,
    ManifestRef,
    block_size,
    decode_manifest,
    encode_manifest,
)
from dcp_storage.session import phase
from dcp_storage.store import Atomicity, Entry, Store
from dcp_storage.tools.crew import Crew
from dcp_storage.tools.drawing import count_text
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport
from dcp_storage.tools.streams import FileSums, Part, layouts
from dcp_storage.torchview import manifest_from_stock

__all__ = ["Adoption", "adopt", "adopt_folder"]

_SHARD = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp")


@dataclass
class Adoption(ToolReport):
    """What was adopted.

    Attributes:
        says: what the commit promises.
        commit: its number.
        files: files of the checkpoint.
        nbytes: bytes in them.
        keys: keys of the state dict.
        bytes_read: bytes read to compute CRC-32s; 0 where none were.
        single_writer: whether the store could not promise create-if-absent.
    """

    says: str = ""
    commit: int | None = None
    files: int = 0
    nbytes: int = 0
    keys: int = 0
    bytes_read: int = 0
    single_writer: bool = False


def adopt(
    path: str | os.PathLike[str],
    *,
    data: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    callback: Callback | None = None,
) -> Adoption:
    """Commits a checkpoint that stock torch wrote as it lies there; its files stay as they are.

    Every file that its ``.metadata`` names must be there and long enough. Nothing shows whether what is in them is
    right: the commit says "unchanged from now on". Adopt while nobody saves to the folder: stock torch does not know of
    commits, and a save of its own would alter what was adopted.

    Args:
        path: the checkpoint's folder.
        data: also read every byte and keep its CRC-32, so that later changes of bytes, not only of sizes, are found.
            Default False.
        storage_options: handed to fsspec.
        options: concurrency, memory and retries; ``trusted_globals`` for what the ``.metadata`` may hold.
        callback: an fsspec Callback that is told of bytes read.

    Raises:
        CheckpointNotFoundError: there is no checkpoint of stock torch here.
        CheckpointExistsError: the folder holds a commit already, or a save was faster.
        CorruptCheckpointError: a file is missing or short; nothing was changed.
        UntrustedDataError: its metadata asks for a global outside the allow-list.
        CommitUnknownError: it cannot be known whether the commit was made.
        StoreError: the store failed.
    """
    return adopt_folder(folder_at(path, storage_options, options), data=data, callback=callback)


def adopt_folder(folder: Folder, *, data: bool = False, callback: Callback | None = None) -> Adoption:
    """As :func:`adopt`, of a folder that may be opened through a wrapper."""
    report = Adoption(folder.location.url)
    opened = folder.open()
    store = opened.store
    try:
        with phase(report, "look"):
            manifest = _read_stock(store, folder)
            report.single_writer = store.create_if_absent is not Atomicity.ATOMIC
        report.files = len(manifest.files)
        report.nbytes = sum(record.size for record in manifest.files)
        report.keys = len(manifest.entries)
        if data:
            with phase(report, "data"):
                manifest = _with_sums(report, store, manifest, folder, callback)
        with phase(report, "commit"):
            # Whoever wrote these files may have left them to the page cache (stock's sync_files=False): invariant I2.
            store.make_durable(record.name for record in manifest.files)
            _commit(report, store, manifest)
    finally:
        opened.count_into(report)
        store.close()
    return report


def _read_stock(store: Store, folder: Folder) -> Manifest:
    try:
        entries = store.entries()
    except ObjectNotFoundError as error:  # the bucket itself
        raise nothing_committed(store, None) from error
    _refuse(store, entries)
    sizes = {e.name: e.size for e in entries}
    data = store.read(names.STOCK_VIEW, limit=min(sizes[names.STOCK_VIEW], MAX_MANIFEST))
    trusted = folder.options.trusted_globals if isinstance(folder.options, LoadOptions) else ()
    metadata = load_metadata(data, trusted_globals=trusted, path=store.url)
    try:
        manifest = manifest_from_stock(metadata, sizes)
    except CorruptCheckpointError as error:
        error.path = store.url
        raise
    return msgspec.structs.replace(manifest, files=tuple(_with_rank(record) for record in manifest.files))


def _refuse(store: Store, entries: Sequence[Entry]) -> None:
    numbers = list_commits(entries)
    if numbers:
        current = read_current(store, numbers)
        if current is not None and current.commit.manifest is None:
            raise CheckpointExistsError(
                f"{store.url}: a checkpoint here was deleted (commit {current.number} is void), so its .metadata may "
                "be what is left of it. Move what stock torch wrote to a folder of its own and adopt it there.",
                path=store.url,
            )
        if current is None:
            raise CheckpointExistsError(
                f"{store.url}: {names.commit_name(numbers[0])} is there but torn or altered: this was no checkpoint of "
                "stock torch. Restore that object from a copy.",
                path=store.url,
            )
        raise CheckpointExistsError(
            f"{store.url} holds a commit ({names.commit_name(current.number)}) already: there is nothing to adopt.",
            path=store.url,
        )
    listed = {e.name for e in entries}
    if any(names.rank_commit(name) is not None for name in listed):
        raise CheckpointExistsError(
            f"{store.url} was saved without collectives by this package; every rank has a commit already.",
            path=store.url,
        )
    if names.STOCK_VIEW not in listed:
        if any(names.is_stock_view(name) for name in listed):
            raise NotCommittedError(
                f"{store.url}: saved by stock torch without collectives, rank by rank: there is no .metadata of the "
                "whole that could be adopted. Load it and save it with collectives.",
                path=store.url,
            )
        raise nothing_committed(store, None)


def _with_rank(record: FileRecord) -> FileRecord:
    found = _SHARD.fullmatch(record.name)
    return msgspec.structs.replace(record, rank=int(found[1])) if found else record


def _commit(report: Adoption, store: Store, manifest: Manifest) -> None:
    token = names.new_token()
    encoded = encode_manifest(manifest)
    name = names.manifest_name(token)
    # What no load would take must not be committed.
    check_whole(decode_manifest(encoded, path=store.url, file=names.STOCK_VIEW), path=store.url, file=names.STOCK_VIEW)
    ref = ManifestRef(name, len(encoded), zlib.crc32(encoded))
    store.put(ref.name, [memoryview(encoded)], crc32=ref.crc32)
    commit = new_commit(
        1,
        token,
        manifest=ref,
        world_size=len({record.rank for record in manifest.files}),
        single_writer=report.single_writer,
    )
    create_commit(store, commit)
    report.commit = 1
    checked = "sizes and CRC-32s" if report.bytes_read or not report.nbytes else "sizes"
    report.says = f"unchanged from now on, by the {checked} of {count_text(report.files, 'file')}; not that "
    report.says += "what is in them is right"
    if report.single_writer:
        report.warn(
            f"{report.path}: this store cannot refuse a second writer; the commit holds as long as no other job saves "
            "to this folder."
        )


# -- CRC-32s ---------------------------------------------------------------------------------------------------------


def _with_sums(
    report: Adoption, store: Store, manifest: Manifest, folder: Folder, callback: Callback | None
) -> Manifest:
    """The manifest with the CRC-32 of every file, item and block, by reading each file once."""
    options = folder.options
    size = max(min(options.part_size, options.memory_budget // 2), 64 * KIB)
    if callback is not None:
        callback.set_size(report.nbytes)
    # Blocks are laid out with sums of nothing, which those of what is there then replace.
    laid_out = msgspec.structs.replace(manifest, items=tuple(_with_blocks(item) for item in manifest.items))
    sums = [FileSums(layout, known=False) for layout in layouts(laid_out)]
    lock = threading.Lock()

    def read(found: FileSums, part: Part) -> None:
        record = found.layout.record
        data = memoryview(bytearray(part.size))
        try:
            store.read_into(record.name, part.start, [data])
        except (ObjectNotFoundError, ObjectTooShortError) as error:
            raise CorruptCheckpointError(
                f"{store.url}: {record.name} is gone or was shortened while it was being read.",
                path=store.url,
                file=record.name,
                wanted=record.size,
                cause=error,
            ) from error
        found.look(part, data)
        with lock:
            report.bytes_read += part.size
            if callback is not None:
                callback.relative_update(part.size)

    with Crew(options.max_concurrency, options.memory_budget) as crew:
        for found in sums:
            for part in found.layout.parts(size):
                crew.do(part.size, functools.partial(read, found, part))
    items = {id(item): summed for found in sums for item, summed in _summed(found)}
    return msgspec.structs.replace(
        manifest,
        files=tuple(msgspec.structs.replace(found.layout.record, crc32=found.crc32) for found in sums),
        items=tuple(items.get(id(item), item) for item in laid_out.items),
    )


def _with_blocks(item: ItemRecord) -> ItemRecord:
    block = block_size(item.length)
    return msgspec.structs.replace(item, block=block, blocks=(0,) * -(-item.length // block))


def _summed(found: FileSums) -> Iterator[tuple[ItemRecord, ItemRecord]]:
    """Each item that has bytes, as it was laid out and with its sums."""
    cells: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for cell, crc in zip(found.layout.cells, found.of_cells(), strict=True):
        if cell.item is not None:
            cells.setdefault((cell.item.offset, cell.item.length), []).append(crc)
    for item in found.layout.items:
        if item.length:
            blocks = cells[item.offset, item.length]
            whole = combine_all(blocks)
            sums = tuple(crc for crc, _ in blocks)
            yield item, msgspec.structs.replace(item, crc32=whole, payload_crc32=whole, blocks=sums)
