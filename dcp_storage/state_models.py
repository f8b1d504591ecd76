"""Modules and optimizers: their state under names that do not depend on how they are wrapped or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_storage.errors import CheckpointError, IncompatibleCheckpointError
from dcp_storage.state_findings import Findings, Own, Stored, Wish, inner_path
from dcp_storage.state_tree import Path, flatten, rebuild

__all__ = ["ModulePart", "OptimizerPart", "parameter_names"]

_PARAMS = "params"


def _plain_name(module: nn.Module, name: str) -> str:
    """A name of a state dict without what DDP, torch.compile and activation checkpointing put into it."""
    try:
        (found,) = _get_fqns(module, name)
    except AttributeError:  # a state-dict hook made it up: there is no such attribute to follow
        return name
    return str(found)


class ModulePart:
    """A module: plain, DDP, FSDP2, tensor-parallel, compiled.

    Args:
        key: its name on the store.
        module: what was handed over.
        own: of the PerRank around it, if any.

    Raises:
        CheckpointError: of kind ``"unsupported"``: it is wrapped by FSDP's first version.
    """

    def __init__(self, key: str, module: nn.Module, own: Own | None = None) -> None:
        self.key = key
        self.own = own
        self.module = module
        self._raw: dict[str, Any] = {}
        self._wishes: list[tuple[str, Wish]] = []
        if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
            raise CheckpointError(
                f"{key!r} is wrapped by FullyShardedDataParallel. Shard it by fully_shard, or hand over what "
                "torch.distributed.checkpoint.state_dict.get_state_dict gives.",
                key=key,
                kind="unsupported",
            )

    def named(self) -> Iterator[tuple[str, str, Any]]:
        """Name, raw name and value of everything in the state dict; the values are the module's own objects."""
        self._raw = self.module.state_dict(keep_vars=True)
        for raw, value in self._raw.items():
            yield _plain_name(self.module, raw), raw, value

    def tied(self) -> list[list[str]]:
        """Names, first and others, under which the same parameter or buffer is found."""
        names: dict[int, list[str]] = {}
        for name, _, value in self.named():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), []).append(name)
        return [found for found in names.values() if len(found) > 1]

    def leaves(self) -> list[tuple[Path, Any]]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        return [
            ((name,), value.detach() if isinstance(value, torch.Tensor) else value) for name, _, value in self.named()
        ]

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """See :class:`~dcp_storage.state_findings.Part`. Of tied names one is enough."""
        self._wishes = []
        seen: dict[int, bool] = {}
        entries = list(self.named())
        for name, _, value in entries:
            seen[id(value)] = seen.get(id(value), False) or name in stored
        filled: set[int] = set()
        for name, raw, value in entries:
            key = f"{self.key}.{name}"
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.is_meta:
                raise CheckpointError(
                    f"{key!r} is on the meta device and cannot be filled: call to_empty() first.",
                    key=key,
                    kind="unsupported",
                )
            if is_tensor and id(value) in filled:
                findings.used.add(key)
            elif name in stored:
                wish = findings.want(key, stored[name], value.detach() if is_tensor else None)
                if wish is not None:
                    self._wishes.append((raw, wish))
                if is_tensor:
                    filled.add(id(value))
            elif not (is_tensor and seen[id(value)]):
                findings.lacks(key)

    def apply(self) -> list[str]:
        """See :class:`~dcp_storage.state_findings.Part`. Goes through ``load_state_dict``, for hooks' sake."""
        if not self._wishes:
            return []
        for raw, wish in self._wishes:
            if not isinstance(self._raw[raw], torch.Tensor):
                self._raw[raw] = wish.value
        with torch.no_grad():
            self.module.load_state_dict(self._raw, strict=False)
        return []


