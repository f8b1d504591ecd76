"""Sizes, counts and names that a store says: each is held against a limit before anything is taken or computed."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_storage import (
    DCP,
    CheckpointError,
    CorruptCheckpointError,
    FsspecStorageReader,
    IncompatibleCheckpointError,
    NotCommittedError,
    PerRank,
    UntrustedDataError,
    adopt,
    copy,
    load_keys,
    records,
    verify,
)
from dcp_storage.codec import dtype_named
from dcp_storage.lone import read_rank
from dcp_storage.names import check_name
from dcp_storage.per_rank import split_own
from dcp_storage.pickles import load_object, load_plain
from dcp_storage.reading import read_checkpoint
from dcp_storage.records import BytesEntry, Manifest, decode_manifest, encode_manifest
from dcp_storage.shapes import LARGEST, MOST_DIMENSIONS, elements
from dcp_storage.state_tree import rebuild
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.recording import RecordingStore
from tests.e2e import ALONE, Place, failure, load, save
from tests.fuzz.bounded import ON_FORK, bounded
from tests.fuzz.opcodes import call, text
from tests.fuzz.sealing import MANIFEST, commit_of, sealed
from tests.protocol.oracle import attempt_to, save_to, writer_on

pytestmark = [pytest.mark.filterwarnings(ALONE), ON_FORK]

HERE: dict[str, str] = {"path": "dict://folder", "file": ".manifest"}

# -- names -------------------------------------------------------------------------------------------------------------

OUTSIDE = [
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a/", "a\\b", "..\\x", "C:\\x", "a\0", "\0", "a\nb",
    "a\x1b[2Jb", "\x7f", "a\x9bb", "\x85", "s3://bucket/key", "file:///etc/passwd", "memory://x", "zip://a::b/c",
    "x" * 256, "é" * 128, "\ud800", "a\udfffb",
]  # fmt: skip
INSIDE = [
    "…",
    "․․",
    "．．",
    "／etc／passwd",
    "a∕b",
    "⧵",
    "a b",
    "#",
    "%2e%2e%2f",
    "~",
    "$HOME",
    "*",
    "-rf",
    "a:b",
    "é" * 127,
]


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: ascii(name)[:20])
def test_names_that_are_refused(name: str) -> None:
    """What is no single plain component is refused as a file of a manifest, as a commit's manifest, and by stock's."""
    with pytest.raises(UntrustedDataError) as caught:
        check_name(name)
    assert caught.value.name == name
    files = [{"name": name, "size": 1, "crc32": None, "rank": 0}]
    body = json.dumps({"format": 1, "files": files, "items": [], "entries": {}}).encode()
    with pytest.raises(CheckpointError) as refused:
        decode_manifest(body, **HERE)
    assert type(refused.value) in (UntrustedDataError, CorruptCheckpointError)  # JSON has no lone surrogates at all
    assert refused.value.path == "dict://folder"
    store = DictStore()
    store.put(".commit", [memoryview(commit_of(MANIFEST, name=name))])
    with pytest.raises(NotCommittedError):
        read_checkpoint(store, require_commit=True)


@pytest.mark.parametrize("name", INSIDE, ids=ascii)
def test_names_that_only_look_like_others(name: str, tmp_path: Path) -> None:
    """Characters that look like dots and slashes, globs and escapes are plain names of files in the folder."""
    assert check_name(name) == name
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"1")
    assert [path.name for path in (tmp_path / "in").iterdir()] == [name]
    assert not [path for path in tmp_path.iterdir() if path.name != "in"]


def test_a_stock_file_outside_is_refused(tmp_path: Path) -> None:
    """A stock metadata that names a file elsewhere ends the load before any file is opened."""
    place = Place(str(tmp_path / "one"))
    dcp.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(place.url), no_dist=True)
    (tmp_path / "__0_0.distcp").write_bytes(place.get("__0_0.distcp"))
    metadata = pickle.loads(place.get(".metadata"))
    for info in metadata.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    place.set(".metadata", pickle.dumps(metadata))
    found = torch.zeros(3)
    failure(UntrustedDataError, lambda: load({"a": found}, place.reader(require_commit=False)))
    assert not found.any()


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((), 1),
        ((0,), 0),
        ((3, 4), 12),
        ((LARGEST,), LARGEST),
        ((LARGEST + 1,), None),
        ((2**31, 2**31), LARGEST),
        ((2**31, 2**31 + 1), None),
        ((2**62, 2**62, 0), 0),
        ((2**63, 0), None),
        ((1,) * MOST_DIMENSIONS, 1),
        ((1,) * (MOST_DIMENSIONS + 1), None),
    ],
)
def test_the_elements_of_a_shape(shape: tuple[int, ...], wanted: int | None) -> None:
    """A shape has so many elements, or is none that a tensor can have."""
    assert elements(shape) == wanted


def test_shapes_that_would_take_hours(tmp_path: Path) -> None:
    """A million sizes whose product has a hundred million bits are refused at once, wherever a shape is read."""
    many, huge = 200_000, 2**62 - 1
    wide = b"\x8a\x08" + struct.pack("<q", huge)
    tuple_of = wide + b"\x940(" + b"h\x00" * many + b"t\x940"
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
    entry = {"kind": "tensor", "dtype": "int8", "size": [huge] * many, "chunks": []}
    item = {"key": "w", "file": 0, "offset": 0, "length": 9, "dtype": "int8", "shape": [huge] * many}
    file = {"name": "a", "size": 9, "crc32": None, "rank": 0}

    def numpy_array() -> None:
        dtype = call("numpy.dtype", text("V8"), b"\x89", b"\x88")
        body = tuple_of + call("numpy._core.numeric._frombuffer", b"C\x00", dtype, b"h\x01", text("C"))
        with pytest.raises(UntrustedDataError):
            load_plain(b"\x80\x04" + body + b".", what="planner_data")

    def tensor() -> None:
        from tests.fuzz.archives import packed

        body = tuple_of + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00h\x01h\x01\x89"
        body += b"ccollections\nOrderedDict\n)RtR"
        with pytest.raises(UntrustedDataError):
            load_object(packed({"archive/data.pkl": b"\x80\x02" + body + b".", "archive/data/0": bytes(16)}))

    def manifest() -> None:
        for items, entries in (([], {"w": entry}), ([item], {})):
            body = {"format": 1, "files": [file], "items": items, "entries": entries}
            with pytest.raises(CorruptCheckpointError):
                decode_manifest(json.dumps(body).encode(), **HERE)

    for check in (numpy_array, tensor, manifest):
        bounded(check)


def test_numbers_whose_division_would_take_hours() -> None:
    """Fractions and ranges of ints of millions of bits, which CPython divides in quadratic time, are refused."""
    long = [b"\x8b" + struct.pack("<I", 2_000_000) + bytes([k]) * 1_999_999 + b"\x01" for k in (0x55, 0x33)]
    half = b"\x8b" + struct.pack("<I", 1_000_000) + b"\x21" * 1_000_000

    def check() -> None:
        for name, args in (("fractions.Fraction", long), ("builtins.range", [b"K\x00", long[0], half])):
            with pytest.raises(UntrustedDataError) as caught:
                load_plain(b"\x80\x04" + call(name, *args) + b".", what="planner_data")
            assert caught.value.name == name

    bounded(check)


def laughs(levels: int) -> bytes:
    """A tuple of itself twice, and so on: 2 ** levels leaves."""
    pairs = b"".join(b"h" + bytes([n, ord("h"), n]) + b"\x86\x940" for n in range(levels))
    return b")\x940" + pairs + b"h" + bytes([levels])


def test_texts_and_hashes_without_end() -> None:
    """A tuple with 2 ** 40 leaves is neither shown in a message nor hashed outside of the bound on keys."""
    field = b"}" + text("a") + call("numpy.dtype", text("f8"), b"\x89", b"\x88") + b"K\x00"
    void, end = call("numpy.dtype", text("V8"), b"\x89", b"\x88"), b"K\x08K\x01K\x00tb"
    state = b"(K\x03" + text("|") + b"N"
    names = void + state + laughs(40) + b"\x85" + field + b"\x86s" + end
    titles = void + state + text("a") + b"\x85" + field + laughs(40) + b"\x87s" + end
    head = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}("
    # So long a pickle that the bound on keys lets 2 ** 16 leaves pass: their text would have some 100 KB.
    key = laughs(16) + b"N"
    attribute = head + key + b"ub" + b"N0" * 10_000
    metadata = head + text("state_dict_metadata") + b"}" + key + b"s" + text("storage_data") + b"}ub" + b"N0" * 10_000

    def check() -> None:
        from dcp_storage.pickles import load_metadata

        for body in (names, titles, attribute):
            with pytest.raises(UntrustedDataError) as caught:
                load_plain(b"\x80\x04" + body + b".", what="planner_data")
            assert len(str(caught.value)) < 600
        with pytest.raises(CorruptCheckpointError, match="a key is a tuple") as wrong:
            load_metadata(b"\x80\x04" + metadata + b".")
        assert len(str(wrong.value)) < 600

    bounded(check)


def test_a_sparse_tensor_is_not_made_dense_unseen(tmp_path: Path) -> None:
    """A few bytes that say they are a sparse tensor of terabytes are refused where four numbers were promised."""
    place = Place(str(tmp_path / "one"))
    huge = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([1.0]), (2**40,), check_invariants=True)
    out = io.BytesIO()
    torch.save(huge, out)
    dcp.save({"a": torch.ones(4)}, storage_writer=FileSystemWriter(place.url), no_dist=True)
    metadata = pickle.loads(place.get(".metadata"))
    ((_, info),) = metadata.storage_data.items()
    place.set(info.relative_path, out.getvalue())
    info.offset, info.length = 0, len(out.getvalue())
    place.set(".metadata", pickle.dumps(metadata))
    found = torch.zeros(4)

    def check() -> None:
        error = failure(CorruptCheckpointError, lambda: load({"a": found}, place.reader(require_commit=False)))
        assert (error.key, error.file, error.offset) == ("a", info.relative_path, 0)
        assert "sparse" in str(error.found)

    bounded(check)
    assert not found.any()


@pytest.mark.parametrize(
    "other", [torch.ones(2), torch.ones(4, 1), torch.ones(()), "text"], ids=["less", "more", "none", "text"]
)
def test_an_item_that_is_another_tensor(other: Any, tmp_path: Path) -> None:
    """An item that is not what its metadata says fills nothing, not even by broadcasting; key and place are named."""
    place = Place(str(tmp_path / "one"))
    out = io.BytesIO()
    torch.save(other, out)
    dcp.save({"a": torch.ones(4)}, storage_writer=FileSystemWriter(place.url), no_dist=True)
    metadata = pickle.loads(place.get(".metadata"))
    ((_, info),) = metadata.storage_data.items()
    place.set(info.relative_path, b"-" * 10 + out.getvalue())
    info.offset, info.length = 10, len(out.getvalue())
    place.set(".metadata", pickle.dumps(metadata))
    found = torch.zeros(4)
    error = failure(CorruptCheckpointError, lambda: load({"a": found}, place.reader(require_commit=False)))
    assert (error.key, error.file, error.offset, error.wanted) == ("a", info.relative_path, 10, "4")
    assert not found.any()


# -- manifests and commits ---------------------------------------------------------------------------------------------


def test_a_manifest_that_would_be_too_large_is_not_asked_for() -> None:
    """A commit that names a manifest of more than 4 GiB is refused before the manifest is read."""
    store = RecordingStore(DictStore())
    body = json.loads(commit_of(MANIFEST))
    del body["crc32"]
    body["manifest"]["size"] = 2**62
    store.put(".commit", [memoryview(sealed(json.dumps(body).encode()))])
    store.put(".manifest", [memoryview(MANIFEST)])
    before = len(store.calls)
    with pytest.raises(UntrustedDataError) as caught:
        read_checkpoint(store, require_commit=True)
    assert str(2**62) in str(caught.value)
    assert not [one for one in store.calls[before:] if one.operation == "read" and one.name == ".manifest"]


def test_a_manifest_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A save whose manifest no load would read fails before the commit, and says why."""
    monkeypatch.setattr(records, "MAX_MANIFEST", 100)
    place = Place(str(tmp_path / "one"))
    error = failure(CheckpointError, lambda: save({"a": torch.ones(3)}, place.writer()))
    assert error.kind == "manifest"
    assert place.commits() == []


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    """A key with a lone surrogate, which JSON does not have, fails the save with an error of ours; nothing commits."""
    place = Place(str(tmp_path / "one"))
    error = failure(CheckpointError, lambda: save({"a\udc80": torch.ones(3)}, place.writer()))
    assert "surrogates not allowed" in str(error)
    assert place.commits() == []
    with pytest.raises(CheckpointError, match="no valid text"):
        encode_manifest(Manifest(format=1, files=(), items=(), entries={"\ud800": BytesEntry()}))


