"""Small object stores as fsspec filesystems, which fail where a test says so."""

from __future__ import annotations

from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from dcp_storage.stores.remote import FsspecStore

__all__ = ["BLOCK", "BlobFile", "BlobFileSystem", "DiscardingFile", "OnBlobs", "PipingFileSystem"]

BLOCK = 5 * 2**20  # fsspec's files send what they hold whenever they hold this much


class BlobFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """An upload as object stores have it: chunks are kept apart and published by the final one."""

    def _initiate_upload(self) -> None:
        self.chunks: list[bytes] = []
        self.fs.note("initiate")

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.note("chunk")
        self.chunks.append(self.buffer.getvalue())
        if self.fs.publishes_early or final:
            self.fs.blobs[self.path] = b"".join(self.chunks)
        if final:
            self.fs.note("final")
        return True


class DiscardingFile(BlobFile):
    """One whose class can give its upload back, like those of s3fs and gcsfs."""

    def discard(self) -> None:
        self.fs.note("discard")


class BlobFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A small object store. ``faults`` maps a step to what it raises; ``log`` says what happened."""

    protocol: str | tuple[str, ...] = "blob"
    cachable = False

    def __init__(self, *, publishes_early: bool = False, file: type[BlobFile] = BlobFile) -> None:
        super().__init__()
        self.blobs: dict[str, bytes] = {}
        self.faults: dict[str, list[Exception | None]] = {}
        self.log: list[str] = []
        self.fields: dict[str, Any] = {}
        self.publishes_early = publishes_early
        self.file = file

    def note(self, step: str) -> None:
        self.log.append(step)
        planned = self.faults.get(step)
        if planned and (error := planned.pop(0)) is not None:
            raise error

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> AbstractBufferedFile:
        self.note(f"open {mode}")
        return self.file(self, path, mode, kwargs.get("block_size") or "default", cache_type="none")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.note("info")
        if path not in self.blobs:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.blobs[path]), "type": "file", **self.fields}

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        self.note("ls")
        found = [self.info(key) for key in self.blobs if key == path or key.startswith(f"{path}/")]
        if not found:
            raise FileNotFoundError(path)
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.note("cat_file")
        if path not in self.blobs:
            raise FileNotFoundError(path)
        if (start or 0) >= len(self.blobs[path]):
            raise ValueError("416: the range cannot be satisfied")
        return self.blobs[path][start:end]

    def rm_file(self, path: str) -> None:
        self.note("rm_file")
        if path not in self.blobs:
            raise FileNotFoundError(path)
        del self.blobs[path]


class PipingFileSystem(BlobFileSystem):
    """One with a put of its own, which knows only some modes."""

    refusal: Exception | None = None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.note(f"pipe {mode}")
        if mode == "create" and self.refusal is not None:
            raise self.refusal
        if mode == "create" and path in self.blobs:
            raise FileExistsError(path)
        self.blobs[path] = bytes(value)


class OnBlobs:
    """Fixtures: an empty object store and the adapter on it."""

    @pytest.fixture
    def blobs(self) -> BlobFileSystem:
        """An empty object store."""
        return BlobFileSystem()

    @pytest.fixture
    def store(self, blobs: BlobFileSystem) -> FsspecStore:
        """The adapter on it."""
        return FsspecStore(blobs, "bucket/run", "blob://bucket/run")
