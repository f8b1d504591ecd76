"""The commit protocol: claim, publish, read back (DESIGN section 3; docs/design/002).

A save is two rows of small steps around the ranks' writing: :data:`BEGIN` on the coordinator before it, and
:data:`PUBLISH` after it. Each step is a function of one :class:`Attempt`; the rows are a record (:class:`Steps`) that
the test kit hands over with one step exchanged, to show which invariant that step holds up. The order is the protocol:
do not change it without running the search over its interleavings.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_storage import names
from dcp_storage.commit_object import create_commit, new_commit, utc_now
from dcp_storage.current import Current, list_commits, read_current, read_manifest
from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    ObjectExistsError,
    StoreError,
)
from dcp_storage.records import Manifest, ManifestRef, encode_manifest
from dcp_storage.store import Atomicity, Entry, Store
from dcp_storage.torchview import stock_pickle
from dcp_storage.view import settle_view

__all__ = ["BEGIN", "PUBLISH", "Attempt", "Step", "Steps", "begin", "publish"]


@dataclass
class Attempt:
    """One attempt to save, as its coordinator sees it.

    Attributes:
        store: the folder.
        token: who we are, in the commit and in names.
        overwrite: whether a live checkpoint may be replaced.
        assume_single_writer: the user's word for stores that cannot refuse a second create.
        asked: whether any rank holds a fresh question for plain names.
        number: the highest commit number of the first listing; ours will be one more.
        current: what readers see before us; None where nothing is committed.
        plain: whether the plain names are ours.
        claimed: whether ``.claim`` may be ours, so that we remove it.
        single_writer: whether the store cannot promise create-if-absent.
        listing: the first listing.
        manifest: what is to be committed.
        storage_data: the manifest's items as stock torch has them, where they were made already.
        ref: the manifest's name, size and CRC-32, once written.
        committed: whether the commit object is known to be there.
        made: the commit, where the store lets nobody replace it.
        world_size: ranks of this save.
        warnings: sentences for the report.
    """

    store: Store
    token: str
    overwrite: bool = False
    assume_single_writer: bool = False
    asked: bool = True
    number: int = 0
    current: Current | None = None
    plain: bool = False
    claimed: bool = False
    single_writer: bool = False
    listing: list[Entry] = field(default_factory=list)
    manifest: Manifest | None = None
    storage_data: dict[MetadataIndex, Any] | None = None
    ref: ManifestRef | None = None
    committed: bool = False
    made: Current | None = None
    world_size: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The folder, for messages."""
        return self.store.url


Step = Callable[[Attempt], None]


# -- before the ranks write --------------------------------------------------------------------------------------------


def look_at_store(attempt: Attempt) -> None:
    """Finds out what the store promises, and makes the folder."""
    attempt.single_writer = attempt.store.create_if_absent is not Atomicity.ATOMIC
    attempt.store.make_folder()
    if attempt.single_writer:
        attempt.warnings.append(
            f"{attempt.path}: this store does not promise create-if-absent. The checkpoint is safe against crashes as "
            "long as no other job saves to the same folder; the commit says so (single_writer)."
        )


def refuse(attempt: Attempt) -> None:
    """Lists the folder, keeps the number, and refuses what may not be overwritten, before any byte is written."""
    entries = attempt.listing = attempt.store.entries()
    attempt.number = max((names.commit_number(e.name) for e in entries), default=0)
    attempt.current = read_current(attempt.store, list_commits(entries))
    if any(names.rank_commit(e.name) is not None for e in entries):
        raise CheckpointExistsError(
            f"{attempt.path} holds a checkpoint that was saved without collectives; it cannot be overwritten. "
            "Save to another folder.",
            path=attempt.path,
        )
    live = attempt.current is not None and attempt.current.commit.state == "committed"
    # The view is written after a commit only: beside a commit that cannot be read it tells that there was one.
    view = attempt.current is None and any(names.is_stock_view(e.name) for e in entries)
    if not (live or view):
        return
    what = "a committed checkpoint"
    if not live:
        what = "a checkpoint whose commit cannot be read" if attempt.number else "a checkpoint that stock torch wrote"
    if not attempt.overwrite:
        raise CheckpointExistsError(
            f"{attempt.path} holds {what} already. Pass overwrite=True to replace it, or save to another folder.",
            path=attempt.path,
        )
    if attempt.single_writer and not attempt.assume_single_writer:
        raise CheckpointExistsError(
            f"{attempt.path} holds {what}, and this store cannot refuse a second writer. If no other job saves here, "
            "pass SaveOptions(assume_single_writer=True).",
            path=attempt.path,
        )


def claim(attempt: Attempt) -> None:
    """Takes the plain names, if the folder holds nothing of ours before and after the claim.

    On a store whose create is not atomic two attempts could both believe they hold the claim: they take tokens.
    """
    if attempt.single_writer or not attempt.asked or _blockers(attempt.listing):
        return
    body = f'{{"author":"{attempt.token}","time":"{utc_now()}"}}'.encode()
    try:
        attempt.store.create(names.CLAIM, body)
    except ObjectExistsError:
        return
    except StoreError as error:
        if not (error.ambiguous or error.transient):
            raise
        # It may be ours: never use the plain names on that, but take it away afterwards.
        attempt.claimed = error.ambiguous
        return
    attempt.claimed = True
    attempt.plain = _blockers(attempt.store.entries()) == {names.CLAIM}


BEGIN: tuple[Step, ...] = (look_at_store, refuse, claim)


# -- after the ranks have written --------------------------------------------------------------------------------------