FILE = b'{"format":1,"files":[{"name":"a","size":%b,"crc32":1,"rank":0}],"items":[],"entries":{}}'
RAW = {
    "not a number": b'{"format":NaN}',
    "infinity": FILE % b"Infinity",
    "a number beyond floats": FILE % b"1e999",
    "a number of a million digits": FILE % (b"9" * 1_000_000),
    "a lone surrogate": b'{"format":1,"files":[],"items":[],"entries":{"\\ud800":{"kind":"bytes"}}}',
    "a surrogate in UTF-8": b'{"format":1,"files":[],"items":[],"entries":{"\xed\xa0\x80":{"kind":"bytes"}}}',
    "half a character": b'{"format":1,"files":[],"items":[],"entries":{"\xc3":{"kind":"bytes"}}}',
    "depth of objects": b'{"format":1,"later":' + b'{"a":' * 200_000,
    "depth of lists": b'{"format":1,"later":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "depth in an entry": b'{"format":1,"files":[],"items":[],"entries":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "two values": MANIFEST + MANIFEST,
    "a byte order mark": b"\xef\xbb\xbf" + MANIFEST,
    "another encoding": MANIFEST.decode().encode("utf-16"),
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_json_that_is_a_bomb(data: bytes) -> None:
    """JSON that other parsers take, or fall over, is corrupt; and so is a commit of it, which readers pass over."""

    def check() -> None:
        with pytest.raises(CorruptCheckpointError) as caught:
            decode_manifest(data, **HERE)
        assert len(str(caught.value)) < 600
        with pytest.raises(CorruptCheckpointError):
            records.decode_commit(sealed(data), path="dict://folder", file=".commit")

    bounded(check)


def test_a_field_twice() -> None:
    """Of a field that is there twice the last one counts, as everywhere in Python; and only that one is checked."""
    body = b'{"format":9,"format":1,"files":[{"name":"..","name":"a","size":-1,"size":3,"crc32":null,"rank":0}],'
    with pytest.raises(CorruptCheckpointError):  # each value is typed as it is read
        decode_manifest(body + b'"items":[],"entries":{}}', **HERE)
    found = decode_manifest(body.replace(b'"size":-1,', b"") + b'"items":[],"entries":{}}', **HERE)
    assert [(record.name, record.size) for record in found.files] == [("a", 3)]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"block": 2**27}, "what the format does not allow"),
        ({"shape": [2**40, 2**40], "dtype": "int8"}, "more elements"),
        ({"shape": [1] * 2000, "dtype": "int8"}, "dimensions"),
        ({"offset": 2**62, "length": 2**62}, "beyond the end"),
    ],
    ids=["block", "shape", "dimensions", "place"],
)
def test_items_that_would_take_all_memory(changes: dict[str, Any], what: str) -> None:
    """Blocks and shapes larger than any are refused when the manifest is read, not when the first byte is."""
    body = json.loads(MANIFEST)
    body["items"][0].update(changes)
    with pytest.raises(CorruptCheckpointError, match=what):
        decode_manifest(json.dumps(body).encode(), **HERE)


