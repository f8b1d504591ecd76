"""Large parts of a local file go past the page cache, whole pages of them, and whatever cannot goes the old way."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_storage.errors import InvalidLocationError, StoreError
from dcp_storage.options import SaveOptions
from dcp_storage.stores import local_direct, local_upload
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.ranks import RankPool

PAGE = mmap.PAGESIZE
LARGE = 1 << 20  # bytes from which on a part is worth it (docs/design/015)


@dataclass
class Kernel:
    """System calls that take direct writes as strictly as a disk does, on any filesystem.

    Attributes:
        direct: descriptors that were opened for direct writes.
        wrote: bytes written directly, and otherwise.
        order: which calls came, of those that matter for durability.
        refuses: errors that direct opens and writes answer, by the name of the call.
        shorter: bytes by which each direct write falls short.
    """

    direct: set[int] = field(default_factory=set)
    wrote: list[int] = field(default_factory=lambda: [0, 0])
    order: list[str] = field(default_factory=list)
    refuses: dict[str, int] = field(default_factory=dict)
    shorter: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def calls(self) -> Syscalls:
        return Syscalls(open=self._open, close=self._close, write=self._write, fsync=self._fsync)

    def _open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT and "open" in self.refuses:
            raise OSError(self.refuses["open"], os.strerror(self.refuses["open"]))
        fd = os.open(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def _close(self, fd: int) -> None:
        self.order.append("close direct" if fd in self.direct else "close")
        self.direct.discard(fd)
        os.close(fd)

    def _write(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        size = sum(piece.nbytes for piece in pieces)
        if fd not in self.direct:
            with self.lock:
                self.wrote[1] += size
            return os.pwritev(fd, pieces, offset)
        if "write" in self.refuses:
            raise OSError(self.refuses["write"], os.strerror(self.refuses["write"]))
        for piece in pieces:
            address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            if address % PAGE or piece.nbytes % PAGE or offset % PAGE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        count = os.pwritev(fd, [pieces[0][: max(size - self.shorter, 0)]], offset)
        with self.lock:
            self.wrote[0] += count
        return count

    def _fsync(self, fd: int) -> None:
        self.order.append("fsync")
        os.fsync(fd)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(local_upload, "is_on_a_disk", lambda fd: True)
    return Kernel()


def upload(folder: Path, kernel: Kernel, parts: Sequence[Sequence[bytes]], *, direct: bool = True) -> bytes:
    """Uploads the parts, each a row of buffers, several at once; returns what is in the file."""
    store = LocalStore(folder, direct=direct, calls=kernel.calls())
    work, at = store.upload("a"), 0
    with ThreadPoolExecutor(4) as pool:
        ended = []
        for number, part in enumerate(parts, start=1):
            ended.append(pool.submit(work.write_part, number, at, [memoryview(piece) for piece in part]))
            at += sum(map(len, part))
        for each in ended:
            each.result()
    work.complete()
    assert not kernel.direct
    return (folder / "a").read_bytes()


SIZES = st.one_of(
    st.integers(0, 3 * PAGE),
    st.integers(LARGE - 2, LARGE + 2 * PAGE),
    st.sampled_from([LARGE, 4 << 20, (4 << 20) + PAGE, (9 << 20) + 5]),
)


class TestWrites:
    @given(parts=st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=4))
    @settings(max_examples=40, deadline=None)
    def test_any_parts(self, tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]]) -> None:
        """Parts of any size, at any place, of any buffers, make the file that their bytes make."""
        source = os.urandom(1 << 16) * 600  # of no period that a page would hide
        at, given_parts = 0, []
        for part in parts:
            row = []
            for size in part:
                row.append(source[at : at + size])
                at += size
            given_parts.append(row)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_upload, "is_on_a_disk", lambda fd: True)
            kernel = Kernel()
            assert upload(tmp_path_factory.mktemp("direct"), kernel, given_parts) == source[:at]

    def test_only_whole_pages_are_direct(self, tmp_path: Path, kernel: Kernel) -> None:
        """A part's last bytes, fewer than a page, are written in the ordinary way, and so is a part off the pages."""
        first, second = os.urandom(2 * LARGE + 100), os.urandom(LARGE)
        assert upload(tmp_path, kernel, [[first], [second]]) == first + second
        assert kernel.wrote == [2 * LARGE, 100 + LARGE]

    def test_small_parts_are_not(self, tmp_path: Path, kernel: Kernel) -> None:
        """A part of less than a megabyte is written in the ordinary way."""
        data = os.urandom(LARGE - PAGE)
        assert upload(tmp_path, kernel, [[data]]) == data
        assert kernel.wrote == [0, len(data)]

    def test_it_is_durable(self, tmp_path: Path, kernel: Kernel) -> None:
        """The file is synced once all is written: the disk's own cache and the file's size are not yet safe."""
        upload(tmp_path, kernel, [[bytes(LARGE)]])
        assert kernel.order[:3] == ["close direct", "fsync", "close"]

    def test_a_choice(self, tmp_path: Path, kernel: Kernel) -> None:
        """Who wants the checkpoint in the page cache gets no direct write."""
        data = os.urandom(LARGE)
        assert upload(tmp_path, kernel, [[data]], direct=False) == data
        assert kernel.wrote == [0, LARGE]

    def test_the_real_thing(self, tmp_path: Path) -> None:
        """On this filesystem, whatever it is, the bytes are right with direct writes and without."""
        data = os.urandom(5 * LARGE + 7)
        for direct in (True, False):
            store = LocalStore(tmp_path, direct=direct)
            work = store.upload("a")
            work.write_part(1, 0, [memoryview(data)])
            work.complete()
            assert (tmp_path / "a").read_bytes() == data


