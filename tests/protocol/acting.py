"""A save without torch.distributed: the real steps of the coordinator, around ranks that write a few bytes each."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dcp_storage import names
from dcp_storage.commit import Attempt, Steps, begin, publish
from dcp_storage.errors import CheckpointError, CommitUnknownError
from dcp_storage.records import BytesEntry, FileRecord, ItemRecord, Manifest
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.wrappers import Request
from tests.protocol.oracle import files_of, highest

__all__ = ["Saver", "body_of", "commit_now", "contents", "loaded_by", "once"]

_SIZE = 32


def body_of(author: str) -> bytes:
    """What every file of an attempt holds: its author, in a size that is the same for all."""
    return author.encode().ljust(_SIZE, b".")


@dataclass
class Saver:
    """One save by two ranks, as the writer does it.

    Attributes:
        store: the folder.
        author: token of the attempt, and the content of its files.
        overwrite: as for the writer.
        steps: as for the writer.
        attempt: the attempt, once it has begun.
    """

    store: Store
    author: str
    overwrite: bool = False
    steps: Steps = field(default_factory=Steps)
    attempt: Attempt | None = None
    written: list[str] = field(default_factory=list)

    def begin(self) -> Attempt:
        """What the coordinator does before the ranks write."""
        self.attempt = Attempt(self.store, self.author, overwrite=self.overwrite, world_size=2)
        begin(self.attempt, self.steps)
        return self.attempt

    def write(self) -> None:
        """What the ranks do."""
        assert self.attempt is not None
        for rank in (0, 1):
            token = None if self.attempt.plain else f"r{rank}{self.author[2:]}"
            name = names.shard_name(rank, 0, token)
            self.written.append(name)
            self.store.put(name, [memoryview(body_of(self.author))])

    def publish(self) -> None:
        """What the coordinator does after it; after a failure it takes back what it may."""
        assert self.attempt is not None
        try:
            publish(self.attempt, self.manifest(), self.steps)
        except CommitUnknownError:
            raise
        except CheckpointError:
            if not self.attempt.committed:
                own = names.manifest_name(None if self.attempt.plain else self.attempt.token)
                self.store.delete([*self.written, own])
            raise

    def save(self) -> Attempt:
        """All of it."""
        attempt = self.begin()
        self.write()
        self.publish()
        return attempt

    def manifest(self) -> Manifest:
        """The manifest of what was written."""
        body = body_of(self.author)
        crc = zlib.crc32(body)
        return Manifest(
            format=1,
            version="1.0.0",
            files=tuple(FileRecord(name, len(body), crc, rank) for rank, name in enumerate(self.written)),
            items=tuple(
                ItemRecord(key=f"k{k}", file=k, offset=0, length=len(body), payload_length=len(body), crc32=crc)
                for k in range(len(self.written))
            ),
            entries={f"k{k}": BytesEntry() for k in range(len(self.written))},
        )


def commit_now(store: Store, author: str, *, overwrite: bool = False) -> Attempt:
    """A whole save that meets no fault."""
    return Saver(store, author, overwrite).save()


def contents(files: dict[str, bytes], only: Sequence[str]) -> set[str]:
    """Whose content the named files have."""
    return {files[name].decode().rstrip(".") for name in only}


def loaded_by(store: DictStore) -> set[str] | None:
    """Whose files the committed checkpoint has; None where nothing is committed. Raises where it is not whole."""
    files = files_of(store)
    _, said = highest(files)
    if said is None or said["state"] == "void":
        return None
    manifest = json.loads(files[said["manifest"]["name"]])
    return contents(files, [record["name"] for record in manifest["files"]])


def once(operation: str, name: str, action: Callable[[], object]) -> Callable[[Request], None]:
    """A hook that acts at the first request of an operation on a name."""
    left = [action]

    def hook(request: Request) -> None:
        if left and (request.operation, request.name) == (operation, name):
            left.pop()()

    return hook
