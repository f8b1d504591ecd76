"""Every file and every block of a committed checkpoint, damaged in every way, under every way to read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcp_storage import CheckpointNotFoundError, NotCommittedError
from dcp_storage.testing.ranks import RankPool
from tests.corruption import (
    LOADERS,
    Damage,
    Item,
    Values,
    check_error,
    flips,
    items_of,
    outcome,
    same,
    save_on,
    whole_files,
)
from tests.e2e import ALONE, Place
from tests.tools.test_cli import run

pytestmark = [
    pytest.mark.filterwarnings(ALONE),
    pytest.mark.filterwarnings("ignore:.*differ.*between ranks:UserWarning"),
]

COMMITS = {".commit"}
ALWAYS_READ = {".commit", ".manifest"}


@dataclass(frozen=True)
class Saved:
    """A checkpoint on local disk, and what is right.

    Attributes:
        place: its folder.
        good: its files.
        other: those of another checkpoint, of the same names.
        items: of its manifest.
        right: loader → what it loads while nothing is damaged.
    """

    place: Place
    good: dict[str, bytes]
    other: dict[str, bytes]
    items: list[Item]
    right: dict[str, Values]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Saved:
    folder: Path = tmp_path_factory.mktemp("corruption")
    place, other = Place(str(folder / "one")), Place(str(folder / "other"))
    ranks.run(save_on, 2, place.url, 1)
    ranks.run(save_on, 2, other.url, 2)
    good = {name: place.get(name) for name in place.files()}
    right = {}
    for name, loader in LOADERS.items():
        values = outcome(place, loader)
        assert isinstance(values, dict), values
        right[name] = values
    return Saved(place, good, {n: other.get(n) for n in other.files()}, items_of(place.manifest()), right)


def files_damages(saved: Saved) -> list[Damage]:
    return [*whole_files(saved.good, saved.other)]


def must_fail(damage: Damage, saved: Saved, name: str) -> bool:
    """Whether a load cannot do without what was damaged."""
    if set(damage.files) & ALWAYS_READ:
        return True
    loader = LOADERS[name]
    for item in saved.items:
        if item.file not in damage.files:
            continue
        if damage.what == "flipped" and damage.at is not None:
            number = item.block_at(damage.at)
            if number is not None and loader.wants(item, number):
                return True
        elif damage.what in {"replaced", "swapped"}:
            new = damage.files[item.file]
            if new is None or len(new) != len(saved.good[item.file]):
                if loader.wants(item, None):
                    return True
                continue
            for number in range(len(item.said["blocks"])):
                first = item.start + number * item.block
                last = min(first + item.block, item.start + item.said["payload_length"])
                if loader.wants(item, number) and new[first:last] != saved.good[item.file][first:last]:
                    return True
        elif loader.wants(item, None):
            return True
    return False


def try_all(saved: Saved, damages: list[Damage], loaders: list[str]) -> tuple[int, int]:
    """Does each damage and loads in each way; how many loads failed, and how many gave what is right."""
    failed = right = 0
    for damage in damages:
        found_by = {}
        damage.do(saved.place)
        try:
            for name in loaders:
                found_by[name] = outcome(saved.place, LOADERS[name])
        finally:
            damage.undo(saved.place, saved.good)
        for name, found in found_by.items():
            at = f"{damage.what} {damage.file} at {damage.at}, {name}"
            if isinstance(found, dict):
                assert not must_fail(damage, saved, name), at
                same(found, saved.right[name], at)
                right += 1
            else:
                assert must_fail(damage, saved, name), f"{at}: {found!r}"
                check_error(found, damage, saved.items, COMMITS)
                failed += 1
    return failed, right


def verified(saved: Saved, damages: list[Damage]) -> Iterator[tuple[Damage, int, dict[str, object]]]:
    """What ``dcp-storage verify --depth data --json`` ends with and prints under each damage."""
    for damage in damages:
        damage.do(saved.place)
        done = run("verify", saved.place.url, "--depth", "data", "--json")
        damage.undo(saved.place, saved.good)
        yield damage, done.exit_code, json.loads(done.stdout)


def check_verified(saved: Saved, damages: list[Damage]) -> int:
    """Each damage is found by verify, with its file and what was wanted and found; how many."""
    for damage, code, said in verified(saved, damages):
        at = f"{damage.what} {damage.file} at {damage.at}: {said}"
        if set(damage.files) == {".metadata"}:
            assert code == 0, at
            assert any(".metadata" in text for text in said["warnings"]), at  # type: ignore[attr-defined]
            continue
        if damage.file in COMMITS and damage.files[damage.file] is None:
            assert code == 3, at
            continue
        assert code == 1, at
        if (damage.what, damage.file) == ("replaced", ".commit"):
            advice = [p["advice"] for p in said["problems"]]  # type: ignore[attr-defined]
            assert len(advice) == 1, at
            assert ".commit" in advice[0], at
            continue
        problems = [p for p in said["problems"] if p["file"] in damage.files]  # type: ignore[attr-defined]
        assert {p["file"] for p in problems} >= set(damage.files) - {".metadata"} or ".manifest" in damage.files, at
        for problem in problems:
            assert problem["wanted"] != problem["found"], at
            assert problem["wanted"] is not None, at
            assert problem["advice"], at
            inside = [item for item in saved.items if item.file == problem["file"]]
            if damage.what == "flipped" and inside and damage.at is not None:
                (item,) = [one for one in inside if one.said["offset"] <= damage.at][-1:]
                assert problem["key"] == item.key, at
                number = item.block_at(damage.at)
                if number is not None:
                    assert problem["wanted"] == item.said["blocks"][number], at
                    assert f"{item.start + number * item.block} to " in problem["advice"], at
    return len(damages)


def test_the_checkpoint_is_of_all_kinds(saved: Saved) -> None:
    """It holds plain and sharded tensors, objects and values of each rank; several blocks; files of equal size."""
    keys = {item.key for item in saved.items}
    assert {"large", "rows", "small", "object", "__per_rank__.0.loader.at", "__per_rank__.1.loader.at"} <= keys
    assert len([item for item in saved.items if item.key == "rows"]) == 2
    assert max(len(item.said["blocks"]) for item in saved.items) >= 3
    assert {damage.what for damage in files_damages(saved)} >= {"replaced", "swapped", "removed"}
    assert check_verified(saved, []) == 0


def test_some_damage(saved: Saved) -> None:
    """A sample: every seventeenth damage of a file and every fifteenth flipped bit, under every way to load."""
    damages = files_damages(saved)[::17] + [*flips(saved.good, saved.items)][::15]
    failed, right = try_all(saved, damages, [*LOADERS])
    assert failed >= len(damages)
    assert right > 0
    assert check_verified(saved, damages[::4]) > 3


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", LOADERS)
def test_every_file(saved: Saved, name: str) -> None:
    """Every file, cut, halved, grown, doubled, emptied, removed, replaced, swapped: each load fails with all that is
    known of it, or was not concerned and is right bit for bit.
    """
    failed, right = try_all(saved, files_damages(saved), [name])
    print(f"{name}: {failed} failed, {right} right")
    assert failed > 15


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", LOADERS)
def test_every_block(saved: Saved, name: str) -> None:
    """A flipped bit in every block of every item, and around them: the load of what it is in fails by file, offset,
    key, wanted and found CRC-32; every other load is right.
    """
    failed, right = try_all(saved, [*flips(saved.good, saved.items)], [name])
    print(f"{name}: {failed} failed, {right} right")
    assert failed > 15
    assert right > 5


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_verify_finds_everything(saved: Saved) -> None:
    """Whatever byte of whatever file is another, missing or too many: verify --depth data finds it and says where."""
    assert check_verified(saved, [*files_damages(saved), *flips(saved.good, saved.items)]) > 150


def test_nothing_is_reported_loaded(saved: Saved) -> None:
    """After a load that failed the reader has no report, and of the targets no element is any but old or right."""
    import torch

    from tests.e2e import load
    from tests.protocol.oracle import attempt_to

    (damage,) = [d for d in flips(saved.good, saved.items) if saved_block(saved, d) == ("large", 1)][:1]
    damage.do(saved.place)
    reader = saved.place.reader()
    targets = {"large": torch.full((12_000,), -7.0), "small": torch.full((12,), -7, dtype=torch.int16)}
    error = attempt_to(lambda: load(targets, reader))
    damage.undo(saved.place, saved.good)
    assert error is not None
    assert reader.report is None
    assert reader.failure is error
    block = slice(4096, 8192)  # of 16 KiB, in elements: what was read of it may stand there
    for key in ("large", "small"):
        old, right = torch.full_like(targets[key], -7), saved.right["plain"][key]
        fits = (targets[key] == old) | (targets[key] == right)
        if key == "large":
            fits[block] = True
        assert bool(fits.all()), key


def saved_block(saved: Saved, damage: Damage) -> tuple[str, int | None] | None:
    """The key and the number of the block that a damage is in."""
    for item in saved.items:
        if item.file == damage.file and damage.at is not None and (number := item.block_at(damage.at)) is not None:
            return item.key, number
    return None


def test_a_commit_of_another_checkpoint(saved: Saved) -> None:
    """Commit and manifest of another checkpoint together do not make its numbers out of these files."""
    for name in (".commit", ".manifest"):
        saved.place.set(name, saved.other[name])
    for loader in LOADERS.values():
        error = outcome(saved.place, loader)
        assert not isinstance(error, dict | CheckpointNotFoundError | NotCommittedError), loader.name
        assert getattr(error, "file", None) in saved.good
    for name in (".commit", ".manifest"):
        saved.place.set(name, saved.good[name])
