"""How fast ``copy`` brings a checkpoint from disk to S3, against a save of the same state to the same server.

    python -m benchmarks.copying [state] [rounds]

Both run in turn, in this process, with their default options and checksums on, to the light server of this harness,
each to a new folder. A save has its bytes in memory; the copy reads them from disk (from the page cache, as the save
that made them has just ended), and holds each of them against the manifest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.measuring import LightServer
from benchmarks.states import STATES, make_state, size_of
from dcp_storage import FsspecStorageWriter, copy

__all__ = ["main"]

BAR = 0.9  # of a save's own speed


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", nargs="?", choices=STATES, default="gpt2-2", help="gpt2-2 by default")
    parser.add_argument("rounds", nargs="?", type=int, default=7, help="7 by default")
    arguments = parser.parse_args()
    name, rounds = arguments.state, arguments.rounds
    warnings.simplefilter("ignore")  # torch's, of a process without a process group
    torch.set_num_threads(1)
    state = make_state(name)
    wall: dict[str, list[float]] = {"save": [], "copy": []}
    cpu: dict[str, list[float]] = {"save": [], "copy": []}
    server = LightServer("bench")
    options = {"key": "bench", "secret": "bench-secret", "endpoint_url": server.url}
    try:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(state, storage_writer=FsspecStorageWriter(folder), no_dist=True)
            for number in range(rounds + 1):
                for what in ("save", "copy"):
                    target = f"s3://bench/{what}-{number}"
                    begun, busy = time.perf_counter(), time.process_time()
                    if what == "save":
                        writer = FsspecStorageWriter(target, storage_options=options)
                        dcp.save(state, storage_writer=writer, no_dist=True)
                    else:
                        copy(folder, target, dst_options=options)
                    if number:  # the first of each connects, and touches memory for the first time
                        wall[what].append(time.perf_counter() - begun)
                        cpu[what].append(time.process_time() - busy)
    finally:
        server.close()
    gigabytes = size_of(state) / 1e9
    for what, seconds in wall.items():
        median = statistics.median(seconds)
        print(
            f"{what}: median {median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), {gigabytes / median:.2f} GB/s, "
            f"{statistics.median(cpu[what]) / gigabytes:.2f} CPU s/GB"
        )
    ratio = statistics.median(save / copied for save, copied in zip(wall["save"], wall["copy"], strict=True))
    print(f"{name}, {gigabytes:.2f} GB, {rounds} rounds: copy at {ratio:.2f} of a save's speed (bar: at least {BAR})")


if __name__ == "__main__":
    main()
