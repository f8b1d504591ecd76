"""The whole training state in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from fsspec.callbacks import Callback
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcp_storage.options import LoadOptions, LoadReport, SaveOptions, SaveReport
from dcp_storage.reader import FsspecStorageReader
from dcp_storage.state_async import AsyncSave, IfBusy, Savers
from dcp_storage.state_keys import KeyChoice, Keys
from dcp_storage.state_load import load_state
from dcp_storage.state_ranks import Ranks
from dcp_storage.state_save import Differing, Leaf, collect, save_leaves
from dcp_storage.state_sharing import Sharing, cpu_group
from dcp_storage.stores.location import parse_location
from dcp_storage.writer import FsspecStorageWriter

__all__ = ["DCP"]

_SAVERS = Savers()

_HERE = ("file", "local", "memory")
"""Filesystems of this machine: what was read once comes out of memory at the second time."""

CheckpointId = str | os.PathLike[str]


class DCP:
    """Saves and loads the whole state of a training run: ``DCP.save``, ``DCP.load`` and ``DCP.async_save``.

    The state is a dict of what a run is made of: modules (plain, DDP, FSDP2, tensor-parallel, compiled), optimizers,
    anything with ``state_dict`` and ``load_state_dict``, :class:`~dcp_storage.RngState`,
    :class:`~dcp_storage.PerRank`, and plain values, also nested in dicts and lists. On the store they are
    ``model.<name>``, ``optimizer.state.<name>.…``, ``optimizer.param_groups.…`` and ``<name>`` for the rest, as torch's
    ``get_state_dict`` and ``dcp.save`` name them.

    With a process group, every rank of it makes the call. Without one, or with ``no_dist=True``, this process alone
    does. Errors are :class:`~dcp_storage.CheckpointError`, the same on every rank, with ``rank`` and ``failures``.
    """

    @staticmethod
    def save(
        state: MutableMapping[str, Any],
        *,
        checkpoint_id: CheckpointId | None = None,
        storage_writer: StorageWriter | None = None,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        options: SaveOptions = SaveOptions(),  # noqa: B008 - frozen
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
        no_dist: bool = False,
        differing: Differing = "warn",
        callback: Callback | None = None,
    ) -> SaveReport:
        """Saves the state. When it returns, the checkpoint is committed.

        Args:
            state: what to save. Nothing in it changes, and an optimizer that has not stepped stays so.
            checkpoint_id: the folder or URL; may be left out where ``storage_writer`` points somewhere.
            storage_writer: writes instead of a :class:`~dcp_storage.FsspecStorageWriter` made from ``storage_options``,
                ``overwrite``, ``options`` and ``callback``, which must then be left out.
            storage_options: as for the writer.
            overwrite: as for the writer. Default False.
            options: as for the writer.
            process_group: who saves. Default: the default group.
            planner: plans instead of torch's default planner.
            no_dist: whether this process saves alone although there is a process group. Default False.
            differing: what it leads to that a plain value (a Python object or CPU tensor outside modules and
                optimizers) differs between ranks: each rank's own is kept either way, with a warning (``"warn"``, the
                default), or nothing is saved (``"error"``).
            callback: as for the writer.

        Returns:
            The writer's report; its ``warnings`` name the values that differed.

        Raises:
            CheckpointError: whatever went wrong, on every rank.
            TypeError: the state, or an option, is of the wrong type.
            ValueError: options that exclude each other, or a name that is taken.
        """
        ranks = Ranks.of(process_group, no_dist)
        writer = _writer(checkpoint_id, storage_writer, storage_options, overwrite, options, callback)
        _check_differing(differing)
        leaves: list[Leaf] = []
        path = None if checkpoint_id is None else str(checkpoint_id)
        ranks.agree("Collecting the state", path, lambda: leaves.extend(collect(state)), plain=(TypeError, ValueError))
        return save_leaves(ranks, leaves, writer, planner, differing)

    @staticmethod
    def async_save(
        state: MutableMapping[str, Any],
        *,
        checkpoint_id: CheckpointId | None = None,
        storage_writer: StorageWriter | None = None,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        options: SaveOptions = SaveOptions(),  # noqa: B008 - frozen
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
        no_dist: bool = False,
        differing: Differing = "warn",
        callback: Callback | None = None,
        async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        max_in_flight: int = 1,
        if_busy: IfBusy = "wait",
    ) -> AsyncSave:
        """Copies the state and returns; the copy is saved behind the training, over a gloo group of its own.

        The copies go into CPU memory that is kept for the next save, pinned where there is an accelerator. The group
        is made on the first call, which all ranks make together. An error reaches the caller at ``wait()`` or
        ``result()`` of the handle, or else at the next call. When the interpreter ends it waits for what is in flight,
        and shows errors that nobody asked for. End a program by ``wait()`` before ``destroy_process_group()``, which
        also ends the group that the save is using.

        Args:
            state: as for :meth:`save`; may be changed as soon as this returns.
            checkpoint_id: as for :meth:`save`.
            storage_writer: as for :meth:`save`.
            storage_options: as for :meth:`save`.
            overwrite: as for :meth:`save`.
            options: as for :meth:`save`.
            process_group: as for :meth:`save`.
            planner: as for :meth:`save`.
            no_dist: as for :meth:`save`.
            differing: as for :meth:`save`; ``"error"`` reaches the caller as any other error does.
            callback: as for :meth:`save`; it is called from another thread, and not at all from another process.
            async_checkpointer_type: whether a thread of this process writes (the default), or another process.
            max_in_flight: how many saves may be going on at once, each with staging memory and a group of its own.
                Default 1.
            if_busy: what to do where the oldest of the last ``max_in_flight`` saves is still going on: wait for it
                (``"wait"``, the default), or leave this one out (``"skip"``), on all ranks alike. They take turns, so
                that a younger one may have ended before.

        Returns:
            A handle with ``wait()``, ``result()``, ``done`` and ``skipped``.

        Raises:
            CheckpointError: this rank's state cannot be collected or copied, or an earlier save failed.
            TypeError: the state, or an option, is of the wrong type.
            ValueError: options that exclude each other.
        """
        ranks = Ranks.of(process_group, no_dist)
        writer = _writer(checkpoint_id, storage_writer, storage_options, overwrite, options, callback)
        _check_differing(differing)
        in_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS
        if not isinstance(async_checkpointer_type, AsyncCheckpointerType):
            raise TypeError(
                f"async_checkpointer_type must be of torch's AsyncCheckpointerType, not {async_checkpointer_type!r}."
            )
        if if_busy not in ("wait", "skip"):
            raise ValueError(f'if_busy must be "wait" or "skip", not {if_busy!r}.')
        if max_in_flight < 1 or (in_process and max_in_flight > 1):
            raise ValueError("max_in_flight must be at least 1, and 1 where another process writes.")
        target = checkpoint_id if checkpoint_id is not None else getattr(writer, "checkpoint_id", None)

        def write(own: Ranks, leaves: list[Leaf]) -> SaveReport:
            if target is not None:
                writer.reset(target)  # a writer points each thread to a folder
            return save_leaves(own, leaves, writer, planner, differing, in_process=in_process)

        path = None if target is None else str(target)
        return _SAVERS.saver(ranks).save(path, lambda: collect(state), write, max_in_flight, if_busy)

    @staticmethod
    def load(
        state: MutableMapping[str, Any],
        *,
        checkpoint_id: CheckpointId | None = None,
        storage_reader: StorageReader | None = None,
        storage_options: Mapping[str, Any] | None = None,
        require_commit: bool = True,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
        process_group: dist.ProcessGroup | None = None,
        planner: LoadPlanner | None = None,
        no_dist: bool = False,
        strict: bool = True,
        allow_dtype_cast: bool = False,
        keys: Keys = None,
        callback: Callback | None = None,
    ) -> LoadReport:
        """Fills the state from a checkpoint, which may have been saved on any number of ranks, in any layout.

        Live objects are filled in place; plain values are replaced in ``state``, tensors among them filled. Before
        anything changes, the whole template is held against the checkpoint: with ``strict``, everything in it has to
        be there with its shape, and inside its entries there may be nothing that nobody wants. Other entries of the
        checkpoint may be left alone.

        Args:
            state: the template.
            checkpoint_id: the folder or URL; may be left out where ``storage_reader`` points somewhere.
            storage_reader: reads instead of a :class:`~dcp_storage.FsspecStorageReader` made from ``storage_options``,
                ``require_commit``, ``options`` and ``callback``, which must then be left out.
            storage_options: as for the reader.
            require_commit: as for the reader; False also loads what stock torch wrote. Default True.
            options: as for the reader. Where several ranks want the same bytes of a store that is not of this machine,
                and measured figures say that it pays, each byte is read once and sent on, as by
                ``LoadOptions(share_reads=True)``; a reader of your own as ``storage_reader`` does as it is told.
            process_group: who loads. Default: the default group.
            planner: plans instead of torch's default planner; it is given the keys of the store, flat.
            no_dist: whether this process loads alone although there is a process group. Default False.
            strict: whether everything has to fit. False loads what fits, leaves the rest alone and reports it.
            allow_dtype_cast: whether tensors may be filled from another dtype, by ``copy_``. Default False.
            keys: what to load and under which names: prefixes, e.g. ``["model"]``, all else stays untouched; or a
                dict of prefixes on the store with their names in ``state``, e.g. ``{"net.encoder": "model"}``, where
                None leaves out and other keys keep their names; or a function from a key of the store to one of the
                template, or None. Default: everything, as it is called.
            callback: as for the reader.

        Returns:
            What was loaded, cast and left alone, by key, and what became of values that ranks had of their own.

        Raises:
            IncompatibleCheckpointError: the template does not fit; it names all that is missing, unexpected, or of
                another shape or dtype. Nothing has changed.
            CheckpointError: whatever else went wrong, on every rank.
            TypeError: the state, or an option, is of the wrong type.
            ValueError: options that exclude each other.
        """
        choice = KeyChoice(keys)
        ranks = Ranks.of(process_group, no_dist)
        how: Any = {"strict": strict, "allow_dtype_cast": allow_dtype_cast, "choice": choice}
        if storage_reader is not None:
            if storage_options is not None or not require_commit or options != LoadOptions() or callback is not None:
                raise ValueError(
                    "With storage_reader, give storage_options, require_commit, options and callback to the reader."
                )
            if checkpoint_id is not None:
                storage_reader.reset(checkpoint_id)
            return load_state(ranks, state, storage_reader, planner, **how)

        def reader(share: bool, group: dist.ProcessGroup | None) -> FsspecStorageReader:
            return FsspecStorageReader(
                checkpoint_id,
                storage_options=storage_options,
                require_commit=require_commit,
                options=replace(options, share_reads=share),
                process_group=group,
                callback=callback,
            )

        remote = checkpoint_id is not None and parse_location(checkpoint_id).protocol not in _HERE
        if ranks.world == 1 or not (remote or options.share_reads):
            return load_state(ranks, state, reader(False, None), planner, **how)
        with cpu_group(ranks) as group:
            first = reader(True, group)
            sharing = None if options.share_reads else Sharing(ranks, remote, first)
            return load_state(ranks, state, first, planner, sharing=sharing, **how)


def _check_differing(differing: Differing) -> None:
    if differing not in ("warn", "error"):
        raise ValueError(f'differing must be "warn" or "error", not {differing!r}.')


def _writer(
    checkpoint_id: CheckpointId | None,
    given: StorageWriter | None,
    storage_options: Mapping[str, Any] | None,
    overwrite: bool,
    options: SaveOptions,
    callback: Callback | None,
) -> StorageWriter:
    if given is None:
        return FsspecStorageWriter(
            checkpoint_id, storage_options=storage_options, overwrite=overwrite, options=options, callback=callback
        )
    if storage_options is not None or overwrite or options != SaveOptions() or callback is not None:
        raise ValueError("With storage_writer, give storage_options, overwrite, options and callback to the writer.")
    if checkpoint_id is not None:
        given.reset(checkpoint_id)
    return given
