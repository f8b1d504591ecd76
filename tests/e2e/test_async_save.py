"""``dcp.async_save`` in thread mode: what is saved is what was there at the call, also with several in flight."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

from dcp_storage import CheckpointExistsError, FsspecStorageReader, FsspecStorageWriter
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, assert_same, failures_of, like, load, place_of, save, small_state

pytestmark = pytest.mark.filterwarnings(ALONE)

SECONDS = 60


def begin(state: dict[str, Any], writer: FsspecStorageWriter, **options: Any) -> Future[Any]:
    return cast("Future[Any]", dcp.async_save(state, storage_writer=writer, **options))


def change_in_place(state: Any) -> None:
    """Every tensor gets other values in the same memory."""
    for value in state.values():
        if isinstance(value, dict):
            change_in_place(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(99)


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_later_changes_are_not_saved(request: pytest.FixtureRequest, kind: str) -> None:
    """Tensors changed in place right after the call: the checkpoint has the values of the call."""
    place = place_of(request, kind)
    state = small_state()
    future = begin(state, place.writer(), no_dist=True)
    change_in_place(state)
    future.result(SECONDS)
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state())


def test_three_saves_in_a_row_are_three_checkpoints(tmp_path: Path) -> None:
    """Each call's own values are in its own folder, with one writer and the same tensors each time."""
    writer = FsspecStorageWriter()
    state = {"a": torch.zeros(100_000), "step": 0}
    futures = []
    for step in range(3):
        cast("torch.Tensor", state["a"]).fill_(step)
        state["step"] = step
        futures.append(begin(state, writer, checkpoint_id=tmp_path / f"step-{step}", no_dist=True))
    for future in futures:
        future.result(SECONDS)
    for step in range(3):
        found = {"a": torch.full((100_000,), -7.0), "step": None}
        load(found, FsspecStorageReader(tmp_path / f"step-{step}"))
        assert_same(found, {"a": torch.full((100_000,), float(step)), "step": step})


def test_two_saves_in_flight_do_not_mix(tmp_path: Path) -> None:
    """One writer, two saves at once without a process group: each folder holds its own values, whole."""
    writer = FsspecStorageWriter()
    for round_ in range(3):
        places = [tmp_path / f"{round_}-{number}" for number in range(2)]
        futures = [
            begin({**small_state(number), "large": torch.full((1 << 20,), float(number))}, writer,
                  checkpoint_id=place, no_dist=True)
            for number, place in enumerate(places)
        ]  # fmt: skip
        for future in futures:
            future.result(SECONDS)
        for number, place in enumerate(places):
            wanted = {**small_state(number), "large": torch.full((1 << 20,), float(number))}
            found = like(wanted)
            load(found, FsspecStorageReader(place))
            assert_same(found, wanted)


class Meeting(DefaultSavePlanner):
    """Waits for the other save, so that both have their places before either goes on."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__()
        self.both = both

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.both.wait(SECONDS)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_each_save_in_flight_keeps_its_own_place(tmp_path: Path) -> None:
    """Two saves that both begin before either goes on: each goes to the folder of its own call."""
    writer, both = FsspecStorageWriter(), threading.Barrier(2)
    futures = [
        begin(small_state(number), writer, checkpoint_id=tmp_path / str(number), planner=Meeting(both), no_dist=True)
        for number in range(2)
    ]
    for future in futures:
        future.result(SECONDS)
    for number in range(2):
        found = like(small_state())
        load(found, FsspecStorageReader(tmp_path / str(number)))
        assert_same(found, small_state(number))


def test_an_error_arrives_through_the_future(tmp_path: Path) -> None:
    """A refused save raises from the future, typed, and the next save of the writer succeeds."""
    writer = FsspecStorageWriter(tmp_path / "one")
    save(small_state(1), writer)
    future = begin(small_state(2), writer, checkpoint_id=tmp_path / "one", no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        future.result(SECONDS)
    assert isinstance(failures_of(caught.value)[0], CheckpointExistsError)
    begin(small_state(3), writer, checkpoint_id=tmp_path / "two", no_dist=True).result(SECONDS)
    found = like(small_state())
    load(found, FsspecStorageReader(tmp_path / "two"))
    assert_same(found, small_state(3))


def save_on_two_groups(rank: int, world: int, folder: str) -> str:
    """Two saves at once, each on a group of its own; then two more with the same writer."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    writer = FsspecStorageWriter()
    for round_ in range(2):
        futures = []
        for number, group in enumerate(groups):
            state = {f"rank-{rank}": torch.full((1000,), 100 * round_ + 10 * number + rank), "shared": number}
            place = f"{folder}/{round_}-{number}"
            futures.append(begin(state, writer, checkpoint_id=place, process_group=group))
            state[f"rank-{rank}"].fill_(-1)  # type: ignore[attr-defined]
        for future in futures:
            future.result(SECONDS)
    return str(writer.checkpoint_id)


@pytest.mark.parametrize("world", [2, 4])
def test_saves_on_two_groups_do_not_mix(tmp_path: Path, ranks: RankPool, world: int) -> None:
    """Two saves in flight on every rank, each on its own group: four whole checkpoints of the values of the calls."""
    ranks.run(save_on_two_groups, world, str(tmp_path))
    for round_ in range(2):
        for number in range(2):
            found: dict[str, Any] = {f"rank-{rank}": torch.zeros(1000, dtype=torch.int64) for rank in range(world)}
            load({**found, "shared": None}, FsspecStorageReader(tmp_path / f"{round_}-{number}"))
            for rank in range(world):
                assert found[f"rank-{rank}"].unique().tolist() == [100 * round_ + 10 * number + rank]
