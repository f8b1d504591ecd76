"""Pruning a run: what goes, and what never does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dcp_storage.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, StoreError
from dcp_storage.fence import delete_folder
from dcp_storage.store import Atomicity, Store, WrappedStore
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.tools.pins import pin_folder, unpin_folder
from dcp_storage.tools.prune import PruneReport, prune, prune_at
from dcp_storage.tools.retention import Rule
from dcp_storage.wrappers import Request
from tests.protocol.oracle import Hooked, Killed
from tests.runs.kit import DAY, MemoryRun, bare, put

CHANGES = {"put", "create", "delete", "abort_uploads", "upload"}


def pruned(
    run: MemoryRun, *, apply: bool = True, word: bool = False, grace: float = 7 * DAY, **rule: Any
) -> PruneReport:
    return prune_at(run.folder, Rule(**rule), grace=grace, apply=apply, assume_single_writer=word)


def name(step: int) -> str:
    return f"step-{step:08d}"


@pytest.mark.parametrize(
    ("rule", "stays"),
    [
        ({}, [1, 2, 5, 10, 11, 12, 20, 21]),
        ({"keep_latest": 3}, [12, 20, 21]),
        ({"keep_latest": 1}, [21]),
        ({"keep_latest": 100}, [1, 2, 5, 10, 11, 12, 20, 21]),
        ({"keep_every": 10}, [10, 20, 21]),
        ({"keep_latest": 2, "keep_every": 5}, [5, 10, 20, 21]),
        ({"keep_latest": 1, "keep": frozenset({2, 99})}, [2, 21]),
    ],
)
def test_the_rule_is_kept(rule: dict[str, Any], stays: list[int]) -> None:
    """The newest steps, the multiples and the named ones stay; the others go; a dry run tells the same first."""
    run = MemoryRun()
    steps = [1, 2, 5, 10, 11, 12, 20, 21]
    run.commit(*steps)
    size = sum(
        len(body)
        for step in steps
        if step not in stays
        for file, body in run.files(name(step)).items()
        if not file.startswith(".commit")
    )
    for apply in (False, True):
        report = pruned(run, apply=apply, **rule)
        assert (report.ok, report.applied, report.kept) == (True, apply, stays)
        assert report.deleted == [step for step in steps if step not in stays]
        assert report.frees == size
        assert run.committed() == [name(step) for step in (stays if apply else steps)]
    assert pruned(run, **rule).deleted == []


def test_a_dry_run_writes_nothing() -> None:
    """Without ``apply`` no request that changes anything is sent."""
    run = MemoryRun()
    run.commit(1, 2)
    run.saver("step-3")
    run.at("step-3").upload("__7_0.distcp")
    run.objects.advance(30 * DAY)
    report = pruned(run, apply=False, keep_latest=1)
    assert (report.deleted, report.uploads) == ([1], 1)
    assert not CHANGES & set(run.sent())
    assert {p.folder: p.action for p in report.folders} == {name(1): "delete", name(2): "keep", "step-3": "sweep"}


@pytest.mark.parametrize("rule", [{"keep_latest": 0}, {"keep_every": 0}, {"keep_latest": -1}])
def test_the_newest_step_cannot_be_given_up(rule: dict[str, Any]) -> None:
    """A rule by which no step would stay is refused."""
    with pytest.raises(ValueError, match="at least 1"):
        Rule(**rule)
    with pytest.raises(TypeError):
        Rule(keep_latest=True)
    with pytest.raises(TypeError):
        Rule(keep=frozenset({"1"}))  # type: ignore[arg-type]


def test_the_newest_whole_step_stays() -> None:
    """Where the steps that the rule keeps are damaged, the newest whole one stays too, and the report says why."""
    run = MemoryRun()
    run.commit(1, 2, 3, 4)
    run.at(name(4)).delete(["__0_0.distcp"])
    run.at(name(3)).put(".manifest", [memoryview(b"?")])
    report = pruned(run, keep_latest=1)
    assert (report.ok, report.deleted, report.kept) == (False, [1], [2, 3, 4])
    assert run.state(name(2)) == "committed"
    assert [p.kind for p in report.problems][:2] == ["corrupt", "corrupt"]
    assert next(p.why for p in report.folders if p.folder == name(2)).startswith("the newest whole step")


def test_nothing_goes_where_no_step_is_whole() -> None:
    """Where every step is damaged, none is deleted: one of them may be what can be rescued."""
    run = MemoryRun()
    run.commit(1, 2)
    for step in (1, 2):
        run.at(name(step)).delete(["__0_0.distcp"])
    report = pruned(run, keep_latest=1)
    assert (report.deleted, report.ok) == ([], False)
    assert run.committed() == [name(1), name(2)]


def test_a_step_is_not_deleted_once_the_good_one_is_gone() -> None:
    """If the step that was to stay is deleted by somebody else meanwhile, the older ones stay."""
    run = MemoryRun()
    run.commit(1, 2)
    done: list[object] = []

    real = run._open

    def opened(location: Any, options: Any, most: int) -> Store:
        # The second look at step 2 is that at its sizes; what comes after it is the one before the deletion.
        if location.path.endswith(name(2)) and len(run.calls) >= 4 and not done:
            done.append(None)
            delete_folder(run.at(name(2)))
        return real(location, options, most)

    run._open = opened  # type: ignore[method-assign,assignment]
    report = pruned(run, keep_latest=1)
    assert done
    assert (report.deleted, [p.kind for p in report.problems]) == ([], ["last-good"])
    assert run.committed() == [name(1)]


def test_a_pinned_step_stays() -> None:
    """A pin holds against a rule, and against a pin that is not ours to take; once it is gone, so is the step."""
    run = MemoryRun()
    run.commit(1, 2, 3)
    pin_folder(run.at(name(1)), "the best so far")
    report = pruned(run, keep_latest=1)
    assert (report.deleted, report.kept) == ([2], [1, 3])
    assert next(p.why for p in report.folders if p.folder == name(1)) == "pinned"
    assert ".pin" in run.files(name(1))
    unpin_folder(run.at(name(1)))
    assert pruned(run, keep_latest=1).deleted == [1]


def test_a_step_that_is_being_replaced_stays_and_commits() -> None:
    """A save that is overwriting an old step when a prune comes is not fenced off: it commits."""
    run = MemoryRun()
    run.commit(1, 2)
    saver = run.saver(name(1), overwrite=True)
    report = pruned(run, keep_latest=1)
    assert (report.deleted, report.ok) == ([], True)
    assert "under way" in next(p.why for p in report.folders if p.folder == name(1))
    saver.publish()
    assert run.committed() == [name(1), name(2)]
    run.objects.advance(8 * DAY)
    assert pruned(run, keep_latest=1).deleted == [1]


def test_a_step_with_an_upload_under_way_stays() -> None:
    """A shard whose parts are on their way is no file yet, but it is a save that is under way."""
    run = MemoryRun()
    run.commit(1, 2)
    run.at(name(1)).upload("__0_0.aaaaaaaaaaaaaaaa.distcp")
    assert pruned(run, keep_latest=1).deleted == []
    run.objects.advance(8 * DAY)
    assert pruned(run, keep_latest=1).deleted == [1]


def test_a_save_paused_for_less_than_the_grace_commits() -> None:
    """A saver that stops before its commit, for as long as the grace lets it, is left alone by every prune."""
    run = MemoryRun()
    run.commit(1)
    saver = run.saver(name(2))
    for _ in range(3):
        run.objects.advance(2 * DAY)
        assert "younger" in next(p.why for p in pruned(run, keep_latest=1).folders if p.folder == name(2))
    saver.publish()
    assert run.committed() == [name(1), name(2)]


def test_a_save_paused_beyond_the_grace_fails_and_nothing_else_is_lost() -> None:
    """Where a prune took its files, the saver that wakes up gets an error; it neither commits nor harms another."""
    run = MemoryRun()
    run.commit(1)
    saver = run.saver(name(2))
    run.objects.advance(8 * DAY)
    report = pruned(run, keep_latest=1)
    assert next(p.action for p in report.folders if p.folder == name(2)) == "sweep"
    with pytest.raises(CheckpointError):
        saver.publish()
    assert run.committed() == [name(1)]
    assert run.state(name(2)) == "void"


def test_what_is_not_ours_stays() -> None:
    """Foreign folders and files, stock checkpoints, and steps saved without collectives are left alone at any age."""
    run = MemoryRun()
    run.commit(1, 2, "backup-3")
    put(run.at(""), "notes.txt")
    put(run.at(name(1)), "notes.txt", ".commit.1", "model.distcp")
    put(run.at("step-3"), ".metadata", "__0_0.distcp")
    put(run.at("step-4"), "__0.commit", "__0_0.distcp")
    put(run.at("logs"), "__0_0.distcp")
    run.objects.advance(100 * DAY)
    before = {folder: run.files(folder) for folder in ("backup-3", "", "step-3", "step-4", "logs", name(2))}
    report = pruned(run, keep_latest=1)
    assert report.deleted == [1]
    assert {folder: run.files(folder) for folder in before} == before
    assert {"notes.txt", ".commit.1", "model.distcp"} <= set(run.files(name(1)))


def test_two_folders_of_one_step_both_stay() -> None:
    """Where two committed folders stand for one number, nobody knows which is meant, and both stay."""
    run = MemoryRun()
    run.commit("step-1", "step-01", 5)
    report = pruned(run, keep_latest=1)
    assert (report.deleted, run.committed()) == ([], [name(5), "step-01", "step-1"])


def test_a_torn_commit_is_left_alone_where_it_was_one() -> None:
    """A folder whose commit cannot be read, but whose stock view shows that there was one, is kept and said."""
    run = MemoryRun()
    run.commit(1, 2)
    run.at(name(1)).put(".commit", [memoryview(b"torn")])
    run.objects.advance(100 * DAY)
    before = run.files(name(1))
    report = pruned(run, keep_latest=1)
    assert run.files(name(1)) == before
    assert [(p.kind, p.file) for p in report.problems] == [("corrupt", ".commit")]


def test_leftovers_go_after_the_grace() -> None:
    """Orphans, claims, unfinished steps and open uploads stay within the grace and go after it; the steps stay."""
    run = MemoryRun()
    run.commit(1)
    put(run.at(name(1)), ".claim", "__9_0.aaaaaaaaaaaaaaaa.distcp")
    run.saver("step-2")
    run.at("step-2").upload("__8_0.distcp")
    young = pruned(run)
    assert (young.frees, young.files, young.uploads) == (0, 0, 0)
    run.objects.advance(8 * DAY)
    report = pruned(run)
    assert {p.folder: p.action for p in report.folders} == {name(1): "sweep", "step-2": "sweep"}
    assert (report.uploads, run.at("step-2").open_uploads()) == (1, [])
    assert set(run.files("step-2")) == {".commit"}
    assert run.state("step-2") == "void"
    assert run.state(name(1)) == "committed"


@pytest.mark.parametrize("at", range(14))
def test_a_killed_delete_is_finished_by_the_next_prune_at_once(at: int) -> None:
    """Wherever a prune dies while it deletes a step, the next one finishes it without waiting for the grace."""
    run = MemoryRun()
    run.commit(1, 2)
    put(run.at(name(1)), "notes.txt")
    run.objects.advance(1)
    left = [at]

    def die(request: Request) -> None:
        if request.operation in CHANGES | {"entries"}:
            if not left[0]:
                raise Killed
            left[0] -= 1

    def wrapped(store: Store) -> Store:
        return Hooked(store, before=die)

    run.wrap = wrapped
    killed = False
    try:
        pruned(run, keep_latest=1)
    except Killed:
        killed = True
    run.wrap = bare
    run.objects.advance(1)
    report = pruned(run, keep_latest=1)
    assert report.ok
    assert run.committed() == [name(2)]
    assert {file for file in run.files(name(1)) if not file.startswith(".commit")} == {"notes.txt"}
    assert killed or at > 8


def test_a_save_after_a_killed_delete_is_not_taken_for_its_rest() -> None:
    """Files younger than the void are a save's: they are left alone, and it commits."""
    run = MemoryRun()
    run.commit(1, 2)
    run.objects.advance(1)
    delete_folder(run.at(name(1)))
    run.objects.advance(1)
    saver = run.saver(name(1))
    assert pruned(run, keep_latest=2).ok
    saver.publish()
    assert run.committed() == [name(1), name(2)]


