"""What botocore, aiohttp and the socket raise, as :class:`~dcp_storage.errors.StoreError`.

An answer of the server is judged by its HTTP status and its ``Code`` field, never by its text: the text differs from
server to server. Everything that leaves the outcome of a change open is marked ``ambiguous``.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from dcp_storage.errors import CheckpointError, StoreError
from dcp_storage.stores.asking import (
    DENIED,
    S3_CLOCK_CODES,
    S3_DENIED_CODES,
    S3_EXPIRED_CODES,
    S3_FULL_CODES,
    S3_TRANSIENT_CODES,
    TRANSIENT_STATUS,
    UNKNOWN_VERB,
    UNMADE,
    Request,
    said_by,
)

__all__ = ["code_of", "field_of", "status_of", "translated"]

FOREIGN: tuple[type[BaseException], ...] = (
    boto.ClientError,
    boto.BotoCoreError,
    ResponseParserError,  # no BotoCoreError: a body that is not the XML it should be
    aiohttp.ClientError,
    HttpProcessingError,
    asyncio.TimeoutError,  # not the builtin one before Python 3.11
    OSError,
    UnicodeError,  # a name with lone surrogates, which no URL can carry
)

NO_CREDENTIALS: tuple[type[BaseException], ...] = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
)

# Of botocore's own; the bare HTTPClientError is left out, since botocore wraps in it whatever it cannot place.
CONNECTION: tuple[type[BaseException], ...] = (
    boto.ConnectionError,
    boto.ConnectionClosedError,
    boto.ReadTimeoutError,
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    ResponseParserError,
)
NETWORK: tuple[type[BaseException], ...] = (aiohttp.ClientError, HttpProcessingError, asyncio.TimeoutError, OSError)
NEVER_PASSING: tuple[type[BaseException], ...] = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.InvalidURL,
    aiohttp.NonHttpUrlClientError,
)
LOCAL_FILES: tuple[type[BaseException], ...] = (FileNotFoundError, PermissionError)  # a CA bundle or a settings file
TIMED_OUT: tuple[type[BaseException], ...] = (asyncio.TimeoutError, boto.ReadTimeoutError, boto.ConnectTimeoutError)

DAMAGED_CODES = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})


def status_of(error: Any) -> int:
    """The HTTP status in a botocore ClientError, 0 where there is none."""
    answer: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
    status = answer.get("HTTPStatusCode", 0)
    return status if isinstance(status, int) else 0


def code_of(error: Any) -> str:
    """The ``Code`` in a botocore ClientError; after a HEAD, which has no body, it is the status in digits."""
    return str(error.response.get("Error", {}).get("Code", ""))


def field_of(request: Request, answer: Mapping[str, Any], name: str) -> Any:
    """What the answer says under ``name``.

    botocore takes any XML, and an empty body, for an answer in which every field is missing; what a gateway says in
    the server's stead must not pass for an empty listing (invariant I10).

    Raises:
        StoreError: the answer lacks it; transient.
    """
    if name not in answer:
        raise request.error(f"the server's answer has no {name}.", transient=True)
    return answer[name]


@contextmanager
def translated(request: Request) -> Iterator[None]:
    """Raises what the client libraries raise inside the block as a StoreError about ``request``."""
    try:
        yield
    except CheckpointError:  # some are OSErrors or ValueErrors too, and all are ours already
        raise
    except boto.ClientError as error:
        raise _answered(request, error) from error
    except FOREIGN as error:
        raise _unanswered(request, error) from error
    except UNMADE as error:
        raise request.unmade(error) from error


def _answered(request: Request, error: Any) -> StoreError:
    status, code = status_of(error), code_of(error)
    said = f"the server answered {status} {code}"
    if code in S3_EXPIRED_CODES:
        # Refused before anything was done. Where botocore can renew them it does so for a later try.
        return request.error(
            f"the credentials have expired; {said}.", error, errno=errno.EACCES, transient=True, ambiguous=False
        )
    if code in S3_CLOCK_CODES:
        return request.error(
            f"the clock of this machine and the server's differ too much; {said}.", error, errno=errno.EACCES
        )
    if code in S3_DENIED_CODES or status in (401, 403):
        return request.error(f"{DENIED}; {said}.", error, errno=errno.EACCES)
    if code == "NoSuchBucket":
        return request.not_found(said, error, missing=f"there is no bucket {request.bucket!r}")
    if code == "NoSuchUpload":
        return request.not_found(said, error, missing="the upload is gone: it was completed or aborted")
    if status == 404:
        return request.not_found(said, error)
    if status in UNKNOWN_VERB:
        return request.error(f"the server does not know this request; {said}.", error, errno=errno.EOPNOTSUPP)
    if code in S3_FULL_CODES or status == 507:
        return request.error(f"the store is full; {said}.", error, errno=errno.ENOSPC)
    if code in DAMAGED_CODES:
        return request.error(f"the bytes that arrived do not match their checksum; {said}.", error, errno=errno.EIO)
    if status == 409:
        # OperationAborted, ConditionalRequestConflict: another request on the name was in progress and this one was
        # refused, so it changed nothing. AWS: "you should retry the upload".
        return request.error(f"another request on it is in progress; {said}.", error, transient=True, ambiguous=False)
    if code in S3_TRANSIENT_CODES or status in TRANSIENT_STATUS or status >= 500:
        return request.error(f"{said}.", error, transient=True)
    return request.error(f"{said}.", error, errno=errno.EINVAL)


def _unanswered(request: Request, error: BaseException) -> StoreError:
    if isinstance(error, NO_CREDENTIALS):
        return request.error(f"no usable credentials were found: {error}", error, errno=errno.EACCES)
    # botocore keeps what the socket raised in the keyword it formats its message from.
    inner = error.kwargs.get("error") if isinstance(error, boto.BotoCoreError) else None
    number = getattr(inner, "errno", None) or getattr(error, "errno", None)
    reason = f"{type(error).__name__}: {said_by(error)}"
    if isinstance(inner, NEVER_PASSING):
        return request.error(reason, error, errno=number)
    if isinstance(error, CONNECTION) or _is_passing(error) or (inner is not None and _is_passing(inner)):
        if isinstance(error, TIMED_OUT) or isinstance(inner, TIMED_OUT):
            number = number or errno.ETIMEDOUT
        return request.error(reason, error, errno=number, transient=True)
    return request.error(reason, error, errno=number or errno.EINVAL)


def _is_passing(error: object) -> bool:
    return isinstance(error, NETWORK) and not isinstance(error, LOCAL_FILES)
