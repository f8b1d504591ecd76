"""Reports as text for people; nothing here decides anything."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_storage.options import Problem, Report
from dcp_storage.tools.adopt import Adoption
from dcp_storage.tools.bench import BenchReport
from dcp_storage.tools.copy import CopyReport
from dcp_storage.tools.describe import Description
from dcp_storage.tools.doctor import Diagnosis
from dcp_storage.tools.drawing import count_text, size_text
from dcp_storage.tools.listing import Listing
from dcp_storage.tools.prune import Pruned, PruneReport
from dcp_storage.tools.verify import Verification

__all__ = ["say", "text_of"]

_WIDE = 200  # columns where the output is no terminal: nothing is cut for a width that nobody has


def _console(out: io.StringIO) -> Console:
    terminal = sys.stdout.isatty()
    width = None if terminal else _WIDE
    return Console(file=out, force_terminal=terminal, width=width, highlight=False, markup=False, emoji=False)


def say(console: Console, text: str) -> None:
    """A line as it is: not wrapped, not cut, no markup."""
    console.print(Text(text), soft_wrap=True)


def _table(console: Console, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(Text(head), overflow="fold", justify="right" if head in _NUMBERS else "left")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console.print(table)


_NUMBERS = ("step", "commit", "files", "size", "ranks", "at once", "MB/s", "frees")


def _ago(modified: float | None) -> str:
    """How long ago, by this machine's clock."""
    if modified is None:
        return ""
    seconds = max(time.time() - modified, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def text_of(report: Report) -> str:
    """A report of any tool as standard output shows it: in colour, and within its width, where that is a terminal."""
    out = io.StringIO()
    console = _console(out)
    for kind, show in _SHOWS:
        if isinstance(report, kind):
            show(console, report)
    for warning in report.warnings:
        say(console, f"warning: {warning}")
    return out.getvalue()


_SIZES = ("missing", "short", "long")


def _problems(console: Console, problems: Sequence[Problem], *, said: str = "") -> None:
    """What is wrong, each with what to do; ``said``: what stands above already."""
    for problem in problems:
        about = [problem.kind, problem.file or "", f"key {problem.key!r}" if problem.key is not None else ""]
        facts = ""
        if problem.kind in _SIZES:
            there = "none" if problem.found is None else problem.found
            facts = f": {problem.wanted} bytes were committed, {there} are there"
        elif problem.kind == "altered" and isinstance(problem.wanted, int) and isinstance(problem.found, int):
            facts = f": CRC-32 {problem.wanted:#010x} was committed, {problem.found:#010x} was read"
        say(console, f"wrong: {' '.join(a for a in about if a)}{facts}")
        if problem.advice != said:
            say(console, f"    {problem.advice}")


def _listing(console: Console, report: Listing) -> None:
    heads = ("step", "state", "commit", "files", "size", "age", "ranks", "torch", "package", "folder")
    rows = [
        (
            line.step,
            f"{line.state}{' (pinned)' if line.pinned else ''}{' (single writer)' if line.single_writer else ''}",
            line.commit,
            line.files,
            size_text(line.nbytes),
            _ago(line.modified),
            line.world_size,
            line.torch,
            line.package,
            line.folder,
        )
        for line in report.steps
    ]
    _table(console, heads, rows)
    if report.hidden:
        say(console, f"{count_text(report.hidden, 'deleted step')} not shown; --all shows all.")
    newest = "no step is committed" if report.latest is None else f"the newest committed step is {report.latest}"
    say(console, f"{report.path}: {newest}.")


def _description(console: Console, report: Description) -> None:
    say(console, f"{report.path}: {report.state}")
    says = report.says.removeprefix(f"{report.path}: ")
    say(console, says)
    if report.commit is not None and report.author is not None:
        alone = ", single writer" if report.single_writer else ""
        ago = f", {_ago(report.modified)} ago" if report.modified is not None else ""
        say(
            console,
            f"commit {report.commit} by {report.author}{ago}, torch {report.torch}, "
            f"dcp_storage {report.package}{alone}",
        )
    if len(report.keys) == 1:
        _one_key(console, report)
    elif report.keys:
        held = f"{count_text(len(report.keys), 'key')} in {count_text(len(report.files), 'file')}"
        say(console, f"{held}, {size_text(report.nbytes)}")
        rows = [
            (key, found.kind if found.dtype is None else found.dtype, _shape(found.shape, found.kind),
             size_text(found.nbytes), len(found.pieces), " ".join(map(str, sorted({p.rank for p in found.pieces}))))
            for key, found in report.keys.items()
        ]  # fmt: skip
        _table(console, ("key", "dtype", "shape", "size", "pieces", "of ranks"), rows)
    if report.leftovers:
        total = size_text(sum(report.leftovers.values()))
        loose = count_text(len(report.leftovers), "file")
        say(console, f"{loose} of ours that no commit names, {total}: {_few(report.leftovers)}")
    if report.state not in ("stock", "unfinished", "void", "nothing"):  # whose problem is that, as said above
        _problems(console, report.problems, said=report.says)


def _shape(shape: tuple[int, ...], kind: str) -> str:
    return f"[{', '.join(map(str, shape))}]" if kind == "tensor" else ""


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "")


