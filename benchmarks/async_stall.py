"""How long ``DCP.async_save`` holds the training up, against copying the same state into memory that is there.

Run it: python -m benchmarks.async_stall [MiB of each rank] [saves] [ranks]. It saves a model with AdamW to local disk,
several times, each after the one before has ended; on several ranks the model is sharded by FSDP2. It prints for every
save the stall, the time of ``copy_`` of the same tensors into buffers that were written to before, and their ratio, of
the rank where that is largest. All ranks copy at the same time, and make the call at the same time. The first save
allocates the staging memory and does not count.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_storage import DCP
from dcp_storage.testing.ranks import RankPool

__all__ = ["main", "measure"]

WIDTH = 1024
SECONDS = 600.0


def measure(rank: int, world: int, mib: int, saves: int, folder: str) -> list[tuple[float, float]]:
    """Seconds of the stall and of the plain copy on this rank, for each save after the first.

    Args:
        rank: this one.
        world: how many there are; more than one have a process group.
        mib: size of each rank's state in MiB, about: weights and two moments of each.
        saves: how many saves count.
        folder: where they go.
    """
    layers = max(1, world * mib * 1024 * 1024 // (3 * 4 * WIDTH * (WIDTH + 1)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    if world > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    tensors = [_local(value.detach()) for value in model.state_dict().values()]
    tensors += [_local(value) for each in optimizer.state.values() for value in each.values()]
    buffers = [torch.zeros_like(tensor).fill_(1) for tensor in tensors]
    found = []
    for number in range(saves + 1):
        _meet(world)
        begun = time.perf_counter()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        copied = time.perf_counter() - begun
        _meet(world)
        begun = time.perf_counter()
        handle = DCP.async_save(state, checkpoint_id=f"{folder}/c", overwrite=True)
        stalled = time.perf_counter() - begun
        handle.wait()
        if number:
            found.append((stalled, copied))
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _meet(world: int) -> None:
    if world > 1:
        dist.barrier()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mib", nargs="?", type=int, default=768, help="of each rank; 768 by default")
    parser.add_argument("saves", nargs="?", type=int, default=7, help="7 by default")
    parser.add_argument("ranks", nargs="?", type=int, default=1, help="1 by default")
    arguments = parser.parse_args()
    mib, saves, ranks = arguments.mib, arguments.saves, arguments.ranks
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            each = [measure(0, 1, mib, saves, folder)]
        else:
            found_by_ranks = importlib.import_module("benchmarks.async_stall").measure  # not that of ``__main__``
            with RankPool() as pool:
                each = pool.run(found_by_ranks, ranks, mib, saves, folder, timeout=SECONDS)
    worst = [max(of_ranks, key=lambda pair: pair[0] / pair[1]) for of_ranks in zip(*each, strict=True)]
    for stalled, copied in worst:
        print(f"stall {stalled * 1000:7.1f} ms, copy_ {copied * 1000:7.1f} ms, ratio {stalled / copied:.2f}")
    fastest = max(min(stalled for stalled, _ in found) / min(copied for _, copied in found) for found in each)
    print(f"fastest stall against fastest copy_: {fastest:.2f}")
    median = statistics.median(stalled / copied for stalled, copied in worst)
    print(f"median ratio {median:.2f} of {len(worst)} saves on {ranks} ranks")


if __name__ == "__main__":
    main()
