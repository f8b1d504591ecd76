"""Saving and loading without collectives: every rank commits for itself, and a label holds the ranks together.

With ``dcp.save(..., use_collectives=False)`` no rank hears of another. Each writes its files, a manifest of its own and
a commit of its own (``__<rank>.commit``), all under one label. The promise is per rank: a load refuses ranks of
different saves and a rank that is missing, but nothing replaces such a checkpoint in one step, so overwriting is
refused.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch.distributed as dist

from dcp_storage import names
from dcp_storage.commit import Attempt, check_files, look_at_store
from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.current import Current, list_commits, read_current, read_manifest
from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NotCommittedError,
    ObjectNotFoundError,
    UntrustedDataError,
)
from dcp_storage.records import MAX_COMMIT, Commit, Manifest, ManifestRef, decode_commit, encode_manifest
from dcp_storage.store import Entry, Store
from dcp_storage.torchview import stock_pickle

__all__ = ["agree_on_label", "begin_rank", "holds_lone_ranks", "publish_rank", "read_rank"]

_MOST_NAMED = 8  # ranks or labels in one sentence
_PATIENCE = timedelta(seconds=300)  # for the rank that names the label; torch's own default for its store is the same


def agree_on_label(
    given: str | None, ranks: int | None, rank: int, token: str, folder: str, count: int
) -> tuple[str, int]:
    """The label of this save, and how many ranks it has.

    Args:
        given: ``SaveOptions.label``.
        ranks: ``SaveOptions.lone_ranks``.
        rank: this rank, as torch counts the ranks of this save.
        token: a fresh token of this rank; the label where it is rank 0 or alone.
        folder: the checkpoint's folder.
        count: how many saves this writer has begun to that folder; the same on all ranks.

    Raises:
        CheckpointError: it cannot be known how many ranks there are, or rank 0 named no label in time.
    """
    if ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return given or token, ranks or 1
    world_size = dist.get_world_size()
    if ranks is None and rank != dist.get_rank():
        raise CheckpointError(
            f"{folder}: without collectives the ranks of this save are not those of the default group, so nobody knows "
            "how many they are. Pass SaveOptions(lone_ranks=, label=); with no_dist=True, lone_ranks=1.",
            path=folder,
            kind="label",
        )
    if given is not None or world_size == 1:
        return given or token, ranks or world_size
    if ranks is not None and ranks != world_size:
        raise CheckpointError(
            f"{folder}: {ranks} of the {world_size} ranks of this job save without collectives; they cannot agree on a "
            "label by themselves. Pass SaveOptions(label=).",
            path=folder,
            kind="label",
        )
    store = dist.distributed_c10d._get_default_store()
    key = f"dcp_storage/label/{zlib.crc32(folder.encode())}/{count}"
    if dist.get_rank() == 0:
        store.set(key, token)
        return token, world_size
    try:
        store.wait([key], _PATIENCE)
        return store.get(key).decode(), world_size
    except RuntimeError as error:  # torch's DistStoreError, and what its stores raise besides
        raise CheckpointError(
            f"{folder}: rank 0 named no label for this save within {_PATIENCE.seconds} s. Pass SaveOptions(label=).",
            path=folder,
            kind="label",
            cause=error,
        ) from error


def begin_rank(attempt: Attempt, rank: int, label: str) -> None:
    """Looks at the folder and refuses whatever is committed there, by this rank or under another label."""
    look_at_store(attempt)
    entries = attempt.store.entries()
    attempt.current = read_current(attempt.store, list_commits(entries))
    taken = (attempt.current is not None and attempt.current.commit.state == "committed") or any(
        names.is_stock_view(e.name) and e.name not in _own_views(entries) for e in entries
    )
    others = [read_rank_commit(attempt.store, r) for r in _ranks(entries)]
    if taken or any(c is not None and (c.rank == rank or c.label != label) for c in others):
        raise CheckpointExistsError(
            f"{attempt.path} holds a checkpoint already. Without collectives nothing can be overwritten: save to "
            "another folder.",
            path=attempt.path,
        )


def publish_rank(attempt: Attempt, manifest: Manifest, rank: int, label: str) -> None:
    """Commits what this rank wrote.

    Raises:
        CheckpointExistsError: another attempt committed for this rank first.
        CommitUnknownError: it cannot be known whether the commit was made.
        CorruptCheckpointError: a file that was written is not there.
        StoreError: the store failed before the commit.
    """
    attempt.manifest = manifest
    check_files(attempt)
    data = encode_manifest(manifest)
    ref = ManifestRef(names.rank_manifest_name(rank, attempt.token), len(data), zlib.crc32(data))
    attempt.store.put(ref.name, [memoryview(data)], crc32=ref.crc32)
    attempt.ref = ref
    commit = new_commit(
        1,
        attempt.token,
        manifest=ref,
        world_size=attempt.world_size,
        single_writer=attempt.single_writer,
        rank=rank,
        label=label,
    )
    create_commit(attempt.store, commit)
    attempt.committed = True
    view, warning = stock_pickle(manifest)
    if warning:
        attempt.warnings.append(warning)
    try:
        attempt.store.put(names.rank_view_name(rank), [memoryview(view)], crc32=zlib.crc32(view))
    except CheckpointError as error:
        attempt.warnings.append(f"{attempt.path}: the view of rank {rank} for stock readers was not written: {error}")


def holds_lone_ranks(entries: Iterable[Entry]) -> bool:
    """Whether a folder holds commits of single ranks, and none of a whole save."""
    entries = list(entries)
    return bool(_ranks(entries)) and not list_commits(entries)


def read_rank(store: Store, rank: int) -> tuple[Commit, Manifest]:
    """What one rank committed, after a look at all of them.

    Raises:
        NotCommittedError: a rank has not committed.
        CorruptCheckpointError: the ranks are of different saves; or the manifest is not what was committed.
        IncompatibleCheckpointError: the save had fewer ranks than this load.
    """
    there = _ranks(store.entries())
    found = {r: read_rank_commit(store, r) for r in there}
    commits = {r: commit for r, commit in found.items() if commit is not None}
    labels = {commit.label for commit in commits.values()}
    sizes = {commit.world_size for commit in commits.values()}
    if len(labels) > 1 or len(sizes) > 1:
        raise CorruptCheckpointError(
            f"{store.url}: the ranks' commits are of different saves (labels {_listed(map(str, labels))}; of "
            f"{_listed(map(str, sizes))} ranks).",
            path=store.url,
            file=_odd_one(commits),
            wanted=1,
            found=max(len(labels), len(sizes)),
        )
    size = max(sizes, default=1)
    # Not all numbers up to what a commit says: it may say any.
    missing = list(itertools.islice((r for r in range(size) if r not in commits), _MOST_NAMED + 1))
    if missing:
        more = " and others have" if len(missing) > _MOST_NAMED else " has"
        torn = [names.rank_commit_name(r) for r in missing if r in there]
        why = f" ({', '.join(torn)} is there, but torn or altered)" if torn else ""
        raise NotCommittedError(
            f"{store.url}: of the {size} ranks that saved without collectives, rank "
            f"{', '.join(map(str, missing[:_MOST_NAMED]))}{more} not committed{why}.",
            path=store.url,
            key=torn[0] if torn else names.rank_commit_name(missing[0]),
        )
    if rank not in commits:
        raise IncompatibleCheckpointError(
            f"{store.url}: saved without collectives by {len(commits)} ranks, it has nothing for rank {rank}. Load it "
            f"on {len(commits)} ranks.",
            path=store.url,
        )
    commit = commits[rank]
    return commit, read_manifest(store, Current(commit.number, commit))


def read_rank_commit(store: Store, rank: int) -> Commit | None:
    """A rank's commit; None where there is none, its body fails its check, or it is a copy of another's."""
    name = names.rank_commit_name(rank)
    try:
        commit = decode_commit(store.read(name, limit=MAX_COMMIT), path=store.url, file=name)
    except (ObjectNotFoundError, CorruptCheckpointError, UntrustedDataError):
        return None
    return commit if commit.rank == rank else None


def _listed(said: Iterable[str]) -> str:
    """Some of what commits say, shortened: it may be long, and there may be many."""
    found = sorted(said)
    return ", ".join(f"{text:.40}" for text in found[:_MOST_NAMED]) + (", …" if len(found) > _MOST_NAMED else "")


def _odd_one(commits: Mapping[int, Commit]) -> str:
    """The commit object of the rank that has the fewest with it."""
    saves = {rank: (commit.label, commit.world_size) for rank, commit in commits.items()}
    counts = Counter(saves.values())
    return names.rank_commit_name(min(saves, key=lambda rank: (counts[saves[rank]], -rank)))


def _ranks(entries: Iterable[Entry]) -> list[int]:
    return sorted(r for r in (names.rank_commit(e.name) for e in entries) if r is not None)


def _own_views(entries: Iterable[Entry]) -> set[str]:
    return {names.rank_view_name(rank) for rank in _ranks(entries)}
