"""Whether a store keeps what checkpoints need of it: asked of the store itself, not of its manual."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsspec.callbacks import Callback

from dcp_storage.errors import StoreError
from dcp_storage.options import SaveOptions
from dcp_storage.session import phase
from dcp_storage.tools.doctor_checks import CHECKS, Answer, Bench, Failed
from dcp_storage.tools.opening import Folder, folder_at, must_be_there
from dcp_storage.tools.reports import ToolReport

__all__ = ["Diagnosis", "doctor", "doctor_folder"]

_OPTIONS = SaveOptions(attempts=2, deadline=30.0)


@dataclass
class Diagnosis(ToolReport):
    """What a store does when it is asked.

    ``problems`` are the answers that break a promise of this package; ``ok`` where there are none.

    Attributes:
        create_if_absent: ``atomic``, ``none`` or ``unknown``: what saves to this store will go by.
        answers: every question with its answer and what that means for checkpoints.
        latency: median seconds of one small request, by kind.
        throughput: bytes per second of a write and of a read of a few MiB, one request at a time.
    """

    create_if_absent: str = ""
    answers: list[Answer] = field(default_factory=list)
    latency: dict[str, float] = field(default_factory=dict)
    throughput: dict[str, float] = field(default_factory=dict)


def doctor(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions = _OPTIONS,
    callback: Callback | None = None,
) -> Diagnosis:
    """Asks a store whether it keeps what checkpoints need of it.

    Does it really refuse a second create, of a small object and of one in parts; does a listing show what was written,
    with its size; can uploads be aborted; does it check checksums (it is sent a wrong one)? And how long do requests
    take. All objects that it makes are named ``.claim.<token>``, and are removed again, also after an error.

    Args:
        url: a folder of the store, best the one that runs will go to. A local folder must be there.
        storage_options: handed to fsspec.
        options: retries and deadlines. Default: two attempts, 30 seconds.
        callback: an fsspec Callback that is told of questions answered.

    Raises:
        CheckpointNotFoundError: the local folder does not exist.
        InvalidLocationError: it is a file.
        StoreError: nothing can be written there at all.
    """
    return doctor_folder(folder_at(url, storage_options, options), callback)


def doctor_folder(folder: Folder, callback: Callback | None = None) -> Diagnosis:
    """As :func:`doctor`, of a folder that may be opened through a wrapper."""
    report = Diagnosis(folder.location.url)
    must_be_there(folder)
    opened = folder.open()
    if callback is not None:
        callback.set_size(len(CHECKS))
    try:
        with Bench(opened.store) as bench:
            for name, check in CHECKS:
                with phase(report, name):
                    try:
                        answer = check(bench)
                    except Failed as failed:
                        answer = Answer(name, False, str(failed), failed.means)
                    except StoreError as error:
                        if not report.answers:
                            raise  # the first write: there is nothing to examine
                        answer = Answer(name, False, str(error), "This request is one that saves or loads depend on.")
                report.answers.append(answer)
                if callback is not None:
                    callback.relative_update(1)
                if answer.ok is False:
                    report.problem(name, answer.means, found=answer.found)
        report.create_if_absent = bench.create_if_absent
        report.latency, report.throughput = bench.latency, bench.throughput
    finally:
        opened.count_into(report)
        opened.store.close()
    return report
