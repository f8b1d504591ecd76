"""What a checkpoint is: state, size, files, keys, and how each tensor is cut over files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_storage import names
from dcp_storage.current import list_commits, nothing_committed, read_current, read_manifest
from dcp_storage.errors import CheckpointNotFoundError
from dcp_storage.options import Problem, Report
from dcp_storage.records import Commit, Manifest, TensorEntry
from dcp_storage.tools.opening import Folder, folder_at

__all__ = ["Description", "KeyDescription", "Piece", "State", "describe", "describe_folder"]


@dataclass(frozen=True)
class Piece:
    """One chunk of a tensor, or an object: where it is in the whole and where its bytes are.

    Attributes:
        offsets: where it begins in the whole tensor; empty for an object.
        sizes: its size; empty for an object.
        file: name of the file.
        rank: the rank that wrote it.
        nbytes: bytes of the item in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    rank: int
    nbytes: int


@dataclass(frozen=True)
class KeyDescription:
    """One key of the state dict.

    Attributes:
        kind: ``tensor`` or ``object``.
        dtype: element type of a tensor, None for an object.
        shape: of the whole tensor; empty for an object.
        nbytes: bytes of its items in the files.
        pieces: where they are.
    """

    kind: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    pieces: tuple[Piece, ...]


class State:
    """What a folder can be: the strings of :attr:`Description.state`."""

    COMMITTED = "committed"
    DELETED = "deleted"
    UNFINISHED = "unfinished"
    STOCK = "stock"
    RANK_BY_RANK = "rank-by-rank"
    EMPTY = "empty"


@dataclass
class Description(Report):
    """A checkpoint from the outside.

    Attributes:
        state: one of the strings of :class:`State`.
        says: one sentence on it.
        commit: number of the highest commit; None where there is none.
        time: when it committed, UTC, by the author's clock.
        age: seconds since, by the store's clock; None where the store does not tell.
        world_size: ranks of the save.
        torch: version of torch that saved.
        package: version of this package that saved.
        single_writer: whether the store could not promise create-if-absent.
        files: file name → bytes.
        nbytes: bytes of all files.
        keys: key → what it is.
        loose: names of files of ours that no commit names.
    """

    state: str = State.EMPTY
    says: str = ""
    commit: int | None = None
    time: str | None = None
    age: float | None = None
    world_size: int | None = None
    torch: str | None = None
    package: str | None = None
    single_writer: bool = False
    files: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    keys: dict[str, KeyDescription] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)


def describe(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Description:
    """Says what is in a folder, from its listing, its commit and its manifest; reads no tensor.

    Args:
        path: a checkpoint's folder.
        storage_options: handed to fsspec.

    Raises:
        CorruptCheckpointError: the manifest is gone or altered.
        IncompatibleCheckpointError: it is of a later format.
        StoreError: the store failed.
    """
    return describe_folder(folder_at(path, storage_options), with_keys=True)


def describe_folder(folder: Folder, *, with_keys: bool) -> Description:
    """As :func:`describe`, of an opened folder.

    Args:
        folder: the folder.
        with_keys: whether the manifest is read; without it the sizes are those of the listing.
    """
    opened = folder.open()
    store = opened.store
    report = Description(store.url)
    try:
        entries = store.entries()
        current = read_current(store, list_commits(entries))
        ours = {e.name: e for e in entries if names.is_ours(e.name)}
        if current is None or current.commit.manifest is None:
            error = nothing_committed(store, current)
            report.says = str(error)
            report.state = _state_without_commit(error, deleted=current is not None, listed=set(ours))
            report.commit = current.number if current else None
            report.loose = sorted(name for name in ours if not names.commit_number(name))
            report.files = {name: ours[name].size for name in report.loose}
            report.nbytes = sum(report.files.values())
            if report.state != State.STOCK:
                report.problems.append(Problem(error.kind, advice=str(error)))
            return report
        _fill_commit(report, current.commit, current.number)
        commit_entry = ours.get(names.commit_name(current.number))
        if commit_entry is not None and commit_entry.modified is not None:
            report.age = max(store.now() - commit_entry.modified, 0.0) if with_keys else None
        if with_keys:
            manifest = read_manifest(store, current)
            _fill_manifest(report, manifest)
            named = {*report.files, current.commit.manifest.name, names.STOCK_VIEW}
            report.loose = sorted(n for n in ours if not names.commit_number(n) and n not in named)
        else:
            report.files = {n: e.size for n, e in ours.items() if n.endswith(".distcp")}
        report.nbytes = sum(report.files.values())
        return report
    finally:
        opened.count_into(report)
        store.close()


def _state_without_commit(error: CheckpointNotFoundError, *, deleted: bool, listed: set[str]) -> str:
    if deleted:
        return State.DELETED
    if any(names.rank_commit(name) is not None for name in listed):
        return State.RANK_BY_RANK
    if any(names.is_stock_view(name) for name in listed):
        return State.STOCK
    return State.UNFINISHED if error.kind == "not-committed" else State.EMPTY


def _fill_commit(report: Description, commit: Commit, number: int) -> None:
    report.state = State.COMMITTED
    report.says = f"committed at {commit.time} by {commit.world_size} ranks (commit {number})"
    report.commit = number
    report.time = commit.time
    report.world_size = commit.world_size
    report.torch = commit.torch
    report.package = commit.package
    report.single_writer = commit.single_writer


def _fill_manifest(report: Description, manifest: Manifest) -> None:
    report.files = {record.name: record.size for record in manifest.files}
    pieces: dict[str, list[Piece]] = {key: [] for key in manifest.entries}
    for item in manifest.items:
        record = manifest.files[item.file]
        sizes = item.shape or _chunk_sizes(manifest, item.key, item.offsets)
        pieces.setdefault(item.key, []).append(Piece(item.offsets or (), sizes, record.name, record.rank, item.length))
    for key, entry in manifest.entries.items():
        found = tuple(pieces[key])
        is_tensor = isinstance(entry, TensorEntry)
        report.keys[key] = KeyDescription(
            "tensor" if is_tensor else "object",
            entry.dtype if isinstance(entry, TensorEntry) else None,
            tuple(entry.size) if isinstance(entry, TensorEntry) else (),
            sum(piece.nbytes for piece in found),
            found,
        )


def _chunk_sizes(manifest: Manifest, key: str, offsets: tuple[int, ...] | None) -> tuple[int, ...]:
    entry = manifest.entries.get(key)
    if isinstance(entry, TensorEntry):
        for chunk in entry.chunks:
            if chunk.offsets == offsets:
                return tuple(chunk.sizes)
    return ()
