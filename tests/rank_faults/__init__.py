"""Ranks that raise, stop and die in the middle of a save or a load, and jobs that save to the same folder at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from fsspec.callbacks import Callback
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from dcp_storage import CheckpointError
from dcp_storage.store import Store
from dcp_storage.stores.location import Location
from dcp_storage.stores.opening import open_store
from dcp_storage.testing.faulty import Fault, FaultyStore
from tests.e2e import like

__all__ = [
    "BAD",
    "ERRORS",
    "Loading",
    "Opener",
    "Raised",
    "Saving",
    "Telling",
    "merged",
    "raised_in",
    "state_of",
    "template_of",
]

BAD = 1
"""The rank that fails; not the coordinator."""


class Unpicklable(Exception):  # noqa: N818 - the name says what matters
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


class Needy(Exception):  # noqa: N818
    """Can be sent, but not be made again at the other end: its ``__init__`` wants more than what is in ``args``."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Stop(BaseException):
    """No Exception, and cannot be sent."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


class NeedyStop(BaseException):
    """No Exception, and cannot be made again at the other end."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Threadlike(Exception):  # noqa: N818
    """Holds what belongs to its process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.generator = (number for number in range(3))


ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "Unpicklable": lambda: Unpicklable("the reason"),
    "Needy": lambda: Needy("the reason", code=3),
    "Threadlike": lambda: Threadlike("the reason"),
    "Stop": lambda: Stop("the reason"),
    "NeedyStop": lambda: NeedyStop("the reason", code=3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("the reason"),
    "SystemExit": lambda: SystemExit("the reason"),
}
"""What people's code raises; by the name of its class."""


class Saving(DefaultSavePlanner):
    """Raises in one of its methods.

    Args:
        where: the method's name.
        what: the error's name in :data:`ERRORS`.
    """

    def __init__(self, where: str = "", what: str = "") -> None:
        super().__init__()
        self.where = where
        self.what = what

    def _at(self, where: str) -> None:
        if where == self.where:
            raise ERRORS[self.what]()

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        self._at("create_global_plan")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn.startswith("second"):
            self._at("resolve_data")
        return super().resolve_data(write_item)


class Loading(DefaultLoadPlanner):
    """Raises in one of its methods; see :class:`Saving`."""

    def __init__(self, where: str = "", what: str = "") -> None:
        super().__init__()
        self.where = where
        self.what = what

    def _at(self, where: str) -> None:
        if where == self.where:
            raise ERRORS[self.what]()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self._at("create_global_plan")
        return super().create_global_plan(global_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._at("resolve_tensor")
        return cast("torch.Tensor", super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._at("commit_tensor")
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self._at("load_bytes")
        super().load_bytes(read_item, value)


class Telling(Callback):  # type: ignore[misc]
    """A progress bar that raises when it is told of the first bytes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def relative_update(self, inc: int = 1) -> None:
        raise ERRORS[self.what]()


@dataclass(frozen=True)
class Opener:
    """Opens the real store with faults around it; travels to other processes.

    Attributes:
        faults: what goes wrong.
    """

    faults: tuple[Fault, ...]

    def __call__(self, location: Location, options: Mapping[str, Any], most: int) -> Store:
        return FaultyStore(open_store(location, options, max_concurrency=most), self.faults)


def state_of(rank: int, version: int = 0) -> dict[str, Any]:
    """What one rank holds: two tensors and an object of its own."""
    return {
        f"first-{rank}": torch.arange(50_000, dtype=torch.float32) + 10 * rank + version,
        f"second-{rank}": torch.full((10,), rank - 1000 * version, dtype=torch.int64),
        f"third-{rank}": f"of rank {rank}, version {version}",
    }


def merged(world: int, version: int = 0) -> dict[str, Any]:
    """What all ranks hold together."""
    return {key: value for rank in range(world) for key, value in state_of(rank, version).items()}


def template_of(world: int) -> dict[str, Any]:
    """What a load of everything fills."""
    return cast("dict[str, Any]", like(merged(world)))


@dataclass(frozen=True)
class Raised:
    """What one rank got from a call that failed.

    Attributes:
        type: class of what was raised.
        of: rank → class of its error, as this rank was told, where it was told.
        kinds: rank → kind of that error, where it is one of ours.
        causes: rank → class of the cause of that error, where it has one.
        texts: rank → its text.
    """

    type: str
    of: dict[int, str]
    kinds: dict[int, str]
    causes: dict[int, str]
    texts: dict[int, str]


def raised_in(call: Callable[[], object]) -> Raised:
    """What a call raised, as plain data; it must raise."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result
        failures: dict[int, BaseException] = {}
        if isinstance(error, CheckpointException):
            failures = {rank: failed[0] for rank, failed in error.failures.items()}
        elif isinstance(error, CheckpointError):
            failures = {-1: error}
        ours = {rank: one for rank, one in failures.items() if isinstance(one, CheckpointError)}
        return Raised(
            type(error).__name__,
            {rank: type(one).__name__ for rank, one in failures.items()},
            {rank: one.kind for rank, one in ours.items()},
            {rank: one.cause.type.rpartition(".")[2] for rank, one in ours.items() if one.cause is not None},
            {rank: str(one) for rank, one in failures.items()},
        )
    raise AssertionError("nothing was raised")
