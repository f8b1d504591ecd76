"""What a folder holds now: the highest commit that stands, its manifest, and whether its files are there.

Everything here lists past caches and raises when a listing fails: an outage never looks like an empty folder
(invariant I10).
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_storage import names
from dcp_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    NotCommittedError,
    ObjectNotFoundError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.records import MAX_COMMIT, Commit, Manifest, decode_commit, decode_manifest
from dcp_storage.store import Entry, Store

__all__ = ["Current", "blame", "check_sizes", "list_commits", "nothing_committed", "read_current", "read_manifest"]

_PROBE_GAP = 8  # numbers probed past the last one found, where listing is not allowed: lower commits may be swept


@dataclass(frozen=True)
class Current:
    """The highest commit that stands.

    Attributes:
        number: from its name.
        commit: its content; ``state`` may be ``void``.
    """

    number: int
    commit: Commit


def list_commits(entries: Iterable[Entry]) -> list[int]:
    """The numbers of the commit objects in a listing, highest first."""
    return sorted((n for n in (names.commit_number(e.name) for e in entries) if n), reverse=True)


def read_current(store: Store, numbers: list[int] | None = None) -> Current | None:
    """The highest commit object whose body passes its check, void or not; None where there is none.

    Args:
        store: the folder.
        numbers: the commit numbers, highest first, where a listing was made already.

    Raises:
        IncompatibleCheckpointError: the highest is of a later format.
        StoreError: the store failed.
    """
    if numbers is None:
        try:
            numbers = list_commits(store.entries())
        except StoreError as error:
            if error.errno != errno.EACCES:
                raise
            return _probe(store)
    for number in numbers:
        current = _read_commit(store, number)
        if current is not None:
            return current
    return None


def _read_commit(store: Store, number: int) -> Current | None:
    name = names.commit_name(number)
    try:
        commit = decode_commit(store.read(name, limit=MAX_COMMIT), path=store.url, file=name)
    except (ObjectNotFoundError, CorruptCheckpointError, UntrustedDataError):
        return None  # a body that fails its check is absent to readers; so is one that was swept since the listing
    return Current(number, commit) if commit.number == number else None  # a copy of another number's body is not it


def _probe(store: Store) -> Current | None:
    """Without the right to list: looks upwards from 1."""
    found = None
    number, missed = 1, 0
    while missed < _PROBE_GAP:
        current = _read_commit(store, number)
        missed = 0 if current else missed + 1
        found = current or found
        number += 1
    return found


def read_manifest(store: Store, current: Current) -> Manifest:
    """The manifest that a commit names, its size and CRC-32 checked.

    Raises:
        CorruptCheckpointError: it is gone, or not what the commit says. Ask :func:`blame` whether it was replaced.
    """
    ref = current.commit.manifest
    if ref is None:
        raise NotCommittedError(f"{store.url}: the checkpoint was deleted.", path=store.url)
    try:
        data = store.read(ref.name, limit=ref.size)
    except ObjectNotFoundError as error:
        raise _wrong(store, ref.name, "a manifest", None, "is missing", error) from error
    except UntrustedDataError as error:
        raise _wrong(
            store, ref.name, ref.size, None, f"is larger than the {ref.size} bytes committed", error
        ) from error
    if len(data) != ref.size:
        raise _wrong(store, ref.name, ref.size, len(data), f"has {len(data)} bytes; {ref.size} were committed")
    found = zlib.crc32(data)
    if found != ref.crc32:
        raise _wrong(store, ref.name, ref.crc32, found, f"has CRC-32 {found:#010x}; {ref.crc32:#010x} was committed")
    return decode_manifest(data, path=store.url, file=ref.name)


def check_sizes(store: Store, manifest: Manifest, wanted: Iterable[str]) -> None:
    """Checks by one listing that the wanted files are there with the sizes that the manifest has.

    Without the right to list, each file is asked for its size.

    Raises:
        CorruptCheckpointError: one is missing, short or long; the first in name order is named.
    """
    sizes = {record.name: record.size for record in manifest.files}
    wanted = sorted(set(wanted))
    try:
        found: dict[str, int] = {e.name: e.size for e in store.entries()}
    except StoreError as error:
        if error.errno != errno.EACCES:
            raise
        found = {}
        for name in wanted:
            try:
                found[name] = store.size(name)
            except ObjectNotFoundError:
                continue  # said below, with what was wanted
    for name in wanted:
        if name not in found:
            raise _wrong(store, name, sizes[name], None, f"is missing; {sizes[name]} bytes were committed")
        if found[name] != sizes[name]:
            raise _wrong(
                store, name, sizes[name], found[name], f"has {found[name]} bytes; {sizes[name]} were committed"
            )


def blame(store: Store, number: int | None, error: CheckpointError) -> CheckpointError:
    """Whether something gone or changed means that the checkpoint was replaced: looks at the commit again.

    Args:
        store: the folder.
        number: the commit that was being read; None for a checkpoint without one.
        error: what was found.

    Returns:
        A CheckpointReplacedError if the number moved; a CorruptCheckpointError about the commit object where a later
        one is there that cannot be read; else ``error``.
    """
    current = read_current(store)
    try:
        highest = max(list_commits(store.entries()), default=0)
    except StoreError as refused:
        if refused.errno != errno.EACCES:
            raise
        highest = current.number if current is not None else 0  # without the right to list: what probing finds
    if highest == (number or 0):
        return error
    if current is not None and current.number == number:
        # What stands is still what was read, but a later commit is there that cannot be: not a replacement in time.
        name = names.commit_name(highest)
        return CorruptCheckpointError(
            f"{store.url}: {name} is torn or altered, and of the checkpoint before it not all is left: {error}",
            path=store.url,
            file=name,
            wanted=f"commit {highest}",
            found=f"commit {current.number}",
            key=error.key,
            cause=error,
        )
    replaced = CheckpointReplacedError(
        f"{store.url}: another save committed, or the checkpoint was deleted, while it was being read (commit "
        f"{number or 0} → {highest}). Load again.",
        path=store.url,
        key=error.key,
        cause=error,
    )
    replaced.__cause__ = error
    return replaced


def nothing_committed(store: Store, current: Current | None) -> CheckpointNotFoundError:
    """The error that says what is in a folder without a live commit, and what to do."""
    if current is not None:
        return NotCommittedError(
            f"{store.url}: the checkpoint here was deleted at {current.commit.time} (commit {current.number} is void).",
            path=store.url,
        )
    try:
        found = [e.name for e in store.entries()]
    except ObjectNotFoundError as error:
        return CheckpointNotFoundError(f"{store.url}: {error}", path=store.url, cause=error)
    except StoreError as error:
        if error.errno != errno.EACCES:
            raise
        return CheckpointNotFoundError(
            f"{store.url}: no commit object was found here by its name; the folder itself may not be listed.",
            path=store.url,
            cause=error,
        )
    ours = [name for name in found if names.blocks_claim(name)]
    torn = sorted(name for name in found if names.commit_number(name))
    if torn:
        return NotCommittedError(
            f"{store.url}: {', '.join(torn)} is there but torn or altered, so nothing that stands is committed here. "
            "If a checkpoint was committed, restore that object from a copy; a save with overwrite=True replaces all.",
            path=store.url,
            key=torn[-1],
        )
    if names.STOCK_VIEW in found:
        return NotCommittedError(
            f"{store.url}: there is a checkpoint that stock torch wrote, without a commit. Nothing shows that it is "
            "whole; load it with require_commit=False.",
            path=store.url,
        )
    if ours:
        return NotCommittedError(
            f"{store.url}: {len(ours)} files of a save that never committed ({', '.join(sorted(ours)[:3])}…). It was "
            "interrupted or is still running; load an older checkpoint.",
            path=store.url,
        )
    what = f"only {', '.join(sorted(found)[:3])}" if found else "nothing"
    return CheckpointNotFoundError(f"{store.url}: there is no checkpoint here ({what} in this folder).", path=store.url)


def _wrong(
    store: Store, file: str, wanted: int | str, found: int | None, says: str, cause: BaseException | None = None
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{store.url}: {file} {says}.", path=store.url, file=file, wanted=wanted, found=found, cause=cause
    )
