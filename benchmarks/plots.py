"""The plots: bars with their spread for each setting, and GB/s over requests in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

__all__ = ["draw"]

Rows = list[dict[str, Any]]


def draw(settings: dict[str, Rows], folder: Path) -> None:
    """Writes one PNG for each setting into ``folder``."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    disk = {row["action"]: row["gb_per_s"] for row in settings.get("local", []) if row["subject"] == "ours"}
    for name, rows in settings.items():
        if not rows:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
        for axis, action in zip(axes, ("save", "load"), strict=True):
            chosen = [row for row in rows if row["action"] == action]
            labels = [row["label"] or row["subject"] for row in chosen]
            speeds = [row["gb_per_s"] for row in chosen]
            low = [row["gb_per_s"] - row["gb"] / row["spread"][1] for row in chosen]
            high = [row["gb"] / row["spread"][0] - row["gb_per_s"] for row in chosen]
            if name == "s3_concurrency":
                axis.errorbar(labels, speeds, [low, high], marker="o", capsize=3)
            else:
                axis.barh(labels, speeds, xerr=[low, high], capsize=3)
                axis.invert_yaxis()
                if action in disk and name != "local":
                    axis.axvline(disk[action], linestyle="--", color="black", label="ours, local disk")
                    axis.legend(fontsize=8)
            axis.set_title(f"{name}: {action}, GB/s")
        figure.savefig(folder / f"{name}.png", dpi=120)
        plt.close(figure)
