"""Where a checkpoint lies: a path or URL, taken apart once and refused early if it cannot be meant.

A location is either a local folder or an fsspec URL. No character of a path is special: there are no globs, no
percent-decoding, no query strings, no home directories.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import fsspec
from fsspec.registry import known_implementations, registry

from dcp_storage.errors import InvalidLocationError
from dcp_storage.store import check_name

__all__ = ["Location", "is_supported", "parse_location", "without_password"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What pathlib makes of a URL ("s3://b/k" -> "s3:/b/k", "s3://" -> "s3:"). One letter is left alone: a drive.
_MANGLED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/(?!/).*)?", re.DOTALL)
_PASSWORD = re.compile(r"(://[^/:@]*):[^/@]*@")
_LOCAL = frozenset({"file", "local"})
_INSTALL = {
    "s3": "pip install 'dcp-storage[s3]'",
    "s3a": "pip install 'dcp-storage[s3]'",
    "gs": "pip install 'dcp-storage[gcs]'",
    "gcs": "pip install 'dcp-storage[gcs]'",
}
# These answer from copies of their own, which another process's write does not reach (the contract forbids that).
_CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})


@dataclass(frozen=True)
class Location:
    """One folder of one filesystem.

    Attributes:
        url: what names it in messages and in ``checkpoint_id``: the plain absolute path of a local folder, else a URL.
        protocol: fsspec's name of the filesystem; ``"file"`` for every local folder.
        path: the folder within the filesystem (a bucket and a key, or an absolute path), without a slash at its end.
    """

    url: str
    protocol: str
    path: str

    def child(self, name: str) -> Location:
        """The folder ``name`` inside this one.

        Raises:
            UntrustedDataError: ``name`` is not a plain path component.
            InvalidLocationError: ``name`` holds ``::`` and this location is a chain, which fsspec splits there.
        """
        check_name(name)
        return self._with_path(f"{self.path.rstrip('/')}/{name}")

    def parent(self) -> Location:
        """The folder that this one lies in.

        Raises:
            InvalidLocationError: it lies in none: a bucket, the root.
        """
        if self.protocol == "file":
            above = str(Path(self.path).parent)
            if Path(self.path).name == "..":  # ".." is the system's to resolve: links may stand before it
                above = f"{self.path}/.."
            inside = above != self.path
        else:
            above = self.path.rpartition("/")[0].rstrip("/")
            inside = bool(above)
        if not inside:
            raise InvalidLocationError(f"{without_password(self.url)!r} has no parent folder.", path=self.url)
        return self._with_path(above)

    def _with_path(self, path: str) -> Location:
        if self.protocol == "file":
            return Location(path, "file", path)
        before, _, after = _split(self.url)
        url = f"{before}{path}{after}"
        if _split(url) != (before, path, after):
            raise InvalidLocationError(
                f"A chained URL cannot hold a folder with '::' in its name, as {without_password(url)!r} would.",
                path=url,
            )
        return Location(url, self.protocol, path)


def without_password(url: str) -> str:
    """The URL as it may stand in messages: ``user:password@`` becomes ``user:***@``."""
    return _PASSWORD.sub(r"\1:***@", url)


def is_supported(path: object) -> bool:
    """Whether :func:`parse_location` takes ``path``. Never raises."""
    try:
        parse_location(path)  # type: ignore[arg-type]  # anything may be asked about; the wrong types answer False
    except InvalidLocationError:
        return False
    return True


def parse_location(path: str | os.PathLike[str]) -> Location:
    """Takes a path or URL apart; opens nothing, sends nothing.

    Args:
        path: a local path (a relative one is made absolute at once), ``file://`` or ``local://`` with a path, any other
            ``scheme://bucket/key`` that fsspec knows, or several chained with ``::`` as fsspec does.

    Raises:
        InvalidLocationError: it is empty, not a path, a URL that pathlib has rewritten, has no bucket or folder, or its
            filesystem is unknown, not installed or one that keeps copies. The sentence says what to do.
    """
    text = _text(path)
    chain = _is_chain(text)
    for link in text.split("::") if chain else [text]:
        if _MANGLED_URL.fullmatch(link):
            raise InvalidLocationError(
                f"{text!r} looks like a URL that pathlib has rewritten (it merges slashes): pass it as a str with "
                f"'://'. If a local folder is meant, give its absolute path.",
                path=text,
            )
    if chain:
        for link in text.split("::"):
            match = _URL.match(link)
            _check_scheme(match[1].lower() if match else link, text, plain_ok=match is None)
        before, folder, after = _split(text)
        protocol = text.partition("::")[0].partition("://")[0].lower()
    else:
        match = _URL.fullmatch(text)
        if match is None:
            return _local(text)
        protocol = match[1].lower()
        _check_scheme(protocol, text)
        if protocol in _LOCAL:
            if not match[2]:
                raise InvalidLocationError(f"{text!r} names no folder.", path=text)
            return _local(match[2])
        before, folder, after = f"{protocol}://", match[2], ""
    folder = folder.rstrip("/")
    if not folder:
        raise InvalidLocationError(f"{without_password(text)!r} names no bucket and no folder.", path=text)
    return Location(f"{before}{folder}{after}", protocol, folder)


def _text(path: object) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise InvalidLocationError(
            f"A checkpoint's place is a str or an os.PathLike of str, not {type(path).__name__}."
        )
    if not text:
        raise InvalidLocationError("The checkpoint's path is empty.", path=text)
    if "\0" in text:
        raise InvalidLocationError(f"{text!r} holds a NUL character, which no filesystem takes.", path=text)
    return text


def _local(text: str) -> Location:
    path = str(Path(text).absolute())
    return Location(path, "file", path)


def _is_chain(text: str) -> bool:
    """Whether fsspec's ``::`` is meant, and not two colons in the name of a folder."""
    first, _, rest = text.partition("::")
    if not rest:
        return False
    if _URL.fullmatch(first):
        return any(_URL.match(link) or link.startswith("/") for link in rest.split("::"))
    return _is_known(first)


def _split(url: str) -> tuple[str, str, str]:
    """The text before the folder's path, the path, and the text after it. A chain's first path is the folder's."""
    links = url.split("::") if _is_chain(url) else [url]
    for number, link in enumerate(links):
        match = _URL.fullmatch(link)
        scheme, path = (f"{match[1]}://", match[2]) if match else ("", link if link.startswith("/") else "")
        if path:
            before = "".join(f"{earlier}::" for earlier in links[:number]) + scheme
            return before, path, "".join(f"::{later}" for later in links[number + 1 :])
    return url, "", ""


def _is_known(protocol: str) -> bool:
    return protocol in known_implementations or protocol in registry  # the second: what programs registered as classes


def _check_scheme(protocol: str, text: str, *, plain_ok: bool = False) -> None:
    """Refuses a filesystem that cannot be opened; ``plain_ok`` where a chain's link may be a plain path."""
    shown = without_password(text)
    if not _is_known(protocol):
        if plain_ok and protocol.startswith("/"):
            return
        raise InvalidLocationError(f"fsspec knows no filesystem {protocol!r}, which {shown!r} asks for.", path=text)
    if protocol in _CACHES:
        raise InvalidLocationError(
            f"{protocol!r} answers from copies that it keeps, so {shown!r} could show an old checkpoint: "
            f"use the URL behind it.",
            path=text,
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        advice = _INSTALL.get(protocol) or str(error)
        raise InvalidLocationError(
            f"The package behind {protocol}:// is not installed, so {shown!r} cannot be opened: {advice}.",
            path=text,
            cause=error,
        ) from error
