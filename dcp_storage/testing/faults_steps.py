"""Wrong steps: what a save, a load, a delete or a prune would do without one of its protections."""

from __future__ import annotations

import io
import logging
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from dcp_storage import names
from dcp_storage.commit import Attempt, make_commit
from dcp_storage.commit_object import new_commit
from dcp_storage.errors import CheckpointError, CorruptCheckpointError
from dcp_storage.fence import Sweep, choose_old, list_folder
from dcp_storage.reading import Checkpoint
from dcp_storage.records import Commit, ItemRecord, ManifestRef, encode_commit, encode_manifest
from dcp_storage.store import Store

__all__ = [
    "commit_by_put",
    "commit_or_log",
    "commit_without_look",
    "exchange",
    "forget_live",
    "ignore_ages",
    "list_again",
    "name_manifest",
    "remove_highest_commit",
    "skip_blocks",
    "skip_sizes",
    "take_everything",
    "take_plain_names",
    "unpickle_anything",
]

S = TypeVar("S")


def exchange(row: Sequence[S], old: S, *new: S) -> tuple[S, ...]:
    """The row of steps with ``old`` replaced by ``new`` (by nothing: left out).

    Raises:
        ValueError: ``old`` is not in the row, so that a fault can never be empty without anybody seeing it.
    """
    if old not in row:
        raise ValueError(f"{getattr(old, '__name__', old)} is not among the steps")
    place = row.index(old)
    return (*row[:place], *new, *row[place + 1 :])


# -- of a save ---------------------------------------------------------------------------------------------------------


def take_plain_names(attempt: Attempt) -> None:
    """Uses the plain names without a claim, whatever is in the folder."""
    attempt.plain = True


def commit_by_put(attempt: Attempt) -> None:
    """Writes the commit object whether its number is free or not."""
    attempt.store.put(names.commit_name(attempt.number + 1), [memoryview(encode_commit(_commit(attempt)))])
    attempt.committed = True


def commit_without_look(attempt: Attempt) -> None:
    """Takes any error of the create for a failure, and never reads back what became of it."""
    attempt.store.create(names.commit_name(attempt.number + 1), encode_commit(_commit(attempt)))
    attempt.committed = True


def commit_or_log(attempt: Attempt) -> None:
    """Commits; an error becomes a line in a log."""
    try:
        make_commit(attempt)
    except CheckpointError:
        logging.getLogger(__name__).exception("the commit failed")


def name_manifest(attempt: Attempt) -> None:
    """Settles what the commit will say of the manifest, without writing it."""
    if attempt.manifest is None:
        raise CheckpointError("publish was not given a manifest.", kind="protocol")
    data = encode_manifest(attempt.manifest)
    name = names.manifest_name(None if attempt.plain else attempt.token)
    attempt.ref = ManifestRef(name, len(data), zlib.crc32(data))


def _commit(attempt: Attempt) -> Commit:
    return new_commit(attempt.number + 1, attempt.token, manifest=attempt.ref, world_size=attempt.world_size)


# -- of a delete or a prune --------------------------------------------------------------------------------------------


def remove_highest_commit(sweep: Sweep) -> None:
    """Takes the highest commit away instead of adding a void."""
    sweep.store.delete([names.commit_name(sweep.number)])


def list_again(sweep: Sweep) -> None:
    """Chooses what is deleted by a listing of now, made after the fence."""
    list_folder(sweep)
    choose_old(sweep)


def take_everything(sweep: Sweep) -> None:
    """Takes every file in the folder but commit objects, whosever it is."""
    sweep.doomed = [e for e in sweep.listing if not names.commit_number(e.name)]


def ignore_ages(sweep: Sweep) -> None:
    """Takes every file for an old one."""
    sweep.grace = -math.inf


def forget_live(sweep: Sweep) -> None:
    """Takes no notice of what is committed."""
    sweep.current = None


# -- of a load ---------------------------------------------------------------------------------------------------------


def skip_sizes(store: Store, checkpoint: Checkpoint, wanted: Iterable[str]) -> None:
    """Believes that all files are there."""


def skip_blocks(
    file: str, item: ItemRecord, start: int, buffers: Sequence[memoryview]
) -> CorruptCheckpointError | None:
    """Believes that all bytes are right."""
    return None


def unpickle_anything(data: bytes | bytearray | memoryview, **_ignored: Any) -> Any:
    """Unpickles an object without a list of what is allowed, as stock torch does on request."""
    return torch.load(io.BytesIO(bytes(data)), weights_only=False)
