"""Keeping ``.metadata``, the view for stock readers, in agreement with the highest commit."""

from __future__ import annotations

import zlib

from dcp_storage import names
from dcp_storage.current import Current, read_current, read_standing
from dcp_storage.errors import CheckpointError, CheckpointReplacedError
from dcp_storage.records import ManifestRef
from dcp_storage.store import Store
from dcp_storage.torchview import stock_pickle

__all__ = ["settle_view"]

_LOOKS = 8  # looks at the highest commit before giving up


def settle_view(store: Store, says: ManifestRef | None, known: Current | None = None) -> None:
    """Makes ``.metadata`` agree with the highest commit, looking again until it does.

    Args:
        store: the folder.
        says: the manifest that ``.metadata`` was just made to say; None where it was just removed.
        known: as for :func:`~dcp_storage.current.read_current`.

    Raises:
        CheckpointError: it could not be made to agree.
    """
    for _ in range(_LOOKS):
        current = read_current(store, known=known)
        wanted = current.commit.manifest if current is not None else None
        if wanted == says:
            return
        if current is None or wanted is None:
            store.delete([names.STOCK_VIEW])
        else:
            try:
                data, _ = stock_pickle(read_standing(store, current))
            except CheckpointReplacedError:
                continue
            store.put(names.STOCK_VIEW, [memoryview(data)], crc32=zlib.crc32(data))
        says = wanted
    raise CheckpointError(
        f"{store.url}: the highest commit kept changing while .metadata was made to agree with it.",
        path=store.url,
        key=names.STOCK_VIEW,
        kind="view",
    )
