"""A storage reader whose metadata was read before ``dcp.load`` asks for it."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_storage.errors import CheckpointError

__all__ = ["Source"]


class Source(StorageReader):
    """Hands the metadata on that :meth:`look` has read, once; everything else goes to the reader behind it.

    The template is held against the metadata before torch's own load begins, and a large manifest is not read twice.

    Args:
        reader: ours, stock torch's, or anybody's.
        rank: this rank, for checkpoints that every rank saved by itself.
    """

    def __init__(self, reader: StorageReader, rank: int) -> None:
        super().__init__()
        self.reader = reader
        self._rank = rank
        self._metadata: Metadata | None = None
        self._refusal: Exception | None = None

    @property
    def checkpoint_id(self) -> Any:
        """Where the reader points, if it says so."""
        return getattr(self.reader, "checkpoint_id", None)

    @property
    def failure(self) -> CheckpointError | None:
        """Why the reader's last failed load failed on this rank, if the reader is ours."""
        failure = getattr(self.reader, "failure", None)
        return failure if isinstance(failure, CheckpointError) else None

    def look(self) -> Metadata:
        """Reads the metadata; that of this rank where there is none of the whole."""
        self._refusal = None
        try:
            self._metadata = self.reader.read_metadata()
        except Exception as error:
            if not _takes_anything(self.reader.read_metadata):
                raise
            self._refusal = error
        if self._refusal is not None:
            try:
                self._metadata = self.reader.read_metadata(rank=self._rank)
            except Exception as second:
                raise self._refusal from second
        assert self._metadata is not None
        return self._metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See torch."""
        self.reader.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What :meth:`look` read; where it needed the rank, as torch will find out in the same way."""
        if self._metadata is None:
            return self.reader.read_metadata(*args, **kwargs)
        if self._refusal is not None and "rank" not in kwargs:
            raise self._refusal
        metadata, self._metadata = self._metadata, None
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch."""
        extra = kwargs if _takes_anything(self.reader.set_up_storage_reader) else {}
        self.reader.set_up_storage_reader(metadata, is_coordinator, *args, **extra)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See torch."""
        return self.reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See torch."""
        return self.reader.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See torch."""
        return self.reader.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: a source is made from a reader that was chosen already."""
        return False


def _takes_anything(method: Any) -> bool:
    """Whether a hook has ``**kwargs``, by which torch tells what it may be given."""
    return "kwargs" in inspect.signature(method).parameters
