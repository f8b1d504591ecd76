"""Copies from an accelerator run ahead of the work, in order, within a window.

There is no accelerator where these tests run. The tensors are on the CPU, and the transfers are made here: a thread
fills the copy late, so that whoever does not wait for it sees that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dcp_storage.carrying import Ahead, Carrier, copy_into, is_pinnable, staging_for

LATE = 0.05  # seconds


@dataclass
class Late:
    """A transfer whose copy is there some time after it began."""

    log: list[str]
    name: str
    host: torch.Tensor
    thread: threading.Thread

    def wait(self) -> torch.Tensor:
        """The copy."""
        self.log.append(f"wait {self.name}")
        self.thread.join(timeout=10)
        return self.host


class Device:
    """Takes every tensor for one on an accelerator, save those that are named in ``here``."""

    def __init__(self, *here: str) -> None:
        self.here = here
        self.log: list[str] = []
        self.names: dict[int, str] = {}

    def resolver(self, name: str, tensor: torch.Tensor) -> Callable[[], object]:
        """What an item's resolver does: gives the tensor."""
        self.names[id(tensor)] = name

        def resolve() -> object:
            self.log.append(f"resolve {name}")
            return tensor

        return resolve

    def begin(self, tensor: torch.Tensor) -> Late | None:
        """Begins a transfer of the tensor."""
        name = self.names[id(tensor)]
        if name in self.here:
            return None
        host = torch.zeros_like(tensor)

        def fill() -> None:
            time.sleep(LATE)
            host.copy_(tensor)

        thread = threading.Thread(target=fill)
        thread.start()
        return Late(self.log, name, host, thread)


def tensors(*names: str) -> dict[str, torch.Tensor]:
    """Tensors of 400 bytes, each with its own value."""
    return {name: torch.full((100,), float(k + 1)) for k, name in enumerate(names)}


def test_what_is_taken_has_arrived_and_keeps_its_order() -> None:
    """Every tensor is handed out in the order of the items, and only when all of it is there."""
    state, device = tensors("a", "b", "c"), Device()
    ahead = Ahead([device.resolver(n, t) for n, t in state.items()], 1 << 20, device.begin)
    for tensor in state.values():
        found = ahead.take()
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, tensor)


def test_the_next_copy_begins_before_the_last_one_is_waited_for() -> None:
    """However small the window is, one tensor is on its way while the one before it is worked on."""
    state, device = tensors("a", "b", "c"), Device()
    ahead = Ahead([device.resolver(n, t) for n, t in state.items()], 0, device.begin)
    ahead.take()
    assert device.log == ["resolve a", "resolve b", "wait a"]
    ahead.take()
    assert device.log[3:] == ["resolve c", "wait b"]
    ahead.take()
    assert device.log[5:] == ["wait c"]


def test_no_more_than_the_window_is_on_its_way() -> None:
    """Tensors are resolved ahead until the bytes under way fill the window, and no further."""
    state, device = tensors("a", "b", "c", "d", "e"), Device()
    ahead = Ahead([device.resolver(n, t) for n, t in state.items()], 800, device.begin)
    ahead.take()
    assert device.log == ["resolve a", "resolve b", "resolve c", "wait a"]


def test_what_is_on_the_cpu_is_resolved_when_it_is_asked_for() -> None:
    """The planner is not asked early for items that need no carrying: it may have to make copies of them."""
    state, device = tensors("a", "b", "c"), Device("a", "b", "c")
    ahead = Ahead([device.resolver(n, t) for n, t in state.items()], 1 << 20, device.begin)
    for name, tensor in state.items():
        assert ahead.take() is tensor
        assert device.log[-1] == f"resolve {name}"


def test_an_item_on_the_cpu_ends_the_look_ahead() -> None:
    """Between tensors on a device, one that is on the CPU is resolved, and what is behind it is not."""
    state, device = tensors("a", "b", "c"), Device("b")
    ahead = Ahead([device.resolver(n, t) for n, t in state.items()], 1 << 20, device.begin)
    ahead.take()
    assert device.log == ["resolve a", "resolve b", "wait a"]
    assert ahead.take() is state["b"]
    assert device.log[3:] == []
    assert isinstance(ahead.take(), torch.Tensor)


def test_an_error_of_the_planner_comes_as_it_is() -> None:
    """What a resolver raises reaches whoever takes."""

    def fail() -> object:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        Ahead([fail], 0).take()


def test_without_an_accelerator_nothing_is_carried() -> None:
    """On the CPU no transfer begins, staging is plain memory, and a copy is a copy."""
    assert Carrier().begin(torch.ones(3)) is None
    assert Carrier().begin(torch.ones(3, device="meta")) is None
    assert not is_pinnable(torch.device("cpu"))
    staging = staging_for(torch.device("cpu"), 12)
    assert (staging.nbytes, staging.readonly, bytes(staging)) == (12, False, bytes(12))
    target = torch.zeros(3)
    copy_into(target, torch.arange(3.0))
    assert target.tolist() == [0.0, 1.0, 2.0]
