"""A copy that was killed goes on where it was, and never at the cost of what the protocol promises."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import CheckpointError, SaveOptions, StoreError, copy, verify
from dcp_storage.fence import prune_folder
from dcp_storage.store import Store
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool, RanksFailed
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.tools.copy import copy_folder
from dcp_storage.tools.opening import Folder, folder_at
from tests.e2e import ALONE, Place, assert_same, like, load, place_of, save
from tests.tools import folder_of

pytestmark = pytest.mark.filterwarnings(ALONE)

FILES = 6
ONE_AT_A_TIME = SaveOptions(max_concurrency=1)


def many() -> dict[str, Any]:
    return {f"t{n}": torch.arange(20_000) + n for n in range(FILES)}


@pytest.fixture
def src(tmp_path: Path) -> Place:
    place = Place(str(tmp_path / "src"))
    save(many(), place.writer(options=SaveOptions(shard_size=1)))
    assert len(place.shards()) == FILES
    return place


def wrapped(place: Place, wrap: Any) -> Folder:
    plain = folder_of(place)

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        store: Store = wrap(open_store(location, options, max_concurrency=concurrency))
        return store

    return Folder(plain.location, plain.storage_options, ONE_AT_A_TIME, opener)


def _killed(rank: int, world: int, src: str, dst: str, operation: str, nth: int, name: str | None) -> None:
    """A copy in a process of its own that is killed at one call to the destination."""

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        store = open_store(location, options, max_concurrency=concurrency)
        return FaultyStore(store, [Fault(operation, nth=nth, name=name, action="kill")])

    target = folder_at(dst, None, ONE_AT_A_TIME)
    copy_folder(
        folder_at(src, None, ONE_AT_A_TIME), Folder(target.location, {}, ONE_AT_A_TIME, opener), options=ONE_AT_A_TIME
    )


def kill(ranks: RankPool, src: Place, dst: Place, operation: str, nth: int = 1, name: str | None = None) -> bool:
    """Whether the copy was killed; False where it ended before that call."""
    try:
        ranks.run(_killed, 1, src.url, dst.url, operation, nth, name)
    except RanksFailed as failed:
        if failed.failures[0].signal != 9:
            raise
        return True
    return False


def check(dst: Place) -> None:
    assert verify(dst.url, "data", storage_options=dst.options).ok
    found = like(many())
    load(found, dst.reader())
    assert_same(found, many())


@pytest.mark.slow
def test_a_copy_killed_at_any_call_ends_well_when_it_is_run_again(ranks: RankPool, src: Place, tmp_path: Path) -> None:
    """Killed at each call in turn: nothing is committed or all is, the second run ends well, and nothing is left."""
    for nth in range(1, 200):
        dst = Place(str(tmp_path / f"dst-{nth}"))
        was_killed = kill(ranks, src, dst, "*", nth)
        copy(src.url, dst.url)
        check(dst)
        if not was_killed:
            break
        strange = {n for n in dst.files() if n not in {".metadata", *dst.commits(), *dst.shards()}}
        assert {n for n in strange if not n.startswith((".manifest", ".claim"))} == set()
    assert nth > 3 * FILES


@pytest.mark.parametrize("finished", [1, 4])
def test_files_that_arrived_whole_are_not_sent_again(
    ranks: RankPool, src: Place, tmp_path: Path, finished: int
) -> None:
    """Killed while it sends its n-th file: the second run sends only the files that were not finished."""
    dst = Place(str(tmp_path / "dst"))
    assert kill(ranks, src, dst, "write_part", finished + 1)
    before = {name: (tmp_path / "dst" / name).stat().st_ino for name in dst.shards()}
    stores: list[RecordingStore] = []

    def wrap(store: Store) -> Store:
        stores.append(RecordingStore(store))
        return stores[-1]

    report = copy_folder(folder_of(src), wrapped(dst, wrap))
    assert (report.files_resumed, report.files_sent) == (finished, FILES - finished)
    assert len(stores[0].of("upload")) == FILES - finished
    check(dst)
    named = {record["name"] for record in dst.manifest()["files"]}
    assert sum(before.get(name) == (tmp_path / "dst" / name).stat().st_ino for name in named) == finished
    assert set(dst.files()) == named | {".commit", ".metadata", json.loads(dst.get(".commit"))["manifest"]["name"]}


def test_a_copy_that_is_killed_again_and_again_still_goes_on(ranks: RankPool, src: Place, tmp_path: Path) -> None:
    """Each run sends what the runs before it had not finished, also the third."""
    dst = Place(str(tmp_path / "dst"))
    assert kill(ranks, src, dst, "write_part", 3)
    assert kill(ranks, src, dst, "write_part", 3)
    report = copy(src.url, dst.url)
    assert (report.files_resumed, report.files_sent) == (4, 2)
    check(dst)


@pytest.mark.parametrize("kind", ["moto", "gcs"])
def test_a_failed_copy_to_a_bucket_goes_on(request: pytest.FixtureRequest, src: Place, kind: str) -> None:
    """On S3 and GCS, too, files that arrived before a failure are not sent again; the error says so."""
    dst = place_of(request, kind)
    broken = wrapped(dst, lambda store: FaultyStore(store, [Fault("put", nth=4, name=r"__.*")]))
    with pytest.raises(StoreError, match="3 of 6 files are there"):
        copy_folder(folder_of(src), broken, options=ONE_AT_A_TIME)
    assert not dst.commits()
    report = copy(src.url, dst.url, dst_options=dst.options)
    assert (report.files_resumed, report.files_sent) == (3, 3)
    check(dst)
    assert set(dst.files()) - set(dst.shards()) - {".commit", ".metadata"} <= {
        n for n in dst.files() if "manifest" in n
    }


def half(src: Place, dst: Place) -> None:
    """A copy that failed after three files."""
    broken = wrapped(dst, lambda store: FaultyStore(store, [Fault("complete", nth=4)]))
    with pytest.raises(StoreError):
        copy_folder(folder_of(src), broken, options=ONE_AT_A_TIME)


def test_a_file_that_changed_since_is_sent_again(src: Place, tmp_path: Path) -> None:
    """A finished file that is short now, or gone, is not counted on."""
    dst = Place(str(tmp_path / "dst"))
    half(src, dst)
    first, second, _third = (n for n in dst.shards() if dst.files()[n] == src.files()["__0_0.distcp"])
    (tmp_path / "dst" / first).unlink()
    dst.set(second, dst.get(second)[:-1])
    report = copy(src.url, dst.url)
    assert (report.files_resumed, report.files_sent) == (1, FILES - 1)
    check(dst)


def test_a_copy_of_another_checkpoint_takes_nothing_over(src: Place, tmp_path: Path) -> None:
    """What another source left at the destination is not counted on, although names and sizes are the same."""
    dst, other = Place(str(tmp_path / "dst")), Place(str(tmp_path / "other"))
    save({key: value * 2 for key, value in many().items()}, other.writer(options=SaveOptions(shard_size=1)))
    half(other, dst)
    report = copy(src.url, dst.url)
    assert (report.files_resumed, report.files_sent) == (0, FILES)
    check(dst)


def test_a_fence_ends_a_copy_that_could_go_on(src: Place, tmp_path: Path) -> None:
    """After a prune has fenced the folder, nothing of the earlier run is counted on."""
    dst = Place(str(tmp_path / "dst"))
    half(src, dst)
    opened = folder_of(dst).open()
    broken = FaultyStore(opened.store, [Fault("delete", nth=None)])
    with pytest.raises(StoreError):  # a prune that is killed behind its fence: what it listed may still go
        prune_folder(broken, grace=0)
    report = copy(src.url, dst.url)
    assert (report.files_resumed, report.files_sent, report.commit) == (0, FILES, 2)
    check(dst)


def test_a_prune_during_the_copy_is_never_lost_against(src: Place, tmp_path: Path) -> None:
    """A prune that fences and deletes while the second run sends: the run loses, and commits nothing."""
    dst = Place(str(tmp_path / "dst"))
    half(src, dst)

    class Pruned(RecordingStore):
        def upload(self, name: str) -> Any:
            if not self.of("upload"):
                prune_folder(self.inner, grace=0)
            return super().upload(name)

    with pytest.raises(CheckpointError):
        copy_folder(folder_of(src), wrapped(dst, Pruned), options=ONE_AT_A_TIME)
    assert [json.loads(dst.get(name))["state"] for name in dst.commits()] == ["void"]


def test_two_runs_at_once_make_one_checkpoint(src: Place, tmp_path: Path) -> None:
    """A second run that begins while the first sends: one commits, the other fails, and what is committed is whole."""
    dst = Place(str(tmp_path / "dst"))

    class Overtaken(RecordingStore):
        def upload(self, name: str) -> Any:
            if len(self.of("upload")) == 3:
                assert copy(src.url, dst.url).files_resumed == 3
            return super().upload(name)

    with pytest.raises(CheckpointError):
        copy_folder(folder_of(src), wrapped(dst, Overtaken), options=ONE_AT_A_TIME)
    check(dst)
    assert dst.commits() == [".commit"]


def test_an_old_copy_is_not_gone_on_with(src: Place, tmp_path: Path) -> None:
    """After three days a copy begins anew: within the grace for which the protocol holds, with room to spare."""
    dst = Place(str(tmp_path / "dst"))
    half(src, dst)
    then = time.time() - 4 * 86400
    for path in (tmp_path / "dst").iterdir():
        os.utime(path, (then, then))
    assert copy(src.url, dst.url).files_resumed == 0
    check(dst)


def test_torn_and_strange_notes_are_left_alone(src: Place, tmp_path: Path) -> None:
    """Objects under the notes' names that are torn, empty, huge or of another kind neither help nor harm."""
    dst = Place(str(tmp_path / "dst"))
    half(src, dst)
    notes = sorted(n for n in dst.files() if n.startswith(".claim."))
    body = dst.get(notes[0])
    dst.set(".claim.aaaaaaaaaaaaaaaa", body[: len(body) // 2])
    dst.set(".claim.bbbbbbbbbbbbbbbb", b"")
    dst.set(".claim.cccccccccccccccc", b'{"kind":"copied","author":"x","files":{"__0_4.distcp":["../x",1,1]}}')
    dst.set(".claim.dddddddddddddddd", b"[" * 100_000)
    dst.set(".claim.eeeeeeeeeeeeeeee", b'{"kind":"else"}')
    report = copy(src.url, dst.url)
    assert report.files_resumed == 3
    check(dst)
