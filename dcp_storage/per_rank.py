"""Values that every rank has its own of: how they are named on the store, and the states of random generators."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["PREFIX", "WORLD_KEY", "PerRank", "RngState", "own_key", "seed_of", "split_own"]

PREFIX = "__per_rank__"
"""Top-level name of everything that is kept for every rank: ``__per_rank__.<rank>.<name>``."""

WORLD_KEY = f"{PREFIX}.world_size"
"""Key of a tensor with one element for each rank that saved, so that its size, which is known before anything is read,
tells their number; there only where something was kept for every rank."""

_DIGITS = 9  # of a rank: the name may come from anybody


def own_key(rank: int, key: str) -> str:
    """The name on the store of what ``rank`` keeps under ``key``."""
    return f"{PREFIX}.{rank}.{key}"


def split_own(key: str) -> tuple[int, str] | None:
    """Rank and key of a name on the store; None for one that is not of :func:`own_key`."""
    prefix, _, rest = key.partition(".")
    rank, dot, own = rest.partition(".")
    if prefix != PREFIX or not dot or not (rank.isascii() and rank.isdigit() and len(rank) <= _DIGITS):
        return None
    return int(rank), own


class PerRank:
    """A value that every rank saves its own of, and gets its own back.

    Wrap it where the state is put together: ``{"loader": PerRank(loader)}``. Loading on as many ranks as saved fills
    ``value``: in place where it is a live object (a module, an optimizer, anything with ``state_dict`` and
    ``load_state_dict``), else by replacing it. On another number of ranks ``value`` stays as it is, and ``saved`` has
    the values of all ranks that saved, by rank; of a live object its state dict.

    Args:
        value: what this rank has; None where there is only something to load.

    Attributes:
        value: this rank's value.
        saved: the values of all ranks, after a load on another number of ranks; None otherwise.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.saved: list[Any] | None = None

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})" if self.saved is None else f"PerRank(saved={self.saved!r})"


class RngState:
    """The random generators of this process: of torch (CPU and every device), numpy where it is imported, Python.

    Put one into the state, ``{"rng": RngState()}``: saving keeps each rank's, loading sets them. On as many ranks as
    saved, every rank goes on where it was. On another number they are seeded anew: rank ``r`` of ``w`` takes the
    state that rank ``r % saved`` saved and seeds each generator by :func:`seed_of`, so that loading the same
    checkpoint twice on ``w`` ranks gives the same numbers twice, and no two ranks the same.
    """

    def capture(self) -> dict[str, Any]:
        """The states of all generators, as plain data; no generator moves."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        for name, module in _devices():
            state[name] = list(module.get_rng_state_all())
        return state

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Sets the generators to what :meth:`capture` gave.

        Returns:
            A sentence for each thing that could not be set here, such as the generator of a device that is not there.
        """
        notes = []
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])
        here = dict(_devices())
        for name in sorted(set(state) - {"torch", "python", "numpy"}):
            saved = state[name]
            count = here[name].device_count() if name in here else 0
            for number in range(min(count, len(saved))):
                here[name].set_rng_state(saved[number], number)
            if count != len(saved):
                notes.append(f"RNG states of {len(saved)} {name} devices were saved, and {count} are here.")
        return notes

    def reseed(self, state: dict[str, Any], rank: int, world: int) -> None:
        """Seeds the generators anew from what another number of ranks saved; repeatable.

        Args:
            state: what rank ``rank % saved`` of the saving ranks had, as :meth:`capture` gives it.
            rank: this rank.
            world: how many ranks there are now.
        """
        torch.manual_seed(seed_of(state, "torch", rank, world))  # all devices' too
        random.seed(seed_of(state, "python", rank, world))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed_of(state, "numpy", rank, world) & 0xFFFFFFFF)


def seed_of(state: dict[str, Any], name: str, rank: int, world: int) -> int:
    """The seed of one generator on another number of ranks.

    It is the first 8 bytes, little-endian and without the top bit, of SHA-256 over the saved state of torch's CPU
    generator, followed by the text ``"<name>:<rank>/<world>"``.

    Args:
        state: as :meth:`RngState.capture` gives it.
        name: ``"torch"``, ``"python"`` or ``"numpy"`` (of whose seed the lowest 32 bits count).
        rank: the rank that is seeded.
        world: how many ranks there are now.
    """
    content = bytes(state["torch"].tolist())
    digest = hashlib.sha256(content + f"{name}:{rank}/{world}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & 0x7FFFFFFFFFFFFFFF


def _devices() -> list[tuple[str, Any]]:
    """Kinds of devices here that have generators of their own, with torch's module for each."""
    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    return [(device.type, module)] if device is not None and hasattr(module, "get_rng_state_all") else []
