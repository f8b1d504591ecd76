"""How long ``DCP.async_save`` holds the training up, against copying the same state into memory that is there.

Run it: python -m benchmarks.async_stall [MiB] [saves]. It saves a model with AdamW to local disk, several times, each
after the one before has ended, and prints for every save the stall, the time of ``copy_`` of the same tensors into
buffers that were written to before, and their ratio. The first save allocates the staging memory and does not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

from dcp_storage import DCP

__all__ = ["main", "measure"]

WIDTH = 1024


def measure(mib: int, saves: int, folder: str) -> list[tuple[float, float]]:
    """Seconds of the stall and of the plain copy, for each save after the first.

    Args:
        mib: size of the state in MiB, about: weights and two moments of each.
        saves: how many saves count.
        folder: where they go.
    """
    layers = max(1, mib * 1024 * 1024 // (3 * 4 * WIDTH * (WIDTH + 1)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    tensors = [value.detach() for value in model.state_dict().values()]
    tensors += [value for each in optimizer.state.values() for value in each.values()]
    buffers = [torch.zeros_like(tensor).fill_(1) for tensor in tensors]
    found = []
    for number in range(saves + 1):
        begun = time.perf_counter()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        copied = time.perf_counter() - begun
        begun = time.perf_counter()
        handle = DCP.async_save(state, checkpoint_id=f"{folder}/c", overwrite=True)
        stalled = time.perf_counter() - begun
        handle.wait()
        if number:
            found.append((stalled, copied))
    return found


def main() -> None:
    """Measures and prints."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 768
    saves = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as folder:
        found = measure(mib, saves, folder)
    for stalled, copied in found:
        print(f"stall {stalled * 1000:7.1f} ms, copy_ {copied * 1000:7.1f} ms, ratio {stalled / copied:.2f}")
    fastest = min(stalled for stalled, _ in found) / min(copied for _, copied in found)
    print(f"fastest stall against fastest copy_: {fastest:.2f}")
    print(f"median ratio {statistics.median(stalled / copied for stalled, copied in found):.2f} of {len(found)} saves")


if __name__ == "__main__":
    main()
