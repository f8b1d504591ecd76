"""Stock checkpoints as other machines write them, made of a stock one by changing the bytes of its items."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_storage import codec
from tests.e2e import Place

__all__ = ["on_device", "rewritten", "swapped", "with_record"]


@contextmanager
def on_device(tag: str) -> Iterator[None]:
    """While it lasts, ``torch.save`` writes of every storage that it lay on the device ``tag``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: tag)
        codec._frame.cache_clear()  # it remembers what surrounds a tensor, and that names the device
        yield
    codec._frame.cache_clear()


def rewritten(state: dict[str, Any], place: Place, change: Callable[[str, bytes], bytes]) -> None:
    """Saves with stock torch, and puts ``change(key, item)`` in the place of each item."""
    dcp.save(state, storage_writer=FileSystemWriter(place.url), no_dist=True)
    metadata = pickle.loads(place.get(".metadata"))
    files: dict[str, bytes] = {}
    for index, info in metadata.storage_data.items():
        item = place.get(info.relative_path)[info.offset : info.offset + info.length]
        new, before = change(index.fqn, item), files.get(info.relative_path, b"")
        info.offset, info.length = len(before), len(new)
        files[info.relative_path] = before + new
    for name, body in files.items():
        place.set(name, body)
    place.set(".metadata", pickle.dumps(metadata))


def with_record(item: bytes, name: str, data: bytes | None) -> bytes:
    """The archive with one record replaced, or without it."""
    return _repacked(item, lambda record, body: data if record == name else body)


def swapped(item: bytes, width: int) -> bytes:
    """The archive as a machine of the other byte order writes it, whose numbers are ``width`` bytes wide."""

    def turned(record: str, body: bytes) -> bytes:
        if record == "byteorder":
            return b"big"
        if not record.startswith("data/"):
            return body
        return b"".join(body[at : at + width][::-1] for at in range(0, len(body), width))

    return _repacked(item, turned)


def _repacked(item: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            body = change(name.partition("/")[2], source.read(name))
            if body is not None:
                target.writestr(name, body)
    return out.getvalue()