def test_a_dtype_that_would_import_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a dtype is looked up among dtypes: torch, which imports a module for some names, is not asked."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    assert dtype_named("_inductor") is None
    assert dtype_named("distributed") is None
    assert dtype_named("bfloat16") is torch.bfloat16
    assert asked == []


def entry_larger(body: dict[str, Any]) -> None:
    body["entries"]["a"]["size"] = [8, 6]


def entry_of_terabytes(body: dict[str, Any]) -> None:
    body["entries"]["a"]["size"] = [2**45, 6]


def no_chunks(body: dict[str, Any]) -> None:
    body["entries"]["a"]["chunks"] = []
    body["items"] = [item for item in body["items"] if item["key"] != "a"]


def empty_chunk(body: dict[str, Any]) -> None:
    body["entries"]["a"]["chunks"] = [{"offsets": [0, 0], "sizes": [0, 6]}]
    body["items"] = [item for item in body["items"] if item["key"] != "a"]


def chunks_over_each_other(body: dict[str, Any]) -> None:
    item = next(item for item in body["items"] if item["key"] == "a")
    body["items"].remove(item)
    body["entries"]["a"]["chunks"] = []
    for at in (0, 1):  # rows 0 and 1, rows 1 and 2: none has row 3
        body["entries"]["a"]["chunks"].append({"offsets": [at, 0], "sizes": [2, 6]})
        half = {
            **item,
            "offsets": [at, 0],
            "shape": [2, 6],
            "payload_length": 48,
            "length": item["payload_offset"] + 48,
        }
        half["offset"] = item["offset"] + at * half["length"] if at else item["offset"]
        body["items"].append(
            {key: half[key] for key in half if key not in {"blocks", "block", "crc32", "payload_crc32"}}
        )
    body["files"][item["file"]]["size"] += 10_000  # room for the second


