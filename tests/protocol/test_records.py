"""Commits and manifests as bytes: round trips, and whatever else may be found under their names."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_storage.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedDataError,
)
from dcp_storage.records import (
    BytesEntry,
    Chunk,
    Commit,
    FileRecord,
    ItemRecord,
    Manifest,
    ManifestRef,
    PlannerData,
    StorageMetaRecord,
    TensorEntry,
    block_size,
    decode_commit,
    decode_manifest,
    encode_commit,
    encode_manifest,
)

HERE: dict[str, str] = {"path": "dict://folder", "file": ".thing"}

COMMIT = Commit(
    format=1,
    state="committed",
    number=7,
    author="abcdefghijklmnop",
    time="2026-01-02T03:04:05.678+00:00",
    world_size=64,
    torch="2.13.0",
    package="0.1.0",
    single_writer=True,
    manifest=ManifestRef(".manifest.abcdefghijklmnop", 1234, 0xDEADBEEF),
    restates=6,
)

MANIFEST = Manifest(
    format=1,
    version="1.0.0",
    files=(FileRecord("__0_0.distcp", 5000, 1, 0), FileRecord("__1_0.distcp", 900, None, 1)),
    items=(
        ItemRecord(
            key="w",
            offsets=(0, 2),
            index=1,
            file=0,
            offset=100,
            length=1000,
            crc32=2**32 - 1,
            payload_offset=64,
            payload_length=96,
            payload_crc32=0,
            block=16384,
            blocks=(5,),
            dtype="float32",
            shape=(4, 6),
            stride=(1, 4),
        ),
        ItemRecord(key="note", file=1, offset=0, length=900, payload_length=900, block=16384, blocks=(9,)),
    ),
    entries={
        "w": TensorEntry(dtype="float32", size=(4, 8), chunks=(Chunk((0, 0), (4, 2)), Chunk((0, 2), (4, 6)))),
        "note": BytesEntry(),
    },
    planner_data=PlannerData(paths={"w": ("w",), "note": ("a", 0, "note")}),
    storage_meta=StorageMetaRecord("s3://b/k", "abcdefghijklmnop", ("m",)),
)


def plain() -> dict[str, Any]:
    """The manifest above as JSON that a test may spoil."""
    body: dict[str, Any] = json.loads(encode_manifest(MANIFEST))
    return body


def sealed(body: bytes) -> bytes:
    """A commit's JSON with its check at the end, made by hand."""
    return body[:-1] + b',"crc32":' + str(zlib.crc32(body[:-1])).encode() + b"}"


def commit_json(**changes: Any) -> bytes:
    """A commit object, sealed by hand, with some fields changed or (by None) left out."""
    body = {
        "format": 1,
        "state": "committed",
        "number": 1,
        "author": "a",
        "time": "t",
        "manifest": {"name": ".manifest", "size": 2, "crc32": 3},
        **changes,
    }
    return sealed(json.dumps({k: v for k, v in body.items() if v is not None}).encode())


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["committed", "void"])
def test_a_commit_comes_back_as_it_was(state: Any) -> None:
    """Every field of a commit and of a void survives."""
    commit = COMMIT if state == "committed" else Commit(format=1, state="void", number=8, author="b", time="t")
    assert decode_commit(encode_commit(commit), **HERE) == commit


def test_a_commit_is_plain_json_with_numbers() -> None:
    """The body is JSON; sizes and CRC-32s are numbers, the last field is the CRC-32 of all before it."""
    data = encode_commit(COMMIT)
    body = json.loads(data)
    assert body["manifest"] == {"name": ".manifest.abcdefghijklmnop", "size": 1234, "crc32": 0xDEADBEEF}
    assert (body["state"], body["number"], body["author"], body["single_writer"]) == (
        "committed",
        7,
        "abcdefghijklmnop",
        True,
    )
    assert list(body)[-1] == "crc32"
    assert body["crc32"] == zlib.crc32(data[: data.rindex(b',"crc32":')])


def test_a_manifest_comes_back_as_it_was() -> None:
    """Every field of a manifest survives, opaque planner data with any bytes too."""
    assert decode_manifest(encode_manifest(MANIFEST), **HERE) == MANIFEST
    opaque = PlannerData(opaque=bytes(range(256)), crc32=5)
    other = Manifest(format=1, files=(), items=(), entries={}, planner_data=opaque)
    assert decode_manifest(encode_manifest(other), **HERE) == other


