"""What it costs to begin: the import of the package and the start of the command line tool, each in new processes.

    python -m benchmarks.starting [rounds]

In turn, beside an interpreter that does nothing and one that imports only torch's checkpoint package; medians of wall
seconds. What ours adds is the difference to the line above it. A round takes as long as importing torch four times.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageWriter

__all__ = ["main"]


def _commands(folder: str) -> dict[str, list[str]]:
    return {
        "python, nothing": ["-c", "pass"],
        "import torch.distributed.checkpoint": ["-c", "import torch.distributed.checkpoint"],
        "import dcp_storage": ["-c", "import dcp_storage"],
        "dcp_storage.FsspecStorageWriter": ["-c", "from dcp_storage import FsspecStorageWriter"],
        "dcp-storage --help": ["-m", "dcp_storage", "--help"],
        "dcp-storage show, a checkpoint on disk": ["-m", "dcp_storage", "show", folder],
        "dcp-storage verify, the same": ["-m", "dcp_storage", "verify", folder],
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=9, help="9 by default")
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"weight": torch.zeros(16)}, storage_writer=FsspecStorageWriter(f"{folder}/step"), no_dist=True)
        commands = _commands(f"{folder}/step")
        for number in range(rounds + 1):
            for name, command in commands.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
                if number:  # the first round warms the page cache
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
    for name, found in seconds.items():
        print(f"{name:40} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
