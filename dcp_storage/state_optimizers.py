"""Optimizers: their state under the names that their parameters have in the modules of the same state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_storage.errors import CheckpointError, IncompatibleCheckpointError
from dcp_storage.per_rank import split_own
from dcp_storage.state_findings import Findings, Own, Stored, Wish, inner_path
from dcp_storage.state_flat_groups import FlatGroups
from dcp_storage.state_models import ModulePart
from dcp_storage.state_tree import Path, flatten, rebuild

__all__ = ["OptimizerPart", "parameter_names"]

_PARAMS = "params"


def parameter_names(modules: Sequence[ModulePart], optimizer: Optimizer) -> list[list[str]]:
    """What the parameters of an optimizer are called, by group.

    They have the names that their module gives them. Where no single module has them all, the module's key comes
    before the name; a parameter of no module is called by its number, as in the optimizer's own state dict.
    """
    tables = [(part.key, part.parameter_names()) for part in modules]
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
        self._flat = FlatGroups()
        self._loose: list[tuple[Path, Wish]] = []
        self._kept: set[str] = set()
        self._unlike: set[str] = set()  # parameters whose saved state does not fit, in whole or in part
        self._bare: list[str] = []
        self._strays: list[tuple[str, Stored]] = []
        self._here: dict[str, str] = {}  # where on the store a parameter's state begins → the parameter
        self._findings = Findings()

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
        self._state, self._groups, self._loose, self._kept, self._bare, self._strays = {}, [], [], set(), [], []
        self._flat, self._here, self._findings, self._unlike = FlatGroups(), {}, findings, set()
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
                self._want_of_group(key, found, parameters, findings)
            elif key.startswith("state."):
                owner = _owner(key[len("state.") :], parameters)
                if owner is None:
                    self._strays.append((key, found))
                else:
                    rest = key[len(f"state.{owner}.") :]
                    self._here[_bare_key(found.source).removesuffix(f".{rest}" if rest else "")] = owner
                    self._want(f"{self.key}.{key}", rest, owner, parameters[owner], found, findings)
        for name in self._unlike:  # half a state is none: the next step would fail on what is not there
            left = [wish for _, wish in self._state.pop(name, [])]
            findings.wishes[:] = [wish for wish in findings.wishes if not any(wish is one for one in left)]
        if not self._groups and not self._flat.parameters:
            findings.lacks(f"{self.key}.param_groups")
        for name, parameter in parameters.items():
            if name in self._state or name in self._unlike or not parameter.requires_grad:
                continue
            if findings.excluded(f"{self.key}.state.{name}"):
                self._kept.add(name)
                findings.untouched.append(f"{self.key}.state.{name}")
            else:
                self._bare.append(name)
        self._kept |= {name for name in _loose_names(self.optimizer) if findings.excluded(f"{self.key}.state.{name}")}

    def questions(self) -> list[str]:
        """Keys on the store that have to be read before it is known what fits: which parameters the saved groups had.

        There are none where there is one group, every parameter's state is there and nothing else. Of several groups
        it has to be known that they are the same ones before any tensor changes.
        """
        saved = {path[0] for path, _ in self._groups if path}
        usual = not (self._bare or self._strays)
        usual = usual and len(saved) == len(self.optimizer.param_groups) == 1 and all(self.names)
        if self._flat.parameters:
            return self._flat.sources
        if usual or not self._groups:
            return []
        return [wish.source for path, wish in self._groups if path[1:] == (_PARAMS,)]

    def answered(self, values: Mapping[str, Any], findings: Findings) -> None:
        """Goes on from :meth:`match` with the values of :meth:`questions`.

        A parameter that the saved optimizer had, and had no state for, is left without one here as well. State that is
        of no parameter, under a name that the optimizer made up, is loaded as it was.
        """
        if self._flat.parameters:
            for at, names in enumerate(self.names):
                if not self._flat.are_one_group(names, values):
                    findings.shapes[f"{self.key}.param_groups.{at}"] = ("one group", "several groups")
        groups = {
            path[0]: self._as_here(values[wish.source], wish.source)
            for path, wish in self._groups
            if path[1:] == (_PARAMS,) and wish.source in values
        }
        known = self._flat.parameters.union(self._flat.elsewhere, *groups.values())
        if not known:
            return
        for name in self._bare:
            if name not in known:
                self._kept.add(name)
                findings.lacks(f"{self.key}.state.{name}")
        for key, found in self._strays:
            if _owner(key[len("state.") :], dict.fromkeys(known)) is None:
                self._want_loose(key, found, findings)
        for at, names in enumerate(self.names):
            if names and not known.intersection(names):
                findings.lacks(f"{self.key}.param_groups.{at}")
            mixed = {number for number, group in groups.items() for name in names if name in group}
            if len(mixed) > 1:
                findings.shapes[f"{self.key}.param_groups.{at}"] = ("one group", f"groups {sorted(mixed)}")

    def apply(self) -> list[str]:
        """See :class:`~dcp_storage.state_findings.Part`. Goes through the optimizer's own ``load_state_dict``."""
        if not (self._groups or self._flat.parameters or self._state or self._loose):
            return []
        whole = self.optimizer.state_dict()
        names = self.names
        state: dict[int, Any] = {}
        for number, name in enumerate(name for group in names for name in group):
            if name in self._state:
                state[number] = rebuild((path, wish.value) for path, wish in self._state[name])
            elif name in self._kept and number in whole["state"]:
                state[number] = whole["state"][number]
        loose = {name: whole["state"][name] for name in _loose_names(self.optimizer) if name in self._kept}
        loose.update(rebuild((path, wish.value) for path, wish in self._loose) or {})
        saved = rebuild((path, self._group_value(path, wish)) for path, wish in self._groups) or []
        groups = [
            {
                **group,
                **self._flat.of_group(names[at]),
                **_group_for(at, names, saved, self.key),
                _PARAMS: group[_PARAMS],
            }
            for at, group in enumerate(whole["param_groups"])
        ]
        wanted: dict[Any, Any] = {**state, **loose}
        self.optimizer.load_state_dict({"state": wanted, "param_groups": groups})
        if type(self.optimizer).load_state_dict is Optimizer.load_state_dict:
            self._mend_texts(wanted)
        return []

    def _mend_texts(self, wanted: Mapping[Any, Any]) -> None:
        """Puts texts back, of which torch's ``load_state_dict`` makes what it makes of all that can be iterated."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group[_PARAMS]]
        for name, state in wanted.items():
            at = parameters[name] if isinstance(name, int) else name
            self.optimizer.state[at] = _with_texts(self.optimizer.state[at], state)

    def _want_of_group(
        self, key: str, found: Stored, parameters: Mapping[str, torch.Tensor], findings: Findings
    ) -> None:
        path = inner_path(key, found)[1:]
        rest = key[len("param_groups.") :]
        owner = None if path else _owner(rest, parameters)
        if not path and (owner is None or owner == rest):
            self._flat.elsewhere.add(rest.rpartition(".")[0])
            return
        wish = findings.want(f"{self.key}.{key}", found)
        if wish is not None and owner is not None:
            self._flat.add(owner, rest[len(owner) + 1 :], wish)
        elif wish is not None:
            self._groups.append((path, wish))

    def _group_value(self, path: Path, wish: Wish) -> Any:
        return self._as_here(wish.value, wish.source) if path[1:] == (_PARAMS,) else wish.value

    def _as_here(self, names: Iterable[str], source: str) -> list[str]:
        """Names of parameters in a saved group as the caller of the load renamed them.

        Args:
            names: as they were saved.
            source: the key of the list on the store.
        """
        saved_as = _bare_key(source).rpartition(".param_groups.")[0]
        start = f"{self.key}.state."
        found = []
        for name in names:
            saved = f"{saved_as}.state.{name}"
            new = self._findings.renamed(saved) or ""
            found.append(self._here.get(saved) or (new.removeprefix(start) if new.startswith(start) else name))
        return found

    def _want_loose(self, key: str, found: Stored, findings: Findings) -> None:
        path = inner_path(key, found)[1:]
        if not path:
            return  # how it was nested is not known
        live: Any = self.optimizer.state
        for part in path:
            live = live.get(part) if isinstance(live, dict) else None
        wish = findings.want(f"{self.key}.{key}", found, live if isinstance(live, torch.Tensor) else None)
        if wish is not None:
            self._loose.append((path, wish))

    def _want(self, key: str, rest: str, name: str, parameter: torch.Tensor, found: Stored, findings: Findings) -> None:
        path = inner_path(rest, found)
        live = self.optimizer.state.get(parameter)
        for part in path:
            live = live.get(part) if isinstance(live, dict) else None
        dtype = None
        target: Any = live if isinstance(live, torch.Tensor) else None
        if target is None and found.is_tensor:
            # Without a live state a size of its own may be right (a factored moment), but not that of a saved parameter
            # that was found not to be this one's.
            saved = str(tuple(found.meta.size))  # type: ignore[union-attr]
            if saved in {findings.shapes[of][1] for of in self._keys_of(parameter) if of in findings.shapes}:
                findings.used.add(key)
                findings.shapes[key] = (str(tuple(parameter.shape)), saved)
                self._kept.add(name)
                self._unlike.add(name)
                return
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
            self._unlike.add(name)

    def _keys_of(self, parameter: torch.Tensor) -> list[str]:
        """The keys of a parameter in the modules that were handed over with the optimizer."""
        names = [(module.key, module.parameter_names().get(id(parameter))) for module in self._modules]
        return [f"{key}.{name}" for key, name in names if name is not None]


def _bare_key(source: str) -> str:
    """A key on the store without what marks it as one rank's own."""
    told = split_own(source)
    return source if told is None else told[1]


def _loose_names(optimizer: Optimizer) -> list[str]:
    """What an optimizer keeps state under that is no parameter."""
    keys: Iterable[Any] = optimizer.state
    return [name for name in keys if isinstance(name, str)]


def _with_texts(found: Any, wanted: Any) -> Any:
    """What was loaded, with the texts of what was saved."""
    if isinstance(wanted, str):
        return wanted
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in found.keys() & wanted.keys():
            found[key] = _with_texts(found[key], wanted[key])
    elif type(wanted) in (list, tuple) and type(found) is type(wanted) and len(found) == len(wanted):
        return type(wanted)(map(_with_texts, found, wanted))
    return found


def _owner(rest: str, parameters: Mapping[str, Any]) -> str | None:
    """The parameter whose name begins ``<name>.<what>``, or is all of it."""
    end = len(rest)
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
