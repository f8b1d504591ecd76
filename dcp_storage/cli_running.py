"""Doing a command's work: what is shown of its report or its error, and the exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

from dcp_storage.cli_values import WrongUse
from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InvalidLocationError,
    ObjectNotFoundError,
    StoreError,
)
from dcp_storage.options import Report

__all__ = ["FAILED", "INTERRUPTED", "NOT_THERE", "USE", "WRONG", "exit_code", "run_command"]

WRONG, USE, NOT_THERE, FAILED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes; 0 is as wished."""


def exit_code(error: BaseException) -> int:
    """The exit code that says what went wrong."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, InvalidLocationError | CheckpointExistsError | WrongUse | ValueError | TypeError):
        return USE
    if isinstance(error, CheckpointNotFoundError | ObjectNotFoundError):  # the second: a bucket, say
        return NOT_THERE
    if isinstance(error, StoreError | CommitUnknownError):
        return FAILED
    if isinstance(error, CheckpointError):
        return USE if error.kind in ("single-writer", "pinned", "last-good") else WRONG
    return FAILED  # never 1: a fault of this program says nothing about the checkpoint


def run_command(as_json: bool, work: Callable[[], Report], code: Callable[[Any], int]) -> NoReturn:
    """Does a command's work, shows what came of it, and exits with the code that says so.

    Args:
        as_json: whether the report, or the error, is shown as one JSON object.
        work: gives the report.
        code: the exit code that a report stands for.

    Raises:
        typer.Exit: always.
    """
    try:
        report = work()
        number = code(report)
        if as_json:
            shown = json.dumps(report.to_dict()) + "\n"
        else:
            from dcp_storage.cli_text import text_of

            shown = text_of(report)
        _print(shown, number)
    except typer.Exit:
        raise
    except KeyboardInterrupt as error:
        _fail(as_json, error, "Interrupted: nothing is half done. Run it again.")
    except (CheckpointError, WrongUse, ValueError, TypeError) as error:
        _fail(as_json, error, str(error))
    except Exception as error:  # noqa: BLE001 - shown whole, with a code of its own
        traceback.print_exc()
        about = "This is a fault of dcp-storage or of a package below it, and says nothing about the checkpoint"
        _fail(as_json, error, f"{about}: {type(error).__name__}: {error}")
    else:
        raise typer.Exit(number)


def _fail(as_json: bool, error: BaseException, text: str) -> NoReturn:
    """Says what went wrong, and exits with the code for it.

    Raises:
        typer.Exit: always.
    """
    number = exit_code(error)
    if as_json:
        said = {name: getattr(error, name, None) for name in ("kind", "path", "key")}
        _print(json.dumps({"ok": False, "exit_code": number, "error": {"message": text, **said}}) + "\n", number)
    sys.stderr.write(f"{text}\n")
    raise typer.Exit(number) from error


def _print(text: str, number: int) -> None:
    """Writes to standard output. Whoever stops reading, as ``head`` does, changes nothing of the exit code.

    Raises:
        typer.Exit: with :data:`USE`: it cannot be written to. What the command did is done all the same.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer goes nowhere, or the interpreter would fail over it once more at its end.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return
        sys.stderr.write(f"Standard output cannot be written to: {error.strerror}. The exit code would be {number}.\n")
        raise typer.Exit(USE) from error