def check_files(attempt: Attempt) -> None:
    """Lists once more: every file that a rank reported is there, with its size, and so is the number we go on from.

    A void that was swept meanwhile gives its numbers free: another save may have committed under a lower one, which
    ours would replace unseen.
    """
    manifest = _manifest(attempt)
    entries = attempt.store.entries()
    highest = max((names.commit_number(e.name) for e in entries), default=0)
    if highest < attempt.number:
        raise CheckpointExistsError(
            f"{attempt.path}: commit object {attempt.number}, which this save was to follow, was swept by a prune "
            "meanwhile. Nothing was committed: save again.",
            path=attempt.path,
        )
    sizes = {e.name: e.size for e in entries}
    for record in manifest.files:
        if sizes.get(record.name) != record.size:
            found = sizes.get(record.name)
            raise CorruptCheckpointError(
                f"{attempt.path}: rank {record.rank} wrote {record.name} with {record.size} bytes, but the coordinator "
                f"finds {'none of it' if found is None else f'{found} bytes'}. Do all ranks share this folder?",
                path=attempt.path,
                file=record.name,
                wanted=record.size,
                found=found,
            )


def write_manifest(attempt: Attempt) -> None:
    """Writes the manifest under a name of this attempt."""
    data = encode_manifest(_manifest(attempt))
    crc = zlib.crc32(data)
    name = names.manifest_name(None if attempt.plain else attempt.token)
    attempt.store.put(name, [memoryview(data)], crc32=crc)
    attempt.ref = ManifestRef(name, len(data), crc)


def make_commit(attempt: Attempt) -> None:
    """Creates commit object n+1, if absent: the one step that commits."""
    commit = new_commit(
        attempt.number + 1,
        attempt.token,
        manifest=attempt.ref,
        world_size=attempt.world_size,
        single_writer=attempt.single_writer,
    )
    create_commit(attempt.store, commit)
    attempt.committed = True
    if not attempt.single_writer:  # else another writer may have replaced it
        attempt.made = Current(commit.number, commit)


def write_view(attempt: Attempt) -> None:
    """Writes ``.metadata`` for stock readers, if ours is still the highest commit, and makes it agree with that."""
    try:
        current = read_current(attempt.store, known=attempt.made)
        if current is not None and current.commit.manifest == attempt.ref:
            data, warning = stock_pickle(_manifest(attempt), attempt.storage_data)
            if warning:
                attempt.warnings.append(warning)
            attempt.store.put(names.STOCK_VIEW, [memoryview(data)], crc32=zlib.crc32(data))
            settle_view(attempt.store, attempt.ref, attempt.made)
    except Exception as error:  # noqa: BLE001 - the checkpoint stands, whatever goes wrong with the view of it
        attempt.warnings.append(
            f"{attempt.path}: the checkpoint is committed, but its stock view .metadata could not be written: {error}"
        )


def remove_claim(attempt: Attempt) -> None:
    """Takes our claim away."""
    if attempt.claimed:
        _tidy(attempt, [names.CLAIM])


def remove_replaced(attempt: Attempt) -> None:
    """Removes the files that the replaced commit names and ours does not."""
    if attempt.current is None or attempt.current.commit.manifest is None:
        return
    ref = attempt.current.commit.manifest
    kept = {record.name for record in _manifest(attempt).files} | {attempt.ref.name if attempt.ref else ""}
    try:
        old = read_manifest(attempt.store, attempt.current)
    except CheckpointError as error:
        attempt.warnings.append(f"{attempt.path}: what was replaced could not be removed; prune will: {error}")
        return
    named = [*(record.name for record in old.files), ref.name]
    _tidy(attempt, [name for name in named if name not in kept and names.is_ours(name)])


PUBLISH: tuple[Step, ...] = (
    check_files,
    write_manifest,
    make_commit,
    write_view,
    remove_claim,
    remove_replaced,
)


@dataclass(frozen=True)
class Steps:
    """The rows of steps of a save; the test kit exchanges some to show what each is for.

    Attributes:
        begin: what the coordinator does before the ranks write.
        publish: what it does after they have written.
    """

    begin: tuple[Step, ...] = BEGIN
    publish: tuple[Step, ...] = PUBLISH


def begin(attempt: Attempt, steps: Steps) -> None:
    """Runs the steps before the ranks write; raises what refuses the save."""
    for step in steps.begin:
        step(attempt)


def publish(attempt: Attempt, manifest: Manifest, steps: Steps) -> None:
    """Runs the steps after all ranks have written: when it returns, the checkpoint is committed.

    Raises:
        CheckpointExistsError: another save committed first.
        CommitUnknownError: it cannot be known whether the commit was made; nothing was deleted.
        CorruptCheckpointError: a file that a rank reported is not there.
        StoreError: the store failed before the commit.
    """
    attempt.manifest = manifest
    for step in steps.publish:
        step(attempt)


# -- small things ------------------------------------------------------------------------------------------------------


def _manifest(attempt: Attempt) -> Manifest:
    if attempt.manifest is None:
        raise CheckpointError("publish was not given a manifest.", path=attempt.path, kind="protocol")
    return attempt.manifest


def _blockers(entries: Iterable[Entry]) -> set[str]:
    return {e.name for e in entries if names.blocks_claim(e.name)}


def _tidy(attempt: Attempt, old: list[str]) -> None:
    """Removes files after the commit; a failure is a warning, since the checkpoint stands and prune will see to it."""
    try:
        attempt.store.delete(old)
    except StoreError as error:
        attempt.warnings.append(f"{attempt.path}: not everything that is not needed could be removed: {error}")