def _one_key(console: Console, report: Description) -> None:
    ((key, found),) = report.keys.items()
    what = found.dtype or "object"
    say(console, f"{key}: {what} {_shape(found.shape, found.kind)} {size_text(found.nbytes)}".rstrip())
    say(console, found.drawing())
    if found.values is not None:
        say(console, found.values)


def _verification(console: Console, report: Verification) -> None:
    what, left = _LOOKED[report.depth]
    if report.sample is not None:
        what, left = f"{report.sample:.1%} of the blocks", "The other blocks were not read."
    read = f", {size_text(report.bytes_read)} read" if report.bytes_read else ""
    are = "is" if len(report.problems) == 1 else "are"
    verdict = "nothing is wrong" if report.ok else f"{count_text(len(report.problems), 'thing')} {are} wrong"
    said = f"; {count_text(report.files, 'file')}, {size_text(report.nbytes)}" if report.files else ""
    say(console, f"{report.path}: {verdict} ({what}{said}{read}).")
    if report.ok and left:
        say(console, left)
    _problems(console, report.problems)


_LOOKED = {
    "commit": ("commit and manifest", "The files were not looked at; --depth sizes and --depth data do that."),
    "sizes": ("commit, manifest and sizes", "What is in the files was not read; --depth data does that."),
    "data": ("every byte", ""),
}
"""Depth → what was looked at, and what was not."""


def _pruned(console: Console, report: PruneReport) -> None:
    rows: list[tuple[object, ...]] = [
        (p.folder, p.step, p.action, p.files, size_text(p.frees), p.why) for p in report.folders if p.action != "keep"
    ]
    left: dict[str, list[Pruned]] = {}
    for found in report.folders:
        if found.action == "keep" and found.why:
            left.setdefault(found.why, []).append(found)
    for why, alike in left.items():  # deleted steps, say, of which a long run has hundreds
        named = alike[0].folder if len(alike) == 1 else f"{alike[0].folder} and {len(alike) - 1} more"
        rows.append((named, alike[0].step if len(alike) == 1 else "", "keep", "", "", why))
    if rows:
        _table(console, ("folder", "step", "action", "files", "frees", "why"), rows)
    did = "freed" if report.applied else "would free"
    parts = [
        f"{did} {size_text(report.frees)} in {count_text(report.files, 'file')}" if report.files else "nothing to free"
    ]
    if report.deleted or report.kept:
        gone = "deleted" if report.applied else "to delete"
        parts.append(f"{count_text(len(report.deleted), 'step')} {gone}, {len(report.kept)} kept")
    if report.uploads:
        parts.append(f"{count_text(report.uploads, 'open upload')} {'aborted' if report.applied else 'to abort'}")
    say(console, f"{report.path}: {'; '.join(parts)}.")
    if not report.applied and report.files + report.uploads:
        say(console, "Nothing was changed. Say --apply to do it.")
    _problems(console, report.problems)


def _copied(console: Console, report: CopyReport) -> None:
    if report.already_there:
        say(console, f"{report.path} holds this checkpoint already (commit {report.commit}); nothing was to be done.")
        return
    seconds = sum(report.seconds.values())
    earlier = f"; {count_text(report.files_resumed, 'file')} came from an earlier run" if report.files_resumed else ""
    say(
        console,
        f"{report.source} → {report.path}: commit {report.commit}, {count_text(report.files, 'file')}, "
        f"{size_text(report.nbytes)}; "
        f"{size_text(report.bytes_sent)} sent in {seconds:.1f} s{earlier}.",
    )


def _adopted(console: Console, report: Adoption) -> None:
    say(
        console,
        f"{report.path}: commit {report.commit}, {count_text(report.keys, 'key')}, {size_text(report.nbytes)}: "
        f"{report.says}.",
    )


def _diagnosis(console: Console, report: Diagnosis) -> None:
    for answer in report.answers:
        mark = {True: "ok   ", False: "WRONG", None: "note "}[answer.ok]
        say(console, f"{mark} {answer.question}: {answer.found}")
        say(console, f"      {answer.means}")
    verdict = "keeps all that checkpoints need" if report.ok else "does not keep all that checkpoints need"
    say(console, f"{report.path}: this store {verdict}.")


def _measured(console: Console, report: BenchReport) -> None:
    rows = [(f.what, f.concurrency, size_text(f.part_size), f"{f.speed / 1e6:.0f}") for f in report.figures]
    _table(console, ("what", "at once", "size", "MB/s"), rows)
    say(console, f"{report.path}: {report.says}")


_SHOWS: tuple[tuple[type[Report], Callable[[Console, Any], None]], ...] = (
    (Listing, _listing),
    (Description, _description),
    (Verification, _verification),
    (PruneReport, _pruned),
    (CopyReport, _copied),
    (Adoption, _adopted),
    (Diagnosis, _diagnosis),
    (BenchReport, _measured),
)
