"""A checkpoint as the template sees it: under the template's names, and apart what every rank keeps for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_storage.errors import CheckpointError
from dcp_storage.per_rank import PREFIX, WORLD_KEY, split_own
from dcp_storage.state_findings import Stored
from dcp_storage.state_keys import KeyChoice
from dcp_storage.state_ranks import Ranks
from dcp_storage.state_tree import Path, key_of

__all__ = ["View", "view_of"]


@dataclass
class View:
    """What is on the store, as one rank sees it.

    Attributes:
        choice: which keys are wanted.
        shared: what is one for all ranks, by the template's names.
        own: what each saving rank kept for itself, by rank and name.
        saved_by: how many ranks saved; 0 where nothing was kept for every rank.
        same: whether as many ranks load, so that each gets its own.
        mine: what this rank is to see: the shared, and of a checkpoint of as many ranks its own.
    """

    choice: KeyChoice
    shared: dict[str, Stored] = field(default_factory=dict)
    own: dict[int, dict[str, Stored]] = field(default_factory=dict)
    saved_by: int = 0
    same: bool = False
    mine: dict[str, Stored] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    _dropped: set[str] = field(default_factory=set)

    def leaves_out(self, key: str) -> bool:
        """Whether the caller does not want a key of the template."""
        return self.choice.leaves_out(key, lambda asked: asked in self._dropped and asked not in self._kept)

    def names(self, entries: Iterable[str]) -> Iterator[str]:
        """The names that this rank sees inside entries of a template."""
        chosen = set(entries)
        dotted = tuple(f"{name}." for name in chosen if "." in name)
        for key in self.mine:
            if key in chosen or key.partition(".")[0] in chosen or key.startswith(dotted):
                yield key


def view_of(metadata: Metadata, choice: KeyChoice, ranks: Ranks) -> View:
    """The view of a checkpoint.

    Args:
        metadata: of the checkpoint.
        choice: which keys, and their names.
        ranks: who loads.

    Raises:
        CheckpointError: of kind ``"keys"``: two keys of the checkpoint would get one name.
    """
    view = View(choice)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for source, meta in metadata.state_dict_metadata.items():
        told = split_own(source)
        if told is None and source == WORLD_KEY and isinstance(meta, TensorStorageMetadata):
            view.saved_by = meta.size[0]
            continue
        rank, key = (None, source) if told is None else told
        name = choice.name_of(key)
        if choice.by_function:
            _add_with_all_above(key, view._dropped if name is None else view._kept)
        if name is None:
            continue
        place = view.shared if rank is None else view.own.setdefault(rank, {})
        if name in place:
            raise CheckpointError(
                f"keys= gives the name {name!r} to {place[name].source!r} and to {source!r}.", key=name, kind="keys"
            )
        path = paths.get(source)
        place[name] = Stored(source, _path(name, key, path if isinstance(path, tuple) else (source,)), meta)
    view.saved_by = max(view.saved_by, max(view.own, default=-1) + 1)
    view.same = view.saved_by == ranks.world
    view.mine = {**view.shared, **view.own.get(ranks.rank, {})} if view.same else view.shared
    return view


def _add_with_all_above(key: str, keys: set[str]) -> None:
    while key not in keys:
        keys.add(key)
        key = key.rpartition(".")[0]


def _path(name: str, key: str, path: Path) -> Path:
    """The path of a value under its name in the template, from that on the store."""
    if path[:1] == (PREFIX,):
        path = path[2:]
    if name == key:
        return path
    for at in range(len(path)):
        rest = key_of(path[at:])
        if name == rest:
            return path[at:]
        if name.endswith(f".{rest}"):
            return (*name[: -len(rest) - 1].split("."), *path[at:])
    return tuple(name.split("."))