def test_a_void_is_swept_after_the_grace() -> None:
    """Commit objects of a deleted step go once they are old, and then nothing is left of it."""
    run = MemoryRun()
    run.commit(1, 2)
    pruned(run, keep_latest=1)
    assert "hold late writers off" in next(p.why for p in pruned(run, keep_latest=1).folders if p.folder == name(1))
    run.objects.advance(8 * DAY)
    assert pruned(run, keep_latest=1).ok
    assert run.files(name(1)) == {}
    assert run.committed() == [name(2)]


class NotAtomic(WrappedStore):
    @property
    def create_if_absent(self) -> Atomicity:
        return Atomicity.UNKNOWN


def test_without_atomic_creates_the_users_word_is_needed() -> None:
    """A store that cannot refuse a second create is pruned only with ``assume_single_writer``; a dry run needs none."""
    run = MemoryRun()
    run.commit(1, 2)
    run.wrap = NotAtomic
    assert pruned(run, apply=False, keep_latest=1).deleted == [1]
    with pytest.raises(CheckpointError, match="assume_single_writer") as caught:
        pruned(run, keep_latest=1)
    assert caught.value.kind == "single-writer"
    assert run.committed() == [name(1), name(2)]
    assert pruned(run, word=True, keep_latest=1).deleted == [1]
    assert run.committed() == [name(2)]


