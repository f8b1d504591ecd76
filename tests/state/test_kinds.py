"""Every kind of thing that may be in a training state, saved and loaded in one process."""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer

from dcp_storage import DCP, CheckpointError, FsspecStorageReader, PerRank, RngState
from tests.e2e import ALONE
from tests.state import Tied, assert_equal, net, stepped

Make = Callable[[nn.Module], Optimizer]


def two_groups(model: nn.Module) -> Optimizer:
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5}, {"params": []}, {"params": rest, "lr": 0.25}]
    return AdamW(groups)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.1),
    "two groups, one empty": two_groups,
    "sgd with momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "plain sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "foreach": lambda model: AdamW(model.parameters(), lr=0.1, foreach=True),
    "fused": lambda model: AdamW(model.parameters(), lr=0.1, fused=True),
    "amsgrad, lr a tensor": lambda model: Adam(
        model.parameters(), lr=torch.tensor(0.1), amsgrad=True, capturable=False
    ),
    "named parameters": lambda model: AdamW(model.named_parameters(), lr=0.1),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}


def step(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        inputs = torch.linspace(-1, 1, 20).reshape(5, 4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    else:
        stepped(model, optimizer)


@pytest.mark.parametrize(
    ("name", "saved", "loading"),
    [(name, saved, not saved) for name in OPTIMIZERS for saved in (True, False)]
    + [
        (name, same, same) for name in ("adamw", "two groups, one empty", "sgd with momentum") for same in (True, False)
    ],
)
def test_an_optimizer_is_what_was_saved(tmp_path: Path, name: str, saved: bool, loading: bool) -> None:
    """State and groups of the optimizer are those that were saved, whether either of the two has stepped or not."""
    model = net(1)
    optimizer = OPTIMIZERS[name](model)
    if saved:
        step(model, optimizer)
    wanted = copy.deepcopy(optimizer.state_dict())
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    assert_equal(optimizer.state_dict(), wanted)

    other = net(2)
    found = OPTIMIZERS[name](other)
    for group in found.param_groups:
        group["lr"] = 7.0
    if loading:
        step(other, found)
    DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c")
    assert_equal(found.state_dict(), wanted)
    assert_equal(other.state_dict(), model.state_dict())


def test_saving_does_not_make_an_optimizer_step(tmp_path: Path) -> None:
    """An optimizer that has not stepped is left without state, and its parameters without gradients."""
    model = net()
    optimizer = AdamW(model.parameters())
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_that_never_had_a_gradient(tmp_path: Path) -> None:
    """It has no state on the store, and none after loading, also where the loading optimizer had some."""
    model, other = net(1), net(2)
    optimizer, found = (AdamW(m.parameters()) for m in (model, other))
    bias: Any = model[0].bias
    model[0].weight.grad = torch.ones_like(bias.new_zeros(8, 4))
    optimizer.step()
    stepped(other, found)
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c")
    assert bias not in optimizer.state
    assert list(found.state) == [other[0].weight]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    """Optimizers are paired with models by their parameters, also one over two models, one over none, in a list."""

    def make(seed: int) -> dict[str, Any]:
        first, second = net(seed), net(seed + 1)
        loose = [torch.full((3,), float(seed), requires_grad=True)]
        found = {
            "nets": {"a": first, "b": second},
            "one": AdamW(first.parameters(), lr=seed),
            "both": SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.5),
            "list": [AdamW(second.parameters()), AdamW(loose)],
            "loose": loose,
        }
        stepped(first, found["one"])  # type: ignore[arg-type]
        stepped(nn.ModuleList([first, second]), found["both"])  # type: ignore[arg-type]
        loose[0].grad = torch.ones(3)
        found["list"][1].step()  # type: ignore[index]
        return found

    saved, found = make(1), make(5)
    report = DCP.save(saved, checkpoint_id=tmp_path / "c")
    DCP.load(found, checkpoint_id=tmp_path / "c")
    assert report.ok
    for name in ("one", "both"):
        assert_equal(found[name].state_dict(), saved[name].state_dict())
    for number in range(2):
        assert_equal(found["list"][number].state_dict(), saved["list"][number].state_dict())
    for name in ("a", "b"):
        assert_equal(found["nets"][name].state_dict(), saved["nets"][name].state_dict())
    keys = set(FsspecStorageReader(tmp_path / "c").read_metadata().state_dict_metadata)
    assert {
        "one.state.0.weight.exp_avg",
        "both.state.nets.b.0.weight.momentum_buffer",
        "list.1.state.0.exp_avg",
    } <= keys


def test_tied_frozen_and_not_persistent(tmp_path: Path) -> None:
    """Tied weights stay one tensor, frozen parameters come back, a buffer that is not persistent keeps what it has."""
    saved, found = Tied(1), Tied(2)
    DCP.save({"model": saved}, checkpoint_id=tmp_path / "c")
    place = found.embed.weight.data_ptr()
    DCP.load({"model": found}, checkpoint_id=tmp_path / "c")
    assert found.out.weight is found.embed.weight
    assert found.embed.weight.data_ptr() == place
    assert_equal(found.state_dict(), saved.state_dict())
    assert torch.equal(found.inner.bias, saved.inner.bias)
    assert not found.inner.bias.requires_grad
    assert torch.equal(found.scratch, torch.full((3,), 2.0))


def test_extra_state_and_hooks(tmp_path: Path) -> None:
    """What a module saves through get_extra_state comes back through set_extra_state."""

    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    saved: Any = nn.Sequential(Counting(2, 2))
    found: Any = nn.Sequential(Counting(2, 2))
    saved[0].seen = 5
    DCP.save({"model": saved}, checkpoint_id=tmp_path / "c")
    DCP.load({"model": found}, checkpoint_id=tmp_path / "c")
    assert found[0].seen == 5
    assert torch.equal(found[0].weight, saved[0].weight)


def test_compiled(tmp_path: Path) -> None:
    """A compiled model has the names of the plain one, and each loads what the other saved."""
    plain, compiled, third = net(1), net(2), net(3)
    wrapped: Any = torch.compile(compiled, backend="eager")
    DCP.save({"model": plain, "optimizer": AdamW(plain.parameters())}, checkpoint_id=tmp_path / "a")
    DCP.load({"model": wrapped, "optimizer": AdamW(wrapped.parameters())}, checkpoint_id=tmp_path / "a")
    assert_equal(compiled.state_dict(), plain.state_dict())
    DCP.save({"model": wrapped}, checkpoint_id=tmp_path / "b")
    DCP.load({"model": third}, checkpoint_id=tmp_path / "b")
    assert_equal(third.state_dict(), plain.state_dict())


def test_ema_and_averaged_models(tmp_path: Path) -> None:
    """A deep copy and torch's AveragedModel are models of their own, with their own numbers."""
    model = net(1)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(net(4))
    average.update_parameters(net(5))
    other = net(2)
    found: dict[str, Any] = {"model": other, "ema": net(3), "swa": torch.optim.swa_utils.AveragedModel(other)}
    DCP.save({"model": model, "ema": net(9), "swa": average}, checkpoint_id=tmp_path / "c")
    DCP.load(found, checkpoint_id=tmp_path / "c")
    assert_equal(found["ema"].state_dict(), net(9).state_dict())
    assert_equal(found["swa"].state_dict(), average.state_dict())
    assert int(found["swa"].n_averaged) == 2


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("kind", ["cosine", "onecycle", "sequential", "plateau"])
def test_schedulers(tmp_path: Path, kind: str, live: bool) -> None:
    """A scheduler goes on where it was, handed over itself or as its state dict."""
    schedulers = torch.optim.lr_scheduler

    def make() -> tuple[Optimizer, Any]:
        optimizer = SGD(net().parameters(), lr=1.0, momentum=0.9)
        if kind == "cosine":
            return optimizer, schedulers.CosineAnnealingLR(optimizer, 20)
        if kind == "onecycle":
            return optimizer, schedulers.OneCycleLR(optimizer, 1.0, total_steps=20)
        if kind == "plateau":
            return optimizer, schedulers.ReduceLROnPlateau(optimizer, patience=1)
        parts: list[Any] = [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
        return optimizer, schedulers.SequentialLR(optimizer, parts, [3])

    def go(optimizer: Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer, scheduler = make()
        go(optimizer, scheduler, 5)
        saved = {"scheduler": scheduler if live else scheduler.state_dict(), "optimizer": optimizer}
        DCP.save(saved, checkpoint_id=tmp_path / "c")
        wanted = go(optimizer, scheduler, 5)
        optimizer, scheduler = make()
        found = {"scheduler": scheduler if live else scheduler.state_dict(), "optimizer": optimizer}
        DCP.load(found, checkpoint_id=tmp_path / "c")
        if not live:
            scheduler.load_state_dict(found["scheduler"])
        assert go(optimizer, scheduler, 5) == wanted


@pytest.mark.parametrize("milestones", [[2, 4], [3], [90]])
def test_keys_that_are_numbers_stay_numbers(tmp_path: Path, milestones: list[int]) -> None:
    """MultiStepLR keeps a Counter by step: it goes on with the saved milestones, whatever the loading one was given."""
    multi = torch.optim.lr_scheduler.MultiStepLR

    def make(marks: list[int]) -> tuple[Optimizer, Any]:
        optimizer = SGD(net().parameters(), lr=1.0)
        return optimizer, multi(optimizer, marks)

    optimizer, scheduler = make([2, 4])
    optimizer.step()
    scheduler.step()
    DCP.save({"optimizer": optimizer, "scheduler": scheduler}, checkpoint_id=tmp_path / "c")
    other, found = make(milestones)
    DCP.load({"optimizer": other, "scheduler": found}, checkpoint_id=tmp_path / "c")
    assert_equal(found.milestones, scheduler.milestones)
    rates = []
    for _ in range(4):
        other.step()
        found.step()
        rates.append(round(other.param_groups[0]["lr"], 6))
    assert rates == [0.1, 0.1, 0.01, 0.01]


@pytest.mark.parametrize("own", [False, True])
def test_numbers_as_keys_without_a_template(tmp_path: Path, own: bool) -> None:
    """Where the template does not tell, dict keys that are ints come back as ints, texts as texts, lists as lists."""
    value = {"i": {1: {-2: torch.ones(1)}, 30: "a"}, "t": {"1": 5}, "l": [{"x": 1}, {2: 3}], "c": Counter({7: 2})}
    wanted = {**value, "c": {7: 2}}
    DCP.save({"a": PerRank(value) if own else value}, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"a": PerRank() if own else None}
    DCP.load(state, checkpoint_id=tmp_path / "c")
    assert_equal(state["a"].value if own else state["a"], wanted)
    renamed: dict[str, Any] = {"b": {"x": None}}
    DCP.load(renamed, checkpoint_id=tmp_path / "c", keys={"a.i": "b.x", "a": None})
    assert_equal(renamed["b"]["x"], wanted["i"])


def test_an_optimizers_own_state_dict(tmp_path: Path) -> None:
    """``optimizer.state_dict()`` as a plain value, loaded where nothing has stepped yet, is what was saved."""
    model, other = net(1), net(2)
    optimizer, found = AdamW(model.parameters()), AdamW(other.parameters())
    stepped(model, optimizer)
    DCP.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "c")
    state = {"optimizer": found.state_dict()}
    DCP.load(state, checkpoint_id=tmp_path / "c")
    found.load_state_dict(state["optimizer"])
    assert_equal(found.state_dict(), optimizer.state_dict())


def test_a_list_of_other_ranks_is_not_saved_as_nothing(tmp_path: Path) -> None:
    """A PerRank that has only the list of another number of ranks is refused, and names what to choose."""
    holder = PerRank()
    holder.saved = [1, 2]
    with pytest.raises(CheckpointError, match="saved") as caught:
        DCP.save({"a": holder}, checkpoint_id=tmp_path / "c")
    assert caught.value.key == "a"
    holder.value = holder.saved[0]
    DCP.save({"a": holder}, checkpoint_id=tmp_path / "c")


def test_a_grad_scaler(tmp_path: Path) -> None:
    """A GradScaler has the scale and the growth that were saved; one that is disabled saves and loads nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=7)
    scaler.scale(torch.ones(1))
    DCP.save({"scaler": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)}, checkpoint_id=tmp_path / "c")
    found = {"scaler": torch.amp.GradScaler("cpu"), "off": torch.amp.GradScaler("cpu", enabled=False)}
    DCP.load(found, checkpoint_id=tmp_path / "c")
    assert found["scaler"].state_dict() == scaler.state_dict()


class Lazy:
    """Has no tensor before it is used, and numbers as keys."""

    def __init__(self) -> None:
        self.shadow: dict[int, torch.Tensor] = {}
        self.notes: dict[str, Any] = {"n": 0}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "notes": self.notes, "kind": "lazy"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.notes = state["shadow"], state["notes"]


def test_a_stateful_that_grows(tmp_path: Path) -> None:
    """An object whose fresh state holds no tensor gets all that it saved, and other Python values than it has now."""
    saved, found = Lazy(), Lazy()
    saved.shadow = {"w": torch.arange(3.0)}  # type: ignore[dict-item]
    saved.notes = {"m": [1, {"deep": (2, 3)}], "empty": {}}
    DCP.save({"lazy": saved}, checkpoint_id=tmp_path / "c")
    DCP.load({"lazy": found}, checkpoint_id=tmp_path / "c")
    assert_equal(found.state_dict(), saved.state_dict())


def test_a_stateful_is_filled_in_place(tmp_path: Path) -> None:
    """Tensors that the object has are the ones that are filled; dict keys that are numbers stay numbers."""
    saved, found = Lazy(), Lazy()
    saved.shadow, found.shadow = {3: torch.arange(3.0)}, {3: torch.zeros(3)}
    tensor = found.shadow[3]
    DCP.save({"lazy": saved}, checkpoint_id=tmp_path / "c")
    DCP.load({"lazy": found}, checkpoint_id=tmp_path / "c")
    assert found.shadow[3] is tensor
    assert torch.equal(tensor, torch.arange(3.0))


def test_what_people_write_today(tmp_path: Path) -> None:
    """Raw RNG states in a dict, a step, nested and empty values come back equal and of their types."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    state: dict[str, Any] = {
        "rng": {
            "torch": torch.get_rng_state(),
            "torch_cuda": torch.cuda.get_rng_state_all(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        },
        "step": 500,
        "nested": {"none": None, "text": "é", "list": [1, [2, (3,)]], "empty": {}, "tensors": [torch.ones(2), 5]},
        "": 1.5,
        "a.b": {"c": b"x"},
    }
    wanted = copy.deepcopy(state)
    numbers = [torch.rand(1).item(), random.random(), np.random.rand()]
    DCP.save(state, checkpoint_id=tmp_path / "c")
    found: dict[str, Any] = {
        "rng": {"torch": torch.get_rng_state(), "torch_cuda": [], "numpy": np.random.get_state(), "python": None},
        "step": 0,
        "nested": None,
        "": 0.0,
        "a.b": {},
    }
    DCP.load(found, checkpoint_id=tmp_path / "c")
    python, numpy_state = found["rng"].pop("python"), found["rng"].pop("numpy")
    wanted["rng"].pop("python")
    wanted["rng"].pop("numpy")
    assert_equal(found, wanted)
    torch.set_rng_state(found["rng"]["torch"])
    random.setstate(python)
    np.random.set_state(numpy_state)
    assert [torch.rand(1).item(), random.random(), np.random.rand()] == numbers


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """RngState sets torch, numpy and Python; saving moves none of them."""
    DCP.save({"rng": RngState()}, checkpoint_id=tmp_path / "c")
    wanted = [torch.rand(1).item(), random.random(), np.random.rand()]
    DCP.load({"rng": RngState()}, checkpoint_id=tmp_path / "c")
    assert [torch.rand(1).item(), random.random(), np.random.rand()] == wanted


def test_the_generators_are_saved_after_everything_else(tmp_path: Path) -> None:
    """Asking an object for its state may draw a number: what is saved is how things are after that."""

    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"drawn": torch.rand(1).item()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(3)

    DCP.save({"rng": RngState(), "z": Drawing()}, checkpoint_id=tmp_path / "c")
    wanted = torch.rand(1).item()
    DCP.load({"rng": RngState(), "z": Drawing()}, checkpoint_id=tmp_path / "c")
    assert torch.rand(1).item() == wanted


@pytest.mark.filterwarnings(ALONE)
def test_the_layout_is_that_of_torch(tmp_path: Path) -> None:
    """Keys are those of torch's get_state_dict functions, and plain ``dcp.load`` with them gets the same numbers."""
    model, other = Tied(1), Tied(2)
    optimizer, fresh = AdamW(model.parameters(), lr=0.1), AdamW(other.parameters(), lr=0.2)
    stepped(model, optimizer)
    stepped(other, fresh)
    DCP.save({"model": model, "optimizer": optimizer, "step": 3}, checkpoint_id=tmp_path / "c")
    found: dict[str, Any] = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, fresh),
        "step": 0,
    }
    names = set(FsspecStorageReader(tmp_path / "c").read_metadata().state_dict_metadata)
    assert {f"model.{name}" for name in found["model"]} == {name for name in names if name.startswith("model.")}
    for reader in (FsspecStorageReader(tmp_path / "c"), dcp.FileSystemReader(tmp_path / "c")):
        dcp.load(found, storage_reader=reader)
        assert_equal(dict(found["model"]), dict(model.state_dict()))
        assert_equal(found["optimizer"], get_optimizer_state_dict(model, optimizer))
        assert found["step"] == 3