def chunk_without_item(body: dict[str, Any]) -> None:
    body["items"] = [item for item in body["items"] if item["key"] != "a"]


def object_without_item(body: dict[str, Any]) -> None:
    body["items"] = [item for item in body["items"] if item["key"] != "step"]


SPOILS = [
    entry_larger, entry_of_terabytes, no_chunks, empty_chunk, chunks_over_each_other, chunk_without_item,
    object_without_item,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS)
def test_parts_that_do_not_fill_their_tensor(tmp_path: Path, spoil: Callable[[dict[str, Any]], None]) -> None:
    """A manifest whose chunks leave elements out, or lie over each other, or are nowhere, is refused by every load, by
    verify and by copy, before memory is taken; the targets stay as they are.
    """
    place = Place(str(tmp_path / "one"))
    save({"a": torch.ones(4, 6), "b": torch.ones(3), "step": 4}, place.writer())
    body = json.loads(place.get(".manifest"))
    spoil(body)
    data = json.dumps(body).encode()
    place.set(".manifest", data)
    commit = json.loads(place.get(".commit"))
    del commit["crc32"]
    commit["manifest"].update(size=len(data), crc32=zlib.crc32(data))
    place.set(".commit", sealed(json.dumps(commit).encode()))
    found: dict[str, Any] = {"a": torch.zeros(8, 6) if spoil is entry_larger else torch.zeros(4, 6), "step": 0}
    about = "step" if spoil is object_without_item else "a"
    assert failure(CorruptCheckpointError, lambda: load(found, place.reader())).key == about
    calls: list[Callable[[], Any]] = [
        lambda: DCP.load(found, checkpoint_id=place.url, no_dist=True),
        lambda: load_keys(place.url),
        lambda: load_keys(place.url, keys=["a"]),
        lambda: copy(place.url, tmp_path / "other"),
    ]
    for each in calls:
        with pytest.raises(CorruptCheckpointError) as caught:
            each()
        assert caught.value.key == about
    assert not found["a"].any()
    assert [problem.key for problem in verify(place.url, depth="sizes").problems] == [about]
    assert not list(tmp_path.glob("other/.commit*"))


