"""The signatures of the face, written down: whoever changes them changes this file too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_storage import DCP, LoadOptions, SaveOptions

SAVE = {
    "checkpoint_id": None,
    "storage_writer": None,
    "storage_options": None,
    "overwrite": False,
    "options": SaveOptions(),
    "process_group": None,
    "planner": None,
    "no_dist": False,
    "differing": "warn",
    "callback": None,
}
ASYNC = {"async_checkpointer_type": AsyncCheckpointerType.THREAD, "max_in_flight": 1, "if_busy": "wait"}
LOAD = {
    "checkpoint_id": None,
    "storage_reader": None,
    "storage_options": None,
    "require_commit": True,
    "options": LoadOptions(),
    "process_group": None,
    "planner": None,
    "no_dist": False,
    "strict": True,
    "allow_dtype_cast": False,
    "keys": None,
    "callback": None,
}


@pytest.mark.parametrize(("call", "wanted"), [(DCP.save, SAVE), (DCP.async_save, SAVE | ASYNC), (DCP.load, LOAD)])
def test_the_calls_take_these_arguments(call: Callable[..., Any], wanted: dict[str, Any]) -> None:
    """The state comes first; everything else is by keyword, with these defaults, and is in the docstring."""
    state, *others = inspect.signature(call).parameters.values()
    assert state.name == "state"
    assert {other.name: other.default for other in others} == wanted
    assert all(other.kind is inspect.Parameter.KEYWORD_ONLY for other in others)
    assert not [name for name in wanted if f"            {name}: " not in (call.__doc__ or "")]
