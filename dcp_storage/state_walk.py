"""From what the user handed over to its parts, in the order in which they are loaded."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dcp_storage.per_rank import PREFIX, PerRank, RngState
from dcp_storage.state_findings import Own, Part
from dcp_storage.state_models import ModulePart
from dcp_storage.state_optimizers import OptimizerPart
from dcp_storage.state_tree import Path, flatten, key_of, set_at
from dcp_storage.state_values import RngPart, StatefulPart, TreePart

__all__ = ["Parts", "is_live", "parts_of"]

Parts = list[Part]


def is_live(value: Any) -> bool:
    """Whether a value has a state of its own to be saved and filled: a module, an optimizer, anything Stateful."""
    if isinstance(value, (PerRank, RngState, nn.Module, Optimizer)):
        return True
    kind = type(value)
    return (
        not isinstance(value, type)
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )


def parts_of(state: MutableMapping[str, Any]) -> Parts:
    """The parts of a state: modules, then optimizers, Stateful objects and plain values, random generators last.

    Raises:
        TypeError: the state is no dict with text as keys, or a live object is in a tuple or a set.
        ValueError: a name that is taken, or a PerRank within another.
    """
    if not isinstance(state, MutableMapping):
        raise TypeError(f"The state must be a dict of what is to be saved, not {type(state).__name__}.")
    found: list[tuple[str, Any, Callable[[Any], None], Own | None]] = []
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"The names of the state must be text, not {name!r}.")
        if name == PREFIX or name.startswith(f"{PREFIX}."):
            raise ValueError(f"{name!r} is where values of every rank are kept: use another name.")
        _walk(name, value, _putter(state, (name,)), None, found)
    modules = [ModulePart(key, value, own) for key, value, _, own in found if isinstance(value, nn.Module)]
    optimizers: Parts = [
        OptimizerPart(key, value, modules, own) for key, value, _, own in found if isinstance(value, Optimizer)
    ]
    others: Parts = []
    generators: Parts = []
    for key, value, put, own in found:
        if isinstance(value, RngState):
            generators.append(RngPart(key, value, own))
        elif isinstance(value, (nn.Module, Optimizer)):
            continue
        elif is_live(value):
            others.append(StatefulPart(key, value, own))
        else:
            others.append(TreePart(key, value, put, is_live, own))
    return [*modules, *optimizers, *others, *generators]


def _putter(root: Any, path: Path) -> Callable[[Any], None]:
    return lambda value: set_at(root, path, value)


def _walk(
    key: str,
    value: Any,
    put: Callable[[Any], None],
    own: Own | None,
    found: list[tuple[str, Any, Callable[[Any], None], Own | None]],
) -> None:
    if isinstance(value, PerRank):
        if own is not None:
            raise ValueError(f"{key!r} is a PerRank within a PerRank.")
        _walk(key, value.value, lambda loaded: setattr(value, "value", loaded), Own(value, key), found)
        return
    if is_live(value):
        found.append((key, value, put, own))
        return
    plain = False
    for path, text, leaf in flatten(value, is_live):
        if is_live(leaf):
            _walk(f"{key}.{key_of(text)}", leaf, _putter(value, path), own, found)
        else:
            plain = True
            if isinstance(leaf, (tuple, set, frozenset)) and any(is_live(part) for part in leaf):
                raise TypeError(
                    f"{key!r} has a module, an optimizer or the like in a {type(leaf).__name__}: use a list."
                )
    if plain:
        found.append((key, value, put, own))
