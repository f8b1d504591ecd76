"""A disk that remembers what was synced: which states may be left of a folder when the power goes.

The model is stricter than any filesystem we know. What a sync of a file or of a folder has not covered is lost or kept
in any mixture: of the bytes of a file every write by itself, cut short, as zeros, or with the size alone; of the names
in a folder each one by itself, though the changes of one name never in another order. So of a rename the new name may
be there without the old one gone, or both may be lost. ext4 keeps the order of its journal, which gives some of these
states and no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

__all__ = ["FOLDER", "Disk", "Operation"]

FOLDER = -1
"""Stands for a folder where else the number of a file stands."""

MOST_WRITES = 4  # of one file that are lost and kept in every combination; of more, each by itself


@dataclass(frozen=True)
class Operation:
    """One change of the disk, or one sync.

    Attributes:
        kind: ``name`` (a name now means ``file``; None: it is gone), ``write``, ``truncate``, ``sync`` or
            ``sync folder``.
        path: for ``name`` and ``sync folder``: relative to the disk's root, ``.`` for that itself.
        file: the file's number.
        offset: first byte of a write, or the size to cut to.
        data: what is written.
        joint: further names that change in the same call.
    """

    kind: str
    path: str = ""
    file: int | None = None
    offset: int = 0
    data: bytes = b""
    joint: tuple[tuple[str, int | None], ...] = ()


@dataclass
class _File:
    """A file: what is on the disk for certain, and what was done to it since."""

    synced: bytes = b""
    since: list[Operation] = field(default_factory=list)
    _states: list[bytes] | None = None

    def do(self, operation: Operation) -> None:
        self.since = [*self.since, operation]
        self._states = None

    def sync(self) -> None:
        self.synced, self.since, self._states = self.now, [], None

    @property
    def now(self) -> bytes:
        """What a process that reads it sees."""
        return _applied(self.synced, self.since)

    def states(self) -> list[bytes]:
        """What it may hold after a power loss; what it holds now comes first, what is certain last."""
        if self._states is None:
            self._states = list(dict.fromkeys(self._all_states()))
        return self._states

    def _all_states(self) -> Iterator[bytes]:
        now = self.now
        if not self.since:
            yield now
            return
        yield now
        count = len(self.since)
        if count <= MOST_WRITES:
            kept: Iterator[tuple[Operation, ...]] = itertools.chain.from_iterable(
                itertools.combinations(self.since, n) for n in range(count)
            )
        else:
            lacking = (tuple(o for o in self.since if o is not gone) for gone in self.since)
            kept = itertools.chain(lacking, ((one,) for one in self.since))
        yield from (_applied(self.synced, some) for some in kept)
        yield now[: len(now) // 2]  # the last write cut short
        yield bytes(len(now))  # the size and no bytes
        yield (self.synced + bytes(len(now)))[: max(len(now), len(self.synced))]  # the size, and the old bytes
        yield bytes(len(now) // 2) + now[len(now) // 2 :]  # the second half first
        yield self.synced


def _applied(data: bytes, operations: list[Operation] | tuple[Operation, ...]) -> bytes:
    held = bytearray(data)
    for operation in operations:
        if operation.kind == "truncate":
            held = held[: operation.offset] + bytes(max(0, operation.offset - len(held)))
        else:
            end = operation.offset + len(operation.data)
            held += bytes(max(0, end - len(held)))
            held[operation.offset : end] = operation.data
    return bytes(held)


class Disk:
    """A disk of which some is synced and some is not.

    Attributes:
        names: path → what the name has meant since it was last synced, oldest first; None where it meant nothing.
        files: number → file.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[int | None]] = {}
        self.files: dict[int, _File] = {}

    def copy(self) -> Disk:
        """Another one in the same state."""
        made = Disk()
        made.names = {path: list(history) for path, history in self.names.items()}
        made.files = {n: _File(file.synced, file.since, file._states) for n, file in self.files.items()}
        return made

    @classmethod
    def holding(cls, files: Mapping[str, bytes], *, synced: bool = True) -> Disk:
        """A disk with these files, their folders too; ``synced=False``: of the files only the names are certain."""
        disk = cls()
        for number, (path, data) in enumerate(files.items()):
            disk.files[number] = _File(data) if synced else _File(b"", [Operation("write", data=data)])
            disk.names[path] = [number]
            for parent in PurePath(path).parents:
                if str(parent) != ".":
                    disk.names[str(parent)] = [FOLDER]
        return disk

    def do(self, operation: Operation) -> None:
        """Takes an operation."""
        if operation.kind == "name":
            for path, meant in ((operation.path, operation.file), *operation.joint):
                self.names.setdefault(path, [None]).append(meant)
                if meant is not None and meant >= 0:
                    self.files.setdefault(meant, _File())
        elif operation.kind == "sync folder":
            for path, history in self.names.items():
                if str(PurePath(path).parent) == operation.path:
                    del history[:-1]
        elif operation.file is not None:
            file = self.files.setdefault(operation.file, _File())
            if operation.kind == "sync":
                file.sync()
            else:
                file.do(operation)

    def seen(self, path: str) -> int | None:
        """What a name means to a process now."""
        return self.names.get(path, [None])[-1]

    def now(self, folder: str) -> dict[str, bytes]:
        """What a process sees in a folder now."""
        return {
            PurePath(path).name: self.files[history[-1]].now
            for path, history in self.names.items()
            if str(PurePath(path).parent) == folder and history[-1] is not None and history[-1] != FOLDER
        }

    def possible(self, folder: str) -> int:
        """How many choices of names and bytes there are for a folder; different ones may be the same to see."""
        count = 1
        for path, history in self.names.items():
            if str(PurePath(path).parent) == folder:
                count *= sum(1 if n in (None, FOLDER) else len(self.files[n].states()) for n in dict.fromkeys(history))
            elif self._is_above(path, folder):
                count *= len(set(history))
        return count

    def states(self, folder: str, most: int) -> Iterator[dict[str, bytes]]:
        """What may be in a folder after a power loss.

        Args:
            folder: which.
            most: up to so many choices all are given; of more, all that differ in one or two names from what is seen
                now, and from what is certain.
        """
        slots: list[tuple[str, list[bytes | None]]] = []
        lost = [False]
        for path, history in self.names.items():
            if str(PurePath(path).parent) == folder:
                slots.append((PurePath(path).name, self._choices(history)))
            elif self._is_above(path, folder) and None in history:
                lost = [False, True]
        if len(lost) > 1:
            yield {}  # the folder itself is gone
        # A name that can mean one thing only is never chosen.
        fixed = {name: choices[0] for name, choices in slots if len(choices) == 1 and choices[0] is not None}
        free = [(name, choices) for name, choices in slots if len(choices) > 1]
        for chosen in _combined([choices for _, choices in free], most):
            found = dict(fixed)
            found.update({name: data for (name, _), data in zip(free, chosen, strict=True) if data is not None})
            yield {name: data for name, data in found.items() if data is not None}

    def _choices(self, history: list[int | None]) -> list[bytes | None]:
        """What a name may hold, by what is seen now first; the most certain last."""
        out: list[bytes | None] = []
        for meant in dict.fromkeys(reversed(history)):
            if meant is None:
                out.append(None)
            elif meant != FOLDER:
                out += self.files[meant].states()
        return list(dict.fromkeys(out))

    @staticmethod
    def _is_above(path: str, folder: str) -> bool:
        return path == folder or PurePath(path) in PurePath(folder).parents


def _combined(choices: list[list[bytes | None]], most: int) -> Iterator[tuple[bytes | None, ...]]:
    count = 1
    for one in choices:
        count *= len(one)
    if count <= most:
        yield from itertools.product(*choices)
        return
    for base in ([one[0] for one in choices], [one[-1] for one in choices]):
        yield tuple(base)
        for places in itertools.combinations(range(len(choices)), 2):
            for values in itertools.product(*(choices[place] for place in places)):
                made = list(base)
                for place, value in zip(places, values, strict=True):
                    made[place] = value
                yield tuple(made)
