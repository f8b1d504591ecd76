"""How many requests at once, and how large, pay on a store: a short measurement on the user's own bucket."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsspec.callbacks import Callback

from dcp_storage.errors import StoreError
from dcp_storage.names import CLAIM, new_token
from dcp_storage.options import MIB, SaveOptions
from dcp_storage.store import Store
from dcp_storage.tools.crew import Crew
from dcp_storage.tools.opening import Folder, folder_at, must_be_there
from dcp_storage.tools.reports import ToolReport

__all__ = ["BenchReport", "Figure", "bench", "bench_folder"]

_CONCURRENCIES = (1, 4, 8, 16, 32)
_PART_SIZES = (1 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
_FIRST_PART = 4 * MIB
_LEAST = 64 * MIB  # bytes that are enough to measure something
_NEARLY = 0.9  # of the best is good enough where it costs less


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        what: ``write`` or ``read``.
        concurrency: requests in flight at once.
        part_size: bytes of each.
        nbytes: bytes moved.
        seconds: wall time.
    """

    what: str
    concurrency: int
    part_size: int
    nbytes: int
    seconds: float

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


@dataclass
class BenchReport(ToolReport):
    """What was measured, and what to set.

    Attributes:
        figures: every measurement, in the order in which it was made.
        write: bytes per second of the best write.
        read: bytes per second of the best read.
        max_concurrency: advice for SaveOptions and LoadOptions: the least that comes near the best.
        part_size: likewise, bytes.
        skipped: (requests at once, bytes of each) that were left out, since as many requests would have written more
            than was allowed.
        says: the advice in a sentence.
    """

    figures: list[Figure] = field(default_factory=list)
    write: float = 0.0
    read: float = 0.0
    max_concurrency: int = 0
    part_size: int = 0
    skipped: list[tuple[int, int]] = field(default_factory=list)
    says: str = ""


