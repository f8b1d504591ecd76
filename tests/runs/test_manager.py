"""The manager of a run, in one process, with real saves and loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import CheckpointManager, delete
from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    StoreError,
)
from dcp_storage.manager_pending import PendingSave
from dcp_storage.options import SaveOptions
from dcp_storage.stores.local import LocalStore


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(step)), "step": step}


def filled(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state(step))


def wait_for(pending: PendingSave) -> None:
    """Waits without asking for the outcome."""
    until = time.monotonic() + 30
    while not pending.done and time.monotonic() < until:
        time.sleep(0.01)


def break_shard(root: Path, step: int) -> None:
    (shard,) = (root / f"step-{step:08d}").glob("*.distcp")
    os.truncate(shard, 3)


def flip_byte(root: Path, step: int) -> None:
    """Alters bytes of the weight, which no size shows."""
    (shard,) = (root / f"step-{step:08d}").glob("*.distcp")
    body = shard.read_bytes()
    wanted = torch.full((8,), float(step)).numpy().tobytes()
    assert wanted in body
    shard.write_bytes(body.replace(wanted, bytes(32)))


def test_a_run_from_its_beginning(tmp_path: Path) -> None:
    """A new run has no step; what is saved is found, listed, loaded, and lies where path() says."""
    manager = CheckpointManager(tmp_path / "run")
    assert (manager.latest(), manager.steps(), manager.loaded) == (None, [], None)
    filled(manager, 5, 9, 10)
    assert (manager.latest(), manager.steps()) == (10, [5, 9, 10])
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-00000005", "step-00000009", "step-00000010"]
    found = state(0)
    report = manager.load(found)
    assert (found["weight"].tolist(), found["step"], manager.loaded) == ([10.0] * 8, 10, 10)
    assert report.path == manager.path(10) == str(tmp_path / "run" / "step-00000010")
    manager.load(found, 5)
    assert (found["step"], manager.loaded) == (5, 5)


def test_loading_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    """An empty run, and a step that is missing, are not found; nothing is begun anew in silence."""
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        manager.load(state(0))
    filled(manager, 1)
    with pytest.raises(CheckpointNotFoundError, match="step 2"):
        manager.load(state(0), 2)


def test_a_run_whose_only_step_is_unfinished_is_said(tmp_path: Path) -> None:
    """Resuming where the only save was cut off raises, and never says that there is nothing."""
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "__0_0.distcp").write_bytes(b"x")
    manager = CheckpointManager(tmp_path)
    for call in (manager.latest, lambda: manager.load(state(0))):
        with pytest.raises(NotCommittedError, match="step-00000007 is unfinished"):
            call()


def test_an_unfinished_newest_step_is_said_and_the_older_used(tmp_path: Path) -> None:
    """latest() and load() take the newest committed step and name the unfinished one in a warning."""
    manager = CheckpointManager(tmp_path)
    filled(manager, 1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "__0_0.distcp").write_bytes(b"x")
    with pytest.warns(UserWarning, match="step-2 is unfinished.*step 1 is used"):
        assert manager.latest() == 1
    found = state(0)
    with pytest.warns(UserWarning, match="step-2 is unfinished"):
        report = manager.load(found)
    assert (found["step"], len(report.warnings)) == (1, 1)
    assert "step-2" in report.warnings[0]


def test_a_step_is_not_saved_twice_unless_asked(tmp_path: Path) -> None:
    """A committed step is refused and stays; with ``overwrite`` it is replaced where it is, whatever its zeros."""
    manager = CheckpointManager(tmp_path)
    filled(manager, 3)
    with pytest.raises(CheckpointExistsError):
        manager.save(3, state(4))
    (tmp_path / "step-00000003").rename(tmp_path / "step-3")
    manager.save(3, {"weight": torch.full((8,), 33.0), "step": 3}, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]
    found = state(0)
    manager.load(found, 3)
    assert found["weight"].tolist() == [33.0] * 8


def test_retention_after_each_save(tmp_path: Path) -> None:
    """After a save only the newest steps, the multiples and the pinned ones stay; nothing else is touched."""
    manager = CheckpointManager(tmp_path, keep_latest=2, keep_every=10)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-none").mkdir()
    filled(manager, 8, 9, 10)
    assert manager.steps() == [9, 10]
    manager.pin(9, "best")
    assert manager.pins() == [9]
    filled(manager, 11, 12, 13)
    assert manager.steps() == [9, 10, 12, 13]
    manager.unpin(9)
    filled(manager, 14)
    assert manager.steps() == [10, 13, 14]
    assert {"notes.txt", "step-none"} <= {p.name for p in tmp_path.iterdir()}
    assert {p.name for p in (tmp_path / "step-00000011").iterdir()} == {".commit", ".commit.2"}


def test_the_step_just_saved_stays_after_going_back(tmp_path: Path) -> None:
    """Who loads an older step and goes on from there keeps what is saved, although newer steps are there."""
    filled(CheckpointManager(tmp_path), 5, 6, 7)
    manager = CheckpointManager(tmp_path, keep_latest=1)
    manager.load(state(0), 5)
    filled(manager, 3)
    assert manager.steps() == [3, 7]


def test_steps_that_are_saved_again_are_kept_by_the_rule_again(tmp_path: Path) -> None:
    """After going back, steps that were deleted before and are saved again count, and go in their turn."""
    manager = CheckpointManager(tmp_path, keep_latest=2, keep_every=10)
    filled(manager, *range(8, 15))
    assert manager.steps() == [10, 13, 14]
    manager.load(state(0), 10)
    for step in range(11, 20):
        manager.save(step, state(step), overwrite=True)
    assert manager.steps() == [10, 18, 19]


def test_retention_never_takes_the_last_good_step(tmp_path: Path) -> None:
    """Where the newer steps are damaged the newest whole one stays, and each save says so."""
    manager = CheckpointManager(tmp_path)
    filled(manager, 1, 2)
    for step in (1, 2):
        break_shard(tmp_path, step)
    keeping = CheckpointManager(tmp_path, keep_latest=1)
    filled(keeping, 3)
    assert keeping.steps() == [3]
    break_shard(tmp_path, 3)
    filled(keeping, 4)
    assert keeping.steps() == [4]
    report = keeping.prune()
    assert (report.ok, report.kept, report.applied) == (True, [4], False)


def test_a_save_stands_where_retention_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while old steps are deleted is a warning of the save's report: the new step is committed."""
    manager = CheckpointManager(tmp_path, keep_latest=1)
    filled(manager, 1)
    real = LocalStore.delete

    def refuse(store: LocalStore, names: Iterable[str]) -> None:
        if store.url.endswith("step-00000001"):
            raise StoreError("no right", operation="delete", path=store.url)
        real(store, names)

    monkeypatch.setattr(LocalStore, "delete", refuse)
    with pytest.warns(UserWarning, match="could not be deleted"):
        report = manager.save(2, state(2))
    assert "no right" in report.warnings[0]
    monkeypatch.undo()
    assert manager.latest() == 2
    filled(manager, 3)
    assert manager.steps() == [3]
    assert list((tmp_path / "step-00000001").glob("*.distcp")) == []


