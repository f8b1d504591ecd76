"""Paths and URLs as people mistype them, given to every command: the code, and a sentence that says what is meant."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.tools import listing, prune
from tests.e2e import ALONE, Place, place_of
from tests.servers.endpoint import S3Endpoint
from tests.tools import make
from tests.tools.test_cli import run, told

pytestmark = pytest.mark.filterwarnings(ALONE)

COMMANDS = (["ls"], ["show"], ["verify"], ["prune"], ["adopt"], ["doctor"], ["bench", "--max-bytes", "64MiB"])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Place:
    place = Place(str(tmp_path / "run" / "step-1"))
    make(place, "committed")
    return place


def codes(path: str | Path, checkpoint: Place, spare: Path, **options: Any) -> dict[str, tuple[int, str]]:
    """Command → exit code and standard error; ``cp`` from there, and to there."""
    given = {command[0]: run(*command, path, **options) for command in COMMANDS}
    given["cp from"] = run("cp", path, spare, **options)
    given["cp to"] = run("cp", checkpoint.url, path, **options)
    for name, result in given.items():
        assert "Traceback" not in result.output, name
        assert result.exit_code == 0 or len(result.stderr.splitlines()) == 1 or name == "show", (name, result.output)
    return {name: (result.exit_code, result.stderr) for name, result in given.items()}


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_path_that_is_a_file_is_wrong_use(checkpoint: Place, tmp_path: Path, below: str) -> None:
    """A file in a folder's place, or above it, is a slip: code 2 with what to give instead; never a failed store."""
    path = Path(checkpoint.url) / ".metadata" / below
    for name, (code, said) in codes(path, checkpoint, tmp_path / "spare").items():
        assert (name, code) == (name, 2)
        assert "is no folder: it is a file, or lies below one. Give the folder that the file is in." in said, name
        assert str(path) in said, name
    assert not (tmp_path / "spare").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "path is empty"),
        ("nosuch://x/y", "fsspec knows no filesystem 'nosuch'"),
        ("s3://", "names no bucket and no folder"),
        ("s3:/bucket/run", "looks like a URL that pathlib has rewritten"),
        ("file://", "names no folder"),
        ("blockcache::s3://bucket/run", "answers from copies"),
    ],
)
def test_a_url_that_cannot_be_meant_is_wrong_use(checkpoint: Place, tmp_path: Path, url: str, says: str) -> None:
    """What names no folder of a filesystem that is known is refused by each command alike, before anything is sent."""
    for name, (code, said) in codes(url, checkpoint, tmp_path / "spare").items():
        assert (name, code) == (name, 2)
        assert says in said, name


def test_a_filesystem_that_is_not_installed_is_wrong_use(
    checkpoint: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says which package is missing, and for S3 the extra that brings it."""
    import fsspec

    def missing(protocol: str) -> type:
        raise ImportError(f"Install {protocol}fs to use it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    for name, (code, said) in codes("s3://bucket/run", checkpoint, tmp_path / "spare").items():
        assert (name, code) == (name, 2)
        assert "pip install 'dcp-storage[s3]'" in said, name


def test_what_is_not_there_is_three(checkpoint: Place, tmp_path: Path) -> None:
    """A folder that does not exist is not there, for whoever looks; a copy makes it."""
    found = codes(tmp_path / "absent", checkpoint, tmp_path / "spare")
    assert {name: code for name, (code, _) in found.items()} == {
        **dict.fromkeys(("ls", "show", "verify", "prune", "adopt", "doctor", "bench", "cp from"), 3),
        "cp to": 0,
    }


def test_a_bucket_that_is_not_there_is_three(
    checkpoint: Place, tmp_path: Path, ministack: S3Endpoint, bucket: Callable[[S3Endpoint], str]
) -> None:
    """A bucket's name that is mistyped is not there, and is named; a bucket alone is a folder like any."""
    options = Place("", ministack.storage_options)
    for name, (code, said) in codes("s3://no-such-bucket/run", checkpoint, tmp_path / "spare", place=options).items():
        assert (name, code) == (name, 3)
        assert name == "show" or "there is no bucket 'no-such-bucket'" in said, name
        assert "delete" not in said, name  # the first request that failed, not the cleaning up after it
    alone = f"s3://{bucket(ministack)}"
    assert run("cp", checkpoint.url, f"{alone}/step-1/", place=options).exit_code == 0
    assert told(run("ls", f"{alone}/", "--json", place=options))["latest"] == 1


@pytest.mark.parametrize("where", ["local", "ministack"])
def test_strange_names_are_names(request: pytest.FixtureRequest, where: str, checkpoint: Place, tmp_path: Path) -> None:
    """Blanks, brackets, accents, ``#``, ``?`` and ``%`` in a path mean themselves, and a slash at its end nothing."""
    root = place_of(request, where)
    run_folder = root.child("a b [x]*#?%20é")
    step = run_folder.child("step-1")
    assert run("cp", f"{checkpoint.url}/", f"{step.url}/", place=root).exit_code == 0
    assert set(step.files()) == set(checkpoint.files())
    assert told(run("ls", f"{run_folder.url}/", "--json", place=root))["latest"] == 1
    for command in (["show"], ["verify", "--depth", "data"]):
        assert run(*command, step.url, place=root).exit_code == 0
    assert run("prune", run_folder.url, place=root).exit_code == 0


def test_a_folder_that_may_not_be_read_is_four(
    checkpoint: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither wrong use nor an empty folder: what the system refuses is a failure, and says so."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), checkpoint.url)

    for command in (["ls"], ["show"], ["verify"], ["prune"], ["adopt"]):
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", refuse)
            result = run(*command, checkpoint.url)
        assert (command, result.exit_code) == (command, 4), result.output
        assert "Permission denied" in result.stderr
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        assert run("doctor", checkpoint.url).exit_code == 4


def test_a_fault_of_the_program_is_no_verdict_on_the_checkpoint(
    checkpoint: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody thought of ends with 4, never with 1, shows where it was, and is an object with --json."""

    def broken(*arguments: Any, **options: Any) -> Any:
        return options["oops"]

    monkeypatch.setattr(listing, "list_run", broken)
    monkeypatch.setattr(prune, "prune", broken)
    for command in ("ls", "prune"):
        result = run(command, checkpoint.url, "--json")
        assert result.exit_code == 4
        assert "in broken" in result.stderr
        assert "says nothing about the checkpoint" in result.stderr.splitlines()[-1]
        assert told(result)["exit_code"] == 4
