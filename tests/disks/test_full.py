"""A full disk, a read-only disk, the umask: each rank hears of it by number and name, and nothing half is believed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import CheckpointNotFoundError, FsspecStorageReader, FsspecStorageWriter, StoreError
from dcp_storage.stores.local_syscalls import Syscalls
from dcp_storage.testing.ranks import RankPool
from tests.disks import limited, refusing, writer_with
from tests.e2e import ALONE, Place, assert_same, assert_sentence, failure, like, load, raised_by, save, small_state

pytestmark = pytest.mark.filterwarnings(ALONE)

MIB = 1 << 20


def part(rank: int) -> dict[str, Any]:
    """A MiB and a half that only this rank has."""
    return {f"part-{rank}": torch.full((3 * MIB // 8,), float(rank)), "step": 1}


def save_part(rank: int, world: int, folder: str, disk: str | None, fails: bool) -> dict[int, BaseException] | None:
    calls = Syscalls() if disk is None else Syscalls(write=limited(disk, 8 * MIB))
    writer = writer_with(folder, calls)
    if fails:
        return raised_by(lambda: dcp.save(part(rank), storage_writer=writer))
    dcp.save(part(rank), storage_writer=writer)
    return None


@pytest.mark.parametrize("kind", ["tmpfs", "counted"])
def test_a_full_disk(tmp_path: Path, tmpfs: Callable[..., Path | None], ranks: RankPool, kind: str) -> None:
    """A disk too small for three ranks: all hear ENOSPC with the file, nothing is committed; with room a save works.

    Where this user may not mount, both cases count bytes instead of filling a tmpfs.
    """
    disk = tmpfs("size=8m") if kind == "tmpfs" else None
    counted = None if disk else str(tmp_path)
    disk = disk or tmp_path
    (disk / "ballast").write_bytes(bytes(6 * MIB))
    place = Place(str(disk / "run" / "step-1"))
    outcomes = ranks.run(save_part, 3, place.url, counted, True)
    assert len({tuple(sorted(outcome)) for outcome in outcomes}) == 1  # all ranks hear the same
    assert len(outcomes[0]) >= 2
    for outcome in outcomes:
        for rank, error in outcome.items():
            assert type(error) is StoreError
            assert error.errno == errno.ENOSPC
            assert error.key == f"__{rank}_0.distcp"
            assert error.key in str(error)
            assert not error.transient
            assert_sentence(str(error))
    whole = {f"__{rank}_0.distcp" for rank in range(3) if rank not in outcomes[0]}
    assert set(place.files()) == {".claim", *whole}
    failure_of_load(place)
    (disk / "ballast").unlink()
    ranks.run(save_part, 3, place.url, counted, False)
    found = {key: like(value) for rank in range(3) for key, value in part(rank).items()}
    load(found, place.reader())
    assert_same(found, {key: value for rank in range(3) for key, value in part(rank).items()})


def failure_of_load(place: Place) -> None:
    """A load finds nothing that is committed."""
    template = like(small_state())
    error = raised_by(lambda: load(template, place.reader()))[0]
    assert isinstance(error, CheckpointNotFoundError)
    assert_same(template, like(small_state()))


def save_where_no_room(rank: int, world: int, folder: str, name: str) -> dict[int, BaseException]:
    calls = Syscalls(open=refusing(errno.ENOSPC, os.open, name))
    return raised_by(lambda: dcp.save(part(rank), storage_writer=writer_with(folder, calls)))


@pytest.mark.parametrize("name", ["/.claim", "/.manifest", "/.commit"])
def test_a_disk_that_is_full_at_the_end(tmp_path: Path, ranks: RankPool, name: str) -> None:
    """No room for the claim, the manifest or the commit: all ranks hear ENOSPC with that name, and nothing commits."""
    place = Place(str(tmp_path / "one"))
    for outcome in ranks.run(save_where_no_room, 2, place.url, name):
        assert list(outcome) == [0]
        (error,) = outcome.values()
        assert isinstance(error, StoreError)
        assert (error.errno, error.key) == (errno.ENOSPC, name[1:])
    assert not [found for found in place.files() if found.startswith((".commit", ".manifest", ".metadata", "__0"))]
    failure_of_load(place)
    ranks.run(save_part, 2, place.url, None, False)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, ranks: RankPool) -> None:
    """An overwrite that finds no room leaves the old checkpoint loadable, value for value, and no file of its own."""
    place = Place(str(tmp_path / "one"))
    save(small_state(1), place.writer())
    before = {name: place.get(name) for name in place.files()}
    room = sum(len(body) for body in before.values()) + 1000
    writer = writer_with(place.url, Syscalls(write=limited(place.url, room)), overwrite=True)
    error = failure(StoreError, lambda: save(small_state(2), writer))
    assert error.errno == errno.ENOSPC
    assert {name: place.get(name) for name in place.files()} == before
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(1))


def save_under(rank: int, world: int, folder: str, umask: int) -> None:
    before = os.umask(umask)
    try:
        dcp.save(part(rank), storage_writer=FsspecStorageWriter(folder))
    finally:
        os.umask(before)


@pytest.mark.parametrize(("umask", "files", "folders"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)])
def test_the_umask(tmp_path: Path, ranks: RankPool, umask: int, files: int, folders: int) -> None:
    """All that a save makes has the mode of any other program's files and folders under the user's umask."""
    ranks.run(save_under, 2, str(tmp_path / "run" / "step-1"), umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert modes == dict.fromkeys([".commit", ".manifest", ".metadata", "__0_0.distcp", "__1_0.distcp"], files)
    for folder in (tmp_path / "run", tmp_path / "run" / "step-1"):
        assert stat.S_IMODE(folder.stat().st_mode) == folders


def read_only_calls() -> Syscalls:
    """A disk that takes nothing."""

    def no(*args: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), args[0])

    def may_open(path: str, flags: int, mode: int) -> int:
        return int(no(path)) if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) else os.open(path, flags, mode)

    return Syscalls(open=may_open, mkdir=no, link=no, rename_new=no, replace=no, unlink=no)


@pytest.mark.parametrize("step", ["step-1", "step-2"])
def test_a_read_only_disk(tmp_path: Path, tmpfs: Callable[..., Path | None], step: str) -> None:
    """On a read-only disk a checkpoint loads; a save beside or over it fails as EROFS in a sentence, and all stays."""
    disk = tmpfs("size=8m")
    place = Place(str((disk or tmp_path) / "run" / "step-1"))
    save(small_state(1), place.writer())
    before = {name: place.get(name) for name in place.files()}
    if disk is None:
        calls = read_only_calls()
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=20)
        calls = Syscalls()
    folder = f"{(disk or tmp_path) / 'run' / step}"
    error = failure(StoreError, lambda: save(small_state(2), writer_with(folder, calls, overwrite=True)))
    assert error.errno == errno.EROFS
    assert folder in str(error)
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(1))
    assert {name: place.get(name) for name in place.files()} == before


def load_as_another_user(rank: int, world: int, folder: str) -> None:
    user = os.geteuid()
    if user == 0:  # root may read everything
        os.seteuid(65534)
    found = like(small_state())
    try:
        load(found, FsspecStorageReader(folder))
    finally:
        os.seteuid(user)
    assert_same(found, small_state(1))


def test_a_folder_that_may_only_be_read(ranks: RankPool) -> None:
    """Who may read the folder and its files, and no more, can load."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        save(small_state(1), FsspecStorageWriter(f"{folder}/one"))
        Path(folder, "one").chmod(0o555)
        ranks.run(load_as_another_user, 1, f"{folder}/one", init=False)
        Path(folder, "one").chmod(0o755)
