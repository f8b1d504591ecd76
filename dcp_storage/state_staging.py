"""Copies of values for a save that goes on behind the training, into memory that is kept from save to save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_storage.carrying import is_pinnable
from dcp_storage.errors import portable
from dcp_storage.twins import place_of

__all__ = ["Buffers"]


class Buffers:
    """The staging memory of one save at a time.

    A tensor goes into CPU memory that was used for the same key before, if it still fits; where there is an
    accelerator that memory is pinned and all copies run side by side. What a save does not use is let go.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._placed: dict[str, Any] = {}

    def stage(self, values: Iterable[tuple[str, Any]]) -> list[Any]:
        """Copies of all values, in their order; later changes of the originals do not reach them.

        Args:
            values: keys, each once, with tensors or objects.

        Raises:
            CheckpointError: a value that cannot be copied; names its key.
        """
        used: dict[str, torch.Tensor] = {}
        placed: dict[str, Any] = {}
        copied: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        devices: set[torch.device] = set()

        def keep(key: str, source: torch.Tensor) -> torch.Tensor:
            plain = type(source) is torch.Tensor and source.layout is torch.strided
            begin = source.data_ptr() if plain else 0
            begins_here = copied.setdefault(begin, []) if begin else []
            for other, copy_of_it in begins_here:  # few do, and comparing takes longer than copying a small tensor
                at = place_of(source)
                if at is not None and at == place_of(other):  # tied: the same elements under another key
                    return copy_of_it
            target = self._kept.get(key)
            if target is None or not _fits(target, source):
                target = _memory_for(source)
            used[key] = target
            begins_here.append((source, target))
            if source.is_cpu:
                target.copy_(source)
            else:
                target.copy_(source, non_blocking=True)
                devices.add(source.device)
            return target

        def place(key: str, source: DTensor) -> Any:
            local = keep(key, source.to_local())
            known = self._placed.get(key)
            spec = None if known is None else known._spec
            # The same object from save to save, as a rule: comparing two takes longer than copying a small tensor.
            alike = spec is source._spec or spec == source._spec
            if known is None or known._local_tensor is not local or not alike:
                # from_local would move the copy to the mesh's device.
                known = DTensor(local, source._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            placed[key] = known  # making one takes longer than copying a small tensor
            return known

        staged: list[Any] = []
        with torch.no_grad():
            for key, value in values:
                try:
                    staged.append(place(key, value) if isinstance(value, DTensor) else _copied(key, value, keep))
                except Exception as error:
                    raise portable(error, "Copying the value", key=key) from error
        for device in devices:
            torch.accelerator.synchronize(device)
        self._kept, self._placed = used, placed
        return staged


def _copied(key: str, value: Any, keep: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if type(plain) is torch.Tensor and plain.layout is torch.strided and not plain.is_quantized:
            return keep(key, plain)
        return copy.deepcopy(plain)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    return copy.deepcopy(value)


def _fits(target: torch.Tensor, source: torch.Tensor) -> bool:
    alike = target.shape == source.shape and target.dtype is source.dtype
    return alike and (source.is_cpu or not _is_pinnable(source) or target.is_pinned())


def _is_pinnable(source: torch.Tensor) -> bool:
    return source.device.type != "cpu" and source.numel() > 0 and is_pinnable(source.device)


def _memory_for(source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(source, device="cpu", pin_memory=_is_pinnable(source))
