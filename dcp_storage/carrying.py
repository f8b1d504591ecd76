"""Between an accelerator and the CPU: pinned memory, and copies that run beside other work.

A copy to or from pageable memory holds its caller up and goes through a buffer of the driver. On a save, the tensors
that come next are copied to pinned memory while the ones before them are serialised and sent; on a load, bytes arrive
in pinned memory and go to the device from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dcp_storage.codec import bytes_of

__all__ = ["Ahead", "Carrier", "Transfer", "copy_into", "is_pinnable", "staging_for"]


class Transfer(Protocol):
    """A copy to the CPU that is under way."""

    def wait(self) -> torch.Tensor:
        """The copy, once all of it is there."""


@dataclass
class _OnStream:
    """A copy into pinned memory on a stream of its own."""

    source: torch.Tensor  # its memory must not be given to anybody else before the copy has ended
    host: torch.Tensor
    event: torch.Event

    def wait(self) -> torch.Tensor:
        self.event.synchronize()
        return self.host


def is_pinnable(device: torch.device) -> bool:
    """Whether pinned memory makes copies to and from this device faster, and this torch can make it."""
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type == device.type and device.type != "mps"  # Apple's memory is shared


class Carrier:
    """Begins copies from accelerators to the CPU, on one stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def begin(self, tensor: torch.Tensor) -> Transfer | None:
        """Begins to copy a tensor into pinned memory.

        Args:
            tensor: what the planner resolved. Work that was queued on its device's current stream is done before.

        Returns:
            None where the tensor is on the CPU already, or is none that can be copied so.
        """
        device = tensor.device
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if device.type in ("cpu", "meta") or not plain or tensor.is_quantized or not is_pinnable(device):
            return None
        source = tensor.detach()
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            host.copy_(source, non_blocking=True)
            event = stream.record_event()
        return _OnStream(source, host, event)


class Ahead:
    """Resolves a row of items in order, some of them before they are asked for.

    An item on an accelerator begins its way to the CPU when it is resolved, and as long as the last one resolved is
    such an item, the next one is resolved too, up to a number of bytes on their way. Items on the CPU are resolved
    when they are asked for.

    Args:
        resolvers: give the items; called in order, each once, on the thread that calls :meth:`take`.
        window: bytes on their way, beyond the item asked for, at most.
        begin: begins a transfer, or gives None where there is nothing to carry; a :class:`Carrier`'s by default.
    """

    def __init__(
        self,
        resolvers: Sequence[Callable[[], object]],
        window: int,
        begin: Callable[[torch.Tensor], Transfer | None] | None = None,
    ) -> None:
        self._left = deque(resolvers)
        self._window = window
        self._begin = begin or Carrier().begin
        self._waiting: deque[tuple[object, Transfer | None, int]] = deque()
        self._under_way = 0  # bytes of what waits

    def take(self) -> object:
        """The next item, on the CPU where it can be brought there.

        Raises:
            BaseException: what a resolver raised, perhaps that of a later item.
        """
        if not self._waiting:
            self._resolve()
        value, transfer, size = self._waiting.popleft()
        self._under_way -= size
        carried = transfer is not None
        while self._left and carried and (not self._waiting or self._under_way < self._window):
            self._resolve()
            carried = self._waiting[-1][1] is not None
        return value if transfer is None else transfer.wait()

    def _resolve(self) -> None:
        value = self._left.popleft()()
        transfer = self._begin(value) if isinstance(value, torch.Tensor) else None
        size = value.numel() * value.element_size() if transfer is not None and isinstance(value, torch.Tensor) else 0
        self._waiting.append((None if transfer is not None else value, transfer, size))
        self._under_way += size


def staging_for(device: torch.device, size: int) -> memoryview:
    """Memory for bytes on their way into a target on this device: pinned where that helps."""
    if size and device.type != "cpu" and is_pinnable(device):
        return bytes_of(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))
    return memoryview(bytearray(size))


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.copy_(value)``, ended when this returns; other threads may work while a device takes pinned memory."""
    if target.device.type == "cpu" or value.device.type != "cpu" or not value.is_pinned():
        target.copy_(value)
        return
    target.copy_(value, non_blocking=True)
    torch.accelerator.current_stream(target.device).record_event().synchronize()
