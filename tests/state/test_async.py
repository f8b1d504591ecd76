"""Saves behind the training: values of the call, errors that arrive, how many at once, and the interpreter's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from dcp_storage import DCP, CheckpointError, CheckpointExistsError, FsspecStorageWriter, PerRank
from dcp_storage.state_staging import Buffers
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE
from tests.state import Tied, assert_equal, stepped

SECONDS = 60.0


class Held(DefaultSavePlanner):
    """A planner that waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.began = threading.Event()

    def create_local_plan(self) -> Any:
        self.began.set()
        assert self.go.wait(SECONDS)
        return super().create_local_plan()


def test_the_values_of_the_call_are_saved(tmp_path: Path) -> None:
    """Model, optimizer and plain values may change as soon as the call returns; three saves are three checkpoints."""
    model = Tied(1)
    optimizer = AdamW(model.parameters(), lr=0.1)
    plain: dict[str, Any] = {"list": [1, 2], "tensor": torch.zeros(3)}
    wanted = []
    for number in range(3):
        stepped(model, optimizer, 1)
        plain["list"].append(number)
        wanted.append({name: value.clone() for name, value in model.state_dict().items()} | {"n": list(plain["list"])})
        handle = DCP.async_save({"model": model, "optimizer": optimizer, "plain": plain},
                                checkpoint_id=tmp_path / str(number))  # fmt: skip
        plain["tensor"].fill_(9)
    stepped(model, optimizer, 2)
    report = handle.result(SECONDS)
    assert report is not None
    assert report.commit == 1
    for number in range(3):
        found = Tied(5)
        state: dict[str, Any] = {"model": found, "optimizer": AdamW(found.parameters()), "plain": None}
        DCP.load(state, checkpoint_id=tmp_path / str(number))
        assert state["plain"]["list"] == wanted[number].pop("n")
        assert_equal(dict(found.state_dict()), wanted[number])
        assert float(state["optimizer"].state[found.inner.weight]["step"]) == number + 1
        assert float(state["plain"]["tensor"][0]) == (9 if number else 0)


def test_the_handle_says_how_far_it_is(tmp_path: Path) -> None:
    """While it goes on it is not done and waiting times out; then it is done and has a report."""
    planner = Held()
    handle = DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "c", planner=planner)
    assert planner.began.wait(SECONDS)
    assert not handle.done
    with pytest.raises(TimeoutError, match="still going on"):
        handle.wait(0.05)
    planner.go.set()
    handle.wait(SECONDS)
    assert handle.done
    report = handle.result()
    assert report is not None
    assert report.ok


def test_an_error_reaches_the_next_save_or_wait(tmp_path: Path) -> None:
    """An error that nobody has asked for is raised by the next call, once; wait and result raise it as well."""
    DCP.save({"a": 1}, checkpoint_id=tmp_path / "c")
    first = DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointExistsError):
        first.wait(SECONDS)
    second = DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointExistsError) as caught:
        DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "d")
    assert caught.value.path == str(tmp_path / "c")
    assert not (tmp_path / "d").exists()
    with pytest.raises(CheckpointExistsError):
        second.result(SECONDS)
    DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "d").wait(SECONDS)


def test_what_cannot_be_copied_is_named_at_once(tmp_path: Path) -> None:
    """A value that cannot be copied raises in the call itself, with its key, and the next save is not troubled."""
    with pytest.raises(CheckpointError) as caught:
        DCP.async_save({"a": {"lock": threading.Lock()}}, checkpoint_id=tmp_path / "c")
    assert caught.value.key == "a.lock"
    DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "c").wait(SECONDS)


def test_skip_and_wait(tmp_path: Path) -> None:
    """One save is in flight: the next is left out by ``"skip"``, and waits by ``"wait"``; more only if asked for."""
    planner = Held()
    first = DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "1", planner=planner)
    skipped = DCP.async_save({"a": 2}, checkpoint_id=tmp_path / "2", if_busy="skip")
    assert skipped.skipped
    assert skipped.done
    assert skipped.result() is None
    second = DCP.async_save({"a": 3}, checkpoint_id=tmp_path / "3", max_in_flight=2)
    second.wait(SECONDS)
    assert not first.done
    threading.Timer(0.3, planner.go.set).start()
    begun = time.monotonic()
    third = DCP.async_save({"a": 4}, checkpoint_id=tmp_path / "4")
    assert time.monotonic() - begun > 0.1
    assert first.done
    third.wait(SECONDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "4"]


