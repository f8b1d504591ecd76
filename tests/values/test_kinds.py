"""What a tensor can be besides its numbers: a parameter, tied, a view, of another class, or without any data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils._pytree import tree_map

from dcp_storage import FsspecStorageReader, FsspecStorageWriter, UntrustedDataError
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, failure, place_of
from tests.values import US, WAYS, Way, elements

pytestmark = pytest.mark.filterwarnings(ALONE)

ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "step-1"))


@ways
def test_parameters_and_buffers(way: Way, local: Place) -> None:
    """Parameters and buffers are filled in place: the same objects, their flags and gradients as they were."""
    state: dict[str, Any] = {
        "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.arange(4.0)),
        "leaf": torch.arange(5.0).requires_grad_(),
        "inner": torch.arange(5.0).requires_grad_() * 2,
    }
    way.save(dict(state), local)
    found = {
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
        "frozen": torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.zeros(4)),
        "leaf": torch.zeros(5, requires_grad=True),
        "inner": torch.zeros(5),
    }
    found["parameter"].grad = torch.full((2, 3), 7.0)
    template: dict[str, Any] = dict(found)
    way.load(template, local)
    for key, tensor in state.items():
        assert template[key] is found[key]
        assert elements(found[key]) == elements(tensor), key
    assert [tensor.requires_grad for tensor in found.values()] == [True, False, False, True, False]
    assert type(found["buffer"]) is type(state["buffer"])
    assert found["parameter"].grad.tolist() == [[7.0] * 3] * 2


def test_attributes_of_a_tensor_stay_behind(local: Place) -> None:
    """An attribute that somebody hung on a tensor is not saved, and a target keeps its own."""
    tensor: Any = torch.arange(3.0)
    tensor.note = object()
    US.save({"a": tensor}, local)
    found: Any = torch.zeros(3)
    found.note = "kept"
    US.load({"a": found}, local)
    assert found.tolist() == [0, 1, 2]
    assert found.note == "kept"


def big() -> torch.Tensor:
    return torch.arange(1_000_000, dtype=torch.float32)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "slice": lambda: big()[500_000:500_010],
    "every 100,000th": lambda: big()[::100_000],
    "column": lambda: big().reshape(1000, 1000)[:10, 999],
    "corner": lambda: big().reshape(1000, 1000)[:2, :5],
    "corner, transposed": lambda: big().reshape(1000, 1000)[:2, :5].T,
    "diagonal": lambda: big().reshape(1000, 1000).diagonal()[:10],
    "scalar": lambda: big()[77].expand(10),
    "unfolded": lambda: big()[:6].unfold(0, 2, 1),
}


@ways
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_big_storage_is_small(way: Way, name: str, local: Place) -> None:
    """Of a view the file holds its ten elements and what torch.save puts around them, not the storage of 4 MB."""
    view = VIEWS[name]()
    way.save({"view": view}, local)
    sizes = {file: size for file, size in local.files().items() if file.endswith(".distcp")}
    assert 40 <= sum(sizes.values()) < 40 + 2500
    found = torch.zeros(view.shape)
    way.load({"view": found}, local)
    assert torch.equal(found, view)


def test_strides_on_the_store(local: Place) -> None:
    """A dense tensor keeps its order of dimensions in the file; one with holes or repeats is stored without them."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    state: dict[str, Any] = {
        "contiguous": base,
        "channels-last": base.contiguous(memory_format=torch.channels_last),
        "permuted": base.permute(3, 1, 0, 2),
        "holes": base[..., ::2],
        "expanded": torch.arange(5.0).expand(1000, 5),
    }
    US.save(dict(state), local)
    items = {item["key"]: item for item in local.manifest()["items"]}
    assert {key: tuple(item["stride"]) for key, item in items.items() if "stride" in item} == {
        "channels-last": (60, 1, 15, 3),
        "permuted": (1, 20, 60, 5),
    }
    for key, tensor in state.items():
        assert items[key]["payload_length"] == 4 * tensor.numel(), key


def tied(fill: float) -> Any:
    one, other = torch.nn.Linear(50, 50, bias=False), torch.nn.Linear(50, 50, bias=False)
    torch.nn.init.constant_(one.weight, fill)
    other.weight = one.weight
    return torch.nn.Sequential(one, other)


@ways
@pytest.mark.parametrize("getter", ["state_dict", "get_model_state_dict"])
def test_tied_weights(way: Way, getter: str, local: Place) -> None:
    """Tied weights have all their keys, ours hold the bytes once, and they are tied after ``load_state_dict``."""
    saved = tied(2.5)
    way.save({"model": saved.state_dict() if getter == "state_dict" else get_model_state_dict(saved)}, local)
    least = 10_000 if way.ours else 2 * 10_000
    assert least < sum(local.files()[name] for name in local.shards()) < least + 5000
    model = tied(0.0)
    state = {"model": model.state_dict() if getter == "state_dict" else get_model_state_dict(model)}
    assert list(state["model"]) == ["0.weight", "1.weight"]
    way.load(state, local)
    if getter == "state_dict":
        model.load_state_dict(state["model"])
    else:
        set_model_state_dict(model, state["model"])
    assert model[1].weight is model[0].weight
    assert set(model[0].weight.flatten().tolist()) == {2.5}


