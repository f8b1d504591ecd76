"""Modules: their state under names that do not depend on how they are wrapped or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcp_storage.errors import CheckpointError
from dcp_storage.state_findings import Findings, Own, Stored, Wish
from dcp_storage.state_tree import Path

__all__ = ["ModulePart"]

_COMPILED = "_orig_mod"  # what torch.compile puts into names


def _renames(module: nn.Module) -> bool:
    """Whether something in a module puts a part of its own into the names of what it wraps, or takes one away."""
    return any(
        isinstance(inner, DistributedDataParallel) or hasattr(inner, "_fqn_modifiers") for inner in module.modules()
    )


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
        self._renames = _renames(module)
        self._raw: dict[str, Any] = {}
        self._names: dict[int, str] | None = None
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
            yield self._plain(raw), raw, value

    def _plain(self, raw: str) -> str:
        # torch follows the name from module to module, which takes as long as copying a small tensor.
        marked = _CHECKPOINT_PREFIX in raw or _COMPILED in raw
        return _plain_name(self.module, raw) if self._renames or marked else raw

    def parameter_names(self) -> dict[int, str]:
        """Names of the parameters, of tied ones the first, by identity; put together once.

        To be called after :meth:`named`: asking for its state is what has an FSDP2 module go back to its sharded
        parameters, which are those that an optimizer has.
        """
        if self._names is None:
            self._names = {}
            for raw, parameter in self.module.named_parameters(remove_duplicate=False):
                self._names.setdefault(id(parameter), self._plain(raw))
        return self._names

    def tied(self) -> list[list[str]]:
        """Names, first and others, under which the same parameter or buffer is found."""
        names: dict[int, list[str]] = {}
        for name, _, value in self.named():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), []).append(name)
        return [found for found in names.values() if len(found) > 1]

    def leaves(self) -> list[tuple[Path, Any]]:
        """See :class:`~dcp_storage.state_findings.Part`. Parameters are themselves here, and not detached yet."""
        return [((name,), value) for name, _, value in self.named()]

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """See :class:`~dcp_storage.state_findings.Part`. Of tied names one is enough.

        Where they are known to have been different tensors, there is no place for the others: they are unexpected.
        """
        self._wishes = []
        seen: dict[int, bool] = {}
        entries = list(self.named())
        for name, _, value in entries:
            seen[id(value)] = seen.get(id(value), False) or name in stored
        filled: dict[int, str] = {}
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
                if name not in stored or not findings.differ(stored[filled[id(value)]], stored[name]):
                    findings.used.add(key)
            elif name in stored:
                wish = findings.want(key, stored[name], value.detach() if is_tensor else None)
                if wish is not None:
                    self._wishes.append((raw, wish))
                if is_tensor:
                    filled[id(value)] = name
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
