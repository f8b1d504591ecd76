"""A long run: four ranks save, load and prune on an S3 server over a link that keeps breaking.

    python -m scripts.soak [--minutes 30] [--ranks 4] [--seed N]

Every value that is loaded is compared with what was saved; memory, threads and files of every rank are noted after each
round. Prints a line each minute and a table; the exit status is 0 only if nothing was lost, nothing grew, and nothing
but commit objects and kept checkpoints is left on the store.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from dcp_storage import CheckpointManager, prune, verify
from dcp_storage.testing.proxy import Fault, Proxy, Shape
from dcp_storage.testing.ranks import RankPool
from tests.servers.launchers import ministack_server
from tests.soak.life import Lived, Sample, live

__all__ = ["grown", "main", "soak"]

FAULTS = ("reset before", "reset after", "cut request", "cut answer", "503", "500", "429")
CHANCE = 0.1  # of a fault, for each request
MIB = 1024 * 1024
SLACK = 24 * MIB  # of memory, beside a twentieth


def _faults(seed: int) -> list[Fault]:
    """Each request is struck by one of the faults with a chance of one in ten."""
    choice = random.Random(seed)
    made = []
    for name in FAULTS:
        kind, status = ("status", int(name)) if name.isdigit() else (name, 503)
        strikes = lambda method, target: choice.random() < CHANCE / len(FAULTS)  # noqa: E731
        made.append(Fault(kind, strikes, times=-1, status=status))  # type: ignore[arg-type]
    return made


def grown(samples: Sequence[Sample]) -> list[str]:
    """What a rank held more of in the last quarter of its life than in the second one."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    if not quarter:
        return ["too few rounds to tell whether anything grew"]
    out = []
    before, after = (statistics.median(s.memory for s in part) for part in (early, late))
    if after > before * 1.05 + SLACK:
        out.append(f"memory grew from {before / MIB:.0f} to {after / MIB:.0f} MiB")
    for name in ("threads", "files"):
        most, found = (max(getattr(s, name) for s in part) for part in (early, late))
        if found > most + 4:
            out.append(f"{name} grew from {most} to {found}")
    return out


def soak(seconds: float, world: int, seed: int) -> tuple[list[Lived], list[str]]:
    """Runs the ranks and looks at what is left.

    Args:
        seconds: how long the ranks save and load.
        world: how many there are.
        seed: of the actions and of the faults.

    Returns:
        What each rank did, and a sentence for everything that is wrong.
    """
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ministack_server(Path(folder)) as server:
        server.make_bucket("soak")
        with Proxy(server.endpoint_url, Shape(latency=0.002)) as proxy, RankPool() as pool:
            proxy.faults = _faults(seed)
            options = server.behind(proxy.url).storage_options
            lives: list[Lived] = pool.run(live, world, "s3://soak/run", options, seconds, seed, timeout=seconds + 180)
        for rank, lived in enumerate(lives):
            wrong += [f"rank {rank}: {text}" for text in [*lived.wrong, *grown(lived.samples)]]
        straight = server.storage_options
        if not any(lived.done for lived in lives):
            return lives, [*wrong, "no save and no load ended well"]
        prune("s3://soak/run", grace=timedelta(0), apply=True, storage_options=straight)
        with CheckpointManager("s3://soak/run", storage_options=straight, no_dist=True) as manager:
            for step in manager.steps():
                problems = verify(manager.path(step), depth="data", storage_options=straight).problems
                wrong += [f"step {step}: {problem}" for problem in problems]
        uploads = server.client.list_multipart_uploads(Bucket="soak").get("Uploads", [])
        wrong += [f"an open upload is left: {item['Key']}" for item in uploads]
    return lives, wrong


def main() -> int:
    """Reads the command line, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"{options.ranks} ranks, {options.minutes:g} minutes, seed {options.seed}", flush=True)
    begun = time.monotonic()
    lives, wrong = soak(options.minutes * 60, options.ranks, options.seed)
    print(f"{time.monotonic() - begun:.0f} s in all")
    for rank, lived in enumerate(lives):
        samples = lived.samples
        held = ", ".join(
            f"{s.seconds:.0f} s: {s.memory // MIB} MiB {s.threads} threads {s.files} files"
            for s in samples[:: max(len(samples) // 4, 1)]
        )
        print(f"rank {rank}: done {lived.done}, failed {lived.failed}; {held}")
    print(f"failures of all ranks: {dict(sum((Counter(lived.failed) for lived in lives), Counter()))}")
    for lived in lives:
        for text in lived.said[-3:]:
            print(f"the store failed: {text}")
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
