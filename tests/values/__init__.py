"""What the tests of values share: every dtype, tensors of random bits, and the ways from a state to a loaded one."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_storage import LoadOptions
from tests.e2e import Place

__all__ = ["DTYPES", "SAVED", "STOCK_TO_US", "US", "US_TO_STOCK", "WAYS", "Way", "elements", "of_bits"]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype that this torch names."""


def of_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Elements of random bits; booleans are 0 or 1."""
    raw = torch.tensor(list(random.Random(seed).randbytes(count * dtype.itemsize)), dtype=torch.uint8)
    return raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)


def elements(tensor: torch.Tensor) -> bytes:
    """The elements in order, taken out of the tensor's memory by numpy, so that torch copies and casts nothing."""
    if not tensor.numel():
        return b""
    size = tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()).numpy().tobytes()
    strides = tuple(step * size for step in tensor.stride())
    kind = np.dtype(f"V{size}")
    return bytes(np.ndarray(tuple(tensor.shape), kind, memory, tensor.storage_offset() * size, strides).tobytes())


def _survives(dtype: torch.dtype) -> bool:
    """Whether ``torch.save`` and ``torch.load`` give back a tensor of this dtype bit for bit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls complex32 experimental, once in every process
            tensor = of_bits(dtype, 24)
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            buffer.seek(0)
            found = torch.load(buffer, weights_only=True)
    except (RuntimeError, KeyError, TypeError):
        return False
    return found.dtype is dtype and elements(found) == elements(tensor)


_QUANTIZED = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}  # their tensors come with a scale: tested apart

SAVED: dict[str, torch.dtype] = {
    name: dtype for name, dtype in sorted(DTYPES.items()) if name not in _QUANTIZED and _survives(dtype)
}
"""Every plain dtype that ``torch.save`` can save."""


@dataclass(frozen=True)
class Way:
    """Who writes a checkpoint and who reads it.

    Attributes:
        name: for the test's id.
        ours: whether our writer writes.
        read_by_us: whether our reader reads.
    """

    name: str
    ours: bool
    read_by_us: bool

    def save(self, state: dict[str, Any], place: Place) -> None:
        """Saves from this process alone."""
        writer = place.writer() if self.ours else FileSystemWriter(place.url)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, state: dict[str, Any], place: Place, **options: Any) -> None:
        """Loads into this process alone; ``options`` are our reader's."""
        if self.read_by_us:
            reader: Any = place.reader(require_commit=self.ours, options=LoadOptions(**options))
        else:
            reader = FileSystemReader(place.url)
        dcp.load(state, storage_reader=reader, no_dist=True)

    def refused(self, state: dict[str, Any], place: Place, **options: Any) -> Callable[[], None]:
        """A load that is about to fail, for :func:`tests.e2e.failure`."""
        return lambda: self.load(state, place, **options)


US = Way("ours", ours=True, read_by_us=True)
US_TO_STOCK = Way("ours-to-stock", ours=True, read_by_us=False)
STOCK_TO_US = Way("stock-to-ours", ours=False, read_by_us=True)
WAYS = (US, US_TO_STOCK, STOCK_TO_US)
"""Our writer and reader, and each of them with stock torch's at the other end; stock's are for local disk."""
