"""Keys of every kind, nested lists and dicts that changed since the save, and states without any tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from tests.e2e import ALONE, Place, assert_same, like, place_of, raised_by
from tests.values import US, WAYS, Way

pytestmark = pytest.mark.filterwarnings(ALONE)

ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)

KEYS = [
    "", " ", "  a ", ".", "..", "../../up", "a.b", "a/b", "a\\b", "/etc/passwd", "a%2Fb", "a%b", "a b", "a\tb", "a\nb",
    "a\0b", "quote'\"", "{}", "[0]", "*?", "#", "\ufeffmark", "grün", "gru\u0308n", "日本語", "עברית", "🙂" * 20,
    "\u2028", "\U0010ffff", "null", "0", "-1", "True", "__proto__", ".metadata", ".commit", "__0_0.distcp",
    "n" * 1000, "長" * 1000, "a." * 500, "A", "a",
]  # fmt: skip


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "step-1"))


def keyed() -> dict[str, Any]:
    state: dict[str, Any] = {key: torch.tensor([number]) for number, key in enumerate(KEYS)}
    return state | {f"object {key}": (number, key) for number, key in enumerate(KEYS)}


def check_keys(way: Way, place: Place) -> None:
    state = keyed()
    way.save(dict(state), place)
    found = like(state)
    way.load(found, place)
    assert_same(found, state)


@ways
def test_every_kind_of_key(way: Way, local: Place) -> None:
    """Each key is its own, for tensors and for objects; keys that differ in form, case or composition stay apart."""
    check_keys(way, local)


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_every_kind_of_key_on_other_stores(kind: str, request: pytest.FixtureRequest) -> None:
    """The same holds in memory and on S3."""
    check_keys(US, place_of(request, kind))


def test_a_dotted_key_beside_a_nested_one(local: Place) -> None:
    """``"a.b"`` beside ``{"a": {"c": …}}`` are two entries; only where both spell one flat key does the save fail."""
    state = {"a.b": torch.tensor([1]), "a": {"c": torch.tensor([2]), "d.e": torch.tensor([3])}}
    US.save(dict(state), local)
    found = like(state)
    US.load(found, local)
    assert_same(found, state)
    clash = {"a.b": torch.tensor([1]), "a": {"b": torch.tensor([2])}}
    other = local.child("clash")
    assert "a.b" in str(raised_by(lambda: US.save(clash, other))[0])
    assert other.files() == {}


@ways
def test_numbers_as_keys(way: Way, local: Place) -> None:
    """Numbers are keys of nested dicts, as optimizers use them, also mixed with text."""
    state = {"state": {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.zeros(2)}, "x": torch.tensor([5])}}
    way.save(dict(state), local)
    found = like(state)
    way.load(found, local)
    assert_same(found, state)


@ways
def test_a_number_and_its_text(way: Way, local: Place) -> None:
    """``{1: …, "1": …}`` would be one key on the store, so torch refuses the save, and nothing is committed."""
    state = {"a": {1: torch.tensor([1]), "1": torch.tensor([2])}}
    assert "a.1" in str(raised_by(lambda: way.save(dict(state), local))[0])
    assert ".metadata" not in local.files()
    assert local.commits() == []


def lists() -> dict[str, Any]:
    return {"tensors": [torch.tensor([1.0]), torch.tensor([2.0])], "objects": [1, 2, 3], "mixed": [torch.ones(1), "x"]}


@ways
def test_a_template_whose_lists_are_shorter(way: Way, local: Place) -> None:
    """A shorter list of tensors gets its first elements; a list of objects is one object and comes back whole."""
    way.save(lists(), local)
    found: dict[str, Any] = {"tensors": [torch.zeros(1)], "objects": [0], "mixed": [torch.zeros(1)]}
    way.load(found, local)
    assert_same(found, {"tensors": [torch.tensor([1.0])], "objects": [1, 2, 3], "mixed": [torch.ones(1)]})


@ways
def test_a_template_whose_lists_are_longer(way: Way, local: Place) -> None:
    """A list of tensors that grew since the save lacks a key, which is named; no tensor of the template changes."""
    way.save(lists(), local)
    found: dict[str, Any] = {"tensors": [torch.zeros(1) for _ in range(3)]}
    with pytest.raises(CheckpointException) as caught:
        way.load(found, local)
    assert "tensors.2" in str(caught.value.failures[0][0])
    assert [tensor.item() for tensor in found["tensors"]] == [0, 0, 0]


@ways
def test_a_list_of_objects_that_grew(way: Way, local: Place) -> None:
    """A list of objects comes back as it was saved, whatever the template's length."""
    way.save({"seen": [1, 2], "none": []}, local)
    found: dict[str, Any] = {"seen": [9, 9, 9, 9, 9], "none": [9]}
    way.load(found, local)
    assert found == {"seen": [1, 2], "none": []}


@ways
def test_nothing_to_save(way: Way, local: Place) -> None:
    """States without a tensor: empty, of empty parts, or of objects only; each is a checkpoint like any other."""
    states: list[dict[str, Any]] = [{}, {"a": {}}, {"a": {"b": {}}, "c": []}, {"a": (), "b": None}]
    for number, state in enumerate(states):
        place = local.child(str(number))
        way.save(dict(state), place)
        found = like(state)
        way.load(found, place)
        assert found == state
