"""What obstore raises, as :class:`~dcp_storage.errors.StoreError`.

obstore has a class of its own for a missing object, a refusal and a conflict, and one, ``GenericError``, for everything
else: a 503, a 400, a broken connection, a time-out. It carries no status and no code, only text, so this is the one
place of the package that reads a message. Read is what Rust prints of the error's structure ("Debug source"); where
there is none, which is so for its writer alone, the fixed words before the status. Of the server's own words only the
``Code`` of its answer counts. What is not recognised counts as passing: every request made here may be repeated.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions as obstore_errors

from dcp_storage.errors import StoreError
from dcp_storage.stores.asking import (
    DENIED,
    S3_CLOCK_CODES,
    S3_DENIED_CODES,
    S3_EXPIRED_CODES,
    S3_FULL_CODES,
    S3_TRANSIENT_CODES,
    TRANSIENT_STATUS,
    UNKNOWN_VERB,
    Request,
)

__all__ = ["NoRangesError", "translated"]

_DEBUG = "\nDebug source:\n"
_MOST_SAID = 600  # characters: gateways answer with whole pages
# URLs stand before these words, but hold no spaces; the server's words stand behind, and the first match counts.
_STATUS = re.compile(
    r"\b(?:Status|Response)\s\{\s+status:\s(\d{3})\b|\s-\sServer returned non-2xx status code: (\d{3})\b"
)
_KIND = re.compile(r"\bHttpError\s\{\s+kind:\s([A-Za-z]+)\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_WHOLE = re.compile(r"\bsource:\sNotPartial\b")
_REDIRECT = re.compile(r"\bBareRedirect\b")
_CERTIFICATE = re.compile(r"\bInvalidCertificate\b")

_NOTHING_DONE = frozenset({425, 429})
_DENIED_CODES = S3_DENIED_CODES | S3_CLOCK_CODES

_DENIED = (obstore_errors.PermissionDeniedError, obstore_errors.UnauthenticatedError, PermissionError)
_CONFLICT = (obstore_errors.AlreadyExistsError, FileExistsError)
_WRONG_USE = (obstore_errors.InvalidPathError, obstore_errors.UnknownConfigurationKeyError, ValueError)
_FOREIGN = (obstore_errors.BaseError, OSError, ValueError, NotImplementedError)


class NoRangesError(Exception):
    """The server did not call its answer a part of the object, and obstore took none of it."""


@contextmanager
def translated(request: Request, *, end: int | None = None) -> Iterator[None]:
    """Raises what obstore raises inside the block as a StoreError about ``request``.

    Args:
        request: what was asked.
        end: for a range: the byte it ends before, which an answer 416 says the object does not reach.

    Raises:
        NoRangesError: the server does not know ranges.
    """
    try:
        yield
    except StoreError:  # an OSError too, and already ours
        raise
    except _FOREIGN as error:
        if end is not None and _WHOLE.search(_structure(error)):
            raise NoRangesError(str(error)) from error
        if end is not None and _number(_STATUS, _structure(error)) == 416:
            raise request.too_short(end, None, error) from error
        raise _as_store_error(request, error) from error


def _as_store_error(request: Request, error: BaseException) -> StoreError:
    said = _sentence(error)
    if isinstance(error, FileNotFoundError):
        return request.not_found(said, error)
    if isinstance(error, _DENIED):
        return request.error(f"{DENIED}; {said}", error, errno=errno.EACCES)
    if isinstance(error, _CONFLICT):
        # No condition is ever sent here: another request on the name was in progress, and this one changed nothing.
        return request.error(f"another request on it is in progress; {said}", error, transient=True, ambiguous=False)
    if isinstance(error, (obstore_errors.NotSupportedError, NotImplementedError)):
        return request.error(said, error, errno=errno.EOPNOTSUPP)
    if isinstance(error, _WRONG_USE):
        return request.error(said, error, errno=errno.EINVAL)
    return _generic(request, error, said)


def _generic(request: Request, error: BaseException, said: str) -> StoreError:
    text = _structure(error)
    status, kind = _number(_STATUS, text), _word(_KIND, text)
    if status is not None:
        return _answered(request, error, said, status, _word(_CODE, text))
    if _REDIRECT.search(text):
        return request.error(f"the region is wrong; {said}", error, errno=errno.EINVAL)
    if kind == "Connect":  # there never was a connection, so nothing was done
        passing = not _CERTIFICATE.search(text)
        return request.error(said, error, errno=None if passing else errno.EINVAL, transient=passing, ambiguous=False)
    return request.error(said, error, errno=errno.ETIMEDOUT if kind == "Timeout" else None, transient=True)


def _answered(request: Request, error: BaseException, said: str, status: int, code: str) -> StoreError:
    if code in S3_EXPIRED_CODES:  # refused before anything was done; the next try takes those that s3fs then has
        said = f"the credentials have expired; {said}"
        return request.error(said, error, errno=errno.EACCES, transient=True, ambiguous=False)
    if code in _DENIED_CODES or status in (401, 403):
        return request.error(f"{DENIED}; {said}", error, errno=errno.EACCES)
    if status == 404:
        return request.not_found(said, error)
    if status in UNKNOWN_VERB:
        return request.error(f"the server does not know this request; {said}", error, errno=errno.EOPNOTSUPP)
    if code in S3_FULL_CODES or status == 507:
        return request.error(f"the store is full; {said}", error, errno=errno.ENOSPC)
    if code in S3_TRANSIENT_CODES or status in TRANSIENT_STATUS or status >= 500:
        return request.error(said, error, transient=True, ambiguous=False if status in _NOTHING_DONE else None)
    return request.error(said, error, errno=errno.EINVAL)


def _sentence(error: BaseException) -> str:
    """What obstore says for people, on one line."""
    text = " ".join(str(error).partition(_DEBUG)[0].split())
    return f"{type(error).__name__}: {text[:_MOST_SAID]}"


def _structure(error: BaseException) -> str:
    """What Rust prints of the error's structure; line ends in it are escaped, so the mark stands there once."""
    text = str(error)
    return text.rpartition(_DEBUG)[2] if _DEBUG in text else text


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(found[1] or found[2])


def _word(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return "" if found is None else found[1]
