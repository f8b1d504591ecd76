"""What a checkpoint is: its state, its commit, its files, its keys, and how each tensor is cut over files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_storage import names
from dcp_storage.current import list_commits, nothing_committed, read_current, read_manifest
from dcp_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NotCommittedError,
    UntrustedDataError,
)
from dcp_storage.options import LoadOptions
from dcp_storage.records import Commit, Manifest, TensorEntry
from dcp_storage.store import Entry, Store
from dcp_storage.tools.drawing import Box, draw, size_text
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport, problem_of

__all__ = [
    "COMMITTED",
    "DAMAGED",
    "NOTHING",
    "RANK_BY_RANK",
    "STOCK",
    "UNFINISHED",
    "VOID",
    "Description",
    "KeyDescription",
    "Piece",
    "describe",
    "describe_folder",
]

COMMITTED = "committed"
VOID = "void"
UNFINISHED = "unfinished"
STOCK = "stock"
RANK_BY_RANK = "rank-by-rank"
DAMAGED = "damaged"
NOTHING = "nothing"

_UNREADABLE = (CorruptCheckpointError, IncompatibleCheckpointError, UntrustedDataError)


@dataclass(frozen=True)
class Piece:
    """One chunk of a tensor, or an object: where it is in the whole and where its bytes are.

    Attributes:
        offsets: where it begins in the whole tensor; empty for an object.
        sizes: its size; empty for an object.
        file: name of the file.
        rank: the rank that wrote it.
        offset: first byte in the file.
        nbytes: bytes of the item in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    rank: int
    offset: int
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
        values: text of the values that were asked for, None where none were.
    """

    kind: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    pieces: tuple[Piece, ...]
    values: str | None = None

    def drawing(self) -> str:
        """How the tensor is cut over files: a grid of numbered pieces, and a line for each; one line for an object."""
        lines = []
        if self.kind == "tensor":
            boxes = [Box(str(number), piece.offsets, piece.sizes) for number, piece in enumerate(self.pieces)]
            grid = draw(self.shape, boxes)
            lines += [grid] if grid else []
        for number, piece in enumerate(self.pieces):
            box = ", ".join(f"{at}:{at + size}" for at, size in zip(piece.offsets, piece.sizes, strict=True))
            where = f"  [{box}]" if self.kind == "tensor" else ""
            lines.append(
                f"{number}{where}  rank {piece.rank}  {piece.file} at {piece.offset}  {size_text(piece.nbytes)}"
            )
        return "\n".join(lines)


@dataclass
class Description(ToolReport):
    """A checkpoint from the outside.

    Attributes:
        state: ``committed``; ``void`` (deleted); ``unfinished`` (files, but no commit); ``stock`` (written by stock
            torch, no commit); ``rank-by-rank`` (saved without collectives); ``damaged`` (its commit or manifest cannot
            be read); ``nothing``.
        says: one sentence on it.
        commit: number of the highest commit; None where there is none.
        author: token of the attempt that made it.
        time: when it committed, UTC, by the author's clock.
        modified: when the commit object was written, seconds since the epoch by the store's clock; None where the
            store does not say.
        world_size: ranks of the save; None where it is not known.
        torch: version of torch that saved.
        package: version of this package that saved.
        single_writer: whether the store could not promise create-if-absent.
        stock_view: whether there is a ``.metadata`` for stock readers.
        files: the checkpoint's files by name, with their bytes.
        nbytes: bytes of all these files.
        keys: key → what it is; only the one that was asked for, where one was.
        leftovers: files of ours that no commit names, with their bytes: of dead attempts, or of a save in flight.
    """

    state: str = NOTHING
    says: str = ""
    commit: int | None = None
    author: str | None = None
    time: str | None = None
    modified: float | None = None
    world_size: int | None = None
    torch: str | None = None
    package: str | None = None
    single_writer: bool = False
    stock_view: bool = False
    files: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    keys: dict[str, KeyDescription] = field(default_factory=dict)
    leftovers: dict[str, int] = field(default_factory=dict)


def describe(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    values: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> Description:
    """Says what is in a folder, from its listing, its commit and its manifest; reads tensors only where asked to.

    A folder without a commit that stands is described too, with a problem that says so; so are files whose sizes are
    not as committed. What is in the files is for ``verify``.

    Args:
        path: a checkpoint's folder.
        key: describe only this key. Default: all.
        values: with ``key``: how many elements along each dimension are read, from the tensor's first on; 0 reads
            none. An object is shown whole, up to 2,000 characters. Default 0.
        storage_options: handed to fsspec.
        options: retries and deadlines, and ``trusted_globals`` for stock checkpoints and objects.

    Raises:
        KeyError: the checkpoint has no such key.
        ValueError: ``values`` is negative, or given without a key.
        UntrustedDataError: a stock checkpoint's metadata, or an object, asks for a global outside the allow-list.
        StoreError: the store failed.
    """
    if values < 0 or (values and key is None):
        raise ValueError(f"values is a number of elements of one key, not {values} of {key!r}.")
    return describe_folder(folder_at(path, storage_options, options), key, values=values)


def describe_folder(folder: Folder, key: str | None = None, *, values: int = 0) -> Description:
    """As :func:`describe`, of a folder that may be opened through a wrapper."""
    opened = folder.open()
    report = Description(folder.location.url)
    try:
        _look(report, opened.store, folder)
        opened.count_into(report)
    finally:
        opened.store.close()
    if key is not None and report.state in (COMMITTED, STOCK, RANK_BY_RANK):
        if key not in report.keys:
            raise KeyError(key)
        report.keys = {key: report.keys[key]}
        if values:
            from dcp_storage.tools.values import values_of  # needs torch, which the rest does not

            found = report.keys[key]
            rank = found.pieces[0].rank if report.state == RANK_BY_RANK and found.pieces else None
            report.keys[key] = dataclasses.replace(found, values=values_of(folder, key, values, rank))
    return report


def _look(report: Description, store: Store, folder: Folder) -> None:
    try:
        entries = store.entries()
    except FileNotFoundError as missing:  # the bucket itself
        return _not_committed(report, nothing_committed(store, None), {}, str(missing))
    ours = {e.name: e for e in entries if names.is_ours(e.name)}
    report.stock_view = names.STOCK_VIEW in ours
    try:
        current = read_current(store, list_commits(entries))
    except IncompatibleCheckpointError as error:
        return _damaged(report, error)
    if current is None or current.commit.manifest is None:
        if current is None and any(names.rank_commit(name) is not None for name in ours):
            return _rank_by_rank(report, store, ours)
        if current is None and not list_commits(entries) and report.stock_view:
            return _stock(report, store, folder, entries)
        nothing = nothing_committed(store, current)
        _not_committed(report, nothing, ours, str(nothing))
        if current is not None:
            report.state = VOID
            _note_commit(report, current.commit)
        elif list_commits(entries):
            report.state = DAMAGED
        return None
    _note_commit(report, current.commit)
    commit_name = names.commit_name(current.number)
    report.modified = next((e.modified for e in entries if e.name == commit_name), None)
    torn = max(list_commits(entries)) > current.number
    if torn:
        name = names.commit_name(max(list_commits(entries)))
        report.problem(
            "torn-commit",
            f"It is torn or altered; commit {current.number} is what loads find. Restore it from a copy, or save again "
            "with overwrite=True.",
            file=name,
        )
    try:
        manifest = read_manifest(store, current)
    except _UNREADABLE as error:
        return _damaged(report, error)
    report.state = COMMITTED
    report.says = f"committed at {current.commit.time} by {_ranks(current.commit.world_size)} (commit {current.number})"
    _fill(report, [manifest])
    _note_sizes(report, entries)
    named = {*report.files, current.commit.manifest.name, names.STOCK_VIEW}
    report.leftovers = {n: e.size for n, e in ours.items() if not names.commit_number(n) and n not in named}
    return None


def _note_sizes(report: Description, entries: Sequence[Entry]) -> None:
    """Files that the listing, which was made anyway, shows not to be as committed."""
    sizes = {e.name: e.size for e in entries}
    for name, wanted in report.files.items():
        found = sizes.get(name)
        if found != wanted:
            kind = "missing" if found is None else "short" if found < wanted else "long"
            advice = "Restore it from a copy, or use an older checkpoint; verify says which keys are concerned."
            report.problem(kind, advice, file=name, wanted=wanted, found=found)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _damaged(report: Description, error: CheckpointError) -> None:
    report.state = DAMAGED
    report.says = str(error)
    advice = "Nothing can be loaded as it is: restore the file from a copy, or use an older checkpoint."
    if isinstance(error, IncompatibleCheckpointError):
        advice = str(error)
    report.problems.append(problem_of(error, advice))


def _not_committed(report: Description, error: CheckpointNotFoundError, ours: Mapping[str, Entry], says: str) -> None:
    report.says = says
    report.state = UNFINISHED if isinstance(error, NotCommittedError) else NOTHING
    report.problems.append(problem_of(error))
    report.leftovers = {name: e.size for name, e in sorted(ours.items()) if not names.commit_number(name)}


def _note_commit(report: Description, commit: Commit) -> None:
    report.commit = commit.number
    report.author = commit.author
    report.time = commit.time
    report.world_size = commit.world_size if commit.manifest is not None else None
    report.torch = commit.torch
    report.package = commit.package
    report.single_writer = commit.single_writer


def _stock(report: Description, store: Store, folder: Folder, entries: Sequence[Entry]) -> None:
    from dcp_storage.reading import read_checkpoint  # needs torch, which the rest does not

    report.state = STOCK
    report.says = "written by stock torch, without a commit: nothing shows that it is whole; adopt it, or load it with "
    report.says += "require_commit=False"
    trusted = folder.options.trusted_globals if isinstance(folder.options, LoadOptions) else ()
    try:
        checkpoint = read_checkpoint(store, require_commit=False, trusted_globals=trusted)
    except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
        return _damaged(report, error)
    report.problem("not-committed", "Run adopt, which checks the sizes and commits it as it is now.")
    _fill(report, [checkpoint.manifest])
    named = {*report.files, names.STOCK_VIEW}
    report.leftovers = {e.name: e.size for e in entries if names.is_ours(e.name) and e.name not in named}
    return None


def _rank_by_rank(report: Description, store: Store, ours: Mapping[str, Entry]) -> None:
    from dcp_storage.lone import read_rank, read_rank_commit  # needs torch, which the rest does not

    report.state = RANK_BY_RANK
    ranks = sorted(r for r in map(names.rank_commit, ours) if r is not None)
    manifests, views = [], set()
    for rank in ranks:
        try:
            commit, manifest = read_rank(store, rank)
        except (*_UNREADABLE, NotCommittedError) as error:
            report.says = str(error)
            report.problems.append(problem_of(error))
            found = read_rank_commit(store, rank)
            if found is not None:
                _note_commit(report, found)
            break
        _note_commit(report, commit)
        manifests.append(manifest)
        views |= {commit.manifest.name if commit.manifest else "", names.rank_view_name(rank)}
    report.commit = None
    report.says = report.says or f"saved without collectives by {_ranks(len(ranks))}, each with a commit of its own"
    _fill(report, manifests)
    named = {*report.files, *views, *(names.rank_commit_name(rank) for rank in ranks)}
    report.leftovers = {n: e.size for n, e in ours.items() if n not in named} if not report.problems else {}


def _fill(report: Description, manifests: Iterable[Manifest]) -> None:
    pieces: dict[str, list[Piece]] = {}
    entries: dict[str, Any] = {}
    for manifest in manifests:
        report.files.update((record.name, record.size) for record in manifest.files)
        entries.update(manifest.entries)
        chunks = {
            key: {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            for key, entry in manifest.entries.items()
            if isinstance(entry, TensorEntry)
        }
        for item in manifest.items:
            record = manifest.files[item.file]
            sizes = item.shape or chunks.get(item.key, {}).get(item.offsets or (), ())
            piece = Piece(item.offsets or (), sizes, record.name, record.rank, item.offset, item.length)
            pieces.setdefault(item.key, []).append(piece)
    for key, entry in sorted(entries.items()):
        found = tuple(sorted(pieces.get(key, ()), key=lambda p: (p.offsets, p.file)))
        tensor = entry if isinstance(entry, TensorEntry) else None
        report.keys[key] = KeyDescription(
            kind="tensor" if tensor else "object",
            dtype=tensor.dtype if tensor else None,
            shape=tuple(tensor.size) if tensor else (),
            nbytes=sum(piece.nbytes for piece in found),
            pieces=found,
        )
    report.nbytes = sum(report.files.values())
