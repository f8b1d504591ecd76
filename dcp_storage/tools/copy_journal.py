"""What a copy leaves on its destination so that a later run can go on with it (docs/design/012).

A copy writes a *head* before its first file and a *segment* behind files that are whole. Both are small objects named
``.claim.<token>``, which saves respect and prune removes. A later run of the same copy may count on the files of an
earlier one only as that attempt itself could, had it been paused: it aims at the number that the earlier one listed
before it wrote anything. So any fence made since ends both.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from dcp_storage import names
from dcp_storage.errors import ObjectNotFoundError, UntrustedDataError
from dcp_storage.records import Crc, FileRecord, Manifest, ManifestRef, Size
from dcp_storage.store import Entry, Store

__all__ = ["RESUME_WITHIN", "Earlier", "Journal", "names_for", "read_earlier"]

RESUME_WITHIN = 3 * 86400.0
"""Seconds after which a copy is not gone on with: well within the grace for which the protocol holds."""

_MOST = 16 << 20  # bytes of one journal object
_NAME = re.compile(r"\.claim\.[a-z][a-z0-9]{15}")
_SHARD = re.compile(r"__([0-9]{1,9})_([0-9]{1,9})(?:\.[^.]+)?\.distcp")


class _Done(msgspec.Struct, frozen=True, array_like=True):
    """A file that is whole: its name at the destination, its bytes, and the CRC-32 of what went through."""

    name: str
    size: Size
    crc32: Crc


class _Head(msgspec.Struct, frozen=True, tag_field="kind", tag="copy"):
    """Who copies what, aiming at which number.

    Attributes:
        author: the attempt's token.
        manifest: size and CRC-32 of the source's manifest, which are what the copy is of.
        number: the highest commit number that the attempt listed before it wrote anything.
        plain: whether the plain names are its own.
    """

    author: str
    manifest: tuple[Size, Crc]
    number: Size
    plain: bool


class _Segment(msgspec.Struct, frozen=True, tag_field="kind", tag="copied"):
    """Files that an attempt has finished, by their names at the source."""

    author: str
    files: dict[str, _Done]


_DECODER: msgspec.json.Decoder[_Head | _Segment] = msgspec.json.Decoder(_Head | _Segment)


class Journal:
    """The notes of one attempt.

    Args:
        store: the destination.
        token: the attempt.

    Attributes:
        written: names of the notes.
    """

    def __init__(self, store: Store, token: str) -> None:
        self.store = store
        self.token = token
        self.written: list[str] = []
        self._waiting: dict[str, _Done] = {}
        self._writing = False
        self._lock = threading.Lock()

    def begin(self, ref: ManifestRef, number: int, *, plain: bool) -> None:
        """Writes the head; nothing else of the attempt may be written before."""
        self._put(_Head(self.token, (ref.size, ref.crc32), number, plain))

    def done(self, record: FileRecord, name: str, crc32: int) -> None:
        """Notes a file that is whole and durable. What comes in while a note is on its way goes into the next one."""
        with self._lock:
            self._waiting[record.name] = _Done(name, record.size, crc32)
            if self._writing:
                return
            self._writing = True
        try:
            while batch := self._next():
                self._put(_Segment(self.token, batch))
        except BaseException:
            with self._lock:
                self._writing = False
            raise

    def _next(self) -> dict[str, _Done]:
        with self._lock:
            batch, self._waiting = self._waiting, {}
            self._writing = bool(batch)
            return batch

    def _put(self, note: _Head | _Segment) -> None:
        name = f"{names.CLAIM}.{names.new_token()}"
        self.written.append(name)
        self.store.put(name, [memoryview(msgspec.json.encode(note))])


@dataclass
class Earlier:
    """What earlier runs of the same copy left.

    Attributes:
        files: source name → name at the destination, of files that are there whole.
        authors: their tokens.
        plain: those of them that had the plain names.
        notes: names of their journal objects.
    """

    files: dict[str, str] = field(default_factory=dict)
    authors: set[str] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def wrote(self, name: str, *, claim_author: str | None) -> bool:
        """Whether a shard of this name is theirs."""
        if not _SHARD.fullmatch(name):
            return False
        token = name.split(".")[1]
        return token in self.authors or (token == "distcp" and claim_author in self.plain)


def read_earlier(store: Store, entries: Iterable[Entry], manifest: Manifest, ref: ManifestRef, number: int) -> Earlier:
    """Finds what earlier runs of this copy left, and which of their files can be counted on.

    Args:
        store: the destination.
        entries: its listing.
        manifest: of the source.
        ref: of the source's manifest.
        number: the highest commit number in the listing; runs that aimed at another one are over.
    """
    listed = {e.name: e for e in entries}
    now: float | None = None  # a request, for the clock is the store's; most copies find nothing to ask it for
    heads: dict[str, _Head] = {}
    segments: list[_Segment] = []
    noted: dict[str, list[str]] = {}
    for name, entry in listed.items():
        if not _NAME.fullmatch(name) or not 0 < entry.size <= _MOST:
            continue
        note = _read(store, name)
        if note is None:
            continue
        noted.setdefault(note.author, []).append(name)
        if isinstance(note, _Segment):
            segments.append(note)
        elif note.manifest == (ref.size, ref.crc32) and note.number == number and entry.modified is not None:
            now = store.now() if now is None else now
            if now - entry.modified <= RESUME_WITHIN:
                heads[note.author] = note
    earlier = Earlier(authors=set(heads), plain={head.author for head in heads.values() if head.plain})
    earlier.notes = [name for author in heads for name in noted[author]]
    records = {record.name: record for record in manifest.files}
    for segment in segments:
        if segment.author not in heads:
            continue
        for source, done in segment.files.items():
            record = records.get(source)
            there = listed.get(done.name)
            if record is None or there is None or not names.is_ours(done.name):
                continue
            # As recorded in the manifest, as it went through, and as it lies there now.
            if there.size == done.size == record.size and done.crc32 == record.crc32:
                earlier.files[source] = done.name
    return earlier


def _read(store: Store, name: str) -> _Head | _Segment | None:
    try:
        return _DECODER.decode(store.read(name, limit=_MOST))
    except (ObjectNotFoundError, UntrustedDataError, msgspec.MsgspecError, UnicodeDecodeError):
        return None  # gone meanwhile, torn, or not ours to read: then nothing is gone on with


def names_for(manifest: Manifest, token: str | None, taken: Mapping[str, str]) -> list[str]:
    """A name at the destination for every file, in the manifest's order, each of its own.

    Args:
        manifest: of the source.
        token: the attempt's; None where the plain names are its own.
        taken: source name → name, of files that are there already.
    """
    used = set(taken.values())
    out = []
    for record in manifest.files:
        if record.name in taken:
            out.append(taken[record.name])
            continue
        found = _SHARD.fullmatch(record.name)
        rank, number = (int(found[1]), int(found[2])) if found else (record.rank, 0)
        while (name := names.shard_name(rank, number, token)) in used:
            number += 1
        used.add(name)
        out.append(name)
    return out
