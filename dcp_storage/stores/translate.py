"""Foreign exceptions as :class:`~dcp_storage.errors.StoreError`: by class, errno and HTTP status, never by text."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import sys

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError

__all__ = ["store_error", "unmasked"]

_LOST_CONNECTION = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
_TRANSIENT = _LOST_CONNECTION | {errno.EINTR, errno.EAGAIN, errno.ESTALE}
# After these a write may have been applied all the same: the answer was lost, or the disk failed half-way.
_MAYBE_APPLIED = _LOST_CONNECTION | {errno.EIO, errno.ESTALE}
_TRANSIENT_STATUS = frozenset({408, 425, 429})
_BROKEN = (TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)
# Errors of a broken connection in the client libraries that do not derive them from Python's own.
_CLIENT_ERRORS: tuple[tuple[str, str], ...] = (
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("ftplib", "error_temp"),
    ("requests.exceptions", "ConnectionError"),
    ("requests.exceptions", "Timeout"),
    ("requests.exceptions", "ChunkedEncodingError"),
)
# A connection that broke below a client which tried again by itself, for a minute and more: not once more by us, but
# what it asked for may have been done.
_TRIED_OUT = (
    ("azure.core.exceptions", "ServiceRequestError"),
    ("azure.core.exceptions", "ServiceResponseError"),
)


def store_error(
    error: Exception,
    operation: str,
    url: str,
    name: str | None = None,
    *,
    writes: bool = False,
    applied: bool = False,
) -> StoreError:
    """The error as one of ours; ``error`` itself if it is one.

    Args:
        error: what a system call or a filesystem raised.
        operation: the method of Store that failed.
        url: the folder.
        name: the object, None where the folder is meant.
        writes: whether the request changes something, so that a lost answer leaves its outcome open.
        applied: whether the change is known to be visible already, only not known to be durable.
    """
    if isinstance(error, StoreError):
        return error
    error = unmasked(error)
    untrusted = _is_untrusted(error)
    number = errno.EACCES if untrusted else _errno(error)
    broken = not untrusted and (isinstance(error, _BROKEN) or _is_one_of(error, _CLIENT_ERRORS))
    tried_out = not broken and _is_one_of(error, _TRIED_OUT)
    status = _http_status(error)
    busy = status is not None and (status >= 500 or status in _TRANSIENT_STATUS)
    kind = StoreError
    if number == errno.ENOENT:
        kind = ObjectNotFoundError
    elif number == errno.EEXIST:
        kind = ObjectExistsError
    about = url if name is None else f"{name!r} in {url}"
    said = getattr(error, "strerror", None) or str(error) or (os.strerror(number) if number else "no more is known")
    said = " ".join(line.strip() for line in said.splitlines())  # some clients say things on several lines
    label = type(error).__name__ if number is None else errno.errorcode.get(number, number)
    made = kind(
        f"{operation} failed for {about}: {said} ({label}).",
        operation=operation,
        errno=number,
        transient=broken or busy or number in _TRANSIENT,
        ambiguous=applied or (writes and (broken or tried_out or busy or number in _MAYBE_APPLIED)),
        path=url,
        key=name,
        cause=error,
    )
    made.__cause__ = error
    return made


def unmasked(error: Exception) -> Exception:
    """What a filesystem made a FileNotFoundError of though it was an outage, a refusal or a request that was never
    sent, because an option or the URL is wrong (http and ftp do); else ``error``. A store that failed must never look
    like one that holds nothing (invariant I10).
    """
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and not isinstance(cause, StoreError):
        meant = store_error(cause, "info", "")
        unsent = isinstance(cause, (TypeError, ValueError)) and not isinstance(cause, OSError)
        if meant.transient or meant.errno == errno.EACCES or unsent or _is_one_of(cause, _TRIED_OUT):
            return cause
    return error


def _is_untrusted(error: Exception) -> bool:
    """Whether the server's certificate was refused, which asking again does not change."""
    found = (error, getattr(error, "certificate_error", None), getattr(error, "os_error", None), error.__cause__)
    return any(isinstance(one, ssl.SSLCertVerificationError) for one in found)


def _errno(error: Exception) -> int | None:
    """The system's number: the error's own, or the one its class or its HTTP status stands for."""
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return number
    for kind, meaning in (
        (FileNotFoundError, errno.ENOENT),
        (FileExistsError, errno.EEXIST),
        (IsADirectoryError, errno.EISDIR),
        (NotADirectoryError, errno.ENOTDIR),
        (PermissionError, errno.EACCES),
        (NotImplementedError, errno.EOPNOTSUPP),
    ):
        if isinstance(error, kind):
            return meaning
    return {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT}.get(_http_status(error) or 0)


def _http_status(error: Exception) -> int | None:
    """The HTTP status that clients keep under different names; None where the error has none."""
    response = getattr(error, "response", None)
    for holder, field in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        status = getattr(holder, field, None)
        if isinstance(status, int) and 400 <= status <= 599:
            return status
    return None


def _is_one_of(error: Exception, named: tuple[tuple[str, str], ...]) -> bool:
    # Such an error can only exist where its module was imported already, so nothing needs to be imported here.
    classes = (getattr(sys.modules.get(module), name, None) for module, name in named)
    return any(isinstance(kind, type) and isinstance(error, kind) for kind in classes)
