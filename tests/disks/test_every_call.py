"""Each system call of a save fails once, or the disk does from there on: the save raises by number and name, and the
folder holds what was committed before.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import CheckpointError, CheckpointNotFoundError, CommitUnknownError, SaveOptions, StoreError
from dcp_storage.errors import Cause
from tests.disks import writer_with
from tests.disks.injecting import NUMBERS, Injector, Point
from tests.e2e import ALONE, Place, assert_same, assert_sentence, like, load, save, small_state
from tests.protocol.oracle import attempt_to

pytestmark = pytest.mark.filterwarnings(ALONE)

OPTIONS = SaveOptions(attempts=2, max_concurrency=1, part_size=1 << 16, shard_size=6000)
PASSING = {errno.ESTALE, errno.EINTR}
BEFORE = ("open", "write", "fsync", "reserve", "truncate", "mkdir", "link", "replace")


def state(seed: int = 0) -> dict[str, Any]:
    """Some small values, which are put in one piece, and a tensor that goes up in parts."""
    return {**small_state(seed), "big": torch.full((40_000,), float(seed))}


def save_on(injector: Injector, seed: int, **options: Any) -> BaseException | None:
    writer = writer_with(injector.folder, injector.calls(), options=OPTIONS, **options)
    return attempt_to(lambda: save(state(seed), writer))


def loaded(place: Place) -> int | None:
    """The seed of the state that loads, every element compared; None where nothing is committed."""
    found = like(state())
    error = attempt_to(lambda: load(found, place.reader()))
    if error is not None:
        assert isinstance(error, CheckpointNotFoundError), repr(error)
        assert_same(found, like(state()))
        return None
    seed = int(found["step"]) - 500_000
    assert_same(found, state(seed))
    return seed


def points_of(folder: Path, *, replacing: bool) -> list[Point]:
    """Every call of a save, in order."""
    place = Place(str(folder / "recorded" / "step"))
    if replacing:
        save(state(1), place.writer(options=OPTIONS))
    injector = Injector(place.url)
    assert save_on(injector, 2, overwrite=replacing) is None
    assert loaded(place) == 2
    return injector.seen


def ours(place: Place, before: set[str]) -> set[str]:
    """What the save left under final names, but for the claim, which the next prune takes."""
    left = {name for name in place.files() if name not in before}
    return {name for name in left if name != ".claim" and not name.startswith(".claim.")}


def check(folder: Path, point: Point, number: int, *, replacing: bool, half: bool, for_ever: bool) -> str:
    """One save with one fault; what came of it."""
    place = Place(str(folder / "step"))
    if replacing:
        save(state(1), place.writer(options=OPTIONS))
    before = {name: place.get(name) for name in place.files()}
    old = 1 if replacing else None
    at = f"{point} {errno.errorcode[number]} replacing={replacing} half={half} for_ever={for_ever}"
    injector = Injector(place.url, point, number, for_ever, half)
    error = save_on(injector, 2, overwrite=replacing)
    assert point in injector.seen, at
    now = loaded(place)
    if error is None:
        assert now == 2, at
        return "saved"
    assert isinstance(error, CheckpointError), f"{at}: {error!r}"
    assert_sentence(str(error))
    if isinstance(error, CommitUnknownError):
        assert now in (old, 2), at
        assert isinstance(error.cause, Cause), at
        return "unknown"
    assert isinstance(error, StoreError), f"{at}: {error!r}"
    assert error.errno == number, at
    assert error.operation, at
    assert error.path == place.url, at
    assert error.key is not None or error.operation == "make_folder" or set(point.file) <= {".", "/"}, f"{at}: {error}"
    assert error.key is None or error.key in str(error), at
    assert now == old, at
    assert {name: place.get(name) for name in before} == before, at
    if point.call != "unlink":
        assert not ours(place, set(before)), f"{at}: {ours(place, set(before))}"
    return "failed"


def check_all(tmp_path: Path, points: list[tuple[Point, int]], **how: bool) -> dict[str, int]:
    counts: dict[str, int] = {}
    for number, (point, value) in enumerate(points):
        came = check(tmp_path / str(number), point, value, **how)
        counts[came] = counts.get(came, 0) + 1
        if came == "saved" and value not in PASSING:
            assert not is_needed(point, how["replacing"]), (point, value)
    return counts


def is_needed(point: Point, replacing: bool) -> bool:
    """Whether a save cannot do without a call: those that write shards, the manifest and the commit."""
    commit = ".commit.2" if replacing else ".commit"
    base = point.file.replace(".<token>", "")
    if point.call in ("write", "fsync") and (base.endswith(".distcp") or base in (".manifest", commit)):
        return True
    return point.call == "open" and base.endswith(".distcp")


@pytest.mark.parametrize("replacing", [False, True])
def test_some_calls(tmp_path: Path, replacing: bool) -> None:
    """A sample: every fifth call of a save, with another error each time."""
    points = points_of(tmp_path, replacing=replacing)
    assert len(points) > 40
    chosen = [(point, NUMBERS[k % len(NUMBERS)]) for k, point in enumerate(points[:: 5 - replacing])]
    counts = check_all(tmp_path, chosen, replacing=replacing, half=True, for_ever=False)
    assert counts["failed"] > 3


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("numbers", [(errno.ENOSPC,), (errno.EIO,), NUMBERS[2:]], ids=["ENOSPC", "EIO", "others"])
@pytest.mark.parametrize("replacing", [False, True])
def test_every_call_fails_once(tmp_path: Path, numbers: tuple[int, ...], replacing: bool) -> None:
    """Whichever call of a save fails once: the save raises with errno, key and operation, and the old checkpoint loads;
    or it went on, and the new one does; where nobody can know which, it says so.
    """
    points = [(p, numbers[k % len(numbers)]) for k, p in enumerate(points_of(tmp_path, replacing=replacing))]
    counts = check_all(tmp_path, points, replacing=replacing, half=False, for_ever=False)
    print(f"{len(points)} calls, replacing={replacing}: {counts}")
    assert counts["failed"] > 5


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("replacing", [False, True])
def test_the_disk_fails_from_a_call_on(tmp_path: Path, number: int, replacing: bool) -> None:
    """From some call on nothing can be written any more, half of the first write being there: as above."""
    points = [p for p in points_of(tmp_path, replacing=replacing) if p.call in BEFORE]
    counts = check_all(tmp_path, [(p, number) for p in points], replacing=replacing, half=True, for_ever=True)
    print(f"{len(points)} calls, replacing={replacing}: {counts}")
    assert counts["failed"] > 10
