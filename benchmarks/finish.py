"""The coordinator's CPU inside ``finish`` for a save of many items, against ``pickle.dumps`` of the stock Metadata.

Simulated in one process: ranks x keys items as plans and results, as the coordinator gets them; no bytes of tensors.
The store keeps objects in memory, and its calls are left out of the figure.

    python -m benchmarks.finish [ranks] [keys]
"""

from __future__ import annotations

import argparse
import gc
import pickle
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_storage import FsspecStorageWriter
from dcp_storage.records import FileRecord, ItemRecord, WrittenItem
from dcp_storage.store import Buffers, Entry
from dcp_storage.testing.dictstore import DictStore

__all__ = ["main"]

ROWS, WIDTH = 64, 64  # of each chunk, float32: 16 KiB, one block
LENGTH = 4 * ROWS * WIDTH
AROUND, BEFORE = 1700, 704  # bytes of an item around its payload, and before it


class _Timed(DictStore):
    """Counts the CPU seconds inside its calls; lists shards that nobody wrote."""

    def __init__(self, files: Iterable[tuple[str, int]]) -> None:
        super().__init__()
        self.cpu = 0.0
        self.shards = list(files)
        self.listing = False

    def entries(self) -> list[Entry]:
        start = time.process_time()
        made = super().entries()
        if self.listing:
            made += [Entry(name, size, time.time()) for name, size in self.shards]
        self.cpu += time.process_time() - start
        return made

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        start = time.process_time()
        super().put(name, buffers, crc32=crc32)
        self.cpu += time.process_time() - start


def _plan(rank: int, keys: int, ranks: int) -> SavePlan:
    items = []
    for k in range(keys):  # nothing is shared between items, as in a plan that a planner made
        chunk = ChunkStorageMetadata(torch.Size([ROWS * rank, 0]), torch.Size([ROWS, WIDTH]))
        size = torch.Size([ROWS * ranks, WIDTH])
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), size)
        place = MetadataIndex(f"model.layer.{k}.weight", chunk.offsets, rank)
        items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={})


def _results(rank: int, plan: SavePlan) -> list[WriteResult]:
    name = f"__{rank}_0.distcp"
    whole = LENGTH + AROUND
    out = []
    for number, item in enumerate(plan.items):
        offsets = item.index.offset
        record = ItemRecord(
            key=item.index.fqn,
            offsets=None if offsets is None else tuple(offsets),
            index=item.index.index,
            file=0,
            offset=number * whole,
            length=whole,
            crc32=number,
            payload_offset=BEFORE,
            payload_length=LENGTH,
            payload_crc32=number + 1,
            block=LENGTH,
            blocks=(number + 1,),
            dtype="float32",
            shape=(ROWS, WIDTH),
            stride=None,
        )
        shard = FileRecord(name, whole * len(plan.items), rank, rank) if not number else None
        out.append(WriteResult(item.index, whole, WrittenItem(name, record, shard)))
    return out


def main() -> None:
    """Simulates, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="?", type=int, default=1000, help="how many; 1000 by default")
    parser.add_argument("keys", nargs="?", type=int, default=1000, help="items of each rank; 1000 by default")
    arguments = parser.parse_args()
    ranks, keys = arguments.ranks, arguments.keys
    plans = [_plan(rank, keys, ranks) for rank in range(ranks)]
    results = [_results(rank, plan) for rank, plan in enumerate(plans)]
    whole = (LENGTH + AROUND) * keys
    store = _Timed((f"__{rank}_0.distcp", whole) for rank in range(ranks))
    writer = FsspecStorageWriter("memory://finish")
    opener: Any = lambda *_: store  # noqa: E731 - the seam of the tests
    writer._opener = opener
    start = time.process_time()
    plans, metadata = DefaultSavePlanner().create_global_plan(plans)
    print(f"torch's own create_global_plan: {time.process_time() - start:.1f} CPU s")
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans[0] = writer.prepare_local_plan(plans[0])
    start = time.process_time()
    writer.prepare_global_plan(plans)
    print(f"prepare_global_plan: {time.process_time() - start:.2f} CPU s")
    store.listing = True
    store.cpu = 0.0
    gc.collect()
    start = time.process_time()
    writer.finish(metadata=metadata, results=results)
    ours = time.process_time() - start - store.cpu
    gc.collect()
    start = time.process_time()
    data = pickle.dumps(metadata)
    stock = time.process_time() - start
    manifest = len(store.read(".manifest", limit=1 << 34))
    print(f"{ranks * keys:,} items: manifest {manifest / 1e6:.0f} MB, stock pickle {len(data) / 1e6:.0f} MB")
    print(f"finish {ours:.2f} CPU s, pickle.dumps {stock:.2f} CPU s: ratio {ours / stock:.2f} (bar: at most 2)")


if __name__ == "__main__":
    main()