def test_fall_back_to_the_newest_whole_step(tmp_path: Path) -> None:
    """Damage that sizes show, and damage that only checksums show, leads to an older step if that is asked for."""
    manager = CheckpointManager(tmp_path)
    filled(manager, 1, 2, 3)
    break_shard(tmp_path, 3)
    flip_byte(tmp_path, 2)
    found = state(0)
    with pytest.raises(CorruptCheckpointError):
        manager.load(found)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = manager.load(found, fall_back=True)
    assert (found["weight"].tolist(), found["step"], manager.loaded) == ([1.0] * 8, 1, 1)
    assert [str(w.message).split(" is ")[0] for w in caught] == ["Step 3", "Step 2"]
    assert report.warnings == [str(w.message) for w in caught]
    break_shard(tmp_path, 1)
    with pytest.raises(
        CorruptCheckpointError, match=r"no step is whole; damaged are 1, 2, 3\. The newest: .*__0_0\.distcp has"
    ):
        manager.load(found, fall_back=True)


def test_fall_back_needs_a_reason(tmp_path: Path) -> None:
    """With ``fall_back`` a whole newest step is loaded without a word; a template that does not fit is no damage."""
    manager = CheckpointManager(tmp_path)
    filled(manager, 1, 2)
    found = state(0)
    assert manager.load(found, fall_back=True).warnings == []
    assert found["step"] == 2
    with pytest.raises(CheckpointError) as caught:
        manager.load({"other": torch.zeros(1)}, fall_back=True)
    assert caught.value.kind == "incompatible"


def test_a_pinned_step_survives_everything_of_ours(tmp_path: Path) -> None:
    """A pin is seen by other managers, by prune and by delete, and survives the process that set it."""
    filled(CheckpointManager(tmp_path), 1, 2, 3)
    CheckpointManager(tmp_path).pin(1)
    other = CheckpointManager(tmp_path, keep_latest=1)
    assert (other.pins(), other.prune(apply=True).deleted) == ([1], [2])
    with pytest.raises(CheckpointError, match="pinned"):
        delete(tmp_path / "step-00000001")
    found = state(0)
    other.load(found, 1)
    assert found["step"] == 1
    with pytest.raises(CheckpointNotFoundError):
        other.pin(99)


def test_prune_is_a_dry_run_first(tmp_path: Path) -> None:
    """Without ``apply`` nothing goes; ``keep`` adds steps for one call."""
    filled(CheckpointManager(tmp_path), 1, 2, 3)
    manager = CheckpointManager(tmp_path, keep_latest=1)
    assert (manager.prune().deleted, manager.steps()) == ([1, 2], [1, 2, 3])
    assert (manager.prune(apply=True, keep=[1]).deleted, manager.steps()) == ([2], [1, 3])


