"""``make bench``: measures, prints tables and the bars of the design, writes JSON and plots.

Every subject runs in a process of its own, in interleaved rounds; figures are medians. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bars import bars_of
from benchmarks.settings import SETTINGS, Scale

__all__ = ["main"]

QUICK = Scale(state="gpt2-2", local="gpt2", shaped="gpt2-6", rounds=3, full=False)
FULL = Scale(state="gpt2", local="gpt2", shaped="gpt2-6", rounds=5, full=True)
HEAD = ("subject", "action", "s (min–max)", "GB/s", "client CPU s/GB", "server CPU s/GB", "peak MiB", "requests")


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for row in rows:
        server = "" if row["server_cpu_per_gb"] is None else f"{row['server_cpu_per_gb']:.2f}"
        cells = (
            row["label"] or row["subject"],
            row["action"],
            f"{row['median_wall']:.2f} ({row['spread'][0]:.2f}–{row['spread'][1]:.2f})",
            f"{row['gb_per_s']:.2f}",
            f"{row['cpu_per_gb']:.2f}",
            server,
            f"{row['peak_mib']:.0f}",
            str(sum(row["requests"].values()) or ""),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, measures, writes ``results.json``, ``tables.md`` and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes (the default)")
    size.add_argument(
        "--full",
        action="store_true",
        help="GPT-2 with AdamW but where the link is shaped, five rounds, one tensor of 8 GB; about an hour",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(SETTINGS),
        default=list(SETTINGS),
        help="; ".join(f"{name}: {str(setting.__doc__).rstrip('.')}" for name, setting in SETTINGS.items()),
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="settings measured there before are kept"
    )
    options = parser.parse_args()
    scale = FULL if options.full else QUICK
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scale": "full" if options.full else "quick",
    }
    kept = options.out / "results.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    if any(found.get(name) != value for name, value in about.items()):
        found = {**about, "settings": {}}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["BENCH_SCRATCH"] = scratch
        for name in options.only:
            print(f"{name}: {SETTINGS[name].__doc__}", flush=True)
            start = time.monotonic()
            rows = [figure.row() for figure in SETTINGS[name](scale)]
            found["settings"][name] = rows
            kept.write_text(json.dumps(found, indent=1))  # now: what was measured outlives a run that is broken off
            print(_table(rows), f"\n({time.monotonic() - start:.0f} s)\n", flush=True)
    measured = {name: found["settings"][name] for name in SETTINGS if name in found["settings"]}
    bars = bars_of(measured)
    print(bars)
    text = []
    for name, rows in measured.items():
        text += [f"### {name}", "", str(SETTINGS[name].__doc__), "", _table(rows), ""]
    (options.out / "tables.md").write_text("\n".join([*text, "### Bars", "", bars]) + "\n")
    from benchmarks.plots import draw  # matplotlib is needed for nothing else

    draw(measured, options.out)


if __name__ == "__main__":
    main()
