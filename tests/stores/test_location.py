"""Paths and URLs: what is taken, what is refused, and which store it opens."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from dcp_storage.errors import InvalidLocationError, StoreError, UntrustedDataError
from dcp_storage.stores.local import LocalStore
from dcp_storage.stores.location import Location, is_supported, parse_location, without_password
from dcp_storage.stores.memory import MemoryStore
from dcp_storage.stores.opening import open_store
from dcp_storage.stores.remote import FsspecStore

SPECIAL = ["[1]", "what?", "*", "a b", "a#b", "100%", "a%20b", "Zürich-東京", "~", "a::b", "{x}", "$HOME", "a:b"]


class Refusing(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Raises the error it is given, as a filesystem does that cannot reach its server or take its options."""

    protocol = "refusing"
    cachable = False

    def __init__(self, error: Exception) -> None:
        raise error


fsspec.register_implementation("refusing", Refusing, clobber=True)


@pytest.mark.parametrize(
    ("given", "url", "protocol", "path"),
    [
        ("/a/b", "/a/b", "file", "/a/b"),
        (Path("/a/b"), "/a/b", "file", "/a/b"),
        ("/a/b/", "/a/b", "file", "/a/b"),
        ("file:///a/b", "/a/b", "file", "/a/b"),
        ("local:///a/b/", "/a/b", "file", "/a/b"),
        ("/", "/", "file", "/"),
        ("/a/s3:/b", "/a/s3:/b", "file", "/a/s3:/b"),
        ("s3://bucket/run/step", "s3://bucket/run/step", "s3", "bucket/run/step"),
        ("s3://bucket/run//step//", "s3://bucket/run//step", "s3", "bucket/run//step"),
        ("S3://Bucket/Key", "s3://Bucket/Key", "s3", "Bucket/Key"),
        ("s3a://my.bucket", "s3a://my.bucket", "s3a", "my.bucket"),
        ("memory://x/y", "memory://x/y", "memory", "x/y"),
        ("dir://a/b/::file:///root", "dir://a/b::file:///root", "dir", "a/b"),
        ("dir::file:///root", "dir::file:///root", "dir", "/root"),
    ],
)
def test_a_path_is_taken_apart(given: str | Path, url: str, protocol: str, path: str) -> None:
    """Each accepted form has this URL, this protocol and this path."""
    assert parse_location(given) == Location(url, protocol, path)
    assert is_supported(given)


def test_a_relative_path_is_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the folder that was current when it was parsed, also after a change of folder."""
    monkeypatch.chdir(tmp_path)
    parsed = [parse_location(form) for form in ("run", Path("run"), "./run", "file://run")]
    monkeypatch.chdir("/")
    assert {location.path for location in parsed} == {f"{tmp_path}/run"}


def test_dots_are_left_to_the_system(tmp_path: Path) -> None:
    """A ".." behind a symbolic link leads where the system says, and so does the parent of such a path."""
    (tmp_path / "real/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/inner")
    location = parse_location(f"{tmp_path}/link/..")
    assert Path(location.path).resolve() == tmp_path / "real"
    assert Path(location.parent().path).resolve() == tmp_path


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("base", ["/root", "s3://bucket", "memory://m"])
def test_no_character_is_special(base: str, name: str) -> None:
    """A folder's name with any of these characters is the same text after parsing, as a child and as a parent."""
    child = parse_location(base).child(name)
    assert child.path.endswith(f"/{name}")
    assert child.child("x").parent() == child
    assert child.url == f"{base}/{name}"
    assert parse_location(f"{base}/{name}") == child


def test_a_chain_takes_names_that_fsspec_can_take() -> None:
    """In a chain a child goes into the first path; a name with "::" in it, which fsspec would split, is refused."""
    base = parse_location("dir://d::file:///root")
    assert base.child("a [1]*#%").url == "dir://d/a [1]*#%::file:///root"
    with pytest.raises(InvalidLocationError, match="::"):
        base.child("a::b")


def test_children_and_parents_undo_each_other() -> None:
    """A child's parent is the folder itself, up to the bucket or the root, which have none."""
    for text in ("/", "/a", "s3://bucket", "dir://a::file:///root", "gs-like/path"):
        location = parse_location(text)
        assert location.child("x").parent() == location
    assert parse_location("/").child("x").url == "/x"
    for text in ("/", "s3://bucket"):
        with pytest.raises(InvalidLocationError, match="no parent"):
            parse_location(text).parent()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\nb", "x" * 256])
