"""What fits and what does not, all of it named at once; filters, new names, casts, other people's checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.optim import SGD, AdamW

from dcp_storage import (
    DCP,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FsspecStorageReader,
    FsspecStorageWriter,
    IncompatibleCheckpointError,
    NotCommittedError,
    PerRank,
)
from dcp_storage.state_keys import KeyChoice
from tests.e2e import ALONE
from tests.state import assert_equal, net, stepped


class Head(nn.Module):
    """A body and a head of a width to choose."""

    def __init__(self, seed: int, width: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 3, dtype=dtype)
        self.head = nn.Linear(3, width)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint of a model with its optimizer, and some plain values."""
    model = Head(1)
    optimizer = AdamW(model.parameters())
    stepped(model, optimizer)
    plain = {"a": torch.ones(2), "b": torch.ones(3), "x": 1, "y": 2}
    DCP.save({"model": model, "optimizer": optimizer, "plain": plain, "step": 4}, checkpoint_id=tmp_path / "c")
    return str(tmp_path / "c")


def test_all_that_does_not_fit_is_named_at_once(saved: str) -> None:
    """Missing, unexpected, shapes and dtypes of the whole template are in one error, which pickles; nothing changed."""
    model = Head(2, width=5)
    model.body.double()
    model.extra = nn.Linear(1, 1)
    model.head.bias = None  # type: ignore[assignment]
    optimizer = AdamW(model.parameters())
    plain = {"a": torch.zeros(2), "c": torch.zeros(3), "x": 0, "z": 0}
    before = copy.deepcopy((model.state_dict(), plain))
    state = {"model": model, "optimizer": optimizer, "plain": plain, "epoch": 1}
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load(state, checkpoint_id=saved)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error.missing == [
            "epoch",
            "model.extra.bias",
            "model.extra.weight",
            "optimizer.state.extra.bias",
            "optimizer.state.extra.weight",
            "plain.c",
            "plain.z",
        ]
        assert error.unexpected == [
            "model.head.bias",
            "optimizer.state.head.bias.exp_avg",
            "optimizer.state.head.bias.exp_avg_sq",
            "optimizer.state.head.bias.step",
            "plain.b",
            "plain.y",
        ]
        assert error.shapes["model.head.weight"] == ("(5, 3)", "(2, 3)")
        assert error.dtypes["model.body.weight"] == ("float64", "float32")
        assert error.dtypes["optimizer.state.body.weight.exp_avg"] == ("float64", "float32")
        assert error.path == saved
        assert all(key in str(error) for key in ("plain.c", "plain.b", "model.head.weight", "model.body.bias"))
    assert_equal((model.state_dict(), plain), before)
    assert state["epoch"] == 1
    assert not optimizer.state


def test_what_fits_is_loaded_where_that_is_asked_for(saved: str) -> None:
    """With ``strict=False`` the rest is left alone, and the report says all of it."""
    model = Head(2, width=5)
    model.extra = nn.Linear(1, 1)
    own = copy.deepcopy(model.state_dict())
    plain = {"a": torch.zeros(2), "c": torch.zeros(3), "x": 0, "z": 9}
    report = DCP.load({"model": model, "plain": plain, "epoch": 1}, checkpoint_id=saved, strict=False)
    assert report.missing == ["epoch", "model.extra.bias", "model.extra.weight", "plain.c", "plain.z"]
    assert report.unexpected == ["plain.b", "plain.y"]
    assert report.shapes == ["model.head.bias", "model.head.weight"]
    assert report.untouched == sorted(report.missing + report.shapes)
    assert report.loaded == ["model.body.bias", "model.body.weight", "plain.a", "plain.x"]
    assert report.cast == []
    assert_equal(dict(model.body.state_dict()), dict(Head(1).body.state_dict()) | dict(model.body.state_dict()))
    assert torch.equal(model.head.weight, own["head.weight"])
    assert_equal(plain, {"a": torch.ones(2), "c": torch.zeros(3), "x": 1, "z": 9})


