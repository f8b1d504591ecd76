"""A recorder of the local store's system calls that can also make them fail."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.local_syscalls import Syscalls

__all__ = ["WAYS", "Recorded", "Trace", "failing", "half_written", "names"]


@dataclass
class Trace:
    """Records the calls, with paths for descriptors, and raises where a test says so."""

    log: list[str] = field(default_factory=list)
    faults: dict[str, Callable[..., Any]] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)

    def calls(self) -> Syscalls:
        return Syscalls(**{item.name: self._wrap(item.name) for item in fields(Syscalls)})

    def _wrap(self, name: str) -> Callable[..., Any]:
        real = getattr(Syscalls(), name)

        def call(*args: Any) -> Any:
            named = [self.paths.get(arg, str(arg)) if isinstance(arg, int) else arg for arg in args]
            shown = [self._short(arg) for arg in named if isinstance(arg, str) and arg.startswith("/")]
            if name not in ("close", "may_write"):
                self.log.append(" ".join([name, *shown]))
            result = self.faults.get(name, real)(*args)
            if name == "open":
                self.paths[result] = args[0]
            return result

        return call

    @staticmethod
    def _short(path: str) -> str:
        return re.sub(r"\.[a-z][a-z0-9]{15}$", ".<token>", Path(path).name)


def failing(number: int, after: int = 0) -> Callable[..., Any]:
    """A system call that fails, after so many calls that do nothing."""
    left = [after]

    def call(*_: Any) -> None:
        if left[0] == 0:
            raise OSError(number, os.strerror(number))
        left[0] -= 1

    return call


def half_written(number: int) -> Callable[[int, Sequence[memoryview], int], int]:
    """A pwritev that takes three bytes and then fails."""

    def call(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        if offset >= 3:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, [pieces[0][:3]], offset)

    return call


class Recorded:
    """Fixtures: an existing folder and a store of it whose system calls are recorded."""

    @pytest.fixture
    def trace(self) -> Trace:
        """The recorder of one test."""
        return Trace()

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """An existing folder."""
        made = tmp_path / "run"
        made.mkdir()
        return made

    @pytest.fixture
    def store(self, folder: Path, trace: Trace) -> LocalStore:
        """A store of the folder, recorded."""
        return LocalStore(folder, calls=trace.calls())


def names(folder: Path) -> list[str]:
    """All names in the folder, by the system's own listing."""
    return sorted(path.name for path in folder.iterdir())


WAYS: dict[str, dict[str, Callable[..., Any]]] = {
    "link": {},
    "rename": {"link": failing(errno.EPERM)},
    "exclusive": {"link": failing(errno.EOPNOTSUPP), "rename_new": failing(errno.EINVAL)},
}
