"""The rank pool: results and failures by rank, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_storage.errors import StoreError
from dcp_storage.testing.ranks import RankFailure, RankPool, RanksFailed, RanksTimedOut


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(preload=["pytest"]) as warm:
        yield warm


def sums(rank: int, world: int, start: int) -> int:
    tensor = torch.tensor([start + rank])
    dist.all_reduce(tensor)
    return int(tensor.item())


def who(rank: int, world: int) -> tuple[int, int, int]:
    return rank, world, os.getpid()


def fails_on_one(rank: int, world: int) -> int:
    if rank == 1:
        raise StoreError("no room", operation="put", errno=28, key="__1_0.distcp")
    return rank


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raises_unpicklable(rank: int, world: int) -> None:
    raise Unpicklable("two", "words")


def returns_unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def dies_on_two(rank: int, world: int) -> int:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def exits_on_zero(rank: int, world: int) -> int:
    if rank == 0:
        os._exit(7)
    return rank


def waits_for_the_dead(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleeps_on_one(rank: int, world: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


def gathers(rank: int, world: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(24.0).reshape(6, 4)
    sharded: DTensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert sharded.to_local().shape == (3, 2)
    gathered: list[list[float]] = sharded.redistribute(placements=[Replicate(), Replicate()]).to_local().tolist()
    return gathered


def leaves_children(rank: int, world: int, folder: str) -> None:
    plain = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(folder, f"{rank}").write_text(f"{plain.pid} {hidden.pid}")


def spawns(rank: int, world: int) -> int:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    process.start()
    process.join(90)
    return process.exitcode if process.exitcode is not None else -1


def reads_variable(rank: int, world: int) -> str | None:
    return os.environ.get("RANKS_TEST_VARIABLE")


def warns(rank: int, world: int) -> str:
    warnings.warn("careful", UserWarning, stacklevel=1)
    return "went on"


def loop_threads(rank: int, world: int) -> list[bool]:
    return ["s3fs" in sys.modules, os.environ["OMP_NUM_THREADS"] == "1", torch.get_num_threads() == 1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def warm_pid(pool: RankPool) -> int:
    assert pool._process is not None
    return pool._process.pid


def test_results_come_by_rank(pool: RankPool) -> None:
    """Every rank sees the others, and its result stands at its place."""
    assert pool.run(sums, 4, 10) == [46] * 4
    answers = pool.run(who, 3, init=False)
    assert [answer[:2] for answer in answers] == [(0, 3), (1, 3), (2, 3)]
    assert len({answer[2] for answer in answers} | {os.getpid()}) == 4


def test_a_warm_run_is_fast(pool: RankPool) -> None:
    """A run of four ranks with a collective takes less than 1.5 s, at best of three, once the pool is warm."""
    times = []
    for _ in range(3):
        begun = time.monotonic()
        pool.run(sums, 4, 0)
        times.append(time.monotonic() - begun)
    assert min(times) < 1.5


def test_a_failing_rank_is_named_with_its_exception(pool: RankPool) -> None:
    """What a rank raised comes back whole, with the traceback and the right rank."""
    with pytest.raises(RanksFailed, match=r"rank 1: dcp_storage\.errors\.StoreError: no room") as caught:
        pool.run(fails_on_one, 3, init=False)
    assert sorted(caught.value.failures) == [1]
    failure = caught.value.failures[1]
    assert isinstance(failure.exception, StoreError)
    assert (failure.exception.errno, failure.exception.key) == (28, "__1_0.distcp")
    assert "fails_on_one" in failure.traceback


def test_failures_can_be_wanted(pool: RankPool) -> None:
    """With allow_failures a failure takes its rank's place and the others' results are there."""
    answers = pool.run(fails_on_one, 3, init=False, allow_failures=True)
    assert (answers[0], answers[2]) == (0, 2)
    assert isinstance(answers[1], RankFailure)
    assert answers[1].rank == 1


def test_an_exception_that_does_not_pickle_comes_as_text(pool: RankPool) -> None:
    """Type, text and traceback get through also where the exception itself cannot."""
    (failure,) = pool.run(raises_unpicklable, 1, init=False, allow_failures=True)
    assert failure.exception is None
    assert failure.type.endswith(".Unpicklable")
    assert failure.message == "two words"
    assert "raises_unpicklable" in failure.traceback


def test_a_result_that_does_not_pickle_is_a_failure(pool: RankPool) -> None:
    """A result that cannot be sent back is not silently None."""
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(returns_unpicklable, 2, init=False)


def test_a_killed_rank_is_named_with_its_signal(pool: RankPool) -> None:
    """A rank that was killed is a failure with the signal's number; the others' results are there."""
    answers = pool.run(dies_on_two, 3, init=False, allow_failures=True)
    assert answers[:2] == [0, 1]
    assert answers[2].signal == signal.SIGKILL
    assert answers[2].exit_code is None


def test_a_rank_that_exits_is_named_with_its_status(pool: RankPool) -> None:
    """A rank that exits by itself left no result, and that is a failure."""
    answers = pool.run(exits_on_zero, 2, init=False, allow_failures=True)
    assert answers[1] == 1
    assert (answers[0].type, answers[0].exit_code) == ("exit", 7)


def test_ranks_that_wait_for_a_dead_one_fail_soon(pool: RankPool) -> None:
    """A collective with a killed rank ends in an error well before the time-out."""
    begun = time.monotonic()
    answers = pool.run(waits_for_the_dead, 3, timeout=60, allow_failures=True)
    assert time.monotonic() - begun < 30
    assert answers[0].signal == signal.SIGKILL
    assert all(isinstance(answer, RankFailure) and answer.signal is None for answer in answers[1:])


def test_a_hung_rank_is_killed_and_named_with_its_stack(pool: RankPool) -> None:
    """At the time-out the error names who was running and where, and nobody is running any more."""
    begun = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        pool.run(sleeps_on_one, 3, timeout=1.5, init=False)
    assert time.monotonic() - begun < 10
    assert sorted(caught.value.running) == [1]
    assert "sleeps_on_one" in caught.value.running[1]
    assert children(warm_pid(pool)) == []
    assert pool.run(sums, 2, 0) == [1, 1]


def test_tensors_are_gathered_over_a_mesh(pool: RankPool) -> None:
    """A DTensor sharded over both dimensions of a mesh of four ranks is gathered whole on each."""
    wanted = [[float(4 * row + column) for column in range(4)] for row in range(6)]
    assert pool.run(gathers, 4) == [wanted] * 4


def test_many_runs_leave_no_processes_and_no_files(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 20 runs there are no ranks, no more open files in either process, and no temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool.run(who, 2, init=False)
    warm = warm_pid(pool)
    before = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), warm)]
    pids = [pid for _ in range(20) for _, _, pid in pool.run(who, 2)]
    assert not any(alive(pid) for pid in pids)
    assert children(warm) == []
    after = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), warm)]
    assert all(now <= was for now, was in zip(after, before, strict=True))  # fewer: what other tests left was closed
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_started_is_ended_too(pool: RankPool, tmp_path: Path) -> None:
    """Children of ranks, also those in a session of their own, are gone when the run returns."""
    pool.run(leaves_children, 2, str(tmp_path), init=False)
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not any(alive(pid) for pid in pids)


def test_a_rank_can_spawn(pool: RankPool) -> None:
    """The spawn method of multiprocessing works in a rank, as the process checkpointer needs it."""
    assert pool.run(spawns, 1, init=False, timeout=100) == [0]


def test_environment_is_for_one_run(pool: RankPool) -> None:
    """Variables reach the ranks of their run and not those of the next."""
    assert pool.run(reads_variable, 2, init=False, env={"RANKS_TEST_VARIABLE": "x"}) == ["x", "x"]
    assert pool.run(reads_variable, 2, init=False) == [None, None]


def test_warnings_can_be_errors(pool: RankPool) -> None:
    """Warnings are errors only where that is asked for."""
    assert pool.run(warns, 1, init=False) == ["went on"]
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        pool.run(warns, 1, strict_warnings=True)


def test_ranks_begin_with_one_thread_and_without_s3fs(pool: RankPool) -> None:
    """The warm process has imported no client library, and ranks compute on one thread."""
    assert pool.run(loop_threads, 1, init=False) == [[False, True, True]]


def test_a_function_without_a_name_is_refused(pool: RankPool) -> None:
    """A lambda, which no rank could import, is refused before anything starts."""
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda rank, world: rank, 1)
    with pytest.raises(ValueError, match="world"):
        pool.run(who, 0)


def test_a_preload_that_fails_is_said_at_the_start() -> None:
    """A pool whose warm process cannot start raises at once and leaves no process."""
    with pytest.raises(RuntimeError, match="ended with status 1"), RankPool(preload=["no_such_module_anywhere"]):
        pass


def test_a_preload_that_starts_a_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forked from a process with a second thread."""
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="ended with status 1"), RankPool(preload=["starts_a_thread"]):
        pass