@ways
def test_tensors_in_an_object(way: Way, local: Place) -> None:
    """Tensors in one Python object share their memory after the load as they did before the save."""
    shared = torch.arange(100.0)
    way.save({"pair": (shared, shared[10:20], {"again": shared})}, local)
    found: dict[str, Any] = {"pair": None}
    way.load(found, local)
    whole, part, again = found["pair"][0], found["pair"][1], found["pair"][2]["again"]
    assert torch.equal(whole, torch.arange(100.0))
    part.fill_(-1)
    assert whole[10:20].tolist() == again[10:20].tolist() == [-1] * 10
    assert whole[20] == 20


class Toy(torch.Tensor):
    """A class of the user's own around an ordinary tensor."""


class Scaled(torch.Tensor):
    """A wrapper in the manner of float8 libraries: eight-bit numbers and their scale, seen as one float32 tensor."""

    small: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Scaled], small: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(
            cls, small.shape, strides=small.stride(), dtype=torch.float32, device=small.device
        )
        made.small, made.scale = small, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["small", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], meta: None, size: object, stride: object) -> Scaled:
        return Scaled(parts["small"], parts["scale"])

    def numbers(self) -> torch.Tensor:
        return self.small.to(torch.float32) * self.scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it as an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        ops, kwargs = torch.ops.aten, kwargs or {}
        if func in (ops.detach.default, ops.clone.default, ops.slice.Tensor):
            return Scaled(func(args[0].small, *args[1:], **kwargs), args[0].scale)
        if func is ops.copy_.default and all(isinstance(arg, Scaled) for arg in args[:2]):
            args[0].small.copy_(args[1].small)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*tree_map(lambda arg: arg.numbers() if isinstance(arg, Scaled) else arg, args), **kwargs)


def scaled(fill: float, scale: float) -> Scaled:
    return Scaled(torch.full((4, 3), fill).to(torch.float8_e4m3fn), torch.tensor(scale))


def trusted_by_and_by(load: Callable[[list[str]], None]) -> list[str]:
    """Loads, each time with the line that the last error asked for, until nothing is refused; all lines."""
    lines: list[str] = []
    while len(lines) < 4:
        attempt = functools.partial(load, list(lines))
        try:
            attempt()
        except dcp.CheckpointException:
            error = failure(UntrustedDataError, attempt)
            assert error.name is not None
            assert error.key == "a"
            assert f'LoadOptions(trusted_globals=["{error.name}"])' in str(error)
            lines.append(error.name)
        else:
            return lines
    raise AssertionError(f"still refused with {lines}")


def sample(kind: str, fill: float) -> torch.Tensor:
    return torch.full((4, 3), fill).as_subclass(Toy) if kind == "Toy" else scaled(fill, 0.5)


@pytest.mark.parametrize("kind", ["Toy", "Scaled"])
@pytest.mark.parametrize("store", ["local", "stock", "memory", "moto"])
def test_tensors_of_other_classes(kind: str, store: str, request: pytest.FixtureRequest) -> None:
    """A tensor of a class of the user's own is refused with the line that allows it, and loads with such lines."""
    way = WAYS[2] if store == "stock" else US
    place = place_of(request, "local" if store == "stock" else store)
    way.save({"a": sample(kind, 2.0)}, place)
    found = sample(kind, 0.0)
    lines = trusted_by_and_by(lambda trusted: way.load({"a": found}, place, trusted_globals=tuple(trusted)))
    assert lines[-1] == f"{__name__}.{kind}"
    assert type(found).__name__ == kind
    if isinstance(found, Scaled):
        assert elements(found.small) == elements(scaled(2.0, 0.5).small)
        assert found.scale.item() == 0.5
        assert found.small.dtype is torch.float8_e4m3fn
    else:
        assert set(found.as_subclass(torch.Tensor).flatten().tolist()) == {2.0}
    plain = torch.zeros(4, 3)
    way.load({"a": plain}, place, trusted_globals=tuple(lines))
    assert set(plain.flatten().tolist()) == {2.0 if kind == "Toy" else 1.0}


def test_a_plain_tensor_into_one_of_another_class(local: Place) -> None:
    """A plain tensor on the store fills a target of the user's own class; nothing has to be trusted for that."""
    US.save({"a": torch.arange(12.0).reshape(4, 3)}, local)
    found = torch.zeros(4, 3).as_subclass(Toy)
    US.load({"a": found}, local)
    assert type(found) is Toy
    assert found.flatten().tolist() == list(map(float, range(12)))


def load_onto_meta(rank: int, world: int, path: str) -> None:
    """On one rank: saves, and loads into a model that has no data yet."""
    dcp.save({"model": torch.nn.Linear(5, 3).state_dict() | {"bias": torch.arange(3.0)}}, storage_writer=_writer(path))
    with torch.device("meta"):
        model = torch.nn.Linear(5, 3)
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=FsspecStorageReader(path))
    assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
    model.load_state_dict(state["model"], assign=True)
    assert model.bias.tolist() == [0, 1, 2]


def _writer(path: str) -> FsspecStorageWriter:
    return FsspecStorageWriter(path)


def test_a_model_on_the_meta_device_is_filled(local: Place, ranks: RankPool) -> None:
    """A template of meta tensors, as large models are built, comes back as real tensors with the saved numbers."""
    ranks.run(load_onto_meta, 1, local.url)
