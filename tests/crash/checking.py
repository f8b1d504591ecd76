"""Looks at what a killed process left, and goes on from there: loads, saves, prunes and deletes.

It runs in the process of the tests, which has nothing of the killed ones: no store, no writer, no connection of theirs.
"""

from __future__ import annotations

import json
import re
from datetime import timedelta

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, delete, prune
from dcp_storage.errors import CheckpointNotFoundError
from dcp_storage.testing.faults import HEALTHY, NamedFault
from tests.crash.places import Place
from tests.crash.values import BrokenError, blank, state, version_in
from tests.crash.work import OPTIONS

__all__ = ["Checker"]

_COMMIT = re.compile(r"\.commit(?:\.([1-9][0-9]*))?")


class Checker:
    """Works on the folders of one store.

    Args:
        place: the store.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def version(self, url: str, ranks: int = 1, *, stock: bool = False) -> int | None:
        """Which version a real load finds; None where it says plainly that nothing is committed.

        Args:
            url: the folder.
            ranks: how many ranks saved it.
            stock: whether to load what has no commit.

        Raises:
            BrokenError: the load failed in any other way, or found a mixture.
        """
        found = {key: value for rank in range(ranks) for key, value in blank(rank).items()}
        reader = FsspecStorageReader(url, storage_options=self._place.options, require_commit=not stock)
        try:
            dcp.load(found, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            failure = error.failures[min(error.failures)][0]
            if isinstance(failure, CheckpointNotFoundError):
                return None
            raise BrokenError(f"a load raised {type(failure).__name__}: {failure}") from error
        return version_in(found, ranks)

    def save(self, url: str, version: int, fault: NamedFault = HEALTHY) -> None:
        """A whole save, over whatever is there."""
        writer = FsspecStorageWriter(url, storage_options=self._place.options, overwrite=True, options=OPTIONS)
        fault.in_writer(writer)
        try:
            dcp.save(dict(state(version)), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            failure = error.failures[min(error.failures)][0]
            raise BrokenError(f"the next save raised {type(failure).__name__}: {failure}") from error

    def delete(self, url: str) -> None:
        """A whole delete, without a grace."""
        delete(url, grace=timedelta(0), storage_options=self._place.options)

    def prune(self, url: str) -> None:
        """A whole prune, without a grace; where there is nothing of ours there is nothing to prune."""
        try:
            report = prune(url, grace=timedelta(0), apply=True, storage_options=self._place.options)
        except CheckpointNotFoundError:
            return
        if not report.ok:
            raise BrokenError(f"the prune has problems: {report.problems}")

    def check_tidy(self, url: str, foreign: set[str]) -> None:
        """Nothing is there but commit objects, what the live commit names, and what is not ours.

        Raises:
            BrokenError: says what is left, or missing.
        """
        names = self._place.names(url)
        commits = {int(m[1] or 1): m[0] for m in map(_COMMIT.fullmatch, names) if m}
        allowed = {*commits.values(), *foreign}
        needed = set(foreign)
        if commits:
            commit = json.loads(self._place.read(url, commits[max(commits)]))
            if commit["state"] == "committed":
                manifest = json.loads(self._place.read(url, commit["manifest"]["name"]))
                needed |= {commit["manifest"]["name"], *(record["name"] for record in manifest["files"])}
                allowed |= {*needed, ".metadata"}
        if names - allowed or needed - names:
            raise BrokenError(f"left behind: {sorted(names - allowed)}, missing: {sorted(needed - names)}")
        if uploads := self._place.open_uploads(url):
            raise BrokenError(f"uploads left open: {uploads}")
