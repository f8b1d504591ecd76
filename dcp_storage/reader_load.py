"""One load in one thread, and what stands for the metadata where it could not be read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from dcp_storage.current import read_current
from dcp_storage.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError
from dcp_storage.exchange_plan import Ranges
from dcp_storage.exchange_rounds import Meeting
from dcp_storage.load import Counters
from dcp_storage.options import LoadReport
from dcp_storage.reading import Checkpoint
from dcp_storage.records import ItemRecord
from dcp_storage.session import Opened
from dcp_storage.store import Store
from dcp_storage.stores.location import Location

__all__ = ["Load", "Unreadable", "look_again"]


@dataclass
class Load:
    """One load in one thread.

    Attributes:
        location: where from; None where nobody said.
        report: filled while it goes on.
        opened: the store.
        checkpoint: what is loaded.
        error: why it could not be read.
        counters: of bytes.
        meeting: the ranks that load together.
        inside: the places of numbers that were found in items of stock torch.
        offered: the ranges that this rank offered to share.
    """

    location: Location | None
    report: LoadReport
    opened: Opened | None = None
    checkpoint: Checkpoint | None = None
    error: CheckpointError | None = None
    counters: Counters = field(default_factory=Counters)
    meeting: Meeting | None = None
    inside: dict[MetadataIndex, ItemRecord] = field(default_factory=dict)
    offered: Ranges = ()

    def known(self) -> Checkpoint:
        """The checkpoint; raises why there is none."""
        if self.error is not None:
            raise self.error
        if self.checkpoint is None:
            raise CheckpointError("read_metadata comes first.", path=self.report.path, kind="protocol")
        return self.checkpoint

    def store_of(self) -> Opened:
        """The store, opened."""
        if self.opened is None:
            raise CheckpointError("read_metadata comes first.", path=self.report.path, kind="protocol")
        return self.opened

    def record_of(self, item: ReadItem) -> ItemRecord:
        """The saved item that a planner wants.

        Raises:
            CorruptCheckpointError: there is none.
        """
        checkpoint = self.known()
        record = self.inside.get(item.storage_index) or checkpoint.items.get(item.storage_index)
        if record is None:
            raise CorruptCheckpointError(
                f"The manifest has no item for {item.storage_index.fqn!r} at {item.storage_index.offset}.",
                key=item.storage_index.fqn,
            )
        return record


def look_again(store: Store, checkpoint: Checkpoint) -> None:
    """Where the coordinator could not compare what the ranks read, each rank sees that nothing moved meanwhile.

    Raises:
        CheckpointReplacedError: another save committed, or the checkpoint was deleted.
    """
    current = read_current(store)
    number = current.number if current is not None else None
    if number != checkpoint.number:
        raise CheckpointReplacedError(
            f"{store.url}: another save committed, or the checkpoint was deleted, while it was being read "
            f"(commit {checkpoint.number} → {number}). Load again.",
            path=store.url,
        )


_FIELDS = frozenset(f.name for f in dataclasses.fields(Metadata))


class Unreadable(Metadata):
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
