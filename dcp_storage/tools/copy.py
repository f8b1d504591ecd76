"""Copying a checkpoint from any store to any other: in parallel, checked on the way, resumable, committed last."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fsspec.callbacks import Callback

from dcp_storage import names
from dcp_storage.commit import BEGIN, PUBLISH, Attempt, Step, Steps, begin, make_commit, publish
from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.current import (
    Current,
    blame,
    check_sizes,
    list_commits,
    nothing_committed,
    read_current,
    read_manifest,
)
from dcp_storage.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    NotCommittedError,
    ObjectNotFoundError,
    StoreError,
    UntrustedDataError,
)
from dcp_storage.lone import holds_lone_ranks
from dcp_storage.options import SaveOptions
from dcp_storage.records import FileRecord, Manifest, ManifestRef
from dcp_storage.session import phase
from dcp_storage.store import Store
from dcp_storage.tools.copy_files import Job, send_files
from dcp_storage.tools.copy_journal import Earlier, Journal, names_for, read_earlier
from dcp_storage.tools.drawing import count_text
from dcp_storage.tools.opening import Folder, folder_at
from dcp_storage.tools.reports import ToolReport
from dcp_storage.tools.streams import layouts

__all__ = ["CopyReport", "copy", "copy_folder"]


@dataclass
class CopyReport(ToolReport):
    """What a copy did; ``path`` is the destination.

    Attributes:
        source: the folder that was copied.
        commit: number of the commit object at the destination.
        already_there: whether the destination held this very checkpoint, so that nothing was to be done.
        files: files of the checkpoint.
        nbytes: bytes in them.
        files_sent: files that this run sent.
        bytes_sent: bytes in them.
        files_resumed: files that an earlier run of the same copy had sent.
        single_writer: whether the destination could not promise create-if-absent.
    """

    source: str = ""
    commit: int | None = None
    already_there: bool = False
    files: int = 0
    nbytes: int = 0
    files_sent: int = 0
    bytes_sent: int = 0
    files_resumed: int = 0
    single_writer: bool = False


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions = SaveOptions(),  # noqa: B008 - frozen
    callback: Callback | None = None,
) -> CopyReport:
    """Copies a committed checkpoint, all or nothing: its commit at the destination is the last thing that is written.

    Every byte is held against the manifest's CRC-32s between the two stores. A copy that was killed or failed is gone
    on with by running it again (within three days): files that had arrived whole are not sent again. Run again after
    it has ended, it finds the checkpoint there and does nothing.

    Args:
        src: the folder to copy from; it must hold a commit (adopt a stock checkpoint first).
        dst: the folder to copy to.
        src_options: handed to fsspec for ``src``.
        dst_options: handed to fsspec for ``dst``.
        overwrite: replace another checkpoint that is at ``dst``; it stays loadable until the copy commits.
            Default False.
        options: concurrency, part size, memory budget, retries; ``assume_single_writer`` as for a save.
        callback: an fsspec Callback that is told of bytes sent.

    Raises:
        CheckpointNotFoundError: nothing is committed at ``src``.
        CheckpointExistsError: ``dst`` holds another checkpoint and ``overwrite`` is False; or a save was faster.
        CorruptCheckpointError: bytes at the source are missing, short or altered; nothing was committed.
        CheckpointReplacedError: the source was replaced or deleted meanwhile. Copy again.
        CommitUnknownError: it cannot be known whether the copy committed; nothing was deleted.
        InvalidLocationError: ``src`` and ``dst`` are one folder.
        StoreError: a store failed; the error's ``path`` says which.
    """
    return copy_folder(
        folder_at(src, src_options, options), folder_at(dst, dst_options, options), overwrite, options, callback
    )


def copy_folder(
    source: Folder,
    target: Folder,
    overwrite: bool = False,
    options: SaveOptions = SaveOptions(),  # noqa: B008 - frozen
    callback: Callback | None = None,
) -> CopyReport:
    """As :func:`copy`, of folders that may be opened through wrappers."""
    if (source.location, source.storage_options) == (target.location, target.storage_options):
        raise InvalidLocationError(f"{source.location.url!r} cannot be copied onto itself.", path=source.location.url)
    report = CopyReport(target.location.url, source=source.location.url)
    src, dst = source.open(), target.open()
    try:
        with phase(report, "source"):
            current, manifest, ref = _read_source(src.store)
        report.files = len(manifest.files)
        report.nbytes = sum(record.size for record in manifest.files)
        _Copy(report, src.store, dst.store, current, manifest, ref, options, callback).run(overwrite)
    finally:
        report.requests = src.counting.requests + dst.counting.requests
        report.retries = src.retrying.retries + dst.retrying.retries
        src.store.close()
        dst.store.close()
    return report


def _read_source(store: Store) -> tuple[Current, Manifest, ManifestRef]:
    try:
        current = read_current(store)
    except ObjectNotFoundError as error:  # the bucket itself
        raise nothing_committed(store, None) from error
    if current is None or current.commit.manifest is None:
        missing = nothing_committed(store, current)
        if current is None and isinstance(missing, NotCommittedError):
            entries = store.entries()
            if holds_lone_ranks(entries):
                missing.message = (
                    f"{store.url}: saved without collectives, rank by rank; there is no commit of the whole that could "
                    "be copied. Load it and save it with collectives."
                )
            elif not list_commits(entries) and any(names.is_stock_view(e.name) for e in entries):
                missing.message = f"{missing.message} To copy it, adopt it first."
        raise missing
    try:
        manifest = read_manifest(store, current)
        check_sizes(store, manifest, [record.name for record in manifest.files])
    except CorruptCheckpointError as error:
        found = blame(store, current.number, error)
        raise _advised(found, "Nothing was copied.") from None if found is error else error
    return current, manifest, current.commit.manifest


def _advised(error: CheckpointError, said: str) -> CheckpointError:
    """The error with what became of the copy, and what to do where the source itself is damaged."""
    if isinstance(error, CorruptCheckpointError):
        said = f"{said} Restore the file from a copy, or copy an older checkpoint; verify says what else is wrong."
    error.message = f"{error.message} {said}"
    error.args = (error.message,)
    return error


class _Copy:
    def __init__(
        self,
        report: CopyReport,
        src: Store,
        dst: Store,
        current: Current,
        manifest: Manifest,
        ref: ManifestRef,
        options: SaveOptions,
        callback: Callback | None,
    ) -> None:
        self.report = report
        self.src = src
        self.dst = dst
        self.current = current
        self.manifest = manifest
        self.ref = ref
        self.options = options
        self.callback = callback
        self.lock = threading.Lock()

    def run(self, overwrite: bool) -> None:
        report = self.report
        with phase(report, "begin"):
            if self._is_there():
                return
            attempt = Attempt(
                store=self.dst,
                token=names.new_token(),
                overwrite=overwrite,
                assume_single_writer=self.options.assume_single_writer,
            )
            begin(attempt, Steps(begin=BEGIN))
            report.single_writer = attempt.single_writer
            earlier = read_earlier(self.dst, attempt.listing, self.manifest, self.ref, attempt.number)
            journal = Journal(self.dst, attempt.token)
            journal.begin(self.ref, attempt.number, plain=attempt.plain)
        with phase(report, "send"):
            found = self._send(attempt, earlier, journal)
        with phase(report, "commit"):
            publish(attempt, found, Steps(publish=self._publish_steps()))
            self._tidy(attempt, earlier, journal)
        report.warnings += attempt.warnings
        report.commit = attempt.number + 1

    def _is_there(self) -> bool:
        """Whether the destination holds this checkpoint already, so that a copy run again is no error."""
        current = read_current(self.dst, list_commits(self.dst.entries()))
        if current is None or current.commit.manifest is None:
            return False
        try:
            manifest = read_manifest(self.dst, current)
            if not _alike(manifest, self.manifest):
                return False
            check_sizes(self.dst, manifest, [record.name for record in manifest.files])
        except (CorruptCheckpointError, UntrustedDataError):
            return False  # then it takes overwrite=True, which says so
        self.report.already_there = True
        self.report.commit = current.number
        return True

    def _send(self, attempt: Attempt, earlier: Earlier, journal: Journal) -> Manifest:
        report = self.report
        wanted = names_for(self.manifest, None if attempt.plain else attempt.token, earlier.files)
        jobs = [
            Job(layout, name)
            for layout, name in zip(layouts(self.manifest), wanted, strict=True)
            if layout.record.name not in earlier.files
        ]
        report.files_resumed = len(earlier.files)
        if self.callback is not None:
            self.callback.set_size(sum(job.layout.record.size for job in jobs))

        def done(record: FileRecord, name: str, crc32: int) -> None:
            journal.done(record, name, crc32)
            with self.lock:
                report.files_sent += 1

        try:
            send_files(self.src, self.dst, jobs, self.options, sent=self._tell, done=done)
        except CorruptCheckpointError as error:
            found = blame(self.src, self.current.number, error)
            raise _advised(found, f"Nothing was committed at {self.dst.url}.") from None if found is error else error
        except CheckpointError as error:
            kept = f"{report.files_sent + report.files_resumed} of {count_text(report.files, 'file')}"
            said = f"{kept} are there whole, and the same copy run again goes on from there."
            raise _advised(error, f"Nothing was committed at {self.dst.url}; {said}") from error.__cause__
        records = (
            msgspec.structs.replace(record, name=name) for record, name in zip(self.manifest.files, wanted, strict=True)
        )
        return msgspec.structs.replace(self.manifest, files=tuple(records))

    def _tell(self, count: int) -> None:
        with self.lock:
            self.report.bytes_sent += count
            if self.callback is not None:
                self.callback.relative_update(count)

    def _publish_steps(self) -> tuple[Step, ...]:
        return tuple(self._make_commit if step is make_commit else step for step in PUBLISH)

    def _make_commit(self, attempt: Attempt) -> None:
        """As a save's, but with the world size and the torch of the save that is copied."""
        saved = self.current.commit
        commit = new_commit(
            attempt.number + 1,
            attempt.token,
            manifest=attempt.ref,
            world_size=saved.world_size,
            single_writer=attempt.single_writer,
        )
        create_commit(self.dst, msgspec.structs.replace(commit, torch=saved.torch))
        attempt.committed = True

    def _tidy(self, attempt: Attempt, earlier: Earlier, journal: Journal) -> None:
        """Removes the notes, and what earlier runs had begun; our commit is the fence that ended them.

        Only what was listed before the commit goes; what is written later is for prune.
        """
        named = {record.name for record in (attempt.manifest or self.manifest).files}
        try:
            claim_author = self._claim_author() if earlier.plain else None
            theirs = [e.name for e in attempt.listing if earlier.wrote(e.name, claim_author=claim_author)]
            old = [name for name in theirs if name not in named]
            if claim_author in earlier.plain:
                old.append(names.CLAIM)
            self.dst.delete([*old, *earlier.notes, *journal.written])
            if earlier.authors:
                open_ = [e.name for e in self.dst.open_uploads()]
                lost = [n for n in open_ if earlier.wrote(n, claim_author=claim_author) and n not in named]
                self.dst.abort_uploads(lost)
        except StoreError as error:
            attempt.warnings.append(
                f"{self.dst.url}: not all that the copy does not need any more was removed; prune will: {error}"
            )

    def _claim_author(self) -> str | None:
        try:
            body = self.dst.read(names.CLAIM, limit=4096)
            return str(msgspec.json.decode(body, type=dict[str, Any]).get("author"))
        except (ObjectNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


def _alike(there: Manifest, wanted: Manifest) -> bool:
    """Whether two manifests are of one checkpoint, the files' names apart; never where a file carries no CRC-32."""

    def nameless(manifest: Manifest) -> Manifest:
        files = tuple(msgspec.structs.replace(record, name=str(n)) for n, record in enumerate(manifest.files))
        return msgspec.structs.replace(manifest, files=files)

    return all(record.crc32 is not None for record in wanted.files) and nameless(there) == nameless(wanted)
