"""Bytes that went missing or changed after the commit are found, named, and never loaded in silence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_storage import CheckpointError, CorruptCheckpointError, NotCommittedError, SaveOptions
from tests.e2e import ALONE, Place, assert_same, failure, failures_of, like, load, place_of, save

pytestmark = pytest.mark.filterwarnings(ALONE)


def state() -> dict[str, Any]:
    """Tensors of one and of many checksum blocks, and an object, over several files."""
    return {
        "large": torch.arange(200_000, dtype=torch.float32),
        "small": torch.arange(12, dtype=torch.int16),
        "matrix": torch.arange(60_000, dtype=torch.float64).reshape(300, 200),
        "object": [0.1, "run", 7],
    }


OPTIONS = SaveOptions(shard_size=600_000)


@pytest.fixture(params=["local", "moto", "ministack"])
def place(request: pytest.FixtureRequest) -> Place:
    place = place_of(request, request.param)
    save(state(), place.writer(options=OPTIONS))
    assert len(place.shards()) >= 2
    return place


def flip(place: Place, name: str, at: int) -> None:
    data = bytearray(place.get(name))
    data[at] ^= 0x10
    place.set(name, bytes(data))


def cut(place: Place, name: str) -> int | None:
    data = place.get(name)
    place.set(name, data[:-1])
    return len(data) - 1


def empty(place: Place, name: str) -> int | None:
    place.set(name, b"")
    return 0


def grow(place: Place, name: str) -> int | None:
    data = place.get(name)
    place.set(name, data + b"\0")
    return len(data) + 1


def remove(place: Place, name: str) -> int | None:
    place.remove(name)
    return None


def untouched(template: dict[str, Any]) -> bool:
    return all(value is None or bool((value == -7).all()) for value in template.values())


def sentinels(key: str = "") -> dict[str, Any]:
    """The template, full of sentinels, or one key of it."""
    template = {**like(state()), "object": None}
    return {key: template[key]} if key else template


@pytest.mark.parametrize("damage", [cut, empty, grow, remove])
def test_a_shard_of_another_size(place: Place, damage: Callable[[Place, str], int | None]) -> None:
    """File, wanted and found size are named, and no tensor of the state was changed."""
    name = place.shards()[1]
    wanted = place.files()[name]
    found = damage(place, name)
    template = sentinels()
    error = failure(CorruptCheckpointError, lambda: load(template, place.reader()))
    assert (error.file, error.wanted, error.found) == (name, wanted, found)
    assert name in str(error)
    assert str(wanted) in str(error)
    assert found is None or str(found) in str(error)
    assert untouched(template)


@pytest.mark.parametrize("key", ["large", "small", "matrix", "object"])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.999999])
def test_a_flipped_byte_of_a_payload(place: Place, key: str, at: float) -> None:
    """File, key, place, wanted and found CRC-32 are named, wherever in the payload the byte is."""
    manifest = place.manifest()
    (item,) = [item for item in manifest["items"] if item["key"] == key]
    name = manifest["files"][item["file"]]["name"]
    start = item["offset"] + item.get("payload_offset", 0)
    byte = start + int(at * item["payload_length"])
    flip(place, name, byte)
    error = failure(CorruptCheckpointError, lambda: load(sentinels(), place.reader()))
    assert (error.file, error.key) == (name, key)
    assert error.offset is not None
    assert error.offset <= byte < error.offset + item.get("block", 1 << 20)
    assert error.wanted in item["blocks"]
    assert error.found not in {None, error.wanted}
    assert name in str(error)
    assert repr(key) in str(error)


def test_what_is_not_wanted_is_not_looked_at(place: Place) -> None:
    """Damage in a file that the template does not need does not keep the rest from loading."""
    manifest = place.manifest()
    (large,) = [item for item in manifest["items"] if item["key"] == "large"]
    for record in manifest["files"]:
        if record["name"] != manifest["files"][large["file"]]["name"]:
            place.remove(record["name"])
    template = sentinels("large")
    load(template, place.reader())
    assert_same(template, {"large": state()["large"]})


def test_a_flipped_byte_of_the_manifest(place: Place) -> None:
    """The manifest is checked as a whole: file, wanted and found CRC-32 are named; nothing was changed."""
    size = place.files()[".manifest"]
    for at in (0, size // 2, size - 1):
        flip(place, ".manifest", at)
        template = sentinels()
        error = failure(CorruptCheckpointError, lambda t=template: load(t, place.reader()))  # type: ignore[misc]
        assert error.file == ".manifest"
        assert error.wanted == json.loads(place.get(".commit"))["manifest"]["crc32"]
        assert error.found not in {None, error.wanted}
        assert untouched(template)
        flip(place, ".manifest", at)
    load(sentinels(), place.reader())


@pytest.mark.parametrize("damage", [cut, empty, grow, remove])
def test_a_manifest_of_another_size(place: Place, damage: Callable[[Place, str], int | None]) -> None:
    """A cut, emptied, grown or missing manifest is named, and nothing was changed."""
    damage(place, ".manifest")
    template = sentinels()
    error = failure(CorruptCheckpointError, lambda: load(template, place.reader()))
    assert error.file == ".manifest"
    assert untouched(template)


def test_a_flipped_byte_of_the_commit(place: Place) -> None:
    """A commit that fails its own check is no commit, at whichever byte, and nothing was changed."""
    for at in range(0, place.files()[".commit"], 29):
        flip(place, ".commit", at)
        template = sentinels()
        failure(NotCommittedError, lambda t=template: load(t, place.reader()))  # type: ignore[misc]
        assert untouched(template)
        flip(place, ".commit", at)
    load(sentinels(), place.reader())


def test_a_flipped_byte_of_a_later_commit(place: Place) -> None:
    """Where the highest commit is damaged and the one before was tidied away, loading again cannot help.

    The error must so not be CheckpointReplacedError, which says "load again" and would be followed for ever.
    """
    save(state(), place.writer(options=OPTIONS, overwrite=True))
    flip(place, ".commit.2", 20)
    template = sentinels()
    errors = []
    for _ in range(2):
        with pytest.raises(CheckpointException) as caught:
            load(template, place.reader())
        errors.append(failures_of(caught.value)[0])
    assert {type(error) for error in errors} <= {CorruptCheckpointError, NotCommittedError}, errors[0]
    assert untouched(template)


def test_a_flipped_byte_anywhere(request: pytest.FixtureRequest) -> None:
    """Whichever byte of whichever file is flipped: the load fails with our error, or every value is right."""
    place = place_of(request, "local")
    save(state(), place.writer(options=OPTIONS))
    numbers = random.Random(7)
    failed = 0
    files = place.files()
    for round_ in range(120):
        name = sorted(files)[round_ % len(files)]
        # Half of the flips near an end, where headers and trailers are.
        near = numbers.randrange(min(1500, files[name])) - 750
        at = numbers.randrange(files[name]) if round_ % 2 else near % files[name]
        flip(place, name, at)
        template = sentinels()
        try:
            load(template, place.reader())
        except CheckpointException as raised:
            failed += isinstance(failures_of(raised)[0], CheckpointError) or -1000
        else:
            assert_same(template, state(), f"{name} at {at}")
        flip(place, name, at)
    assert failed > 30
    template = sentinels()
    load(template, place.reader())
    assert_same(template, state())
