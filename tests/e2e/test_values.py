"""Odd values: every dtype, every layout, every key; and targets that are not what was saved."""

from __future__ import annotations

import datetime
import random
import re
from collections import OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcp_storage import CheckpointError, FsspecStorageReader, FsspecStorageWriter, LoadOptions, UntrustedDataError
from tests.e2e import ALONE, Place, assert_same, bits, failure, like, load, place_of, raised_by, save

pytestmark = pytest.mark.filterwarnings(ALONE)

DTYPES = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})
# Quantized types, and types of a few bits, which torch has in name only.
PLAIN = [name for name in DTYPES if not re.fullmatch(r"q.*|bits.*|u?int[1-7]", name)]


@pytest.fixture(params=["local", "moto"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request, request.param)


def of_dtype(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Elements with every bit pattern that random bytes give; booleans are 0 or 1."""
    raw = torch.frombuffer(bytearray(random.Random(count).randbytes(count * dtype.itemsize)), dtype=torch.uint8)
    return (raw % 2 == 1)[:count] if dtype is torch.bool else raw.view(dtype)


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same dtype and shape, every byte another than the tensor's could be by chance."""
    raw = torch.full((tensor.numel() * tensor.element_size(),), 1, dtype=torch.uint8)
    return raw.view(tensor.dtype).reshape(tensor.shape)


def test_the_list_of_dtypes_is_not_empty() -> None:
    """The dtypes that must work are among those that are tested."""
    wanted = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "bool", "int8"}
    assert wanted | {"uint8", "uint16", "uint32", "uint64", "float4_e2m1fn_x2", "float64"} <= set(PLAIN)


def test_every_dtype(place: Place) -> None:
    """Random bits of every plain dtype come back bit for bit: NaNs with payloads, infinities, all."""
    state = {name: of_dtype(getattr(torch, name), 24).reshape(4, 6) for name in PLAIN}
    state |= {f"{name}-scalar": of_dtype(getattr(torch, name), 1).reshape(()) for name in PLAIN}
    save(state, place.writer())
    found = {key: blank(value) for key, value in state.items()}
    load(found, place.reader())
    for key, value in state.items():
        assert found[key].dtype is value.dtype
        assert bits(found[key]) == bits(value), key


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(4 * 5 * 6 * 7, dtype=torch.float32).reshape(4, 5, 6, 7)
    return {
        "scalar": torch.tensor(2.5),
        "one": torch.tensor([3]),
        "empty": torch.zeros(0),
        "empty-2d": torch.zeros(3, 0, 2),
        "transposed": base[0, 0].T,
        "permuted": base.permute(3, 1, 0, 2),
        "channels-last": base.to(memory_format=torch.channels_last),
        "steps": base[::2, 1:4, ::3],
        "columns": base[0, 0][:, 2:4],
        "expanded": torch.arange(5.0).expand(3, 5),
        "flipped": base.flip(0),
        "conjugate": (torch.arange(4.0) * (1 + 2j)).conj(),
        "imaginary": (torch.arange(4.0) * (1 + 2j)).conj().imag,
    }


def test_every_layout(place: Place) -> None:
    """Views, holes, steps, other orders of dimensions, lazy conjugates: their values come back."""
    state: dict[str, Any] = layouts()
    save(state, place.writer())
    found = {key: torch.full(value.shape, -7, dtype=value.dtype) for key, value in state.items()}
    load(found, place.reader())
    for key, value in state.items():
        assert torch.equal(found[key], value.resolve_conj().resolve_neg()), key


def targets(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Targets of one shape in other layouts than the plain one."""

    def wide() -> torch.Tensor:
        return torch.full((*shape[:-1], 2 * shape[-1]), -7, dtype=dtype)

    return {
        "transposed": torch.full(tuple(reversed(shape)), -7, dtype=dtype).permute(*reversed(range(len(shape)))),
        "holes": wide()[..., ::2],
        "slice": wide()[..., shape[-1] :],
        "channels-last": torch.full(shape, -7, dtype=dtype).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.full(shape, -7, dtype=dtype)),
    }


@pytest.mark.parametrize("part_size", [64 << 10, 16 << 20])
def test_targets_of_other_layouts(place: Place, part_size: int) -> None:
    """A target that is transposed, full of holes, a slice or a Parameter gets every element, and nothing beside it."""
    shape = (4, 30, 20, 50)
    plain = torch.arange(120_000.0).reshape(shape)
    for name, source in {"plain": plain, "last": plain.contiguous(memory_format=torch.channels_last)}.items():
        folder = place.child(name)
        save({"a": source}, folder.writer())
        for kind, target in targets(shape, torch.float32).items():
            options = LoadOptions(part_size=part_size, memory_budget=100_000)
            load({"a": target}, folder.reader(options=options))
            assert torch.equal(target.detach(), source), (name, kind)
            if kind == "slice":
                beside = target._base
                assert beside is not None
                assert bool((beside[..., : shape[-1]] == -7).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.complex64])
def test_a_target_of_another_dtype(place: Place, dtype: torch.dtype) -> None:
    """A target of another dtype gets the values as ``copy_`` casts them, whole and in slices."""
    source = torch.arange(-50, 50, dtype=torch.float32).reshape(10, 10) * 1.75
    save({"a": source}, place.writer())
    target = torch.full((10, 10), 3, dtype=dtype)
    load({"a": target}, place.reader())
    assert bits(target) == bits(torch.empty(10, 10, dtype=dtype).copy_(source))


def test_a_small_view_of_a_big_storage(place: Place) -> None:
    """A view of a few elements makes a small file."""
    big = torch.arange(4_000_000, dtype=torch.float32)
    save({"view": big[1_000_000:1_000_010], "columns": big.reshape(2000, 2000)[:3, :5]}, place.writer())
    assert sum(place.files().values()) < 20_000
    found = {"view": torch.zeros(10), "columns": torch.zeros(3, 5)}
    load(found, place.reader())
    assert torch.equal(found["view"], big[1_000_000:1_000_010])
    assert torch.equal(found["columns"], big.reshape(2000, 2000)[:3, :5])


def test_tied_tensors_stay_tied(place: Place) -> None:
    """A module whose weights are tied gets them back, still tied."""

    def tied(fill: float) -> Any:
        one, other = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.constant_(one.weight, fill)
        other.weight = one.weight
        return torch.nn.Sequential(one, other)

    save({"model": tied(2.5).state_dict()}, place.writer())
    model = tied(0.0)
    load({"model": model.state_dict()}, place.reader())
    assert model[1].weight is model[0].weight
    assert model[0].weight.unique().tolist() == [2.5]


def test_parameters_and_optimizers(place: Place) -> None:
    """A module and its optimizer, saved as they hand out their state, go on as before."""

    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(7, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place.writer())
    other, others = trained(2)
    state = {"model": other.state_dict(), "optimizer": others.state_dict()}
    load(state, place.reader())
    others.load_state_dict(state["optimizer"])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(one) == bits(two)
    assert_same(others.state_dict()["state"], optimizer.state_dict()["state"])


def test_python_objects(place: Place) -> None:
    """What people keep in a training state comes back equal and of its class, without any option."""
    counts: defaultdict[str, list[int]] = defaultdict(list)
    counts["a"].append(1)
    generator = np.random.default_rng(5)
    state: dict[str, Any] = {
        "int": 10**40,
        "float": 0.1,
        "none": None,
        "text": "grün 日本",
        "bytes": b"\0\xff",
        "tuple": (1, (2.5, "x")),
        "set": {1, 2},
        "list": [1, [2, [3]]],
        "deque": deque([1, 2], maxlen=5),
        "defaultdict": (counts,),
        "ordered": (OrderedDict(b=1, a=2),),
        "path": PurePosixPath("a/b"),
        "here": Path("a/b"),
        "moment": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "span": datetime.timedelta(seconds=5),
        "slice": slice(1, 10, 2),
        "range": range(3, 9, 2),
        "python-rng": random.Random(3).getstate(),
        "numpy-array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "numpy-scalar": np.float64(2.5),
        "numpy-legacy": np.random.RandomState(4).get_state(),
        "numpy-rng": (generator.bit_generator.state,),
        "torch-rng": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    }
    save(state, place.writer())
    found: dict[str, Any] = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
    load(found, place.reader())
    for key, value in state.items():
        assert type(found[key]) is type(value), key
        if key == "numpy-array":
            assert (found[key].dtype, found[key].tolist()) == (value.dtype, value.tolist())
        elif key == "numpy-legacy":
            assert found[key][1].tolist() == value[1].tolist()
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value)
        else:
            assert found[key] == value, key
    assert found["deque"].maxlen == 5
    assert found["defaultdict"][0].default_factory is list


class Own:
    """A class of the user's own."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Own

    __hash__ = None  # type: ignore[assignment]


def test_a_class_that_nobody_allowed(place: Place) -> None:
    """An object of the user's own class is refused with the line that would allow it, and loads with that line."""
    save({"own": Own(), "a": torch.ones(3)}, place.writer())
    error = failure(UntrustedDataError, lambda: load({"own": None, "a": torch.zeros(3)}, place.reader()))
    assert error.name == f"{__name__}.Own"
    assert error.key == "own"
    assert "trusted_globals" in str(error)
    for trusted in (Own, f"{__name__}.Own"):
        found = {"own": None, "a": torch.zeros(3)}
        load(found, place.reader(options=LoadOptions(trusted_globals=(trusted,))))
        assert found["own"] == Own()


def test_nested_and_odd_keys(place: Place) -> None:
    """Keys with dots, slashes, other alphabets, nothing or 1,000 characters are each their own."""
    state = {
        "a.b": torch.tensor([1]),
        "a": {"c": torch.tensor([2]), "list": [torch.tensor([3]), {"x": torch.tensor([4])}, "text"]},
        "a/b": torch.tensor([5]),
        "../up": torch.tensor([6]),
        "grün 日本": torch.tensor([7]),
        "": torch.tensor([8]),
        "n" * 1000: torch.tensor([9]),
        "new\nline": torch.tensor([10]),
        "quote'\"": 11,
    }
    save(state, place.writer())
    found = like(state)
    load(found, place.reader())
    assert_same(found, state)


def test_keys_that_flatten_to_the_same(place: Place) -> None:
    """``{"a.b": …, "a": {"b": …}}``: torch gives both one key; the save fails, or both values come back."""
    state = {"a.b": torch.tensor([1]), "a": {"b": torch.tensor([2])}}
    try:
        save(state, place.writer())
    except (dcp.CheckpointException, ValueError):
        assert place.commits() == []
        return
    found = like(state)
    load(found, place.reader())
    assert_same(found, state)


def test_an_empty_state(place: Place) -> None:
    """An empty state dict is a checkpoint like any other: committed, loadable, without a shard."""
    save({}, place.writer())
    assert place.commits() == [".commit"]
    assert place.shards() == []
    found: dict[str, Any] = {}
    load(found, place.reader())
    assert found == {}


def test_a_part_of_the_keys(place: Place) -> None:
    """A template of some keys gets those and no others, and reads about their bytes."""
    state = {f"tensor-{number}": torch.full((50_000,), float(number)) for number in range(20)}
    save(state, place.writer())
    found = {"tensor-3": torch.zeros(50_000), "tensor-17": torch.zeros(50_000)}
    reader = place.reader()
    load(found, reader)
    assert_same(found, {key: state[key] for key in found})
    assert reader.report is not None
    assert reader.report.loaded == ["tensor-17", "tensor-3"]
    assert reader.report.bytes_needed == 2 * 200_000
    assert reader.report.bytes_read < 2 * 200_000 + place.files()[".manifest"] + 4096


def test_a_key_that_was_not_saved(place: Place) -> None:
    """A key that the checkpoint lacks is the planner's error; nothing was changed; a partial load gets the rest."""
    save({"a": torch.ones(3)}, place.writer())
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    error = raised_by(lambda: load(found, place.reader()))[0]
    assert "b" in str(error)
    assert found["a"].tolist() == [0, 0, 0]
    load(found, place.reader(), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, 1, 1], [0, 0, 0])


def test_a_shape_that_was_not_saved(place: Place) -> None:
    """Another shape than the saved one is an error, and nothing was changed."""
    save({"a": torch.ones(3, 4)}, place.writer())
    found = {"a": torch.zeros(4, 3)}
    assert "a" in str(raised_by(lambda: load(found, place.reader()))[0])
    assert bool((found["a"] == 0).all())


def test_a_sparse_tensor(tmp_path: Path) -> None:
    """A sparse tensor travels whole, as objects do, or the save is refused; it is never lost in silence."""
    try:
        save({"a": torch.eye(4).to_sparse()}, FsspecStorageWriter(tmp_path / "one"))
    except dcp.CheckpointException:
        assert not (tmp_path / "one" / ".commit").exists()
        return
    found = {"a": torch.zeros(4, 4)}
    load(found, FsspecStorageReader(tmp_path / "one"))
    assert torch.equal(found["a"], torch.eye(4))


def test_a_sparse_target_is_refused_not_left_empty(tmp_path: Path) -> None:
    """A target that cannot be filled in place is named; the load does not report success with zeros in it."""
    save({"a": torch.eye(4).to_sparse()}, FsspecStorageWriter(tmp_path / "one"))
    target = {"a": torch.zeros(4, 4).to_sparse()}
    error = raised_by(lambda: load(target, FsspecStorageReader(tmp_path / "one")))[0]
    assert isinstance(error, CheckpointError)
    assert (error.kind, error.key) == ("unsupported", "a")


def test_an_expanded_target_is_named(tmp_path: Path) -> None:
    """A target whose elements share memory cannot hold what is read: the error names its key."""
    save({"a": torch.arange(3000.0).reshape(30, 100)}, FsspecStorageWriter(tmp_path / "one"))
    target = {"a": torch.zeros(1, 100).expand(30, 100)}
    error = raised_by(lambda: load(target, FsspecStorageReader(tmp_path / "one")))[0]
    assert isinstance(error, CheckpointError)
    assert error.key == "a"


def test_a_key_that_no_text_can_hold(tmp_path: Path) -> None:
    """A key with a lone surrogate is named before anything of it is written, and nothing is left but the claim."""
    place = tmp_path / "one"
    error = raised_by(lambda: save({"a\udcff": torch.ones(3)}, FsspecStorageWriter(place)))[0]
    assert isinstance(error, CheckpointError)
    assert error.key == "a\udcff"
    assert sorted(file.name for file in place.iterdir()) == [".claim"]
