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
from dcp_storage.coverage import check_whole
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
from dcp_storage.records import MAX_COMMIT, MAX_MANIFEST, Commit, Manifest, decode_commit, decode_manifest
from dcp_storage.store import Entry, Store

__all__ = [
    "Current",
    "blame",
    "check_sizes",
    "list_commits",
    "nothing_committed",
    "read_current",
    "read_manifest",
    "read_standing",
]

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


def read_current(store: Store, numbers: list[int] | None = None, known: Current | None = None) -> Current | None:
    """The highest commit object whose body passes its check, void or not; None where there is none.

    Args:
        store: the folder.
        numbers: the commit numbers, highest first, where a listing was made already.
        known: a commit that this process itself made, on a store that lets nobody replace it: it is not read again.

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
        current = known if known is not None and known.number == number else _read_commit(store, number)
        if current is not None:
            return current
    return None


def _read_commit(store: Store, number: int) -> Current | None:
    name = names.commit_name(number)
    try:
        commit = decode_commit(store.read(name, limit=MAX_COMMIT), path=store.url, file=name)
    except (ObjectNotFoundError, CorruptCheckpointError, UntrustedDataError):
        return None  # a body that fails its check is absent to readers; so is one that was swept since the listing
    # A copy of another number's body is not it, nor is one of a single rank's.
    return Current(number, commit) if (commit.number, commit.rank) == (number, None) else None


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
        UntrustedDataError: it is larger than any manifest may be.
    """
    ref = current.commit.manifest
    if ref is None:
        raise NotCommittedError(f"{store.url}: the checkpoint was deleted.", path=store.url)
    rank = current.commit.rank
    by = names.commit_name(current.number) if rank is None else names.rank_commit_name(rank)
    if ref.size > MAX_MANIFEST:
        raise UntrustedDataError(
            f"{store.url}: the commit names a manifest of {ref.size} bytes; no more than {MAX_MANIFEST} are read.",
            name=ref.name,
            path=store.url,
        )
    try:
        data = store.read(ref.name, limit=ref.size)
    except ObjectNotFoundError as error:
        raise _wrong(store, ref.name, ref.size, None, f"is missing; {by} commits it", error) from error
    except UntrustedDataError as error:
        size = _size_of(store, ref.name)
        has = f"has {size} bytes" if size is not None else "is larger"
        raise _wrong(store, ref.name, ref.size, size, f"{has}; {ref.size} were committed by {by}", error) from error
    if len(data) != ref.size:
        raise _wrong(store, ref.name, ref.size, len(data), f"has {len(data)} bytes; {ref.size} were committed by {by}")
    found = zlib.crc32(data)
    if found != ref.crc32:
        says = f"has CRC-32 {found:#010x}; {ref.crc32:#010x} was committed by {by}"
        raise _wrong(store, ref.name, ref.crc32, found, says)
    manifest = decode_manifest(data, path=store.url, file=ref.name)
    if rank is None:  # one rank's manifest is of its part
        check_whole(manifest, path=store.url, file=ref.name)
    return manifest


def _size_of(store: Store, name: str) -> int | None:
    try:
        return store.size(name)
    except StoreError:  # what is known of it already is worth more than this error
        return None


def check_sizes(store: Store, manifest: Manifest, wanted: Iterable[str]) -> None:
    """Checks by one listing that the wanted files are there with the sizes that the manifest has.

    Without the right to list, each file is asked for its size.

    Raises:
        CorruptCheckpointError: one is missing, short or long; the first in name order is named, with the first key that
            has bytes in it.
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
        if found.get(name) != sizes[name]:
            keys = _keys_in(manifest, name)
            has = f"has {found[name]} bytes" if name in found else "is missing"
            about = f"; in it {'is' if len(keys) == 1 else f'are {len(keys)} keys, the first'} {keys[0]!r:.200}"
            wrong = _wrong(
                store,
                name,
                sizes[name],
                found.get(name),
                f"{has}; {sizes[name]} bytes were committed{about if keys else ''}",
            )
            wrong.key = keys[0] if keys else None
            raise wrong


def _keys_in(manifest: Manifest, name: str) -> list[str]:
    """The keys that have bytes in a file, each once, in the order of their places."""
    number = next(n for n, record in enumerate(manifest.files) if record.name == name)
    placed = sorted((item.offset, item.key) for item in manifest.items if item.file == number)
    return list(dict.fromkeys(key for _, key in placed))


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
    numbers: list[int] | None = None
    try:
        numbers = list_commits(store.entries())
    except StoreError as refused:
        if refused.errno != errno.EACCES:
            raise
    # Of one listing: a commit that came after it must not be taken for one that was there and could not be read.
    current = read_current(store, numbers)
    highest = max(numbers or (), default=current.number if current is not None and numbers is None else 0)
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


def read_standing(store: Store, current: Current) -> Manifest:
    """As :func:`read_manifest`, but what is gone because another attempt was faster is not called corrupt.

    Raises:
        CheckpointReplacedError: the number moved since ``current`` was read.
        CorruptCheckpointError: it did not.
    """
    try:
        return read_manifest(store, current)
    except CorruptCheckpointError as error:
        found = blame(store, current.number, error)
        if found is error:
            raise
        raise found from error


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
    manifests = sorted(name for name in ours if name.startswith(names.MANIFEST))
    if names.STOCK_VIEW in found and manifests:
        return NotCommittedError(
            f"{store.url}: there is a .metadata without a commit, and a manifest of ours ({manifests[-1]}) beside it. "
            "If this was one of our checkpoints, its commit object was removed: restore it from a copy. If stock torch "
            "saved here after a save of ours that never committed, adopt it, or load it with require_commit=False.",
            path=store.url,
            key=manifests[-1],
        )
    if names.STOCK_VIEW in found:
        return NotCommittedError(
            f"{store.url}: there is a checkpoint that stock torch wrote, without a commit. Nothing shows that it is "
            "whole; adopt it, or load it with require_commit=False.",
            path=store.url,
        )
    if ours:
        return NotCommittedError(
            f"{store.url}: {len(ours)} file{'s' * (len(ours) > 1)} of a save that never committed "
            f"({', '.join(sorted(ours)[:3])}{'…' * (len(ours) > 3)}). "
            "It was interrupted or is still running; load an older checkpoint.",
            path=store.url,
        )
    what = f"only {', '.join(sorted(found)[:3])} in this folder" if found else "nothing in this folder"
    inside = [] if found else _folders_of(store)
    if inside:
        shown = ", ".join(inside[-3:])
        many = f"{len(inside)} folders, the last of them {shown}" if len(inside) > 1 else f"the folder {shown}"
        what = f"only {many}; a run's checkpoints are in its folders"
    return CheckpointNotFoundError(f"{store.url}: there is no checkpoint here ({what}).", path=store.url)


def _folders_of(store: Store) -> list[str]:
    try:
        return sorted(store.folders())
    except StoreError:  # what is known of it already is worth more than this error
        return []


def _wrong(
    store: Store, file: str, wanted: int | str, found: int | None, says: str, cause: BaseException | None = None
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{store.url}: {file} {says}.", path=store.url, file=file, wanted=wanted, found=found, cause=cause
    )