def test_casts_only_where_they_are_allowed(saved: str) -> None:
    """Another dtype is an error also with ``strict=False``; with ``allow_dtype_cast`` it is filled as by ``copy_``."""
    model = Head(2, dtype=torch.float64)
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": model}, checkpoint_id=saved, strict=False)
    assert caught.value.dtypes == {
        "model.body.bias": ("float64", "float32"),
        "model.body.weight": ("float64", "float32"),
    }
    report = DCP.load({"model": model}, checkpoint_id=saved, allow_dtype_cast=True)
    assert report.cast == ["model.body.bias", "model.body.weight"]
    wanted = Head(3)
    DCP.load({"model": wanted}, checkpoint_id=saved)
    assert torch.equal(model.body.weight, wanted.body.weight.double())
    assert model.body.weight.dtype == torch.float64


def test_entries_that_nobody_asks_for_are_left_alone(saved: str) -> None:
    """Other entries on the store are neither loaded nor unexpected."""
    state = {"step": 0}
    report = DCP.load(state, checkpoint_id=saved)
    assert state == {"step": 4}
    assert (report.loaded, report.unexpected) == (["step"], [])


@pytest.mark.parametrize(
    ("keys", "loaded", "untouched"),
    [
        (["model"], {"model"}, {"optimizer", "plain", "step"}),
        (["model.body", "step"], {"model.body", "step"}, {"model.head", "optimizer", "plain"}),
        ({"optimizer": None, "plain": None}, {"model", "step"}, {"optimizer", "plain"}),
        (lambda key: None if key.startswith("optimizer") else key, {"model", "step", "plain"}, {"optimizer"}),
    ],
)
def test_only_what_is_chosen_is_loaded(saved: str, keys: Any, loaded: set[str], untouched: set[str]) -> None:
    """Filters load what they choose and leave the rest of the template as it is, which is not missing."""
    model = Head(2)
    optimizer = AdamW(model.parameters())
    stepped(model, optimizer, 1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain = {"a": torch.zeros(2), "b": torch.zeros(3), "x": 0, "y": 0}
    state = {"model": model, "optimizer": optimizer, "plain": plain, "step": 0}
    report = DCP.load(state, checkpoint_id=saved, keys=keys)

    def under(key: str, names: set[str]) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in names)

    assert all(under(key, loaded) for key in report.loaded)
    assert all(under(key, untouched) for key in report.untouched)
    assert {name for name in loaded if any(under(key, {name}) for key in report.loaded)} == loaded
    assert {name for name in untouched if any(under(key, {name}) for key in report.untouched)} == untouched
    assert not report.missing
    assert not report.unexpected
    assert_equal(optimizer.state_dict(), before[1])
    if "model.head" in untouched:
        assert torch.equal(model.head.weight, before[0]["head.weight"])


