"""Saves and loads of a state on an accelerator: right bit for bit, and how fast, against stock torch.

    python -m benchmarks.accelerator [state] [rounds]

Local disk, in turn, in this process. Ends with status 2 where torch sees no accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.states import STATES, make_state, size_of
from dcp_storage import FsspecStorageReader, FsspecStorageWriter

__all__ = ["main"]


def _timed(call: Callable[[], object], device: torch.device) -> float:
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    call()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _load(target: dict[str, torch.Tensor], path: str, *, stock: bool) -> None:
    dcp.load(target, storage_reader=dcp.FileSystemReader(path) if stock else FsspecStorageReader(path))


def main() -> int:
    """Reads the command line, measures, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", nargs="?", choices=STATES, default="gpt2", help="gpt2 by default")
    parser.add_argument("rounds", nargs="?", type=int, default=5, help="5 by default")
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    if device is None:
        print("torch sees no accelerator here.")
        return 2
    name, rounds = arguments.state, arguments.rounds
    state = {key: tensor.to(device) for key, tensor in make_state(name).items()}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            ours, stock = f"{folder}/ours-{number}", f"{folder}/stock-{number}"
            target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
            calls: dict[str, Callable[[], object]] = {
                "save, ours": partial(dcp.save, state, storage_writer=FsspecStorageWriter(ours)),
                "save, torch": partial(dcp.save, state, storage_writer=dcp.FileSystemWriter(stock)),
                "load, torch": partial(_load, target, stock, stock=True),
                "load, ours": partial(_load, target, ours, stock=False),
            }
            for title, call in calls.items():
                seconds.setdefault(title, []).append(_timed(call, device))
                if title == "load, torch":
                    for tensor in target.values():
                        tensor.zero_()
            wrong = [key for key, tensor in state.items() if not torch.equal(tensor, target[key])]
            if wrong:
                print(f"Not loaded as saved: {wrong}")
                return 1
    size = size_of(state) / 1e9
    for title, all_of in seconds.items():
        median = statistics.median(all_of)
        print(f"{title}: {median:.2f} s ({min(all_of):.2f}–{max(all_of):.2f}), {size / median:.2f} GB/s, on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
