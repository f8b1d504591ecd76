"""What the coordinator of a manager meets alone reaches every rank, whatever it is: nobody waits for a time-out."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import CheckpointManager
from dcp_storage.errors import StoreError
from dcp_storage.stores.local import LocalStore
from dcp_storage.testing.ranks import RankPool
from tests.runs.jobs import state

SECONDS = 60.0
"""Far less than the group's own time-out, after which a rank that waits would give up."""


class Rooted(Exception):  # noqa: N818 - an error of a library that knows nothing of pickling
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Shapeless(Exception):  # noqa: N818 - likewise
    """Pickles, and cannot be made again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Strange(BaseException):
    """No Exception."""


def errors() -> list[BaseException]:
    return [RuntimeError("own"), Rooted(), Shapeless("a", "b"), Strange("own"), KeyboardInterrupt(), SystemExit(3)]


def name_of(error: BaseException) -> str:
    return f"{type(error).__name__} {getattr(error, 'kind', '')}".strip()


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - any error is what is asked for
        return name_of(error)
    return "nothing"


def fail(error: BaseException) -> Callable[..., Any]:
    def work(*args: Any, **options: Any) -> Any:
        raise error

    return work


def _looks(rank: int, world: int, root: str) -> list[list[str]]:
    """Every call that only the coordinator does something for, with every kind of error there."""
    manager = CheckpointManager(root, keep_latest=2, every_seconds=3600.0)
    manager.save(1, state(1))
    calls: dict[str, Callable[[], object]] = {
        "latest": manager.latest,
        "steps": manager.steps,
        "pins": manager.pins,
        "pin": lambda: manager.pin(1),
        "unpin": lambda: manager.unpin(1),
        "prune": manager.prune,
        "choose": lambda: manager.load(state(0)),
        "url_for": lambda: manager.save(2, state(2)),
    }
    seen = []
    for error in errors():
        told = []
        for name, call in calls.items():
            if rank == 0:
                setattr(manager._keeper, name, fail(error))
            told.append(raised_by(call))
            if rank == 0:
                delattr(manager._keeper, name)
        if rank == 0:
            manager._watch._schedule.due_by_time = fail(error)  # type: ignore[method-assign]
        told.append(raised_by(lambda: manager.should_save(2)))
        if rank == 0:
            del manager._watch._schedule.due_by_time
        seen.append(sorted(set(told)))
    if rank == 0:
        manager._keeper.steps = lambda: [threading.Lock()]  # type: ignore[method-assign,list-item]
    seen.append([raised_by(manager.steps)])
    assert manager.latest() == 1  # the ranks still speak of the same thing
    return seen


def test_what_the_coordinator_raises_reaches_all(ranks: RankPool, tmp_path: Path) -> None:
    """Whatever any call meets on rank 0, also what does not pickle, is raised on both ranks; interrupts as they are."""
    first, second = ranks.run(_looks, 2, str(tmp_path), timeout=SECONDS)
    wrapped = ["CheckpointError hook"]
    assert first == [wrapped, wrapped, wrapped, ["Strange"], ["KeyboardInterrupt"], ["SystemExit"],
                     ["CheckpointError unsendable"]]  # fmt: skip
    assert second == [*first[:3], wrapped, *first[4:]]


def _retains(rank: int, world: int, root: str) -> list[Any]:
    """Saves whose retention fails on the coordinator: what each rank gets."""
    seen: list[Any] = []
    manager = CheckpointManager(root, keep_latest=1)
    for step, error in enumerate(errors(), 1):
        if rank == 0:
            manager._keeper._retain = fail(error)  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                said: Any = [text.partition(": ")[2] for text in manager.save(step, state(step)).warnings]
            except BaseException as met:  # noqa: BLE001 - any error is what is asked for
                said = name_of(met)
        seen.append((said, [str(w.message).partition(": ")[2] for w in caught if w.category is UserWarning]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if rank == 0:
            manager._keeper._retain = fail(RuntimeError("own"))  # type: ignore[method-assign]
        seen.append(raised_by(lambda: manager.save(90, state(90))))
        manager.async_save(91, state(91))
        seen.append(raised_by(lambda: manager.save(92, state(92))))
    manager.async_save(93, state(93)).result()
    if rank == 0:
        del manager._keeper._retain
    seen.append(manager.steps())
    seen.append((manager.save(94, state(94)).warnings, manager.steps()))
    return seen


def test_retention_that_fails_in_any_way_leaves_no_rank_waiting(ranks: RankPool, tmp_path: Path) -> None:
    """After a save an error of any type on rank 0 is a warning in both reports; what must stop a program stops both."""
    first, second = ranks.run(_retains, 2, str(tmp_path), timeout=SECONDS)
    texts = [
        ["Deleting older steps failed: builtins.RuntimeError: own"],
        ["Deleting older steps failed: tests.runs.test_together.Rooted: holds a lock"],
        ["Deleting older steps failed: tests.runs.test_together.Shapeless: a and b"],
    ]
    assert first[:3] == [(text, text) for text in texts]
    assert second[:3] == [(text, []) for text in texts]
    assert [said for said, _ in first[3:6]] == ["Strange", "KeyboardInterrupt", "SystemExit"]
    assert [said for said, _ in second[3:6]] == ["CheckpointError hook", "KeyboardInterrupt", "SystemExit"]
    # Warnings that are errors: at once, and of a save in the background at the next call.
    assert first[6:8] == ["UserWarning", "CheckpointError hook"]
    assert second[6:8] == ["CheckpointError hook"] * 2
    assert first[8:] == second[8:] == [[1, 2, 3, 4, 5, 6, 90, 91, 93], ([], [94])]


class Refuses:
    """A part of the state that cannot be asked."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("cannot be asked")

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Takes nothing."""


def _begins(rank: int, world: int, root: str) -> list[str]:
    """A save in the background that cannot begin on rank 1."""
    manager = CheckpointManager(root)
    manager.save(1, state(1))
    given: dict[str, Any] = {**state(2), "loader": Refuses()} if rank == 1 else {**state(2), "loader": 1}
    seen = [raised_by(lambda: manager.async_save(2, given))]
    pending = manager._background._pending
    assert pending is not None
    pending._thread.join(SECONDS)
    seen.append(raised_by(manager.latest))
    seen.append(str(manager.latest()))
    return seen


def test_a_save_that_begins_on_some_ranks_only_is_heard_of_by_all(ranks: RankPool, tmp_path: Path) -> None:
    """A rank that could not begin has raised it; the next call raises it on both, and the one after that works."""
    with warnings.catch_warnings():
        first, second = ranks.run(_begins, 2, str(tmp_path), timeout=SECONDS)
    assert (first[0], second[0].startswith("CheckpointError")) == ("nothing", True)
    assert first[1] == second[1] == second[0]
    assert first[2] == second[2] == "1"


def _falls(rank: int, world: int, root: str) -> list[Any]:
    """A damaged newest step, which rank 1 does not come to see, as its disk fails."""
    manager = CheckpointManager(root)
    found = state(0)
    if rank == 1:

        def broken(store: LocalStore, name: str, offset: int, buffers: Any) -> None:
            raise StoreError("the disk failed", operation="read_into", path=store.url)

        real = LocalStore.read_into
        LocalStore.read_into = broken  # type: ignore[method-assign,assignment]
    seen: list[Any] = [raised_by(lambda: manager.load(found, fall_back=True))]
    if rank == 1:
        LocalStore.read_into = real  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = manager.load(found, fall_back=True)
    seen += [found["step"], report.warnings, [str(w.message) for w in caught if w.category is UserWarning]]
    return seen


def test_ranks_fall_back_together_or_not_at_all(ranks: RankPool, tmp_path: Path) -> None:
    """Where one rank meets damage and the other a failure both raise their own; where both meet damage both go on."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, state(step))
    (shard,) = (tmp_path / "step-00000002").glob("*.distcp")
    body = shard.read_bytes()
    wanted = torch.full((64,), 2.0).numpy().tobytes()
    assert wanted in body
    shard.write_bytes(body.replace(wanted, bytes(len(wanted))))
    first, second = ranks.run(_falls, 2, str(tmp_path), timeout=SECONDS)
    assert (first[0], second[0]) == ("CorruptCheckpointError corrupt", "StoreError store")
    assert first[1] == second[1] == 1
    assert first[2] == second[2] == first[3]
    assert first[2][0].startswith("Step 2 is damaged and was passed over")
    assert second[3] == []


