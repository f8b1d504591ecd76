"""A small checkpoint of two ranks, every way to damage a file of it, and every way to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_storage import (
    DCP,
    CheckpointError,
    CorruptCheckpointError,
    FsspecStorageWriter,
    NotCommittedError,
    PerRank,
    RngState,
    SaveOptions,
    load_keys,
)
from tests.e2e import Place, assert_same, assert_sentence, load
from tests.protocol.oracle import attempt_to

__all__ = [
    "LOADERS",
    "Damage",
    "Item",
    "Loader",
    "Values",
    "check_error",
    "flips",
    "items_of",
    "outcome",
    "same",
    "save_on",
    "whole_files",
]

Values = dict[str, Any]
SHAPES: dict[str, tuple[int, ...]] = {"large": (12_000,), "rows": (300, 40), "small": (12,)}
SLICES = {"large": (slice(5000, 5010),), "rows": (slice(140, 160), slice(3, 9))}


def whole(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of the state, whole: several blocks, split over two ranks, and a few bytes."""
    return {
        "large": torch.arange(12_000, dtype=torch.float32) + seed,
        "rows": torch.arange(12_000, dtype=torch.float32).reshape(300, 40) * 0.5 + seed,
        "small": torch.arange(12, dtype=torch.int16) + seed,
    }


