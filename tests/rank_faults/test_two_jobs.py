"""Two jobs that know nothing of each other save to the same folder at once: one commits, and the other says so."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_storage import CheckpointExistsError, prune
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, assert_sentence, like, load, place_of
from tests.processes import plain

pytestmark = pytest.mark.filterwarnings(ALONE)

OFFSETS = (0.0, 0.001, -0.002, 0.005, -0.01, 0.02, -0.04, 0.08)
"""Seconds by which the second job begins after the first, round by round."""


@dataclass(frozen=True)
class Ended:
    """How one rank's save ended.

    Attributes:
        rank: of it in its job.
        type: class of what the coordinator raised; empty where the save returned.
        kind: of that error.
        text: of that error.
        path: of that error.
        failed: the ranks that raised something.
    """

    rank: int
    type: str = ""
    kind: str = ""
    text: str = ""
    path: str | None = None
    failed: tuple[int, ...] = ()


def state_of(job: int, number: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """What one rank of a job saves: the same keys and shapes in both jobs, other values."""
    whole = {f"w{k}": torch.arange(30_000, dtype=torch.float32) + 1000 * job + number + k for k in range(2 * world)} | {
        f"note{k}": f"job {job} in round {number:03d}, {k}" for k in range(2 * world)
    }
    return {key: value for key, value in whole.items() if int(key[-1]) % world == rank}


def attempt(call: Any, rank: int) -> Ended:
    try:
        call()
    except CheckpointException as error:
        failed = {who: each[0] for who, each in error.failures.items()}
        first = failed[min(failed)]
        return Ended(
            rank,
            type(first).__name__,
            getattr(first, "kind", ""),
            str(first),
            getattr(first, "path", None),
            tuple(sorted(failed)),
        )
    return Ended(rank)


def jobs(rank: int, world: int, meeting: str, place: Place, overwrite: bool, rounds: int) -> list[Ended]:
    """One rank of one of two jobs of two ranks, each with a process group that has nothing to do with the other's."""
    job, inside = divmod(rank, 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}/job-{job}",
        rank=inside,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    ended = []
    for number in range(rounds):
        writer = place.child(f"{number}").writer(overwrite=overwrite)
        begin = agreed(Path(meeting), rank, number) + OFFSETS[number % len(OFFSETS)] * job
        time.sleep(max(0.0, begin - time.monotonic()))
        ended.append(
            attempt(lambda: dcp.save(state_of(job, number, inside, 2), storage_writer=writer), inside)  # noqa: B023
        )
        dist.barrier()
    return ended


def agreed(meeting: Path, rank: int, number: int) -> float:
    """A moment soon after all four have come; by one clock for all processes of a machine."""
    (meeting / f"{number}-{rank}.part").write_text(str(time.monotonic()))
    (meeting / f"{number}-{rank}.part").rename(meeting / f"{number}-{rank}")
    until = time.monotonic() + 60
    there = [meeting / f"{number}-{each}" for each in range(4)]
    while not all(file.exists() for file in there):
        if time.monotonic() > until:
            raise TimeoutError(f"not all came to round {number}")
        time.sleep(0.001)
    return max(float(file.read_text()) for file in there) + 0.1


def judge(first: list[Ended], second: list[Ended], place: Place, overwrite: bool) -> tuple[set[int], int]:
    """Which of two jobs committed, and the number of the last commit; both say what is so."""
    won = set()
    for job, ended in enumerate((first, second)):
        kinds = {each.type for each in ended}
        assert len(kinds) == 1, ended  # all ranks of a job are told the same
        if kinds == {""}:
            won.add(job)
            continue
        for each in ended:
            assert (each.type, each.kind, each.path) == (CheckpointExistsError.__name__, "exists", place.url), each
            assert each.failed == (0,), each
            assert_sentence(each.text)
            assert place.url in each.text
    commits = place.commits()
    assert len(won) == 1 or (overwrite and len(won) == 2), (first, second)
    return won, len(commits)


def check_clean(place: Place, wanted: dict[str, Any]) -> None:
    """What committed loads bit for bit; a prune, and a save over it and a prune, leave only what is committed."""
    for overwritten in (False, True):
        if overwritten:
            wanted = state_of(7, 77)
            dcp.save(wanted, storage_writer=place.writer(overwrite=True), no_dist=True)
        found = like(wanted)
        load(found, place.reader())
        assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))
        prune(place.url, storage_options=place.options, grace=timedelta(0), apply=True)
        named = {record["name"] for record in place.manifest()["files"]}
        names = {name for name in place.files() if "/" not in name}
        loose = {name for name in names if not name.startswith((".commit", ".manifest"))} - named - {".metadata"}
        assert loose == set()
        assert len([name for name in names if name.startswith(".manifest")]) == 1
        found = like(wanted)
        load(found, place.reader())
        assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))
    assert place.uploads() == []


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("local", 4),
        pytest.param("local", 24, marks=pytest.mark.slow),
        pytest.param("ministack", 6, marks=pytest.mark.slow),
        pytest.param("gcs", 8, marks=pytest.mark.slow),
    ],
)
def test_two_jobs(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path, kind: str, rounds: int, overwrite: bool
) -> None:
    """Of two jobs of two ranks that begin at once, or a little apart, exactly one commits, and all ranks of the other
    raise ``exists`` in a sentence; where both may replace, one may also replace the other. What stands is whole and
    loads bit for bit; the next save and a prune leave nothing of the loser.
    """
    place = place_of(request, kind)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    if overwrite:
        for number in range(rounds):
            writer = place.child(f"{number}").writer()
            dcp.save({"w0": torch.zeros(5)}, storage_writer=writer, no_dist=True)
    outcomes = ranks.run(jobs, 4, str(meeting), plain(place), overwrite, rounds, init=False, timeout=110)
    for number in range(rounds):
        folder = place.child(f"{number}")
        won, commits = judge(
            [outcomes[0][number], outcomes[1][number]], [outcomes[2][number], outcomes[3][number]], folder, overwrite
        )
        assert commits == len(won) + overwrite
        last = last_of(won, folder)
        check_clean(folder, {**state_of(last, number, 0, 2), **state_of(last, number, 1, 2)})


def last_of(won: set[int], place: Place) -> int:
    """The job whose checkpoint stands, by the first value in it."""
    if len(won) == 1:
        return next(iter(won))
    found = {"note0": ""}
    load(found, place.reader())
    return int(found["note0"].split()[1])


def at_once(place: Place, number: int, overwrite: bool) -> list[Ended]:
    """Two threads of this process save, the second a little after the first; how each ended."""
    ready = threading.Barrier(2)

    def job(which: int) -> Ended:
        writer = place.writer(overwrite=overwrite)
        ready.wait(10)
        time.sleep((number % 10) * 0.0005 * which)
        return attempt(lambda: dcp.save(state_of(which, number), storage_writer=writer, no_dist=True), 0)

    with ThreadPoolExecutor(2) as pool:
        return [each.result(30) for each in [pool.submit(job, which) for which in range(2)]]


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "replacing"])
def test_two_threads_of_one_process(overwrite: bool) -> None:
    """So it is with two saves of one process to ``memory://``, at forty offsets."""
    for number in range(40):
        place = Place(f"memory://{secrets.token_hex(6)}/step-1")
        if overwrite:
            dcp.save({"w0": torch.zeros(5)}, storage_writer=place.writer(), no_dist=True)
        ended = at_once(place, number, overwrite)
        won, commits = judge([ended[0]], [ended[1]], place, overwrite)
        assert commits == len(won) + overwrite
        if number % 10 == 0:
            check_clean(place, state_of(last_of(won, place), number))
