"""The power goes at any moment: old, new or plainly none; once the work has returned, only new."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.faults import FAULTS, HEALTHY, NamedFault
from tests.crash.checking import Checker
from tests.crash.places import LocalPlace
from tests.crash.scenarios import FOREIGN, SCENARIOS, Snapshots
from tests.crash.trials import LAST
from tests.e2e import ALONE
from tests.power.replay import WAYS, Change, Found, record, replay, replay_after_kills, seen_states
from tests.power.verdict import identity

pytestmark = pytest.mark.filterwarnings(ALONE)

WORK = {s.name: (s.work, s.before) for s in SCENARIOS if s.work in ("save", "delete", "prune", "adopt")}
FEW, MANY = 64, 4096


@pytest.fixture
def snapshots(local_place: LocalPlace) -> Snapshots:
    """What is in the folder before."""
    return Snapshots(local_place, Checker(local_place))


@pytest.mark.parametrize("name", WORK)
def test_old_new_or_none(name: str, snapshots: Snapshots, tmp_path: Path) -> None:
    """At every moment of every kind of work: each state that may be left is the old one, the new one or plainly none;
    after its return, the new one.
    """
    work, before = WORK[name]
    found = replay(record(work, snapshots.of(before), tmp_path / "power"), FEW)
    assert not found.broken
    assert found.moments > 8
    assert found.states > 8


def test_what_stock_torch_had_not_synced(snapshots: Snapshots, tmp_path: Path) -> None:
    """Adopting a checkpoint whose bytes stock torch left to the page cache: the commit is made when they are synced."""
    found = replay(record("adopt", snapshots.of("stock"), tmp_path / "power", synced=False), FEW)
    assert not found.broken
    assert found.new


def test_a_kill_and_then_the_power(snapshots: Snapshots, tmp_path: Path) -> None:
    """A save is killed anywhere, the next one returns, and the power goes: what was returned is there."""
    killed = record("save", {}, tmp_path / "power")
    found = replay_after_kills(killed, tmp_path / "again", FEW, every=4)
    assert not found.broken
    assert found.moments == 1 + len(killed.log) // 4
    assert found.new == found.states


@pytest.mark.slow
def test_every_way_to_make_a_commit(snapshots: Snapshots, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for filesystems without hard links and without a rename that never replaces, in far more states; and
    after a kill at every operation.
    """
    total = Found()
    for way in WAYS:
        for name, (work, before) in WORK.items():
            one = replay(record(work, snapshots.of(before), tmp_path / f"{way} {name}", way=way), MANY)
            total.add(one)
            _tell(capsys, f"{name}, commit by {way}", one)
    for name in ("fresh save", "save that replaces"):
        killed = record("save", snapshots.of(WORK[name][1]), tmp_path / f"killed {name}")
        one = replay_after_kills(killed, tmp_path / f"again {name}", FEW)
        total.add(one)
        _tell(capsys, f"{name}, killed, and the next", one)
    _tell(capsys, "in all", total)
    assert not total.broken


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("save that replaces", 4),
        pytest.param("fresh save", 12, marks=pytest.mark.slow),
        pytest.param("delete", 12, marks=pytest.mark.slow),
    ],
)
def test_real_loads_say_the_same(
    name: str, count: int, local_place: LocalPlace, snapshots: Snapshots, tmp_path: Path
) -> None:
    """States that the power left, made into real folders: a real load finds the same as the plain look; a save and a
    prune then leave nothing behind.
    """
    work, before = WORK[name]
    recording = record(work, snapshots.of(before), tmp_path / "power")
    checker = Checker(local_place)
    versions = {recording.old: 1, recording.new: 2, None: None}
    states = list(seen_states(recording, FEW))
    chosen = [*states[:: len(states) // count], states[-1]]
    for _, files in chosen:
        url = local_place.url(local_place.number())
        local_place.fill(url, files)
        assert checker.version(url) == versions[identity(files, files)]
        checker.save(url, LAST)
        checker.prune(url)
        assert checker.version(url) == LAST
        checker.check_tidy(url, {FOREIGN} & set(files))
    assert len(chosen) > count


def _skipping(folders: bool) -> Change:
    def change(calls: Syscalls) -> Syscalls:
        def fsync(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode) is not folders:
                calls.fsync(fd)

        return dataclasses.replace(calls, fsync=fsync)

    return change


MISSING: dict[str, tuple[NamedFault, Change]] = {
    "no fsync": (FAULTS["no-fsync"], lambda calls: calls),
    "files are not synced": (HEALTHY, _skipping(folders=False)),
    "folders are not synced": (HEALTHY, _skipping(folders=True)),
    "old files first": (FAULTS["old-files-first"], lambda calls: calls),
    "manifest after the commit": (FAULTS["commit-before-manifest"], lambda calls: calls),
}


@pytest.mark.parametrize("missing", MISSING)
def test_without_a_protection_something_is_lost(missing: str, snapshots: Snapshots, tmp_path: Path) -> None:
    """Without one of these the replay of a save that replaces finds a checkpoint that is neither old nor new."""
    fault, change = MISSING[missing]
    recording = record("save", snapshots.of("old"), tmp_path / "power", fault=fault, change=change)
    assert replay(recording, FEW).broken


def _tell(capsys: pytest.CaptureFixture[str], what: str, found: Found) -> None:
    with capsys.disabled():
        print(
            f"\n{what}: {found.moments} moments, {found.choices} choices, {found.looked} looked at, {found.states} "
            f"states: {found.old} old, {found.new} new, {found.none} none, {len(found.broken)} broken",
            end="",
        )
