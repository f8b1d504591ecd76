"""Reading the files of a checkpoint, all bytes or a random share of blocks, against their CRC-32s."""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from fsspec.callbacks import Callback

from dcp_storage.crc import crc32
from dcp_storage.errors import ObjectNotFoundError, ObjectTooShortError
from dcp_storage.options import KIB, LoadOptions, Problem, SaveOptions
from dcp_storage.records import Manifest
from dcp_storage.store import Store
from dcp_storage.tools.crew import Crew
from dcp_storage.tools.streams import Cell, Damage, FileSums, Layout, Part, layouts, read_part

__all__ = ["check_data"]


class _Report(Protocol):
    path: str
    problems: list[Problem]
    bytes_read: int

    def warn(self, sentence: str) -> None:
        """Adds a sentence."""


def check_data(
    report: _Report,
    store: Store,
    manifests: Sequence[Manifest],
    whole: Collection[str],
    options: LoadOptions | SaveOptions,
    sample: float | None,
    seed: int,
    callback: Callback | None,
) -> None:
    """Reads the files and notes every run of bytes that is not as committed, in the order of the manifest.

    Args:
        report: where problems go.
        store: the folder.
        manifests: what was committed.
        whole: names of the files whose size is right; only these are read.
        options: concurrency, part size and memory.
        sample: the share of blocks to read; None for every byte.
        seed: chooses which blocks.
        callback: told of bytes read.

    Raises:
        StoreError: the store failed.
    """
    files = [layout for manifest in manifests for layout in layouts(manifest) if layout.record.name in whole]
    bare = [f for f in files if f.record.crc32 is None and any(cell.crc32 is None for cell in f.cells)]
    if bare:
        report.warn(
            f"{report.path}: {len(bare)} files carry no CRC-32, as they were adopted without reading them: "
            "what is in them was not checked."
        )
    size = max(min(options.part_size, options.memory_budget // 2), 64 * KIB)
    reading = _Reading(report, store, size, callback)
    with Crew(options.max_concurrency, options.memory_budget) as crew:
        if sample is None:
            reading.everything(crew, [f for f in files if f not in bare])
        else:
            reading.some(crew, files, sample, seed)
    reading.note(files)


class _Reading:
    def __init__(self, report: _Report, store: Store, part_size: int, callback: Callback | None) -> None:
        self.report = report
        self.store = store
        self.part_size = part_size
        self.callback = callback
        self.lock = threading.Lock()
        self.found: dict[str, list[Damage]] = {}
        self.gone: dict[str, Problem] = {}

    # -- every byte

    def everything(self, crew: Crew, files: Sequence[Layout]) -> None:
        self._announce(sum(f.record.size for f in files))
        for layout in files:
            parts = list(layout.parts(self.part_size))
            sums = FileSums(layout)
            left = [len(parts)]
            for part in parts:
                crew.do(part.size, functools.partial(self._part, sums, part, left))

    def _part(self, sums: FileSums, part: Part, left: list[int]) -> None:
        layout = sums.layout
        if layout.record.name in self.gone:
            return None
        try:
            read_part(self.store, sums, part, memoryview(bytearray(part.size)))
        except (ObjectNotFoundError, ObjectTooShortError) as error:
            return self._note_gone(layout, error)
        self._count(part.size)
        with self.lock:
            left[0] -= 1
            last = not left[0]
        if last:
            self._note_damage(layout, sums.damages())
        return None

    # -- a random share

    def some(self, crew: Crew, files: Sequence[Layout], sample: float, seed: int) -> None:
        cells = [(layout, cell) for layout in files for cell in layout.cells if cell.crc32 is not None]
        if not cells:
            return
        wanted = math.ceil(sample * len(cells))
        # By what the cells are, not by when: the same checkpoint and seed give the same choice.
        numbers = random.Random(f"{seed}/{len(cells)}").sample(range(len(cells)), wanted)
        chosen = [cells[number] for number in sorted(numbers)]
        self._announce(sum(cell.stop - cell.start for _, cell in chosen))
        for layout, cell in chosen:
            cost = min(cell.stop - cell.start, self.part_size)
            crew.do(cost, functools.partial(self._cell, layout, cell))

    def _cell(self, layout: Layout, cell: Cell) -> None:
        if layout.record.name in self.gone:
            return None
        try:
            for _ in range(2):  # only what is altered on the store counts, not what was altered on the way
                crc = self._crc32(layout, cell)
                if crc == cell.crc32:
                    break
        except (ObjectNotFoundError, ObjectTooShortError) as error:
            return self._note_gone(layout, error)
        self._count(cell.stop - cell.start)
        if crc != cell.crc32 and cell.item is not None and cell.crc32 is not None:
            what = "block" if cell.item.blocks else "item"
            self._note_damage(layout, [Damage(what, cell.start, cell.stop, cell.item.key, cell.crc32, crc)])
        return None

    def _crc32(self, layout: Layout, cell: Cell) -> int:
        crc = 0
        for start in range(cell.start, cell.stop, self.part_size):
            data = memoryview(bytearray(min(self.part_size, cell.stop - start)))
            self.store.read_into(layout.record.name, start, [data])
            crc = crc32(data, crc)
        return crc

    # -- what is found

    def _announce(self, total: int) -> None:
        if self.callback is not None:
            self.callback.set_size(total)

    def _count(self, size: int) -> None:
        with self.lock:
            self.report.bytes_read += size
            if self.callback is not None:
                self.callback.relative_update(size)

    def _note_damage(self, layout: Layout, damages: Sequence[Damage]) -> None:
        with self.lock:
            self.found.setdefault(layout.record.name, []).extend(damages)

    def _note_gone(self, layout: Layout, error: ObjectNotFoundError | ObjectTooShortError) -> None:
        short = isinstance(error, ObjectTooShortError)
        found = error.found if isinstance(error, ObjectTooShortError) else None
        name = layout.record.name
        advice = f"It was there when the folder was listed: something removes or shortens files here. Restore {name}."
        with self.lock:
            self.gone[name] = Problem("short" if short else "missing", name, None, layout.record.size, found, advice)

    def note(self, files: Sequence[Layout]) -> None:
        """Turns what was found into problems, neighbouring blocks of an item into one."""
        for layout in files:
            name = layout.record.name
            if name in self.gone:
                self.report.problems.append(self.gone[name])
            runs: list[list[Damage]] = []
            for damage in sorted(self.found.get(name, ()), key=lambda d: d.start):
                last = runs[-1][-1] if runs else None
                if last is not None and (last.what, last.key, last.stop) == (damage.what, damage.key, damage.start):
                    runs[-1].append(damage)
                else:
                    runs.append([damage])
            self.report.problems += [_problem(name, run) for run in runs]


def _problem(name: str, run: Sequence[Damage]) -> Problem:
    first, last = run[0], run[-1]
    where = f"bytes {first.start} to {last.stop} of {name}"
    said = {
        "block": f"{where} are altered ({len(run)} block{'s' * (len(run) != 1)}): loading this key is refused.",
        "item": f"{where} are altered: loading this key is refused.",
        "frame": f"around the numbers in {where} something is altered: dcp_storage loads them, stock torch may not.",
        "file": f"{where} are altered where no key has bytes: every key can be loaded.",
    }[first.what]
    advice = f"{said[0].upper()}{said[1:]} Restore the file from a copy, or use an older checkpoint."
    return Problem("altered", name, first.key, first.wanted, first.found, advice)