def parameter_names(modules: Sequence[ModulePart], optimizer: Optimizer) -> list[list[str]]:
    """What the parameters of an optimizer are called, by group.

    They have the names that their module gives them. Where no single module has them all, the module's key comes
    before the name; a parameter of no module is called by its number, as in the optimizer's own state dict.
    """
    tables = []
    for part in modules:
        table: dict[int, str] = {}
        for raw, parameter in part.module.named_parameters(remove_duplicate=False):
            table.setdefault(id(parameter), _plain_name(part.module, raw))
        tables.append((part.key, table))
    wanted = [id(parameter) for group in optimizer.param_groups for parameter in group[_PARAMS]]
    whole = next((table for _, table in tables if all(one in table for one in wanted)), None)
    if whole is None:
        whole = {}
        for key, table in tables:
            for one, name in table.items():
                whole.setdefault(one, f"{key}.{name}")
    numbers = {one: str(number) for number, one in enumerate(wanted)}
    return [[whole.get(id(p), numbers[id(p)]) for p in group[_PARAMS]] for group in optimizer.param_groups]


class OptimizerPart:
    """An optimizer, its state under the names of its parameters, as ``get_optimizer_state_dict`` names it.

    Unlike that function it does not make an optimizer step that has not: what is empty is saved and loaded as empty.

    Args:
        key: its name on the store.
        optimizer: what was handed over.
        modules: all modules of the state, to name the parameters by.
        own: of the PerRank around it, if any.
    """

    def __init__(self, key: str, optimizer: Optimizer, modules: Sequence[ModulePart], own: Own | None = None) -> None:
        self.key = key
        self.own = own
        self.optimizer = optimizer
        self._modules = modules
        self._state: dict[str, list[tuple[Path, Wish]]] = {}
        self._groups: list[tuple[Path, Wish]] = []
        self._kept: set[str] = set()
        self._bare: list[str] = []

    @property
    def names(self) -> list[list[str]]:
        """Names of the parameters, by group."""
        return parameter_names(self._modules, self.optimizer)

    def leaves(self) -> list[tuple[Path, Any]]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        names = self.names
        numbered = [name for group in names for name in group]
        whole = self.optimizer.state_dict()
        found: list[tuple[Path, Any]] = []
        for number, state in whole["state"].items():
            name = numbered[number] if isinstance(number, int) else str(number)
            found += [(text, value) for _, text, value in flatten(state, text=("state", name))]
        for at, group in enumerate(whole["param_groups"]):
            named = {**group, _PARAMS: names[at]}
            found += [(text, value) for _, text, value in flatten(named, text=("param_groups", at))]
        return found

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """See :class:`~dcp_storage.state_findings.Part`."""
        self._state, self._groups, self._kept, self._bare = {}, [], set(), []
        if not stored:
            for name in (name for group in self.names for name in group):
                findings.lacks(f"{self.key}.state.{name}")
            findings.lacks(f"{self.key}.param_groups")
            return
        parameters = {
            name: parameter
            for names, group in zip(self.names, self.optimizer.param_groups, strict=True)
            for name, parameter in zip(names, group[_PARAMS], strict=True)
        }
        for key, found in stored.items():
            if key.startswith("param_groups."):
                wish = findings.want(f"{self.key}.{key}", found)
                if wish is not None:
                    self._groups.append((inner_path(key, found)[1:], wish))
            elif key.startswith("state."):
                owner = _owner(key[len("state.") :], parameters)
                if owner is not None:
                    rest = key[len(f"state.{owner}.") :]
                    self._want(f"{self.key}.{key}", rest, owner, parameters[owner], found, findings)
        if not self._groups:
            findings.lacks(f"{self.key}.param_groups")
        for name, parameter in parameters.items():
            if name in self._state or not parameter.requires_grad:
                continue
            if findings.excluded(f"{self.key}.state.{name}"):
                self._kept.add(name)
                findings.untouched.append(f"{self.key}.state.{name}")
            else:
                self._bare.append(name)

    def questions(self) -> list[str]:
        """Keys on the store that have to be read before it is known what fits: which parameters the saved groups had.

        There are none in the usual case, where every parameter's state is there and the groups are as many.
        """
        saved = {path[0] for path, _ in self._groups if path}
        usual = not self._bare and len(saved) == len(self.optimizer.param_groups) and all(self.names)
        if usual or not self._groups:
            return []
        return [wish.source for path, wish in self._groups if path[1:] == (_PARAMS,)]

    def answered(self, values: Mapping[str, Any], findings: Findings) -> None:
        """Goes on from :meth:`match` with the values of :meth:`questions`.

        A parameter that the saved optimizer had, and had no state for, is left without one here as well.
        """
        if not self._groups:
            return
        groups = {
            path[0]: list(values[wish.source])
            for path, wish in self._groups
            if path[1:] == (_PARAMS,) and wish.source in values
        }
        if not groups:
            return
        known = {name for group in groups.values() for name in group}
        for name in self._bare:
            if name not in known:
                self._kept.add(name)
                findings.lacks(f"{self.key}.state.{name}")
        for at, names in enumerate(self.names):
            mixed = {number for number, group in groups.items() for name in names if name in group}
            if len(mixed) > 1:
                findings.shapes[f"{self.key}.param_groups.{at}"] = ("one group", f"groups {sorted(mixed)}")

    def apply(self) -> list[str]:
        """See :class:`~dcp_storage.state_findings.Part`. Goes through the optimizer's own ``load_state_dict``."""
        if not self._groups and not self._state:
            return []
        whole = self.optimizer.state_dict()
        names = self.names
        state: dict[int, Any] = {}
        for number, name in enumerate(name for group in names for name in group):
            if name in self._state:
                state[number] = rebuild((path, wish.value) for path, wish in self._state[name])
            elif name in self._kept and number in whole["state"]:
                state[number] = whole["state"][number]
        saved = rebuild((path, wish.value) for path, wish in self._groups) or []
        groups = [
            {**group, **_group_for(at, names, saved, self.key), _PARAMS: group[_PARAMS]}
            for at, group in enumerate(whole["param_groups"])
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        return []

    def _want(self, key: str, rest: str, name: str, parameter: torch.Tensor, found: Stored, findings: Findings) -> None:
        path = inner_path(rest, found)
        live = self.optimizer.state.get(parameter)
        for part in path:
            live = live.get(part) if isinstance(live, dict) else None
        dtype = None
        target: Any = live if isinstance(live, torch.Tensor) else None
        if target is None and found.is_tensor and found.meta.size == parameter.shape and parameter.dim():  # type: ignore[union-attr]
            kind = found.meta.properties.dtype  # type: ignore[union-attr]
            target = torch.empty_like(parameter.detach(), dtype=kind)
            if parameter.is_floating_point() and kind.is_floating_point:
                dtype = parameter.dtype  # what the optimizer's load_state_dict will make of it
        elif target is None and found.is_tensor and isinstance(parameter, DTensor) and found.meta.size:  # type: ignore[union-attr]
            raise CheckpointError(
                f"{key!r} is not of its parameter's shape, so how it is sharded is not known before the optimizer has "
                "stepped: make a step before loading.",
                key=key,
                kind="unsupported",
            )
        wish = findings.want(key, found, target, dtype=dtype)
        if wish is not None:
            self._state.setdefault(name, []).append((path, wish))
        else:
            self._kept.add(name)


def _owner(rest: str, parameters: Mapping[str, Any]) -> str | None:
    """The parameter whose name begins ``<name>.<what>``."""
    end = rest.rfind(".")
    while end > 0:
        if rest[:end] in parameters:
            return rest[:end]
        end = rest.rfind(".", 0, end)
    return None


def _group_for(at: int, names: list[list[str]], saved: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of the saved groups the one that had the parameters of group ``at``; of empty ones that of the same turn."""
    if names[at]:
        found = [group for group in saved if set(names[at]) & set(group.get(_PARAMS) or ())]
    else:
        turn = [number for number, group in enumerate(names) if not group].index(at)
        empty = [group for group in saved if not group.get(_PARAMS)]
        found = empty[turn : turn + 1]
    if len(found) > 1:
        raise IncompatibleCheckpointError(
            f"The parameters of {key}.param_groups.{at} were in {len(found)} groups when they were saved.", key=key
        )
    return found[0] if found else {}
