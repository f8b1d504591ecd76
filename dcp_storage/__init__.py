"""Committed, checksummed, resharding checkpoint storage for ``torch.distributed.checkpoint``."""

from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CommitUnknownError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    InvalidLocationError,
    NotCommittedError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.options import LoadOptions, SaveOptions
from dcp_storage.reader import FsspecStorageReader
from dcp_storage.writer import FsspecStorageWriter

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "FsspecStorageReader",
    "FsspecStorageWriter",
    "IncompatibleCheckpointError",
    "InvalidLocationError",
    "LoadOptions",
    "NotCommittedError",
    "SaveOptions",
    "StoreError",
    "UntrustedDataError",
]