@given(
    st.builds(
        Commit,
        format=st.just(1),
        state=st.just("void"),
        number=st.integers(0, 2**62),
        author=st.text(),
        time=st.text(),
        world_size=st.integers(0, 2**62),
        torch=st.text(),
        package=st.text(),
        single_writer=st.booleans(),
    )
)
@settings(max_examples=60, deadline=None)
def test_any_text_in_a_commit_survives(commit: Commit) -> None:
    """No text in a commit, not even one that looks like its own check, breaks the round trip."""
    assert decode_commit(encode_commit(commit), **HERE) == commit


@pytest.mark.parametrize(
    ("payload", "block"),
    [
        (0, 16384),
        (1, 16384),
        (128 * 16384, 16384),
        (128 * 16384 + 1, 16385),
        (64 * 2**20, 2**19),
        (128 * 2**20, 2**20),
        (2**40, 2**20),
    ],
)
def test_the_size_of_a_block(payload: int, block: int) -> None:
    """A block is a 128th of the payload, within 16 KiB and 1 MiB."""
    assert block_size(payload) == block


# -- what is not whole, or not of this format --------------------------------------------------------------------------


def test_a_commit_that_is_cut_anywhere_is_refused() -> None:
    """A torn body never reads as a commit, wherever it was torn."""
    data = encode_commit(COMMIT)
    for cut in range(len(data)):
        with pytest.raises(CorruptCheckpointError) as caught:
            decode_commit(data[:cut], **HERE)
        assert (caught.value.path, caught.value.file) == ("dict://folder", ".thing")


def test_a_commit_with_a_flipped_bit_is_refused() -> None:
    """A body in which any one bit is another never reads as a commit."""
    data = encode_commit(COMMIT)
    for bit in range(8 * len(data)):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError):
            decode_commit(bytes(spoiled), **HERE)


def test_a_commit_with_bytes_behind_it_is_refused() -> None:
    """Nothing may follow the check."""
    with pytest.raises(CorruptCheckpointError):
        decode_commit(encode_commit(COMMIT) + b" ", **HERE)


@pytest.mark.parametrize("version", [2, 3, 10**9])
def test_a_later_format_is_refused(version: int) -> None:
    """A higher format is said to be one, whatever else the body holds, and is not called corrupt."""
    with pytest.raises(IncompatibleCheckpointError):
        decode_commit(sealed(json.dumps({"format": version, "all": "new"}).encode()), **HERE)
    with pytest.raises(IncompatibleCheckpointError):
        decode_manifest(json.dumps({"format": version, "all": "new"}).encode(), **HERE)


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.5, [], True, 10**40])
def test_a_format_that_is_none_is_refused(version: Any) -> None:
    """A format that is no positive number never passes."""
    body = plain()
    body["format"] = version
    with pytest.raises(CheckpointError):
        decode_manifest(json.dumps(body).encode(), **HERE)
    with pytest.raises(CheckpointError):
        decode_commit(commit_json(format=version), **HERE)


def test_unknown_fields_are_ignored() -> None:
    """A commit and a manifest with fields of a later version, at every depth, still read."""
    body = plain()
    for place in (body, body["files"][0], body["items"][0], body["entries"]["w"], body["storage_meta"]):
        place["later"] = {"deep": [1, 2]}
    assert decode_manifest(json.dumps(body).encode(), **HERE) == MANIFEST
    ref = {"name": ".manifest", "size": 2, "crc32": 3, "later": 1}
    found = decode_commit(commit_json(later=[1], manifest=ref), **HERE)
    assert (found.number, found.manifest) == (1, ManifestRef(".manifest", 2, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "maybe"},
        {"state": "void"},
        {"state": "committed", "manifest": None},
        {"number": -1},
        {"number": "1"},
        {"author": 5},
        {"manifest": {"name": ".manifest", "size": -1, "crc32": 3}},
        {"manifest": {"name": ".manifest", "size": 2, "crc32": 2**32}},
        {"manifest": {"name": ".manifest", "size": 2**63, "crc32": 3}},
    ],
    ids=str,
)
def test_a_commit_of_wrong_values_is_corrupt(changes: dict[str, Any]) -> None:
    """A sealed body whose values the format does not allow is corrupt."""
    with pytest.raises(CorruptCheckpointError):
        decode_commit(commit_json(**changes), **HERE)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", "..", "a\\b", "a\0b"])
def test_a_commit_whose_manifest_is_elsewhere_is_refused(name: str) -> None:
    """The manifest's name cannot leave the folder."""
    with pytest.raises(UntrustedDataError):
        decode_commit(commit_json(manifest={"name": name, "size": 2, "crc32": 3}), **HERE)


