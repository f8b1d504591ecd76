"""The members of the machine: each in a thread of its own, stopped before every request."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dcp_storage.errors import StoreError
from dcp_storage.store import Buffers, Store
from dcp_storage.wrappers import Request, RequestStore
from tests.machine.model import Doer
from tests.protocol.schedule import Actor

__all__ = ["WRITES", "Gate", "Late", "Member", "about", "operation_of"]

T = TypeVar("T")

WRITES = frozenset({"put", "create", "delete"})
UNSEEN = frozenset({"create_if_absent"})  # asked once for a process and a bucket: not a request of this member


@dataclass(frozen=True)
class Late:
    """A request that is to take effect later.

    Attributes:
        member: whose it is.
        says: what it is.
        call: makes it.
    """

    member: Member
    says: str
    call: Callable[[], object]


class Member(Actor):
    """One who works on the folder.

    Args:
        doer: who that is, for the model.
        work: called with the member's own store.
        since: the moment of the model's log at which it began.
        began: when it began, in seconds that have been let pass.

    Attributes:
        faults: what was done to its requests, in order.
        into: what a load fills.
        judged: whether its end has been looked at.
    """

    def __init__(self, doer: Doer, work: Callable[[Store], Any], since: int, began: float) -> None:
        super().__init__(doer.name, lambda store: _unwrapped(work, store))
        self.doer = doer
        self.since = since
        self.began = began
        self.faults: list[tuple[str, Request]] = []
        self.into: dict[str, Any] = {}
        self.stock = False
        self.judged = False

    @property
    def killed(self) -> bool:
        """Whether it was."""
        return self.mode == "kill"

    def met(self, *modes: str, operation: str | None = None) -> bool:
        """Whether a request of it met one of these faults."""
        return any(mode in modes and operation in {None, request.operation} for mode, request in self.faults)


class Gate(RequestStore):
    """A member's way to the folder.

    Args:
        inner: the folder.
        member: whose way it is.
        late: where requests go that are to take effect later.
    """

    def __init__(self, inner: Store, member: Member, late: list[Late]) -> None:
        super().__init__(inner)
        self.member = member
        self.late = late

    def outgoing(self, buffers: Buffers) -> Buffers:
        return [memoryview(bytes(buffer)) for buffer in buffers]  # a late request needs them when they are long gone

    def delete(self, names: Iterable[str]) -> None:
        for name in names:  # each on its own: a store that deletes many names at once promises no order
            super().delete((name,))

    def request(self, request: Request, call: Callable[[], T]) -> T:
        if request.operation in UNSEEN:
            return call()
        mode = self.member.pause(request)
        if mode != "go":
            self.member.faults.append((mode, request))
        if mode == "refuse":
            raise StoreError("refused", operation=request.operation, errno=errno.EIO, key=request.name, path=self.url)
        if mode in {"later", "again"}:
            self.late.append(Late(self.member, f"{request.operation} {about(request)}", call))
        if mode == "nowhere":  # written to a disk that only this rank sees
            return None  # type: ignore[return-value]
        if mode != "later":
            answer = call()
            if mode != "lost":
                return answer
        raise StoreError(
            "no reply", operation=request.operation, key=request.name, path=self.url, transient=True, ambiguous=True
        )


def about(request: Request) -> str:
    """What a request is about, in a few words."""
    return request.name or " ".join(request.names)


def _unwrapped(work: Callable[[Store], Any], store: Store) -> Any:
    """Does the work; raises what torch has wrapped."""
    try:
        return work(store)
    except CheckpointException as error:
        first = error.failures[min(error.failures)][0]
        raise first from None


def operation_of(member: Member) -> str:
    """The operation that the member waits to do; empty where it has ended."""
    return member.waiting.operation if member.waiting is not None else ""