@pytest.mark.parametrize("chunks", [[], [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]], ids=["none", "one"])
def test_stock_metadata_that_does_not_fill(tmp_path: Path, chunks: list[ChunkStorageMetadata]) -> None:
    """So is metadata of stock torch, which is loaded without a commit, and it is not adopted."""
    folder = tmp_path / "stock"
    dcp.save({"a": torch.ones(4), "b": torch.ones(3)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["a"].chunks = chunks
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for each in (lambda: load_keys(folder, require_commit=False), lambda: adopt(folder)):
        with pytest.raises(CorruptCheckpointError) as caught:
            each()
        assert caught.value.key == "a"


# -- commits of single ranks -------------------------------------------------------------------------------------------


def ranks(**of_rank_0: Any) -> DictStore:
    """A folder of two ranks that saved without collectives; rank 0's commit says what it is told to."""
    store = DictStore()
    for rank in range(2):
        store.put(f"__{rank}.manifest", [memoryview(MANIFEST)])
        body = json.loads(commit_of(MANIFEST, name=f"__{rank}.manifest", rank=rank))
        del body["crc32"]
        body.update(of_rank_0 if rank == 0 else {})
        store.put(f"__{rank}.commit", [memoryview(sealed(json.dumps(body).encode()))])
    return store


def test_the_ranks_load_when_nothing_is_wrong() -> None:
    """The folder that the tests below spoil is a good one."""
    assert [read_rank(ranks(), rank)[0].rank for rank in range(2)] == [0, 1]


def test_more_ranks_than_there_can_be() -> None:
    """Commits that say they are of 2 ** 62 ranks end in a sentence, not in a list of those that are missing."""
    store = ranks(world_size=2**62)
    body = json.loads(store.read("__1.commit", limit=10_000))
    del body["crc32"]
    body["world_size"] = 2**62
    store.put("__1.commit", [memoryview(sealed(json.dumps(body).encode()))])

    def check() -> None:
        with pytest.raises(NotCommittedError) as caught:
            read_rank(store, 0)
        assert len(str(caught.value)) < 400
        assert "2, 3" in str(caught.value)

    bounded(check)


def test_a_rank_s_commit_under_another_s_name() -> None:
    """A copy of one rank's commit is not another rank's: its tensors would be filled with the other's numbers."""
    store = ranks()
    store.put("__0.commit", [memoryview(store.read("__1.commit", limit=10_000))])
    for rank in range(2):
        with pytest.raises(NotCommittedError) as caught:
            read_rank(store, rank)
        assert caught.value.key == "__0.commit"
        assert "__0.commit" in str(caught.value)


def test_a_rank_s_commit_as_that_of_the_whole() -> None:
    """A copy of a rank's commit under the name of the whole one's commits nothing."""
    store = ranks()
    store.put(".commit", [memoryview(store.read("__0.commit", limit=10_000))])
    with pytest.raises(NotCommittedError):
        read_checkpoint(store, require_commit=True)


def test_a_commit_number_without_a_next() -> None:
    """Beside a commit object of the last number that readers know a save fails: its own would never be found."""
    store = DictStore()
    store.put(f".commit.{10**18 - 1}", [memoryview(b"torn")])
    error = save_to(writer_on(store), {"a": torch.ones(2)})
    assert isinstance(error, CheckpointError)
    assert error.kind == "commit-number"
    assert [entry.name for entry in store.entries() if entry.name.startswith(".commit")] == [f".commit.{10**18 - 1}"]


# -- what adopt makes of it --------------------------------------------------------------------------------------------


def _surrogate(metadata: Any) -> None:
    entries = metadata.state_dict_metadata
    entries["\ud800"] = entries.pop("a")


def _overlapping(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset, info.length = info.offset // 2, info.length


def _negative_number(metadata: Any) -> None:
    metadata.storage_data = {type(i)(i.fqn, i.offset, -5): info for i, info in metadata.storage_data.items()}


def _beyond_words(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].size = (10**5000, 3)


@pytest.mark.parametrize("spoil", [_surrogate, _overlapping, _negative_number, _beyond_words])
def test_adopting_what_no_load_would_take(spoil: Callable[[Any], None], tmp_path: Path) -> None:
    """A stock metadata from which no manifest can be made that a load takes is not committed."""
    place = Place(str(tmp_path / "one"))
    dcp.save({"a": torch.ones(300), "b": torch.ones(9)}, storage_writer=FileSystemWriter(place.url), no_dist=True)
    metadata = pickle.loads(place.get(".metadata"))
    spoil(metadata)
    place.set(".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        adopt(place.url)
    assert place.commits() == []


def test_nothing_of_a_hostile_stock_load_is_foreign(tmp_path: Path) -> None:
    """The same metadata under a load ends in errors of ours, or of torch about the template."""
    for spoil in (_negative_number, _beyond_words):
        place = Place(str(tmp_path / spoil.__name__))
        dcp.save({"a": torch.ones(300)}, storage_writer=FileSystemWriter(place.url), no_dist=True)
        metadata = pickle.loads(place.get(".metadata"))
        spoil(metadata)
        place.set(".metadata", pickle.dumps(metadata))
        reader = FsspecStorageReader(place.url, require_commit=False)
        error = attempt_to(lambda r=reader: load({"a": torch.zeros(300)}, r))  # type: ignore[misc]
        assert type(error) in (CorruptCheckpointError, IncompatibleCheckpointError), repr(error)


# -- what DCP.load makes of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [10**12, -1, "a", 1 << 17])
def test_a_place_in_a_list_that_would_take_all_memory(place: Any) -> None:
    """A path that leads to the million-millionth place of a list, or to none, does not make the list that long."""

    def check() -> None:
        with pytest.raises(UntrustedDataError, match="leads to no place"):
            rebuild([(("a", 0), 1), (("a", place), 2)])

    bounded(check)
    assert rebuild([(("a", 0), 1), (("a", 7), 2)]) == {"a": [1, *[None] * 6, 2]}


def test_more_savers_than_there_can_be(tmp_path: Path) -> None:
    """A key or a tensor that says that more ranks saved than there are is refused, not made a list of them."""
    state: dict[str, Any] = {"__per_rank__.999999999.loader": 1, "loader": PerRank()}
    place = Place(str(tmp_path / "one"))
    save({key: value for key, value in state.items() if key != "loader"}, place.writer())

    def check() -> None:
        with pytest.raises(CorruptCheckpointError) as caught:
            DCP.load({"loader": PerRank()}, checkpoint_id=place.url, no_dist=True)
        assert caught.value.found == 10**9

    bounded(check)
    assert split_own("__per_rank__." + "9" * 5000 + ".loader") is None
