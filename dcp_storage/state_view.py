"""A checkpoint as the template sees it: under the template's names, and apart what every rank keeps for itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_storage.errors import CheckpointError, CorruptCheckpointError
from dcp_storage.per_rank import PREFIX, WORLD_KEY, split_own
from dcp_storage.records import ItemRecord
from dcp_storage.state_findings import Stored
from dcp_storage.state_keys import KeyChoice
from dcp_storage.state_ranks import Ranks
from dcp_storage.state_tree import Numeral, Path, key_of

__all__ = ["View", "as_kept", "view_of"]

_MOST_RANKS = 1 << 20  # a list of all ranks' values has a place for each of them

_NUMERALS = "__int_keys__."
"""Put before a key in the planner's data: which parts of its path are keys of dicts that are ints. torch's own paths
have them as text, and nobody who reads those looks at this."""


def as_kept(key: str, path: Path) -> dict[str, Path]:
    """What the planner's data says of a key: its path as torch keeps it, and which parts of it are ints."""
    kept: dict[str, Path] = {key: tuple(part if type(part) is int else str(part) for part in path)}
    numerals = tuple(at for at, part in enumerate(path) if type(part) is Numeral)
    if numerals:
        kept[f"{_NUMERALS}{key}"] = numerals
    return kept


def _kept_path(paths: Mapping[str, object], key: str) -> Path:
    """The path that :func:`as_kept` wrote down, or stock torch; the key itself where there is none."""
    path, numerals = paths.get(key), paths.get(f"{_NUMERALS}{key}", ())
    if not isinstance(path, tuple):
        return (key,)
    marked = {at for at in numerals if isinstance(at, int)} if isinstance(numerals, tuple) else set()
    return tuple(Numeral(part) if at in marked and _is_number(part) else part for at, part in enumerate(path))


def _is_number(part: object) -> bool:
    digits = part.removeprefix("-") if isinstance(part, str) else ""
    return digits.isascii() and digits.isdigit()


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
    _items: Mapping[MetadataIndex, object] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    _dropped: set[str] = field(default_factory=set)

    def leaves_out(self, key: str) -> bool:
        """Whether the caller does not want a key of the template."""
        return self.choice.leaves_out(key, lambda asked: asked in self._dropped and asked not in self._kept)

    def differ(self, one: Stored, other: Stored) -> bool:
        """Whether two tensors on the store are known, by their checksums, to be of different numbers."""
        mine, theirs = self._sums(one.source), self._sums(other.source)
        pairs = [(mine[place], theirs[place]) for place in mine.keys() & theirs.keys()]
        return any(a.stride == b.stride and a.payload_crc32 != b.payload_crc32 for a, b in pairs)

    def _sums(self, source: str) -> dict[torch.Size | None, ItemRecord]:
        records = [(index, item) for index, item in self._items.items() if index.fqn == source]
        return {
            index.offset: item
            for index, item in records
            if isinstance(item, ItemRecord) and item.dtype is not None and item.payload_crc32 is not None
        }

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
    view = View(choice, _items=metadata.storage_data or {})
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for source, meta in metadata.state_dict_metadata.items():
        told = split_own(source)
        if told is None and source == WORLD_KEY and isinstance(meta, TensorStorageMetadata):
            view.saved_by = math.prod(meta.size)  # of its one dimension
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
        place[name] = Stored(source, _path(name, key, _kept_path(paths, source)), meta)
    view.saved_by = max(view.saved_by, max(view.own, default=-1) + 1)
    if view.saved_by > _MOST_RANKS:
        raise CorruptCheckpointError(
            f"The checkpoint says that {view.saved_by} ranks saved it; no more than {_MOST_RANKS} can have.",
            key=WORLD_KEY,
            wanted=_MOST_RANKS,
            found=view.saved_by,
        )
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
