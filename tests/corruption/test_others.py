"""Damage to what ranks committed each for itself, to what stock torch wrote, and on object stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_storage import CheckpointError, CorruptCheckpointError, NotCommittedError, SaveOptions, load_keys, verify
from dcp_storage.testing.ranks import RankPool
from tests.corruption import LOADERS, Damage, Values, check_error, flips, items_of, outcome, same, whole_files
from tests.e2e import ALONE, Place, assert_sentence, failure, like, load, place_of, save
from tests.lone import save_all, state_of
from tests.protocol.oracle import attempt_to
from tests.tools import remove

pytestmark = pytest.mark.filterwarnings(ALONE)


# -- rank by rank ------------------------------------------------------------------------------------------------------


def of_rank_0(place: Place) -> Values | BaseException:
    """What this one process, as rank 0, loads of ranks that committed for themselves."""
    state = like(state_of(0))
    error = attempt_to(lambda: dcp.load(state, storage_reader=place.reader(), no_dist=True))
    return state if error is None else error


def test_ranks_that_committed_for_themselves(tmp_path: Path, ranks: RankPool) -> None:
    """Each file of either rank damaged in each way: the load fails by name or is right, never by another's numbers."""
    place, other = Place(str(tmp_path / "one")), Place(str(tmp_path / "two"))
    ranks.run(save_all, 2, place, 0)
    ranks.run(save_all, 2, other, 1)
    good = {name: place.get(name) for name in place.files()}
    replaced = {name: other.get(name) for name in other.files()}
    right = of_rank_0(place)
    assert isinstance(right, dict)
    same(right, state_of(0), "undamaged")
    own = {name for name in good if name.startswith("__0") and not name.endswith(".metadata")}
    damages = [*whole_files(good, replaced)]
    damages += [
        Damage("flipped", n, len(good[n]) // 3, {n: _flipped(good[n], len(good[n]) // 3)}) for n in sorted(good)
    ]
    failed = 0
    for damage in damages:
        damage.do(place)
        found = of_rank_0(place)
        damage.undo(place, good)
        at = f"{damage.what} {damage.file}: {found!r}"
        commits = {name for name in damage.files if name.endswith(".commit")}
        if isinstance(found, dict):
            assert not commits, at
            assert not set(damage.files) & own, at
            same(found, right, at)
            continue
        failed += 1
        assert isinstance(found, CorruptCheckpointError | NotCommittedError), at
        assert_sentence(str(found))
        assert set(damage.files) & own or commits, at
        named = {getattr(found, "file", None), found.key} | {name for name in good if name in str(found)}
        assert named & set(damage.files) or damage.what == "replaced", at
    assert failed > 20


def _flipped(data: bytes, at: int) -> bytes:
    spoiled = bytearray(data)
    spoiled[at] ^= 1
    return bytes(spoiled)


# -- stock -------------------------------------------------------------------------------------------------------------

STATE: Values = {"large": torch.arange(9000.0), "small": torch.arange(12, dtype=torch.int16), "object": (0.1, "run")}


def test_what_stock_torch_wrote(tmp_path: Path) -> None:
    """In stock checkpoints, too, a bit of a number that is another is found: file, offset, key, wanted and found."""
    place = Place(str(tmp_path / "one"))
    dcp.save(dict(STATE), storage_writer=FileSystemWriter(place.url), no_dist=True)
    (name,) = place.shards()
    good = place.get(name)
    failed = 0
    for at in range(0, len(good), 997):
        place.set(name, _flipped(good, at))
        state = like(STATE)
        error = attempt_to(lambda s=state: load(s, place.reader(require_commit=False)))  # type: ignore[misc]
        if error is None:
            same(state, STATE, str(at))
            continue
        failed += 1
        assert isinstance(error, CorruptCheckpointError), repr(error)
        assert_sentence(str(error))
        assert (error.file, error.key in STATE) == (name, True), error
        assert error.offset is not None
        assert error.offset <= at, (error.offset, at)
        if "CRC-32" in str(error):
            assert error.wanted not in {None, error.found}
    assert failed > 30
    place.set(name, good)
    load(like(STATE), place.reader(require_commit=False))


@pytest.mark.parametrize("what", ["cut", "emptied", "removed"])
def test_a_stock_file_of_another_size(tmp_path: Path, what: str) -> None:
    """A stock shard that is short or gone fails the load before any tensor changes: file, key, wanted and found."""
    place = Place(str(tmp_path / "one"))
    dcp.save(dict(STATE), storage_writer=FileSystemWriter(place.url), no_dist=True)
    (name,) = place.shards()
    data = place.get(name)
    if what == "removed":
        place.remove(name)
    else:
        place.set(name, data[:-1] if what == "cut" else b"")
    state = like(STATE)
    error = failure(CorruptCheckpointError, lambda: load(state, place.reader(require_commit=False)))
    assert error.file == name
    assert error.key in STATE
    assert error.wanted is not None
    assert error.found == {"cut": len(data) - 1, "emptied": 0, "removed": None}[what]
    same(state, like(STATE), what)


# -- object stores -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("store", ["moto", "ministack", "gcs"])
def test_on_object_stores(request: pytest.FixtureRequest, store: str) -> None:
    """Through real clients: each shard, manifest and commit damaged in each way, and a block of each item flipped, are
    named as on a disk; verify finds them.
    """
    place, other = place_of(request, store), place_of(request, "local")
    save(dict(STATE), place.writer(options=SaveOptions(shard_size=1)))
    save({**STATE, "small": STATE["small"] + 1}, other.writer(options=SaveOptions(shard_size=1)))
    good = {name: place.get(name) for name in place.files()}
    items = items_of(place.manifest())
    right = dict(load_keys(place.url, storage_options=place.options))
    damages = [d for d in whole_files(good, {n: other.get(n) for n in other.files()}) if d.file != ".metadata"]
    damages += [d for d in flips(good, items) if d.file != ".metadata"][::3]
    failed = 0
    for damage in damages:
        _do(place, damage)
        found = outcome(place, LOADERS["all-keys"])
        if damage.file != ".commit":
            said = verify(place.url, "data", storage_options=place.options)
            assert not said.ok, damage.what
            assert {problem.file for problem in said.problems} & set(damage.files), damage.what
        damage.undo(place, good)
        if isinstance(found, CheckpointError):
            failed += 1
            check_error(found, damage, items, {".commit"})
        else:
            same(found, right, f"{damage.what} {damage.file} at {damage.at}")
    print(f"{store}: {len(damages)} damages, {failed} loads failed")
    assert failed > 20


def _do(place: Place, damage: Damage) -> None:
    gone = [name for name, data in damage.files.items() if data is None]
    remove(place, *gone)
    for name, data in damage.files.items():
        if data is not None:
            place.set(name, data)
