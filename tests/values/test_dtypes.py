"""Every dtype that torch can save: bit for bit from every layout to every layout, cast, and quantized."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from tests.e2e import ALONE, Place, place_of, raised_by, save
from tests.values import DTYPES, SAVED, STOCK_TO_US, US, WAYS, Way, elements, of_bits

pytestmark = [
    pytest.mark.filterwarnings(ALONE),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

# torch names them and saves them, but its planner cannot say how large an element is.
BITS = {name for name in SAVED if name.startswith("bits")}
PLAIN = {name: dtype for name, dtype in SAVED.items() if name not in BITS}


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "step-1"))


def test_every_dtype_is_accounted_for() -> None:
    """What is tested are all dtypes of this torch but the quantized ones and those of a few bits, names only."""
    left = {name for name in DTYPES if name not in SAVED}
    assert {name for name in left if not re.fullmatch(r"q(u?int).*|u?int[1-7]", name)} == set()
    floats = {"bfloat16", "float16", "float32", "float64", "float4_e2m1fn_x2", "float8_e8m0fnu"}
    floats |= {f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
    integers = {f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)}
    assert floats | integers | {"bool", "complex32", "complex64", "complex128"} <= set(PLAIN)


def sources(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = of_bits(dtype, 60)
    return {
        "plain": base[:24].reshape(4, 6),
        "transposed": base[:24].reshape(6, 4).T,
        "steps": base[:48].reshape(4, 12)[:, ::2],
        "rows": base[12:36].reshape(4, 6),
        "expanded": base[:6].expand(4, 6),
        "scalar": base[7],
        "empty": base[:0].reshape(0, 6),
    }


def target(shape: torch.Size, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of other random bits, of one of several layouts; and what lies between its elements, if anything."""
    count = shape.numel()
    memory = of_bits(dtype, 2 * count, seed=1)
    if layout == "transposed":
        reverse = tuple(reversed(range(len(shape))))
        return memory[:count].reshape(tuple(reversed(shape))).permute(reverse), memory[count:]
    if layout == "steps" and len(shape):
        wide = memory.reshape(*shape[:-1], 2 * shape[-1])
        return wide[..., ::2], wide[..., 1::2]
    return memory[:count].reshape(shape), memory[count:]


def check_every_layout(way: Way, place: Place, layout: str) -> None:
    state = {f"{name}-{kind}": tensor for name in PLAIN for kind, tensor in sources(PLAIN[name]).items()}
    way.save(dict(state), place)
    found = {key: target(tensor.shape, tensor.dtype, layout) for key, tensor in state.items()}
    beside = {key: elements(other) for key, (_, other) in found.items()}
    way.load({key: tensor for key, (tensor, _) in found.items()}, place)
    for key, tensor in state.items():
        assert elements(found[key][0]) == elements(tensor), key
        assert elements(found[key][1]) == beside[key], key


@pytest.mark.parametrize("layout", ["plain", "transposed", "steps"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_dtype_from_every_layout_to_every_layout(way: Way, layout: str, local: Place) -> None:
    """Random bits of every dtype and source layout arrive in every target layout, and nothing beside it changes."""
    check_every_layout(way, local, layout)


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_every_dtype_on_other_stores(kind: str, request: pytest.FixtureRequest) -> None:
    """The same holds in memory and on S3, into targets with gaps."""
    check_every_layout(US, place_of(request, kind), "steps")


@pytest.mark.parametrize("name", sorted(BITS))
def test_bits_are_refused_by_torch_itself(name: str, local: Place) -> None:
    """A dtype that torch's planner cannot size is refused on save, by stock as by us, and nothing is committed."""
    state = {"a": of_bits(SAVED[name], 8)}
    ours = raised_by(lambda: save(state, local.writer()))[0]
    stock = raised_by(lambda: save(state, FileSystemWriter(f"{local.url}-stock")))[0]  # type: ignore[arg-type]
    assert type(ours) is type(stock) is TypeError
    assert str(ours) == str(stock)
    assert local.commits() == []


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("name", [name for name in PLAIN if name != "float4_e2m1fn_x2"])
@pytest.mark.parametrize("way", [US, STOCK_TO_US], ids=lambda way: way.name)
def test_every_dtype_into_another_one(way: Way, name: str, local: Place) -> None:
    """A target of another dtype gets the values as torch's ``copy_`` casts them, from every dtype."""
    numbers = torch.arange(1, 13, dtype=torch.float32).reshape(3, 4)
    state = {other: numbers.to(dtype) for other, dtype in PLAIN.items() if "float4" not in other}
    way.save(dict(state), local)
    for layout in ("plain", "steps"):
        found = {other: target(numbers.shape, PLAIN[name], layout)[0] for other in state}
        way.load(dict(found), local)
        for other, tensor in state.items():
            assert found[other].dtype is PLAIN[name]
            wanted = torch.zeros(3, 4, dtype=PLAIN[name]).copy_(tensor)
            assert elements(found[other]) == elements(wanted), (other, layout)


def quantized(fill: float) -> dict[str, torch.Tensor]:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([0, 1, 2])
    numbers = torch.full((3, 4), fill) if fill else torch.arange(12.0).reshape(3, 4)
    state = {name: torch.quantize_per_tensor(numbers, 0.25, 3, DTYPES[name]) for name in ("qint8", "quint8", "qint32")}
    for name in ("qint8", "quint8"):
        state[f"{name}-channels"] = torch.quantize_per_channel(numbers, scales, zeros, 0, DTYPES[name])
    return state


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel and:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch's own reader calls it
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_quantized_tensors(way: Way, local: Place) -> None:
    """Quantized tensors come back with their integers, into targets of the same scales and zero points."""
    state = quantized(0.0)
    way.save(dict(state), local)
    found = quantized(0.5)
    way.load(dict(found), local)
    for key, tensor in state.items():
        assert found[key].qscheme() == tensor.qscheme()
        assert torch.equal(found[key].int_repr(), tensor.int_repr()), key
        assert torch.equal(found[key].dequantize(), tensor.dequantize()), key
