"""The checkpoints of one run: save, find, load, keep and delete its steps."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_storage.errors import CheckpointError, CorruptCheckpointError
from dcp_storage.manager_calls import RunCalls
from dcp_storage.manager_pending import FailedSave, PendingSave
from dcp_storage.manager_run import RunKeeper
from dcp_storage.manager_schedule import When
from dcp_storage.manager_watch import Watch
from dcp_storage.options import LoadOptions, LoadReport, SaveOptions, SaveReport
from dcp_storage.session import checked_options
from dcp_storage.state import DCP
from dcp_storage.state_keys import Keys
from dcp_storage.state_save import Differing
from dcp_storage.tools.delete import seconds_of
from dcp_storage.tools.opening import folder_at
from dcp_storage.tools.retention import Rule
from dcp_storage.writer import FsspecStorageWriter

__all__ = ["CheckpointManager"]


class CheckpointManager(RunCalls):
    """The steps of one run, in the folders ``step-<n>`` of one root, on any store.

    With a process group, every rank of it makes every call, and all come to the same answer: only the coordinator
    (rank 0 of the group) looks at the store and deletes, and the others are told. Errors are
    :class:`~dcp_storage.CheckpointError`, the same on every rank.

    Several managers may work on one run: saves of one step and deletes are held apart by fences, so that the one that
    loses gets an error and changes nothing. Use it as a context manager, or call :meth:`close` in the end.

    Args:
        root: the run's folder or URL. Other folders and files in it are left alone.
        storage_options: handed to fsspec.
        keep_latest: after each save, delete all but so many of the newest committed steps, and the one just saved.
            Default: delete nothing.
        keep_every: never delete a step that this number divides; without ``keep_latest`` the newest one stays too.
        assume_single_writer: needed to overwrite or delete on stores that cannot refuse a second create: your word
            that no other job writes here. Default False.
        save_options: how to save.
        load_options: how to load.
        grace: what is younger may belong to a save under way; see :func:`~dcp_storage.prune`. Default 7 days.
        every_steps: :meth:`should_save` at every step that this number divides.
        every_seconds: :meth:`should_save` so many seconds after the last save began.
        mean_time_between_failures: of the whole job: :meth:`should_save` as often as loses the least time, by Young's
            and Daly's formula, from the time that saves were measured to take.
        on_sigterm: note SIGTERM instead of dying of it: :meth:`should_save` is then true, and :attr:`preempted` too.
            The handler that was there is called as well, and put back by :meth:`close`. Default False.
        process_group: the ranks that make the calls. Default: the default group.
        no_dist: whether this process works alone although there is a process group. Default False.

    Raises:
        InvalidLocationError: the root cannot name a folder.
        TypeError: an option is of the wrong type.
        ValueError: an option is out of its range; ``on_sigterm`` outside the main thread.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        keep_latest: int | None = None,
        keep_every: int | None = None,
        assume_single_writer: bool = False,
        save_options: SaveOptions = SaveOptions(),  # noqa: B008 - frozen
        load_options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
        grace: timedelta = timedelta(days=7),
        every_steps: int | None = None,
        every_seconds: float | None = None,
        mean_time_between_failures: timedelta | None = None,
        on_sigterm: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        if not isinstance(save_options, SaveOptions) or not isinstance(load_options, LoadOptions):
            raise TypeError("save_options must be SaveOptions, and load_options LoadOptions.")
        if mean_time_between_failures is not None and not isinstance(mean_time_between_failures, timedelta):
            raise TypeError(f"mean_time_between_failures is a datetime.timedelta, not {mean_time_between_failures!r}.")
        between = mean_time_between_failures.total_seconds() if mean_time_between_failures is not None else None
        word = assume_single_writer or save_options.assume_single_writer
        self._save_options = dataclasses.replace(save_options, assume_single_writer=word)
        self._load_options = load_options
        self._storage_options = checked_options(storage_options)
        folder = folder_at(root, self._storage_options, load_options)
        keeper = RunKeeper(folder, Rule(keep_latest, keep_every), seconds_of(grace), word)
        super().__init__(keeper, process_group, no_dist)
        self._writers: dict[bool, FsspecStorageWriter] = {}
        self._loaded: int | None = None
        self._watch = Watch(When(every_steps, every_seconds, between), on_sigterm=on_sigterm)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:  # the error that is under way is the one to see; that of a save is noted on it
            self.close()
        except CheckpointError as failed:
            warnings.warn(f"A save in the background failed too: {failed}", stacklevel=2)

    def close(self) -> None:
        """Waits for a save in the background and puts the handler of SIGTERM back.

        Raises:
            CheckpointError: that save failed.
        """
        try:
            self._background.finish()
        finally:
            self._watch.close()

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM came, to any rank, as of the last :meth:`should_save`: save and end."""
        return self._watch.preempted

    @property
    def loaded(self) -> int | None:
        """The step that was loaded last; None where none was."""
        return self._loaded

    # -- saving --

    def save(
        self,
        step: int,
        state: MutableMapping[str, Any],
        *,
        overwrite: bool = False,
        planner: SavePlanner | None = None,
        differing: Differing = "warn",
    ) -> SaveReport:
        """Saves a step, as ``DCP.save`` does, and then deletes those that need not be kept.

        Args:
            step: its number.
            state: what to save.
            overwrite: replace the step if it is there. Default False.
            planner: plans instead of torch's default planner.
            differing: as for ``DCP.save``.

        Returns:
            The report; ``warnings`` says where a step that was to go could not be deleted.

        Raises:
            CheckpointExistsError: the step is there, or another save of it committed first.
            CheckpointError: the save failed, or the one in the background before it did.
        """
        self._background.settle(self._ranks())
        url = self._told_of(step, "Looking for a step", lambda: self._keeper.url_for(step))
        begun = self._watch.begin()
        report = DCP.save(state, **self._save_arguments(url, overwrite, planner, differing))
        self._watch.saved(step, begun)
        if not self._keeper.rule.keeps_all:
            report.warnings += self._told_and_warned("Deleting older steps", lambda: (None, self._keeper.retain(step)))[
                1
            ]
        return report

    def async_save(
        self,
        step: int,
        state: MutableMapping[str, Any],
        *,
        overwrite: bool = False,
        planner: SavePlanner | None = None,
        differing: Differing = "warn",
        async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    ) -> PendingSave:
        """Begins to save a step, as ``DCP.async_save`` does; the state may change once this returns.

        The step is one of the run once it has committed. What goes wrong is raised by the handle, or else by the next
        call of this manager that can know of it on all ranks; a second save waits for the first.

        Args:
            step: its number.
            state: what to save.
            overwrite: as for :meth:`save`.
            planner: as for :meth:`save`.
            differing: as for :meth:`save`.
            async_checkpointer_type: as for ``DCP.async_save``.

        Returns:
            A handle with ``done``, ``wait()`` and ``result()``.

        Raises:
            CheckpointError: the save could not begin, or the one before it failed.
        """
        self._background.settle(self._ranks())
        url = self._told_of(step, "Looking for a step", lambda: self._keeper.url_for(step))
        begun = self._watch.begin()
        arguments = self._save_arguments(url, overwrite, planner, differing)
        try:
            inner = DCP.async_save(state, async_checkpointer_type=async_checkpointer_type, **arguments)
        except BaseException as error:
            failed = self._background.begin(PendingSave(step, url, FailedSave(error), None))
            failed.told = True
            raise
        self._watch.saved(step, begun)
        retains = self._ranks().rank == 0 and not self._keeper.rule.keeps_all
        then = functools.partial(self._keeper.retain, step) if retains else None
        return self._background.begin(PendingSave(step, url, inner, then))

    def should_save(self, step: int) -> bool:
        """Whether the rules given to this manager, or SIGTERM, ask for a save now. Call it once a step, on all ranks.

        By steps alone no rank needs the others; by time, or with ``on_sigterm``, the ranks tell each other in one small
        collective, so that all get the same answer.

        Raises:
            CheckpointError: a save in the background failed.
            ValueError: the manager was given no rule.
        """
        ranks = self._ranks()
        if not self._watch.alone or ranks.alone:
            self._hear()
        return self._watch.due(step, ranks, saving=self._background.step is not None)

    # -- loading --

    def load(
        self,
        state: MutableMapping[str, Any],
        step: int | None = None,
        *,
        fall_back: bool = False,
        planner: LoadPlanner | None = None,
        strict: bool = True,
        allow_dtype_cast: bool = False,
        keys: Keys = None,
    ) -> LoadReport:
        """Loads a step, as ``DCP.load`` does; :attr:`loaded` is then its number.

        Args:
            state: the template.
            step: which one. Default: the newest committed one.
            fall_back: where the newest one (or ``step``) is damaged, load the newest older one that is whole, and say
                so in a warning and in the report. Default False.
            planner: as for ``DCP.load``.
            strict: as for ``DCP.load``.
            allow_dtype_cast: as for ``DCP.load``.
            keys: as for ``DCP.load``.

        Returns:
            The report; ``path`` is the folder, and ``warnings`` names newer steps that were passed over.

        Raises:
            CheckpointNotFoundError: the run, or the step, is not there.
            NotCommittedError: the step, or all there is, is not committed.
            CorruptCheckpointError: it is damaged; with ``fall_back``, so are all older ones.
            CheckpointError: whatever else went wrong, on every rank.
        """
        self._hear()
        said: list[str] = []
        news: list[str] = []
        damaged: dict[int, CheckpointError] = {}

        def look() -> tuple[tuple[int, str], list[str]]:
            found, more = self._keeper.choose(step, fall_back=fall_back, damaged=damaged)
            return found, [*news, *more]

        while True:
            (chosen, url), more = self._told_of(step, "Looking for a step", look)
            said += more
            try:
                report = DCP.load(
                    state,
                    checkpoint_id=url,
                    storage_options=self._storage_options,
                    options=self._load_options,
                    process_group=self._process_group,
                    no_dist=self._no_dist,
                    planner=planner,
                    strict=strict,
                    allow_dtype_cast=allow_dtype_cast,
                    keys=keys,
                )
                break
            except CheckpointError as error:
                if not fall_back or not self._is_damage(error):
                    raise
                damaged[chosen] = error
                news = [f"Step {chosen} is damaged and was passed over: {error}"]
        self._loaded = chosen
        self._watch.loaded(chosen)
        if said:
            self._told_and_warned("Warning", lambda: (None, said))
        report.warnings = [*said, *report.warnings]
        return report

    def _is_damage(self, error: CheckpointError) -> bool:
        """Whether the checkpoint itself is what every rank that failed met; the same answer on all ranks.

        A rank raises what it met itself, so ranks may hold different errors: one that went on to an older step while
        another gave up would wait for it.
        """
        if error.kind == "peer":  # a rank is gone, and would not answer
            return False
        met = error.failures.values() or [error]
        return all(self._ranks().gather(all(isinstance(each, CorruptCheckpointError) for each in met)))

    def _save_arguments(
        self, url: str, overwrite: bool, planner: SavePlanner | None, differing: Differing
    ) -> dict[str, Any]:
        writer = self._writers.get(overwrite)
        if writer is None:  # kept, so that all saves share its budget, and a store's weakness is said once
            writer = self._writers[overwrite] = FsspecStorageWriter(
                storage_options=self._storage_options, overwrite=overwrite, options=self._save_options
            )
        return {
            "checkpoint_id": url,
            "storage_writer": writer,
            "process_group": self._process_group,
            "no_dist": self._no_dist,
            "planner": planner,
            "differing": differing,
        }
