"""What a load finds when it holds a template against a checkpoint: what it will fill, and all that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_storage.codec import QUANTIZED
from dcp_storage.per_rank import PerRank
from dcp_storage.state_tree import Path, key_of

__all__ = ["UNNAMED", "Findings", "Own", "Part", "Stored", "Wish", "below", "full_key", "inner_name", "inner_path"]

UNNAMED = "\0"
"""The inner name of what a dict has under the empty text; ``""`` is the name of the dict itself."""


@dataclass(frozen=True)
class Own:
    """That something is inside a PerRank.

    Attributes:
        holder: the PerRank.
        key: its name on the store.
    """

    holder: PerRank
    key: str


@dataclass(frozen=True)
class Stored:
    """Something on the store.

    Attributes:
        source: its key there.
        path: where it was in the state, under the names of the template.
        meta: a tensor's dtype and size, or that it is an object.
    """

    source: str
    path: Path
    meta: TensorStorageMetadata | BytesStorageMetadata

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, not a Python object."""
        return isinstance(self.meta, TensorStorageMetadata)

    def new_target(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Memory for the whole of it; None for an object."""
        if not isinstance(self.meta, TensorStorageMetadata):
            return None
        dtype = self.meta.properties.dtype
        # Scales and zero points are in the item: without a target that has them, its values are loaded.
        return torch.empty(self.meta.size, dtype=torch.float32 if dtype in QUANTIZED else dtype, device=device)


@dataclass
class Wish:
    """Something that is going to be filled.

    Attributes:
        key: its name in the template.
        source: its key on the store.
        value: the tensor that is filled; for an object, what was loaded, afterwards.
    """

    key: str
    source: str
    value: Any = None


class Part(Protocol):
    """One thing that the user handed over: a module, an optimizer, a Stateful, a tree of plain values, generators."""

    key: str
    own: Own | None

    def leaves(self) -> list[tuple[Path, Any]]:
        """What is saved: paths as torch keeps them, below the part's own, with values."""

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """Holds the template against what is stored under the part's key; changes nothing."""

    def apply(self) -> list[str]:
        """Puts into effect what was loaded; returns sentences for the report."""


@dataclass
class Findings:
    """What holding the whole template against a checkpoint gave, on this rank.

    Attributes:
        excluded: whether the caller left a key of the template out.
        differ: whether two tensors on the store are known to be of different numbers.
        renamed: the template's name of a key of the checkpoint, None for one that is left out.
        wishes: what will be filled.
        missing: keys of the template that the checkpoint lacks.
        shapes: key → shape of the template, shape on the store.
        dtypes: key → dtype of the template, dtype on the store; filled with a cast where that is allowed.
        untouched: keys of the template that keep what they have.
        used: keys of the checkpoint, under the template's names, that somebody took.
    """

    excluded: Callable[[str], bool] = lambda _: False
    differ: Callable[[Stored, Stored], bool] = lambda _, __: False
    renamed: Callable[[str], str | None] = lambda key: key
    wishes: list[Wish] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[str, str]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def lacks(self, key: str) -> None:
        """Notes that the checkpoint has nothing for a key of the template."""
        (self.untouched if self.excluded(key) else self.missing).append(key)

    def want(self, key: str, stored: Stored, target: Any = None, *, dtype: torch.dtype | None = None) -> Wish | None:
        """Notes that ``stored`` is to go to ``key``.

        Args:
            key: the template's name.
            stored: what is there.
            target: the tensor to fill; None makes a new one on the CPU, or loads an object.
            dtype: what the template has where that is not the target's.

        Returns:
            The wish; None where it does not fit.
        """
        self.used.add(key)
        if target is None:
            wish = Wish(key, stored.source, stored.new_target())
            self.wishes.append(wish)
            return wish
        if not isinstance(stored.meta, TensorStorageMetadata):
            self.shapes[key] = (str(tuple(target.size())), "a Python object")
            return None
        if _shares_memory(target):
            self.shapes[key] = (f"{tuple(target.size())}, its elements in shared memory", str(tuple(stored.meta.size)))
            return None
        if tuple(stored.meta.size) != tuple(target.size()):
            self.shapes[key] = (str(tuple(target.size())), str(tuple(stored.meta.size)))
            return None
        wanted, found = dtype or target.dtype, stored.meta.properties.dtype
        if wanted != found:
            self.dtypes[key] = (_name(wanted), _name(found))
        wish = Wish(key, stored.source, target)
        self.wishes.append(wish)
        return wish


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shares_memory(target: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one, as in what ``expand`` gives: it cannot be filled with values."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.layout is not torch.strided or not local.numel():
        return False
    return any(size > 1 and step == 0 for size, step in zip(local.shape, local.stride(), strict=True))


def inner_name(path: Path) -> str:
    """The name below a part of what is at a path in it, as :func:`below` has it."""
    return key_of(path) or (UNNAMED if path else "")


def full_key(key: str, name: str) -> str:
    """A part's key and a name below it, put together again."""
    if name == UNNAMED:
        return f"{key}."
    return f"{key}.{name}" if name else key


def below(view: Mapping[str, Stored], key: str) -> dict[str, Stored]:
    """What is under a key: names below it (``""`` for the key itself) → what is there."""
    found = {name[len(key) + 1 :] or UNNAMED: stored for name, stored in view.items() if name.startswith(f"{key}.")}
    if key in view:
        found[""] = view[key]
    return found


def inner_path(name: str, stored: Stored) -> Path:
    """The path of a name that :func:`below` gave; where the checkpoint does not tell it, the name itself."""
    if not name:
        return ()
    for at in range(len(stored.path) - 1, -1, -1):
        if inner_name(stored.path[at:]) == name:
            return stored.path[at:]
    return (name,)
