"""Copies of values for a save that goes on behind the training, into memory that is kept from save to save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_storage.errors import portable

__all__ = ["Buffers"]


class Buffers:
    """The staging memory of one save at a time.

    A tensor goes into CPU memory that was used for the same key before, if it still fits; where there is an
    accelerator that memory is pinned and all copies run side by side. What a save does not use is let go.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def stage(self, values: Iterable[tuple[str, Any]]) -> list[Any]:
        """Copies of all values, in their order; later changes of the originals do not reach them.

        Args:
            values: keys, each once, with tensors or objects.

        Raises:
            CheckpointError: a value that cannot be copied; names its key.
        """
        used: dict[str, torch.Tensor] = {}
        copied: dict[Hashable, torch.Tensor] = {}
        devices: set[torch.device] = set()

        def keep(key: str, source: torch.Tensor) -> torch.Tensor:
            # A conjugate or negative is a view of the same elements with a mark: another value.
            marks = (source.is_conj(), source.is_neg())
            same = (source.data_ptr(), source.shape, source.stride(), source.dtype, source.device, marks)
            if source.data_ptr() and same in copied:  # tied: the same elements under another key
                return copied[same]
            target = self._kept.get(key)
            if target is None or not _fits(target, source):
                target = _memory_for(source)
            used[key] = target
            copied[same] = target
            on_device = source.device.type != "cpu"
            target.copy_(source, non_blocking=on_device)
            if on_device:
                devices.add(source.device)
            return target

        staged: list[Any] = []
        with torch.no_grad():
            for key, value in values:
                try:
                    staged.append(_copied(key, value, keep))
                except Exception as error:
                    raise portable(error, "Copying the value", key=key) from error
        for device in devices:
            torch.accelerator.synchronize(device)
        self._kept = used
        return staged


def _copied(key: str, value: Any, keep: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        local = keep(key, value.to_local())
        # from_local would move the copy to the mesh's device.
        made: Any = DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if type(plain) is torch.Tensor and plain.layout is torch.strided and not plain.is_quantized:
            return keep(key, plain)
        return copy.deepcopy(plain)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    return copy.deepcopy(value)


def _fits(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.shape == source.shape and target.dtype == source.dtype


def _memory_for(source: torch.Tensor) -> torch.Tensor:
    pinned = source.device.type != "cpu" and source.numel() > 0
    return torch.empty_like(source, device="cpu", pin_memory=pinned)
