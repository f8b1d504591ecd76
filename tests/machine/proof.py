"""The machine for as long as one likes: ``python -m tests.machine.proof [--steps N] [--seed N] [--fault NAME]``.

Plays on a dict until so many steps are done, in rounds with seeds that follow from the first one, which is printed:
``--seed`` plays the same again. Ends with status 1 where an invariant is broken.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from dcp_storage.testing.faults import FAULTS, HEALTHY
from tests.machine.beds import Bed, DictBed, LocalBed, MemoryBed
from tests.machine.model import ViolationError
from tests.machine.playing import play, quick
from tests.machine.tally import Tally

__all__ = ["main"]

RUNS = 50  # of one round


def main(argv: Sequence[str]) -> int:
    """Plays; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.machine.proof", description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="steps in all (default: %(default)s)")
    parser.add_argument("--length", type=int, default=60, help="steps on one folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: a random one)")
    parser.add_argument("--fault", choices=sorted(FAULTS), default=None, help="a protection to switch off")
    parser.add_argument(
        "--on", choices=["dict", "memory", "local"], default="dict", help="where (default: %(default)s)"
    )
    parser.add_argument("--shrink", action="store_true", help="make a failure small before it is shown (minutes)")
    given = parser.parse_args(argv)
    seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    fault = HEALTHY if given.fault is None else FAULTS[given.fault]
    print(f"state machine on {given.on}, first seed {seed}")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    tally, begun = Tally(), time.monotonic()
    with quick(), tempfile.TemporaryDirectory() as folder:
        beds: dict[str, Callable[[], Bed]] = {
            "dict": DictBed,
            "memory": MemoryBed,
            "local": lambda: LocalBed(Path(folder)),
        }
        while tally.steps < given.steps:
            try:
                play(beds[given.on], tally, runs=RUNS, steps=given.length, seed=seed, fault=fault, shrink=given.shrink)
            except ViolationError as error:
                print(f"seed {seed}: {error}", *getattr(error, "__notes__", ()), sep="\n")
                return 1
            print(f"seed {seed}, {time.monotonic() - begun:.0f} s: {tally}")
            seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
