"""Format 1 as typed records: the commit object and the manifest, to JSON and back (pure; no torch, no I/O).

Everything parsed here comes from the store and is checked before it is used: types and signs by msgspec, names,
places and counts by :func:`decode_manifest`. Unknown fields are ignored; a higher ``format`` is refused.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Literal, TypeVar

import msgspec

from dcp_storage.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from dcp_storage.names import check_names
from dcp_storage.options import RankFigures
from dcp_storage.overlaps import first_overlap
from dcp_storage.shapes import elements, is_dense, is_inside

__all__ = [
    "FORMAT",
    "MAX_COMMIT",
    "MAX_MANIFEST",
    "BytesEntry",
    "Chunk",
    "Commit",
    "FileRecord",
    "ItemRecord",
    "Manifest",
    "ManifestRef",
    "PlannerData",
    "StorageMetaRecord",
    "TensorEntry",
    "WrittenItem",
    "block_size",
    "decode_commit",
    "decode_manifest",
    "encode_commit",
    "encode_manifest",
]

FORMAT = 1

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
MAX_COMMIT = 64 * 1024
"""Bytes of the largest commit object that is read."""

MAX_MANIFEST = 4 * 1024**3
"""Bytes of the largest manifest that is written or read: 4 GiB, some 2.5 million items of 128 blocks each."""

_MIN_BLOCK, _MAX_BLOCK, _BLOCKS = 16 * 1024, 1024 * 1024, 128
_LARGEST_BLOCK = 64 * 1024**2  # a reader of a slice holds a whole block, so that it must not be of any size

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Crc = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


def block_size(payload: int) -> int:
    """Bytes of one checksum block of a payload of ``payload`` bytes: a 128th of it, within 16 KiB and 1 MiB."""
    return min(max(-(-payload // _BLOCKS), _MIN_BLOCK), _MAX_BLOCK)


class ManifestRef(msgspec.Struct, frozen=True):
    """The manifest a commit names: its file name, size in bytes and CRC-32."""

    name: str
    size: Size
    crc32: Crc


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit object.

    Attributes:
        format: version of the format; 1.
        state: ``committed``, or ``void`` for a folder that was deleted.
        number: its place in the folder's row of commits, from 1.
        author: the token of the attempt that made it; how an attempt knows its own (invariant I6).
        time: when, UTC, ISO 8601, by the author's clock.
        world_size: ranks of the save.
        torch: version of torch that saved.
        package: version of this package.
        single_writer: whether the store could not promise create-if-absent.
        manifest: what it commits; None in a void.
        restates: the number of the commit it repeats (a fence of prune), None for a save's own.
        rank: in a save without collectives the rank that it commits for; None otherwise.
        label: in a save without collectives what all its ranks agreed on; None otherwise.
    """

    format: int
    state: Literal["committed", "void"]
    number: Size
    author: str
    time: str
    world_size: Size = 0
    torch: str = ""
    package: str = ""
    single_writer: bool = False
    manifest: ManifestRef | None = None
    restates: int | None = None
    rank: Size | None = None
    label: str | None = None


class FileRecord(msgspec.Struct, frozen=True):
    """One shard file: name, size in bytes, CRC-32 of all of it (None where nobody computed it), rank that wrote it."""

    name: str
    size: Size
    crc32: Crc | None
    rank: Size


class ItemRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item (a tensor's chunk or an object) and where its bytes are.

    Attributes:
        key: state-dict key.
        offsets: the chunk's place in the whole tensor; None for an object.
        index: torch's index hint.
        file: index into the manifest's ``files``.
        offset: first byte of the item in the file.
        length: bytes of the item, as ``torch.save`` makes them.
        crc32: CRC-32 of the item.
        payload_offset: first byte of the payload within the item. The payload is the raw bytes of a tensor where
            ``dtype`` is there, else the whole item.
        payload_length: bytes of the payload.
        payload_crc32: CRC-32 of the payload.
        block: bytes of one block.
        blocks: CRC-32 of each block of the payload, in order.
        dtype: element type of the raw bytes, e.g. ``"bfloat16"``.
        shape: shape of the chunk.
        stride: element strides where they are not those of a contiguous tensor.
        transforms: names of stock stream extensions that the item went through.
    """

    key: str
    offsets: tuple[Size, ...] | None = None
    index: Size | None = None
    file: Size
    offset: Size
    length: Size
    crc32: Crc | None = None
    payload_offset: Size = 0
    payload_length: Size = 0
    payload_crc32: Crc | None = None
    block: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_BLOCK)] = _MAX_BLOCK
    blocks: tuple[Crc, ...] = ()
    dtype: str | None = None
    shape: tuple[Size, ...] | None = None
    stride: tuple[Size, ...] | None = None
    transforms: tuple[str, ...] = ()


class WrittenItem(msgspec.Struct, frozen=True):
    """What a rank tells the coordinator of an item it wrote (torch's ``WriteResult.storage_data``).

    Attributes:
        name: the file's name.
        item: the item; its ``file`` is filled in by the coordinator.
        shard: the file's own facts, on the first item of each file only.
        figures: what the rank's writing took, on the rank's first item only.
    """

    name: str
    item: ItemRecord
    shard: FileRecord | None
    figures: RankFigures | None = None


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor: where it begins and how large it is, per dimension."""

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tensor", omit_defaults=True):
    """A tensor of the state dict as a whole, in the words of torch's TensorStorageMetadata."""

    dtype: str
    size: tuple[Size, ...]
    chunks: tuple[Chunk, ...]
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous_format"
    pin_memory: bool = False


class BytesEntry(msgspec.Struct, frozen=True, tag_field="kind", tag="bytes"):
    """A Python object of the state dict."""


class PlannerData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The planner's own data: the paths of a flattened state dict, or opaque bytes with their CRC-32.

    Attributes:
        paths: key → path of names and indices in the nested state dict, as torch's default planner has them.
        opaque: a pickle, for any other planner's data; read through the allow-list only.
        crc32: CRC-32 of ``opaque``.
    """

    paths: dict[str, tuple[int | str, ...]] | None = None
    opaque: bytes | None = None
    crc32: Crc | None = None


class StorageMetaRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """torch's StorageMeta as plain data."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a checkpoint is: its entries, its items and its files.

    Attributes:
        format: version of the format; 1.
        version: torch's own version string of its Metadata.
        files: every shard file.
        items: every item; ``item.file`` indexes ``files``.
        entries: key → what the whole tensor or object is.
        planner_data: None where the planner kept nothing.
        storage_meta: torch's StorageMeta.
    """

    format: int
    version: str | None = None
    files: tuple[FileRecord, ...]
    items: tuple[ItemRecord, ...]
    entries: dict[str, TensorEntry | BytesEntry]
    planner_data: PlannerData | None = None
    storage_meta: StorageMetaRecord | None = None


class _Head(msgspec.Struct):
    format: int


_ENCODER = msgspec.json.Encoder()
_HEAD = msgspec.json.Decoder(_Head)
_COMMIT = msgspec.json.Decoder(Commit)
_MANIFEST = msgspec.json.Decoder(Manifest)
_CHECK = b',"crc32":'


def encode_commit(commit: Commit) -> bytes:
    """The commit object's body: JSON whose last field is the CRC-32 of all before it (a torn body so shows)."""
    body = _ENCODER.encode(commit)[:-1]
    return body + _CHECK + str(zlib.crc32(body)).encode() + b"}"


def decode_commit(data: bytes, *, path: str, file: str) -> Commit:
    """The commit in ``data``.

    Raises:
        CorruptCheckpointError: its own CRC-32 does not fit; to a reader such a commit is absent.
        IncompatibleCheckpointError: it is of a higher format.
        UntrustedDataError: the manifest's name could leave the folder.
    """
    body, found, check = data.rpartition(_CHECK)
    wanted = zlib.crc32(body)
    if not found or check != str(wanted).encode() + b"}":
        raise CorruptCheckpointError(
            f"{path}: {file} is torn or altered: it does not match its own CRC-32.",
            path=path,
            file=file,
            wanted=wanted,
            found=check[:20].decode("ascii", "replace"),
        )
    _check_format(data, path, file)
    commit = _decode(_COMMIT, data, path, file)
    if (commit.state == "committed") != (commit.manifest is not None):
        raise _corrupt(path, file, f"a {commit.state} commit with{'' if commit.manifest else 'out'} a manifest")
    check_names([] if commit.manifest is None else [commit.manifest.name], path=path)
    return commit


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's JSON.

    Raises:
        CheckpointError: of kind ``"manifest"``: it would be larger than :data:`MAX_MANIFEST`, or a key or path in it is
            no text that JSON has (a lone surrogate).
    """
    try:
        data = _ENCODER.encode(manifest)
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"A key or path of the state dict is no valid text: {error.object!r:.200}.", kind="manifest", cause=error
        ) from error
    if len(data) > MAX_MANIFEST:
        raise CheckpointError(
            f"The manifest has {len(data)} bytes, and no more than {MAX_MANIFEST} are read: save fewer items.",
            kind="manifest",
        )
    return data


def decode_manifest(data: bytes, *, path: str, file: str) -> Manifest:
    """The manifest in ``data``, every name and place in it checked.

    Raises:
        CorruptCheckpointError: it is not what the format says.
        IncompatibleCheckpointError: it is of a higher format.
        UntrustedDataError: a file's name could leave the folder.
    """
    _check_format(data, path, file)
    manifest = _decode(_MANIFEST, data, path, file)
    check_names((record.name for record in manifest.files), path=path)
    if len({f.name for f in manifest.files}) != len(manifest.files):
        raise _corrupt(path, file, "a file named twice")
    for item in manifest.items:
        fault = _item_fault(item, manifest)
        if fault:
            raise _corrupt(path, file, f"an item with {fault}", key=item.key)
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for key, entry in manifest.entries.items():
        if isinstance(entry, TensorEntry):
            chunks[key] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            if elements(entry.size) is None:
                raise _corrupt(path, file, "a tensor of more elements or dimensions than there can be", key=key)
            if not all(is_inside(chunk.offsets, chunk.sizes, entry.size) for chunk in entry.chunks):
                raise _corrupt(path, file, "a chunk outside its tensor", key=key)
    for item in manifest.items:
        if item.shape is not None and chunks.get(item.key, {}).get(item.offsets or ()) not in (None, item.shape):
            raise _corrupt(path, file, "an item whose shape is not that of its chunk", key=item.key)
    # The same bytes may be there under several names, as those of tied weights are.
    overlap = first_overlap(manifest.items, _is_twin)
    if overlap is not None:
        raise _corrupt(path, file, "items that overlap", key=overlap.key)
    return manifest


def _is_twin(item: ItemRecord, other: ItemRecord) -> bool:
    """Whether all that is said of two items but their names is the same."""
    return msgspec.structs.replace(item, key=other.key, offsets=other.offsets, index=other.index) == other


def _item_fault(item: ItemRecord, manifest: Manifest) -> str | None:
    if item.file >= len(manifest.files):
        return "a file that the manifest does not have"
    if item.offset + item.length > manifest.files[item.file].size:
        return "bytes beyond the end of its file"
    if item.payload_offset + item.payload_length > item.length:
        return "a payload beyond its end"
    if item.blocks and len(item.blocks) != -(-item.payload_length // item.block):
        return "a wrong number of blocks"
    if (item.dtype is None) != (item.shape is None):
        return "a dtype without a shape, or the reverse"
    if item.shape is not None and elements(item.shape) is None:
        return "a shape of more elements or dimensions than there can be"
    if item.stride is not None and (item.shape is None or len(item.stride) != len(item.shape)):
        return "strides that do not fit its shape"
    if (
        item.stride is not None
        and item.shape is not None
        and 0 not in item.shape
        and not is_dense(item.shape, item.stride)
    ):
        return "strides that leave holes"
    return None


def _check_format(data: bytes, path: str, file: str) -> None:
    version = _decode(_HEAD, data, path, file).format
    if version > FORMAT:
        raise IncompatibleCheckpointError(
            f"{path}: {file} is of format {version}; this version of dcp_storage reads up to {FORMAT}. Update it.",
            path=path,
        )
    if version < 1:
        raise _corrupt(path, file, f"format {version}")


def _decode(decoder: msgspec.json.Decoder[_Struct], data: bytes, path: str, file: str) -> _Struct:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _corrupt(path, file, "what the format does not allow", cause=error) from error


def _corrupt(
    path: str, file: str, what: str, *, key: str | None = None, cause: BaseException | None = None
) -> CorruptCheckpointError:
    about = f" (key {key!r:.200})" if key is not None else ""
    detail = f": {cause!s:.200}" if cause is not None else ""
    return CorruptCheckpointError(
        f"{path}: {file} holds {what}{about}{detail}.", path=path, file=file, key=key, cause=cause
    )