def hangs(rank: int, world: int, folder: str) -> None:
    Path(folder, f"{rank}").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_die_with_the_warm_process(tmp_path: Path) -> None:
    """If the warm process is killed in the middle of a run, its ranks die and the run raises."""
    with RankPool() as pool, ThreadPoolExecutor(1) as threads:
        run = threads.submit(pool.run, hangs, 2, str(tmp_path), init=False)
        assert wait_for(lambda: len([file for file in tmp_path.iterdir() if file.read_text()]) == 2)
        pids = [int((tmp_path / rank).read_text().split()[0]) for rank in "01"]
        os.kill(warm_pid(pool), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with status -9"):
            run.result(30)
        assert wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_everything_dies_with_the_owner(tmp_path: Path) -> None:
    """If the process that owns a pool is killed in the middle of a run, the warm process and the ranks end."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"from {__name__} import hangs\n"
        "from dcp_storage.testing.ranks import RankPool\n"
        "with RankPool() as pool:\n"
        "    pool.run(hangs, 2, sys.argv[2], init=False)\n"
    )
    root = str(Path(__file__).parents[__name__.count(".")])
    owner = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, root, str(tmp_path)])
    try:
        assert wait_for(lambda: len([file for file in tmp_path.iterdir() if file.read_text()]) == 2, 150)
    finally:
        owner.kill()
        owner.wait(10)
    pids = {int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()}
    assert len(pids) == 3
    assert wait_for(lambda: not any(alive(pid) for pid in pids))
