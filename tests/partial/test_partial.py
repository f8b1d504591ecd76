"""A part of a checkpoint costs that part: bytes counted at the store, memory measured, values compared."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import dcp_storage.reader
from dcp_storage import (
    CheckpointNotFoundError,
    FsspecStorageWriter,
    IncompatibleCheckpointError,
    LoadOptions,
    NotCommittedError,
    list_keys,
    load_keys,
)
from dcp_storage.session import Opened, open_folder
from dcp_storage.testing.ranks import RankPool
from dcp_storage.testing.recording import RecordingStore
from tests.e2e import ALONE, assert_same, place_of
from tests.share import save_from, source

pytestmark = pytest.mark.filterwarnings(ALONE)

KIB = 1024
MIB = 1024 * KIB


def forty() -> dict[str, Any]:
    state: dict[str, Any] = {f"model.w{k:02}": torch.arange(65_536.0).reshape(256, 256) + k for k in range(40)}
    state["step"] = 7
    state["optimizer.note"] = "adam"
    return state


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[RecordingStore]:
    """The stores that readers open, recording."""
    made: list[RecordingStore] = []

    def opening(*args: Any, **options: Any) -> Opened:
        opened = open_folder(*args, **options)
        made.append(RecordingStore(opened.store))
        opened.store = made[-1]
        return opened

    monkeypatch.setattr(dcp_storage.reader, "open_folder", opening)
    return made


@pytest.mark.parametrize("kind", ["local", "memory", "moto"])
def test_two_of_forty_cost_their_bytes(request: pytest.FixtureRequest, stores: list[RecordingStore], kind: str) -> None:
    """Two tensors of forty: their bytes, commit and manifest, and at most the few bytes torch.save puts between."""
    place = place_of(request, kind)
    dcp.save(forty(), storage_writer=place.writer(), no_dist=True)
    found = load_keys(place.url, keys=["model.w03", "model.w31"], storage_options=place.options)
    assert_same(dict(found), {key: forty()[key] for key in ("model.w03", "model.w31")})
    metadata = place.files()[".commit"] + place.files()[".manifest"]
    read = sum(store.bytes_read() for store in stores)
    assert read == 2 * 65_536 * 4 + metadata == found.report.bytes_read
    assert found.report.bytes_needed == 2 * 65_536 * 4
    assert found.report.loaded == ["model.w03", "model.w31"]


def test_prefix_keys_and_all(tmp_path: Path) -> None:
    """A prefix, keys beside it, and nothing named, which is everything."""
    dcp.save(forty(), storage_writer=FsspecStorageWriter(tmp_path / "one"), no_dist=True)
    assert list(load_keys(tmp_path / "one", prefix="model.w1")) == [f"model.w1{k}" for k in range(10)]
    assert_same(dict(load_keys(tmp_path / "one", prefix="opt", keys=["step"])), {"optimizer.note": "adam", "step": 7})
    assert_same(dict(load_keys(tmp_path / "one")), dict(sorted(forty().items())))
    assert dict(load_keys(tmp_path / "one", keys=[])) == {}


@pytest.mark.parametrize(
    ("parts", "rows", "columns"),
    [
        ((slice(10, 20),), slice(10, 20), slice(None)),
        ((slice(None), slice(3, 5)), slice(None), slice(3, 5)),
        ((slice(-5, None), slice(None, -250)), slice(-5, None), slice(None, -250)),
        ((slice(250, 999), slice(0, 0)), slice(250, 256), slice(0, 0)),
        ((slice(20, 10),), slice(0, 0), slice(None)),
        ((), slice(None), slice(None)),
    ],
)
@pytest.mark.parametrize("by", ["ours", "stock"])
def test_slices_are_those_of_python(
    tmp_path: Path, by: str, parts: tuple[slice, ...], rows: slice, columns: slice
) -> None:
    """Slices mean what they mean for a tensor, of what we saved and of what stock torch saved."""
    writer = FsspecStorageWriter(tmp_path / "one") if by == "ours" else FileSystemWriter(tmp_path / "one")
    dcp.save(forty(), storage_writer=writer, no_dist=True)
    found = load_keys(tmp_path / "one", slices={"model.w07": parts}, require_commit=by == "ours")
    assert found.report.loaded == ["model.w07"]
    assert torch.equal(found["model.w07"], forty()["model.w07"][rows, columns])


def test_slices_of_what_many_ranks_saved(tmp_path: Path, ranks: RankPool) -> None:
    """A slice across the chunks of several ranks, sharded by columns, is put together from them."""
    ranks.run(save_from, 4, str(tmp_path / "one"), {"a": (60, 100)}, ((4,), ("S1",)))
    found = load_keys(tmp_path / "one", slices={"a": (slice(7, 9), slice(20, 80))})
    assert torch.equal(found["a"], source("a", (60, 100))[7:9, 20:80])


def test_rows_of_a_large_tensor_cost_rows(tmp_path: Path, stores: list[RecordingStore]) -> None:
    """Ten rows of 64 MiB: their bytes and two blocks at most; 20 blocks cost a tenth more at most."""
    value = torch.arange(16 * MIB, dtype=torch.int32).reshape(4096, 4096)
    dcp.save({"big": value}, storage_writer=FsspecStorageWriter(tmp_path / "one"), no_dist=True)
    block = 512 * KIB
    for first, count in ((1000, 10), (1001, 700)):
        stores.clear()
        found = load_keys(tmp_path / "one", slices={"big": (slice(first, first + count),)})
        assert torch.equal(found["big"], value[first : first + count])
        needed = count * 4096 * 4
        read = sum(call.nbytes for call in stores[0].of("read_into"))
        assert read <= needed + 2 * block
        assert count < 700 or read <= 1.1 * needed


def test_slices_of_stock_checkpoints_cost_their_bytes(tmp_path: Path, stores: list[RecordingStore]) -> None:
    """Of a stock tensor the place of the numbers is found in the item: rows cost rows; the report says: not checked."""
    value = torch.arange(4 * MIB, dtype=torch.bfloat16).reshape(1024, 4096)
    state = {"first": torch.ones(1000), "big": value, "turned": value[:512].T}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    found = load_keys(tmp_path / "one", slices={"big": (slice(100, 110),)}, require_commit=False)
    assert torch.equal(found["big"], value[100:110])
    rows = 10 * 4096 * 2
    assert sum(call.nbytes for call in stores[0].of("read_into")) == rows + 2 * 8192
    assert found.report.bytes_unchecked == found.report.bytes_needed == rows
    assert found.report.bytes_read == stores[0].bytes_read()
    assert any("not checked" in warning for warning in found.report.warnings)
    stores.clear()
    turned = load_keys(tmp_path / "one", slices={"turned": (slice(5, 7),)}, require_commit=False)
    assert torch.equal(turned["turned"], value[:512].T[5:7])
    assert turned.report.bytes_unchecked == 0  # read whole, and so held against the zip's own sums


def quantized(value: torch.Tensor) -> torch.Tensor:
    """As torch still can, though it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.quantize_per_tensor(value, 0.5, 3, torch.qint8)


