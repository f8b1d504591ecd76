"""What the coordinator of a manager does on the store: finds, keeps and deletes the steps of a run."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping

from dcp_storage import names
from dcp_storage.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, portable
from dcp_storage.options import Problem
from dcp_storage.store import Store
from dcp_storage.tools.delete import is_whole
from dcp_storage.tools.describe import COMMITTED, NOTHING, VOID
from dcp_storage.tools.opening import Folder
from dcp_storage.tools.pins import pin_folder, unpin_folder
from dcp_storage.tools.prune import PruneReport, prune_at, retire, sweep
from dcp_storage.tools.retention import Rule, choose
from dcp_storage.tools.runs import Run, StepFolder

__all__ = ["RunKeeper"]

_SWEPT_AT_ONCE = 8  # deleted steps whose commit objects one retention removes: a save must not wait for long


class RunKeeper:
    """The run of a manager.

    Args:
        folder: its root.
        rule: which steps are kept.
        grace: seconds; what is younger may belong to a save under way.
        word: the user's word that no other job writes here, for stores that cannot refuse a second create.
    """

    def __init__(self, folder: Folder, rule: Rule, grace: float, word: bool) -> None:
        self.folder = folder
        self.rule = rule
        self.grace = grace
        self.word = word
        self._lock = threading.Lock()
        # Folders that need no look at each save: what was deleted, until when its void holds late writers off.
        self._over: dict[str, float] = {}

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return Run(self.folder).steps()

    def pins(self) -> list[int]:
        """The pinned steps, ascending."""
        return sorted({found.step for found in Run(self.folder).survey() if found.pinned})

    def latest(self, under_way: int | None) -> tuple[int | None, list[str]]:
        """The newest committed step, and what is to be said of newer folders.

        Args:
            under_way: a step that this manager is saving now: that it is not committed is no news.
        """
        latest = Run(self.folder).latest(under_way=under_way)
        return (latest.found.step if latest.found else None), latest.warnings()

    def url_for(self, step: int) -> str:
        """The folder that a step has, or would be saved to."""
        return self.folder.child(Run(self.folder).name_for(step)).location.url

    def choose(
        self, step: int | None, *, fall_back: bool, damaged: MutableMapping[int, CheckpointError]
    ) -> tuple[tuple[int, str], list[str]]:
        """The step to load, its folder, and what is to be said of newer ones.

        Args:
            step: the one that was asked for; None for the newest.
            fall_back: whether older steps are looked at where files are missing or have other sizes.
            damaged: steps that turned out to be damaged while they were loaded; those found now are added.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: with ``fall_back``, all are damaged.
        """
        run = Run(self.folder)
        said: list[str] = []
        while True:
            found = self._next(run, step, damaged, said)
            error = is_whole(run, found) if fall_back else None
            if error is None:
                return (found.step, found.url), said
            said.append(f"Step {found.step} is damaged and was passed over: {error}")
            damaged[found.step] = error

    def _next(self, run: Run, step: int | None, wrong: Mapping[int, CheckpointError], said: list[str]) -> StepFolder:
        if step is not None and not wrong:
            return run.find(step)
        latest = run.latest(below=min(wrong) if wrong else None)
        said += latest.warnings() if latest.found else []
        if latest.found is not None:
            return latest.found
        if not wrong:
            raise CheckpointNotFoundError(f"{run.url}: this run holds no checkpoint.", path=run.url)
        newest = wrong[max(wrong)]
        raise CorruptCheckpointError(
            f"{run.url}: no step is whole; damaged are {', '.join(map(str, sorted(wrong)))}. The newest: {newest}",
            path=run.url,
            file=getattr(newest, "file", None),
            cause=newest,
        )

    def pin(self, step: int, why: str) -> None:
        """Pins a committed step."""
        self._on(Run(self.folder).find(step).name, lambda store: pin_folder(store, why))

    def unpin(self, step: int) -> None:
        """Takes a pin away."""
        self._on(Run(self.folder).name_for(step), unpin_folder)

    def prune(self, keep: frozenset[int], *, apply: bool) -> PruneReport:
        """Prunes the whole run."""
        rule = dataclasses.replace(self.rule, keep=keep)
        return prune_at(self.folder, rule, grace=self.grace, apply=apply, assume_single_writer=self.word)

    def retain(self, step: int) -> list[str]:
        """After a save: deletes the steps that need not be kept. What goes wrong is said: the new step stands.

        The step that was saved stays also where newer ones are there.

        Returns:
            A sentence for each step that could not be deleted, or is damaged.
        """
        try:
            with self._lock:
                problems = self._retain(dataclasses.replace(self.rule, keep=frozenset({step})))
        except Exception as error:  # noqa: BLE001 - whatever it is, the save is committed and the caller is told
            known = portable(error, "Deleting older steps", path=self.folder.location.url)
            problems = [Problem(known.kind, advice=str(known))]
        return [f"An older step could not be deleted, or is damaged: {problem.advice}" for problem in problems]

    def _retain(self, rule: Rule) -> list[Problem]:
        run = Run(self.folder)
        named = [(step, name) for step, names_of in run.folders().items() for name in names_of]
        # A step that was deleted and is saved again, as after going back to an older one, is not over any more.
        there = {name for step, name in named if step not in rule.keep}
        self._over = {name: until for name, until in self._over.items() if name in there}
        todo = [each for each in reversed(named) if each[1] not in self._over]
        looks: list[StepFolder] = []
        newest: set[int] = set()
        while todo and len(newest) < (rule.keep_latest or 1):
            looks.append(run.look(*todo.pop(0)))
            newest |= {looks[-1].step} if looks[-1].state == COMMITTED else set()
        looks += run.look_at(each for each in todo if not rule.keeps(each[0]))
        choice = choose(run, looks, rule)
        report = PruneReport(run.url)
        how = {"grace": self.grace, "apply": True, "assume_single_writer": self.word}
        done = retire(run, choice, report, **how)  # type: ignore[arg-type]
        now = time.monotonic()
        self._over.update({pruned.folder: now + self.grace for pruned in done if pruned.action == "delete"})
        for found in looks:
            if found.state == NOTHING:
                self._over[found.name] = float("inf")
            elif found.state == VOID:
                loose = any(not names.commit_number(e.name) for e in found.ours)
                age = time.time() - (found.modified or 0.0)
                self._over[found.name] = now if loose else now + max(self.grace - age, 0.0)
        due = [each for each in named if self._over.get(each[1], float("inf")) <= now][:_SWEPT_AT_ONCE]
        for each in due:
            sweep(run, run.look(*each), **how)  # type: ignore[arg-type]
            self._over[each[1]] = now + self.grace
        return report.problems

    def _on(self, name: str, work: Callable[[Store], None]) -> None:
        opened = self.folder.child(name).open()
        try:
            work(opened.store)
        finally:
            opened.store.close()
