"""Saves and loads over a link that breaks: a real client, the faulting proxy of the test kit, a real server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import torch

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.testing.proxy import Fault, Proxy
from tests.e2e import Place, load, place_of, save

__all__ = ["MIB", "STORES", "Link", "each_once", "link_to", "seconds", "state_of", "zeros_like"]

MIB = 1024 * 1024
TOKEN = re.compile(r"\.[a-z0-9]{16}\b")  # drawn anew for each try of some requests
STORES = ("ministack", "gcs")


@dataclass
class Link:
    """A folder on a store, seen through a proxy.

    Attributes:
        place: the folder, seen without the proxy.
        proxy: what stands between.
        options: ``storage_options`` that lead through the proxy.
    """

    place: Place
    proxy: Proxy
    options: dict[str, Any]

    def save(self, state: dict[str, Any], **options: Any) -> FsspecStorageWriter:
        """Saves through the proxy; the writer, for its report."""
        made = SaveOptions(part_size=5 * MIB, **options)
        writer = FsspecStorageWriter(self.place.url, storage_options=self.options, overwrite=True, options=made)
        save(state, writer)
        return writer

    def load(self, state: dict[str, Any], **options: Any) -> FsspecStorageReader:
        """Loads through the proxy; the reader, for its report."""
        made = LoadOptions(part_size=1 * MIB, **options)
        reader = FsspecStorageReader(self.place.url, storage_options=self.options, options=made)
        load(state, reader)
        return reader

    def left(self) -> list[str]:
        """Uploads and parts that are open on the store."""
        if self.place.server is None:
            return self.place.uploads()
        bucket = self.place.url.removeprefix("s3://").partition("/")[0]
        found = self.place.server.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return [item["Key"] for item in found]


@contextmanager
def link_to(request: pytest.FixtureRequest, kind: str, silence: float | None = None) -> Iterator[Link]:
    """A new folder on a store behind a proxy of its own.

    Args:
        request: of the test, for its fixtures.
        kind: ``"ministack"`` or ``"gcs"``.
        silence: the user's own time-out for an answer, in seconds.
    """
    place = place_of(request, kind)
    if kind == "gcs":
        with Proxy(str(place.options["endpoint_url"])) as proxy:
            options = {**place.options, "endpoint_url": proxy.url}
            if silence is not None:
                options["session_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_read=silence)}
            yield Link(place, proxy, options)
        return
    assert place.server is not None
    with Proxy(place.server.endpoint_url) as proxy:
        options = place.server.behind(proxy.url).storage_options
        if silence is not None:
            options["config_kwargs"] = {"read_timeout": silence}
        yield Link(place, proxy, options)


def each_once(kind: Any, **more: Any) -> Fault:
    """A fault that strikes every request the first time it is made, and lets it through when it comes again."""
    struck: set[tuple[str, str]] = set()
    lock = threading.Lock()

    def matches(method: str, target: str) -> bool:
        target = TOKEN.sub("", target)
        with lock:
            if (method, target) in struck:
                return False
            struck.add((method, target))
            return True

    return Fault(kind, matches, times=-1, **more)


def state_of(seed: int = 0) -> dict[str, Any]:
    """A tensor of several parts, some small ones, and an object."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(3 * MIB, generator=generator),  # 12 MiB: three parts, twelve ranges
        "small": {str(k): torch.randn(100, generator=generator) for k in range(5)},
        "step": 40 + seed,
    }


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    """A template for a load, every value another one."""
    small = {key: torch.zeros_like(value) for key, value in state["small"].items()}
    return {"large": torch.zeros_like(state["large"]), "small": small, "step": -1}


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.monotonic()
    call()
    return time.monotonic() - start