class TestRefusals:
    @pytest.mark.parametrize("call", ["open", "write"])
    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
    def test_no_direct_writes_here(self, tmp_path: Path, kernel: Kernel, call: str, number: int) -> None:
        """Where the filesystem has none, all is written in the ordinary way."""
        kernel.refuses[call] = number
        data = os.urandom(3 * LARGE)
        assert upload(tmp_path, kernel, [[data[:LARGE]], [data[LARGE:]]]) == data
        assert kernel.wrote == [0, len(data)]

    @pytest.mark.parametrize("call", ["open", "write"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
    def test_an_error_is_one(self, tmp_path: Path, kernel: Kernel, call: str, number: int) -> None:
        """A disk that is full or broken is an error, and what there was of the file goes with the abort."""
        kernel.refuses[call] = number
        store = LocalStore(tmp_path, calls=kernel.calls())
        work = store.upload("a")
        with pytest.raises(StoreError) as caught:
            work.write_part(1, 0, [memoryview(bytes(LARGE))])
        assert (caught.value.errno, caught.value.operation, caught.value.key) == (number, "write_part", "a")
        work.abort()
        assert list(tmp_path.iterdir()) == []
        assert not kernel.direct

    @pytest.mark.parametrize("shorter", [1, PAGE, PAGE + 1, LARGE])
    def test_a_write_that_falls_short(self, tmp_path: Path, kernel: Kernel, shorter: int) -> None:
        """What a direct write left is written in the ordinary way, from the last whole page on."""
        kernel.shorter = shorter
        data = os.urandom(2 * LARGE)
        assert upload(tmp_path, kernel, [[data]]) == data
        assert kernel.wrote[0] < len(data)

    def test_a_network_filesystem(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the filesystem has no block device of its own, nothing is opened for direct writes."""
        kernel = Kernel()
        monkeypatch.setattr(os, "major", lambda device: 0)
        assert upload(tmp_path, kernel, [[bytes(LARGE)]]) == bytes(LARGE)
        assert kernel.wrote[0] == 0


def test_the_option(tmp_path: Path) -> None:
    """``direct_io`` is read from the storage options of a local folder; what is no bool is refused."""
    where = parse_location(str(tmp_path))
    for options, wanted in (({}, True), ({"direct_io": False}, False), ({"auto_mkdir": True}, True)):
        store = open_store(where, options)
        assert isinstance(store, LocalStore)
        assert (store._direct is not None) is wanted
    with pytest.raises(InvalidLocationError, match="direct_io"):
        open_store(where, {"direct_io": "no"})


def test_memory_is_bounded(tmp_path: Path, kernel: Kernel) -> None:
    """All files of a store share two pieces of aligned memory, and no file holds a second descriptor between parts."""
    store = LocalStore(tmp_path, calls=kernel.calls())
    uploads = [store.upload(f"a{number}") for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda upload: upload.write_part(1, 0, [memoryview(bytes(LARGE))]), uploads))
    assert not kernel.direct
    assert kernel.wrote == [20 * LARGE, 0]
    assert store._direct is not None
    assert store._direct._memory.qsize() == 2
    assert SaveOptions().part_size >= 2 * local_direct.PIECE
    for upload in uploads:
        upload.abort()


def forked(rank: int, world: int, folder: str) -> int:
    """Writes a file from a child that was forked while the parent's threads held all of the aligned memory."""
    store = LocalStore(folder)
    assert store._direct is not None
    pool = store._direct._pool()
    pool.get()
    pool.get()
    child = os.fork()
    if child == 0:
        work = store.upload("b")
        work.write_part(1, 0, [memoryview(bytes(LARGE))])
        work.complete()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_after_a_fork(tmp_path: Path, ranks: RankPool) -> None:
    """A forked process has aligned memory of its own, whatever its parent's threads were about."""
    assert ranks.run(forked, 1, str(tmp_path), timeout=60) == [0]
    assert (tmp_path / "b").read_bytes() == bytes(LARGE)
