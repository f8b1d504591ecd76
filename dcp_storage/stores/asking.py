"""What was asked of an object store, and how servers answer: the parts that every client's errors share."""

from __future__ import annotations

import errno as errno_numbers
import re
from dataclasses import dataclass

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooShortError, StoreError

__all__ = [
    "CONNECT_TIMEOUT",
    "DENIED",
    "READ_TIMEOUT",
    "S3_CLOCK_CODES",
    "S3_DENIED_CODES",
    "S3_EXPIRED_CODES",
    "S3_FULL_CODES",
    "S3_TRANSIENT_CODES",
    "SLOWEST",
    "TRANSIENT_STATUS",
    "UNKNOWN_VERB",
    "UNMADE",
    "Request",
    "said_by",
]

# Met while a request is signed or its URL is built, where an option is not what the libraries take it for.
UNMADE: tuple[type[Exception], ...] = (ValueError, TypeError, AttributeError)

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 60.0  # seconds without a byte of the answer
SLOWEST = 64 * 1024  # bytes a second that a body needs at least: what is slower counts as stuck

DENIED = "the credentials are wrong or lack the right to do this"

TRANSIENT_STATUS = frozenset({408, 425, 429})
UNKNOWN_VERB = frozenset({405, 501})

# Codes of S3 that say more than the status they come with (some servers send them with 400).
S3_TRANSIENT_CODES = frozenset(
    {
        "BandwidthLimitExceeded",
        "InternalError",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
S3_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
S3_CLOCK_CODES = frozenset({"RequestExpired", "RequestTimeTooSkewed"})
S3_DENIED_CODES = frozenset(
    {
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
    }
)
S3_FULL_CODES = frozenset({"InsufficientCapacity", "QuotaExceeded", "XMinioStorageFull"})


_LINES = re.compile(r"\s*\n\s*")  # some clients say things on several lines


@dataclass(frozen=True)
class Request:
    """What was asked of the store; the part of an error that does not depend on what went wrong.

    Attributes:
        operation: the method of the Store.
        url: the folder.
        bucket: its bucket, named where it may be missing.
        name: the object's name in the folder, None where the request is about the folder.
        changes: whether the request changes anything, so that a lost reply leaves the outcome open.
    """

    operation: str
    url: str
    bucket: str
    name: str | None = None
    changes: bool = False

    @property
    def object_name(self) -> str:
        """The object's name, empty where the request is about the folder."""
        return self.name or ""

    def error(
        self,
        reason: str,
        cause: BaseException | None = None,
        *,
        errno: int | None = None,
        transient: bool = False,
        ambiguous: bool | None = None,
    ) -> StoreError:
        """A StoreError about this request; ``ambiguous`` is by default a transient failure of a change."""
        return StoreError(
            f"{self._failed} {_LINES.sub(' ', reason.strip())}",
            operation=self.operation,
            path=self.url,
            key=self.name,
            errno=errno,
            transient=transient,
            ambiguous=(transient and self.changes) if ambiguous is None else ambiguous,
            cause=cause,
        )

    def unmade(self, cause: BaseException) -> StoreError:
        """A StoreError for what :data:`UNMADE` holds: the request never left this process."""
        said = (
            f"the request could not be made ({type(cause).__name__}: {cause}); is a storage option of the wrong kind?"
        )
        return self.error(said, cause, errno=errno_numbers.EINVAL, ambiguous=False)

    def not_found(
        self, said: str, cause: BaseException | None = None, *, missing: str | None = None
    ) -> ObjectNotFoundError:
        """An ObjectNotFoundError about this request.

        Args:
            said: the server's answer, without a full stop.
            cause: what the client raised.
            missing: what is missing; by default the object, or the bucket, since most servers do not tell which.
        """
        if missing is None:
            missing = f"there is no bucket {self.bucket!r}"
            if self.name is not None:
                missing = f"there is no such object (or no bucket {self.bucket!r})"
        return ObjectNotFoundError(
            f"{self._failed} {missing}; {said}.", operation=self.operation, path=self.url, key=self.name, cause=cause
        )

    def exists(self, cause: BaseException | None = None) -> ObjectExistsError:
        """An ObjectExistsError about this request."""
        return ObjectExistsError(
            f"{self._failed} there is an object of this name.",
            operation=self.operation,
            path=self.url,
            key=self.name,
            cause=cause,
        )

    def too_short(self, wanted: int, found: int | None, cause: BaseException | None = None) -> ObjectTooShortError:
        """An ObjectTooShortError about this request; ``found`` is the object's size where it is known."""
        return ObjectTooShortError(
            f"{self.url}/{self.name} ends at byte {'?' if found is None else found}, before byte {wanted}.",
            operation=self.operation,
            path=self.url,
            key=self.name,
            wanted=wanted,
            found=found,
            cause=cause,
        )

    @property
    def _failed(self) -> str:
        where = self.url if self.name is None else f"{self.url}/{self.name}"
        return f"{self.operation} of {where} failed:"


def said_by(error: BaseException) -> str:
    """What an error says; the time-outs of asyncio say nothing."""
    return str(error) or "there was no answer in time"
