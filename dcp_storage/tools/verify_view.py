"""Whether ``.metadata``, the view for stock readers, says the same as the commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata

from dcp_storage import names
from dcp_storage.errors import CheckpointError, ObjectNotFoundError, StoreError
from dcp_storage.pickles import load_metadata
from dcp_storage.records import Manifest
from dcp_storage.store import Entry, Store
from dcp_storage.torchview import manifest_from_stock, metadata_of, stock_pickle, stock_storage_data
from dcp_storage.view import settle_view

__all__ = ["check_view"]

_SLACK = 4  # a view that another version of torch pickled may be longer, but not as much as this


class _Report(Protocol):
    path: str
    repaired: bool

    def warn(self, sentence: str) -> None:
        """Adds a sentence."""


def check_view(report: _Report, store: Store, manifest: Manifest, entries: Sequence[Entry], *, repair: bool) -> None:
    """Warns of a view that is missing or says something else, or rewrites it.

    Raises:
        StoreError: the store failed.
        CheckpointError: of kind ``view``: the highest commit kept changing while it was being rewritten.
    """
    fault = _fault(store, manifest, {e.name: e.size for e in entries})
    if fault is None:
        return
    if not repair:
        report.warn(
            f"{report.path}: {names.STOCK_VIEW} {fault}, so stock torch cannot read this checkpoint; dcp_storage can. "
            "verify with repair=True (--repair) rewrites it."
        )
        return
    settle_view(store, None)
    report.repaired = True
    report.warn(f"{report.path}: {names.STOCK_VIEW} {fault}; it was rewritten from the commit.")


def _fault(store: Store, manifest: Manifest, sizes: dict[str, int]) -> str | None:
    if names.STOCK_VIEW not in sizes:
        return "is missing"
    wanted, _ = stock_pickle(manifest)
    if sizes[names.STOCK_VIEW] > _SLACK * len(wanted):
        return "is stale"
    try:
        data = store.read(names.STOCK_VIEW, limit=_SLACK * len(wanted))
    except ObjectNotFoundError:
        return "is missing"
    if data == wanted:
        return None
    try:
        return None if _same(load_metadata(data, path=store.url), manifest) else "is stale"
    except StoreError:
        raise
    except CheckpointError:
        return "cannot be read"


def _same(view: Metadata, manifest: Manifest) -> bool:
    """Whether a view that another version of torch pickled says the same as the manifest."""
    wanted = metadata_of(manifest)
    if view.storage_data != stock_storage_data(manifest) or view.state_dict_metadata != wanted.state_dict_metadata:
        return False
    said = manifest_from_stock(view, {record.name: record.size for record in manifest.files})
    planned = manifest.planner_data
    opaque = planned is not None and planned.opaque is not None  # then it is not in every view
    same_plan = opaque or said.planner_data == planned
    return same_plan and (said.version, said.storage_meta) == (manifest.version, manifest.storage_meta)
