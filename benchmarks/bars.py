"""The bars of the design, each as a ratio of two figures of one run."""

from __future__ import annotations

from typing import Any

__all__ = ["bars_of"]

Rows = list[dict[str, Any]]
# setting, action, what is compared, of whom, "at least" or "at most", bar. A ratio of walls is theirs / ours.
BARS = (
    ("s3_shaped", "load", "wall", "torch Fsspec", "≥", 10.0),
    ("s3_shaped", "load", "wall", "s3torchconnector", "≥", 1.2),
    ("s3_shaped", "save", "wall", "torch Fsspec", "≥", 4.0),
    ("s3_shaped", "save", "wall", "s3torchconnector", "≥", 1.0),
    ("s3_shaped_gpt2", "save", "wall", "torch Fsspec", "≥", 4.0),
    ("s3_shaped_gpt2", "save", "wall", "s3torchconnector", "≥", 1.0),
    ("s3_unshaped", "load", "wall", "raw s3fs client", "≥", 0.8),
    ("s3_unshaped", "save", "wall", "raw s3fs client", "≥", 0.8),
    ("s3_unshaped", "load", "cpu", "raw s3fs client", "≤", 1.3),
    ("s3_unshaped", "save", "cpu", "raw s3fs client", "≤", 1.3),
    ("s3_unshaped", "load", "cpu", "torch Fsspec", "≤", 1 / 3),
    ("gcs_shaped", "load", "wall", "torch Fsspec", "≥", 3.0),
    ("gcs_shaped", "save", "wall", "torch Fsspec", "≥", 3.0),
    ("local", "save", "wall", "dd", "≥", 0.85),
    ("local", "save", "cpu", "torch FileSystem", "≤", 0.5),
    ("local", "load", "wall", "torch FileSystem", "≥", 3.0),
)
# With the fastest engine that there is, against s3torchconnector.
FASTEST = (("load", "cpu"), ("save", "cpu"), ("load", "wall"), ("save", "wall"))
ENGINES = ("ours", "ours, obstore")
SLACK = 64  # MiB above the budget


def _row(rows: Rows, subject: str, action: str) -> dict[str, Any]:
    return next(row for row in rows if (row["subject"], row["action"]) == (subject, action) and not row["label"])


def bars_of(settings: dict[str, Rows]) -> str:
    """A table of the bars that these settings can say something about, whether they hold or not."""
    lines = ["| setting | figure | against | measured | bar | holds |", "|" + " --- |" * 6]
    for setting, action, what, subject, way, bar in BARS:
        if setting not in settings:
            continue
        ours, theirs = (_row(settings[setting], name, action) for name in ("ours", subject))
        if what == "wall":
            ratio = theirs["median_wall"] / ours["median_wall"]
        else:
            ratio = ours["cpu_per_gb"] / theirs["cpu_per_gb"]
        holds = ratio >= bar if way == "≥" else ratio <= bar
        name = "wall, theirs / ours" if what == "wall" else "client CPU, ours / theirs"
        lines.append(
            f"| {setting} {action} | {name} | {subject} | {ratio:.2f} | {way} {bar:.2f} | {'yes' if holds else 'NO'} |"
        )
    for action, what in FASTEST if "s3_unshaped" in settings else ():
        theirs = _row(settings["s3_unshaped"], "s3torchconnector", action)
        engines = {name: _row(settings["s3_unshaped"], name, action) for name in ENGINES}
        figure = "cpu_per_gb" if what == "cpu" else "median_wall"
        name, best = min(engines.items(), key=lambda item: item[1][figure])
        ratio = best[figure] / theirs[figure]
        lines.append(
            f"| s3_unshaped {action} | {what}, {name} / theirs | s3torchconnector | {ratio:.2f} | ≤ 1.00 |"
            f" {'yes' if ratio <= 1 else 'NO'} |"
        )
    for row in settings.get("memory", []):
        budget = row["options"]["memory_budget"] / 2**20
        holds = "yes" if row["peak_mib"] <= budget + SLACK else "NO"
        lines.append(
            f"| memory {row['action']} | peak MiB above the tensors | {row['label']} | {row['peak_mib']:.0f} |"
            f" ≤ {budget + SLACK:.0f} | {holds} |"
        )
    if "local" in settings:
        for setting in ("s3_unshaped", "s3_shaped", "gcs_shaped"):
            for action in ("save", "load") if setting in settings else ():
                disk, far = (_row(settings[name], "ours", action) for name in ("local", setting))
                part = far["gb_per_s"] / disk["gb_per_s"]
                lines.append(f"| {setting} {action} | GB/s, part of local disk | ours | {part:.2f} | printed | |")
    return "\n".join(lines)
