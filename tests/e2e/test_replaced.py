"""A checkpoint that is replaced or deleted while a load is reading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcp_storage import CheckpointReplacedError, FsspecStorageReader, SaveOptions
from dcp_storage.fence import delete_folder
from dcp_storage.session import open_folder
from dcp_storage.stores.location import parse_location
from tests.e2e import ALONE, Place, assert_same, like, load, place_of, save
from tests.e2e import small_state as state_of

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture(params=["local", "memory", "moto", "ministack"])
def place(request: pytest.FixtureRequest) -> Place:
    place = place_of(request, request.param)
    save(state_of(1), place.writer())
    return place


def replace(place: Place) -> None:
    save(state_of(2), place.writer(overwrite=True))


def delete(place: Place) -> None:
    opened = open_folder(parse_location(place.url), place.options, SaveOptions())
    delete_folder(opened.store)
    opened.store.close()


class ByHand:
    """A load in its steps, as ``dcp.load`` takes them."""

    def __init__(self, reader: FsspecStorageReader, template: dict[str, Any]) -> None:
        self.reader = reader
        self.template = template
        self.planner = DefaultLoadPlanner()

    def plan_locally(self) -> Any:
        metadata = self.reader.read_metadata()
        self.planner.set_up_planner(self.template, metadata, True)
        self.reader.set_up_storage_reader(metadata, True, rank=0, use_collectives=True)
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def plan_globally(self, plans: list[Any]) -> Any:
        return self.reader.prepare_global_plan(self.planner.create_global_plan(plans))[0]

    def read(self, plan: Any) -> None:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()


def untouched(template: dict[str, Any]) -> bool:
    return all(bool((value == -7).all()) for value in template["model"].values())


@pytest.mark.parametrize("change", [replace, delete])
def test_before_the_sizes_are_looked_at(place: Place, change: Callable[[Place], None]) -> None:
    """Between the metadata and the plan: replaced, not corrupt, and nothing was changed."""
    template = like(state_of())
    hand = ByHand(place.reader(), template)
    plan = hand.plan_locally()
    change(place)
    with pytest.raises(CheckpointReplacedError, match="Load again"):
        hand.plan_globally([plan])
    assert untouched(template)


@pytest.mark.parametrize("change", [replace, delete])
def test_before_the_data_is_read(place: Place, change: Callable[[Place], None]) -> None:
    """Between the plan and the data: replaced, not corrupt."""
    template = like(state_of())
    hand = ByHand(place.reader(), template)
    plan = hand.plan_globally([hand.plan_locally()])
    change(place)
    with pytest.raises(CheckpointReplacedError, match="Load again") as caught:
        hand.read(plan)
    assert caught.value.kind == "replaced"
    assert untouched(template)


def test_loading_again_gets_the_new_one(place: Place) -> None:
    """After the error the same reader loads the checkpoint that replaced the old one."""
    reader = place.reader()
    hand = ByHand(reader, like(state_of()))
    plan = hand.plan_locally()
    replace(place)
    with pytest.raises(CheckpointReplacedError):
        hand.plan_globally([plan])
    found = like(state_of())
    load(found, reader)
    assert_same(found, state_of(2))


def test_ranks_that_read_different_commits_are_found_out(place: Place) -> None:
    """A rank that began before the replacement and one that began after it never load a mixture."""
    early, late = (ByHand(place.reader(), like(state_of())) for _ in range(2))
    before = early.plan_locally()
    replace(place)
    after = late.plan_locally()
    for hand, plans in ((early, [before, after]), (late, [after, before])):
        with pytest.raises(CheckpointReplacedError):
            hand.plan_globally(plans)
        assert untouched(hand.template)


def test_a_load_without_a_change_by_the_same_steps(place: Place) -> None:
    """The same steps by hand, with nothing in between, load every value."""
    template = like(state_of())
    hand = ByHand(place.reader(), template)
    hand.read(hand.plan_globally([hand.plan_locally()]))
    for key, value in state_of(1)["model"].items():
        assert torch.equal(template["model"][key], value)
