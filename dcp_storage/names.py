"""The names of format 1: which files in a checkpoint's folder are ours, and what each is.

Nothing that is not ours is ever deleted (invariant I11), so the patterns here are the whole reach of delete and prune.
A token is sixteen characters that begin with a letter; ``.commit.<token>`` can so never be taken for ``.commit.<n>``.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable

from dcp_storage.errors import UntrustedDataError

__all__ = [
    "CLAIM",
    "MANIFEST",
    "PIN",
    "STOCK_VIEW",
    "blocks_claim",
    "check_name",
    "check_names",
    "commit_name",
    "commit_number",
    "is_name",
    "is_ours",
    "is_stock_view",
    "manifest_name",
    "new_token",
    "rank_commit",
    "rank_commit_name",
    "rank_manifest_name",
    "rank_view_name",
    "shard_name",
]

CLAIM = ".claim"
MANIFEST = ".manifest"
STOCK_VIEW = ".metadata"
PIN = ".pin"  # keeps a checkpoint from being deleted; not ours to delete

_TOKEN = r"[a-z][a-z0-9]{15}"
# Up to two tokens behind a name: an attempt's own one, and that of a local temporary file of it. The temporary files of
# a numbered commit and of a pin are ours although what they become is not, by this pattern.
_OURS = re.compile(
    r"(?:\.claim|\.commit(?:\.[1-9][0-9]{0,17}(?=\.))?|\.pin(?=\.)|\.manifest|\.metadata"
    rf"|__[0-9]+\.(?:commit|manifest|metadata)|__[0-9]+_[0-9]+(?:\.{_TOKEN})?\.distcp)"
    rf"(?:\.{_TOKEN}){{0,2}}"
)
_COMMIT = re.compile(r"\.commit(?:\.([1-9][0-9]{0,17}))?")
_RANK_COMMIT = re.compile(r"__([0-9]+)\.commit")
_STOCK_VIEW = re.compile(r"(?:__[0-9]+)?\.metadata")
# What stock torch leaves besides, killed between writing and renaming its metadata.
_STOCK_LEFTOVER = re.compile(r"(?:__[0-9]+)?\.metadata\.tmp")


def check_name(name: str) -> str:
    r"""Returns ``name`` if it is one plain path component, so that it cannot leave the folder.

    Raises:
        UntrustedDataError: it is empty, ``"."``, ``".."``, longer than 255 bytes, holds ``/``, ``\\`` or a control
            character, or no filesystem can have it.
    """
    if not is_name(name):
        raise UntrustedDataError(
            f"The name {name!r:.300} is refused: it could leave the checkpoint's folder.", name=name
        )
    return name


def check_names(names: Iterable[str], *, path: str | None) -> None:
    """Checks names that data from a store gives.

    Args:
        names: of files.
        path: the checkpoint, for errors.

    Raises:
        UntrustedDataError: as :func:`check_name`, of the first that is refused.
    """
    for name in names:
        try:
            check_name(name)
        except UntrustedDataError as error:
            error.path = path
            raise


def is_name(name: str) -> bool:
    """Whether :func:`check_name` takes ``name``."""
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        return False
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):  # both rows of control characters
        return False
    try:
        return len(name.encode("utf-8", "surrogateescape")) <= 255  # as the system's own names come from a listing
    except UnicodeEncodeError:
        return False


def new_token() -> str:
    """A fresh random token of 16 characters (about 82 bits)."""
    rest = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(15))
    return secrets.choice(string.ascii_lowercase) + rest


def commit_name(number: int) -> str:
    """The name of commit ``number`` (from 1): ``.commit``, ``.commit.2``, ``.commit.3``, …"""
    return ".commit" if number == 1 else f".commit.{number}"


def commit_number(name: str) -> int:
    """The number that a commit object's name stands for; 0 where ``name`` is no commit object."""
    found = _COMMIT.fullmatch(name)
    if not found:
        return 0
    number = int(found[1] or 1)
    return number if number > 1 or not found[1] else 0  # ".commit.1" is not a name we write


def manifest_name(token: str | None) -> str:
    """The manifest's name: plain under a claim, else with the attempt's token."""
    return MANIFEST if token is None else f"{MANIFEST}.{token}"


def shard_name(rank: int, number: int, token: str | None) -> str:
    """The name of a rank's file: ``__<rank>_<number>.distcp``, with the rank's token where it holds no fresh grant."""
    return f"__{rank}_{number}.distcp" if token is None else f"__{rank}_{number}.{token}.distcp"


def rank_commit_name(rank: int) -> str:
    """The name of a rank's own commit object in a save without collectives."""
    return f"__{rank}.commit"


def rank_view_name(rank: int) -> str:
    """The name under which stock torch looks for a rank's own metadata."""
    return f"__{rank}{STOCK_VIEW}"


def rank_manifest_name(rank: int, token: str) -> str:
    """The name of a rank's own manifest in a save without collectives."""
    return f"__{rank}{MANIFEST}.{token}"


def rank_commit(name: str) -> int | None:
    """The rank of a per-rank commit object (``__<rank>.commit``), None for any other name."""
    found = _RANK_COMMIT.fullmatch(name)
    return int(found[1]) if found else None


def is_stock_view(name: str) -> bool:
    """Whether this is a metadata file as stock torch writes it, for all ranks or for one."""
    return _STOCK_VIEW.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether delete and prune may touch a file of this name (commit objects have rules of their own)."""
    return commit_number(name) > 0 or _OURS.fullmatch(name) is not None


def blocks_claim(name: str) -> bool:
    """Whether a file of this name keeps a save from taking the plain names: ours, and what stock torch leaves."""
    return is_ours(name) or _STOCK_LEFTOVER.fullmatch(name) is not None
