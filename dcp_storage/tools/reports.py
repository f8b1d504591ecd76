"""What every tool hands back: data with ``ok``, ``problems``, ``warnings`` and ``to_dict()``."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_storage.errors import CheckpointError, CorruptCheckpointError
from dcp_storage.options import Problem, Report

__all__ = ["ToolReport", "problem_of"]


@dataclass
class ToolReport(Report):
    """The base of the tools' reports; see :class:`~dcp_storage.options.Report` for the fields.

    ``path`` is the folder that was asked about, ``ok`` whether there are no ``problems``.
    """

    def problem(
        self,
        kind: str,
        advice: str,
        *,
        file: str | None = None,
        key: str | None = None,
        wanted: int | str | None = None,
        found: int | str | None = None,
    ) -> None:
        """Adds one thing that is wrong; the fields are those of :class:`~dcp_storage.options.Problem`."""
        self.problems.append(Problem(kind, file, key, wanted, found, advice))

    def warn(self, sentence: str) -> None:
        """Adds a sentence about what does not touch the checkpoint itself; the same one only once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)


def problem_of(error: CheckpointError, advice: str | None = None) -> Problem:
    """An error as a record of a report.

    Args:
        error: what was raised.
        advice: what to do; the error's own sentence where it is None.
    """
    said = str(error) if advice is None else advice
    if isinstance(error, CorruptCheckpointError):
        return Problem(error.kind, error.file, error.key, error.wanted, error.found, said)
    return Problem(error.kind, key=error.key, advice=said)