def bench(
    url: str | os.PathLike[str],
    *,
    seconds: float = 8.0,
    max_bytes: int = 2048 * MIB,
    storage_options: Mapping[str, Any] | None = None,
    callback: Callback | None = None,
) -> BenchReport:
    """Writes and reads objects at several concurrencies, then at several sizes, and says which to use.

    What it makes is named ``.claim.<token>`` and removed again. It measures this machine and its way to the store at
    this moment, with one process: a job has many.

    Args:
        url: a folder of the store. A local folder must be there.
        seconds: how long all of it should take, about. Default 8.
        max_bytes: most bytes that are written in all; as many are read. At least 64 MiB, default 2 GiB; the time is
            over before that on all but the fastest links. Each measurement has its share, and is left out where that is
            too little for as many requests as are to be in flight.
        storage_options: handed to fsspec.
        callback: an fsspec Callback that is told of measurements done.

    Raises:
        CheckpointNotFoundError: the local folder does not exist.
        InvalidLocationError: it is a file.
        ValueError: ``seconds`` or ``max_bytes`` is too small to measure anything.
        StoreError: the store failed.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, not {seconds}.")
    if max_bytes < _LEAST:
        raise ValueError(f"max_bytes must be at least 64 MiB ({_LEAST}), not {max_bytes}.")
    options = SaveOptions(max_concurrency=max(_CONCURRENCIES), attempts=3, deadline=60.0)
    return bench_folder(folder_at(url, storage_options, options), seconds, max_bytes, callback)


def bench_folder(folder: Folder, seconds: float, max_bytes: int, callback: Callback | None = None) -> BenchReport:
    """As :func:`bench`, of a folder that may be opened through a wrapper."""
    report = BenchReport(folder.location.url)
    must_be_there(folder)
    opened = folder.open()
    runs = len(_CONCURRENCIES) + len(_PART_SIZES) - 1
    if callback is not None:
        callback.set_size(runs)
    trial = _Trial(opened.store, seconds / (2 * runs))
    left = max_bytes

    def measure(concurrency: int, part_size: int) -> None:
        nonlocal left, runs
        share = left // runs // part_size
        runs -= 1
        if share < concurrency:
            report.skipped.append((concurrency, part_size))
        else:
            found = trial.run(concurrency, part_size, share)
            left -= found[0].nbytes
            report.figures += found
        _tell(callback)

    try:
        for concurrency in _CONCURRENCIES:
            measure(concurrency, _FIRST_PART)
        report.max_concurrency = _least(report.figures, lambda f: f.concurrency)
        for part_size in _PART_SIZES:
            if part_size != _FIRST_PART:
                measure(report.max_concurrency, part_size)
        same = [f for f in report.figures if f.concurrency == report.max_concurrency]
        report.part_size = _least(same, lambda f: f.part_size)
    except StoreError:
        with contextlib.suppress(StoreError):  # what went wrong first is the one to see
            trial.clean()
        trial.names = []
        raise
    finally:
        trial.clean()
        opened.count_into(report)
        opened.store.close()
    report.write = max(f.speed for f in report.figures if f.what == "write")
    report.read = max(f.speed for f in report.figures if f.what == "read")
    report.says = _advice(report)
    return report


def _advice(report: BenchReport) -> str:
    held = report.max_concurrency * report.part_size
    budget = f", memory_budget={held // MIB} * 1024 * 1024" if held > SaveOptions().memory_budget else ""
    said = (
        f"Set max_concurrency={report.max_concurrency}, part_size={report.part_size // MIB} * 1024 * 1024{budget}: "
        f"more did not pay here. Best seen: write {report.write / 1e6:.0f} MB/s, read {report.read / 1e6:.0f} MB/s."
    )
    if report.skipped:
        each = ", ".join(f"{concurrency} of {size // MIB} MiB" for concurrency, size in report.skipped)
        said += f" Not measured, as max_bytes is too small for so many at once: {each}."
    return said


def _tell(callback: Callback | None) -> None:
    if callback is not None:
        callback.relative_update(1)


def _least(figures: Sequence[Figure], setting: Callable[[Figure], int]) -> int:
    """The least setting at which writes and reads both come near the best; where none does, the best for both."""
    speeds: dict[int, dict[str, float]] = {}
    for figure in figures:
        speeds.setdefault(setting(figure), {})[figure.what] = figure.speed
    best = {what: max(s[what] for s in speeds.values()) for what in ("write", "read")}
    share = {value: min(s[what] / best[what] for what in best) for value, s in speeds.items()}
    near = [value for value, found in share.items() if found >= _NEARLY]
    return min(near) if near else max(share, key=lambda value: share[value])


class _Trial:
    """Writes and reads for a while, within bounds."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.store = store
        self.seconds = seconds
        self.names: list[str] = []
        # Not zeros: some stores and links squeeze those.
        self.data = memoryview(os.urandom(MIB) * (max(_PART_SIZES) // MIB))
        self.crcs = {size: zlib.crc32(self.data[:size]) for size in _PART_SIZES}

    def run(self, concurrency: int, part_size: int, most: int) -> list[Figure]:
        """One write and one read measurement of so many requests at most; the objects are removed again."""
        names = [f"{CLAIM}.{new_token()}" for _ in range(most)]
        self.names = names
        body = self.data[:part_size]

        def write(number: int) -> None:
            if self.store.remote:
                self.store.put(names[number], [body], crc32=self.crcs[part_size])
            else:  # as a save does there
                upload = self.store.upload(names[number])
                upload.write_part(1, 0, [body], crc32=self.crcs[part_size])
                upload.complete()

        count, took = self._during(concurrency, most, write)
        figures = [Figure("write", concurrency, part_size, count * part_size, took)]
        written, local = count, threading.local()

        def read(number: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(part_size))
            self.store.read_into(names[number % written], 0, [local.buffer])

        count, took = self._during(concurrency, most, read)
        figures.append(Figure("read", concurrency, part_size, count * part_size, took))
        self.clean()
        return figures

    def _during(self, concurrency: int, most: int, call: Callable[[int], None]) -> tuple[int, float]:
        """Makes a call again and again on some threads until time or calls are used up; at least once."""
        lock = threading.Lock()
        begun = time.monotonic()
        next_ = 0

        def work() -> None:
            nonlocal next_
            while not crew.failed.is_set():
                with lock:
                    number = next_
                    if number >= most or (number and time.monotonic() - begun >= self.seconds):
                        return
                    next_ += 1
                call(number)

        with Crew(concurrency, concurrency) as crew:  # which ends only when all have ended, also after an interrupt
            for _ in range(concurrency):
                crew.do(1, work)
        return next_, max(time.monotonic() - begun, 1e-9)

    def clean(self) -> None:
        """Removes what was written, also where it is interrupted meanwhile."""
        try:
            self.store.delete(self.names)
        except KeyboardInterrupt:
            self.store.delete(self.names)
            raise
        self.names = []
