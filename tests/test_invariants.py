"""Every invariant of DESIGN section 3: it holds, and with the protection behind it taken away it does not.

Each scenario runs twice, with a named fault of the test kit and without, and gives a verdict that is computed from the
files alone (``tests/protocol/oracle.py``), or from what ``dcp.save`` and ``dcp.load`` did. The table of all rows is
printed at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from dcp_storage.fence import DELETE, PRUNE
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faults import FAULTS, HEALTHY
from tests.protocol.scenarios import (
    Scenario,
    crash_before_manifest,
    delete_while_saving,
    disk_full,
    folder_not_shared,
    killed_anywhere,
    power_loss,
    reply_lost,
    two_saves_race,
    two_saves_share_names,
    write_refused,
)
from tests.protocol.scenarios_more import (
    flipped_byte,
    foreign_files,
    hostile_object,
    outage,
    prune_at_commit,
    prune_live,
    prune_pauses,
    prune_young,
    short_file,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


ROWS: tuple[tuple[str, str, Scenario], ...] = (
    ("I1", "commit-by-put", two_saves_race),
    ("I2", "commit-before-manifest", crash_before_manifest),
    ("I2", "no-second-listing", folder_not_shared),
    ("I2", "no-fsync", power_loss),
    ("I3", "old-files-first", killed_anywhere),
    ("I3", "shared-names", two_saves_share_names),
    ("I4", "no-clean-up", disk_full),
    ("I5", "ignores-if-absent", two_saves_race),
    ("I5", "delete-without-void", delete_while_saving),
    ("I6", "no-read-back", reply_lost),
    ("I7", "commit-errors-logged", write_refused("create", r"\.commit")),
    ("I7", "write-errors-logged", write_refused("put", r"__0_0\.distcp")),
    ("I8", "no-sizes", short_file),
    ("I8", "no-blocks", flipped_byte),
    ("I9", "no-allow-list", hostile_object),
    ("I10", "outage-is-empty", outage),
    ("I11", "prune-without-fence", prune_at_commit),
    ("I11", "prune-lists-late", prune_pauses),
    ("I11", "prune-ignores-ages", prune_young),
    ("I11", "prune-forgets-live", prune_live),
    ("I11", "takes-everything", foreign_files),
)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """The rows that were run; printed past pytest's capture when the module is done."""
    rows: list[tuple[str, ...]] = []
    yield rows
    head = ("", "switched off", "without the protection", "with it")
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(line.rstrip() for line in lines))


@pytest.mark.parametrize(("invariant", "name", "scenario"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_invariant_needs_its_protection(
    invariant: str, name: str, scenario: Scenario, tmp_path: Path, table: list[tuple[str, ...]]
) -> None:
    """In the same scenario the invariant holds, and fails when its protection is switched off by a named fault."""
    fault = FAULTS[name]
    places = tmp_path / "without", tmp_path / "with"
    for place in places:
        place.mkdir()
    without, within = scenario(fault, places[0]), scenario(HEALTHY, places[1])
    said = [("held: " if verdict.held else "BROKEN: ") + verdict.saw for verdict in (without, within)]
    table.append((invariant, name, *said))
    assert fault.invariant == invariant
    assert within.held, within.saw
    assert not without.held, without.saw


def test_every_invariant_and_every_fault_has_a_row() -> None:
    """The table covers I1 to I11, and the kit ships no fault that no test uses."""
    assert {row[0] for row in ROWS} == {f"I{number}" for number in range(1, 12)}
    assert {row[1] for row in ROWS} == set(FAULTS)


def test_a_healthy_run_changes_no_step() -> None:
    """``HEALTHY`` hands a writer and a reader back with the steps they had, so that 'with it' is the real library."""
    store = DictStore()
    writer, reader = FsspecStorageWriter("/nowhere"), FsspecStorageReader("/nowhere")
    steps = writer._steps, reader._steps
    HEALTHY.in_writer(writer)
    HEALTHY.in_reader(reader)
    assert (writer._steps, reader._steps) == steps
    assert HEALTHY.store(store) is store
    assert HEALTHY.delete_steps is DELETE
    assert HEALTHY.prune_steps is PRUNE
