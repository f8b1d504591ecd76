"""What the general adapter's writes leave when they fail: nothing is published by accident."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from dcp_storage.errors import (
    ObjectExistsError,
    StoreError,
)
from dcp_storage.store import Atomicity
from dcp_storage.stores.remote import FsspecStore
from tests.stores.blob_kit import BLOCK, BlobFile, BlobFileSystem, DiscardingFile, OnBlobs, PipingFileSystem


class TestUpload(OnBlobs):
    @pytest.mark.slow
    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize("file", [BlobFile, DiscardingFile])
    def test_a_failure_half_way_leaves_nothing(self, early: bool, file: type[BlobFile]) -> None:
        """Where the second chunk fails nothing is published, then, by the abort, or when the file is collected."""
        fs = BlobFileSystem(publishes_early=early, file=file)
        fs.faults["chunk"] = [None, OSError(errno.ENOSPC, "full")]
        upload = FsspecStore(fs, "b/run", "blob://b/run").upload("a")
        upload.write_part(1, 0, [memoryview(bytes(BLOCK))])
        upload.write_part(2, BLOCK, [memoryview(bytes(BLOCK))])
        with pytest.raises(StoreError) as caught:
            upload.write_part(3, 2 * BLOCK, [memoryview(b"x")])
        error = caught.value
        assert (error.errno, error.key, error.operation, error.transient) == (errno.ENOSPC, "a", "write_part", False)
        with pytest.raises(StoreError):
            upload.complete()
        with pytest.raises(StoreError):
            upload.write_part(3, 2 * BLOCK, [memoryview(b"x")])
        gc.collect()
        assert "final" not in fs.log
        upload.abort()
        upload.abort()
        del upload
        gc.collect()
        assert fs.blobs == {}
        assert "final" not in fs.log
        assert fs.log.count("discard") == (1 if file is DiscardingFile else 0)

    def test_an_abort_publishes_nothing(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """Giving up an upload after some chunks sends no final one, also not when the file is collected."""
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(bytes(BLOCK))])
        upload.write_part(2, BLOCK, [memoryview(b"x")])
        upload.abort()
        del upload
        gc.collect()
        assert (blobs.blobs, blobs.log.count("final")) == ({}, 0)

    def test_an_upload_without_a_byte_sent_leaves_no_trace(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """An upload that is given up before its second part has sent nothing and removes nothing."""
        blobs.blobs["bucket/run/a"] = b"another's"
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"1")])
        upload.abort()
        assert blobs.log == []
        assert blobs.blobs == {"bucket/run/a": b"another's"}

    def test_a_failed_close_publishes_nothing_later(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """Where the final chunk fails, the error is told and neither a second complete nor the collector sends it."""
        blobs.faults["chunk"] = [PermissionError("no")]
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"123")])
        for wanted in (errno.EACCES, errno.EINVAL):
            with pytest.raises(StoreError) as caught:
                upload.complete()
            assert (caught.value.errno, caught.value.transient) == (wanted, False)
        upload.abort()
        del upload
        gc.collect()
        assert (blobs.blobs, blobs.log.count("chunk")) == ({}, 1)

    def test_a_lost_answer_of_the_close_is_found_out(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """Where the object was made but the answer was lost, the error is ambiguous and a second complete returns."""
        blobs.faults["final"] = [TimeoutError("lost")]
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"123")])
        with pytest.raises(StoreError) as caught:
            upload.complete()
        assert (caught.value.ambiguous, caught.value.transient) == (True, True)
        upload.complete()
        assert blobs.blobs == {"bucket/run/a": b"123"}

    def test_an_abort_after_a_lost_answer_looks_again(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """An object that was made all the same is removed by the abort."""
        blobs.faults["final"] = [TimeoutError("lost")]
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"123")])
        with pytest.raises(StoreError):
            upload.complete()
        assert "bucket/run/a" in blobs.blobs
        upload.abort()
        assert blobs.blobs == {}

    def test_an_object_that_stays_fails_the_abort(
        self, store: FsspecStore, blobs: BlobFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the object cannot be removed, or is still there afterwards, the abort raises and can be repeated."""
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"123")])
        upload.complete()
        blobs.faults["rm_file"] = [PermissionError("no")]
        with pytest.raises(StoreError):
            upload.abort()
        with monkeypatch.context() as patched:
            patched.setattr(blobs, "rm_file", lambda _: None)
            with pytest.raises(StoreError):
                upload.abort()
        upload.abort()
        assert blobs.blobs == {}

    def test_the_first_part_can_be_tried_again(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """If the file cannot be opened or its first chunk fails, sending on begins a new file."""
        blobs.faults["open wb"] = [ConnectionResetError("reset")]
        blobs.faults["chunk"] = [ConnectionResetError("reset")]
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"y" * BLOCK)])
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                upload.write_part(2, BLOCK, [memoryview(b"z")])
            assert caught.value.transient
        upload.write_part(2, BLOCK, [memoryview(b"z")])
        upload.complete()
        assert blobs.blobs == {"bucket/run/a": b"y" * BLOCK + b"z"}

    def test_an_object_of_the_wrong_size_is_not_complete(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """After the close the object is looked at; a size that is not that of the parts raises."""
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"123")])
        blobs.fields["size"] = 2
        with pytest.raises(StoreError):
            upload.complete()

    def test_parts_come_in_order(self, store: FsspecStore) -> None:
        """A part out of order raises EINVAL; this filesystem takes one after another."""
        assert store.parallel_parts is False
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"12")])
        for number, offset in ((3, 2), (2, 5), (1, 7)):
            with pytest.raises(StoreError) as caught:
                upload.write_part(number, offset, [memoryview(b"x")])
            assert caught.value.errno == errno.EINVAL

    def test_a_file_that_grows_in_place_is_removed(self, tmp_path: Path) -> None:
        """Over a folder, an aborted upload's file is gone, also where closing it fails."""
        store = FsspecStore(LocalFileSystem(), str(tmp_path), "test://x")
        upload = store.upload("a")
        upload.write_part(1, 0, [memoryview(b"1")])
        upload.write_part(2, 1, [memoryview(b"2")])
        assert (tmp_path / "a").exists()
        upload.abort()
        assert list(tmp_path.iterdir()) == []


