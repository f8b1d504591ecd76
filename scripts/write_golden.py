"""Writes the golden checkpoints into ``tests/golden``: run it once for each format or torch version, and commit them.

    python -m scripts.write_golden

It refuses to replace what is there: a golden checkpoint that was released stays as it is for ever. The checkpoints are
saved under a neutral path, since stock's metadata records it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from dcp_storage.records import FORMAT
from dcp_storage.testing.ranks import RankPool
from tests.golden_state import save_on_rank

__all__ = ["main"]

NEUTRAL = Path("/tmp/dcp_storage-golden")
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"


def main() -> int:
    """Writes what is not there yet; the exit status."""
    version = torch.__version__.partition("+")[0]
    wanted = {f"format{FORMAT}": False, f"stock-{version}": True}
    missing = {name: stock for name, stock in wanted.items() if not (GOLDEN / name).exists()}
    shutil.rmtree(NEUTRAL, ignore_errors=True)
    with RankPool() as pool:
        for name, stock in missing.items():
            pool.run(save_on_rank, 2, str(NEUTRAL / name), stock)
            shutil.copytree(NEUTRAL / name, GOLDEN / name)
            print(f"written: {GOLDEN / name}")
    shutil.rmtree(NEUTRAL, ignore_errors=True)
    for name in sorted(wanted.keys() - missing.keys()):
        print(f"left alone, as it is there: {GOLDEN / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
