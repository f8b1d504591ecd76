"""Deleting a checkpoint, and pruning one folder, each behind a fence (DESIGN section 3; invariants I5 and I11).

A fence is a commit object created if-absent: it ends every attempt whose files were listed before it, since such an
attempt listed earlier still and aims at a number that is taken now. Only what was listed *before* the fence, and is
ours by name, is deleted after it. As with a save, the rows of steps are a record that the test kit may exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dcp_storage import names
from dcp_storage.commit_object import create_commit, new_commit
from dcp_storage.current import Current, list_commits, nothing_committed, read_current, read_standing
from dcp_storage.errors import CheckpointError, CheckpointExistsError, CheckpointReplacedError
from dcp_storage.store import Atomicity, Entry, Store
from dcp_storage.view import settle_view

__all__ = ["DELETE", "PRUNE", "Step", "Sweep", "delete_folder", "prune_folder"]


@dataclass
class Sweep:
    """One delete or prune of one folder.

    Attributes:
        store: the folder.
        grace: seconds that a file must have been left alone before prune takes it.
        assume_single_writer: the user's word for stores that cannot refuse a second create.
        apply: whether prune changes anything; else it only finds out what it would do.
        token: who we are, in the fence.
        listing: the one listing that everything is decided by.
        number: the highest commit number in it.
        current: the highest commit that stands.
        horizon: what was last touched before it (by the store's clock) is older than the grace.
        doomed: what is to be deleted, in order.
        uploads: names of open uploads to be aborted.
        old_commits: commit objects to be removed, ascending.
        fenced: the fence's number, once it is there.
        why: a sentence, where something was left alone.
    """

    store: Store
    grace: float = 0.0
    assume_single_writer: bool = False
    apply: bool = True
    token: str = field(default_factory=names.new_token)
    listing: list[Entry] = field(default_factory=list)
    number: int = 0
    current: Current | None = None
    horizon: float = 0.0
    doomed: list[Entry] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    old_commits: list[Entry] = field(default_factory=list)
    fenced: int | None = None
    why: str = ""

    @property
    def live(self) -> Current | None:
        """The highest commit, where it commits something."""
        return self.current if self.current is not None and self.current.commit.state == "committed" else None

    @property
    def frees(self) -> int:
        """Bytes in what is deleted."""
        return sum(e.size for e in [*self.doomed, *self.old_commits])

    def is_old(self, entry: Entry) -> bool:
        """Whether the grace is over for it; one whose age the store does not tell is only old where there is none."""
        return self.grace <= 0 if entry.modified is None else entry.modified <= self.horizon


Step = Callable[[Sweep], None]


def list_folder(sweep: Sweep) -> None:
    """The one listing, and the highest commit in it."""
    sweep.listing = sweep.store.entries()
    numbers = list_commits(sweep.listing)
    sweep.number = max(numbers, default=0)
    sweep.current = read_current(sweep.store, numbers)


def choose_all(sweep: Sweep) -> None:
    """For delete: all of ours but commit objects."""
    if sweep.live is None:
        raise nothing_committed(sweep.store, sweep.current)
    sweep.doomed = _in_order(e for e in sweep.listing if _is_file_of_ours(e))


def choose_old(sweep: Sweep) -> None:
    """For prune: what no live commit names and nobody has touched within the grace.

    A fence ends a save in flight, so where a loose file is younger than the grace nothing is fenced at all.
    """
    sweep.horizon = sweep.store.now() - sweep.grace
    listed = {e.name for e in sweep.listing}
    if sweep.number == 0 and names.STOCK_VIEW in listed:
        sweep.why = "a checkpoint that stock torch wrote is left alone"
        return
    if any(names.rank_commit(name) is not None for name in listed):
        sweep.why = "a checkpoint that was saved without collectives is left alone"
        return
    sweep.uploads = [e.name for e in sweep.store.open_uploads() if names.is_ours(e.name) and sweep.is_old(e)]
    kept: set[str] = set()
    if sweep.live is not None and sweep.live.commit.manifest is not None:
        manifest = read_standing(sweep.store, sweep.live)
        kept = {names.STOCK_VIEW, sweep.live.commit.manifest.name, *(f.name for f in manifest.files)}
    loose = [e for e in sweep.listing if _is_file_of_ours(e) and e.name not in kept]
    if not all(sweep.is_old(e) for e in loose):
        sweep.why = "files younger than the grace: a save may be in flight"
        return
    sweep.doomed = _in_order(loose)
    commits = sorted((names.commit_number(e.name), e) for e in sweep.listing if names.commit_number(e.name))
    if sweep.live is not None:
        sweep.old_commits = [e for number, e in commits if number < sweep.live.number and sweep.is_old(e)]
    elif commits and not loose and all(sweep.is_old(e) for _, e in commits):
        sweep.old_commits = [e for _, e in commits]  # the highest, the void, goes last


def check_right(sweep: Sweep) -> None:
    """Where a second create is not refused a fence holds nobody off: only on the user's word."""
    if sweep.doomed and not sweep.assume_single_writer and sweep.store.create_if_absent is not Atomicity.ATOMIC:
        raise CheckpointError(
            f"{sweep.store.url}: this store cannot refuse a second create, so a save in flight could not be held off. "
            "If no other job writes here, pass assume_single_writer=True.",
            path=sweep.store.url,
            kind="single-writer",
        )


def fence_void(sweep: Sweep) -> None:
    """Creates commit n+1 as a void; who does not get the number gives up."""
    _fence(sweep, None)


def fence_prune(sweep: Sweep) -> None:
    """If anything is to be deleted: creates commit n+1, the live commit restated, or a void where nothing lives."""
    if sweep.doomed:
        _fence(sweep, sweep.live)


def drop_uploads(sweep: Sweep) -> None:
    """Aborts uploads that were begun before the grace and never ended."""
    if sweep.uploads:
        sweep.store.abort_uploads(sweep.uploads)


def drop_view(sweep: Sweep) -> None:
    """Removes the stock view, also one that a save has written since the listing, and lets it follow the commits."""
    sweep.store.delete([names.STOCK_VIEW])
    settle_view(sweep.store, None)


def drop_listed_view(sweep: Sweep) -> None:
    """For prune: removes the stock view only if it was listed among what no live commit stands behind."""
    if any(e.name == names.STOCK_VIEW for e in sweep.doomed):
        drop_view(sweep)


def drop_files(sweep: Sweep) -> None:
    """Deletes what was listed, manifests late and the claim last, so that a delete which is killed half-way can still
    be seen for what it is.
    """
    rest = [e.name for e in sweep.doomed if e.name != names.STOCK_VIEW]
    for late in (False, True):
        batch = [name for name in rest if name.startswith((names.MANIFEST, names.CLAIM)) is late]
        if batch:
            sweep.store.delete(batch)


def drop_commits(sweep: Sweep) -> None:
    """Removes old commit objects one by one, the highest last: the highest that is left always counts."""
    for entry in sweep.old_commits:
        sweep.store.delete([entry.name])


DELETE: tuple[Step, ...] = (list_folder, choose_all, fence_void, drop_view, drop_files)
PRUNE: tuple[Step, ...] = (
    list_folder,
    choose_old,
    check_right,
    fence_prune,
    drop_uploads,
    drop_listed_view,
    drop_files,
    drop_commits,
)
_PLANNING: tuple[Step, ...] = (list_folder, choose_old)


def delete_folder(store: Store, steps: tuple[Step, ...] = DELETE) -> Sweep:
    """Deletes the committed checkpoint in ``store``: a void first, then its files. Commit objects stay for prune.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointReplacedError: another attempt took the number; nothing was deleted.
        CommitUnknownError: it cannot be known whether the void was made; nothing was deleted.
        StoreError: the store failed; after the void the checkpoint is deleted, and prune removes the rest.
    """
    return _run(Sweep(store), steps)


def prune_folder(
    store: Store,
    *,
    grace: float,
    apply: bool = True,
    assume_single_writer: bool = False,
    steps: tuple[Step, ...] = PRUNE,
) -> Sweep:
    """Removes from ``store`` what no live commit names: leftovers of dead attempts, claims, old commits, stale uploads.

    Args:
        store: the folder.
        grace: seconds by the store's own clock; nothing younger is touched. It must be longer than any pause of a
            writer that is still to be believed.
        apply: False only finds out what would be done.
        assume_single_writer: needed on stores that cannot refuse a second create.
        steps: exchanged by the test kit.

    Returns:
        The sweep, with what was (or would be) deleted and why something was left alone.

    Raises:
        CheckpointReplacedError: a save or another prune took the number; nothing was deleted.
        CommitUnknownError: it cannot be known whether the fence was made; nothing was deleted.
        StoreError: the store failed.
    """
    sweep = Sweep(store, grace=grace, apply=apply, assume_single_writer=assume_single_writer)
    return _run(sweep, steps if apply else _PLANNING)


def _run(sweep: Sweep, steps: tuple[Step, ...]) -> Sweep:
    for step in steps:
        step(sweep)
    return sweep


def _fence(sweep: Sweep, restated: Current | None) -> None:
    commit = new_commit(
        sweep.number + 1,
        sweep.token,
        manifest=restated.commit.manifest if restated else None,
        world_size=restated.commit.world_size if restated else 0,
        single_writer=sweep.store.create_if_absent is not Atomicity.ATOMIC,
        restates=restated.number if restated else None,
    )
    try:
        create_commit(sweep.store, commit)
    except CheckpointExistsError as error:
        raise CheckpointReplacedError(
            f"{sweep.store.url}: another save, delete or prune was first; nothing was deleted.",
            path=sweep.store.url,
            cause=error,
        ) from error
    sweep.fenced = commit.number


def _is_file_of_ours(entry: Entry) -> bool:
    return names.is_ours(entry.name) and not names.commit_number(entry.name)


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    def rank(entry: Entry) -> tuple[bool, bool, bool, str]:
        name = entry.name
        return name != names.STOCK_VIEW, name.startswith(names.CLAIM), name.startswith(names.MANIFEST), name

    return sorted(entries, key=rank)
