"""Everything that is no module and no optimizer: Stateful objects, trees of plain values, random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dcp_storage.errors import portable
from dcp_storage.per_rank import RngState
from dcp_storage.state_findings import UNNAMED, Findings, Own, Stored, Wish, full_key, inner_name, inner_path
from dcp_storage.state_tree import Numeral, Path, flatten, key_of, kinds_of, rebuild, set_at

__all__ = ["RngPart", "StatefulPart", "TreePart"]

Leaves = list[tuple[Path, Path, Any]]


class TreePart:
    """Plain values: an entry of the state with all that is nested in it, live objects left out.

    Args:
        key: its name on the store.
        root: the value.
        put: replaces the value as a whole.
        is_live: whether something in it is a live object, and so another part's.
        own: of the PerRank around it, if any.
    """

    def __init__(
        self,
        key: str,
        root: Any,
        put: Callable[[Any], None],
        is_live: Callable[[Any], bool],
        own: Own | None = None,
    ) -> None:
        self.key = key
        self.own = own
        self.root = root
        self.put = put
        self._is_live = is_live
        self._wishes: list[tuple[Path, Path, Wish]] = []

    def template(self) -> Leaves:
        """Paths, paths as torch keeps them, and values of all leaves."""
        return [leaf for leaf in flatten(self.root, self._is_live) if not self._is_live(leaf[2])]

    def leaves(self) -> list[tuple[Path, Any]]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        return [(text, value) for _, text, value in self.template()]

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """See :class:`~dcp_storage.state_findings.Part`.

        A value that is no tensor stands for whatever was saved in its place, also for several values below it; a dict
        or list stands for a single value that was saved in its place.
        """
        self._wishes = []
        replaced: set[Path] = set()
        for path, text, value in self.template():
            name = inner_name(text)
            is_tensor = isinstance(value, torch.Tensor)
            if name in stored:
                target = value if is_tensor and stored[name].is_tensor else None
                self._want(path, (), full_key(self.key, name), stored[name], findings, target)
                continue
            prefix = f"{key_of(text)}." if text else ""
            inner = [] if is_tensor else [n for n in stored if n.startswith(prefix)]
            for found in inner:
                rest = found[len(prefix) :] or (UNNAMED if text else "")
                self._want(path, inner_path(rest, stored[found]), full_key(self.key, found), stored[found], findings)
            if inner:
                continue
            above = next((cut for cut in range(len(text) - 1, -1, -1) if inner_name(text[:cut]) in stored), None)
            if above is None:
                findings.lacks(full_key(self.key, name))
            elif path[:above] not in replaced:
                replaced.add(path[:above])
                found = inner_name(text[:above])
                self._want(path[:above], (), full_key(self.key, found), stored[found], findings)

    def _want(self, at: Path, rest: Path, key: str, stored: Stored, findings: Findings, target: Any = None) -> None:
        wish = findings.want(key, stored, target)
        if wish is not None:
            self._wishes.append((at, rest, wish))

    def apply(self) -> list[str]:
        """See :class:`~dcp_storage.state_findings.Part`. Containers stay, what is in them is replaced."""
        by_place: dict[Path, list[tuple[Path, Any]]] = {}
        for at, rest, wish in self._wishes:
            by_place.setdefault(at, []).append((rest, wish.value))
        for at, items in by_place.items():
            value = rebuild(items)
            if at:
                set_at(self.root, at, value)
            else:
                self.put(value)
        return []


class StatefulPart:
    """An object with ``state_dict`` and ``load_state_dict``: a scheduler, a GradScaler, a loader, one of the user's.

    It gets what it saved. Tensors that its present state has are filled in place, and are held to the same strictness
    as a module's, unless it has none yet; its Python values may be others than those it has now.

    Args:
        key: its name on the store.
        value: the object.
        own: of the PerRank around it, if any.
    """

    def __init__(self, key: str, value: Any, own: Own | None = None) -> None:
        self.key = key
        self.own = own
        self.value = value
        self._result: list[tuple[Path, Wish | None, Any]] = []
        self._kinds: dict[Path, Mapping[Any, Any]] = {}

    def leaves(self) -> list[tuple[Path, Any]]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        return [(text, value) for _, text, value in flatten(self.value.state_dict())]

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """See :class:`~dcp_storage.state_findings.Part`."""
        self._result = []
        present = self.value.state_dict()
        template = list(flatten(present))
        self._kinds = dict(kinds_of(present))
        here = {inner_name(text): (path, text, value) for path, text, value in template}
        tensors = {name for name, (_, _, value) in here.items() if isinstance(value, torch.Tensor)}
        real = _real_keys(template)
        for name, found in stored.items():
            if found.is_tensor and tensors and name not in tensors and not _stands_for(here, tensors, name):
                continue  # nobody takes it: unexpected
            text = inner_path(name, found)
            path = tuple(real.get(text[: at + 1], part) for at, part in enumerate(text))
            target = here[name][2] if name in tensors and found.is_tensor else None
            wish = findings.want(full_key(self.key, name), found, target)
            self._result.append((path, wish, target))
        for name, (_, text, value) in here.items():
            path = tuple(real[text[: at + 1]] for at in range(len(text)))
            key = full_key(self.key, name)
            if name in stored or not (name in tensors or not stored or findings.excluded(key)):
                continue
            findings.lacks(key)
            self._result.append((path, None, value))

    def apply(self) -> list[str]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        if not any(wish for _, wish, _ in self._result):
            return []
        state = rebuild(
            ((path, kept if wish is None else wish.value) for path, wish, kept in self._result), self._kinds
        )
        try:
            self.value.load_state_dict(state)
        except Exception as error:
            raise portable(error, "load_state_dict", key=self.key) from error
        return []


def _real_keys(template: Iterable[tuple[Path, Path, Any]]) -> dict[Path, Any]:
    """Path as torch keeps it → the last part as it really is: dict keys need not be text. An int stays a Numeral, so
    that it is not taken for a place in a list.
    """
    return {
        text[: at + 1]: text[at] if type(text[at]) is Numeral else path[at]
        for path, text, _ in template
        for at in range(len(path))
    }


def _stands_for(here: Mapping[str, Any], tensors: set[str], name: str) -> bool:
    """Whether a leaf of the template that is no tensor is above the name: whatever was saved there is welcome."""
    end = name.rfind(".")
    while end > 0:
        if name[:end] in here:
            return name[:end] not in tensors
        end = name.rfind(".", 0, end)
    return "" in here


class RngPart:
    """The random generators of this process.

    Args:
        key: its name on the store.
        value: what was handed over.
        own: of the PerRank around it, if any; it makes no difference.

    Attributes:
        anew: rank and number of ranks, where the generators are to be seeded anew.
    """

    def __init__(self, key: str, value: RngState, own: Own | None = None) -> None:
        self.key = key
        self.own = own
        self.value = value
        self.anew: tuple[int, int] | None = None
        self._wishes: list[tuple[Path, Wish]] = []

    def leaves(self) -> list[tuple[Path, Any]]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        return [(text, value) for _, text, value in flatten(self.value.capture())]

    def match(self, stored: Mapping[str, Stored], findings: Findings) -> None:
        """See :class:`~dcp_storage.state_findings.Part`."""
        self._wishes = []
        for name in ("torch", "python"):
            if name not in stored:
                findings.lacks(f"{self.key}.{name}")
        for name, found in stored.items():
            wish = findings.want(full_key(self.key, name), found)
            if wish is not None:
                self._wishes.append((inner_path(name, found), wish))

    def apply(self) -> list[str]:
        """See :class:`~dcp_storage.state_findings.Part`."""
        state = rebuild((path, wish.value) for path, wish in self._wishes)
        if not state or "torch" not in state or "python" not in state:
            return []
        if self.anew is not None:
            self.value.reseed(state, *self.anew)
            return []
        return [f"{self.key}: {note}" for note in self.value.restore(state)]
