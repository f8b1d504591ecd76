"""What ``async_save`` does while the training waits for it: copies into memory that is there, next to nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcp_storage import DCP, FsspecStorageWriter, PerRank
from dcp_storage import state_staging as staging
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.ranks import RankPool
from dcp_storage.testing.recording import RecordingStore

SECONDS = 60.0


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what this thread, and no other, has torch do: collectives, bytes of new memory, bytes copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[str] = []
        self.allocated = 0
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._memory(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives.append(func.__name__)
        elif func is torch.ops.aten.copy_.default:
            self.copied += args[0].nbytes
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and self._memory(value) not in given:
                self.allocated += value.nbytes
        return out

    @staticmethod
    def _memory(value: torch.Tensor) -> int:
        plain = value._local_tensor if isinstance(value, DTensor) else value
        return int(plain.untyped_storage()._cdata)


class Waiting(FsspecStorageWriter):
    """A writer that begins, and opens its store, only when it is let go."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.go = threading.Event()
        self.stores: list[RecordingStore] = []
        self._opener = self._open

    def _open(self, location: Any, storage_options: Any, max_concurrency: int) -> RecordingStore:
        self.stores.append(RecordingStore(open_store(location, storage_options, max_concurrency=max_concurrency)))
        return self.stores[-1]

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        assert self.go.wait(SECONDS)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


def two_saves(rank: int, world: int, path: str) -> Any:
    model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 64))
    if world > 1:
        fully_shard(model)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "mine": PerRank(rank), "plain": {"a": torch.ones(10), "n": [1]}}
    seen = []
    for number in range(2):
        writer = Waiting(f"{path}/{number}")
        with Watching() as watching:
            handle = DCP.async_save(state, storage_writer=writer)
        opened = len(writer.stores)
        writer.go.set()
        assert handle.result(SECONDS) is not None
        calls = [call for store in writer.stores for call in store.calls]
        seen.append((watching.collectives, watching.allocated, watching.copied, opened, bool(calls)))
    return seen


NUMBERS = 64 * 100 + 100 + 100 * 64 + 64
STEPS = 4
EXTRA = 10


@pytest.mark.parametrize("world", [1, 2])
def test_the_second_save_only_copies(tmp_path: Path, ranks: RankPool, world: int) -> None:
    """The call takes no memory the second time, opens no store, and has one collective: it copies each number once."""
    out = ranks.run(two_saves, world, str(tmp_path), init=world > 1)
    state = 4 * (3 * NUMBERS // world + STEPS + EXTRA)  # weights, two moments; steps of the optimizer; a plain tensor
    for first, second in out:
        for collectives, _, copied, opened, called in (first, second):
            # On one rank none; the first time a group is made, which is none that this sees.
            assert collectives[-1:] == (["allreduce_.default"] if world > 1 else [])
            assert copied == state
            assert not opened
            assert called
        assert len(second[0]) == (world > 1)
        assert first[1] >= state
        assert second[1] < 100


def meets_late(rank: int, world: int, path: str) -> bool:
    """Rank 1 makes its call when rank 0 has collected its state already."""
    told = Path(f"{path}/told")

    class Telling(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if rank == 0:
                told.touch()

    DCP.async_save({"n": 1}, checkpoint_id=f"{path}/first").wait(SECONDS)  # makes the groups, all ranks together
    if rank == 1:
        deadline = time.monotonic() + SECONDS / 2
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        early = told.exists()
    else:
        early = True
    DCP.async_save({"model": Telling(2, 2)}, checkpoint_id=f"{path}/second").wait(SECONDS)
    return early


def test_a_rank_copies_while_it_waits_for_the_others(tmp_path: Path, ranks: RankPool) -> None:
    """What ranks have to agree upon is asked before the copy and answered after it: a late rank costs no copy."""
    assert ranks.run(meets_late, 2, str(tmp_path)) == [True, True]


def test_memory_for_an_accelerator_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of what is on an accelerator go into pinned memory, not into memory kept from before it moved there."""
    asked: list[dict[str, Any]] = []
    here = torch.ones(3)
    there, nothing = torch.ones(3, device="meta"), torch.ones(0, device="meta")
    monkeypatch.setattr(staging, "is_pinnable", lambda device: device.type == "meta")
    monkeypatch.setattr(torch, "empty_like", lambda source, **how: asked.append(how))
    for source in (here, there, nothing):
        staging._memory_for(source)
    assert [how["pin_memory"] for how in asked] == [False, True, False]
    assert {how["device"] for how in asked} == {"cpu"}
    assert staging._fits(torch.zeros(3), here)
    assert not staging._fits(torch.zeros(3), there)
