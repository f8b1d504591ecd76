"""A process is after a save and a load what it was before: threads, descriptors, loops, handlers, torch's settings."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_storage import CheckpointExistsError, CheckpointNotFoundError
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, assert_same, failure, like, load, place_of, save, small_state
from tests.processes import plain, round_trip

pytestmark = pytest.mark.filterwarnings(ALONE)

OF_FSSPEC = re.compile(r"fsspecIO|asyncio_\d+")
"""The threads that stay after S3 and GCS: that of fsspec with its one loop, and those on which it resolves names."""


def settings() -> dict[str, Any]:
    """All of a process that others rely on, except what is open."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "signal handlers": handlers,
        "wakeup fd": _wakeup(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "numpy rng": str(np.random.get_state()),
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "loop policy": type(asyncio.get_event_loop_policy()),
        "running loop": asyncio._get_running_loop(),
        "exception hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "socket timeout": socket.getdefaulttimeout(),
        "gc": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "umask": _umask(),
        "folder": Path.cwd(),
        "environment": dict(os.environ),
        "safe globals": sorted(map(str, torch.serialization.get_safe_globals())),
        "crc32 of torch.save": torch.serialization.get_crc32_options(),
    }


def _wakeup() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def descriptors() -> dict[str, str]:
    """What every open descriptor leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - its own descriptor must be left out below
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:
            continue
    return found


def threads(place: Place) -> list[str]:
    """Names of all threads; on S3 and GCS without those of fsspec."""
    found = sorted(thread.name for thread in threading.enumerate())
    return [name for name in found if not (client_of(place) and OF_FSSPEC.fullmatch(name))]


def client_of(place: Place) -> str | None:
    """The client library that a store keeps connections and a loop in."""
    return {"s3": "s3fs", "gs": "gcsfs"}.get(place.url.partition("://")[0])


def settle(place: Place, wanted: list[str]) -> None:
    """Threads that are ending may take a moment."""
    end = time.monotonic() + 5
    while threads(place) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    gc.collect()


def import_client(place: Place) -> None:
    """What the import of a client library does (urllib3 adds filters of warnings) is not what saving does."""
    client = client_of(place)
    if client is not None:
        importlib.import_module(client)


def work(place: Place, number: int) -> None:
    """A save and a load that go well, and one of each that does not."""
    good = place.child(f"good-{number}")
    round_trip(good, number)
    failure(CheckpointExistsError, lambda: save(small_state(), good.writer()))
    failure(CheckpointNotFoundError, lambda: load(like(small_state()), place.child("none").reader()))


def counted(rank: int, world: int, place: Place) -> None:
    """Before and after, in a process in which nothing of the sort was done before."""
    import_client(place)
    before, had_threads, had_open = settings(), threads(place), descriptors()
    work(place, 0)
    settle(place, had_threads)
    assert threads(place) == had_threads, threads(place)
    after = settings()
    changed = {name: (before[name], value) for name, value in after.items() if value != before[name]}
    assert not changed, changed
    if client_of(place) is None:
        assert descriptors() == had_open
        return
    # fsspec keeps its loop, and its client its connections, for as long as it keeps the filesystem: they must not grow.
    kept = descriptors()
    for number in range(1, 4):
        work(place, number)
    settle(place, had_threads)
    assert threads(place) == had_threads, threads(place)
    assert len(descriptors()) <= len(kept), (kept, descriptors())
    assert settings() == after


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "gcs"])
def test_nothing_of_the_process_is_changed(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """After saves and loads, good and failed, only fsspec's own threads are new, if any; every setting is as before."""
    place = plain(place_of(request, kind))
    if kind == "memory":
        place = Place("memory://nothing-changed/run")
    ranks.run(counted, 1, place, init=False)


def with_own_handlers(rank: int, world: int, place: Place) -> None:
    """Settings that are not the usual ones stay, too, and are the ones that hold while saving."""

    def handler(number: int, frame: object) -> None:
        raise AssertionError(number)

    import_client(place)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, handler)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.manual_seed(1234)
    random.seed(99)
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_grad_enabled(False)
    before = settings()
    assert before["torch threads"][0] == 3
    work(place, 1)
    after = settings()
    changed = {name: (before[name], value) for name, value in after.items() if value != before[name]}
    assert not changed, changed
    assert_same(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1234)))


@pytest.mark.parametrize("kind", ["local", "memory", "moto", "gcs"])
def test_settings_of_the_users_own_stay(request: pytest.FixtureRequest, ranks: RankPool, kind: str) -> None:
    """Signal handlers, the default dtype, thread counts, seeds and filters that the user set hold before and after."""
    ranks.run(with_own_handlers, 1, plain(place_of(request, kind)), init=False)
