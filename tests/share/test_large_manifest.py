"""A manifest of a million chunks is read in about the time and memory that stock torch's own metadata takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAKE = """
import gc, sys, pickle, msgspec, pathlib
gc.disable()  # millions of objects and no rings among them
from dcp_storage.records import *
from dcp_storage.torchview import metadata_of, stock_storage_data
out, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
tensors, each = count // 1000, 1000
items, entries = [], {}
for t in range(tensors):
    key = f"model.layers.{t}.mlp.weight"
    chunks = tuple(Chunk((k * 8, 0), (8, 64)) for k in range(each))
    entries[key] = TensorEntry(dtype="float32", size=(8 * each, 64), chunks=chunks)
    for k in range(each):
        items.append(ItemRecord(key=key, offsets=(k * 8, 0), index=k, file=k % 8, offset=(t * each + k) * 4096,
            length=3300, crc32=12345678, payload_offset=600, payload_length=2048, payload_crc32=987654321, block=16384,
            blocks=(987654321,), dtype="float32", shape=(8, 64)))
files = tuple(FileRecord(f"__{r}_0.distcp", count * 4096, 1234567890, r) for r in range(8))
manifest = Manifest(format=1, files=files, items=tuple(items), entries=entries)
out.joinpath("manifest").write_bytes(encode_manifest(manifest))
metadata = metadata_of(manifest)
metadata.storage_data = stock_storage_data(manifest)
out.joinpath("metadata").write_bytes(pickle.dumps(metadata))
"""

LOAD = """
import sys, pickle, pathlib, time, resource
import torch.distributed.checkpoint
from dcp_storage.reading import Checkpoint
from dcp_storage.records import decode_manifest
from dcp_storage.torchview import metadata_of
out, what = pathlib.Path(sys.argv[1]), sys.argv[2]
before = resource.getrusage(resource.RUSAGE_SELF)
data = out.joinpath(what).read_bytes()
if what == "manifest":
    checkpoint = Checkpoint(1, 0, decode_manifest(data, path="p", file="f"), len(data))
    metadata = metadata_of(checkpoint.manifest)
else:
    metadata = pickle.loads(data)
after = resource.getrusage(resource.RUSAGE_SELF)
print(len(data), len(metadata.storage_data), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
      (after.ru_maxrss - before.ru_maxrss) * 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_million_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To parse, check and translate our manifest takes at most three times the CPU of unpickling stock's, and 4 GB."""
    subprocess.run([sys.executable, "-c", MAKE, str(tmp_path), "1000000"], check=True, timeout=900)
    found = {}
    for what in ("manifest", "metadata"):
        done = subprocess.run(
            [sys.executable, "-c", LOAD, str(tmp_path), what],
            check=True,
            timeout=500,
            stdout=subprocess.PIPE,
            text=True,
        )
        size, count, seconds, memory = done.stdout.split()
        assert count == "1000000"
        found[what] = float(seconds), int(memory)
        with capsys.disabled():
            print(f"\n{what}: {int(size) / 1e6:.0f} MB, {float(seconds):.1f} s CPU, {int(memory) / 1e9:.2f} GB")
    assert found["manifest"][0] <= 3 * found["metadata"][0]
    assert found["manifest"][1] <= 4e9
