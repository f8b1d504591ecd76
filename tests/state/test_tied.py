"""Tied weights: their bytes are stored once, every reader finds every name, and ties stay what the model makes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from dcp_storage import (
    DCP,
    CorruptCheckpointError,
    FsspecStorageReader,
    FsspecStorageWriter,
    IncompatibleCheckpointError,
    LoadOptions,
    adopt,
    describe,
    load_keys,
    verify,
)
from dcp_storage import copy as copy_checkpoint
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE
from tests.state import Tied, assert_equal, stepped

pytestmark = pytest.mark.filterwarnings(ALONE)


def places(folder: Path | str, *keys: str) -> list[list[tuple[str, int, int]]]:
    """Of each key the places of its chunks, by offset: file, first byte, bytes. Read from the manifest's JSON."""
    manifest = json.loads((Path(folder) / ".manifest").read_text(encoding="utf-8"))
    out = []
    for key in keys:
        items = sorted((i for i in manifest["items"] if i["key"] == key), key=lambda i: i.get("offsets", []))
        out.append([(manifest["files"][i["file"]]["name"], i["offset"], i["length"]) for i in items])
    return out


def untied(seed: int, same_as: Tied | None = None) -> Tied:
    """The model with two weights where the other has one; of the same numbers as ``same_as`` where that is given."""
    model = Tied(seed)
    if same_as is not None:
        model.load_state_dict(same_as.state_dict())
    values = model.embed.weight.detach() if same_as is not None else torch.full((6, 4), 9.0)
    model.out.weight = nn.Parameter(values.clone())
    return model


@pytest.mark.parametrize("how", ["DCP.save", "DCP.async_save", "dcp.save"])
def test_the_bytes_are_there_once(tmp_path: Path, how: str) -> None:
    """Both names have one place in the shard, and stock torch's reader and ours fill both from it."""
    model = Tied(1)
    if how == "DCP.save":
        DCP.save({"model": model}, checkpoint_id=tmp_path / "c")
    elif how == "DCP.async_save":
        DCP.async_save({"model": model}, checkpoint_id=tmp_path / "c").wait(60)
    else:
        dcp.save({"model": model.state_dict()}, storage_writer=FsspecStorageWriter(tmp_path / "c"))
    (one,), (other,) = places(tmp_path / "c", "model.embed.weight", "model.out.weight")
    assert one == other
    for reader in (dcp.FileSystemReader(tmp_path / "c"), FsspecStorageReader(tmp_path / "c")):
        found = {"model": {"embed.weight": torch.zeros(6, 4), "out.weight": torch.zeros(6, 4)}}
        dcp.load(found, storage_reader=reader)
        assert torch.equal(found["model"]["embed.weight"], model.embed.weight)
        assert torch.equal(found["model"]["out.weight"], model.embed.weight)
    assert torch.equal(load_keys(tmp_path / "c", keys=["model.out.weight"])["model.out.weight"], model.embed.weight)


def test_the_tools_take_it_as_it_is(tmp_path: Path) -> None:
    """It verifies to the last byte, is described and copied; damage in the shared bytes is found under either name."""
    DCP.save({"model": Tied(1)}, checkpoint_id=tmp_path / "c")
    report = verify(tmp_path / "c", depth="data")
    assert report.ok
    described = describe(tmp_path / "c")
    assert described.keys["model.embed.weight"].nbytes == described.keys["model.out.weight"].nbytes > 96
    assert copy_checkpoint(tmp_path / "c", tmp_path / "d").ok
    assert verify(tmp_path / "d", depth="data").ok
    ((name, offset, length),) = places(tmp_path / "d", "model.out.weight")[0]
    body = bytearray((tmp_path / "d" / name).read_bytes())
    at = body.index(Tied(1).embed.weight.detach().numpy().tobytes(), offset, offset + length)
    body[at] ^= 1
    (tmp_path / "d" / name).write_bytes(body)
    assert not verify(tmp_path / "d", depth="data").ok
    for key in ("model.embed.weight", "model.out.weight"):
        with pytest.raises(CorruptCheckpointError) as caught:
            load_keys(tmp_path / "d", keys=[key])
        assert caught.value.key == key


