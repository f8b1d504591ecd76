"""Optimizers that are not the usual ones: odd state, groups that come and go, new names, stock's flat form."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import SGD, AdamW, Optimizer

from dcp_storage import DCP, IncompatibleCheckpointError
from tests.e2e import ALONE
from tests.state import assert_equal, net, stepped


class Odd(Optimizer):
    """Keeps everything that an optimizer may: nothing, None, texts, nested values, and what is of no parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "name": "odd", "hook": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        seen: Any = self.state
        seen["all"] = {"count": seen.get("all", {"count": 0})["count"] + 1, "mean": torch.full((2,), 0.5)}
        seen["last"] = torch.tensor(3.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.dim() == 1 or parameter.grad is None:
                    continue
                if not state:
                    deep = {"list": [torch.ones(2), 3, "é"], 7: torch.zeros(1), "empty": {}, "pair": ("a", 1)}
                    state.update({"none": None, "n": 0, "text": "état", "flag": True, "deep": deep})
                    state["rows"] = torch.zeros(parameter.shape[0])
                state["n"] += 1
                state["rows"] += parameter.grad.sum(1)
                parameter.sub_(parameter.grad.sign() * group["lr"])


@pytest.mark.parametrize("stepped_before", [False, True])
def test_odd_state_comes_back_as_it_was(tmp_path: Path, stepped_before: bool) -> None:
    """State of any kind is what it was: no text altered, nothing empty refused, what is of no parameter not lost."""
    model, other = net(1), net(2)
    optimizer, found = Odd(model.parameters()), Odd(other.parameters(), lr=9.0)
    stepped(model, optimizer)
    if stepped_before:
        stepped(other, found, 1)
    wanted = copy.deepcopy(optimizer.state_dict())
    assert wanted["state"][1] == {}
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    report = DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c")
    assert not report.untouched
    assert_equal(found.state_dict(), wanted)


def test_odd_state_that_is_left_out_stays(tmp_path: Path) -> None:
    """With a filter that leaves the optimizer's state out, what it has is untouched, also what is of no parameter."""
    model, other = net(1), net(2)
    optimizer, found = Odd(model.parameters()), Odd(other.parameters(), lr=9.0)
    stepped(model, optimizer)
    stepped(other, found, 1)
    before = copy.deepcopy(found.state_dict()["state"])
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    state = {"model": other, "optimizer": found}
    DCP.load(state, checkpoint_id=tmp_path / "c", keys=["model", "optimizer.param_groups"])
    assert_equal(found.state_dict()["state"], before)
    assert found.param_groups[0]["lr"] == 0.1


class Outer(nn.Module):
    """A model that has the other one as a part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = net(seed)


def two(seed: int, names: tuple[str, str], rate: float) -> dict[str, Any]:
    """Two modules under names, and an optimizer of both that has stepped."""
    first, second = net(seed), net(seed + 1)
    optimizer = AdamW([*first.parameters(), *second.parameters()], lr=rate)
    stepped(nn.ModuleList([first, second]), optimizer)
    return {names[0]: first, names[1]: second, "optimizer": optimizer}


def test_groups_follow_parameters_to_new_names(tmp_path: Path) -> None:
    """Where keys= renames parameters, hyperparameters and moments arrive with them."""
    outer = Outer(1)
    optimizer = AdamW(outer.parameters(), lr=0.5)
    stepped(outer, optimizer)
    DCP.save({"model": outer, "optimizer": optimizer}, checkpoint_id=tmp_path / "a")
    inner = net(2)
    found = AdamW(inner.parameters(), lr=0.1)
    keys = {"model.body": "model", "optimizer.state.body": "optimizer.state"}
    DCP.load({"model": inner, "optimizer": found}, checkpoint_id=tmp_path / "a", keys=keys)
    assert_equal(found.state_dict(), optimizer.state_dict())

    saved, other = two(1, ("a", "b"), 0.5), two(5, ("x", "y"), 0.1)
    DCP.save(saved, checkpoint_id=tmp_path / "b")
    renames = {"a": "x", "b": "y", "optimizer.state.a": "optimizer.state.x", "optimizer.state.b": "optimizer.state.y"}
    DCP.load(other, checkpoint_id=tmp_path / "b", keys=renames)
    assert_equal(other["optimizer"].state_dict(), saved["optimizer"].state_dict())


def test_any_function_may_give_the_names(tmp_path: Path) -> None:
    """Also where a table names only the keys that there are, the groups follow the parameters whose state it names."""
    outer = Outer(1)
    optimizer = AdamW(outer.parameters(), lr=0.5)
    stepped(outer, optimizer)
    DCP.save({"model": outer, "optimizer": optimizer}, checkpoint_id=tmp_path / "a")
    inner = net(2)
    found = AdamW(inner.parameters(), lr=0.1)
    table = {f"model.body.{name}": f"model.{name}" for name in inner.state_dict()}
    for name, _ in inner.named_parameters():
        table |= {f"optimizer.state.body.{name}.{what}": f"optimizer.state.{name}.{what}"
                  for what in ("step", "exp_avg", "exp_avg_sq")}  # fmt: skip
    table |= {f"optimizer.param_groups.0.{what}": f"optimizer.param_groups.0.{what}" for what in found.param_groups[0]}
    DCP.load({"model": inner, "optimizer": found}, checkpoint_id=tmp_path / "a", keys=table.get)
    assert_equal(found.state_dict(), optimizer.state_dict())


def test_groups_that_are_cut_elsewhere(tmp_path: Path) -> None:
    """As many groups of the same parameters, cut at another place, do not fit, and nothing changes."""

    def make(seed: int, first: int) -> tuple[nn.Sequential, AdamW]:
        model = net(seed)
        parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:first], "lr": 0.5}, {"params": parameters[first:]}]
        optimizer = AdamW(groups)
        stepped(model, optimizer)
        return model, optimizer

    model, optimizer = make(1, 2)
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    other, found = make(2, 3)
    before = copy.deepcopy((dict(other.state_dict()), found.state_dict()))
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c")
    assert list(caught.value.shapes) == ["optimizer.param_groups.0"]
    assert_equal((dict(other.state_dict()), found.state_dict()), before)


def test_groups_that_do_not_follow_are_missing(tmp_path: Path) -> None:
    """A group of parameters that the renamed checkpoint does not know does not keep its hyperparameters in silence."""
    saved, other = two(1, ("a", "b"), 0.5), two(5, ("x", "y"), 0.1)
    saved["optimizer"] = SGD(saved["optimizer"].param_groups[0]["params"], lr=0.5)
    other["optimizer"] = SGD(other["optimizer"].param_groups[0]["params"], lr=0.1)
    DCP.save(saved, checkpoint_id=tmp_path / "c")
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load(other, checkpoint_id=tmp_path / "c", keys={"a": "x", "b": "y"})
    assert "optimizer.param_groups.0" in caught.value.missing
    assert other["optimizer"].param_groups[0]["lr"] == 0.1


def test_a_group_that_was_added(tmp_path: Path) -> None:
    """A new group has nothing on the store: that is an error, and with ``strict=False`` it keeps what it has."""
    model, other = net(1), net(2)
    weights: list[Any] = [model[0].weight, other[0].weight]
    optimizer = AdamW(weights[:1], lr=0.5)
    stepped(model, optimizer)
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    found = AdamW(weights[1:], lr=0.1)
    found.add_param_group({"params": [other[2].weight], "lr": 9.0})
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c")
    assert caught.value.missing == ["optimizer.param_groups.1", "optimizer.state.2.weight"]
    DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c", strict=False)
    assert [group["lr"] for group in found.param_groups] == [0.5, 9.0]
    assert list(found.state) == [other[0].weight]


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("flat", [False, True])
def test_optimizers_that_stock_torch_saved(tmp_path: Path, flat: bool) -> None:
    """Both forms of torch's ``get_state_dict`` load, hyperparameters and moments of every group."""

    def make(seed: int, rates: tuple[float, float]) -> tuple[nn.Sequential, AdamW]:
        model = net(seed)
        groups = [{"params": list(model[0].parameters()), "lr": rates[0]},
                  {"params": [*model[1].parameters(), *model[2].parameters()], "lr": rates[1]}]  # fmt: skip
        return model, AdamW(groups, betas=(rates[0], 0.5))

    model, optimizer = make(1, (0.5, 0.25))
    stepped(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    theirs = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    dcp.save(theirs, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    other, found = make(2, (0.1, 0.1))
    DCP.load({"model": other, "optimizer": found}, checkpoint_id=tmp_path / "c", require_commit=False)
    assert_equal(found.state_dict(), optimizer.state_dict())
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))

    joined = AdamW(other.parameters(), lr=0.7)
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": other, "optimizer": joined}, checkpoint_id=tmp_path / "c", require_commit=False)
    assert list(caught.value.shapes) == ["optimizer.param_groups.0"]
    fewer = AdamW(other[0].parameters(), lr=0.7)
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": other, "optimizer": fewer}, checkpoint_id=tmp_path / "c", require_commit=False)
    assert "optimizer.state.2.weight.exp_avg" in caught.value.unexpected
    assert_equal(dict(other.state_dict()), before)


def test_a_default_device_makes_no_difference(tmp_path: Path) -> None:
    """A default device, as programs for accelerators set it, changes nothing of what is saved and loaded on the CPU."""
    model, other = net(1), net(2)
    optimizer, found = AdamW(model.parameters()), AdamW(other.parameters())
    stepped(model, optimizer)
    with torch.device("meta"):
        DCP.save({"model": model, "optimizer": optimizer, "n": [1, (2,)]}, checkpoint_id=tmp_path / "a")
        DCP.async_save({"model": model, "optimizer": optimizer, "n": [1]}, checkpoint_id=tmp_path / "b").wait(60)
        state: dict[str, Any] = {"model": other, "optimizer": found, "n": None}
        DCP.load(state, checkpoint_id=tmp_path / "a")
    assert state["n"] == [1, (2,)]
    assert_equal(found.state_dict(), optimizer.state_dict())
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("stepped_before", [False, True])
def test_a_parameter_of_another_shape_keeps_the_state_it_has(tmp_path: Path, stepped_before: bool) -> None:
    """Moments of a parameter that has another shape by now are named and left out whole, step count and all; those of
    the others are loaded, and the next step goes well.
    """

    def made(out: int, steps: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, out))
        optimizer = AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = made(4, 3)
    path = str(tmp_path / "c")
    DCP.save({"model": model, "opt": optimizer}, checkpoint_id=path)
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    model, optimizer = made(6, int(stepped_before))
    own = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": model, "opt": optimizer}, checkpoint_id=path)
    report = DCP.load({"model": model, "opt": optimizer}, checkpoint_id=path, strict=False)
    assert "opt.state.1.weight.exp_avg" in caught.value.message
    assert {"model.1.weight", "opt.state.1.weight.exp_avg", "opt.state.1.bias.exp_avg_sq"} <= set(report.shapes)
    assert_equal(optimizer.state_dict()["state"], {0: moments[0], 1: moments[1], **{k: own[k] for k in own if k > 1}})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