def test_another_prefix(tmp_path: Path, saved: str) -> None:
    """A part of a larger model loads into a model of its own, and the other way round."""
    body = nn.Linear(3, 3)
    DCP.load({"net": body}, checkpoint_id=saved, keys={"model.body": "net", "model.head": None})
    whole = Head(5)
    DCP.load({"model": whole}, checkpoint_id=saved)
    assert_equal(dict(body.state_dict()), dict(whole.body.state_dict()))
    DCP.save({"net": body}, checkpoint_id=tmp_path / "body")
    other = Head(6)
    report = DCP.load({"model": other}, checkpoint_id=tmp_path / "body", keys={"net.": "model.body."}, strict=False)
    assert report.missing == ["model.head.bias", "model.head.weight"]
    assert_equal(dict(other.body.state_dict()), dict(body.state_dict()))


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("nested", [True, False])
def test_fine_tuning_from_a_stock_checkpoint(tmp_path: Path, nested: bool) -> None:
    """A model that stock torch saved, under bare names or a prefix, loads into one with another head."""
    theirs = Head(1)
    stock: dict[str, Any] = {"m": theirs.state_dict()} if nested else theirs.state_dict()
    dcp.save(stock, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    mine = Head(2, width=7)
    keys: Any = {"m.head": None, "m": "model"} if nested else {"": "model", "head": None}
    with pytest.raises(NotCommittedError):
        DCP.load({"model": mine}, checkpoint_id=tmp_path / "stock", keys=keys)
    report = DCP.load({"model": mine}, checkpoint_id=tmp_path / "stock", keys=keys, require_commit=False, strict=False)
    assert report.loaded == ["model.body.bias", "model.body.weight"]
    assert report.missing == ["model.head.bias", "model.head.weight"]
    assert torch.equal(mine.body.weight, theirs.body.weight)
    reader = dcp.FileSystemReader(tmp_path / "stock")
    again = Head(3)
    DCP.load({"m" if nested else "model": again}, storage_reader=reader, keys=None if nested else {"": "model"})
    assert_equal(dict(again.state_dict()), dict(theirs.state_dict()))


def test_names_that_meet_are_refused(saved: str) -> None:
    """Two keys of the store that would get one name are an error that names both."""
    with pytest.raises(CheckpointError, match=r"'model\.x'.*model\.body\.weight"):
        DCP.load({"model": Head(1)}, checkpoint_id=saved, keys=lambda key: "model.x" if "body" in key else None)


@pytest.mark.parametrize(
    ("keys", "stored", "name"),
    [
        (None, "a.b", "a.b"),
        (["a"], "a", "a"),
        (["a"], "ab", None),
        (["a."], "a.b", "a.b"),
        ([], "a", None),
        ({"a": "x"}, "a.b", "x.b"),
        ({"a": "x", "a.b": "y"}, "a.b.c", "y.c"),
        ({"a": ""}, "a.b", "b"),
        ({"": "x"}, "a.b", "x.a.b"),
        ({"a": "x"}, "ab", "ab"),
        ({"a": None}, "a.b", None),
        (str.upper, "a", "A"),
    ],
)
def test_how_names_are_made(keys: Any, stored: str, name: str | None) -> None:
    """Prefixes end at dots, the longest counts, an empty one stands for everything."""
    assert KeyChoice(keys).name_of(stored) == name


@pytest.mark.parametrize("keys", ["model", 5, {"a": 1}, [1]])
def test_keys_of_the_wrong_type(saved: str, keys: Any) -> None:
    """A single text or what is not made of text is refused."""
    with pytest.raises(TypeError, match="keys"):
        DCP.load({"step": 0}, checkpoint_id=saved, keys=keys)


def test_python_values_stand_for_what_was_saved(tmp_path: Path) -> None:
    """A plain value stands for whatever was saved in its place, also nested, and a dict for a single value."""
    DCP.save({"a": {"deep": [torch.ones(2), 3]}, "b": 5, "c": {}}, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"a": None, "b": {"x": 1, "y": 2}, "c": {"z": 1}}
    DCP.load(state, checkpoint_id=tmp_path / "c")
    assert_equal(state, {"a": {"deep": [torch.ones(2), 3]}, "b": 5, "c": {}})


def test_groups_that_were_others(tmp_path: Path) -> None:
    """Parameters that were in two groups cannot go into one; two groups may come back in another order."""
    model = Head(1)
    body, head = list(model.body.parameters()), list(model.head.parameters())
    both = SGD([{"params": body, "lr": 1.0}, {"params": head, "lr": 2.0}])
    DCP.save({"model": model, "optimizer": both}, checkpoint_id=tmp_path / "c")
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": model, "optimizer": SGD(model.parameters())}, checkpoint_id=tmp_path / "c")
    assert list(caught.value.shapes) == ["optimizer.param_groups.0"]
    turned = SGD([{"params": head}, {"params": body}], lr=9.0)
    DCP.load({"model": model, "optimizer": turned}, checkpoint_id=tmp_path / "c")
    assert [group["lr"] for group in turned.param_groups] == [2.0, 1.0]


def test_tied_names_need_only_one_on_the_store(tmp_path: Path) -> None:
    """Where another trainer saved a tied weight once, it is not missing under its other name."""
    from tests.state import Tied

    theirs, mine = Tied(1), Tied(2)
    once = {name: value for name, value in theirs.state_dict().items() if name != "embed.weight"}
    DCP.save({"model": once}, checkpoint_id=tmp_path / "c")
    DCP.load({"model": mine}, checkpoint_id=tmp_path / "c")
    assert torch.equal(mine.embed.weight, theirs.embed.weight)
    assert mine.out.weight is mine.embed.weight


def test_errors_arrive_as_themselves(tmp_path: Path, saved: str) -> None:
    """A taken folder, an empty one and a damaged one each raise their own error, with rank and failures."""
    with pytest.raises(CheckpointExistsError) as taken:
        DCP.save({"a": 1}, checkpoint_id=saved)
    with pytest.raises(CheckpointNotFoundError) as empty:
        DCP.load({"a": 1}, checkpoint_id=tmp_path / "nothing")
    (shard,) = Path(saved).glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-100])
    model = Head(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CorruptCheckpointError) as damaged:
        DCP.load({"model": model}, checkpoint_id=saved)
    assert_equal(model.state_dict(), before)
    for caught in (taken, empty, damaged):
        assert caught.value.rank == 0
        assert caught.value.failures == {0: caught.value}
        assert pickle.loads(pickle.dumps(caught.value)).failures[0].kind == caught.value.kind


