"""What the tests of the tools share: one folder in each of the states that a folder can be in."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import SaveOptions
from dcp_storage.fence import delete_folder
from dcp_storage.tools.opening import Folder, folder_at
from tests.e2e import Place, save

__all__ = ["SLOW_MOTO", "STATES", "flip", "folder_of", "make", "remove", "state"]

STATES = ("committed", "unfinished", "damaged", "void", "stock", "nothing")
"""What a folder can be."""

SLOW_MOTO: Any = pytest.param("moto", marks=pytest.mark.slow)
"""Moto shares this process and its interpreter: a place for slow tests only, where another server shows the same."""


def state() -> dict[str, Any]:
    """Tensors of one and of many checksum blocks, and an object, over several files."""
    return {
        "large": torch.arange(200_000, dtype=torch.float32),
        "small": torch.arange(12, dtype=torch.int16),
        "matrix": torch.arange(60_000, dtype=torch.float64).reshape(300, 200),
        "object": [0.1, "run", 7],
    }


def make(place: Place, kind: str) -> None:
    """Brings a new folder into a state: one of :data:`STATES`; ``damaged`` has a torn manifest."""
    if kind == "nothing":
        return
    if kind == "stock":
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(state(), checkpoint_id=folder, no_dist=True)
            for path in Path(folder).iterdir():
                place.set(path.name, path.read_bytes())
        return
    save(state(), place.writer(options=SaveOptions(shard_size=600_000)))
    if kind == "unfinished":
        remove(place, ".commit", ".metadata")
    elif kind == "damaged":
        flip(place, ".manifest", 100)
    elif kind == "void":
        opened = folder_of(place).open()
        delete_folder(opened.store)
        opened.store.close()


def flip(place: Place, name: str, at: int) -> None:
    """Alters one byte of a file, behind the library's back."""
    data = bytearray(place.get(name))
    data[at] ^= 0x10
    place.set(name, bytes(data))


def remove(place: Place, *names: str) -> None:
    """Removes files."""
    opened = folder_of(place).open()
    opened.store.delete(names)
    opened.store.close()


def folder_of(place: Place) -> Folder:
    """The folder as a tool opens it."""
    return folder_at(place.url, place.options)
