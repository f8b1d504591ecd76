"""What GCS, aiohttp and google-auth say went wrong, as :class:`~dcp_storage.errors.StoreError`.

An answer is judged by its HTTP status and the ``reason`` of its first error, never by its text.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from gcsfs.retry import HttpError, NonRetryableError
from google.auth.exceptions import GoogleAuthError, TransportError

from dcp_storage.errors import CheckpointError, StoreError
from dcp_storage.stores.asking import DENIED, TRANSIENT_STATUS, UNKNOWN_VERB, UNMADE, Request, said_by

__all__ = ["Refused", "translated"]

AUTH: tuple[type[BaseException], ...] = (GoogleAuthError, HttpError, NonRetryableError)
NETWORK: tuple[type[BaseException], ...] = (aiohttp.ClientError, HttpProcessingError, asyncio.TimeoutError, OSError)
NEVER_PASSING: tuple[type[BaseException], ...] = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.InvalidURL,
    aiohttp.NonHttpUrlClientError,
)
LOCAL_FILES: tuple[type[BaseException], ...] = (FileNotFoundError, PermissionError)  # a file with credentials
FOREIGN: tuple[type[BaseException], ...] = (
    *AUTH,
    *NETWORK,
    UnicodeError,  # a name with lone surrogates, which no URL can carry
    json.JSONDecodeError,  # an answer that is not the JSON it should be
)

# Too many requests are refused before anything is done; a 408 or 5xx may come after the work.
NOTHING_DONE = frozenset({409, 425, 429})
TOO_MANY = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})  # also sent with 403
FULL = frozenset({"quotaExceeded", "dailyLimitExceeded"})


class Refused(Exception):  # noqa: N818 - an answer, which not everybody takes for an error
    """The server answered with a status that is no success.

    Attributes:
        status: the HTTP status.
        reason: the ``reason`` of the first error, empty where there is none.
        headers: the answer's.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.reason, message = _said(body)
        super().__init__(f"{status} {self.reason or message}".strip())


def _said(body: bytes) -> tuple[str, str]:
    """Reason and message of an answer; media downloads answer in plain text."""
    try:
        error: Any = json.loads(body)["error"]
        first = error["errors"][0]
        return str(first.get("reason", "")), str(error.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", body[:200].decode("utf-8", "replace")


@contextmanager
def translated(request: Request) -> Iterator[None]:
    """Raises what the client libraries raise inside the block as a StoreError about ``request``."""
    try:
        yield
    except CheckpointError:  # some are OSErrors or ValueErrors too, and all are ours already
        raise
    except Refused as error:
        raise _answered(request, error) from error
    except FOREIGN as error:
        raise _unanswered(request, error) from error
    except UNMADE as error:
        raise request.unmade(error) from error


def _answered(request: Request, error: Refused) -> StoreError:
    status, said = error.status, f"the server answered {error}"
    if error.reason in TOO_MANY:
        return request.error(f"{said}.", error, transient=True, ambiguous=False)
    if error.reason in FULL:
        return request.error(f"a quota is used up; {said}.", error, errno=errno.EDQUOT)
    if status in (401, 403):
        return request.error(f"{DENIED}; {said}.", error, errno=errno.EACCES)
    if status == 404:
        return request.not_found(said, error)
    if status in UNKNOWN_VERB:
        return request.error(f"the server does not know this request; {said}.", error, errno=errno.EOPNOTSUPP)
    if status == 507:
        return request.error(f"the store is full; {said}.", error, errno=errno.ENOSPC)
    if status == 409 or status in TRANSIENT_STATUS or status >= 500:
        ambiguous = False if status in NOTHING_DONE else None
        return request.error(f"{said}.", error, transient=True, ambiguous=ambiguous)
    return request.error(f"{said}.", error, errno=errno.EINVAL)


def _unanswered(request: Request, error: BaseException) -> StoreError:
    reason = f"{type(error).__name__}: {said_by(error)}"
    if isinstance(error, AUTH):
        # gcsfs wraps what google-auth raised. Nothing was sent to the store.
        root = error.__cause__ if isinstance(error.__cause__, GoogleAuthError) else error
        passing = isinstance(root, TransportError) or getattr(root, "retryable", False) is True
        number = None if passing else errno.EACCES
        return request.error(
            f"no usable credentials were found; {reason}", error, errno=number, transient=passing, ambiguous=False
        )
    number = getattr(error, "errno", None)
    if isinstance(error, NETWORK) and not isinstance(error, (*NEVER_PASSING, *LOCAL_FILES)):
        if isinstance(error, asyncio.TimeoutError):
            number = number or errno.ETIMEDOUT
        unsent = isinstance(error, aiohttp.ClientConnectorError)  # there never was a connection
        return request.error(reason, error, errno=number, transient=True, ambiguous=False if unsent else None)
    if isinstance(error, json.JSONDecodeError):  # cut off, or a proxy's page
        return request.error(f"the server's answer is no JSON; {reason}", error, transient=True)
    return request.error(reason, error, errno=number or errno.EINVAL)
