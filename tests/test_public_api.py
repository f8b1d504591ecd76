"""The public surface, written down: whoever changes it changes this file too."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import dcp_storage
from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions

PUBLIC = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "DCP",
    "FsspecStorageReader",
    "FsspecStorageWriter",
    "IncompatibleCheckpointError",
    "InvalidLocationError",
    "LoadOptions",
    "NotCommittedError",
    "PerRank",
    "RngState",
    "SaveOptions",
    "StoreError",
    "UntrustedDataError",
    "adopt",
    "bench",
    "copy",
    "delete",
    "describe",
    "doctor",
    "list_keys",
    "load_keys",
    "prune",
    "verify",
]

MIB = 1024 * 1024
COMMON = {
    "engine": "fsspec",
    "max_concurrency": 16,
    "part_size": 16 * MIB,
    "memory_budget": 256 * MIB,
    "attempts": 6,
    "deadline": 300.0,
}


def parameters(cls: type) -> list[tuple[str, str, Any]]:
    return [
        (parameter.name, parameter.kind.description, parameter.default)
        for parameter in inspect.signature(cls).parameters.values()
    ]


def test_the_names_are_these() -> None:
    """The package exports exactly these names, sorted."""
    assert sorted(dcp_storage.__all__) == PUBLIC  # in the file they stand as ruff sorts them, capitals first
    assert sorted(PUBLIC) == PUBLIC


def test_every_name_is_listed_and_others_are_not_there() -> None:
    """``dir()`` has each name although none is imported before it is used; a name that is not there is an error."""
    assert set(PUBLIC) <= set(dir(dcp_storage))
    wrong = "no_such_name"
    with pytest.raises(AttributeError, match=wrong):
        getattr(dcp_storage, wrong)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_explains_itself(name: str) -> None:
    """Each public name is there and has a docstring of its own."""
    found = getattr(dcp_storage, name)
    assert found.__doc__
    assert not found.__doc__.startswith(f"{name}(")  # what dataclasses write where there is none


@pytest.mark.parametrize("cls", [FsspecStorageWriter, FsspecStorageReader, SaveOptions, LoadOptions])
def test_every_public_method_explains_itself(cls: type) -> None:
    """Each public method and property of the classes has a docstring."""
    bare = [
        name for name, found in vars(cls).items() if not name.startswith("_") and callable(found) and not found.__doc__
    ]
    assert not bare


def test_the_writer_takes_these_arguments() -> None:
    """The writer's signature is frozen: a path, and everything else by keyword."""
    assert parameters(FsspecStorageWriter) == [
        ("path", "positional or keyword", None),
        ("storage_options", "keyword-only", None),
        ("overwrite", "keyword-only", False),
        ("options", "keyword-only", SaveOptions()),
        ("callback", "keyword-only", None),
    ]


def test_the_reader_takes_these_arguments() -> None:
    """The reader's signature is frozen: a path, and everything else by keyword."""
    assert parameters(FsspecStorageReader) == [
        ("path", "positional or keyword", None),
        ("storage_options", "keyword-only", None),
        ("require_commit", "keyword-only", True),
        ("options", "keyword-only", LoadOptions()),
        ("process_group", "keyword-only", None),
        ("callback", "keyword-only", None),
    ]


def fields(cls: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def test_the_options_of_a_save_are_these() -> None:
    """The fields of SaveOptions and their defaults are frozen."""
    own = {"shard_size": 4096 * MIB, "assume_single_writer": False, "label": None, "lone_ranks": None}
    assert fields(SaveOptions) == {**COMMON, **own}


def test_the_options_of_a_load_are_these() -> None:
    """The fields of LoadOptions and their defaults are frozen."""
    assert fields(LoadOptions) == {**COMMON, "max_gap": None, "share_reads": False, "trusted_globals": ()}


@pytest.mark.parametrize("cls", [SaveOptions, LoadOptions])
def test_options_cannot_be_changed_or_given_by_place(cls: Any) -> None:
    """Options are frozen, by keyword only, and every field is in the docstring."""
    options = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.attempts = 1
    with pytest.raises(TypeError):
        cls(8)
    assert not [field.name for field in dataclasses.fields(cls) if f"        {field.name}: " not in cls.__doc__]


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (cls, name, value)
        for cls in (SaveOptions, LoadOptions)
        for name, value in (
            ("max_concurrency", 0),
            ("part_size", 64 * 1024 - 1),
            ("memory_budget", 0),
            ("attempts", 0),
            ("deadline", 0.0),
        )
    ]
    + [(SaveOptions, "shard_size", 0), (LoadOptions, "max_gap", -1)],
)
def test_options_out_of_range_are_refused(cls: Any, name: str, value: float) -> None:
    """A value that cannot be meant raises ValueError with the field's name."""
    with pytest.raises(ValueError, match=name):
        cls(**{name: value})
