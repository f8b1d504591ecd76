"""The storage reader: torch's hooks, each a few lines on top of the commit and the load pipeline."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsspec.callbacks import Callback
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_storage import load
from dcp_storage.budget import Budget
from dcp_storage.current import blame, read_current
from dcp_storage.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    InvalidLocationError,
)
from dcp_storage.filling import Finish, resolve
from dcp_storage.options import KIB, LoadOptions, LoadReport
from dcp_storage.reading import RANK_BY_RANK, Checkpoint, LoadSteps, read_checkpoint, read_rank_checkpoint
from dcp_storage.records import ItemRecord
from dcp_storage.session import Opened, OpenStore, Pointer, checked_options, guard, open_folder, phase
from dcp_storage.stores.location import Location, is_supported
from dcp_storage.torchview import metadata_of

__all__ = ["FsspecStorageReader"]


@dataclass(frozen=True)
class Seen:
    """What a rank tells the coordinator in its plan: which commit it read, and which files it will read from.

    Attributes:
        number: the commit's number; None for a checkpoint without one.
        identity: CRC-32 of the manifest, so that ranks that read different saves are found out.
        files: names.
    """

    number: int | None
    identity: int
    files: tuple[str, ...]


@dataclass
class _Load:
    """One load in one thread."""

    location: Location | None
    report: LoadReport
    opened: Opened | None = None
    checkpoint: Checkpoint | None = None
    error: CheckpointError | None = None
    counters: load.Counters = field(default_factory=load.Counters)


class _Unreadable(Metadata):
    """Stands for metadata that could not be read: every look at a field raises the reason.

    torch turns an exception of ``read_metadata`` into an AssertionError of its own and loses its type; what
    ``set_up_storage_reader`` or a planner raises arrives on all ranks as it is.
    """

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(state_dict_metadata={})
        object.__setattr__(self, "_error", error)

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            raise object.__getattribute__(self, "_error")
        return object.__getattribute__(self, name)


_FIELDS = frozenset(f.name for f in dataclasses.fields(Metadata))


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
        callback: an fsspec Callback that is told of bytes read by this rank; it does not travel when the reader is
            pickled.

    Raises:
        InvalidLocationError: ``path`` cannot name a folder, its scheme is unknown, or a package for it is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        require_commit: bool = True,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
        callback: Callback | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(options, LoadOptions):
            raise TypeError(f"options must be LoadOptions, not {type(options).__name__}.")
        self.storage_options: dict[str, Any] = checked_options(storage_options)
        self.require_commit = require_commit
        self.options = options
        self.callback = callback
        self._pointer = Pointer()
        if path is not None:
            self._pointer.set(path)
        self._report: LoadReport | None = None
        self._steps = LoadSteps()
        self._opener: OpenStore | None = None
        self._build()

    def _build(self) -> None:
        self._own = threading.local()
        self._budget = Budget(self.options.memory_budget)
        self._progress = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        left_here = {"_own", "_budget", "_progress", "callback", "_report"}
        return {name: value for name, value in self.__dict__.items() if name not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback = None
        self._report = None
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
            self._own.load = _Load(None, LoadReport(""), error=error)
            return _Unreadable(error)
        current = _Load(location, LoadReport(location.url))
        self._own.load = current
        try:
            with guard("read_metadata", location), phase(current.report, "metadata"):
                current.opened = open_folder(
                    location, self.storage_options, self.options, **({"opener": self._opener} if self._opener else {})
                )
                how: dict[str, Any] = {
                    "require_commit": self.require_commit,
                    "trusted_globals": self.options.trusted_globals,
                }
                if kwargs.get("rank") is None:
                    checkpoint = read_checkpoint(current.opened.store, **how)
                else:
                    checkpoint = read_rank_checkpoint(current.opened.store, int(kwargs["rank"]), **how)
                current.checkpoint = checkpoint
                current.report.commit = checkpoint.number
                current.counters.bytes_read += checkpoint.bytes_read
                metadata = metadata_of(
                    checkpoint.manifest, trusted_globals=self.options.trusted_globals, path=location.url
                )
                if metadata.storage_meta is None:
                    metadata.storage_meta = StorageMeta()
                return metadata
        except CheckpointError as error:
            if error.kind == RANK_BY_RANK and "rank" not in kwargs:
                raise  # so that torch calls again, with the rank
            current.error = error
            return _Unreadable(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what :meth:`read_metadata` met."""
        current = self._current()
        if current.error is not None:
            raise current.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tells the coordinator, by way of the plan, what this rank read and will read."""
        current = self._current()
        with guard("prepare_local_plan", current.location):
            checkpoint = _known(current)
            files = {checkpoint.file_of(_record(checkpoint, item)) for item in plan.items}
            if checkpoint.of_rank:  # the coordinator's manifest does not know this rank's files
                self._steps.check_sizes(_opened(current).store, checkpoint, files)
                files = set()
            seen = Seen(checkpoint.number, checkpoint.identity, tuple(sorted(files)))
            return dataclasses.replace(plan, storage_data=seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks read the same commit, and all wanted files are whole, before any changes."""
        current = self._current()
        with guard("prepare_global_plan", current.location), phase(current.report, "sizes"):
            checkpoint = _known(current)
            wanted: set[str] = set()
            for plan in plans:
                seen = plan.storage_data
                if not isinstance(seen, Seen):  # a planner made its own plan: all files, to be sure
                    wanted.update(record.name for record in checkpoint.manifest.files)
                    continue
                if (seen.number, seen.identity) != (checkpoint.number, checkpoint.identity):
                    raise CheckpointReplacedError(
                        f"{current.report.path}: another save committed while the ranks were beginning to load: they "
                        f"read commit {checkpoint.number} and commit {seen.number}. Load again.",
                        path=current.report.path,
                    )
                wanted.update(seen.files)
            self._steps.check_sizes(_opened(current).store, checkpoint, wanted)
            return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank wants, straight into the planner's tensors where their layout allows."""
        current = self._current()
        report = current.report
        with guard("read_data", current.location), phase(report, "read"):
            checkpoint, opened = _known(current), _opened(current)
            wanted = [self._wanted(current, checkpoint, item, planner) for item in plan.items]
            if self.callback is not None:
                self.callback.set_size(sum(w.item.payload_length for w in wanted))
            try:
                load.run(
                    opened.store,
                    wanted,
                    budget=self._budget,
                    counters=current.counters,
                    part_size=max(min(self.options.part_size, self.options.memory_budget), 64 * KIB),
                    max_gap=self.options.max_gap,
                    max_concurrency=self.options.max_concurrency,
                    check=self._steps.check_blocks,
                    received=self._tell,
                )
            except CorruptCheckpointError as error:
                found = blame(opened.store, checkpoint.number, error)
                if found is error:
                    raise
                raise found from error
            if not isinstance(plan.storage_data, Seen):
                self._look_again(opened, checkpoint)
        report.loaded = sorted({item.dest_index.fqn for item in plan.items})
        report.bytes_needed = current.counters.bytes_needed
        report.bytes_read = current.counters.bytes_read
        opened.count_into(report)
        self._report = report
        opened.store.close()
        self._own.load = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- what the hooks are made of --

    def _current(self) -> _Load:
        current = getattr(self._own, "load", None)
        if current is None:
            raise CheckpointError("No load is under way in this thread: read_metadata comes first.", kind="protocol")
        return current  # type: ignore[no-any-return]

    def _tell(self, count: int) -> None:
        if self.callback is not None:
            with self._progress:
                self.callback.relative_update(count)

    @staticmethod
    def _look_again(opened: Opened, checkpoint: Checkpoint) -> None:
        """Where the coordinator could not compare what the ranks read, each rank sees that nothing moved meanwhile."""
        current = read_current(opened.store)
        number = current.number if current is not None else None
        if number != checkpoint.number:
            raise CheckpointReplacedError(
                f"{opened.store.url}: another save committed, or the checkpoint was deleted, while it was being read "
                f"(commit {checkpoint.number} → {number}). Load again.",
                path=opened.store.url,
            )

    def _wanted(self, current: _Load, checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> load.Wanted:
        record = _record(checkpoint, item)
        key = item.dest_index.fqn
        path = current.report.path
        finish = Finish(
            planner, item, record, path, self.options.trusted_globals, self._steps, checkpoint.limit_of(record)
        )
        if item.type == LoadItemType.BYTE_IO:
            return load.Wanted(checkpoint.file_of(record), record, None, None, None, finish.as_object)
        return load.Wanted(
            file=checkpoint.file_of(record),
            item=record,
            offsets=tuple(item.storage_offsets),
            lengths=tuple(item.lengths),
            target=functools.partial(resolve, planner, item, path, key),
            done=finish.as_tensor,
        )


def _known(current: _Load) -> Checkpoint:
    if current.error is not None:
        raise current.error
    if current.checkpoint is None:
        raise CheckpointError("read_metadata comes first.", path=current.report.path, kind="protocol")
    return current.checkpoint


def _opened(current: _Load) -> Opened:
    if current.opened is None:
        raise CheckpointError("read_metadata comes first.", path=current.report.path, kind="protocol")
    return current.opened


def _record(checkpoint: Checkpoint, item: ReadItem) -> ItemRecord:
    record = checkpoint.items.get(item.storage_index)
    if record is None:
        raise CorruptCheckpointError(
            f"The manifest has no item for {item.storage_index.fqn!r} at {item.storage_index.offset}.",
            key=item.storage_index.fqn,
        )
    return record