class TestPutAndCreate(OnBlobs):
    @pytest.mark.parametrize("early", [False, True])
    def test_a_put_that_fails_leaves_nothing(self, early: bool) -> None:
        """A put whose second chunk fails leaves no part of it visible, then or when the file is collected."""
        fs = BlobFileSystem(publishes_early=early)
        fs.faults["chunk"] = [None, OSError(errno.ENOSPC, "full")]
        with pytest.raises(StoreError) as caught:
            FsspecStore(fs, "b/run", "blob://b/run").put("a", [memoryview(bytes(BLOCK)), memoryview(b"x")])
        assert caught.value.errno == errno.ENOSPC
        gc.collect()
        assert (fs.blobs, fs.log.count("final")) == ({}, 0)

    def test_a_put_that_fails_keeps_the_old_object(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """A failed put over an object leaves that as it was."""
        blobs.blobs["bucket/run/a"] = b"old"
        blobs.faults["chunk"] = [OSError(errno.EIO, "bad")]
        with pytest.raises(StoreError):
            store.put("a", [memoryview(b"newer")])
        gc.collect()
        assert blobs.blobs == {"bucket/run/a": b"old"}

    def test_a_put_in_a_folder_replaces_in_one_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over a real folder a put writes beside the name and renames; if writing fails the old stays, alone."""
        store = FsspecStore(LocalFileSystem(), str(tmp_path), "test://x")
        store.put("a", [memoryview(b"old")])
        inode = (tmp_path / "a").stat().st_ino
        store.put("a", [memoryview(b"new")])
        assert (tmp_path / "a").stat().st_ino != inode

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        for target in ("fsspec.implementations.local.LocalFileOpener.write", "shutil.move"):
            with monkeypatch.context() as patched:
                patched.setattr(target, full)
                with pytest.raises(StoreError) as caught:
                    store.put("a", [memoryview(b"newest")])
                assert caught.value.errno == errno.ENOSPC
            assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]

    def test_a_create_looks_first(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """A taken name is found by looking, before anything is written."""
        blobs.blobs["bucket/run/a"] = b"theirs"
        with pytest.raises(ObjectExistsError):
            store.create("a", b"ours")
        assert blobs.log == ["info"]
        assert store.create_if_absent is Atomicity.UNKNOWN

    def test_a_create_asks_for_the_exclusive_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where another takes the name after the look, fsspec's exclusive ways still refuse it."""
        theirs = PipingFileSystem()
        theirs.blobs["b/run/a"] = b"theirs"
        (tmp_path / "a").write_bytes(b"theirs")
        monkeypatch.setattr("dcp_storage.stores.remote.fresh_info", lambda *_: None)  # nothing is seen yet
        for fs, path in ((theirs, "b/run"), (LocalFileSystem(), str(tmp_path))):
            store = FsspecStore(fs, path, "test://x")
            with pytest.raises(ObjectExistsError):
                store.create("a", b"ours")
        assert theirs.blobs["b/run/a"] == (tmp_path / "a").read_bytes() == b"theirs"

    @pytest.mark.parametrize("refusal", [TypeError("mode"), ValueError("mode"), NotImplementedError("mode")])
    def test_a_create_without_the_exclusive_way(self, refusal: Exception) -> None:
        """A filesystem that does not know the mode is looked at again and then written to."""
        fs = PipingFileSystem()
        fs.refusal = refusal
        store = FsspecStore(fs, "b/run", "blob://b/run")
        store.create("a", b"ours")
        assert fs.log == ["info", "pipe create", "info", "pipe overwrite"]
        with pytest.raises(ObjectExistsError):
            store.create("a", b"theirs")
        assert fs.blobs == {"b/run/a": b"ours"}

    def test_a_create_that_fails_half_way_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over a real folder, a create that cannot write all removes the file it made."""

        def short(self: Any, data: bytes) -> int:
            self.f.write(bytes(data)[:2])
            self.f.flush()
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr("fsspec.implementations.local.LocalFileOpener.write", short)
        store = FsspecStore(LocalFileSystem(), str(tmp_path), "test://x")
        with pytest.raises(StoreError) as caught:
            store.create("a", b"12345")
        assert caught.value.errno == errno.ENOSPC
        assert list(tmp_path.iterdir()) == []

    def test_a_lost_answer_keeps_the_object(self, store: FsspecStore, blobs: BlobFileSystem) -> None:
        """A create that was applied but not answered is ambiguous, and its object is not removed."""
        blobs.faults["final"] = [TimeoutError("lost")]
        with pytest.raises(StoreError) as caught:
            store.create("a", b"ours")
        assert caught.value.ambiguous
        assert blobs.blobs == {"bucket/run/a": b"ours"}
