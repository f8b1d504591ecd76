"""What a folder must hold and a load must answer, found out from bytes alone: nothing of the code under test.

The model is told after every single request which files there are and whose request it was. It keeps one line of
facts: the number that counts, what is committed under it, and whose files those are. Every change must be one that the
promises allow; every other byte must be as it was.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Doer", "Model", "Moment", "Seen", "ViolationError", "number_of"]

_COMMIT = re.compile(r"\.commit(?:\.([1-9][0-9]*))?")
_TOKEN = r"(?:\.[a-z][a-z0-9]{15})"
_OURS = re.compile(rf"\.claim{_TOKEN}?|\.manifest{_TOKEN}?|\.metadata|__[0-9]+_[0-9]+{_TOKEN}?\.distcp")
_VIEW = ".metadata"
_CLAIM = ".claim"


class ViolationError(Exception):
    """An invariant was seen broken.

    Attributes:
        invariant: which one, ``"I1"`` to ``"I11"``.
    """

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclass(frozen=True)
class Seen:
    """A file as it lies in the folder.

    Attributes:
        body: its bytes.
        modified: when it was written, by the store's clock.
    """

    body: bytes
    modified: float


@dataclass(eq=False)
class Doer:
    """Who makes requests: one save, load, delete, prune or adoption.

    Attributes:
        name: for messages.
        kind: ``"save"``, ``"load"``, ``"delete"``, ``"prune"`` or ``"adopt"``.
        author: the number that is in every value of a save.
        overwrite: whether a save may replace.
        grace: seconds within which a prune touches nothing.
        committed: the number of the commit object that it made.
        fenced_at: the moment at which it made one.
        replaced: names of the checkpoint that its commit replaced.
        gave_up: whether it has told its caller that it failed, for certain.
    """

    name: str
    kind: str
    author: int = 0
    overwrite: bool = False
    grace: float = 0.0
    committed: int | None = None
    fenced_at: int | None = None
    replaced: frozenset[str] = frozenset()
    gave_up: bool = False


@dataclass(frozen=True)
class Moment:
    """What holds from one change to the next.

    Attributes:
        number: the highest commit number; 0 where there is none.
        state: ``"nothing"``, ``"stock"``, ``"live"`` or ``"void"``.
        author: whose checkpoint it is, where there is one.
        damaged: files of it that were damaged from outside, each with how.
    """

    number: int = 0
    state: str = "nothing"
    author: int | None = None
    damaged: frozenset[tuple[str, str]] = frozenset()


@dataclass
class Model:
    """The folder as it must be.

    Attributes:
        files: the files after the last request.
        log: every moment there was; the last one holds now.
        held: the files of what is committed (or of a stock checkpoint), as they must stay.
        written: file → who wrote it last, and at which moment.
    """

    files: Mapping[str, Seen] = field(default_factory=dict)
    log: list[Moment] = field(default_factory=lambda: [Moment()])
    held: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, tuple[Doer, int]] = field(default_factory=dict)
    clock: int = 0

    @property
    def now(self) -> Moment:
        """What holds now."""
        return self.log[-1]

    def numbers(self) -> list[int]:
        """The numbers of the commit objects that are there, ascending."""
        return sorted(filter(None, map(number_of, self.files)))

    # -- from outside ----------------------------------------------------------------------------------------------

    def put_stock(self, files: Mapping[str, Seen], author: int) -> None:
        """Stock torch has written a checkpoint, where there was nothing."""
        self.held = {name: seen.body for name, seen in files.items() if _is_ours(name)}
        self.files = files
        self.log.append(Moment(0, "stock", author))

    def damage(self, files: Mapping[str, Seen], name: str, how: str) -> None:
        """Somebody has damaged a file of the checkpoint; from now on it is to stay so."""
        if name in files:
            self.held[name] = files[name].body
        else:
            del self.held[name]
        self.files = files
        now = self.now
        self.log.append(Moment(now.number, now.state, now.author, now.damaged | {(name, how)}))

    def age(self, files: Mapping[str, Seen]) -> None:
        """Time has passed."""
        self.files = files

    # -- by requests -----------------------------------------------------------------------------------------------

    def look(self, files: Mapping[str, Seen], doer: Doer, clock: float) -> None:
        """After one request of ``doer``.

        Args:
            files: what is there now.
            doer: whose request it was.
            clock: the store's time.

        Raises:
            ViolationError: an invariant is broken.
        """
        before, self.files = self.files, files
        self.clock += 1
        gone = [name for name in before if name not in files]
        new = [name for name, seen in files.items() if name not in before or before[name] != seen]
        for name in new:
            if not (_is_ours(name) or number_of(name)):
                raise ViolationError("I11", f"{doer.name} wrote {name}, which is no name of ours")
            if number_of(name) and name in before and before[name].body != files[name].body:
                raise ViolationError("I1", f"{doer.name} changed {name}, which was there")
        for name in gone:
            if number_of(name):
                self._commit_gone(name, before, doer, clock)
        made = [name for name in new if number_of(name) and name not in before]
        for name in made:
            self._commit_made(name, before, doer)
        self._held_stay(doer)
        for name in gone:
            if not number_of(name):
                self._file_gone(name, before[name], doer, clock)
        for name in new:
            author, at = self.written.get(name, (None, 0))
            # What a late duplicate of the same writer's request brings back is no newer than it was.
            self.written[name] = doer, at if author is doer else self.clock

    def _commit_made(self, name: str, before: Mapping[str, Seen], doer: Doer) -> None:
        number, was = number_of(name), self.now
        top = max(filter(None, map(number_of, before)), default=0)
        if number != top + 1:
            raise ViolationError("I1", f"{doer.name} made {name}, but the highest number was {top}")
        if doer.gave_up:
            raise ViolationError("I6", f"{doer.name} told its caller that it had failed, and then {name} came")
        said = json.loads(self.files[name].body)
        doer.committed, doer.fenced_at = number, self.clock
        if said["state"] == "void":
            allowed = {"delete": was.state == "live", "prune": was.state in {"nothing", "void"}}
            if not allowed.get(doer.kind, False):
                raise ViolationError("I11", f"{doer.name}, a {doer.kind}, voided what was {was.state}")
            self.held = {}
            self.log.append(Moment(number, "void"))
            return
        named = self._whole(said, doer)
        if said.get("restates") is not None:
            if doer.kind != "prune" or was.state != "live" or set(named) != set(self.held):
                raise ViolationError("I5", f"{doer.name} restated what is not committed")
            self.log.append(Moment(number, "live", was.author, was.damaged))
            return
        self._may_commit(doer, was)
        doer.replaced = frozenset(self.held)
        if doer.kind == "save":
            for file in named:
                author = self.written.get(file, (None, 0))[0]
                if author is not doer:
                    raise ViolationError("I3", f"{doer.name} committed {file} of {author and author.name}: a mixture")
        self.held = named
        self.log.append(Moment(number, "live", was.author if doer.kind == "adopt" else doer.author))

    def _may_commit(self, doer: Doer, was: Moment) -> None:
        allowed = {"save": was.state in {"nothing", "void"} or doer.overwrite, "adopt": was.state == "stock"}
        if not allowed.get(doer.kind, False):
            raise ViolationError("I5", f"{doer.name}, a {doer.kind}, committed over what was {was.state}")

    def _whole(self, said: Mapping[str, Any], doer: Doer) -> dict[str, bytes]:
        """The files that a commit names, which must all be there as it says."""
        ref = said["manifest"]
        body = self._right(ref["name"], ref["size"], ref["crc32"], doer)
        named = {ref["name"]: body}
        damaged = {name for name, _ in self.now.damaged}
        for record in json.loads(body)["files"]:
            if record["name"] in damaged:  # restated: what is left of it is what must stay
                if record["name"] in self.held:
                    named[record["name"]] = self.held[record["name"]]
                continue
            named[record["name"]] = self._right(record["name"], record["size"], record.get("crc32"), doer)
        return named

    def _right(self, name: str, size: int, crc: int | None, doer: Doer) -> bytes:
        seen = self.files.get(name)
        if seen is None or len(seen.body) != size or (crc is not None and zlib.crc32(seen.body) != crc):
            found = "missing" if seen is None else "another"
            raise ViolationError("I2", f"{doer.name} committed {name}, which is {found}")
        return seen.body

    def _held_stay(self, doer: Doer) -> None:
        for name, body in self.held.items():
            seen = self.files.get(name)
            if (seen is None or seen.body != body) and not (name == _VIEW and self.now.state == "live"):
                what = "removed" if seen is None else "changed"
                label = {"save": "I5" if self._lost(doer) else "I3"}.get(doer.kind, "I11")
                raise ViolationError(label, f"{doer.name} {what} {name} of the checkpoint of {self.now.author}")

    def _lost(self, doer: Doer) -> bool:
        return doer.gave_up or (doer.committed or self.now.number) < self.now.number

    def _commit_gone(self, name: str, before: Mapping[str, Seen], doer: Doer, clock: float) -> None:
        number = number_of(name)
        there = sorted(filter(None, map(number_of, before)))
        if doer.kind != "prune":
            raise ViolationError("I5", f"{doer.name}, a {doer.kind}, removed {name}")
        if before[name].modified > clock - doer.grace:
            raise ViolationError("I5", f"{doer.name} removed {name} within the grace")
        if number != there[0] or (number == there[-1] and self.now.state == "live"):
            raise ViolationError("I5", f"{doer.name} removed {name} of {there}, out of order")
        if number == there[-1]:
            self.log.append(Moment())

    def _file_gone(self, name: str, seen: Seen, doer: Doer, clock: float) -> None:
        author, at = self.written.get(name, (None, 0))
        if not _is_ours(name):
            raise ViolationError("I11", f"{doer.name} removed {name}, which is not ours")
        if doer.kind == "save":
            if author is not doer and name not in doer.replaced and name not in {_VIEW, _CLAIM}:
                raise ViolationError("I11", f"{doer.name} removed {name} of {author and author.name}")
            return
        if doer.kind not in {"delete", "prune"}:
            raise ViolationError("I11", f"{doer.name}, a {doer.kind}, removed {name}")
        if doer.fenced_at is None:
            raise ViolationError("I11", f"{doer.name} removed {name} without a fence")
        if name != _VIEW and at > doer.fenced_at:
            raise ViolationError("I11", f"{doer.name} removed {name}, which came after its fence")
        if doer.kind == "prune" and seen.modified > clock - doer.grace:
            raise ViolationError("I11", f"{doer.name} removed {name} within the grace")


def number_of(name: str) -> int:
    """The number of a commit object; 0 for every other name."""
    found = _COMMIT.fullmatch(name)
    return int(found[1] or 1) if found else 0


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None
