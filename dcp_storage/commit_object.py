"""The one object that commits: made if-absent, and read back whatever the store replies (invariants I1 and I6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone

import torch

from dcp_storage import names
from dcp_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from dcp_storage.records import FORMAT, MAX_COMMIT, Commit, ManifestRef, decode_commit, encode_commit
from dcp_storage.store import Store
from dcp_storage.version import VERSION

__all__ = ["create_commit", "name_of", "new_commit", "read_back", "utc_now"]

_TRIES = 4  # creates of one commit number whose fate is not known, each read back, before giving up


def utc_now() -> str:
    """The time by this machine's clock, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def new_commit(
    number: int,
    author: str,
    *,
    manifest: ManifestRef | None,
    world_size: int = 0,
    single_writer: bool = False,
    restates: int | None = None,
    rank: int | None = None,
    label: str | None = None,
) -> Commit:
    """A commit (with a manifest) or a void (without), made now by this version."""
    return Commit(
        format=FORMAT,
        state="void" if manifest is None else "committed",
        number=number,
        author=author,
        time=utc_now(),
        world_size=world_size,
        torch=str(torch.__version__),
        package=VERSION,
        single_writer=single_writer,
        manifest=manifest,
        restates=restates,
        rank=rank,
        label=label,
    )


def name_of(commit: Commit) -> str:
    """The name of the object that a commit is written to."""
    return names.commit_name(commit.number) if commit.rank is None else names.rank_commit_name(commit.rank)


def read_back(store: Store, commit: Commit) -> str:
    """Whose the commit object of this number is: ``"ours"``, ``"another's"`` or ``"nobody's"`` (invariant I6)."""
    name = name_of(commit)
    try:
        found = decode_commit(store.read(name, limit=MAX_COMMIT), path=store.url, file=name)
    except ObjectNotFoundError:
        return "nobody's"
    except StoreError:
        raise
    except CheckpointError:
        return "another's"  # torn, or of a later format: not by us, and the number is taken
    return "ours" if found.author == commit.author else "another's"


def create_commit(store: Store, commit: Commit, look: Callable[[Store, Commit], str] = read_back) -> None:
    """Creates the commit object if its number is free, and finds out what became of it whatever the store replies.

    Raises:
        CheckpointExistsError: the number is another's.
        CheckpointError: of kind ``"commit-number"``: there is no such number.
        CommitUnknownError: no reply, and looking did not tell either; or the object is not there but may still come.
        StoreError: the store refused in a way that leaves no doubt (no right, no space).
    """
    name = name_of(commit)
    if commit.rank is None and names.commit_number(name) != commit.number:
        raise CheckpointError(
            f"{store.url}: commit {commit.number} would have a name that no reader takes for a commit. There is a "
            "commit object of an absurd number here: move what is good to another folder.",
            path=store.url,
            key=name,
            kind="commit-number",
        )
    body = encode_commit(commit)
    doubt: StoreError | None = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.2 * 3 ** (attempt - 1))  # some stores take one write a second to a name
        try:
            store.create(name, body)
        except ObjectExistsError:
            pass
        except StoreError as error:
            if not error.ambiguous:
                if error.transient and attempt + 1 < _TRIES:
                    continue
                if doubt is None:
                    raise
            doubt = error
        else:
            return
        try:
            whose = look(store, commit)
        except StoreError as error:
            raise _unknown(store, name, error) from error
        if whose == "ours":
            if doubt is not None:
                _confirm(store, name, body)
            return
        if whose == "another's":
            raise CheckpointExistsError(
                f"{store.url}: another attempt made {name} first; this one has lost and changes nothing.",
                path=store.url,
                key=name,
            )
    raise _unknown(store, name, doubt)


def _confirm(store: Store, name: str, body: bytes) -> None:
    """Ours is there, but the store did not say that it lasts: a create that finds it there has made sure of that.

    Raises:
        CommitUnknownError: on a disk, where what can be seen may still be lost; elsewhere what can be seen is durable.
    """
    try:
        store.create(name, body)
    except ObjectExistsError:
        return
    except StoreError as error:
        if not store.remote:
            raise _unknown(store, name, error) from error


def _unknown(store: Store, name: str, error: StoreError | None) -> CommitUnknownError:
    return CommitUnknownError(
        f"{store.url}: the store did not say whether {name} was made, and it could not be found out. Nothing was "
        "deleted. Look again later: the checkpoint is committed if that object is there.",
        path=store.url,
        key=name,
        cause=error,
    )