@pytest.mark.parametrize(
    "wrong", [{"if_busy": "later"}, {"max_in_flight": 0},
              {"max_in_flight": 2, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}],
)  # fmt: skip
def test_choices_that_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Unknown or impossible choices raise ValueError before anything is copied."""
    with pytest.raises(ValueError, match=r"if_busy|max_in_flight"):
        DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "c", **wrong)


def test_staging_memory_is_used_again() -> None:
    """The same key of the same shape is copied into the same memory, tied values once; what is gone is let go."""
    buffers = Buffers()
    weight = torch.arange(6.0).reshape(2, 3)
    first = buffers.stage([("a", weight), ("b", weight), ("c", torch.ones(2)), ("d", weight.T)])
    assert first[0] is first[1]
    assert_equal(first[3], weight.T)
    place = first[0].data_ptr()
    weight.mul_(2)
    second = buffers.stage([("a", weight), ("d", torch.zeros(5))])
    assert second[0].data_ptr() == place
    assert_equal(second[0], torch.arange(6.0).reshape(2, 3) * 2)
    assert second[1].shape == (5,)
    assert sorted(buffers._kept) == ["a", "d"]


@pytest.mark.slow
@pytest.mark.filterwarnings(ALONE)
@pytest.mark.timeout(110)
def test_another_process_writes(tmp_path: Path) -> None:
    """In process mode the values of the call are committed by another process, and its refusal arrives typed."""
    model = Tied(1)
    kind = AsyncCheckpointerType.PROCESS
    handle = DCP.async_save({"model": model, "n": [1]}, checkpoint_id=tmp_path / "c", async_checkpointer_type=kind)
    with torch.no_grad():
        model.inner.weight.fill_(-1)
    report = handle.result(SECONDS)
    assert report is not None
    assert report.commit == 1
    found = {"model": Tied(2), "n": None}
    DCP.load(found, checkpoint_id=tmp_path / "c")
    assert_equal(dict(found["model"].state_dict()), dict(Tied(1).state_dict()))  # type: ignore[union-attr]
    with pytest.raises(CheckpointExistsError) as caught:
        DCP.async_save({"n": 1}, checkpoint_id=tmp_path / "c", async_checkpointer_type=kind).wait(SECONDS)
    assert caught.value.path == str(tmp_path / "c")


def on_ranks(rank: int, world: int, path: str, mode: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    kind = AsyncCheckpointerType(mode)
    state = {"model": model, "mine": PerRank(rank), "same": 1, "different": rank}
    handles = []
    for number in range(2):
        handles.append(DCP.async_save(state, checkpoint_id=f"{path}/{number}", async_checkpointer_type=kind))
        torch.distributed.barrier()  # the training's own collectives go on
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    reports = [handle.result(SECONDS) for handle in handles]
    torch.manual_seed(1)
    found = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    fully_shard(found)
    out = []
    for number in range(2):
        loaded: dict[str, Any] = {"model": found, "mine": PerRank(), "same": 0, "different": None}
        DCP.load(loaded, checkpoint_id=f"{path}/{number}")
        for name, value in found.state_dict().items():
            assert torch.equal(value.full_tensor(), wanted[name] + number), name
        out.append((loaded["mine"].value, loaded["same"], loaded["different"]))
    return out, [report is not None and len(report.warnings) for report in reports]


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_on_several_ranks(tmp_path: Path, ranks: RankPool, mode: str) -> None:
    """Sharded models, values of every rank and shared ones, over groups of their own beside the training's."""
    found = ranks.run(on_ranks, 2, str(tmp_path), mode, timeout=110, env={"MASTER_ADDR": "127.0.0.1"})
    assert found == [([(rank, 1, rank)] * 2, [1, 1]) for rank in range(2)]


