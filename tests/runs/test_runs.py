"""Which steps a run has, and which is the latest."""

from __future__ import annotations

import pytest

from dcp_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompatibleCheckpointError,
    NotCommittedError,
    StoreError,
)
from dcp_storage.fence import delete_folder
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.tools.runs import step_name, step_number
from tests.protocol.test_current import later_format
from tests.runs.kit import MemoryRun, put


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-0", 0),
        ("step-7", 7),
        ("step-00000007", 7),
        ("step-0000000000000000000000000012", 12),
        ("step-123456789012", 123456789012),
        ("step-", None),
        ("step-x", None),
        ("step--1", None),
        ("step-1.tmp", None),
        ("Step-1", None),
        ("step-1 ", None),
        ("step-\N{ARABIC-INDIC DIGIT ONE}", None),
        ("steps-1", None),
        ("laststep-1", None),
    ],
)
def test_only_step_and_digits_is_a_steps_folder(name: str, step: int | None) -> None:
    """A folder is a step's if it is ``step-`` and ASCII digits, any number of zeros before them."""
    assert step_number(name) == step


def test_names_have_eight_digits_or_more() -> None:
    """Folders are named with eight digits, more where needed; what is no such number is refused."""
    assert (step_name(7), step_name(123456789)) == ("step-00000007", "step-123456789")
    for wrong, kind in ((-1, ValueError), (True, TypeError), ("7", TypeError), (7.0, TypeError)):
        with pytest.raises(kind):
            step_name(wrong)  # type: ignore[arg-type]


def test_steps_are_in_the_order_of_numbers() -> None:
    """Steps are listed by number, not by name, whatever zeros stand before them."""
    run = MemoryRun()
    run.commit("step-10", "step-9", "step-0000000011", "step-002")
    assert run.run.steps() == [2, 9, 10, 11]
    latest = run.run.latest()
    assert latest.found is not None
    assert (latest.found.step, latest.found.name) == (11, "step-0000000011")


def test_an_empty_run_has_no_latest_step() -> None:
    """Where nothing is, and where only foreign files and folders are, there is no step and no error."""
    run = MemoryRun()
    assert (run.run.steps(), run.run.latest().found) == ([], None)
    put(run.at(""), "notes.txt", "step-3")
    put(run.at("logs"), "a")
    run.commit("checkpoint-9")
    put(run.at("step-4"), "readme.md")
    assert (run.run.steps(), run.run.latest().found, run.run.latest().passed_over) == ([], None, ())


def test_an_unfinished_newest_step_is_said_and_the_older_one_used() -> None:
    """The newest committed step is the latest; newer ones that never committed, or are stock torch's, are named."""
    run = MemoryRun()
    run.commit(10, 20)
    run.saver("step-00000030")
    put(run.at("step-40"), ".metadata", "__0_0.distcp")
    put(run.at("step-50"), "__0.commit", "__0_0.distcp")
    put(run.at("step-60"), ".commit")
    latest = run.run.latest()
    assert latest.found is not None
    assert latest.found.step == 20
    assert [(f.step, f.state) for f in latest.passed_over] == [
        (60, "damaged"),
        (50, "rank-by-rank"),
        (40, "stock"),
        (30, "unfinished"),
    ]
    said = latest.warnings()
    for sentence, name in zip(said, ("step-60", "step-50", "step-40", "step-00000030"), strict=True):
        assert name in sentence
        assert "step 20 is used" in sentence
    assert run.run.steps() == [10, 20]


@pytest.mark.parametrize("kind", ["unfinished", "stock", "rank-by-rank", "damaged"])
def test_a_run_without_a_committed_step_is_not_an_empty_one(kind: str) -> None:
    """Where nothing is committed but something is there, the latest step is an error that names it, never None."""
    run = MemoryRun()
    files = {
        "unfinished": [".claim", "__0_0.distcp"],
        "stock": [".metadata", "__0_0.distcp"],
        "rank-by-rank": ["__0.commit", "__0_0.distcp"],
        "damaged": [".commit", "__0_0.distcp"],
    }
    put(run.at("step-00000030"), *files[kind])
    with pytest.raises(NotCommittedError, match="step-00000030") as caught:
        run.run.latest()
    assert caught.value.path == "memory://run"
    assert run.run.steps() == []
    assert run.run.latest(under_way=30).found is None


def test_a_run_whose_steps_were_deleted_is_empty() -> None:
    """Steps that were deleted on purpose are neither steps nor unfinished."""
    run = MemoryRun()
    run.commit(1, 2)
    for name in ("step-00000001", "step-00000002"):
        delete_folder(run.at(name))
    assert (run.run.steps(), run.run.latest().found) == ([], None)


def test_a_later_format_is_not_passed_over() -> None:
    """A newest step of a later format is an error: what it holds is newer, only this version cannot read it."""
    run = MemoryRun()
    run.commit(1)
    later_format(run.at("step-2"), ".commit")
    with pytest.raises(IncompatibleCheckpointError):
        run.run.latest()
    with pytest.raises(IncompatibleCheckpointError):
        run.run.find(2)
    assert run.run.steps() == [1]


def test_two_committed_folders_for_one_step_are_an_error_that_names_both() -> None:
    """Which of two is meant cannot be known; with one of them unfinished or deleted, the other one counts."""
    run = MemoryRun()
    run.commit("step-7", "step-00000007")
    for call in (run.run.steps, run.run.latest, lambda: run.run.find(7), lambda: run.run.name_for(7)):
        with pytest.raises(CheckpointError, match="step-00000007 and step-7") as caught:
            call()
        assert caught.value.kind == "two-folders"
    delete_folder(run.at("step-00000007"))
    assert run.run.steps() == [7]
    assert run.run.find(7).name == run.run.name_for(7) == "step-7"
    run = MemoryRun()
    run.saver("step-7")
    run.commit("step-007")
    assert run.run.find(7).name == run.run.name_for(7) == "step-007"


def test_a_step_keeps_its_folder() -> None:
    """A step is looked for, and saved again, where it is, whatever zeros its name has."""
    run = MemoryRun()
    run.commit("step-7")
    assert (run.run.name_for(7), run.run.name_for(8)) == ("step-7", "step-00000008")
    assert run.run.find(7).url == "memory://run/step-7"


def test_a_step_that_cannot_be_used_is_said() -> None:
    """A missing step is not found; an unfinished, deleted or stock one is not committed."""
    run = MemoryRun()
    run.commit(1, 2)
    delete_folder(run.at("step-00000002"))
    run.saver("step-00000003")
    put(run.at("step-4"), ".metadata")
    with pytest.raises(CheckpointNotFoundError, match="step 9") as caught:
        run.run.find(9)
    assert not isinstance(caught.value, NotCommittedError)
    for step, said in ((2, "deleted"), (3, "unfinished"), (4, "stock")):
        with pytest.raises(NotCommittedError, match=said):
            run.run.find(step)


@pytest.mark.parametrize("operation", ["folders", "entries", "read"])
def test_an_outage_is_never_an_empty_run(operation: str) -> None:
    """A listing or a read that fails raises, wherever it happens; it never makes a step disappear (I10)."""
    run = MemoryRun()
    run.commit(1, 2)
    run.wrap = lambda store: FaultyStore(store, [Fault(operation, nth=None)])
    for call in (run.run.steps, run.run.latest, lambda: run.run.find(2)):
        with pytest.raises(StoreError, match="injected"):
            call()
