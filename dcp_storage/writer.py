"""The storage writer: torch's hooks, each a few lines on top of the commit protocol and the save pipeline."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsspec.callbacks import Callback
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_storage import names, save
from dcp_storage.budget import Budget
from dcp_storage.carrying import Ahead
from dcp_storage.commit import Attempt, Steps, begin, publish
from dcp_storage.errors import CheckpointError, CommitUnknownError, StoreError, portable
from dcp_storage.lone import agree_on_label, begin_rank, publish_rank
from dcp_storage.options import MIB, SaveOptions, SaveReport
from dcp_storage.plan import even_part_size, pack
from dcp_storage.records import WrittenItem
from dcp_storage.resolving import encoded, resolved, size_about
from dcp_storage.session import Opened, OpenStore, Pointer, checked_options, guard, open_folder, phase
from dcp_storage.stores.location import Location, is_supported
from dcp_storage.telling import gather, straggler, tell_save, with_figures
from dcp_storage.torchview import manifest_of, stock_storage_data
from dcp_storage.twins import twins_of, with_twins

__all__ = ["FsspecStorageWriter"]

_STOCK_VERSION = "1.0.0"  # torch's CURRENT_DCP_VERSION at the time of format 1


@dataclass(frozen=True)
class Ask:
    """What a rank puts into its plan: a number used once, so that an old grant in a cached plan is seen to be old."""

    nonce: str


@dataclass(frozen=True)
class Grant:
    """The coordinator's answer: whether the rank may use the plain names."""

    nonce: str
    plain: bool


@dataclass
class _Save:
    """One save in one thread; ``label`` is set in a save without collectives, where every rank commits for itself."""

    location: Location
    opened: Opened
    rank: int
    is_coordinator: bool
    token: str
    nonce: str
    report: SaveReport
    attempt: Attempt | None = None
    written: list[str] = field(default_factory=list)
    label: str | None = None
    world_size: int | None = None


