"""Which names are ours: the reach of delete and prune, and what a commit's number is."""

from __future__ import annotations

import pytest

from dcp_storage import names
from dcp_storage.errors import UntrustedDataError

T = "abcdefghijklmnop"
U = "z123456789012345"

OURS = (
    ".claim",
    ".commit",
    ".commit.2",
    ".commit.10",
    ".manifest",
    f".manifest.{T}",
    ".metadata",
    "__0_0.distcp",
    "__12_345.distcp",
    f"__0_0.{T}.distcp",
    "__0.commit",
    "__7.metadata",
    f"__7.manifest.{T}",
    # temporary files of a local store, whose process was killed before it could remove them
    f".claim.{T}",
    f".commit.{T}",
    f".commit.2.{T}",
    f".commit.10.{T}",
    f".pin.{T}",
    f".metadata.{T}",
    f".manifest.{T}.{U}",
    f"__0.commit.{T}",
)

NOT_OURS = (
    "",
    "claim",
    ".claimed",
    ".claim.2",
    ".commit.",
    ".commit.0",
    ".commit.1",
    ".commit.02",
    ".commit.-2",
    ".commit.2.bak",
    ".commit.2~",
    ".commit.two",
    ".commits",
    ".Commit",
    "commit",
    ".manifest.json",
    ".manifest.short",
    f".manifest.{T.upper()}",
    f".manifest.1{T[1:]}",
    f".manifest.{T}x",
    f".manifest.{T}.{U}.{T}",
    ".metadata.tmp",
    ".metadata.2",
    "__0_0.distcp.bak",
    "__0_0.DISTCP",
    "__0_0_0.distcp",
    "__0.distcp",
    "_0_0.distcp",
    "__a_0.distcp",
    "__0_-1.distcp",
    "__0_0.short.distcp",
    "__0_0.distcp\n",
    "\n__0_0.distcp",
    "x__0_0.distcp",
    "__init__.py",
    "__0.metadata.tmp",
    "model.distcp",
    "notes.txt",
)


@pytest.mark.parametrize("name", OURS)
def test_what_we_write_is_ours(name: str) -> None:
    """Every kind of name that a save, a delete or a local temporary file makes is ours, and blocks a claim."""
    assert names.is_ours(name)
    assert names.blocks_claim(name)


@pytest.mark.parametrize("name", NOT_OURS)
def test_near_misses_are_not_ours(name: str) -> None:
    """A name that only looks like one of ours is somebody else's: no delete and no prune may touch it."""
    assert not names.is_ours(name)
    assert names.commit_number(name) == 0
    assert names.rank_commit(name) is None


@pytest.mark.parametrize("name", ["__٣_٠.distcp", ".commit.1٣", "__٣.commit", "__0_৭.distcp"])
def test_digits_of_other_scripts_are_not_ours(name: str) -> None:
    """Only the digits 0 to 9 make a number: a name with others was not written by us."""
    assert not names.is_ours(name)
    assert names.commit_number(name) == 0
    assert names.rank_commit(name) is None


@pytest.mark.parametrize("name", [".metadata.tmp", "__3.metadata.tmp"])
def test_leftovers_of_stock_torch_block_a_claim_and_stay(name: str) -> None:
    """What stock torch leaves when it is killed keeps a save from the plain names, but is not ours to delete."""
    assert names.blocks_claim(name)
    assert not names.is_ours(name)


@pytest.mark.parametrize("name", ["notes.txt", "__init__.py", ".commit.1", ".gitignore"])
def test_foreign_files_do_not_block_a_claim(name: str) -> None:
    """A folder with somebody's own files in it still gives the plain names."""
    assert not names.blocks_claim(name)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (".commit", 1),
        (".commit.2", 2),
        (".commit.9", 9),
        (".commit.10", 10),
        (".commit.999999999999999999", 999_999_999_999_999_999),
        (".commit.1", 0),
        (".commit.02", 0),
        (".commit.0", 0),
        (f".commit.{T}", 0),
        (f".commit.2.{T}", 0),
        ("__1.commit", 0),
        (".commit.1000000000000000000", 0),
    ],
)
def test_the_number_of_a_commit(name: str, number: int) -> None:
    """A commit's number is that of its one name; no second spelling stands for it."""
    assert names.commit_number(name) == number


@pytest.mark.parametrize("number", [1, 2, 9, 10, 11, 123_456])
def test_a_commit_name_reads_back_as_its_number(number: int) -> None:
    """The name made for a number is read as that number."""
    assert names.commit_number(names.commit_name(number)) == number


def test_the_names_of_a_save() -> None:
    """Shards and manifests have the names of the format, plain or with a token."""
    assert names.shard_name(3, 0, None) == "__3_0.distcp"
    assert names.shard_name(3, 12, T) == f"__3_12.{T}.distcp"
    assert names.manifest_name(None) == ".manifest"
    assert names.manifest_name(T) == f".manifest.{T}"
    assert (names.commit_name(1), names.commit_name(2)) == (".commit", ".commit.2")


def test_tokens_are_fresh_and_never_read_as_a_number() -> None:
    """A token is sixteen characters of a-z and 0-9 with a letter first, and no two are the same."""
    tokens = {names.new_token() for _ in range(2000)}
    assert len(tokens) == 2000
    for token in tokens:
        assert len(token) == 16
        assert token[0] in "abcdefghijklmnopqrstuvwxyz"
        assert set(token) <= set("abcdefghijklmnopqrstuvwxyz0123456789")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\0b", "a\nb", "a\x7fb", "x" * 256, "ü" * 128]
)
def test_a_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    """Only one plain path component of at most 255 bytes is a name."""
    with pytest.raises(UntrustedDataError) as caught:
        names.check_name(name)
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["a", "...", "a b", "[1]", "?", "*", "a#b%20", "ü", "x" * 255, ".commit.1"])
def test_any_other_name_is_a_name(name: str) -> None:
    """No character but separators and control characters is special."""
    assert names.check_name(name) == name
