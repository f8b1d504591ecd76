"""When it pays that ranks share their reads: replicas of several sizes, each loading alone and sharing, in turn.

Run it: python -m benchmarks.sharing [rounds] [total]. Four ranks of this machine load a checkpoint of 1 to 64
MiB from the light server behind a link of 20 ms and 60 MB/s for each connection, and as much for all of them as was
said (no limit by default, but for the processors). It prints for every size the bytes that sharing saves and the median
seconds of both, each time of the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.measuring import LightServer, shaped
from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions
from dcp_storage.testing.proxy import Shape
from dcp_storage.testing.ranks import RankPool

__all__ = ["main", "rounds_of", "save"]

RANKS = 4
SIZES = (1, 2, 4, 8, 16, 32, 64)  # MiB
MIB = 1024 * 1024
ROW = 262_144  # elements of a MiB


def _options(endpoint: str) -> dict[str, Any]:
    return {"key": "bench", "secret": "bench-secret", "endpoint_url": endpoint}


def save(rank: int, world: int, url: str, endpoint: str, mib: int) -> None:
    """Saves a tensor for each MiB, from one rank."""
    state = {f"w{k}": torch.full((ROW,), float(k)) for k in range(mib)}
    dcp.save(state, storage_writer=FsspecStorageWriter(url, storage_options=_options(endpoint), overwrite=True))


def rounds_of(rank: int, world: int, url: str, endpoint: str, mib: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of each round on this rank: loading alone, and sharing; the first round warms up and does not count."""
    out = []
    for _ in range(rounds + 1):
        took = []
        for share in (False, True):
            state = {f"w{k}": torch.full((ROW,), -1.0) for k in range(mib)}
            reader = FsspecStorageReader(
                url,
                storage_options=_options(endpoint),
                options=LoadOptions(share_reads=share, deadline=60.0),
                process_group=dist.group.WORLD,
            )
            dist.barrier()
            begun = time.perf_counter()
            dcp.load(state, storage_reader=reader)
            took.append(time.perf_counter() - begun)
            if any(bool((value != k).any()) for k, value in enumerate(state.values())):
                raise RuntimeError(f"{url}: what was loaded is not what was saved.")
        out.append((took[0], took[1]))
    return out[1:]


def main() -> None:
    """Measures and prints."""
    this = importlib.import_module("benchmarks.sharing")  # by its name, so that ranks can import it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=5, help="5 by default")
    parser.add_argument("total", nargs="?", type=float, help="MB/s of all ranks; no limit by default")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    total = None if arguments.total is None else arguments.total * 1e6
    server = LightServer("bench")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with shaped(server.url, Shape(0.02, 60e6, total)) as link, RankPool(("benchmarks.sharing", "s3fs")) as pool:
            print(f"{RANKS} ranks, {rounds} rounds, for all: {f'{total / 1e6:g} MB/s' if total else 'no limit'}")
            for mib in SIZES:
                url = f"s3://bench/{mib}"
                pool.run(this.save, 1, url, server.url, mib)
                found = pool.run(this.rounds_of, RANKS, url, link.url, mib, rounds, timeout=300)
                each = [[max(rank[k][how] for rank in found) for k in range(rounds)] for how in (0, 1)]
                alone, shared = map(statistics.median, each)
                spread = [f"{min(row):.2f} to {max(row):.2f}" for row in each]
                print(
                    f"{mib:3} MiB, {mib * (RANKS - 1):3} MiB saved: alone {alone:.3f} s ({spread[0]}), "
                    f"shared {shared:.3f} s ({spread[1]}): {alone / shared:.2f} times",
                    flush=True,
                )
    finally:
        server.close()


if __name__ == "__main__":
    main()
