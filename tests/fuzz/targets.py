"""What reads bytes that nobody vouches for: every parser of this package, with what is done next to its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from dcp_storage.errors import ObjectTooShortError
from dcp_storage.lone import read_rank
from dcp_storage.peeking import peek
from dcp_storage.pickles import load_metadata, load_object, load_plain, reserialized
from dcp_storage.placing import dtype_of
from dcp_storage.reading import Checkpoint, read_checkpoint
from dcp_storage.records import (
    ItemRecord,
    Manifest,
    decode_commit,
    decode_manifest,
    encode_manifest,
)
from dcp_storage.scattering import extents
from dcp_storage.store import Buffers
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.tools.streams import layouts
from dcp_storage.torchview import manifest_from_stock, metadata_of, stock_storage_data
from tests.fuzz import archives, opcodes, raw, trees
from tests.fuzz.choices import Choices
from tests.fuzz.sealing import MANIFEST, commit_of, sealed

__all__ = ["LIMIT", "TARGETS", "Target"]

LIMIT: Final = 32 << 20
"""Bytes of memory that a pickle is given."""

Mutation = Callable[[Choices, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        name: of the folder of its corpus.
        run: reads an input: returns where it could be loaded, else raises. An AssertionError is a fault, too: what was
            loaded is not what the reader promises.
        mutate: makes an input of a valid one.
    """

    name: str
    run: Callable[[bytes], None]
    mutate: Mutation


def _use(manifest: Manifest) -> None:
    """What a load, verify and describe do with a manifest before they read a shard."""
    checkpoint = Checkpoint(1, 0, manifest, 0)
    metadata_of(manifest, path="mem://f")
    stock_storage_data(manifest)
    layouts(manifest)
    for item in manifest.items[:20]:
        size = manifest.files[item.file].size
        assert 0 <= item.offset <= item.offset + item.length <= size
        assert checkpoint.file_of(item)
        assert checkpoint.limit_of(item) >= 0
        if item.dtype is None or item.shape is None:
            continue
        dtype_of(item)
        lengths = tuple(min(n, 2) for n in item.shape)
        for start, stop in extents(item, (0,) * len(lengths), lengths, 4096):
            assert item.offset + item.payload_offset <= start < stop
            assert stop <= item.offset + item.payload_offset + item.payload_length


def _commit(data: bytes) -> None:
    decode_commit(data, path="mem://f", file=".commit")


def _body(data: bytes) -> None:
    _commit(sealed(data))


def _manifest(data: bytes) -> None:
    _use(decode_manifest(data, path="mem://f", file=".manifest"))


def _folder(data: bytes) -> None:
    store = DictStore()
    store.put(".manifest", [memoryview(data)])
    store.put(".commit", [memoryview(commit_of(data))])
    _use(read_checkpoint(store, require_commit=True).manifest)


def _rank(data: bytes) -> None:
    store = DictStore()
    store.put("__0.manifest", [memoryview(MANIFEST)])
    store.put("__0.commit", [memoryview(sealed(data))])
    store.put("__1.commit", [memoryview(commit_of(MANIFEST, name="__1.manifest", rank=1))])
    commit, manifest = read_rank(store, 0)
    assert commit.rank == 0
    _use(manifest)


class _Listed(dict[str, int]):
    """A listing in which every file is there and large enough for any place."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __missing__(self, name: str) -> int:
        return 2**62


def _metadata(data: bytes) -> None:
    metadata = load_metadata(data, limit=LIMIT, path="mem://f")
    manifest = manifest_from_stock(metadata, _Listed())
    _use(decode_manifest(encode_manifest(manifest), path="mem://f", file=".manifest"))  # as adopt does
    _use(manifest)


def _planner(data: bytes) -> None:
    load_plain(data, limit=LIMIT, what="planner_data", path="mem://f")


def _object(data: bytes) -> None:
    value = load_object(data, limit=LIMIT, path="mem://f", key="k", file="__0_0.distcp", offset=100)
    reserialized(value)


class _Bytes(DictStore):
    """A store of which only ranges of one file are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        for buffer in buffers:
            piece = self._data[offset : offset + buffer.nbytes]
            if len(piece) < buffer.nbytes:
                raise ObjectTooShortError("too short", key=name)
            buffer[:] = piece
            offset += buffer.nbytes


_SHAPES: Final = (((4096,), "float32"), ((64, 128), "int16"), ((2048,), "complex64"))


def _item(data: bytes) -> None:
    record = ItemRecord(key="w", offsets=(0,), file=0, offset=0, length=len(data), payload_length=len(data))
    shape, dtype = _SHAPES[sum(data[:1000]) % len(_SHAPES)]
    found = peek(_Bytes(data), "__0_0.distcp", record, shape, dtype)
    if found is not record:
        assert 0 <= found.payload_offset <= found.payload_offset + found.payload_length <= len(data)
        assert dtype_of(found).itemsize * torch.Size(shape).numel() == found.payload_length


def _mutate_json(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    return raw.mutated(choices, data, others) if choices.one_in(4) else trees.mutated(choices, data)


def _mutate_pickle(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    way = choices.below(6)
    if way == 0:
        return raw.mutated(choices, data, others)
    if way == 1:
        return opcodes.invented(choices)
    return opcodes.mutated(choices, data, others)


TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target("commit", _commit, raw.mutated),
            Target("body", _body, _mutate_json),
            Target("rank", _rank, _mutate_json),
            Target("manifest", _manifest, _mutate_json),
            Target("folder", _folder, _mutate_json),
            Target("metadata", _metadata, _mutate_pickle),
            Target("planner", _planner, _mutate_pickle),
            Target("object", _object, archives.mutated),
            Target("item", _item, archives.mutated),
        )
    }
)
"""By name. ``body`` and ``rank`` are commits before their check is put on, so that what is behind it is reached."""