def kinds() -> dict[str, torch.Tensor]:
    """Tensors whose numbers are not where a plain one's are, or only just."""
    base = torch.arange(120_000.0).reshape(300, 400)
    return {
        "transposed": base.T,
        "wrapped": torch.nn.Parameter(base),
        "quantized": quantized(base[:, :40]),
        "sparse": torch.where(base % 97 == 0, base, 0).to_sparse(),
        "every-other": base[:, ::2],
        "view": base[100:200, 100:300],
        "conjugated": torch.complex(base, -base)[:200].conj(),
        "float8": base.to(torch.float8_e4m3fn),
        "uint16": base.to(torch.uint16),
        "bool": base % 3 == 0,
    }


@pytest.mark.parametrize(
    ("name", "by"),
    [(name, by) for name in sorted(kinds()) for by in ("ours", "stock") if (name, by) != ("sparse", "stock")],
)  # stock torch cannot save a sparse tensor
def test_slices_of_every_kind_of_tensor_are_right(tmp_path: Path, name: str, by: str) -> None:
    """Whatever the tensor is, and whoever saved it, a slice holds what a slice of the tensor holds."""
    value = kinds()[name]
    writer = FsspecStorageWriter(tmp_path / "one") if by == "ours" else FileSystemWriter(tmp_path / "one")
    dcp.save({"t": value}, storage_writer=writer, no_dist=True)
    found = load_keys(tmp_path / "one", slices={"t": (slice(11, 90), slice(3, 30))}, require_commit=by == "ours")["t"]
    plain = value.detach().dequantize() if value.is_quantized else value.detach().to_dense()
    wanted = plain[11:90, 3:30].resolve_conj()
    assert found.dtype is wanted.dtype
    assert found.contiguous().view(torch.uint8).tolist() == wanted.contiguous().view(torch.uint8).tolist()


