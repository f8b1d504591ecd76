"""torch's own Metadata to a manifest and back, and the pickle that stock readers read (no I/O)."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_storage.codec import dtype_named, name_of_dtype
from dcp_storage.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedDataError,
)
from dcp_storage.pickles import load_plain
from dcp_storage.records import (
    FORMAT,
    BytesEntry,
    Chunk,
    FileRecord,
    ItemRecord,
    Manifest,
    PlannerData,
    StorageMetaRecord,
    TensorEntry,
    WrittenItem,
)

__all__ = ["manifest_from_stock", "manifest_of", "metadata_of", "stock_pickle", "stock_storage_data"]


def manifest_of(metadata: Metadata, results: Sequence[Sequence[tuple[MetadataIndex, WrittenItem]]]) -> Manifest:
    """The manifest of a save.

    Args:
        metadata: what the planner made; its ``storage_data`` is not looked at.
        results: of each rank, each item's index and what the rank says of it.
    """
    files: dict[str, tuple[int, FileRecord | None]] = {}
    items: list[ItemRecord] = []
    for rank in results:
        for _, written in rank:
            number, shard = files.get(written.name, (len(files), None))
            files[written.name] = (number, written.shard or shard)
            items.append(msgspec.structs.replace(written.item, file=number))
    shards = []
    for name, (_, shard) in files.items():
        if shard is None:
            raise CheckpointError(f"No rank told the size of the file {name}.", key=name, kind="results")
        shards.append(shard)
    return Manifest(
        format=FORMAT,
        version=metadata.version,
        files=tuple(shards),
        items=tuple(items),
        entries={key: _entry(key, value) for key, value in metadata.state_dict_metadata.items()},
        planner_data=_planner_data(metadata.planner_data),
        storage_meta=_storage_meta(metadata.storage_meta),
    )


def manifest_from_stock(metadata: Metadata, sizes: Mapping[str, int]) -> Manifest:
    """The manifest of a checkpoint that stock torch wrote: places as it has them, no CRC-32s.

    Args:
        metadata: stock's, already through the allow-list.
        sizes: file name → bytes, from a listing.

    Raises:
        CorruptCheckpointError: a file is missing, or an item reaches beyond its end.
    """
    files: dict[str, int] = {}
    items = []
    for index, info in (metadata.storage_data or {}).items():
        name = info.relative_path
        if name not in sizes:
            raise CorruptCheckpointError(f"The file {name} is missing.", file=name, key=index.fqn, wanted="a file")
        if info.offset + info.length > sizes[name]:
            raise CorruptCheckpointError(
                f"The file {name} is too short: {info.offset + info.length} bytes wanted, {sizes[name]} found.",
                file=name,
                key=index.fqn,
                wanted=info.offset + info.length,
                found=sizes[name],
            )
        items.append(
            ItemRecord(
                key=index.fqn,
                offsets=None if index.offset is None else tuple(index.offset),
                index=index.index,
                file=files.setdefault(name, len(files)),
                offset=info.offset,
                length=info.length,
                payload_length=info.length,
                transforms=tuple(getattr(info, "transform_descriptors", None) or ()),
            )
        )
    return Manifest(
        format=FORMAT,
        version=getattr(metadata, "version", None),
        files=tuple(FileRecord(name, sizes[name], None, 0) for name in files),
        items=tuple(items),
        entries={key: _entry(key, value) for key, value in metadata.state_dict_metadata.items()},
        planner_data=_planner_data(metadata.planner_data),
        storage_meta=_storage_meta(getattr(metadata, "storage_meta", None)),
    )


def metadata_of(manifest: Manifest, *, trusted_globals: Sequence[Any] = (), path: str | None = None) -> Metadata:
    """Torch's Metadata of a manifest, with ``storage_data`` as index → :class:`ItemRecord`.

    Raises:
        IncompatibleCheckpointError: a dtype that this torch does not have.
        UntrustedDataError: the planner's data asks for a global outside the allow-list.
        CorruptCheckpointError: the planner's data does not match its CRC-32.
    """
    chunks = _Chunks()
    return Metadata(
        state_dict_metadata={key: _stock_entry(key, entry, path, chunks) for key, entry in manifest.entries.items()},
        planner_data=_load_planner_data(manifest.planner_data, trusted_globals, path),
        storage_data={_index(item): item for item in manifest.items},
        storage_meta=_stock_storage_meta(manifest.storage_meta),
        version=manifest.version,
    )


def stock_storage_data(manifest: Manifest) -> dict[MetadataIndex, Any]:
    """Index → place, in stock torch's own class; equal names and offsets are one object, which a pickle holds once."""
    keys = {key: key for key in manifest.entries}
    sizes: dict[tuple[int, ...] | None, torch.Size | None] = {None: None}
    files = [record.name for record in manifest.files]
    out = {}
    for item in manifest.items:
        offsets = item.offsets
        if offsets not in sizes:
            sizes[offsets] = torch.Size(offsets or ())
        index = MetadataIndex(keys.get(item.key, item.key), sizes[offsets], item.index)
        out[index] = _StorageInfo(files[item.file], item.offset, item.length, list(item.transforms) or None)
    return out


