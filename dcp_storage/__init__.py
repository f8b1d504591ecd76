"""Committed, checksummed, resharding checkpoint storage for ``torch.distributed.checkpoint``.

A name is imported when it is first used: listing a checkpoint needs no torch. A new name goes into three places below,
one line each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_storage.errors import CheckpointError as CheckpointError
    from dcp_storage.errors import CheckpointExistsError as CheckpointExistsError
    from dcp_storage.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from dcp_storage.errors import CheckpointReplacedError as CheckpointReplacedError
    from dcp_storage.errors import CommitUnknownError as CommitUnknownError
    from dcp_storage.errors import CorruptCheckpointError as CorruptCheckpointError
    from dcp_storage.errors import IncompatibleCheckpointError as IncompatibleCheckpointError
    from dcp_storage.errors import InvalidLocationError as InvalidLocationError
    from dcp_storage.errors import NotCommittedError as NotCommittedError
    from dcp_storage.errors import StoreError as StoreError
    from dcp_storage.errors import UntrustedDataError as UntrustedDataError
    from dcp_storage.listing import list_keys as list_keys
    from dcp_storage.manager import CheckpointManager as CheckpointManager
    from dcp_storage.options import LoadOptions as LoadOptions
    from dcp_storage.options import SaveOptions as SaveOptions
    from dcp_storage.partial import load_keys as load_keys
    from dcp_storage.per_rank import PerRank as PerRank
    from dcp_storage.per_rank import RngState as RngState
    from dcp_storage.reader import FsspecStorageReader as FsspecStorageReader
    from dcp_storage.state import DCP as DCP
    from dcp_storage.tools.adopt import adopt as adopt
    from dcp_storage.tools.bench import bench as bench
    from dcp_storage.tools.copy import copy as copy
    from dcp_storage.tools.delete import delete as delete
    from dcp_storage.tools.describe import describe as describe
    from dcp_storage.tools.doctor import doctor as doctor
    from dcp_storage.tools.prune import prune as prune
    from dcp_storage.tools.verify import verify as verify
    from dcp_storage.writer import FsspecStorageWriter as FsspecStorageWriter

__all__ = [
    "DCP",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
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
    "PerRank",
    "RngState",
    "SaveOptions",
    "StoreError",
    "UntrustedDataError",
    "adopt",
    "bench",
    "copy",
    "delete",
    "describe",
    "doctor",
    "list_keys",
    "load_keys",
    "prune",
    "verify",
]

_HOMES = {
    "CheckpointError": "dcp_storage.errors",
    "CheckpointExistsError": "dcp_storage.errors",
    "CheckpointManager": "dcp_storage.manager",
    "CheckpointNotFoundError": "dcp_storage.errors",
    "CheckpointReplacedError": "dcp_storage.errors",
    "CommitUnknownError": "dcp_storage.errors",
    "CorruptCheckpointError": "dcp_storage.errors",
    "DCP": "dcp_storage.state",
    "FsspecStorageReader": "dcp_storage.reader",
    "FsspecStorageWriter": "dcp_storage.writer",
    "IncompatibleCheckpointError": "dcp_storage.errors",
    "InvalidLocationError": "dcp_storage.errors",
    "LoadOptions": "dcp_storage.options",
    "NotCommittedError": "dcp_storage.errors",
    "PerRank": "dcp_storage.per_rank",
    "RngState": "dcp_storage.per_rank",
    "SaveOptions": "dcp_storage.options",
    "StoreError": "dcp_storage.errors",
    "UntrustedDataError": "dcp_storage.errors",
    "adopt": "dcp_storage.tools.adopt",
    "bench": "dcp_storage.tools.bench",
    "copy": "dcp_storage.tools.copy",
    "delete": "dcp_storage.tools.delete",
    "describe": "dcp_storage.tools.describe",
    "doctor": "dcp_storage.tools.doctor",
    "list_keys": "dcp_storage.listing",
    "load_keys": "dcp_storage.partial",
    "prune": "dcp_storage.tools.prune",
    "verify": "dcp_storage.tools.verify",
}


if not TYPE_CHECKING:  # a type checker has the imports above, and finds names that do not exist

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
