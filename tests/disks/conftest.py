"""A real small disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["tmpfs"]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[..., Path | None]]:
    """Mounts a tmpfs of the given options and returns its folder; None where this user may not mount."""
    mounted: list[Path] = []

    def make(options: str) -> Path | None:
        if os.geteuid() != 0:
            return None
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode != 0:
            return None
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], capture_output=True, timeout=20, check=True)
