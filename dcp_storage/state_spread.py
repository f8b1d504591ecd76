"""What every rank kept for itself, and is loaded on another number of ranks: lists, new seeds, or nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_storage.per_rank import PerRank, own_key
from dcp_storage.state_findings import Findings, Own, Part, Stored, Wish, below, inner_path
from dcp_storage.state_ranks import Ranks
from dcp_storage.state_tree import Path, flatten, rebuild
from dcp_storage.state_values import RngPart, TreePart
from dcp_storage.state_view import View
from dcp_storage.state_walk import Parts, is_live

__all__ = ["Spread", "hold"]

Items = list[tuple[Path, Wish]]


@dataclass
class Spread:
    """What is not filled part by part.

    Attributes:
        outcome: entry → what becomes of it; see :class:`~dcp_storage.options.LoadReport`.
        lists: who gets the values of all ranks that saved, with these, by rank.
        parts: ids of the parts that are done with here.
        notes: sentences for the report.
    """

    outcome: dict[str, str] = field(default_factory=dict)
    lists: list[tuple[PerRank | TreePart, list[Items]]] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def has(self, part: Part) -> bool:
        """Whether the part is not to be asked itself."""
        return id(part) in self.parts

    def apply(self) -> list[str]:
        """Hands the lists over; returns the sentences."""
        for taker, ranks in self.lists:
            values: list[Any] = [rebuild((path, wish.value) for path, wish in items) for items in ranks]
            if isinstance(taker, PerRank):
                taker.saved = values
            else:
                holder = PerRank()
                holder.saved = values
                taker.put(holder)
        return self.notes


def hold(parts: Parts, view: View, findings: Findings, ranks: Ranks) -> Spread:
    """Holds every part against the checkpoint.

    Args:
        parts: of the template.
        view: of the checkpoint.
        findings: take what every part finds.
        ranks: who loads.
    """
    spread = Spread()
    for part in parts:
        key = part.own.key if part.own is not None else part.key
        kept = {rank: below(own, key) for rank, own in view.own.items()}
        if not any(kept.values()):
            part.match(below(view.mine, part.key), findings)
        elif view.same:
            part.match(below(view.mine, part.key), findings)
            spread.outcome[key] = "own"
        else:
            _elsewhere(part, key, kept, view, findings, ranks, spread)
    return spread


def _elsewhere(
    part: Part,
    key: str,
    kept: dict[int, dict[str, Stored]],
    view: View,
    findings: Findings,
    ranks: Ranks,
    spread: Spread,
) -> None:
    shared = below(view.shared, key)
    if isinstance(part, RngPart) and part.own is None:
        part.anew = (ranks.rank, ranks.world)
        part.match({**shared, **kept.get(ranks.rank % view.saved_by, {})}, findings)
        spread.outcome[key] = "reseeded"
        spread.notes.append(
            f"{key}: {view.saved_by} ranks saved and {ranks.world} load, so the generators were seeded anew."
        )
        return
    spread.parts.add(id(part))
    if key in spread.outcome:
        return  # another part of the same PerRank
    taker: PerRank | TreePart | None = None
    if isinstance(part.own, Own):
        taker = part.own.holder
    elif isinstance(part, TreePart) and not any(_is_fixed(leaf) for _, _, leaf in flatten(part.root, is_live)):
        taker = part
    if taker is None:
        spread.outcome[key] = "untouched"
        findings.untouched.append(key)
        findings.used.update(f"{key}.{name}" if name else key for name in shared)
        spread.notes.append(
            f"{key}: {view.saved_by} ranks saved a state each and {ranks.world} load, so it was left as it was. Hand "
            "it over as PerRank(...) to get all of them."
        )
        return
    common = [(inner_path(name, stored), _wish(findings, key, name, stored, None)) for name, stored in shared.items()]
    lists = [
        common
        + [
            (inner_path(name, stored), _wish(findings, key, name, stored, rank))
            for name, stored in kept.get(rank, {}).items()
        ]
        for rank in range(view.saved_by)
    ]
    spread.lists.append((taker, [[(path, wish) for path, wish in items if wish is not None] for items in lists]))
    spread.outcome[key] = "list"
    spread.notes.append(f"{key}: {view.saved_by} ranks saved and {ranks.world} load; .saved has the values of all.")


def _is_fixed(leaf: Any) -> bool:
    """Whether a leaf cannot be put into a list of all ranks' values: a live object, or a tensor that is not plain."""
    return is_live(leaf) or (isinstance(leaf, torch.Tensor) and type(leaf) is not torch.Tensor)


def _wish(findings: Findings, key: str, name: str, stored: Stored, rank: int | None) -> Wish | None:
    full = f"{key}.{name}" if name else key
    return findings.want(full if rank is None else own_key(rank, full), stored)