def test_an_async_save_is_a_step_once_it_committed(tmp_path: Path) -> None:
    """The state may change after the call; while the save is under way nothing is said of it; then it is a step."""
    with CheckpointManager(tmp_path, keep_latest=1) as manager:
        given = state(1)
        pending = manager.async_save(1, given)
        given["weight"].fill_(-1)
        assert pending.step == 1
        assert manager.latest() in {None, 1}
        report = pending.result()
        assert (pending.done, report.commit, manager.latest()) == (True, 1, 1)
        manager.async_save(2, state(2))
        manager.async_save(3, state(3))
    assert manager.steps() == [3]
    found = state(0)
    manager.load(found)
    assert found["weight"].tolist() == [3.0] * 8


def test_an_async_save_that_failed_reaches_the_next_call(tmp_path: Path) -> None:
    """The error comes out of the next call, once; the run is as it was, and the next save works."""
    manager = CheckpointManager(tmp_path)
    filled(manager, 1)
    pending = manager.async_save(1, state(2))
    wait_for(pending)
    with pytest.raises(CheckpointExistsError):
        manager.steps()
    assert manager.steps() == [1]
    filled(manager, 2)
    assert manager.latest() == 2
    failing = manager.async_save(1, state(2))
    with pytest.raises(CheckpointExistsError):
        failing.wait()
    assert manager.latest() == 2
    manager.async_save(1, state(2))
    with pytest.raises(CheckpointExistsError):
        manager.close()
    manager.close()


def ended(root: Path, *lines: str) -> tuple[int, str]:
    """A program whose function makes calls of its own manager and then just ends: its exit code and what it said."""
    body = "\n    ".join(lines)
    text = f"""
import torch
from dcp_storage import CheckpointManager
def state(step):
    return {{"weight": torch.full((8,), float(step)), "step": step}}
def work():
    manager = CheckpointManager({str(root)!r}, keep_latest=1)
    {body}
work()
"""
    program = [sys.executable, "-W", "ignore", "-c", text]
    done = subprocess.run(program, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    """The save in the background commits and what need not be kept goes, although nobody waits; nothing is said."""
    steps = ("manager.save(1, state(1))", "manager.save(2, state(2))", "manager.async_save(3, state(3))")
    assert ended(tmp_path, *steps) == (0, "")
    assert CheckpointManager(tmp_path).steps() == [3]
    assert list((tmp_path / "step-00000002").glob("*.distcp")) == []


@pytest.mark.slow
def test_an_error_that_nobody_asked_for_is_shown_at_the_end(tmp_path: Path) -> None:
    """A save in the background that failed is shown when the program ends without asking."""
    _, said = ended(tmp_path, "manager.save(1, state(1))", "manager.async_save(1, state(2))")
    last = said.splitlines()[-1]
    assert last.startswith("dcp_storage.errors.CheckpointExistsError: ")
    assert "step-00000001 holds a committed checkpoint already" in last
    assert said.count("The above exception was the direct cause") == 1  # torch's own, with the text in it, and ours


def test_should_save_by_steps(tmp_path: Path) -> None:
    """The rule of the manager decides, what was loaded is not saved again, and without a rule asking is an error."""
    manager = CheckpointManager(tmp_path, every_steps=5)
    assert [step for step in range(1, 12) if manager.should_save(step)] == [5, 10]
    filled(manager, 15)
    again = CheckpointManager(tmp_path, every_steps=5)
    again.load(state(0))
    assert [step for step in range(15, 22) if again.should_save(step)] == [20]
    with pytest.raises(ValueError, match="when to save"):
        CheckpointManager(tmp_path).should_save(1)


def test_should_save_by_failures(tmp_path: Path) -> None:
    """The first save is due at once, as it is measured; the next one not before long, with failures once a day."""
    manager = CheckpointManager(tmp_path, mean_time_between_failures=timedelta(days=1))
    assert manager.should_save(1)
    filled(manager, 1)
    assert not manager.should_save(2)


def test_sigterm_asks_for_one_save(tmp_path: Path) -> None:
    """After SIGTERM a save is due, once; the process lives on, and close() puts the old handler back."""
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, on_sigterm=True) as manager:
        assert not manager.should_save(1)
        signal.raise_signal(signal.SIGTERM)
        assert not manager.preempted
        assert manager.should_save(2)
        assert manager.preempted
        filled(manager, 2)
        assert not manager.should_save(3)
        assert manager.preempted
    assert signal.getsignal(signal.SIGTERM) is before
    CheckpointManager(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    """Options of a wrong type or out of range are refused when the manager is made, steps when they are used."""
    for options, error in (
        ({"keep_latest": 0}, ValueError),
        ({"keep_every": "10"}, TypeError),
        ({"grace": 7}, TypeError),
        ({"save_options": {}}, TypeError),
        ({"mean_time_between_failures": 60}, TypeError),
        ({"every_steps": -1}, ValueError),
        ({"storage_options": "x"}, TypeError),
    ):
        with pytest.raises(error):
            CheckpointManager(tmp_path, **options)
    manager = CheckpointManager(tmp_path, save_options=SaveOptions(assume_single_writer=True))
    refused: tuple[tuple[Any, type[Exception]], ...] = ((-1, ValueError), ("1", TypeError), (True, TypeError))
    for wrong, kind in refused:
        for call in (manager.path, manager.pin, manager.unpin, lambda s: manager.save(s, state(0))):
            with pytest.raises(kind):
                call(wrong)
