"""Whether a checkpoint is whole: its commit and manifest, the sizes of its files, every byte of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsspec.callbacks import Callback

from dcp_storage import names
from dcp_storage.current import blame, list_commits, nothing_committed, read_current, read_manifest
from dcp_storage.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UntrustedDataError,
)
from dcp_storage.lone import holds_lone_ranks, read_rank
from dcp_storage.options import LoadOptions
from dcp_storage.records import Manifest
from dcp_storage.session import phase
from dcp_storage.store import Entry, Store
from dcp_storage.tools.drawing import count_text, size_text
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport, problem_of
from dcp_storage.tools.verify_data import check_data
from dcp_storage.tools.verify_view import check_view

__all__ = ["DEPTHS", "Verification", "verify", "verify_folder"]

DEPTHS = ("commit", "sizes", "data")


@dataclass
class Verification(ToolReport):
    """What is wrong with a checkpoint; ``ok`` where nothing was found at this depth.

    The problems' kinds: ``torn-commit`` and ``manifest`` (what says what the checkpoint is cannot be read),
    ``missing``, ``short``, ``long`` (files), ``altered`` (bytes). A stale or missing stock view, and files that no
    commit names, are warnings.

    Attributes:
        depth: how far it was looked.
        sample: the share of blocks that was read, None where it was all.
        commit: number of the commit; None where the ranks committed for themselves.
        files: how many files the manifest names.
        nbytes: bytes in them.
        bytes_read: bytes that were read and held against their CRC-32.
        repaired: whether the stock view was rewritten.
    """

    depth: str = "sizes"
    sample: float | None = None
    commit: int | None = None
    files: int = 0
    nbytes: int = 0
    bytes_read: int = 0
    repaired: bool = False


def verify(
    path: str | os.PathLike[str],
    depth: str = "sizes",
    *,
    sample: float | None = None,
    seed: int = 0,
    repair: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    callback: Callback | None = None,
) -> Verification:
    """Looks for all that is wrong with a committed checkpoint, and says what to do about each thing.

    Args:
        path: the checkpoint's folder.
        depth: ``"commit"``: the commit object and the manifest. ``"sizes"`` (default): also every file's size, by one
            listing however many files there are. ``"data"``: also every byte, against the CRC-32s of blocks, items and
            files, within ``options.memory_budget``.
        sample: with ``"data"``: the share of blocks to read, more than 0 and at most 1, chosen at random but alike
            each time. Default: all.
        seed: with ``sample``: another number chooses other blocks. Default 0.
        repair: rewrite a stock view (``.metadata``) that is missing or stale. Default False: only say so.
        storage_options: handed to fsspec.
        options: concurrency, part size, memory budget, retries.
        callback: an fsspec Callback that is told of bytes read.

    Raises:
        CheckpointNotFoundError: there is no checkpoint; NotCommittedError where no commit stands.
        CheckpointReplacedError: another save committed meanwhile. Verify again.
        IncompatibleCheckpointError: it is of a later format.
        ValueError: an unknown depth, or a ``sample`` out of its range or without ``"data"``.
        StoreError: the store failed.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {', '.join(DEPTHS)}, not {depth!r}.")
    if sample is not None and (depth != "data" or not 0 < sample <= 1):
        raise ValueError(f'sample is a share of blocks, more than 0 and at most 1, for depth "data"; not {sample}.')
    folder = folder_at(path, storage_options, options)
    return verify_folder(folder, depth, sample=sample, seed=seed, repair=repair, callback=callback)


def verify_folder(
    folder: Folder,
    depth: str,
    *,
    sample: float | None = None,
    seed: int = 0,
    repair: bool = False,
    callback: Callback | None = None,
) -> Verification:
    """As :func:`verify`, of a folder that may be opened through a wrapper."""
    report = Verification(folder.location.url, depth=depth, sample=sample)
    opened = folder.open()
    store = opened.store
    try:
        with phase(report, "commit"):
            entries = _listed(store)
            manifests = list(_standing(report, store, entries))
        report.files = sum(len(manifest.files) for manifest in manifests)
        report.nbytes = sum(record.size for manifest in manifests for record in manifest.files)
        if depth != "commit":
            with phase(report, "sizes"):
                whole = _check_sizes(report, manifests, entries)
        if depth == "data":
            with phase(report, "data"):
                check_data(report, store, manifests, whole, folder.options, sample, seed, callback)
        _look_again(report, store)
        if report.commit is not None and manifests:
            with phase(report, "view"):
                check_view(report, store, manifests[0], entries, repair=repair)
        if manifests:
            _note_leftovers(report, manifests, entries)
    finally:
        opened.count_into(report)
        store.close()
    return report