@pytest.mark.parametrize("data", [False, True])
def test_another_writer_may_do_the_same(tmp_path: Path, data: bool) -> None:
    """A checkpoint of stock's form in which two keys have one place is adopted, verified and loaded."""
    DCP.save({"model": Tied(1)}, checkpoint_id=tmp_path / "c")
    for name in (".commit", ".manifest"):
        (tmp_path / "c" / name).unlink()
    assert adopt(tmp_path / "c", data=data).ok
    assert verify(tmp_path / "c", depth="data").ok
    found = Tied(2)
    DCP.load({"model": found}, checkpoint_id=tmp_path / "c")
    assert_equal(dict(found.state_dict()), dict(Tied(1).state_dict()))


def test_an_optimizer_goes_on_with_tied_weights(tmp_path: Path) -> None:
    """Moments pair with the one parameter that both names are: the next steps are those of the run that was saved."""

    def step(model: Tied, optimizer: AdamW) -> None:
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, found = Tied(1), Tied(2)
    optimizer, other = AdamW(model.parameters(), lr=0.1), AdamW(found.parameters(), lr=0.3)
    step(model, optimizer)
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    DCP.load({"model": found, "optimizer": other}, checkpoint_id=tmp_path / "c")
    assert found.out.weight is found.embed.weight
    assert_equal(other.state_dict(), optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(found, other)
    assert_equal(dict(found.state_dict()), dict(model.state_dict()))


def test_a_model_without_the_tie(tmp_path: Path) -> None:
    """It gets the numbers under both names, in two tensors; that the second has no moments is said."""
    model = Tied(1)
    optimizer = AdamW(model.parameters())
    stepped(model, optimizer)
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    found = untied(2)
    other = AdamW(found.parameters())
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": found, "optimizer": other}, checkpoint_id=tmp_path / "c")
    assert caught.value.missing == ["optimizer.state.out.weight"]
    DCP.load({"model": found, "optimizer": other}, checkpoint_id=tmp_path / "c", strict=False)
    assert found.out.weight is not found.embed.weight
    assert torch.equal(found.out.weight, model.embed.weight)
    assert torch.equal(found.embed.weight, model.embed.weight)
    assert torch.equal(other.state[found.embed.weight]["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"])
    assert found.out.weight not in other.state


def test_two_weights_for_one(tmp_path: Path) -> None:
    """A tied model takes two equal tensors; of two different ones it does not drop one in silence."""
    DCP.save({"model": untied(3, same_as=Tied(1))}, checkpoint_id=tmp_path / "equal")
    one, other = places(tmp_path / "equal", "model.embed.weight", "model.out.weight")
    assert one != other
    found = Tied(2)
    DCP.load({"model": found}, checkpoint_id=tmp_path / "equal")
    assert torch.equal(found.out.weight, Tied(1).embed.weight)

    source = untied(3)
    DCP.save({"model": source}, checkpoint_id=tmp_path / "different")
    before = copy.deepcopy(found.state_dict())
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": found}, checkpoint_id=tmp_path / "different")
    assert caught.value.unexpected == ["model.out.weight"]
    assert_equal(found.state_dict(), before)
    report = DCP.load({"model": found}, checkpoint_id=tmp_path / "different", strict=False)
    assert report.unexpected == ["model.out.weight"]
    assert torch.equal(found.embed.weight, source.embed.weight)


def test_what_begins_at_one_address_is_not_one_tensor(tmp_path: Path) -> None:
    """Views of one memory that differ in shape, steps, dtype or a mark are each saved as what they are."""
    base = torch.arange(16.0).reshape(4, 4)
    whole = torch.tensor([[1 + 2j, 3 - 1j], [0j, 5 + 5j]])
    state = {
        "base": base, "turned": base.T, "rows": base[:2], "flat": base.reshape(-1), "bits": base.view(torch.int32),
        "every": base.reshape(-1)[::2], "again": base.T.T, "z": whole, "conj": whole.conj(), "imag": whole.imag,
        "neg": whole.conj().imag, "none": base[:0], "nothing": base[:, :0],
    }  # fmt: skip
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / "c"))
    found = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    dcp.load(found, storage_reader=FsspecStorageReader(tmp_path / "c"))
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    (one,), (other,), (third,) = places(tmp_path / "c", "base", "again", "turned")
    assert one == other != third


