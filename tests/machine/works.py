"""What the members of the machine do: real saves and loads through torch, real deletes, prunes and adoptions."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions
from dcp_storage.fence import Sweep, delete_folder, drop_commits, prune_folder
from dcp_storage.store import Store
from dcp_storage.stores.location import Location, parse_location
from dcp_storage.testing.faults import NamedFault
from dcp_storage.tools.adopt import adopt_folder
from dcp_storage.tools.delete import FINISH, FORCED, RETIRE, sweep_with
from dcp_storage.tools.opening import Folder

__all__ = ["Writers", "adopt", "author_of", "delete", "flipped", "load", "prune", "state_of", "stock_files", "template"]

PATH = "/nowhere"
ONE = 1  # request at a time: the machine decides which
SAVING = SaveOptions(max_concurrency=ONE, attempts=1)
LOADING = LoadOptions(max_concurrency=ONE, attempts=1)
FILL = -7.0

Opener = Callable[[Location, Mapping[str, Any], int], Store]


def state_of(author: int) -> dict[str, Any]:
    """Values of which each shows its author, and whose files are as long as those of every other."""
    return {
        "t": torch.arange(8, dtype=torch.float32) + 100 * author,
        "k": f"author-{author:06d}",
        "u": torch.full((3, 2), author, dtype=torch.int64),
    }


def template() -> dict[str, Any]:
    """What a load fills."""
    return {"t": torch.full((8,), FILL), "k": "", "u": torch.full((3, 2), int(FILL), dtype=torch.int64)}


def author_of(found: Mapping[str, Any]) -> int | None:
    """Whose values these are; None where they are of several, of nobody, or not all filled."""
    author = int(found["u"][0, 0])
    wanted = state_of(author)
    same = found["k"] == wanted["k"] and all(torch.equal(found[key], wanted[key]) for key in ("t", "u"))
    return author if same and list(found) == list(wanted) else None


class Writers:
    """The writers of one folder: a new one for each save, and one that all asynchronous saves share.

    Args:
        fault: what is done wrong by all of them.
    """

    def __init__(self, fault: NamedFault) -> None:
        self.fault = fault
        self.stores: dict[str, Store] = {}
        self.shared = {overwrite: self._made(overwrite, self._of_path) for overwrite in (False, True)}

    def _of_path(self, location: Location, options: Mapping[str, Any], most: int) -> Store:
        return self.stores[location.path]

    def _made(self, overwrite: bool, opener: Opener) -> FsspecStorageWriter:
        writer = FsspecStorageWriter(PATH, overwrite=overwrite, options=SAVING)
        writer._opener = opener
        return self.fault.in_writer(writer)

    def plain(self, store: Store, author: int, overwrite: bool) -> None:
        """``dcp.save`` from one process."""
        writer = self._made(overwrite, lambda *_: store)
        dcp.save(state_of(author), storage_writer=writer, no_dist=True)

    def later(self, store: Store, author: int, overwrite: bool) -> None:
        """``dcp.async_save`` with the writer that others use at the same time."""
        path = f"{PATH}/{author}"
        self.stores[path] = store
        future: Any = dcp.async_save(
            state_of(author), checkpoint_id=path, storage_writer=self.shared[overwrite], no_dist=True
        )
        future.result()

    def by_ranks(self, store: Store, author: int, overwrite: bool) -> None:
        """Two ranks, whose hooks are called as torch does; what rank 1 raises is noted with its rank."""
        writers = [self._made(overwrite, lambda *_: store) for _ in range(2)]
        planners = [DefaultSavePlanner() for _ in range(2)]
        state = state_of(author)
        parts = [{"t": state["t"], "k": state["k"]}, {"u": state["u"]}]
        plans = []
        for rank, (writer, planner, part) in enumerate(zip(writers, planners, parts, strict=True)):
            planner.set_up_planner(part, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writers[0].prepare_global_plan(plans)
        results = []
        for rank, (writer, planner, plan) in enumerate(zip(writers, planners, plans, strict=True)):
            try:
                results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
            except Exception as error:
                error.rank = rank  # type: ignore[attr-defined]  # for who looks at what is left of it
                raise
        writers[0].finish(metadata=metadata, results=results)


def load(store: Store, fault: NamedFault, require_commit: bool, into: dict[str, Any]) -> int | None:
    """``dcp.load`` from one process; whose values came."""
    reader = FsspecStorageReader(PATH, require_commit=require_commit, options=LOADING)
    reader._opener = lambda *_: store
    dcp.load(into, storage_reader=fault.in_reader(reader), no_dist=True)
    return author_of(into)


def delete(store: Store, fault: NamedFault, how: str, grace: float) -> None:
    """A delete by the bare steps, by those of ``dcp_storage.delete`` with and without force, or of a killed delete."""
    if how == "bare":
        delete_folder(fault.store(store), fault.delete_steps)
    elif how == "finish":
        sweep_with(FINISH, fault.store(store), grace, False)
    else:
        sweep_with(fault.delete(RETIRE if how == "retire" else FORCED), fault.store(store), grace, False)


def prune(store: Store, fault: NamedFault, grace: float, alone: bool) -> None:
    """A prune of the folder. Only where it is alone it sweeps the last void, too, after which numbers begin anew."""
    last = drop_commits if alone else _drop_lower
    steps = tuple(last if step is drop_commits else step for step in fault.prune_steps)
    prune_folder(fault.store(store), grace=grace, steps=steps)


def _drop_lower(sweep: Sweep) -> None:
    if sweep.live is not None and sweep.grace > 0:
        drop_commits(sweep)


def adopt(store: Store, fault: NamedFault) -> None:
    """An adoption of a stock checkpoint."""
    adopt_folder(Folder(parse_location(PATH), {}, LOADING, lambda *_: fault.store(store)))


@functools.cache
def stock_files(author: int) -> Mapping[str, bytes]:
    """What stock torch writes."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state_of(author), storage_writer=FileSystemWriter(folder), no_dist=True)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def flipped(body: bytes, author: int) -> bytes:
    """One bit of a tensor's values is another one."""
    state = state_of(author)
    at = next(at for at in (body.find(state[key].numpy().tobytes()) for key in ("t", "u")) if at >= 0)
    return bytes([*body[:at], body[at] ^ 1, *body[at + 1 :]])
