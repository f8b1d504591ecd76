"""What a save or load tells besides its return: one log record, the ranks' own figures, a line on stragglers.

The records go to the logger ``dcp_storage`` at level INFO, which Python does not show unless it is told to. Each has
the report's figures as fields of their own (``extra``), so that a structured handler needs to parse no text.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from dcp_storage.options import LoadReport, RankFigures, Report, SaveReport
from dcp_storage.records import WrittenItem

__all__ = ["LOGGER", "gather", "straggler", "tell_load", "tell_save", "with_figures"]

LOGGER = "dcp_storage"
"""Name of the logger."""

_FACTOR, _SECONDS = 1.5, 1.0  # a rank is a straggler from this times the median on, and so many seconds above it


class _Result(Protocol):
    @property
    def storage_data(self) -> Any:
        """What ``write_data`` said of an item."""


def with_figures(written: list[WrittenItem], report: SaveReport, rank: int) -> list[WrittenItem]:
    """What a rank wrote, its first item carrying what the writing took to the coordinator."""
    figures = RankFigures(
        rank, dict(report.seconds), report.files, report.bytes_written, report.requests, report.retries
    )
    return [msgspec.structs.replace(first, figures=figures) for first in written[:1]] + written[1:]


def gather(results: Iterable[Sequence[_Result]]) -> list[RankFigures]:
    """The figures that the ranks' results carry, by rank; ranks that had nothing to write carry none."""
    told = (first.storage_data for rank in results for first in rank[:1])
    figures = (written.figures for written in told if isinstance(written, WrittenItem))
    return sorted((found for found in figures if found is not None), key=lambda f: f.rank)


def straggler(ranks: Sequence[RankFigures]) -> str:
    """A sentence on the rank and phase that took longest, against the median; empty where none stands out."""
    worst: tuple[float, str] = (0.0, "")
    for phase in sorted({phase for rank in ranks for phase in rank.seconds}):
        taken = [(rank.seconds.get(phase, 0.0), rank) for rank in ranks]
        median = statistics.median(seconds for seconds, _ in taken)
        seconds, rank = max(taken, key=lambda pair: pair[0])
        above = seconds - median
        if seconds >= _FACTOR * median and above >= _SECONDS and above > worst[0]:
            retried = f", {rank.retries} requests tried again" if rank.retries else ""
            worst = (
                above,
                f"rank {rank.rank} took {seconds:.1f} s for {phase!r}, the median of {len(ranks)} ranks is "
                f"{median:.1f} s ({rank.nbytes} bytes, {rank.requests} requests{retried})",
            )
    return worst[1]


def tell_save(report: SaveReport, rank: int) -> None:
    """One record at the end of a rank's save."""
    where = f"commit {report.commit}" if report.commit is not None else f"rank {rank}"
    slow = f"; slowest: {report.straggler}" if report.straggler else ""
    _tell(
        report,
        "save",
        f"saved {report.path} ({where}): {report.files} files, {report.bytes_written} bytes in {_total(report):.2f} s"
        f"{slow}",
        rank=rank,
        commit=report.commit,
        files=report.files,
        bytes=report.bytes_written,
        straggler=report.straggler,
    )


def tell_load(report: LoadReport) -> None:
    """One record at the end of a rank's load."""
    _tell(
        report,
        "load",
        f"loaded {report.path}: {len(report.loaded)} keys, {report.bytes_read} bytes read for {report.bytes_needed} "
        f"needed in {_total(report):.2f} s",
        commit=report.commit,
        keys=len(report.loaded),
        bytes=report.bytes_read,
        bytes_needed=report.bytes_needed,
    )


def _total(report: Report) -> float:
    return sum(report.seconds.values())


def _tell(report: Report, event: str, text: str, **figures: object) -> None:
    fields = {
        "event": event,
        "path": report.path,
        "seconds": dict(report.seconds),
        "requests": report.requests,
        "retries": report.retries,
        "warnings": list(report.warnings),
        **figures,
    }
    # Prefixed, so that none is the name of a field that logging itself sets.
    logging.getLogger(LOGGER).info(text, extra={f"dcp_{name}": value for name, value in fields.items()})
