"""Runs in memory with a clock that can be moved, and a short way to commit a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_storage import names
from dcp_storage.options import LoadOptions
from dcp_storage.store import Store
from dcp_storage.stores.location import Location, parse_location
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.tools.opening import Folder
from dcp_storage.tools.runs import Run
from tests.protocol.acting import Saver, commit_now
from tests.protocol.oracle import files_of, highest

__all__ = ["DAY", "MemoryRun", "bare", "put"]

DAY = 86400.0


def put(store: Store, *given: str) -> None:
    """Puts objects of one byte."""
    for name in given:
        store.put(name, [memoryview(b"x")])


def bare(store: Store) -> Store:
    """The store itself."""
    return store


@dataclass
class MemoryRun:
    """A run whose folders are DictStores.

    Attributes:
        objects: what all of them hold, and their clock.
        calls: what was sent by the tools, one record for each folder that was opened.
        wrap: put around each store that a tool opens.
    """

    objects: Any = field(default_factory=DictStore.Objects)
    calls: list[RecordingStore] = field(default_factory=list)
    wrap: Callable[[Store], Store] = bare

    @property
    def folder(self) -> Folder:
        """The root, for the tools."""
        return Folder(parse_location("memory://run"), {}, LoadOptions(attempts=1), self._open)

    @property
    def run(self) -> Run:
        """The run."""
        return Run(self.folder)

    def _open(self, location: Location, options: Mapping[str, Any], max_concurrency: int) -> Store:
        self.calls.append(RecordingStore(self.wrap(self.at(location.path.removeprefix("run").strip("/")))))
        return self.calls[-1]

    def at(self, name: str) -> DictStore:
        """The store of a sub-folder; of the root with an empty name."""
        return DictStore(self.objects, folder=f"run/{name}".rstrip("/"))

    def commit(self, *steps: int | str, overwrite: bool = False) -> None:
        """Commits steps, each in the folder that this package would use, or in the one that is named."""
        for step in steps:
            folder = step if isinstance(step, str) else f"step-{step:08d}"
            commit_now(self.at(folder), names.new_token(), overwrite=overwrite)

    def saver(self, name: str, *, overwrite: bool = False) -> Saver:
        """A save that has begun and written its files, and not committed."""
        saver = Saver(self.at(name), names.new_token(), overwrite)
        saver.begin()
        saver.write()
        return saver

    def files(self, name: str) -> dict[str, bytes]:
        """What a folder holds."""
        return files_of(self.at(name))

    def state(self, name: str) -> str:
        """What the highest commit of a folder says: ``committed``, ``void`` or nothing."""
        said = highest(self.files(name))[1]
        return "" if said is None else str(said["state"])

    def committed(self) -> list[str]:
        """The folders that hold a committed checkpoint, whole, as the oracle sees it."""
        folders = {folder.removeprefix("run/") for folder, _ in self.objects.held}
        return sorted(name for name in folders if self.state(name) == "committed")

    def sent(self) -> list[str]:
        """All operations that the tools sent."""
        return [operation for recording in self.calls for operation in recording.operations()]
