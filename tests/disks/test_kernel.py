"""Errors of the kernel's own under whole saves: calls that a tracer makes fail, and a limit on file sizes."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_storage import FsspecStorageWriter, StoreError
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, failure, like, load, save, small_state

pytestmark = pytest.mark.filterwarnings(ALONE)

ROOT = Path(__file__).parents[2]


def can_trace() -> bool:
    """Whether there is a tracer here, and it may trace."""
    if shutil.which("strace") is None:
        return False
    done = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, timeout=20, check=False)
    return done.returncode == 0


def saved_under(folder: str, path: str, calls: str, error: str, seam: tuple[str, str]) -> dict[str, Any]:
    """What a save to ``folder`` came to in a process whose calls about ``path`` fail.

    Without a tracer the first of the same calls fails in the process itself.
    """
    command = [sys.executable, "-m", "tests.disks.saving"]
    if can_trace():
        tracer = ["strace", "-f", "-qq", "-o", os.devnull, "-P", path, "-e", f"inject={calls}:error={error}"]
        command = [*tracer, *command, "-", "-", "-", folder]
    else:
        command += [*seam, error, folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "error", "where", "seam"),
    [
        ("pwritev,pwritev2", "ENOSPC", "__0_0.distcp", "write"),
        ("fsync", "EIO", "__0_0.distcp", "fsync"),
        ("fsync", "EDQUOT", ".", "fsync"),
    ],
)
def test_a_call_that_the_kernel_refuses(tmp_path: Path, calls: str, error: str, where: str, seam: str) -> None:
    """The save raises with that errno, the file and the operation; nothing of it is left, and the next one works."""
    folder = tmp_path / "step"
    place = Place(str(folder))
    if where == ".":
        folder.mkdir()
    said = saved_under(str(folder), os.path.normpath(folder / where), calls, error, (seam, where))
    assert said["type"] == "StoreError", said
    assert said["errno"] == getattr(errno, error), said
    assert said["operation"], said
    assert where == "." or said["key"] == where, said
    assert not [name for name in place.files() if not name.startswith(".claim")], said
    save(small_state(1), place.writer())
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(1))


def save_within(rank: int, world: int, folder: str, most: int) -> tuple[int | None, str | None, str | None]:
    """On a rank that may write no file of more than ``most`` bytes; errno, key and operation of what it raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        writer = FsspecStorageWriter(folder, overwrite=True)
        error = failure(StoreError, lambda: save({"a": torch.ones(50_000)}, writer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return error.errno, error.key, error.operation


@pytest.mark.parametrize("most", [0, 100, 70_000])
def test_a_limit_on_file_sizes(tmp_path: Path, ranks: RankPool, most: int) -> None:
    """Where the kernel writes no byte beyond a limit, the save raises EFBIG by name, and the old checkpoint loads."""
    place = Place(str(tmp_path / "one"))
    save(small_state(1), place.writer())
    before = {name: place.get(name) for name in place.files()}
    ((number, key, operation),) = ranks.run(save_within, 1, place.url, most, init=False)
    assert number == errno.EFBIG
    assert operation
    assert key is not None
    assert key.endswith(".distcp")
    assert {name: place.get(name) for name in place.files()} == before
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(1))
