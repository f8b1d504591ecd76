"""What a checkpoint is, read by one rank and sent to the rest."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_storage.errors import CheckpointError, portable
from dcp_storage.exchange_rounds import Meeting
from dcp_storage.exchange_wire import Wire, WireError
from dcp_storage.store import Entry, Store, WrappedStore

__all__ = ["Heard", "Retold", "read_together"]

T = TypeVar("T")

_SIZE = struct.Struct("<q")
_INTERRUPTED = "The load was interrupted on rank 0 of the process group."
_READS = 4  # requests, one after the other, that the first rank makes at most before it has something to send


class Heard(WrappedStore):
    """Keeps the answers for somebody else.

    Args:
        inner: the store.

    Attributes:
        answers: (operation, name) → what was answered, in a list as often as it was asked.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.answers: dict[tuple[str, str], list[Any]] = {}

    def entries(self) -> list[Entry]:
        return self._answer("entries", "", self.inner.entries)

    def size(self, name: str) -> int:
        return self._answer("size", name, lambda: self.inner.size(name))

    def read(self, name: str, *, limit: int) -> bytes:
        return self._answer("read", name, lambda: self.inner.read(name, limit=limit))

    def _answer(self, operation: str, name: str, call: Callable[[], T]) -> T:
        kept = self.answers.setdefault((operation, name), [])
        try:
            answer = call()
        except CheckpointError as error:
            kept.append(error)
            raise
        kept.append(answer)
        return answer


class Retold(WrappedStore):
    """Answers as another rank's store has answered.

    Args:
        inner: this rank's own store; it is not asked.
        answers: those of :class:`Heard`.
    """

    def __init__(self, inner: Store, answers: dict[tuple[str, str], list[Any]]) -> None:
        super().__init__(inner)
        self._answers = answers

    def entries(self) -> list[Entry]:
        found: list[Entry] = self._answer("entries", "")
        return found

    def size(self, name: str) -> int:
        found: int = self._answer("size", name)
        return found

    def read(self, name: str, *, limit: int) -> bytes:
        found: bytes = self._answer("read", name)
        return found

    def _answer(self, operation: str, name: str) -> Any:
        left = self._answers.get((operation, name))
        if not left:
            raise CheckpointError(
                f"{self.url}: rank 0 of the process group did not ask the store for what this rank needs ({operation} "
                f"{name}): are require_commit and the options the same on all ranks?",
                path=self.url,
                kind="group",
            )
        answer = left.pop(0)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer


def read_together(meeting: Meeting, store: Store, read: Callable[[Store], T]) -> tuple[T, int]:
    """Lets rank 0 read, and has every rank make the same of the same bytes.

    The bytes go down a tree: each rank hands them on to a few others, so that no rank sends them to all. An error of
    rank 0 is raised, typed, on all.

    Args:
        meeting: the load.
        store: this rank's store.
        read: what reads; it checks what it reads, on every rank.

    Returns:
        What ``read`` returned, and bytes received from another rank.

    Raises:
        CheckpointError: whatever ``read`` raises on rank 0, of kind ``"hook"`` where that is no error of ours; of kind
            ``"peer"``: a rank that was to hand the bytes on did not.
    """
    wire = Wire(meeting.group, meeting.token, meeting.deadline * _READS)
    if meeting.rank == 0:
        heard = Heard(store)
        try:
            value = read(heard)
        except BaseException as error:
            told = CheckpointError(_INTERRUPTED, path=meeting.path, kind="hook")
            if isinstance(error, Exception):
                told = portable(error, "read_metadata", path=meeting.path)
            with contextlib.suppress(CheckpointError):  # who cannot be told does not matter more than this
                _hand_on(meeting, wire, _packed(told))
            raise
        _hand_on(meeting, wire, _packed(heard.answers))
        return value, 0
    try:
        message = _take(meeting, wire)
    except WireError as error:
        failed = CheckpointError(
            f"{meeting.path}: rank {error.peer} of the process group did not send the metadata: {error.reason}",
            path=meeting.path,
            kind="peer",
            cause=error,
        )
        _hand_on(meeting, wire, _packed(failed))
        raise failed from error
    _hand_on(meeting, wire, message)
    said = pickle.loads(message)
    if isinstance(said, CheckpointError):
        raise said
    return read(Retold(store, said)), message.nbytes


def _packed(said: object) -> memoryview:
    out = io.BytesIO()
    pickle.dump(said, out, protocol=5)
    return out.getbuffer()


def _take(meeting: Meeting, wire: Wire) -> memoryview:
    above = meeting.rank & (meeting.rank - 1)  # without its lowest bit
    size = bytearray(_SIZE.size)
    wire.receive(above, memoryview(size))
    message = memoryview(bytearray(_SIZE.unpack(size)[0]))
    wire.receive(above, message)
    return message


def _hand_on(meeting: Meeting, wire: Wire, message: memoryview) -> None:
    """Sends to the ranks below, the one with most ranks below itself first."""
    lowest = meeting.rank & -meeting.rank or 1 << meeting.size.bit_length()
    step = lowest >> 1
    lost: WireError | None = None
    while step:
        if meeting.rank + step < meeting.size:
            try:
                wire.send(meeting.rank + step, memoryview(bytearray(_SIZE.pack(message.nbytes))))
                wire.send(meeting.rank + step, message)
            except WireError as error:
                lost = error  # the others below still get it
        step >>= 1
    if lost is not None:
        raise CheckpointError(
            f"{meeting.path}: rank {lost.peer} of the process group could not be sent the metadata: {lost.reason}",
            path=meeting.path,
            kind="peer",
            cause=lost,
        ) from lost