# -- hostile manifests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".", "..", "a\\b", "a\0b", "x" * 300])
def test_a_file_elsewhere_is_refused(name: str) -> None:
    """No file name in a manifest can leave the folder; the error names it and the checkpoint."""
    body = plain()
    body["files"][1]["name"] = name
    with pytest.raises(UntrustedDataError) as caught:
        decode_manifest(json.dumps(body).encode(), **HERE)
    assert (caught.value.name, caught.value.path) == (name, "dict://folder")


def _set(*where: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at a place in the manifest; the last argument is the value."""
    *path, last, value = where

    def spoil(body: dict[str, Any]) -> None:
        place: Any = body
        for step in path:
            place = place[step]
        place[last] = value

    return spoil


SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "no files": lambda body: body.pop("files"),
    "no items": lambda body: body.pop("items"),
    "no entries": lambda body: body.pop("entries"),
    "a file named twice": _set("files", 1, "name", "__0_0.distcp"),
    "a negative size": _set("files", 0, "size", -1),
    "a huge size": _set("files", 0, "size", 2**63),
    "a size beyond 64 bits": _set("files", 0, "size", 10**40),
    "a fractional size": _set("files", 0, "size", 5000.5),
    "a textual size": _set("files", 0, "size", "5000"),
    "a CRC beyond 32 bits": _set("files", 0, "crc32", 2**32),
    "a negative CRC": _set("items", 0, "crc32", -1),
    "a negative rank": _set("files", 0, "rank", -1),
    "a file that is not there": _set("items", 0, "file", 2),
    "a negative file": _set("items", 0, "file", -1),
    "a negative offset": _set("items", 0, "offset", -1),
    "a negative length": _set("items", 0, "length", -1),
    "an item beyond its file": _set("items", 0, "offset", 4001),
    "an item beyond its file, huge": _set("items", 0, "offset", 2**62),
    "an item longer than its file": _set("items", 1, "length", 901),
    "a payload beyond its item": _set("items", 0, "payload_offset", 905),
    "a payload longer than its item": _set("items", 0, "payload_length", 2**62),
    "too few blocks": _set("items", 0, "payload_length", 0),
    "too many blocks": _set("items", 0, "blocks", [5, 6]),
    "blocks of nothing": _set("items", 0, "block", 0),
    "negative blocks": _set("items", 0, "block", -16384),
    "a block beyond 32 bits": _set("items", 0, "blocks", [2**32]),
    "a dtype without a shape": lambda body: body["items"][0].pop("shape"),
    "a shape without a dtype": lambda body: body["items"][0].pop("dtype"),
    "a negative extent": _set("items", 0, "shape", [-4, -6]),
    "strides of another rank": _set("items", 0, "stride", [1]),
    "negative strides": _set("items", 0, "stride", [-1, 4]),
    "an entry of no kind": _set("entries", "w", "kind", "code"),
    "a tensor of negative size": _set("entries", "w", "size", [-4, 8]),
    "a chunk outside its tensor": _set("entries", "w", "chunks", 0, "offsets", [1, 0]),
    "a chunk far outside its tensor": _set("entries", "w", "chunks", 0, "sizes", [4, 2**62]),
    "a chunk of another rank": _set("entries", "w", "chunks", 0, "sizes", [4]),
    "a chunk at a negative place": _set("entries", "w", "chunks", 0, "offsets", [-1, 0]),
    "a path of other things": _set("planner_data", "paths", "w", [{"a": 1}]),
    "a key that is none": _set("items", 0, "key", 5),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_manifest_of_wrong_values_is_corrupt(spoil: Callable[[dict[str, Any]], None]) -> None:
    """Every number, place and count is checked before it is used; the error names the file."""
    body = plain()
    spoil(body)
    assert body != plain()
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_manifest(json.dumps(body).encode(), **HERE)
    assert (caught.value.path, caught.value.file) == ("dict://folder", ".thing")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"1",
        b"\xff\xfe",
        b'{"format":1',
        b"[" * 100_000,
        b'{"format":1,"files":' + b"[" * 100_000,
        b'{"format":1,"files":[],"items":[],"entries":{"\\ud800":{"kind":"bytes"}}}\xff',
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_manifest_is_corrupt(data: bytes) -> None:
    """Bytes that are no JSON, no object, nested without end, or a pickle are corrupt, and no other error."""
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(data, **HERE)
    with pytest.raises(CorruptCheckpointError):
        decode_commit(data, **HERE)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=150, deadline=None)
def test_any_json_is_a_manifest_or_one_of_our_errors(value: Any) -> None:
    """Whatever JSON stands where something of a manifest should, only our errors come out."""
    for where in ("files", "items", "entries", "planner_data", "storage_meta", "format"):
        body = plain()
        body[where] = value
        try:
            found = decode_manifest(json.dumps(body).encode(), **HERE)
        except CheckpointError:
            continue
        assert found.format == 1
