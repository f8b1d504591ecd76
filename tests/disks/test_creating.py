"""Disks without hard links, without renameat2, or with NFS's lost answers, under whole saves and loads."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_storage import CheckpointExistsError
from dcp_storage.stores.local_syscalls import Syscalls, rename_noreplace
from dcp_storage.testing.ranks import RankFailure, RankPool
from tests.disks import Faults, writer_with
from tests.e2e import ALONE, Place, assert_same, failure, like, load, raised_by, save, small_state
from tests.stores.local_kit import failing

pytestmark = pytest.mark.filterwarnings(ALONE)

NO_LINK: Faults = {"link": failing(errno.EPERM)}
NO_RENAME: Faults = {**NO_LINK, "rename_new": failing(errno.ENOSYS)}
PLAIN = [".commit", ".manifest", ".metadata", "__0_0.distcp"]


def loads(place: Place, seed: int) -> None:
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(seed))


def save_on(rank: int, world: int, folder: str, way: str, seed: int) -> None:
    calls = Syscalls(**{"rename": NO_LINK, "exclusive": NO_RENAME}[way])
    state = {**small_state(seed), f"own-{rank}": [rank]}
    dcp.save(state, storage_writer=writer_with(folder, calls, overwrite=seed > 1))


def refused_on(rank: int, world: int, folder: str, way: str) -> dict[int, BaseException]:
    calls = Syscalls(**{"rename": NO_LINK, "exclusive": NO_RENAME}[way])
    return raised_by(lambda: dcp.save(small_state(9), storage_writer=writer_with(folder, calls)))


@pytest.mark.parametrize("way", ["rename", "exclusive"])
def test_a_disk_without_hard_links(tmp_path: Path, ranks: RankPool, way: str) -> None:
    """Without links, and without renameat2 too: a save commits, a second is refused, an overwrite replaces."""
    place = Place(str(tmp_path / "one"))
    ranks.run(save_on, 2, place.url, way, 1)
    assert sorted(place.files()) == [*PLAIN, "__1_0.distcp"]
    loads(place, 1)
    for outcome in ranks.run(refused_on, 2, place.url, way):
        assert [type(error) for error in outcome.values()] == [CheckpointExistsError]
    ranks.run(save_on, 2, place.url, way, 2)
    assert place.commits() == [".commit", ".commit.2"]
    assert ".claim" not in place.files()
    loads(place, 2)


def killed_while_creating(rank: int, world: int, folder: str, name: str, overwrite: bool) -> None:
    """Saves on a disk with O_EXCL only, and dies by SIGKILL with a third of the object ``name`` on it."""
    opened: dict[int, str] = {}

    def note(path: str, flags: int, mode: int) -> int:
        fd = os.open(path, flags, mode)
        opened[fd] = path
        return fd

    def write(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        if opened[fd] == f"{folder}/{name}":
            os.pwritev(fd, [pieces[0][: pieces[0].nbytes // 3]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwritev(fd, pieces, offset)

    calls = Syscalls(open=note, write=write, **NO_RENAME)
    save(small_state(2), writer_with(folder, calls, overwrite=overwrite))


def kill(ranks: RankPool, place: Place, name: str, *, overwrite: bool = False) -> None:
    """A save dies half-way through creating ``name``, of which a part stays."""
    (found,) = ranks.run(killed_while_creating, 1, place.url, name, overwrite, init=False, allow_failures=True)
    assert isinstance(found, RankFailure)
    assert found.signal == signal.SIGKILL
    assert place.files()[name] > 0


def numbered(place: Place) -> list[str]:
    """The commit objects, without the scratch file that a killed save leaves for prune."""
    return [name for name in place.commits() if re.fullmatch(r"\.commit(\.\d+)?", name)]


def exclusive(place: Place, **options: Any) -> Any:
    return writer_with(place.url, Syscalls(**NO_RENAME), **options)


def test_a_torn_first_commit(tmp_path: Path, ranks: RankPool) -> None:
    """A part of a first commit is no checkpoint to readers and a taken number to writers: the next is second."""
    place = Place(str(tmp_path / "one"))
    kill(ranks, place, ".commit")
    torn = place.get(".commit")
    for required in (True, False):
        error = raised_by(lambda r=required: load(like(small_state()), place.reader(require_commit=r)))[0]  # type: ignore[misc]
        assert getattr(error, "kind", None) == "not-committed", repr(error)
    save(small_state(3), exclusive(place))
    assert numbered(place) == [".commit", ".commit.2"]
    assert place.get(".commit") == torn
    loads(place, 3)


def test_a_torn_second_commit(tmp_path: Path, ranks: RankPool) -> None:
    """A part of a second commit leaves the first checkpoint in force: it loads, refuses, and is replaced by a third."""
    place = Place(str(tmp_path / "one"))
    save(small_state(1), exclusive(place))
    kill(ranks, place, ".commit.2", overwrite=True)
    loads(place, 1)
    failure(CheckpointExistsError, lambda: save(small_state(3), exclusive(place)))
    loads(place, 1)
    save(small_state(3), exclusive(place, overwrite=True))
    assert numbered(place) == [".commit", ".commit.2", ".commit.3"]
    loads(place, 3)


def test_a_torn_claim(tmp_path: Path, ranks: RankPool) -> None:
    """A part of a claim keeps the next save from the plain names, and nothing more."""
    place = Place(str(tmp_path / "one"))
    kill(ranks, place, ".claim")
    save(small_state(3), exclusive(place))
    assert numbered(place) == [".commit"]
    (shard,) = place.shards()
    assert shard != "__0_0.distcp"
    loads(place, 3)


def sent_twice(does: Callable[[str, str], None], count: list[int]) -> Callable[[str, str], None]:
    """The call as over NFS when its first answer is lost: it is done, sent again, and the second finds the first."""

    def call(source: str, target: str) -> None:
        does(source, target)
        count[0] += 1
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)

    return call


@pytest.mark.parametrize("way", ["link", "rename_new"])
def test_a_create_that_was_sent_twice(tmp_path: Path, way: str) -> None:
    """Every create answers EEXIST after it succeeded: the save commits once, by plain names, and its claim goes."""
    place, count = Place(str(tmp_path / "one")), [0]
    faults: Faults = {"link": sent_twice(os.link, count)}
    if way == "rename_new":
        faults = {**NO_LINK, "rename_new": sent_twice(rename_noreplace, count)}
    save(small_state(1), writer_with(place.url, Syscalls(**faults)))
    assert count == [2]  # the claim and the commit
    assert sorted(place.files()) == PLAIN
    loads(place, 1)


@pytest.mark.parametrize("way", ["link", "rename_new"])
def test_a_create_that_another_won(tmp_path: Path, way: str) -> None:
    """EEXIST because of another's commit is a loss: the save raises, and the other's object is as it was."""
    place = Place(str(tmp_path / "one"))
    other = Place(str(tmp_path / "other"))
    save(small_state(7), other.writer())
    theirs = other.get(".commit")

    def lost(does: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def call(source: str, target: str) -> None:
            if target.endswith("/.commit"):
                place.set(".commit", theirs)
            does(source, target)

        return call

    faults: Faults = {"link": lost(os.link)}
    if way == "rename_new":
        faults = {**NO_LINK, "rename_new": lost(rename_noreplace)}
    failure(CheckpointExistsError, lambda: save(small_state(1), writer_with(place.url, Syscalls(**faults))))
    assert place.get(".commit") == theirs
    assert place.shards() == []