def test_alone_an_error_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group an interrupt, and what is no Exception, come out as they are."""
    manager = CheckpointManager(tmp_path)
    for error in (KeyboardInterrupt(), SystemExit(3), Strange("own")):
        monkeypatch.setattr(manager._keeper, "steps", fail(error))
        with pytest.raises(type(error)):
            manager.steps()


def _asks(rank: int, world: int, root: str) -> list[str]:
    """Calls in which one rank asks for another step, or for something that is none."""
    manager = CheckpointManager(root)
    manager.save(1, state(1))
    manager.save(2, state(2))
    seen = []
    wrong: list[Any] = [1 + rank, "x" if rank else 1, -1 if rank else 1]
    for step in wrong:
        seen += [raised_by(lambda: manager.save(step, state(3))), raised_by(lambda: manager.load(state(0), step))]  # noqa: B023
        seen.append(raised_by(lambda: manager.async_save(step, state(3))))  # noqa: B023
    assert manager.steps() == [1, 2]
    return seen


def test_all_ranks_ask_for_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    """A rank that asks for another step than rank 0, or for none that there can be, is told so, and so are the others
    at once; nothing is saved or loaded.
    """
    first, second = ranks.run(_asks, 2, str(tmp_path / "run"), timeout=60)
    assert first == ["CheckpointError step"] * 3 + ["CheckpointError hook"] * 6
    assert second == ["CheckpointError step"] * 3 + ["TypeError"] * 3 + ["ValueError"] * 3
