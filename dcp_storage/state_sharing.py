"""Whether the ranks of a load share their reads: what they want together, and a reader that does it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_storage.exchange_plan import worth_sharing
from dcp_storage.exchange_rounds import check_group, timeout_of
from dcp_storage.reader import FsspecStorageReader
from dcp_storage.state_digest import digest_of
from dcp_storage.state_findings import Wish
from dcp_storage.state_ranks import Ranks
from dcp_storage.state_view import View

__all__ = ["Sharing", "Wants", "cpu_group", "wants_of"]


@dataclass(frozen=True)
class Wants:
    """What one rank wants, in figures.

    Attributes:
        own: bytes that it would read alone.
        keys: a digest of the keys that it wants.
        whole: bytes that all of these keys have on the store.
    """

    own: int
    keys: bytes
    whole: int


def wants_of(wishes: Iterable[Wish], view: View) -> Wants:
    """The figures of a rank; objects, which are small, do not count."""
    sizes = {
        stored.source: math.prod(stored.meta.size) * stored.meta.properties.dtype.itemsize
        for stored in view.mine.values()
        if isinstance(stored.meta, TensorStorageMetadata)
    }
    own = whole = 0
    keys = []
    for wish in wishes:
        if isinstance(wish.value, torch.Tensor):
            local = wish.value.to_local() if isinstance(wish.value, DTensor) else wish.value
            own += local.numel() * local.element_size()
            whole += sizes.get(wish.source, 0)
            keys.append(wish.source)
    return Wants(own, digest_of(sorted(keys)), whole)


@dataclass(frozen=True)
class Sharing:
    """How reads may be shared.

    Attributes:
        ranks: who loads.
        remote: whether the checkpoint is in a store that is not of this machine.
        reader: was made to share, so that the ranks meet once; :meth:`decide` says whether it does.
    """

    ranks: Ranks
    remote: bool
    reader: FsspecStorageReader

    def decide(self, share: bool) -> None:
        """Has what is read from now on shared or not; every rank decides alike."""
        self.reader.options = replace(self.reader.options, share_reads=share)

    def pays(self, wants: Sequence[Wants]) -> bool:
        """Whether sharing makes the load faster, by the measured threshold; the same on every rank.

        Ranks that want other keys, as the stages of a pipeline, have nothing to share with each other.
        """
        distinct = sum({one.keys: one.whole for one in wants}.values())
        wanted = sum(one.own for one in wants)
        return worth_sharing(wanted=wanted, distinct=distinct, ranks=self.ranks.world, remote=self.remote)


@contextlib.contextmanager
def cpu_group(ranks: Ranks) -> Iterator[dist.ProcessGroup]:
    """A group of the ranks that sends what is in CPU memory: their own, or one that lives as long as this."""
    group = ranks.group or dist.group.WORLD
    assert group is not None
    try:
        check_group(group)
    except ValueError:
        members = dist.get_process_group_ranks(group)
        own = dist.new_group(members, timeout=timeout_of(group), backend="gloo", use_local_synchronization=True)
        try:
            yield own
        finally:
            dist.destroy_process_group(own)
        return
    yield group