class FsspecStorageWriter(StorageWriter):
    """Saves sharded checkpoints to a folder on local disk, S3 or any fsspec filesystem, with an atomic commit.

    Hand it to :func:`torch.distributed.checkpoint.save` or ``async_save``. When ``save`` returns, every byte is
    durable and one commit object says so; whatever happens before that leaves the folder as it was, or plainly
    uncommitted. One writer serves any number of saves, also several at once in different threads, each on its own
    process group or with ``no_dist=True``.

    Args:
        path: a local folder, a ``PathLike`` of one, or a URL (``s3://bucket/run/step-1``, ``file://…``,
            ``memory://…``, any fsspec scheme). None: every save names its own by ``checkpoint_id``.
        storage_options: handed to fsspec untouched (credentials, ``endpoint_url``, …). Retries and time-outs that
            are not set here are set so that only this package retries.
        overwrite: replace a checkpoint that is there; the old one stays loadable until the new one commits.
            Default: refuse, on all ranks, before any byte is written.
        options: see :class:`SaveOptions`.
        callback: an fsspec Callback that is told of bytes written by this rank; it does not travel when the writer
            is pickled.

    Raises:
        InvalidLocationError: ``path`` cannot name a folder, its scheme is unknown, or a package for it is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        options: SaveOptions = SaveOptions(),  # noqa: B008 - frozen
        callback: Callback | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(options, SaveOptions):
            raise TypeError(f"options must be SaveOptions, not {type(options).__name__}.")
        self.storage_options: dict[str, Any] = checked_options(storage_options)
        self.overwrite = overwrite
        self.options = options
        self.callback = callback
        self._pointer = Pointer()
        if path is not None:
            self._pointer.set(path)
        self._report: SaveReport | None = None
        self._steps = Steps()
        self._opener: OpenStore | None = None
        self._warned = False
        self._build()

    def _build(self) -> None:
        self._own = threading.local()
        self._budget = Budget(self.options.memory_budget)
        self._progress = threading.Lock()
        self._saves: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        left_here = {"_own", "_budget", "_progress", "_saves", "callback", "_report"}
        return {name: value for name, value in self.__dict__.items() if name not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback = None
        self._report = None
        self._build()

    @property
    def checkpoint_id(self) -> str | None:
        """The folder that this thread's next save goes to; None where none was given."""
        location = self._pointer.peek()
        return location.url if location else None

    @property
    def report(self) -> SaveReport | None:
        """The report of the save that finished last in this process."""
        return self._report

    # -- torch's hooks, in the order in which they are called --

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Points this thread to another folder; every option stays."""
        if checkpoint_id is not None:
            self._pointer.set(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path or URL that can be saved to."""
        return is_supported(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What torch puts into the metadata: the folder and this save's token."""
        self._own.token = names.new_token()
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._own.token)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save in this thread."""
        with guard("set_up_storage_writer", self._pointer.peek()):
            location = self._pointer.get("writer")
            opened = open_folder(
                location, self.storage_options, self.options, **({"opener": self._opener} if self._opener else {})
            )
            token = getattr(self._own, "token", None) or names.new_token()
            self._own.token = None
            self._own.save = _Save(
                location=location,
                opened=opened,
                rank=int(kwargs.get("rank") or 0),
                is_coordinator=is_coordinator,
                token=token,
                nonce=names.new_token(),
                report=SaveReport(location.url),
            )
            if not kwargs.get("use_collectives", True):
                self._own.save.label, self._own.save.world_size = self._agree(self._own.save)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Asks, by way of the plan, for the plain names."""
        current = self._current()
        return dataclasses.replace(plan, storage_data=Ask(current.nonce))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: looks at the folder, refuses or claims, and answers the ranks."""
        current = self._current()
        with guard("prepare_global_plan", current.location), phase(current.report, "begin"):
            attempt = Attempt(
                store=current.opened.store,
                token=current.token,
                overwrite=self.overwrite,
                assume_single_writer=self.options.assume_single_writer,
                asked=any(isinstance(plan.storage_data, Ask) for plan in plans),
            )
            current.attempt = attempt
            if current.label is None:
                begin(attempt, self._steps)
            else:
                begin_rank(attempt, current.rank, current.label)
            if attempt.single_writer and not self._warned:
                self._warned = True
                warnings.warn(attempt.warnings[0], stacklevel=2)
            return [
                dataclasses.replace(plan, storage_data=Grant(plan.storage_data.nonce, attempt.plain))
                if isinstance(plan.storage_data, Ask)
                else plan
                for plan in plans
            ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files; nothing of them is left if anything fails."""
        current = self._current()
        report = current.report
        left_behind: list[str] = []
        try:
            with guard("write_data", current.location), phase(report, "write"):
                written = self._write(current, plan, planner, left_behind)
        except CheckpointError as error:
            error.message = " ".join([error.message, *left_behind])
            raise
        report.files = len({w.name for w in written})
        report.bytes_written = sum(w.shard.size for w in written if w.shard is not None)
        current.written = sorted({w.name for w in written})
        current.opened.count_into(report)
        written = with_figures(written, report, current.rank)
        if not current.is_coordinator and current.label is None:
            self._report = report
            current.opened.store.close()
            tell_save(report, current.rank)
        results = [
            WriteResult(index=item.index, size_in_bytes=w.item.length, storage_data=w)
            for item, w in zip(plan.items, written, strict=True)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commits. When it returns, the checkpoint is there."""
        current = self._current()
        attempt, report = current.attempt, current.report
        with guard("finish", current.location), phase(report, "commit"):
            if attempt is None:
                raise CheckpointError("finish was called before prepare_global_plan.", kind="protocol")
            try:
                metadata.version = _STOCK_VERSION
                metadata.storage_meta = StorageMeta(checkpoint_id=current.location.url, save_id=current.token)
                manifest = manifest_of(metadata, [[(r.index, _told(r)) for r in rank] for rank in results])
                metadata.storage_data = attempt.storage_data = stock_storage_data(manifest)
                attempt.world_size = current.world_size or len(results)
                if current.label is None:
                    publish(attempt, manifest, self._steps)
                else:
                    publish_rank(attempt, manifest, current.rank, current.label)
            except CommitUnknownError:
                raise  # the commit may be there: nothing may be deleted
            except Exception as error:  # noqa: BLE001 - raised again, as ours
                raised = portable(error, "finish", path=current.location.url)
                if not attempt.committed:
                    self._withdraw(current, attempt, raised)
                raise raised from raised.__cause__
        report.warnings = attempt.warnings
        report.single_writer = attempt.single_writer
        report.commit = attempt.number + 1 if current.label is None else None
        report.ranks = gather(results)
        report.straggler = straggler(report.ranks)
        current.opened.count_into(report)
        self._report = report
        current.opened.store.close()
        tell_save(report, current.rank)

    # -- what the hooks are made of --

    def _current(self) -> _Save:
        current = getattr(self._own, "save", None)
        if current is None:
            raise CheckpointError(
                "No save is under way in this thread: set_up_storage_writer comes first.", kind="protocol"
            )
        return current  # type: ignore[no-any-return]

    def _agree(self, current: _Save) -> tuple[str, int]:
        url = current.location.url
        with self._progress:
            count = self._saves[url] = self._saves.get(url, 0) + 1
        options = self.options
        return agree_on_label(options.label, options.lone_ranks, current.rank, current.token, url, count)

    def _write(self, current: _Save, plan: SavePlan, planner: SavePlanner, left_behind: list[str]) -> list[WrittenItem]:
        store = current.opened.store
        grant = plan.storage_data
        plain = isinstance(grant, Grant) and grant.nonce == current.nonce and grant.plain
        token = None if plain else names.new_token()
        url = current.location.url
        twins = twins_of(plan.items, planner, url)
        items = [item for number, item in enumerate(plan.items) if number not in twins]
        sizes = [size_about(item) for item in items]
        packed = pack(sizes, self.options.shard_size)
        order = [k for members in packed for k in members]
        ahead = Ahead([functools.partial(resolved, items[k], planner, url) for k in order], self._budget.total // 4)

        def source(item: WriteItem) -> save.Source:
            return save.Source(
                key=item.index.fqn,
                offsets=None if item.index.offset is None else tuple(item.index.offset),
                index=item.index.index,
                encode=lambda: encoded(item, ahead.take(), url),
            )

        files = [
            (names.shard_name(current.rank, number, token), [source(items[k]) for k in members])
            for number, members in enumerate(packed)
        ]
        if files:
            store.make_folder()
        if self.callback is not None:
            self.callback.set_size(sum(sizes))
        part_size = min(self.options.part_size, max(self.options.memory_budget, MIB))
        if store.remote and store.parallel_parts:
            part_size = even_part_size(sum(sizes), part_size, self.options.max_concurrency)
        written = save.run(
            store,
            files,
            rank=current.rank,
            budget=self._budget,
            part_size=part_size,
            max_concurrency=self.options.max_concurrency,
            left_behind=left_behind,
            sent=self._tell,
        )
        return with_twins(plan.items, written, twins)

    def _tell(self, count: int) -> None:
        if self.callback is not None:
            with self._progress:
                self.callback.relative_update(count)

    def _withdraw(self, current: _Save, attempt: Attempt, error: CheckpointError) -> None:
        """Removes what this rank wrote of a save that did not commit. The claim stays for prune: it keeps others from
        the plain names, under which a late request of ours could still arrive.
        """
        manifest = names.manifest_name(None if attempt.plain else attempt.token)
        if current.label is not None:
            manifest = names.rank_manifest_name(current.rank, attempt.token)
        mine = [*current.written, manifest]
        try:
            current.opened.store.delete(mine)
        except StoreError as left:
            error.message = f"{error.message} Not all that was written could be removed: {left}"


def _told(result: WriteResult) -> WrittenItem:
    told = result.storage_data
    if not isinstance(told, WrittenItem):
        raise CheckpointError(
            f"The result for {result.index.fqn!r} carries a {type(told).__name__} instead of what write_data said.",
            key=result.index.fqn,
            kind="results",
        )
    return told
