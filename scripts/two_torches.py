"""Runs the core of the tests on a second torch, and has the two torches load each other's checkpoints.

    python -m scripts.two_torches [--torch 2.14.1] [--venv .venv-torch214] [--no-tests] [--keep]

The second torch goes into an environment of its own (git ignores ``.venv*``; a CUDA build, about 6 GB), which is
removed at the end unless ``--keep`` is given; this interpreter's torch is the first one. Prints two tables; the exit
status is 0 only if every test passed and no element differed. Not part of ``make check``: run it when the range of
torch versions in ``pyproject.toml`` is to be widened.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "tests/unit", "tests/protocol", "tests/test_golden.py", "tests/test_pickles_metadata.py",
    "tests/test_pickles_objects.py", "tests/e2e/test_places.py", "tests/e2e/test_values.py", "tests/e2e/test_stock.py",
    "tests/e2e/test_topology.py", "tests/e2e/test_plan_caching.py", "tests/e2e/test_async_save.py", "tests/values",
)  # fmt: skip
BESIDE = ("zstandard>=0.23",)  # what the tests need and the constraints do not pin
SUITE_SECONDS, STEP_SECONDS = 1800, 300
WAYS = (("ours", "ours"), ("ours", "stock"), ("stock", "ours"))
"""Whose writer wrote, and whose reader reads."""


@dataclass(frozen=True)
class Side:
    """One of the two torches: the interpreter that has it, and its version."""

    python: str
    version: str


def environment() -> dict[str, str]:
    """For a child of either side: this tree's packages come first, one thread of torch."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def set_up(venv: Path, version: str) -> str:
    """Makes the environment where it is not there yet; its interpreter."""
    python = str(venv / "bin" / "python")
    stamp = venv / f".installed-{version}"
    if stamp.exists():
        return python
    pinned = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith(("#", "torch=="))
    ]
    print(f"Setting up {venv}: torch {version} and the pinned versions of everything else; some minutes.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("\n".join([f"torch=={version}", *pinned, *BESIDE]))
        wanted.flush()
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", "-r", wanted.name]
        subprocess.run(pip, check=True)
    stamp.touch()
    return python


def run_core(side: Side, report: Path) -> tuple[dict[str, int], list[str]]:
    """Runs the core of the tests; how many ended how, and the names of those that did not pass."""
    command = [side.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--show-capture=no"]
    command += [f"--junitxml={report}", *CORE]
    subprocess.run(command, cwd=ROOT, env=environment(), timeout=SUITE_SECONDS, check=False)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {part.tag for part in case}
        how = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[how] += 1
        if how != "passed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def step(side: Side, *words: str) -> dict[str, Any]:
    """Runs this script's own step under one of the torches; what it says of it."""
    command = [side.python, "-W", "ignore", "-m", "scripts.two_torches", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=STEP_SECONDS, check=False, capture_output=True, text=True
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def dtypes_here() -> list[str]:
    """The dtypes that this torch can save."""
    from tests.values import SAVED

    return [name for name in SAVED if not name.startswith("bits")]


def wanted_values(dtypes: list[str]) -> dict[str, torch.Tensor]:
    """Random bits of each of these dtypes, plain and transposed."""
    from tests.values import SAVED, of_bits

    plain = {name: of_bits(SAVED[name], 24).reshape(4, 6) for name in dtypes}
    return plain | {f"{name}, transposed": tensor.T for name, tensor in plain.items()}


def write(folder: str, dtypes: list[str]) -> dict[str, Any]:
    """Saves the golden state from two ranks, and every dtype from this process, with our writer and with stock's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    from dcp_storage import FsspecStorageWriter
    from dcp_storage.testing.ranks import RankPool
    from tests.golden_state import save_on_rank

    with RankPool() as pool:
        for writer in ("ours", "stock"):
            pool.run(save_on_rank, 2, f"{folder}/{writer}-golden", writer == "stock")
    dcp.save(dict(wanted_values(dtypes)), storage_writer=FsspecStorageWriter(f"{folder}/ours-dtypes"), no_dist=True)
    dcp.save(dict(wanted_values(dtypes)), storage_writer=FileSystemWriter(f"{folder}/stock-dtypes"), no_dist=True)
    return {"torch": torch.__version__}


def read(folder: str, writer: str, reader: str, dtypes: list[str]) -> dict[str, Any]:
    """Loads what :func:`write` saved and compares it with what it must be, element by element."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    from dcp_storage import FsspecStorageReader
    from tests.golden_state import OBJECTS, SHARDED, empty_state, numbers, tensors
    from tests.values import elements

    def load(state: dict[str, Any], name: str) -> dict[str, Any]:
        path = f"{folder}/{writer}-{name}"
        ours = FsspecStorageReader(path, require_commit=writer == "ours")
        dcp.load(state, storage_reader=ours if reader == "ours" else FileSystemReader(path), no_dist=True)
        return state

    golden, pairs = load(empty_state(), "golden"), {}
    for key, wanted in tensors().items():
        found: Any = golden
        group, _, name = key.partition(".")
        number, _, inner = name.partition(".")
        found = golden["layers"][int(number)][inner] if group == "layers" else golden[group][name]
        pairs[key] = found, wanted
    for name, (rows, columns) in SHARDED.items():
        pairs[name] = golden["sharded"][name], torch.tensor(numbers(rows * columns, "float32"), dtype=torch.float32)
    values = wanted_values(dtypes)
    blank = {key: torch.zeros(t.shape, dtype=torch.uint8).to(torch.bool) if t.dtype is torch.bool else
             torch.zeros(t.numel() * t.element_size(), dtype=torch.uint8).view(t.dtype).reshape(t.shape)
             for key, t in values.items()}  # fmt: skip
    load(dict(blank), "dtypes")
    pairs |= {f"dtypes {key}": (blank[key], tensor) for key, tensor in values.items()}
    differing = sum(
        a != b
        for found, wanted in pairs.values()
        for a, b in zip(_each(elements(found), found), _each(elements(wanted), wanted), strict=True)
    )
    objects = sum(golden["objects"][name] != wanted for name, wanted in OBJECTS.items())
    return {
        "torch": torch.__version__,
        "tensors": len(pairs),
        "elements": sum(wanted.numel() for _, wanted in pairs.values()),
        "differing": differing + objects,
    }


def _each(data: bytes, tensor: torch.Tensor) -> list[bytes]:
    size = tensor.element_size()
    return [data[at : at + size] for at in range(0, len(data), size)]


def cross(sides: list[Side], folder: Path) -> int:
    """Each torch loads what each wrote, in every way; prints the table and returns how many cells were not right."""
    wrong = 0
    told = {side.version: step(side, "--dtypes").get("dtypes", []) for side in sides}
    common = sorted(set.intersection(*map(set, told.values())))
    for version, dtypes in told.items():
        print(f"\ntorch {version} saves {len(dtypes)} dtypes; beside the common ones:", *(set(dtypes) - set(common)))
    print("\nwritten by torch  read by torch  writer -> reader  tensors  elements  differing")
    for one in sides:
        said = step(one, "--write", str(folder / one.version), *common)
        for other in sides:
            for writer, reader in WAYS:
                cell = (
                    said
                    if "error" in said
                    else (step(other, "--read", str(folder / one.version), writer, reader, *common))
                )
                line = f"{one.version:<18}{other.version:<15}{f'{writer} -> {reader}':<18}"
                if "error" in cell:
                    print(f"{line}{cell['error'][:160]}")
                    wrong += 1
                    continue
                print(f"{line}{cell['tensors']:>7}{cell['elements']:>10}{cell['differing']:>11}", flush=True)
                wrong += bool(cell["differing"])
    return wrong


def _step(asked: argparse.Namespace) -> dict[str, Any]:
    if asked.dtypes:
        return {"dtypes": dtypes_here()}
    if asked.write:
        folder, *dtypes = asked.write
        return write(folder, dtypes)
    folder, writer, reader, *dtypes = asked.read
    return read(folder, writer, reader, dtypes)


def main() -> int:
    """Sets up, tests, crosses; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", default="2.14.1", help="version of the second torch")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-torch214", help="folder of its environment")
    parser.add_argument("--no-tests", action="store_true", help="only load each other's checkpoints")
    parser.add_argument("--keep", action="store_true", help="leave the environment for the next time")
    parser.add_argument("--dtypes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.dtypes or asked.write or asked.read:
        print(json.dumps(_step(asked)))
        return 0
    second = set_up(asked.venv.resolve(), asked.torch)
    sides = [Side(sys.executable, torch.__version__.partition("+")[0]), Side(second, asked.torch)]
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        if not asked.no_tests:
            outcomes = {side.version: run_core(side, Path(scratch) / f"{side.version}.xml") for side in sides}
            print("\ntorch       passed  failed  skipped")
            for version, (counts, failed) in outcomes.items():
                print(f"{version:<10}{counts['passed']:>8}{counts['failed']:>8}{counts['skipped']:>9}")
                print("".join(f"    {name}\n" for name in failed), end="")
                wrong += len(failed)
        wrong += cross(sides, Path(scratch))
    if not asked.keep:
        shutil.rmtree(asked.venv)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
