"""Stock checkpoints through stream extensions (ZStandard), damaged and hostile ones, and stock's other format."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

from dcp_storage import IncompatibleCheckpointError, NotCommittedError, UntrustedDataError
from dcp_storage.errors import CorruptCheckpointError
from dcp_storage.extensions import untransformed
from tests.e2e import ALONE, Place, assert_same, failure, like, load, place_of, small_state
from tests.values import STOCK_TO_US, elements
from tests.values.test_kinds import Toy

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "step-1"))


def state() -> dict[str, Any]:
    numbers = torch.arange(20_000.0).reshape(100, 200)
    return {
        **small_state(),
        "zeros": torch.zeros(500, 100),
        "view": numbers[5:9, 7:11],
        "transposed": numbers[:50, :40].T,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": numbers[:4].to(torch.float8_e5m2),
        "object": ({"lr": 0.1}, "x" * 100_000),
    }


def compressed(wanted: dict[str, Any], place: Place, **options: Any) -> None:
    writer = FileSystemWriter(place.url, _extensions=[ZStandard()], **options)
    dcp.save(wanted, storage_writer=writer, no_dist=True)


def places(place: Place) -> dict[str, Any]:
    return {index.fqn: info for index, info in pickle.loads(place.get(".metadata")).storage_data.items()}


def edited(place: Place, change: Any) -> None:
    """Changes the place of every item in ``.metadata``."""
    metadata = pickle.loads(place.get(".metadata"))
    for index, info in metadata.storage_data.items():
        change(index.fqn, info)
    place.set(".metadata", pickle.dumps(metadata))


@pytest.mark.parametrize("threads", [1, 3])
def test_zstandard_is_undone(threads: int, local: Place) -> None:
    """A compressed stock checkpoint, in one file or several, comes back bit for bit; it is really compressed."""
    wanted = state()
    compressed(wanted, local, thread_count=threads, single_file_per_rank=threads == 1)
    infos = places(local)
    assert {tuple(info.transform_descriptors) for info in infos.values()} == {("stream.zstd/1",)}
    assert infos["zeros"].length < 2000
    assert len(local.shards()) == (1 if threads == 1 else len(infos))
    found = like(wanted)
    STOCK_TO_US.load(found, local)
    assert_same(found, wanted)


def test_zstandard_twice_over(local: Place) -> None:
    """Two extensions, one within the other, are undone in the right order."""
    dcp.save(state(), storage_writer=FileSystemWriter(local.url, _extensions=[ZStandard(), ZStandard()]), no_dist=True)
    found = like(state())
    STOCK_TO_US.load(found, local)
    assert_same(found, state())


def test_zstandard_is_refused_without_leave(local: Place) -> None:
    """A compressed checkpoint is a stock one: by default it is refused, with the option that allows it."""
    compressed({"a": torch.ones(3)}, local)
    error = failure(NotCommittedError, lambda: load({"a": torch.zeros(3)}, local.reader()))
    assert "require_commit=False" in str(error)


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_zstandard_on_other_stores(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A compressed stock checkpoint that was copied into memory or to S3 comes back bit for bit."""
    local, place = Place(str(tmp_path / "here")), place_of(request, kind)
    compressed(state(), local)
    for name in local.files():
        place.set(name, local.get(name))
    found = like(state())
    STOCK_TO_US.load(found, place)
    assert_same(found, state())


def test_the_slice_of_a_compressed_tensor(local: Place) -> None:
    """Only the wanted keys are undone, into a target with gaps and one of another dtype."""
    wanted = state()
    compressed(wanted, local)
    found = {"transposed": torch.zeros(40, 100)[:, ::2], "view": torch.zeros(4, 4, dtype=torch.float64)}
    STOCK_TO_US.load(dict(found), local)
    assert elements(found["transposed"]) == elements(wanted["transposed"])
    assert torch.equal(found["view"], wanted["view"].to(torch.float64))