def test_per_rank_in_one_process(tmp_path: Path) -> None:
    """A PerRank is filled: plain values are replaced, live objects loaded, and nothing else is in ``saved``."""
    model, found = net(1), net(2)
    place = next(found.parameters()).data_ptr()
    holders = {"a": PerRank({"x": 1}), "b": PerRank(found), "c": PerRank()}
    DCP.save({"a": PerRank({"x": [5]}), "b": PerRank(model), "c": PerRank((1, 2))}, checkpoint_id=tmp_path / "c")
    DCP.load(holders, checkpoint_id=tmp_path / "c")
    assert holders["a"].value == {"x": [5]}
    assert holders["c"].value == (1, 2)
    assert next(found.parameters()).data_ptr() == place
    assert_equal(found.state_dict(), model.state_dict())
    assert all(holder.saved is None for holder in holders.values())


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ([], TypeError),
        ({1: 2}, TypeError),
        ({"__per_rank__": 1}, ValueError),
        ({"__per_rank__.0.x": 1}, ValueError),
        ({"x": PerRank({"y": PerRank(1)})}, ValueError),
        ({"x": (net(),)}, TypeError),
        ({"a.b": 1, "a": {"b": 2}}, CheckpointError),
    ],
)
def test_states_that_cannot_be_meant(tmp_path: Path, state: Any, error: type[Exception]) -> None:
    """A state with names or nestings that cannot be saved is refused before anything is written."""
    with pytest.raises(error):
        DCP.save(state, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "c" / ".commit").exists()
