"""Options and reports: what is refused, what is kept, what comes out."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from dcp_storage import FsspecStorageReader, FsspecStorageWriter
from dcp_storage.options import LoadOptions, LoadReport, Problem, SaveOptions, SaveReport

BAD: list[tuple[type[Any], str, Any]] = [
    *((cls, name, value) for cls in (SaveOptions, LoadOptions) for name, value in (
        ("max_concurrency", 0),
        ("part_size", 64 * 1024 - 1),
        ("memory_budget", 0),
        ("attempts", 0),
        ("deadline", 0),
        ("deadline", -1.5),
    )),
    (SaveOptions, "shard_size", 0),
    (LoadOptions, "max_gap", -1),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "name", "value"), BAD)
def test_a_value_out_of_range_is_refused_by_name(cls: type[Any], name: str, value: Any) -> None:
    """The sentence names the option and the value that it got."""
    with pytest.raises(ValueError, match=name) as caught:
        cls(**{name: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("cls", [SaveOptions, LoadOptions])
def test_the_defaults_are_those_of_the_docstring(cls: type[Any]) -> None:
    """Every field says its default in the docstring; the shared ones are those of the design."""
    options = cls()
    assert (options.max_concurrency, options.part_size, options.memory_budget) == (16, 16 << 20, 256 << 20)
    assert (options.attempts, options.deadline) == (6, 300.0)
    for field in dataclasses.fields(cls):
        assert f"{field.name}: " in (cls.__doc__ or "")


@pytest.mark.parametrize("cls", [SaveOptions, LoadOptions])
def test_options_are_frozen_keywords_that_travel(cls: type[Any]) -> None:
    """They cannot be changed, take no positions, and pickle."""
    options = cls(part_size=1 << 20)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.part_size = 5
    with pytest.raises(TypeError):
        cls(1)
    assert pickle.loads(pickle.dumps(options)) == options


def test_trusted_globals_may_be_any_sequence() -> None:
    """A list is taken and kept as a tuple."""
    assert LoadOptions(trusted_globals=["a.b", dict]).trusted_globals == ("a.b", dict)


def test_reports_are_data() -> None:
    """A report goes to JSON whole, with ``ok`` first, which a problem turns false and a warning does not."""
    report = SaveReport("place", files=2, bytes_written=10, commit=1)
    report.warnings.append("a stale view")
    assert report.ok
    assert json.loads(json.dumps(report.to_dict()))["warnings"] == ["a stale view"]
    load = LoadReport("place", problems=[Problem("size", file="__0_0.distcp", wanted=3, found=2)])
    assert not load.ok
    data = json.loads(json.dumps(load.to_dict()))
    assert next(iter(data)) == "ok"
    assert data["problems"] == [
        {"kind": "size", "file": "__0_0.distcp", "key": None, "wanted": 3, "found": 2, "advice": ""}
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"part_size": "16MB"},
        {"max_concurrency": 2.5},
        {"deadline": None},
        {"deadline": True},
        {"deadline": float("nan")},
    ],
)
def test_a_value_of_the_wrong_type_is_named(wrong: dict[str, Any]) -> None:
    """A number that is none is refused at once, with the field's name."""
    for kind in (SaveOptions, LoadOptions):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            kind(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"shard_size": 1e9}, {"assume_single_writer": "no"}, {"label": 7}, {"lone_ranks": 2.0}]
)
def test_a_wrong_type_of_a_save_alone_is_named(wrong: dict[str, Any]) -> None:
    """What only a save knows is looked at as well: a text is no yes, and a float no count."""
    with pytest.raises(TypeError, match=next(iter(wrong))):
        SaveOptions(**wrong)


def test_options_of_the_other_kind_are_refused() -> None:
    """A writer takes SaveOptions and a reader LoadOptions, and storage_options are a mapping; said at construction."""
    with pytest.raises(TypeError, match="SaveOptions"):
        FsspecStorageWriter("x", options=LoadOptions())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LoadOptions"):
        FsspecStorageReader("x", options=SaveOptions())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mapping"):
        FsspecStorageWriter("x", storage_options="abc")  # type: ignore[arg-type]
