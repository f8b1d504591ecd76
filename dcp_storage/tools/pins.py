"""Pins: what keeps a checkpoint from being deleted, by whomever, until it is unpinned.

A pin is a small object ``.pin`` in the checkpoint's folder. It is not among the names that delete and prune may touch,
stock torch does not look at it, and every delete sees it in the listing by which it decides.
"""

from __future__ import annotations

import json

from dcp_storage import names
from dcp_storage.commit_object import create_commit, new_commit, utc_now
from dcp_storage.current import list_commits, nothing_committed, read_current
from dcp_storage.errors import CheckpointExistsError, CheckpointReplacedError
from dcp_storage.store import Atomicity, Store

__all__ = ["pin_folder", "unpin_folder"]

_TRIES = 5  # restatements of a commit whose number was another's


def pin_folder(store: Store, why: str = "") -> None:
    """Pins the committed checkpoint in ``store``; when it returns, no delete that began before can take it any more.

    The pin is put first, and then the commit is restated under the next number: a delete or an overwrite that listed
    the folder before there was a pin aims at that number and loses. A store that cannot refuse a second create gets
    the pin alone.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointReplacedError: it was deleted, or others were always first, while it was being pinned; it is not
            pinned.
        CommitUnknownError: it cannot be known whether the commit was restated. The pin is there.
        StoreError: the store failed.
    """
    body = json.dumps({"pinned": utc_now(), "why": why}).encode()
    placed = before = False
    for _ in range(_TRIES):
        entries = store.entries()
        before = before or (not placed and any(e.name == names.PIN for e in entries))
        numbers = list_commits(entries)
        current = read_current(store, numbers)
        if current is None or current.commit.manifest is None:
            if not placed:
                raise nothing_committed(store, current)
            break
        if not placed:
            store.put(names.PIN, [memoryview(body)])
            placed = True
        if store.create_if_absent is not Atomicity.ATOMIC:
            return
        commit = new_commit(
            numbers[0] + 1,
            names.new_token(),
            manifest=current.commit.manifest,
            world_size=current.commit.world_size,
            single_writer=current.commit.single_writer,
            restates=current.number,
        )
        try:
            create_commit(store, commit)
        except CheckpointExistsError:
            continue  # a save, a delete or a prune was first: see what it left
        return
    if not before:
        store.delete([names.PIN])
    raise CheckpointReplacedError(
        f"{store.url}: the checkpoint was deleted or replaced while it was being pinned; it is not pinned.",
        path=store.url,
    )


def unpin_folder(store: Store) -> None:
    """Takes the pin away; nothing to do where there is none."""
    store.delete([names.PIN])