def _listed(store: Store) -> list[Entry]:
    try:
        return store.entries()
    except ObjectNotFoundError as error:  # the bucket itself
        raise nothing_committed(store, None) from error


def _standing(report: Verification, store: Store, entries: Sequence[Entry]) -> Iterator[Manifest]:
    """The manifest of what stands, or those of the ranks; notes what cannot be read."""
    numbers = list_commits(entries)
    current = read_current(store, numbers)
    if current is None and holds_lone_ranks(entries):
        yield from _of_ranks(report, store, entries)
        return
    if numbers and numbers[0] > (current.number if current else 0):
        name = names.commit_name(numbers[0])
        counts = f"commit {current.number} is what loads find" if current else "nothing else is committed here"
        report.problem(
            "torn-commit",
            f"{name} is torn or altered; {counts}. Restore it from a copy, or save again with overwrite=True.",
            file=name,
            wanted=f"commit {numbers[0]}",
            found=f"commit {current.number}" if current else None,
        )
        if current is None:
            return
    if current is None or current.commit.manifest is None:
        raise nothing_committed(store, current)
    report.commit = current.number
    try:
        yield read_manifest(store, current)
    except (CorruptCheckpointError, UntrustedDataError) as error:
        found = blame(store, current.number, error)
        if isinstance(found, CheckpointReplacedError):
            raise found from error
        said = problem_of(error)
        report.problem(
            "manifest",
            f"{error} Nothing can be loaded without it: restore it from a copy, or use an older checkpoint.",
            file=current.commit.manifest.name,
            key=said.key,
            wanted=said.wanted,
            found=said.found,
        )


def _of_ranks(report: Verification, store: Store, entries: Sequence[Entry]) -> Iterator[Manifest]:
    for rank in sorted(r for r in (names.rank_commit(e.name) for e in entries) if r is not None):
        try:
            yield read_rank(store, rank)[1]
        except (CorruptCheckpointError, UntrustedDataError) as error:
            said = problem_of(error)
            file = said.file or names.rank_commit_name(rank)
            report.problem("manifest", said.advice, file=file, key=said.key, wanted=said.wanted, found=said.found)


def _check_sizes(report: Verification, manifests: Sequence[Manifest], entries: Sequence[Entry]) -> set[str]:
    """Holds every file's size against the listing; returns the names of those that are right."""
    sizes = {e.name: e.size for e in entries}
    whole = set()
    for manifest in manifests:
        keys: dict[int, set[str]] = {}
        for item in manifest.items:
            keys.setdefault(item.file, set()).add(item.key)
        for number, record in enumerate(manifest.files):
            found = sizes.get(record.name)
            if found == record.size:
                whole.add(record.name)
                continue
            kind = "missing" if found is None else "short" if found < record.size else "long"
            concerned = sorted(keys.get(number, ()))
            report.problem(
                kind,
                f"Restore {record.name} from a copy, or use an older checkpoint{_refused(concerned)}.",
                file=record.name,
                key=concerned[0] if len(concerned) == 1 else None,
                wanted=record.size,
                found=found,
            )
    return whole


def _look_again(report: Verification, store: Store) -> None:
    """Where something is wrong, makes sure that it is not because the checkpoint was replaced meanwhile."""
    if not report.problems or report.commit is None:
        return
    current = read_current(store)
    if current is None or current.number != report.commit:
        raise CheckpointReplacedError(
            f"{report.path}: another save committed, or the checkpoint was deleted, while it was being verified "
            f"(commit {report.commit} → {current.number if current else 'none'}). Verify again.",
            path=report.path,
        )


def _note_leftovers(report: Verification, manifests: Sequence[Manifest], entries: Sequence[Entry]) -> None:
    named = {record.name for manifest in manifests for record in manifest.files}
    loose = [e for e in entries if e.name.endswith(".distcp") and names.is_ours(e.name) and e.name not in named]
    if loose:
        report.warn(
            f"{report.path}: of no commit: {count_text(len(loose), 'file')} with "
            f"{size_text(sum(e.size for e in loose))}, left by an interrupted save, or of one that is under way. prune "
            "removes what is old."
        )


def _refused(keys: Sequence[str]) -> str:
    """What cannot be loaded for a file: the keys that have bytes in it."""
    if not keys:
        return ""
    few = ", ".join(map(repr, keys)) if len(keys) <= 3 else f"{keys[0]!r} and {len(keys) - 1} more keys"
    return f"; loading {few} is refused"