def test_wrong_wishes_are_refused(tmp_path: Path) -> None:
    """A key that is not there is named, with the nearest ones; so are slices that do not fit, before any reading."""
    dcp.save(forty(), storage_writer=FsspecStorageWriter(tmp_path / "one"), no_dist=True)
    path = tmp_path / "one"
    with pytest.raises(IncompatibleCheckpointError, match=r"model\.w3") as caught:
        load_keys(path, keys=["model.W3"])
    assert caught.value.key == "model.W3"
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (IncompatibleCheckpointError, "begins with", lambda: load_keys(path, prefix="nothing")),
        (IncompatibleCheckpointError, "dimensions", lambda: load_keys(path, slices={"model.w01": (slice(1),) * 3})),
        (IncompatibleCheckpointError, "no tensor", lambda: load_keys(path, slices={"step": (slice(1),)})),
        (ValueError, "steps", lambda: load_keys(path, slices={"model.w01": (slice(0, 9, 2),)})),
        (TypeError, "slices", lambda: load_keys(path, slices={"model.w01": (1,)})),  # type: ignore[dict-item]
        (TypeError, "slices", lambda: load_keys(path, slices={"model.w01": None})),  # type: ignore[dict-item]
        (TypeError, "single string", lambda: load_keys(path, keys="model.w01")),
        (TypeError, "strings", lambda: load_keys(path, keys=["model.w01", 1])),  # type: ignore[list-item]
        (TypeError, "strings", lambda: load_keys(path, prefix=b"model")),  # type: ignore[arg-type]
        (TypeError, "mapping", lambda: load_keys(path, slices=["model.w01"])),  # type: ignore[arg-type]
        (TypeError, "LoadOptions", lambda: list_keys(path, options={})),  # type: ignore[arg-type]
        (TypeError, "prefix", lambda: list_keys(path, prefix=None)),  # type: ignore[arg-type]
        (ValueError, "one process", lambda: load_keys(path, options=LoadOptions(share_reads=True))),
        (CheckpointNotFoundError, "no checkpoint", lambda: load_keys(tmp_path / "two")),
        (CheckpointNotFoundError, "no checkpoint", lambda: list_keys(tmp_path / "two")),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_a_listing_is_the_manifest(request: pytest.FixtureRequest, kind: str) -> None:
    """Keys come sorted with shape, dtype and bytes; objects have no shape."""
    place = place_of(request, kind)
    dcp.save({**forty(), "half": torch.zeros(3, 5, dtype=torch.bfloat16)}, storage_writer=place.writer(), no_dist=True)
    found = list_keys(place.url, storage_options=place.options)
    assert [each.key for each in found] == sorted([*forty(), "half"])
    by_key = {each.key: each for each in found}
    assert (by_key["half"].shape, by_key["half"].dtype, by_key["half"].elements) == ((3, 5), "bfloat16", 15)
    assert (by_key["step"].shape, by_key["step"].dtype, by_key["step"].chunks) == (None, None, 1)
    assert 65_536 * 4 < by_key["model.w00"].nbytes < 65_536 * 4 + 4096
    assert [each.key for each in list_keys(place.url, prefix="opt", storage_options=place.options)] == [
        "optimizer.note"
    ]


def test_a_stock_checkpoint_is_listed_on_request(tmp_path: Path) -> None:
    """Without a commit it is refused unless that is allowed."""
    dcp.save(forty(), storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    with pytest.raises(NotCommittedError):
        list_keys(tmp_path / "one")
    assert [each.key for each in list_keys(tmp_path / "one", require_commit=False)] == sorted(forty())


def test_what_single_ranks_saved_is_called_so(tmp_path: Path) -> None:
    """There is no list of the whole then, and nobody is told that the save was interrupted."""
    dcp.save(forty(), storage_writer=FsspecStorageWriter(tmp_path / "one"), no_dist=True, use_collectives=False)
    for call in (list_keys, load_keys):
        with pytest.raises(NotCommittedError, match="rank by rank"):
            call(tmp_path / "one")


ALONE_CODE = """
import json, sys
from dcp_storage import list_keys
from dcp_storage.listing import SavedKey
found = list_keys(sys.argv[1], storage_options=json.loads(sys.argv[2]))
assert all(isinstance(each, SavedKey) for each in found)
print(len(found), "torch" in sys.modules)
"""


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_a_listing_imports_no_torch(request: pytest.FixtureRequest, kind: str) -> None:
    """A fresh interpreter that lists a checkpoint has not imported torch in the end."""
    place = place_of(request, kind)
    dcp.save(forty(), storage_writer=place.writer(), no_dist=True)
    done = subprocess.run(
        [sys.executable, "-c", ALONE_CODE, place.url, json.dumps(place.options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["42", "False"]


def peak(rank: int, world: int, small: str, big: str, budget: int) -> int:
    """Bytes that the peak of a partial load lies above that of a warm-up and what was loaded."""
    options = LoadOptions(memory_budget=budget)
    load_keys(small, options=options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = load_keys(big, slices={"big": (slice(1000, 1100),)}, keys=["w3"], options=options)
    held = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    above: int = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - held
    return above


def test_a_partial_load_takes_little_memory(tmp_path: Path, ranks: RankPool) -> None:
    """Of 100 MiB a slice and a small tensor are loaded: above them, after a warm-up, less than budget and 64 MiB."""
    dcp.save({"w": torch.zeros(MIB // 4)}, storage_writer=FsspecStorageWriter(tmp_path / "small"), no_dist=True)
    state = {"big": torch.zeros(25 * 1024, 1024), "w3": torch.ones(1000)}
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / "big"), no_dist=True)
    budget = 8 * MIB
    (above,) = ranks.run(peak, 1, str(tmp_path / "small"), str(tmp_path / "big"), budget)
    assert above < budget + 64 * MIB