class Stopping(DefaultSavePlanner):
    """Is interrupted while planning."""

    def create_local_plan(self) -> Any:
        raise KeyboardInterrupt


class StoppingLoad(DefaultLoadPlanner):
    """The same for a load."""

    def create_local_plan(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_stays_one(tmp_path: Path, saved: str) -> None:
    """A KeyboardInterrupt inside the save or the load arrives as such."""
    with pytest.raises(KeyboardInterrupt):
        DCP.save({"a": 1}, checkpoint_id=tmp_path / "d", planner=Stopping())
    with pytest.raises(KeyboardInterrupt):
        DCP.load({"step": 0}, checkpoint_id=saved, planner=StoppingLoad())


class Doubling(DefaultSavePlanner):
    """Saves every tensor doubled."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        doubled = {"model": {name: value * 2 for name, value in state_dict["model"].items()}}
        super().set_up_planner(doubled, storage_meta, is_coordinator)


def test_the_users_own_planner_writer_and_reader(tmp_path: Path) -> None:
    """A planner is given nested values as by ``dcp.save``; the user's own writer and reader are used as they are."""
    model, found = nn.Linear(2, 2), nn.Linear(2, 2)
    writer = FsspecStorageWriter(tmp_path / "c")
    report = DCP.save({"model": model}, storage_writer=writer, planner=Doubling())
    assert report is writer.report
    DCP.load({"model": found}, storage_reader=FsspecStorageReader(tmp_path / "c"), planner=DefaultLoadPlanner())
    assert torch.equal(found.weight, model.weight * 2)
    DCP.save({"model": model}, storage_writer=writer, checkpoint_id=tmp_path / "d")
    assert (tmp_path / "d" / ".commit").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda path: DCP.save({"a": 1}, storage_writer=FsspecStorageWriter(path), overwrite=True),
        lambda path: DCP.load({"a": 1}, storage_reader=FsspecStorageReader(path), require_commit=False),
        lambda path: DCP.save({"a": 1}, checkpoint_id=path, differing="no"),  # type: ignore[arg-type]
    ],
)
def test_options_that_exclude_each_other(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    """Options for a writer that was handed over, and unknown choices, are refused."""
    with pytest.raises(ValueError, match=r"storage_writer|storage_reader|differing"):
        call(tmp_path / "c")


def test_a_model_on_the_meta_device_is_refused(saved: str) -> None:
    """There is nothing to fill: the error names the key and what to do."""
    with torch.device("meta"):
        model = Head(1)
    with pytest.raises(CheckpointError, match="to_empty") as caught:
        DCP.load({"model": model}, checkpoint_id=saved)
    assert caught.value.key == "model.body.weight"


def test_a_model_may_be_without_state(tmp_path: Path) -> None:
    """Modules and entries without anything to save are no obstacle."""
    DCP.save({"model": nn.Dropout(), "net": net(1), "empty": {}, "none": []}, checkpoint_id=tmp_path / "c")
    state = {"model": nn.Dropout(), "net": net(2), "empty": {}, "none": []}
    assert DCP.load(state, checkpoint_id=tmp_path / "c").ok


@pytest.mark.parametrize(
    "value",
    [{"": 1}, {"": 1, "a": 2}, {"": {"": torch.ones(2)}}, {"a": {"": [torch.ones(1), 2]}}, {"": {"a": 1}}],
    ids=["alone", "beside another", "twice", "further in", "a dict"],
)
def test_an_empty_text_as_a_key(tmp_path: Path, value: dict[str, Any]) -> None:
    """A dict may have the empty text as a key, anywhere below an entry, and it comes back; in a Stateful as well."""
    DCP.save({"cfg": value, "live": Kept(value)}, checkpoint_id=tmp_path / "c")
    into: dict[str, Any] = {"cfg": zeroed(value), "live": Kept(zeroed(value))}
    DCP.load(into, checkpoint_id=tmp_path / "c")
    assert_equal(into["cfg"], value)
    assert_equal(into["live"].value, value)
    replaced: dict[str, Any] = {"cfg": dict.fromkeys(value, None)}
    DCP.load(replaced, checkpoint_id=tmp_path / "c", keys=["cfg"])
    assert_equal(replaced["cfg"], value)


class Kept:
    """A Stateful that has what it is given."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state


def zeroed(value: Any) -> Any:
    """The same nesting, with nothing of the values."""
    if isinstance(value, dict):
        return {key: zeroed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [zeroed(inner) for inner in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def test_a_target_whose_elements_are_one(tmp_path: Path) -> None:
    """A tensor that ``expand`` made cannot be filled: that is said before anything changes, and with the rest."""
    DCP.save({"a": torch.ones(4), "b": torch.arange(4.0)}, checkpoint_id=tmp_path / "c")
    into: dict[str, Any] = {"a": torch.zeros(4), "b": torch.zeros(1).expand(4)}
    with pytest.raises(IncompatibleCheckpointError, match=r"b is \(4,\), its elements in shared memory"):
        DCP.load(into, checkpoint_id=tmp_path / "c")
    assert into["a"].tolist() == [0.0] * 4
    report = DCP.load(into, checkpoint_id=tmp_path / "c", strict=False)
    assert into["a"].tolist() == [1.0] * 4
    assert "b" in report.shapes or "b" in report.untouched


@pytest.mark.parametrize("keys", [["modle"], ["model.we"], ["model", "optimiser"]])
def test_a_prefix_that_names_nothing(saved: str, keys: list[str]) -> None:
    """A slip in a chosen prefix is named: with strict nothing is loaded, else the report has a sentence on it."""
    model = Head(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load({"model": model}, checkpoint_id=saved, keys=keys)
    assert caught.value.missing == keys[-1:]
    assert_equal(model.state_dict(), before)
    report = DCP.load({"model": model}, checkpoint_id=saved, keys=keys, strict=False)
    assert any(repr(keys[-1]) in warning for warning in report.warnings)


def test_keys_that_give_no_text(saved: str) -> None:
    """A function that renames to something else than text is told so."""
    with pytest.raises(CheckpointError, match="must give text or None"):
        DCP.load({"model": Head(2)}, checkpoint_id=saved, keys=lambda key: 3)  # type: ignore[arg-type,return-value]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_without_a_target(tmp_path: Path) -> None:
    """Where nothing with its scales is there to be filled its values are loaded; a target of its kind gets integers."""
    tensor = torch.quantize_per_tensor(torch.tensor([0.1, 0.7, -0.3]), 0.1, 3, torch.qint8)
    DCP.save({"q": tensor, "p": PerRank({"q": tensor})}, checkpoint_id=tmp_path / "c")
    into: dict[str, Any] = {"q": None, "p": PerRank()}
    DCP.load(into, checkpoint_id=tmp_path / "c")
    assert torch.equal(into["q"], tensor.dequantize())
    assert torch.equal(into["p"].value["q"], tensor.dequantize())
    alike = {"q": torch.quantize_per_tensor(torch.zeros(3), 0.1, 3, torch.qint8)}
    DCP.load(alike, checkpoint_id=tmp_path / "c")
    assert torch.equal(alike["q"].int_repr(), tensor.int_repr())