def save_on(rank: int, world: int, url: str, seed: int, options: Mapping[str, Any] | None = None) -> None:
    """On a rank: saves plain and sharded tensors, an object and values of its own, each item in a file of its own."""
    tensors: dict[str, Any] = whole(seed)
    tensors["rows"] = distribute_tensor(tensors["rows"], init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {**tensors, "object": (0.1, "run", seed), "loader": PerRank({"at": 10 * rank + seed}), "rng": RngState()}
    writer = FsspecStorageWriter(url, storage_options=dict(options or {}), options=SaveOptions(shard_size=1))
    torch.manual_seed(rank + seed)
    DCP.save(state, storage_writer=writer)


# -- the damage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """What becomes of one or two files.

    Attributes:
        what: in a word.
        file: the file that it is about.
        at: the byte that is another, None where the whole file is meant.
        files: what is put in place: name → content, None for a file that is removed.
    """

    what: str
    file: str
    at: int | None
    files: dict[str, bytes | None]

    def do(self, place: Place) -> None:
        """Does it."""
        _put(place, self.files)

    def undo(self, place: Place, good: Mapping[str, bytes]) -> None:
        """Puts back what was there."""
        _put(place, {name: good[name] for name in self.files})


def _put(place: Place, files: Mapping[str, bytes | None]) -> None:
    for name, data in files.items():
        if data is None:
            place.remove(name)
        else:
            place.set(name, data)


def whole_files(good: Mapping[str, bytes], other: Mapping[str, bytes]) -> Iterator[Damage]:
    """Every file cut, halved, grown, emptied, removed, replaced by another checkpoint's, swapped with one of its size.

    Args:
        good: the checkpoint's files.
        other: those of another one, with the same names.
    """
    for name, data in good.items():
        for what, new in {
            "cut": data[:-1],
            "halved": data[: len(data) // 2],
            "grown": data + b"\0",
            "doubled": data + data,
            "emptied": b"",
            "removed": None,
        }.items():
            yield Damage(what, name, None, {name: new})
        if name in other and other[name] != data:
            yield Damage("replaced", name, None, {name: other[name]})
    names = sorted(good)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            if len(good[first]) == len(good[second]) and good[first] != good[second]:
                yield Damage("swapped", first, None, {first: good[second], second: good[first]})


@dataclass(frozen=True)
class Item:
    """One item of a manifest, in the words of the format.

    Attributes:
        file: name of the file.
        said: the item as the manifest's JSON has it.
    """

    file: str
    said: dict[str, Any]

    @property
    def key(self) -> str:
        """Its key."""
        return str(self.said["key"])

    @property
    def start(self) -> int:
        """First byte of its payload in the file."""
        return int(self.said["offset"] + self.said.get("payload_offset", 0))

    @property
    def block(self) -> int:
        """Bytes of a block; the format leaves a MiB out."""
        return int(self.said.get("block", 1 << 20))

    def block_at(self, byte: int) -> int | None:
        """Which block of the payload a byte of the file is in; None for one around the payload."""
        place = byte - self.start
        return place // self.block if 0 <= place < self.said["payload_length"] else None


def items_of(manifest: Mapping[str, Any]) -> list[Item]:
    """The items of a manifest."""
    return [Item(manifest["files"][said["file"]]["name"], said) for said in manifest["items"]]


def flips(good: Mapping[str, bytes], items: list[Item]) -> Iterator[Damage]:
    """A bit of another value in every block of every item, in front of each payload and behind it, and elsewhere."""
    places: set[tuple[str, int]] = set()
    for item in items:
        first, length = item.start, item.said["payload_length"]
        for number in range(len(item.said["blocks"])):
            size = min(item.block, length - number * item.block)
            places.add((item.file, first + number * item.block + (7 * number + size // 3) % size))
        places |= {(item.file, item.said["offset"] + 3), (item.file, item.said["offset"] + item.said["length"] - 3)}
        places |= {(item.file, first), (item.file, first + length - 1)}
    for name, data in good.items():
        if not name.endswith(".distcp"):
            places |= {(name, at) for at in range(0, len(data), max(1, len(data) // 9))}
            places.add((name, len(data) - 1))
    for name, at in sorted(places):
        spoiled = bytearray(good[name])
        spoiled[at] ^= 1 << at % 8
        yield Damage("flipped", name, at, {name: bytes(spoiled)})


# -- the loads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """A way to read the checkpoint.

    Attributes:
        name: in a word.
        run: reads it: what was reported as loaded, with its values.
        wants: whether it reads a block of an item; of block None, whether it reads anything of it.
    """

    name: str
    run: Callable[[Place], Values]
    wants: Callable[[Item, int | None], bool]


def _template() -> Values:
    tensors = {key: torch.full(shape, -7.0).to(whole(0)[key].dtype) for key, shape in SHAPES.items()}
    return {**tensors, "object": None}


def _plain(place: Place) -> Values:
    state, reader = _template(), place.reader()
    load(state, reader)
    assert reader.report is not None
    assert set(reader.report.loaded) == set(state)
    return state


def _all_keys(place: Place) -> Values:
    found = load_keys(place.url, storage_options=place.options)
    assert found.report.loaded == sorted(found)
    return dict(found)


def _sliced(place: Place) -> Values:
    return dict(load_keys(place.url, slices=SLICES, storage_options=place.options))


def _whole_state(place: Place) -> Values:
    state: Values = {**_template(), "loader": PerRank()}
    report = DCP.load(state, storage_reader=place.reader(), no_dist=True)
    assert {"large", "rows", "small", "object"} <= set(report.loaded)
    return {**state, "loader": state["loader"].saved}


def _covers(item: Item, block: int | None) -> bool:
    """Whether the slices that are loaded have bytes in a block, by the arithmetic of row-major arrays."""
    if item.key not in SLICES:
        return False
    shape, offsets = item.said["shape"], item.said["offsets"]
    low = [max(part.start - o, 0) for part, o in zip(SLICES[item.key], offsets, strict=True)]
    high = [min(part.stop - o, n) for part, o, n in zip(SLICES[item.key], offsets, shape, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return False
    if block is None:
        return True
    step = 4 * (shape[1] if len(shape) > 1 else 1)
    across = (low[1], high[1]) if len(shape) > 1 else (0, 1)
    rows = [(row * step + 4 * across[0], row * step + 4 * across[1]) for row in range(low[0], high[0])]
    return any(first < (block + 1) * item.block and last > block * item.block for first, last in rows)


LOADERS = {
    loader.name: loader
    for loader in (
        Loader("plain", _plain, lambda item, block: item.key in {"large", "rows", "small", "object"}),
        Loader("all-keys", _all_keys, lambda item, block: True),
        Loader("sliced", _sliced, _covers),
        # The number of ranks is told by the size of a tensor, whose elements nobody reads.
        Loader(
            "state", _whole_state, lambda item, block: "rng" not in item.key and item.key != "__per_rank__.world_size"
        ),
    )
}


def outcome(place: Place, loader: Loader) -> Values | CheckpointError:
    """What a load gave, or the error of ours that it ended in."""
    values: list[Values] = []
    error = attempt_to(lambda: values.append(loader.run(place)))
    if error is None:
        return values[0]
    assert isinstance(error, CheckpointError), repr(error)
    return error


def check_error(error: CheckpointError, damage: Damage, items: list[Item], commits: set[str]) -> None:
    """The error is a sentence that names the file, what was wanted and found, and the place and key where there is one.

    Args:
        error: what a load ended in.
        damage: what was done.
        items: of the manifest.
        commits: names of the commit objects.
    """
    text = str(error)
    assert_sentence(text)
    if set(damage.files) & commits and damage.what == "replaced":  # a whole commit, of another manifest
        assert type(error) is CorruptCheckpointError, repr(error)
        assert error.file == ".manifest"
        assert damage.file in text
        assert None not in {error.wanted, error.found}
        return
    if set(damage.files) & commits:
        assert type(error) is NotCommittedError, repr(error)
        assert damage.files[damage.file] is None or damage.file in text
        return
    assert type(error) is CorruptCheckpointError, repr(error)
    assert error.file in damage.files, (damage.what, error.file)
    assert error.file in text
    assert error.wanted is not None
    assert error.found is not None or damage.files[error.file] is None
    assert error.found != error.wanted
    held = {item.key for item in items if item.file == error.file}
    if held:
        assert error.key in held
        assert repr(error.key) in text
    if damage.what == "flipped" and held:
        (item,) = [one for one in items if one.file == damage.file and one.key == error.key]
        assert damage.at is not None
        number = item.block_at(damage.at)
        assert number is not None
        assert error.offset == item.start + number * item.block
        assert error.wanted == item.said["blocks"][number]
        assert str(error.offset) in text


def same(found: Values, wanted: Values, at: str) -> None:
    """All that was loaded is right, bit for bit."""
    assert set(found) == set(wanted), at
    for key, value in wanted.items():
        assert_same(_plain_of(found[key]), _plain_of(value), f"{at}: {key}")


def _plain_of(value: Any) -> Any:
    """A value in which arrays and tuples are what can be compared."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tobytes()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain_of, value)]
    return value
