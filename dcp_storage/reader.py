"""The storage reader: torch's hooks, each a few lines on top of the commit and the load pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch.distributed as dist
from fsspec.callbacks import Callback
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_storage import load
from dcp_storage.budget import Budget
from dcp_storage.current import blame
from dcp_storage.errors import CheckpointError, CorruptCheckpointError, InvalidLocationError
from dcp_storage.exchange import Limits, Sharing
from dcp_storage.exchange_metadata import read_together
from dcp_storage.exchange_rounds import Meeting, agree, check_group, meet, named, patience
from dcp_storage.filling import Finish, resolve
from dcp_storage.options import KIB, LoadOptions, LoadReport
from dcp_storage.peeking import look_inside
from dcp_storage.plan_slices import gap_of
from dcp_storage.reader_load import Load, Unreadable, look_again
from dcp_storage.reader_plans import Answer, Offer, Seen, answered, box_of, files_of, ranges_of
from dcp_storage.reading import RANK_BY_RANK, Checkpoint, LoadSteps, read_checkpoint, read_rank_checkpoint
from dcp_storage.scattering import extents
from dcp_storage.session import Opened, OpenStore, Pointer, checked_options, guard, open_folder, phase
from dcp_storage.stores.location import is_supported
from dcp_storage.telling import tell_load
from dcp_storage.torchview import metadata_of

__all__ = ["FsspecStorageReader"]


class FsspecStorageReader(StorageReader):
    """Loads checkpoints that :class:`FsspecStorageWriter` or stock torch saved, onto any number of ranks.

    Hand it to :func:`torch.distributed.checkpoint.load`. Only a committed checkpoint is loaded; before any tensor
    changes, all wanted files are checked to be there with their sizes, and every byte is checked against the manifest
    as it arrives. A load that returns has filled everything.

    Args:
        path: as for the writer. None: every load names its own by ``checkpoint_id``.
        storage_options: handed to fsspec untouched, as for the writer.
        require_commit: whether a folder without any commit object is refused. False also loads what stock torch wrote;
            nothing then shows that such a checkpoint is whole. Default True.
        options: see :class:`LoadOptions`.
        process_group: the ranks that load together, the same that ``dcp.load`` gets, with a backend for CPU memory
            (gloo). One of them then reads commit and manifest for all; with ``LoadOptions(share_reads=True)`` each byte
            that several of them want is read by one, too. Every rank of it has to load, one load at a time. It does
            not travel when the reader is pickled. Default None: every rank reads for itself.
        callback: an fsspec Callback that is told of the bytes that come to this rank; it does not travel either.

    Raises:
        ValueError: ``share_reads`` without a ``process_group``, or one that cannot send CPU memory.
        InvalidLocationError: ``path`` cannot name a folder, its scheme is unknown, or a package for it is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        require_commit: bool = True,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
        process_group: dist.ProcessGroup | None = None,
        callback: Callback | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(options, LoadOptions):
            raise TypeError(f"options must be LoadOptions, not {type(options).__name__}.")
        if process_group is not None:
            check_group(process_group)
        elif options.share_reads:
            raise ValueError("share_reads=True needs the process_group over which the ranks share their reads.")
        self.storage_options: dict[str, Any] = checked_options(storage_options)
        self.require_commit = require_commit
        self.options = options
        self.process_group = process_group
        self.callback = callback
        self._pointer = Pointer()
        if path is not None:
            self._pointer.set(path)
        self._report: LoadReport | None = None
        self._failure: CheckpointError | None = None
        self._steps = LoadSteps()
        self._opener: OpenStore | None = None
        self._build()

    def _build(self) -> None:
        self._own = threading.local()
        self._budget = Budget(self.options.memory_budget)
        self._progress = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        left_here = {"_own", "_budget", "_progress", "callback", "process_group", "_report", "_failure"}
        return {name: value for name, value in self.__dict__.items() if name not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback = None
        self.process_group = None
        self._report = None
        self._failure = None
        self._build()

    @property
    def checkpoint_id(self) -> str | None:
        """The folder that this thread's next load reads; None where none was given."""
        location = self._pointer.peek()
        return location.url if location else None

    @property
    def report(self) -> LoadReport | None:
        """The report of the load that finished last in this process."""
        return self._report

    @property
    def failure(self) -> CheckpointError | None:
        """Why the load that failed last in this process failed on this rank, None where none did.

        ``dcp.load`` raises it too, unless a rank is gone: then torch's own collective fails first, without a name.
        """
        return self._failure

    # -- torch's hooks, in the order in which they are called --

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Points this thread to another folder; every option stays."""
        if checkpoint_id is not None:
            self._pointer.set(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path or URL that can be loaded from."""
        return is_supported(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Begins a load in this thread: the highest commit, its manifest, checked.

        Does not raise what concerns the checkpoint: it returns a Metadata whose every field raises it, and
        :meth:`set_up_storage_reader` raises it typed on all ranks. Only where the ranks saved without collectives it
        raises, and torch calls it again with the rank.
        """
        try:
            location = self._pointer.get("reader")
        except InvalidLocationError as error:
            self._own.load = Load(None, LoadReport(""), error=error)
            self._excuse(error, kwargs.get("rank"))
            return Unreadable(error)
        current = Load(location, LoadReport(location.url))
        self._own.load = current
        try:
            with guard("read_metadata", location), phase(current.report, "metadata"):
                current.opened = open_folder(
                    location, self.storage_options, self.options, **({"opener": self._opener} if self._opener else {})
                )
                checkpoint = self._read_checkpoint(current, current.opened, kwargs.get("rank"))
                current.checkpoint = checkpoint
                current.report.commit = checkpoint.number
                metadata = metadata_of(
                    checkpoint.manifest, trusted_globals=self.options.trusted_globals, path=location.url
                )
                if metadata.storage_meta is None:
                    metadata.storage_meta = StorageMeta()
                return metadata
        except CheckpointError as error:
            if error.kind == RANK_BY_RANK and "rank" not in kwargs:
                raise  # so that torch calls again, with the rank
            if current.opened is None:
                self._excuse(error, kwargs.get("rank"))
            current.error = self._failure = error
            return Unreadable(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what :meth:`read_metadata` met."""
        current = self._current()
        if current.error is not None:
            raise current.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tells the coordinator, by way of the plan, what this rank read and will read."""
        current = self._current()
        with guard("prepare_local_plan", current.location):
            checkpoint = current.known()
            self._look_inside(current, checkpoint, plan.items)
            files = {checkpoint.file_of(current.record_of(item)) for item in plan.items}
            if checkpoint.of_rank:  # the coordinator's manifest does not know this rank's files
                self._steps.check_sizes(current.store_of().store, checkpoint, files)
                files = set()
            offer = None
            if self._shares(current.meeting):
                current.offered = ranges = ranges_of(plan.items, current.record_of, self._gap(current))
                offer = Offer(current.meeting.token, current.meeting.rank, current.meeting.size, ranges)
            seen = Seen(checkpoint.number, checkpoint.identity, tuple(sorted(files)), offer)
            return dataclasses.replace(plan, storage_data=seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks read the same commit, and all wanted files are whole, before any changes."""
        current = self._current()
        path = current.report.path
        with guard("prepare_global_plan", current.location):
            checkpoint = current.known()
            with phase(current.report, "sizes"):
                wanted = files_of(plans, checkpoint, path)
                self._steps.check_sizes(current.store_of().store, checkpoint, wanted)
            with phase(current.report, "plan"):
                return answered(plans, checkpoint, path=path, budget=self.options.memory_budget)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank wants, straight into the planner's tensors where their layout allows."""
        current = self._current()
        report = current.report
        checkpoint, opened = current.known(), current.store_of()
        try:
            with guard("read_data", current.location), phase(report, "read"):
                try:
                    self._read(current, checkpoint, opened, plan, planner)
                except CorruptCheckpointError as error:
                    found = blame(opened.store, checkpoint.number, error)
                    if found is error:
                        raise
                    raise found from error
                if not isinstance(plan.storage_data, (Seen, Answer)):
                    look_again(opened.store, checkpoint)
        except CheckpointError as error:
            self._failure = error
            raise
        counters = current.counters
        report.loaded = sorted({item.dest_index.fqn for item in plan.items})
        report.bytes_needed = counters.bytes_needed
        report.bytes_read = opened.counting.bytes_read
        report.bytes_received = counters.bytes_received
        report.bytes_unchecked = counters.bytes_unchecked
        if counters.bytes_unchecked:
            report.warnings.append(
                f"{report.path}: {counters.bytes_unchecked} bytes of slices were not checked: stock torch saves no "
                "checksums that a part of a tensor could be held against."
            )
        opened.count_into(report)
        self._report = report
        tell_load(report)
        opened.store.close()
        self._own.load = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- what the hooks are made of --

    def _current(self) -> Load:
        current = getattr(self._own, "load", None)
        if current is None:
            raise CheckpointError("No load is under way in this thread: read_metadata comes first.", kind="protocol")
        return current  # type: ignore[no-any-return]

    def _excuse(self, error: CheckpointError, rank: int | None) -> None:
        """Lets the ranks that wait for this one hear at once why it cannot load."""
        if self.process_group is not None and rank is None:
            with contextlib.suppress(CheckpointError):  # that one itself; or none of them came, which matters less
                wait = patience(self.process_group, self.options.deadline)
                meet(self.process_group, path=error.path or "", deadline=wait, mine=error)

    def _read_checkpoint(self, current: Load, opened: Opened, rank: int | None) -> Checkpoint:
        how: dict[str, Any] = {"require_commit": self.require_commit, "trusted_globals": self.options.trusted_globals}
        group = self.process_group
        if group is not None and rank is None:
            share, path = self.options.share_reads, current.report.path
            current.meeting = meeting = meet(
                group, path=path, deadline=patience(group, self.options.deadline), mine=share
            )
            checkpoint, current.counters.bytes_received = read_together(
                meeting, opened.store, lambda store: read_checkpoint(store, **how)
            )
            if share and not all(meeting.said):
                others = named(rank for rank, said in enumerate(meeting.said) if not said)
                current.report.warnings.append(f"{path}: reads are not shared: {others} did not ask for it.")
            return checkpoint
        if self.options.share_reads:
            why = "the reader's process_group did not travel with it" if group is None else "every rank reads its own"
            current.report.warnings.append(f"{current.report.path}: reads are not shared: {why}.")
        if rank is None:
            return read_checkpoint(opened.store, **how)
        return read_rank_checkpoint(opened.store, int(rank), **how)

    def _shares(self, meeting: Meeting | None) -> TypeGuard[Meeting]:
        """Whether all ranks asked for it, and nobody has thought better of it, as ``DCP.load`` may on all of them."""
        return self.options.share_reads and meeting is not None and all(meeting.said)

    def _gap(self, current: Load) -> int:
        return gap_of(remote=current.store_of().store.remote, max_gap=self.options.max_gap)

    def _look_inside(self, current: Load, checkpoint: Checkpoint, items: Sequence[ReadItem]) -> None:
        new = [item for item in items if item.storage_index not in current.inside]
        found = look_inside(current.store_of().store, checkpoint, new, self.options.max_concurrency)
        current.inside.update(found)

    def _read(
        self, current: Load, checkpoint: Checkpoint, opened: Opened, plan: LoadPlan, planner: LoadPlanner
    ) -> None:
        self._look_inside(current, checkpoint, plan.items)
        wanted = [self._wanted(current, checkpoint, item, planner) for item in plan.items]
        if self.callback is not None:
            parts = [part for w in wanted for part in extents(w.item, w.offsets, w.lengths, self._gap(current))]
            self.callback.set_size(sum(stop - start for start, stop in parts))
        if self._share(current, checkpoint, opened, plan, wanted):
            return
        load.run(
            opened.store,
            wanted,
            budget=self._budget,
            counters=current.counters,
            part_size=max(min(self.options.part_size, self.options.memory_budget), 64 * KIB),
            max_gap=self._gap(current),
            max_concurrency=self.options.max_concurrency,
            check=self._steps.check_blocks,
            received=self._tell,
        )

    def _share(
        self, current: Load, checkpoint: Checkpoint, opened: Opened, plan: LoadPlan, wanted: Sequence[load.Wanted]
    ) -> bool:
        """Reads what is wanted together with the other ranks; False where that is not to be."""
        meeting, answer, report = current.meeting, plan.storage_data, current.report
        if not self._shares(meeting):
            return False
        limits = Limits(
            budget=self.options.memory_budget,
            part_size=max(self.options.part_size, 64 * KIB),
            max_gap=self._gap(current),
            max_concurrency=self.options.max_concurrency,
        )
        counters = dataclasses.replace(current.counters, lock=threading.Lock())

        def begin() -> Sharing | str:
            if not isinstance(answer, Answer) or (answer.token, answer.rank) != (meeting.token, meeting.rank):
                return f"on rank {meeting.rank} a planner replaced what this package had put into the plan"
            if answer.segments is None:
                return answer.reason
            if ranges_of(plan.items, current.record_of, limits.max_gap) != current.offered:
                # What it reads for others and does not want itself any more, it would not check.
                return f"on rank {meeting.rank} a planner changed its plan after it was shared"
            files = [record.name for record in checkpoint.manifest.files]
            return Sharing(
                opened.store, wanted, answer.segments, files, rank=meeting.rank, counters=counters, limits=limits,
                check=self._steps.check_blocks, received=self._tell,
            )  # fmt: skip

        with phase(report, "meet"):
            sharing, why = agree(meeting, begin)
        if sharing is None:
            report.warnings.append(f"{report.path}: reads are not shared: {why}.")
            return False
        held = min(self._budget.total, limits.budget)
        self._budget.acquire(held)
        try:
            sharing.run(meeting)
        finally:
            self._budget.release(held)
        current.counters = counters
        report.shared = True
        return True

    def _tell(self, count: int) -> None:
        if self.callback is not None:
            with self._progress:
                self.callback.relative_update(count)

    def _wanted(self, current: Load, checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> load.Wanted:
        record = current.record_of(item)
        key = item.dest_index.fqn
        path = current.report.path
        file, limit = checkpoint.file_of(record), checkpoint.limit_of(record)
        finish = Finish(planner, item, record, file, path, self.options.trusted_globals, self._steps, limit)
        offsets, lengths = box_of(item)
        if offsets is None:
            return load.Wanted(file, record, None, None, None, finish.as_object)
        return load.Wanted(
            file=file,
            item=record,
            offsets=offsets,
            lengths=lengths,
            target=functools.partial(resolve, planner, item, path, key),
            done=finish.as_tensor,
        )