def test_a_child_cannot_leave_its_folder(name: str) -> None:
    """A child's name is one plain path component."""
    with pytest.raises(UntrustedDataError):
        parse_location("s3://bucket/run").child(name)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "empty"),
        (Path("s3://b/k"), "pass it as a str"),
        ("s3:/b/p", "pass it as a str"),
        ("nosuch:/b/p", "pass it as a str"),
        (Path("s3://"), "pass it as a str"),
        ("dir::s3:/b/p", "pass it as a str"),
        ("nosuch://b/k", "'nosuch'"),
        ("dir://a::nosuch://b/k", "'nosuch'"),
        ("s3://", "no bucket"),
        ("memory:///", "no bucket"),
        ("file://", "no folder"),
        ("filecache::s3://b/k", "use the URL behind it"),
        ("/a\0b", "NUL"),
        (b"/a/b", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: Any, says: str) -> None:
    """Each of these raises InvalidLocationError with one sentence that says why, and is_supported answers False."""
    with pytest.raises(InvalidLocationError) as caught:
        parse_location(given)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not is_supported(given)


@pytest.mark.parametrize(
    ("url", "package", "says"),
    [
        ("s3://b/k", "s3fs", "pip install 'dcp-storage[s3]'"),
        ("gs://b/k", "gcsfs", "pip install 'dcp-storage[gcs]'"),
        ("gcs://b/k", "gcsfs", "pip install 'dcp-storage[gcs]'"),
        ("az://b/k", "adlfs", "Install adlfs"),
    ],
)
def test_a_missing_package_is_named(url: str, package: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a filesystem's package is not installed, the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)  # an import of it now fails
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})
    with pytest.raises(InvalidLocationError) as caught:
        parse_location(url)
    assert says in str(caught.value)
    assert not is_supported(url)


def test_parsing_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing makes no filesystem and opens no file."""
    import s3fs  # imported first: it is found, not opened

    parse_location("s3://bucket/run")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was opened")

    monkeypatch.setattr(s3fs.S3FileSystem, "__init__", refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    assert [parse_location(url).protocol for url in ("s3://bucket/run", "/a/b")] == ["s3", "file"]


def test_passwords_stay_out_of_messages() -> None:
    """A password in a URL is shown as stars; an account or container before an @ is not a secret."""
    assert without_password("ftp://me:secret@host/a@b") == "ftp://me:***@host/a@b"
    assert without_password("abfs://container@account/x") == "abfs://container@account/x"


def test_each_protocol_opens_its_store(tmp_path: Path) -> None:
    """Local paths, memory:// and s3:// have stores of their own, everything else the general one."""
    assert type(open_store(parse_location(tmp_path), {"auto_mkdir": True})) is LocalStore
    assert type(open_store(parse_location("memory://opened/x"))) is MemoryStore
    chained = open_store(parse_location(f"dir://a::file://{tmp_path}"))
    assert type(chained) is FsspecStore
    s3 = open_store(parse_location("s3://bucket/x"), {"key": "k", "secret": "s"}, max_concurrency=3)
    assert type(s3).__name__ == "S3Store"
    assert s3.url == "s3://bucket/x"
    s3.close()


@pytest.mark.parametrize("form", ["dir://::file://{root}/x", "dir::file://{root}/x", "dir://x::file://{root}"])
def test_a_chain_writes_where_it_says(form: str, tmp_path: Path) -> None:
    """Each way to write a chain on a local folder puts the object into that folder, and nowhere else."""
    (tmp_path / "x").mkdir()
    store = open_store(parse_location(form.format(root=tmp_path)))
    store.put("o", [memoryview(b"body")])
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [Path("x/o")]
    assert (tmp_path / "x/o").read_bytes() == b"body"


@pytest.mark.parametrize(
    ("error", "wanted", "transient"),
    [
        (TypeError("unexpected argument"), InvalidLocationError, False),
        (ValueError("bad option"), InvalidLocationError, False),
        (ImportError("no module"), InvalidLocationError, False),
        (ConnectionRefusedError(111, "refused"), StoreError, True),
        (RuntimeError("no credentials"), StoreError, False),
    ],
)
def test_what_cannot_be_opened_is_said(error: Exception, wanted: type[Exception], transient: bool) -> None:
    """Refused options and missing packages are errors of the location, a server out of reach is one of the store."""
    with pytest.raises(wanted) as caught:
        open_store(parse_location("refusing://me:secret@b/k"), {"error": error})
    assert getattr(caught.value, "transient", False) is transient
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is error
