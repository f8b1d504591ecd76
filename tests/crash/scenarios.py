"""What is killed, and what is in the folder before it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp

from tests.crash.checking import Checker
from tests.crash.places import Place
from tests.crash.points import Mode, Point
from tests.crash.seams import REPEATED
from tests.crash.values import state
from tests.crash.work import ASYNC, NEW

__all__ = ["DEAD", "FOREIGN", "SCENARIOS", "Scenario", "Snapshots", "modes_at"]

OLD = 1
"""The version that is there before."""

FOREIGN = "notes.txt"
"""A file that is not ours, which nobody may touch."""

DEAD = "d" * 16
"""The token of an attempt that died long ago."""


@dataclass(frozen=True)
class Scenario:
    """One piece of work.

    Attributes:
        name: for the table.
        work: for :class:`~tests.crash.work.Job`.
        before: which snapshot is in the folder before it.
        old: the version that the folder holds before; None where it holds none.
        new: the version that it holds after; None where it holds none.
        leftovers: whether an upload is open that nobody will end.
        aged: whether what is there must be older than the work.
        parts: the folders that it works on, below the trial's own; empty for that itself.
    """

    name: str
    work: str
    before: str
    old: int | None
    new: int | None
    leftovers: bool = False
    aged: bool = False
    parts: tuple[str, ...] = ()


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("fresh save", "save", "nothing", None, NEW),
    Scenario("save into leftovers", "save", "leftovers", None, NEW, leftovers=True),
    Scenario("save that replaces", "save", "old", OLD, NEW),
    Scenario("two asynchronous saves", "async", "nothing", None, NEW, parts=ASYNC),
    Scenario("delete", "delete", "loose", OLD, None, leftovers=True, aged=True),
    Scenario("prune", "prune", "loose", OLD, OLD, leftovers=True, aged=True),
    Scenario("adopt", "adopt", "stock", None, OLD),
    Scenario("copy", "copy", "nothing", None, OLD),
)


class Snapshots:
    """What folders hold before a trial, made once by whole saves and then put there byte for byte.

    Args:
        place: where they are made.
        checker: makes them.
    """

    def __init__(self, place: Place, checker: Checker) -> None:
        self._place = place
        self._checker = checker
        self._made: dict[str, Mapping[str, bytes]] = {"nothing": {}}
        self._source: str | None = None
        self._makers: dict[str, Callable[[], Mapping[str, bytes]]] = {
            "old": self._old,
            "leftovers": self._leftovers,
            "loose": self._loose,
            "stock": self._stock,
        }

    def of(self, name: str) -> Mapping[str, bytes]:
        """The files of a snapshot."""
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    @property
    def source(self) -> str:
        """A committed folder to copy from, which stays."""
        if self._source is None:
            self._source = self._place.url(self._place.number())
            self._place.fill(self._source, self.of("old"))
        return self._source

    def _saved(self, *versions: int) -> dict[str, bytes]:
        url = self._place.url(self._place.number())
        for version in versions:
            self._checker.save(url, version)
        files = self._place.files(url)
        self._place.clear(url)
        return files

    def _old(self) -> dict[str, bytes]:
        return {**self._saved(0, OLD), FOREIGN: b"mine"}

    def _leftovers(self) -> dict[str, bytes]:
        files = self._saved(0)
        del files[".commit"], files[".metadata"]
        return {**files, ".claim": b"{}", f".manifest.{DEAD}": b"half of", FOREIGN: b"mine"}

    def _loose(self) -> dict[str, bytes]:
        names = (f"__0_0.{DEAD}.distcp", f"__1_0.{DEAD}.distcp", f".manifest.{DEAD}", ".claim", f".metadata.{DEAD}")
        return {**self.of("old"), **dict.fromkeys(names, b"left by a dead attempt")}

    def _stock(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
            dcp.save(dict(state(OLD)), storage_writer=writer, no_dist=True)
            return {**{path.name: path.read_bytes() for path in Path(folder).iterdir()}, FOREIGN: b"mine"}


def modes_at(place: Place, seam: str, point: Point) -> tuple[Mode, ...]:
    """What can happen at a point."""
    operation = point.what.removeprefix("one ").removeprefix("two ").split()[0]
    if seam == "disk":
        return ("before", "after", "lost")
    always: tuple[Mode, ...] = ("before", "after", "lost", "refused")
    repeats = operation not in ("GET", "HEAD") if seam == "http" else place.gate is None and operation in REPEATED
    return (*always, "again", "late") if repeats else always