class Numbering(DefaultSavePlanner):
    """Saves every tensor with the number of its name added, which makes different values of one tensor."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        if isinstance(object, torch.Tensor):
            return object + int(write_item.index.fqn)
        return super().transform_object(write_item, object)


def test_a_planner_that_makes_its_values(tmp_path: Path) -> None:
    """What a planner makes of one tensor under two names is saved under each name as the planner made it."""
    weight = torch.zeros(3)
    writer = FsspecStorageWriter(tmp_path / "c")
    dcp.save({"1": weight, "2": weight}, storage_writer=writer, planner=Numbering())
    found = {"1": torch.zeros(3), "2": torch.zeros(3)}
    dcp.load(found, storage_reader=FsspecStorageReader(tmp_path / "c"))
    assert_equal(found, {"1": torch.ones(3), "2": torch.full((3,), 2.0)})


def on_ranks(rank: int, world: int, path: str, kind: str) -> Any:
    """Saves a tied model on several ranks; loads it on them again, also as two keys that all ranks share."""
    model = Tied(1)
    wrapped: nn.Module = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = AdamW(wrapped.parameters(), lr=0.1)
    wrapped(torch.arange(6)).square().sum().backward()
    optimizer.step()
    DCP.save({"model": wrapped, "optimizer": optimizer}, checkpoint_id=path)
    found = Tied(2)
    if kind == "fsdp":
        fully_shard(found)
    other = AdamW(found.parameters(), lr=0.2)
    DCP.load({"model": found, "optimizer": other}, checkpoint_id=path)
    assert found.out.weight is found.embed.weight
    assert_equal(other.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])
    for parameter, twin in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(_whole(twin), _whole(parameter))
        if parameter in optimizer.state:
            assert torch.equal(_whole(other.state[twin]["exp_avg"]), _whole(optimizer.state[parameter]["exp_avg"]))
    weights = {"embed.weight": torch.zeros(6, 4), "out.weight": torch.zeros(6, 4)}
    options = LoadOptions(share_reads=True)
    report = DCP.load({"model": weights}, checkpoint_id=path, options=options, keys=[f"model.{key}" for key in weights])
    return _whole(model.embed.weight), weights, report.shared


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_several_ranks(tmp_path: Path, ranks: RankPool, kind: str) -> None:
    """Replicated or sharded, each chunk has one place for both names, although torch spreads replicas over ranks."""
    path = str(tmp_path / "c")
    out = ranks.run(on_ranks, 2, path, kind)
    one, other = places(path, "model.embed.weight", "model.out.weight")
    assert one == other
    assert len(one) == (1 if kind == "ddp" else 2)
    alone = untied(5)
    DCP.load({"model": alone}, checkpoint_id=path)
    for whole, weights, shared in out:
        assert shared
        assert_equal(weights, {"embed.weight": whole, "out.weight": whole})
        assert torch.equal(alone.out.weight, whole)
        assert torch.equal(alone.embed.weight, whole)
    found = {"model": {"embed.weight": torch.zeros(6, 4), "out.weight": torch.zeros(6, 4)}}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    assert_equal(found["model"], out[0][1])