def stock_pickle(
    manifest: Manifest, storage_data: Mapping[MetadataIndex, Any] | None = None
) -> tuple[bytes, str | None]:
    """The bytes of ``.metadata`` for stock readers: stock classes and builtins only.

    Args:
        manifest: what it says.
        storage_data: :func:`stock_storage_data` of the same manifest, where the caller has it already.

    Returns:
        The pickle, and a warning where the planner's own data had to be left out of it.
    """
    metadata = metadata_of(msgspec.structs.replace(manifest, planner_data=None, items=()))
    metadata.storage_data = dict(stock_storage_data(manifest) if storage_data is None else storage_data)
    warning = None
    data = manifest.planner_data
    if data is not None and data.paths is not None:
        metadata.planner_data = dict(data.paths)
    elif data is not None and data.opaque is not None:
        try:
            metadata.planner_data = load_plain(data.opaque, what="planner_data")
        except CheckpointError as error:
            warning = f"The stock view (.metadata) is written without the planner's own data: {error}"
    return pickle.dumps(metadata), warning


def _index(item: ItemRecord) -> MetadataIndex:
    offset = None if item.offsets is None else torch.Size(item.offsets)
    return MetadataIndex(item.key, offset, item.index)


def _entry(key: str, value: Any) -> TensorEntry | BytesEntry:
    if isinstance(value, BytesStorageMetadata):
        return BytesEntry()
    if not isinstance(value, TensorStorageMetadata):
        raise CheckpointError(
            f"The planner describes {key!r} by a {type(value).__name__}, which no reader would know.",
            key=key,
            kind="planner",
        )
    properties = value.properties
    return TensorEntry(
        dtype=name_of_dtype(properties.dtype),
        size=tuple(value.size),
        chunks=tuple(Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks),
        layout=str(properties.layout).removeprefix("torch."),
        requires_grad=properties.requires_grad,
        memory_format=str(properties.memory_format).removeprefix("torch."),
        pin_memory=properties.pin_memory,
    )


class _Chunks(dict[Chunk, ChunkStorageMetadata]):
    """Torch's record of each chunk; equal ones, of which layers of one shape have many, are one object."""

    def __missing__(self, chunk: Chunk) -> ChunkStorageMetadata:
        made = self[chunk] = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        return made


def _stock_entry(key: str, entry: TensorEntry | BytesEntry, path: str | None, chunks: _Chunks) -> Any:
    if isinstance(entry, BytesEntry):
        return BytesStorageMetadata()
    dtype = dtype_named(entry.dtype)
    layout, memory_format = vars(torch).get(entry.layout), vars(torch).get(entry.memory_format)
    if dtype is None or not isinstance(layout, torch.layout) or not isinstance(memory_format, torch.memory_format):
        raise IncompatibleCheckpointError(
            f"The tensor {key!r} is of dtype {entry.dtype}, layout {entry.layout}, memory format "
            f"{entry.memory_format}; torch {torch.__version__} does not have all of them.",
            path=path,
            key=key,
        )
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=dtype,
            layout=layout,
            requires_grad=entry.requires_grad,
            memory_format=memory_format,
            pin_memory=entry.pin_memory,
        ),
        size=torch.Size(entry.size),
        chunks=[chunks[chunk] for chunk in entry.chunks],
    )


def _is_path(value: Any) -> bool:
    return type(value) is tuple and all(
        type(part) is str or (type(part) is int and abs(part) < 1 << 63) for part in value
    )


def _planner_data(data: Any) -> PlannerData | None:
    if data is None:
        return None
    if type(data) is dict and all(type(key) is str and _is_path(path) for key, path in data.items()):
        return PlannerData(paths=data)
    opaque = io.BytesIO()
    try:
        pickle.dump(data, opaque, protocol=4)
    except RecursionError as error:
        raise UntrustedDataError("The planner's data is nested too deeply to be kept.", cause=error) from error
    return PlannerData(opaque=opaque.getvalue(), crc32=zlib.crc32(opaque.getvalue()))


def _load_planner_data(data: PlannerData | None, trusted_globals: Sequence[Any], path: str | None) -> Any:
    if data is None:
        return None
    if data.opaque is None:
        return None if data.paths is None else dict(data.paths)
    found = zlib.crc32(data.opaque)
    if found != data.crc32:
        raise CorruptCheckpointError(
            "The planner's data in the manifest does not match its CRC-32.", path=path, wanted=data.crc32, found=found
        )
    return load_plain(data.opaque, trusted_globals=trusted_globals, what="planner_data", path=path)


def _storage_meta(meta: StorageMeta | None) -> StorageMetaRecord | None:
    if meta is None:
        return None
    return StorageMetaRecord(
        None if meta.checkpoint_id is None else str(meta.checkpoint_id), meta.save_id, tuple(meta.modules)
    )


def _stock_storage_meta(meta: StorageMetaRecord | None) -> StorageMeta | None:
    if meta is None:
        return None
    return StorageMeta(checkpoint_id=meta.checkpoint_id, save_id=meta.save_id, modules=list(meta.modules))