class LateEnd(FsspecStorageWriter):
    """A writer whose report can only be had when it is let go: the checkpoint is there, this rank's save goes on."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.go = threading.Event()

    @property
    def report(self) -> Any:
        assert self.go.wait(SECONDS)
        return super().report


def refusing(rank: int, world: int, path: str) -> Any:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise RuntimeError("no state here")
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    errors = []
    try:
        DCP.async_save({"broken": Broken()}, checkpoint_id=path).wait(SECONDS)
    except CheckpointError as error:
        errors.append((error.key, error.rank))
    writer = LateEnd(f"{path}-0")
    if rank == 0:
        writer.go.set()
    first = DCP.async_save({"a": 1}, storage_writer=writer)  # the failed one may still be ending: waits for it
    if rank == 0:
        first.wait(SECONDS)
    torch.distributed.barrier()
    second = DCP.async_save({"a": 2}, checkpoint_id=f"{path}-1", if_busy="skip")
    writer.go.set()
    first.wait(SECONDS)
    torch.distributed.barrier()
    third = DCP.async_save({"a": 3}, checkpoint_id=f"{path}-2", if_busy="skip")
    third.wait(SECONDS)
    return errors, [first.skipped, second.skipped, third.skipped]


def test_all_ranks_come_to_the_same_answer(tmp_path: Path, ranks: RankPool) -> None:
    """A rank that cannot collect its state stops the save on all; all skip where one is still busy."""
    found = ranks.run(refusing, 2, str(tmp_path / "c"))
    assert found == [([("broken", 1)], [False, True, False]), ([("broken", None)], [False, True, False])]


def told_on_one(rank: int, world: int, path: str, how: dict[str, Any]) -> Any:
    DCP.save({"n": 0}, checkpoint_id=f"{path}/taken")
    first = DCP.async_save({"n": 0}, checkpoint_id=f"{path}/taken")
    out: list[Any] = []
    if rank == 0:  # asks, and goes on; the others do not ask
        with pytest.raises(CheckpointExistsError):
            first.wait(SECONDS)
    elif rank == 1:
        while not first.done:
            time.sleep(0.01)
    handle = None
    for number in range(3):
        try:
            handle = DCP.async_save({"n": PerRank(number)}, checkpoint_id=f"{path}/{number}", **how)
            handle.wait(SECONDS)
        except CheckpointExistsError as error:
            out.append((number, Path(str(error.path)).name))
    found = {"n": PerRank()}
    DCP.load(found, checkpoint_id=f"{path}/2")
    return out, found["n"].value


@pytest.mark.parametrize("how", [{}, {"if_busy": "skip"}, {"max_in_flight": 2}])
def test_an_error_that_not_all_ranks_asked_for(tmp_path: Path, ranks: RankPool, how: dict[str, Any]) -> None:
    """It is raised by the next call on every rank, once, so that no rank's save meets another save of the others."""
    out = ranks.run(told_on_one, 2, str(tmp_path), how)
    assert out == [([(0, "taken")], 2)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "taken"]


def begins_again(rank: int, world: int, path: str) -> Any:
    DCP.save({"n": 0}, checkpoint_id=path)
    first = DCP.async_save({"n": 0}, checkpoint_id=path)
    while not first.done:
        time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{path}-store")
    with pytest.raises(CheckpointExistsError):
        DCP.async_save({"n": 1}, checkpoint_id=f"{path}-1")
    DCP.async_save({"n": 1}, checkpoint_id=f"{path}-1").wait(SECONDS)
    return Path(f"{path}-1/.commit").exists()


def test_an_error_outlives_its_process_group(tmp_path: Path, ranks: RankPool) -> None:
    """After the default group was made anew, the next call raises what nobody asked for under the old one."""
    assert ranks.run(begins_again, 2, str(tmp_path / "c")) == [True, True]


def test_threads_do_not_share_the_copies(tmp_path: Path) -> None:
    """Calls from several threads at once save each its own values."""
    numbers = [thread * 10 + turn for thread in range(3) for turn in range(4)]
    errors: list[CheckpointError] = []

    def one(thread: int) -> None:
        try:
            for turn in range(4):
                number = thread * 10 + turn
                DCP.async_save({"a": torch.full((500_000,), float(number))}, checkpoint_id=tmp_path / str(number))
        except CheckpointError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "last").wait(SECONDS)
    assert not errors
    for number in numbers:
        found = {"a": torch.zeros(500_000)}
        DCP.load(found, checkpoint_id=tmp_path / str(number))
        assert found["a"].eq(number).all()


