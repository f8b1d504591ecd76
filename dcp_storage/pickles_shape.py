"""Is an unpickled ``Metadata`` what a stock one is, and does it stay inside its folder?

The allow-list only says which classes appear; here their fields are looked at, before anything reads by them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from dcp_storage.errors import CorruptCheckpointError, UntrustedDataError
from dcp_storage.shapes import LARGEST, elements, is_inside
from dcp_storage.store import check_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["checked_metadata"]


def checked_metadata(value: Any, *, file: str, path: str | None = None) -> Metadata:
    """Returns ``value`` if it is a ``Metadata`` all of whose fields are what stock torch writes.

    ``planner_data`` is the planner's own affair and is not looked at.

    Args:
        value: what was unpickled.
        file: name of the file, for errors.
        path: the checkpoint, for errors.

    Raises:
        CorruptCheckpointError: a field is missing, of another type, negative, or a chunk lies outside its tensor.
        UntrustedDataError: a file's name could leave the folder.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    def wrong(what: str, key: str | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{file} is no checkpoint's metadata: {what}.", file=file, path=path, key=key)

    if type(value) is not metadata.Metadata:
        raise wrong(f"it holds a {type(value).__name__}")
    entries, places = _field(value, "state_dict_metadata"), _field(value, "storage_data")
    if type(entries) is not dict or type(places) is not dict:
        raise wrong("its entries or their places are not a dict")
    for key, entry in entries.items():
        if type(key) is not str:
            raise wrong(f"a key is a {type(key).__name__}, not a string")  # whose text may have no end
        if type(entry) is metadata.TensorStorageMetadata:
            if (flaw := _tensor_flaw(entry, metadata)) is not None:
                raise wrong(f"of {key!r:.200}, {flaw}", key)
        elif type(entry) is not metadata.BytesStorageMetadata:
            raise wrong(f"{key!r:.200} is a {type(entry).__name__}", key)
    for index, place in places.items():
        if type(index) is not metadata.MetadataIndex or type(place) is not filesystem._StorageInfo:
            raise wrong(f"it places a {type(index).__name__} by a {type(place).__name__}")
        if (flaw := _place_flaw(index, place)) is not None:
            raise wrong(f"of the place of {index.fqn!r:.200}, {flaw}", index.fqn)
        try:
            check_name(place.relative_path)
        except UntrustedDataError as error:
            error.path, error.key = path, index.fqn
            raise
    if (flaw := _head_flaw(value, metadata.StorageMeta)) is not None:
        raise wrong(flaw)
    return value


def _field(target: Any, name: str) -> Any:
    # A field that the pickle left out is not there at all, since no __init__ ran.
    return getattr(target, name, None)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _are_counts(value: Any) -> bool:
    return type(value) in (torch.Size, tuple) and all(map(_is_count, value))


def _tensor_flaw(entry: Any, metadata: Any) -> str | None:
    size, chunks, properties = _field(entry, "size"), _field(entry, "chunks"), _field(entry, "properties")
    if type(properties) is not metadata.TensorProperties or type(_field(properties, "dtype")) is not torch.dtype:
        return "the properties are not a tensor's"
    if not _are_counts(size) or elements(size) is None:
        return "the size is not a tuple of counts, or of more elements or dimensions than there can be"
    if type(chunks) is not list:
        return "the chunks are not a list"
    for chunk in chunks:
        if type(chunk) is not metadata.ChunkStorageMetadata:
            return f"a chunk is a {type(chunk).__name__}"
        offsets, sizes = _field(chunk, "offsets"), _field(chunk, "sizes")
        if not _are_counts(offsets) or not _are_counts(sizes):
            return "a chunk has no offsets or sizes"
        if len(offsets) != len(size) or len(sizes) != len(size):
            return "a chunk has another number of dimensions"
        if not is_inside(offsets, sizes, size):
            return f"a chunk of {tuple(sizes)} at {tuple(offsets)} lies outside of {tuple(size)}"
    return None


def _place_flaw(index: Any, place: Any) -> str | None:
    descriptors, number = _field(place, "transform_descriptors"), _field(index, "index")
    return _first_flaw(
        (index.offset is None or _are_counts(index.offset), "the chunk's offsets are negative or too large"),
        (number is None or _is_count(number), "the chunk's number is no count"),
        (type(_field(place, "relative_path")) is str, "the file's name is not a string"),
        (_is_count(_field(place, "offset")) and _is_count(_field(place, "length")), "offset or length is no count"),
        (descriptors is None or _are_strings(descriptors), "the transforms are not strings"),
    )


def _head_flaw(value: Any, storage_meta: type) -> str | None:
    version, meta = _field(value, "version"), _field(value, "storage_meta")
    place, *ids = (_field(meta, name) for name in ("checkpoint_id", "save_id", "load_id"))
    return _first_flaw(
        (version is None or type(version) is str, "its version is not a string"),
        (meta is None or type(meta) is storage_meta, "its storage_meta is something else"),
        (place is None or isinstance(place, (str, os.PathLike)), "its checkpoint_id is not a path"),
        (all(name is None or type(name) is str for name in ids), "its save_id or load_id is not a string"),
        (meta is None or _are_strings(_field(meta, "modules")), "its modules are not strings"),
    )


def _are_strings(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(item) is str for item in value)


def _first_flaw(*checks: tuple[bool, str]) -> str | None:
    return next((flaw for holds, flaw in checks if not holds), None)
