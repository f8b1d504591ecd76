"""Named faults: each takes one protection of the commit protocol away, to show what it is for.

A test of an invariant runs one scenario twice, with :data:`HEALTHY` and with a fault, and sees the invariant hold and
fail. The faults go in where the library takes its steps, or its store, as an argument; nothing is patched.

Example::

    writer = FsspecStorageWriter(folder)
    FAULTS["no-read-back"].in_writer(writer)   # the next save believes every error of the commit's create
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dcp_storage import commit, fence
from dcp_storage.commit import Steps
from dcp_storage.fence import DELETE, PRUNE
from dcp_storage.reader import FsspecStorageReader
from dcp_storage.reading import LoadSteps
from dcp_storage.session import OpenStore
from dcp_storage.store import Store
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.stores.location import Location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing import faults_steps as wrong
from dcp_storage.testing.faults_stores import LeavesRubbish, LogsFailedWrites, OutageIsEmpty
from dcp_storage.testing.faulty import IgnoresIfAbsent
from dcp_storage.writer import FsspecStorageWriter

__all__ = ["FAULTS", "HEALTHY", "NamedFault"]

T = TypeVar("T")


def _same(value: T) -> T:
    return value


@dataclass(frozen=True)
class NamedFault:
    """One protection taken away. What it does not change it hands back as it was.

    Attributes:
        name: a stable name.
        invariant: the invariant that the protection holds up, ``"I1"`` to ``"I11"``.
        says: one sentence on what is done wrong.
        save: changes the steps of a save.
        load: changes what a load rests on.
        delete: changes the steps of a delete.
        prune: changes the steps of a prune.
        store: wraps the bare store.
        calls: changes the system calls of a local store.
    """

    name: str
    invariant: str
    says: str
    save: Callable[[Steps], Steps] = _same
    load: Callable[[LoadSteps], LoadSteps] = _same
    delete: Callable[[tuple[fence.Step, ...]], tuple[fence.Step, ...]] = _same
    prune: Callable[[tuple[fence.Step, ...]], tuple[fence.Step, ...]] = _same
    store: Callable[[Store], Store] = _same
    calls: Callable[[Syscalls], Syscalls] = _same

    def in_writer(self, writer: FsspecStorageWriter) -> FsspecStorageWriter:
        """Puts the fault into a writer, for all its saves to come; returns the writer."""
        writer._steps = self.save(writer._steps)
        writer._opener = self._wrapped(writer._opener)
        return writer

    def in_reader(self, reader: FsspecStorageReader) -> FsspecStorageReader:
        """Puts the fault into a reader, for all its loads to come; returns the reader."""
        reader._steps = self.load(reader._steps)
        reader._opener = self._wrapped(reader._opener)
        return reader

    @property
    def delete_steps(self) -> tuple[fence.Step, ...]:
        """The steps of a delete, for :func:`~dcp_storage.fence.delete_folder`."""
        return self.delete(DELETE)

    @property
    def prune_steps(self) -> tuple[fence.Step, ...]:
        """The steps of a prune, for :func:`~dcp_storage.fence.prune_folder`."""
        return self.prune(PRUNE)

    def _wrapped(self, opener: OpenStore | None) -> OpenStore:
        def open_wrapped(location: Location, storage_options: Mapping[str, Any], max_concurrency: int) -> Store:
            if opener is not None:
                return self.store(opener(location, storage_options, max_concurrency))
            return self.store(open_store(location, storage_options, max_concurrency=max_concurrency))

        return open_wrapped


HEALTHY: Final = NamedFault("healthy", "", "nothing is done wrong")
"""No fault: every protection is there."""


def _publish(old: commit.Step, *new: commit.Step) -> Callable[[Steps], Steps]:
    return lambda steps: dataclasses.replace(steps, publish=wrong.exchange(steps.publish, old, *new))


def _begin(old: commit.Step, *new: commit.Step) -> Callable[[Steps], Steps]:
    return lambda steps: dataclasses.replace(steps, begin=wrong.exchange(steps.begin, old, *new))


def _commit_first(steps: Steps) -> Steps:
    later = wrong.exchange(steps.publish, commit.write_manifest, wrong.name_manifest)
    moved = wrong.exchange(later, commit.make_commit, commit.make_commit, commit.write_manifest)
    return dataclasses.replace(steps, publish=moved)


def _old_files_first(steps: Steps) -> Steps:
    fewer = wrong.exchange(steps.publish, commit.remove_replaced)
    moved = wrong.exchange(fewer, commit.make_commit, commit.remove_replaced, commit.make_commit)
    return dataclasses.replace(steps, publish=moved)


def _row(old: fence.Step, *new: fence.Step) -> Callable[[tuple[fence.Step, ...]], tuple[fence.Step, ...]]:
    return lambda steps: wrong.exchange(steps, old, *new)


_ALL: Final = (
    NamedFault(
        "commit-by-put",
        "I1",
        "the commit object is written whether its number is free or not",
        save=_publish(commit.make_commit, wrong.commit_by_put),
    ),
    NamedFault(
        "commit-before-manifest",
        "I2",
        "the commit object is made before the manifest that it names",
        save=_commit_first,
    ),
    NamedFault(
        "no-second-listing",
        "I2",
        "nobody looks whether the files that ranks reported are there",
        save=_publish(commit.check_files),
    ),
    NamedFault(
        "no-fsync",
        "I2",
        "a local write returns before it is on the disk",
        calls=lambda calls: dataclasses.replace(calls, fsync=lambda fd: None),
    ),
    NamedFault(
        "old-files-first",
        "I3",
        "the replaced files are removed before the commit",
        save=_old_files_first,
    ),
    NamedFault(
        "shared-names",
        "I3",
        "the plain names are used without a claim, so that two attempts write the same files",
        save=_begin(commit.claim, wrong.take_plain_names),
    ),
    NamedFault(
        "no-clean-up",
        "I4",
        "what a failed rank wrote stays, its open uploads too",
        store=LeavesRubbish,
    ),
    NamedFault(
        "ignores-if-absent",
        "I5",
        "the store lets a second create replace the first",
        store=IgnoresIfAbsent,
    ),
    NamedFault(
        "delete-without-void",
        "I5",
        "a delete removes the highest commit object instead of adding a void",
        delete=_row(fence.fence_void, wrong.remove_highest_commit),
    ),
    NamedFault(
        "no-read-back",
        "I6",
        "any error of the commit's create is taken for a failure",
        save=_publish(commit.make_commit, wrong.commit_without_look),
    ),
    NamedFault(
        "commit-errors-logged",
        "I7",
        "a commit that failed leaves a line in a log",
        save=_publish(commit.make_commit, wrong.commit_or_log),
    ),
    NamedFault(
        "write-errors-logged",
        "I7",
        "a file that could not be written leaves a line in a log",
        save=_publish(commit.check_files),
        store=LogsFailedWrites,
    ),
    NamedFault(
        "no-sizes",
        "I8",
        "nobody looks at the files before tensors change",
        load=lambda steps: dataclasses.replace(steps, check_sizes=wrong.skip_sizes),
    ),
    NamedFault(
        "no-blocks",
        "I8",
        "bytes are not compared with their CRC-32",
        load=lambda steps: dataclasses.replace(steps, check_blocks=wrong.skip_blocks),
    ),
    NamedFault(
        "no-allow-list",
        "I9",
        "objects are unpickled whatever they ask for",
        load=lambda steps: dataclasses.replace(steps, load_object=wrong.unpickle_anything),
    ),
    NamedFault(
        "outage-is-empty",
        "I10",
        "a listing that failed is taken for an empty folder",
        store=OutageIsEmpty,
    ),
    NamedFault(
        "prune-without-fence",
        "I11",
        "a prune deletes without taking a commit number first",
        prune=_row(fence.fence_prune),
    ),
    NamedFault(
        "prune-lists-late",
        "I11",
        "a prune deletes what it lists after its fence",
        prune=_row(fence.fence_prune, fence.fence_prune, wrong.list_again),
    ),
    NamedFault(
        "prune-ignores-ages",
        "I11",
        "a prune takes files that somebody is still writing",
        prune=_row(fence.choose_old, wrong.ignore_ages, fence.choose_old),
    ),
    NamedFault(
        "prune-forgets-live",
        "I11",
        "a prune takes no notice of what is committed",
        prune=_row(fence.choose_old, wrong.forget_live, fence.choose_old),
    ),
    NamedFault(
        "takes-everything",
        "I11",
        "a delete or a prune takes files that are not ours",
        delete=_row(fence.choose_all, fence.choose_all, wrong.take_everything),
        prune=_row(fence.choose_old, fence.choose_old, wrong.take_everything),
    ),
)

FAULTS: Final[Mapping[str, NamedFault]] = {fault.name: fault for fault in _ALL}
"""Every fault by its name."""