@pytest.mark.parametrize("at", [0, 5, 17, -3])
@pytest.mark.parametrize("key", ["zeros", "object"])
def test_damaged_bytes(key: str, at: int, local: Place) -> None:
    """A changed byte in the frame is found out, with the key, and the target keeps what it had."""
    compressed(state(), local)
    info = places(local)[key]
    body = bytearray(local.get(info.relative_path))
    body[info.offset + (at if at >= 0 else info.length + at)] ^= 0xFF
    local.set(info.relative_path, bytes(body))
    found = {key: like(state())[key]}
    before = None if found[key] is None else elements(found[key])
    error = failure(CorruptCheckpointError, STOCK_TO_US.refused(found, local))
    assert error.key == key
    assert (None if found[key] is None else elements(found[key])) == before


@pytest.mark.parametrize("left", [0, 3, 0.5, 0.99])
def test_a_frame_that_is_cut_short(left: float, local: Place) -> None:
    """A frame that ends early is found out, also where what there is can be undone."""
    compressed(state(), local)

    def cut(key: str, info: Any) -> None:
        if key == "zeros":
            info.length = int(info.length * left) if left < 1 else int(left)

    edited(local, cut)
    error = failure(CorruptCheckpointError, STOCK_TO_US.refused({"zeros": torch.ones(500, 100)}, local))
    assert error.key == "zeros"


def bomb(size: int) -> bytes:
    """A few kilobytes that unpack to ``size`` zeros."""
    packer = zstandard.ZstdCompressor().compressobj()
    pieces = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*pieces, packer.flush()])


def test_an_item_that_unpacks_to_too_much(local: Place) -> None:
    """A tensor's few kilobytes that unpack to 64 MiB are refused, with the key and the bytes it may have."""
    compressed({"a": torch.ones(100)}, local)
    local.set("__0_0.distcp", bomb(64 << 20))

    def whole(key: str, info: Any) -> None:
        info.offset, info.length = 0, local.files()["__0_0.distcp"]

    edited(local, whole)
    assert local.files()["__0_0.distcp"] < 20_000
    error = failure(UntrustedDataError, STOCK_TO_US.refused({"a": torch.zeros(100)}, local))
    assert error.key == "a"
    assert str(400 + (1 << 20)) in str(error)


def test_the_memory_of_what_unpacks_to_too_much() -> None:
    """Of 256 MiB no more than the limit and a few pieces are ever held."""
    packed = memoryview(bomb(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(UntrustedDataError):
            untransformed(packed, ["stream.zstd/1"], limit=1 << 20, key="a")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    "names", [["stream.mine/1"], ["stream.zstd/2"], ["stream.zstd"], ["/"], ["stream.zstd/1", "stream.mine@here/7"]]
)
def test_an_extension_that_is_not_known(names: list[str], local: Place) -> None:
    """An extension that this torch lacks is named, with the key, before anything changes."""
    compressed({"a": torch.ones(100)}, local)
    edited(local, lambda key, info: setattr(info, "transform_descriptors", names))
    found = torch.zeros(100)
    error = failure(IncompatibleCheckpointError, STOCK_TO_US.refused({"a": found}, local))
    assert error.key == "a"
    assert all(name in str(error) for name in names)
    assert not found.any()


def test_without_the_package(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no package for ZStandard is installed, the error names the one that is missing."""
    compressed({"a": torch.ones(100)}, local)
    monkeypatch.setattr("torch.distributed.checkpoint._extension.zstandard", None)
    monkeypatch.setattr("torch.distributed.checkpoint._extension.pyzstd", None)
    error = failure(IncompatibleCheckpointError, STOCK_TO_US.refused({"a": torch.zeros(100)}, local))
    assert "zstandard" in str(error)


def test_compression_does_not_widen_what_is_trusted(local: Place) -> None:
    """What is unpacked goes through the same list: a class of the user's own is refused until it is allowed."""
    compressed({"a": torch.ones(3).as_subclass(Toy)}, local)
    error = failure(UntrustedDataError, STOCK_TO_US.refused({"a": torch.zeros(3)}, local))
    assert error.key == "a"
    assert "trusted_globals" in str(error)