@pytest.mark.parametrize("operation", ["folders", "entries", "now", "open_uploads", "create"])
def test_an_outage_deletes_nothing(operation: str) -> None:
    """Whatever fails before the fence, no file is removed, and the error is raised."""
    run = MemoryRun()
    run.commit(1, 2)
    before = dict(run.objects.held)
    run.wrap = lambda store: FaultyStore(store, [Fault(operation, nth=None)])
    with pytest.raises(StoreError):
        pruned(run, keep_latest=1)
    assert run.objects.held == before


def test_one_checkpoint_can_be_pruned_too() -> None:
    """A folder that is a checkpoint and no run is swept itself; what holds nothing of ours is not found."""
    run = MemoryRun()
    run.commit("")
    put(run.at(""), "__9_0.aaaaaaaaaaaaaaaa.distcp")
    run.objects.advance(8 * DAY)
    report = pruned(run, keep_latest=1)
    assert [(p.step, p.action, p.files) for p in report.folders] == [(None, "sweep", 1)]
    assert report.warnings
    assert run.state("") == "committed"
    empty = MemoryRun()
    put(empty.at(""), "notes.txt")
    with pytest.raises(CheckpointNotFoundError, match="neither"):
        pruned(empty)


def test_wrong_graces_are_refused() -> None:
    """The grace is a timedelta, and not negative."""
    with pytest.raises(TypeError, match="timedelta"):
        prune("memory://nowhere/run", grace=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        prune("memory://nowhere/run", grace=timedelta(seconds=-1))


def test_two_prunes_at_once_delete_each_step_once() -> None:
    """Of two prunes of one step one gets the fence; the other says so and goes on."""
    run, other = MemoryRun(), MemoryRun()
    other.objects = run.objects
    run.commit(1, 2)
    done: list[object] = []

    def first(request: Request) -> None:
        if request.operation == "create" and not done:
            done.append(pruned(other, keep_latest=1).deleted)

    run.wrap = lambda store: Hooked(store, before=first)
    report = pruned(run, keep_latest=1)
    assert (done, report.deleted, report.ok) == ([[1]], [], True)
    assert "first" in next(p.why for p in report.folders if p.folder == name(1))
    assert run.committed() == [name(2)]


def test_a_save_that_lost_to_a_prune_says_so() -> None:
    """With no grace at all a save under way is fenced off, and fails."""
    run = MemoryRun()
    run.commit(1, 2)
    saver = run.saver(name(1), overwrite=True)
    assert pruned(run, keep_latest=1, grace=0).deleted == [1]
    with pytest.raises((CheckpointExistsError, CheckpointError)):
        saver.publish()
    assert run.committed() == [name(2)]
