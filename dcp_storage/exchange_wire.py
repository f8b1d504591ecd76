"""Bytes from rank to rank over a process group, in one message after the other, with a deadline on each."""

from __future__ import annotations

import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Wire", "WireError"]

_PIECE = 64 * 1024 * 1024  # bytes of one message at most, so that the deadline is for a bounded number of them


class WireError(Exception):
    """A message did not get through.

    Attributes:
        peer: the rank at the other end.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"the connection to rank {self.peer} broke: {self.reason}"


class Wire:
    """Sends and receives over a group; ranks are those of the group. Callable from several threads at once.

    Args:
        group: has a backend for CPU memory.
        token: of the load: messages of another load are never taken for this one's.
        patience: seconds of each wait. One that runs out closes all connections of the group.
        channel: sets messages of several kinds between the same ranks apart; 0 to 3.
    """

    def __init__(self, group: dist.ProcessGroup, token: str, patience: float, channel: int = 0) -> None:
        self._group = group
        self._tag = (zlib.crc32(token.encode()) & 0x0FFFFFFF) * 4 + channel
        self._patience = timedelta(seconds=patience)

    def send(self, peer: int, message: memoryview) -> None:
        """Sends a message; returns when the other rank has it.

        Raises:
            WireError: it did not get through.
        """
        for piece in _pieces(message):
            try:
                work = dist.isend(_tensor(piece), group=self._group, group_dst=peer, tag=self._tag)
                if work is not None:
                    work.wait(timeout=self._patience)
            except RuntimeError as error:
                raise WireError(peer, str(error)) from error

    def receive(self, peer: int, message: memoryview) -> None:
        """Receives a message of exactly this size.

        Raises:
            WireError: it did not come.
        """
        for piece in _pieces(message):
            try:
                work = dist.irecv(_tensor(piece), group=self._group, group_src=peer, tag=self._tag)
                if work is not None:
                    work.wait(timeout=self._patience)
            except RuntimeError as error:
                raise WireError(peer, str(error)) from error


def _pieces(message: memoryview) -> list[memoryview]:
    return [message[at : at + _PIECE] for at in range(0, message.nbytes, _PIECE)]


def _tensor(message: memoryview) -> torch.Tensor:
    return torch.frombuffer(message, dtype=torch.uint8)