def test_a_conjugate_is_another_value() -> None:
    """Views that differ by a mark only, conjugate and negative, are copied as what they are."""
    value = torch.tensor([1 + 2j])
    names = [("a", value), ("b", value.conj()), ("c", value.imag), ("d", value.conj().imag)]
    staged = Buffers().stage(names)
    assert [one.item() for one in staged] == [1 + 2j, 1 - 2j, 2.0, -2.0]


PROGRAM = """
import sys, torch
from dcp_storage import DCP
DCP.async_save({"a": torch.ones(2_000_000), "b": [1]}, checkpoint_id=sys.argv[1])
"""


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.slow) for mode in ("ends", "twice", "raises")])
def test_the_end_of_the_program_waits(tmp_path: Path, mode: str) -> None:
    """A program that ends, or falls over, with a save in flight commits it; one that failed is shown."""
    program = PROGRAM + ("" if mode != "raises" else "raise RuntimeError('over')\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(tmp_path / "c")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert (first.returncode == 0) == (mode != "raises"), first.stderr
    found = {"a": torch.zeros(2_000_000), "b": None}
    DCP.load(found, checkpoint_id=tmp_path / "c")
    assert found["b"] == [1]
    if mode == "twice":
        again = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
        assert "CheckpointExistsError" in again.stderr
        assert f"The asynchronous save to {tmp_path / 'c'} failed" in again.stderr


class Alarm(Exception):  # noqa: N818 - stands for a KeyboardInterrupt
    """What the signal of a test raises."""


def test_an_interrupted_wait_leaves_nothing_taken(tmp_path: Path) -> None:
    """However often and wherever ``wait`` is interrupted, the save ends and the next wait sees it."""
    armed = [False]

    def ring(number: int, frame: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise Alarm

    planner = Held()
    handle = DCP.async_save({"a": 1}, checkpoint_id=tmp_path / "c", planner=planner)
    before = signal.signal(signal.SIGALRM, ring)
    rung = 0
    try:
        for turn in range(4000):
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + turn % 40))
                try:
                    handle.wait(0.0001)
                except TimeoutError:
                    armed[0] = False
            except Alarm:
                rung += 1
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    planner.go.set()
    ended = threading.Event()

    def wait() -> None:
        handle.wait()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(SECONDS)
    assert rung > 100


INTERRUPTED = """
import sys, time, torch
from dcp_storage import DCP
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
if __name__ == "__main__":
    mode = AsyncCheckpointerType(sys.argv[2])
    DCP.async_save({"a": torch.ones(20_000_000)}, checkpoint_id=sys.argv[1], async_checkpointer_type=mode)
    print("begun", flush=True)
    time.sleep(60)
"""


def writers_of(pid: int) -> list[int]:
    """The processes that a process has begun to write for it."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text(encoding="utf-8").split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_with_a_save_in_flight(tmp_path: Path, mode: str, times: int) -> None:
    """Ctrl-C, which reaches all processes of a terminal, ends a program after its save; twice, what is lost is said."""
    script = tmp_path / "program.py"
    script.write_text(INTERRUPTED, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "c"), mode],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        while mode == "process" and not writers_of(process.pid):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        if times == 2:
            time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "KeyboardInterrupt" in said
    committed = (tmp_path / "c" / ".commit").exists()
    if times == 1:
        assert committed, said
    assert committed or f"The asynchronous save to {tmp_path / 'c'} was not waited for" in said


def resident() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_memory_stays_where_it_was(tmp_path: Path) -> None:
    """After 50 saves the process is within 5 per cent of what it was after 5."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(32)])
    optimizer = AdamW(model.parameters())
    stepped(model, optimizer, 1)
    after = {}
    for number in range(1, 51):
        state = {"model": model, "optimizer": optimizer, "step": number}
        DCP.async_save(state, checkpoint_id=tmp_path / "c", overwrite=True).wait(SECONDS)
        after[number] = resident()
    assert after[50] <= after[5] * 1.05, after
