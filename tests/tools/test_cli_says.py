"""What a person on call reads: what is wrong, where, and what to do; nothing that says more than was looked at."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.callbacks import Callback
from rich.console import Console

from dcp_storage import CheckpointManager, doctor, prune
from dcp_storage.cli_progress import Bar
from dcp_storage.tools.doctor_checks import CHECKS
from dcp_storage.tools.listing import list_run
from tests.e2e import ALONE, Place
from tests.runs.jobs import state as step_state
from tests.tools import flip, make, remove
from tests.tools.test_cli import run, told

pytestmark = pytest.mark.filterwarnings(ALONE)

RESTORE = "Restore __0_0.distcp from a copy, or use an older checkpoint; loading 'large' is refused."


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(str(tmp_path / "c"))
    make(place, "committed")
    return place


def cut(place: Place) -> None:
    place.set("__0_0.distcp", place.get("__0_0.distcp")[:1000])


def swap(place: Place) -> None:
    first, second = place.get("__0_0.distcp"), place.get("__0_1.distcp")
    place.set("__0_0.distcp", second)
    place.set("__0_1.distcp", first)


SIZES: dict[str, tuple[Callable[[Place], None], str]] = {
    "cut": (cut, r"wrong: short __0_0\.distcp key 'large': \d{6} bytes were committed, 1000 are there"),
    "emptied": (lambda p: p.set("__0_0.distcp", b""), r"wrong: short __0_0\.distcp .*, 0 are there"),
    "missing": (lambda p: remove(p, "__0_0.distcp"), r"wrong: missing __0_0\.distcp .*, none are there"),
    "swapped": (swap, r"wrong: short __0_0\.distcp .* are there\n.*\nwrong: long __0_1\.distcp: .* are there"),
}


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_are_wrong_are_said_by_every_command(place: Place, kind: str, tmp_path: Path) -> None:
    """verify, show and cp all end with 1; each names the file and both sizes, and says what to do."""
    damage, says = SIZES[kind]
    damage(place)
    for command in (["verify"], ["verify", "--depth", "data"]):
        found = run(*command, place.url)
        assert found.exit_code == 1
        assert re.search(says, found.stdout), found.stdout
        assert RESTORE in found.stdout
    shown = run("show", place.url)
    assert shown.exit_code == 1
    assert "wrong: " in shown.stdout
    assert "verify says which keys are concerned" in shown.stdout
    copied = run("cp", place.url, tmp_path / "copy")
    assert copied.exit_code == 1
    assert "__0_0.distcp" in copied.stderr
    assert "Nothing was copied. Restore the file from a copy, or copy an older checkpoint" in copied.stderr


def test_a_verdict_says_how_far_it_was_looked(place: Place, tmp_path: Path) -> None:
    """Of an altered byte the lesser depths say that they did not look; the depth that does gives both CRC-32s."""
    flip(place, "__0_0.distcp", 100_000)
    assert "The files were not looked at; --depth sizes" in run("verify", place.url, "--depth", "commit").stdout
    assert "What is in the files was not read; --depth data does that." in run("verify", place.url).stdout
    found = run("verify", place.url, "--depth", "data")
    assert found.exit_code == 1
    assert "1 thing is wrong (every byte" in found.stdout
    assert re.search(r"altered .* 'large': CRC-32 0x[0-9a-f]{8} was committed, 0x[0-9a-f]{8} was read", found.stdout)
    copied = run("cp", place.url, tmp_path / "copy")
    assert copied.exit_code == 1
    assert "altered at the source" in copied.stderr
    assert f"Nothing was committed at {tmp_path / 'copy'}. Restore the file" in copied.stderr
    assert "run again" not in copied.stderr  # it would not help


@pytest.mark.parametrize("body", [b"", b'{"format":'])
def test_a_torn_commit_is_never_called_stock(place: Place, body: bytes, tmp_path: Path) -> None:
    """Where the commit object is torn nothing advises to adopt, and every command says to restore it."""
    place.set(".commit", body)
    given = {
        "show": run("show", place.url),
        "verify": run("verify", place.url),
        "prune": run("prune", place.url),
        "cp": run("cp", place.url, tmp_path / "copy"),
        "adopt": run("adopt", place.url),
    }
    assert {name: result.exit_code for name, result in given.items()} == {
        **dict.fromkeys(("show", "verify", "prune"), 1), "cp": 3, "adopt": 2,
    }  # fmt: skip
    for name, result in given.items():
        assert "estore" in result.output, name
        assert "adopt" not in result.output, name


def test_a_newer_commit_that_is_torn_is_shown(place: Place) -> None:
    """The checkpoint before it is what loads find: show says so, and why it ends with 1."""
    place.set(".commit.2", b"{")
    shown = run("show", place.url)
    assert shown.exit_code == 1
    assert "wrong: torn-commit .commit.2" in shown.stdout
    assert "commit 1 is what loads find" in shown.stdout


def test_a_prune_of_many_deleted_steps_is_short(tmp_path: Path) -> None:
    """Folders that stay for one reason are one line; where there is nothing to free that is what is said."""
    manager = CheckpointManager(tmp_path, keep_latest=1)
    for step in range(6):
        manager.save(step, step_state(step))
    text = run("prune", tmp_path).stdout
    (line,) = [line for line in text.splitlines() if "late writers" in line]
    assert "step-00000000 and 4 more" in line
    assert text.splitlines()[-1] == f"{tmp_path}: nothing to free; 0 steps to delete, 1 kept."
    assert len(told(run("prune", tmp_path, "--json"))["folders"]) == 6


def test_what_takes_long_tells_how_far_it_is(tmp_path: Path) -> None:
    """Listing, pruning and examining tell a callback of what there is to do, and of all of it as done."""
    manager = CheckpointManager(tmp_path)
    for step in range(3):
        manager.save(step, step_state(step))
    calls: tuple[tuple[Callable[[Callback], object], int], ...] = (
        (lambda bar: list_run(tmp_path, callback=bar), 3),
        (lambda bar: prune(tmp_path, keep_latest=1, callback=bar), 6),
        (lambda bar: doctor(tmp_path, callback=bar), len(CHECKS)),
    )
    for call, wanted in calls:
        bar = Callback()
        call(bar)
        assert (bar.size, bar.value) == (wanted, wanted)


def test_a_store_that_does_not_answer_is_seen_to_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar is drawn on a terminal also where nothing was told yet, and none after its end."""
    monkeypatch.setattr("dcp_storage.cli_progress._PATIENCE", 0.05)
    out = io.StringIO()
    with Bar("looking", in_bytes=False, console=Console(file=out, force_terminal=True, width=80)):
        until = time.monotonic() + 30
        while "looking" not in out.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert "looking" in out.getvalue()
    early = io.StringIO()
    with Bar("looking", console=Console(file=early, force_terminal=True, width=80)):
        pass
    time.sleep(0.1)
    assert early.getvalue() == ""
