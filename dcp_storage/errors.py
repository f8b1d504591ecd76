"""Every error this package raises.

::

    CheckpointError(Exception)           .kind (stable string)  .path  .key
    ├── CheckpointExistsError            also FileExistsError
    ├── CheckpointNotFoundError          also FileNotFoundError
    │   └── NotCommittedError            says what is there and what to do
    ├── CheckpointReplacedError          another save committed while this load was reading
    ├── CorruptCheckpointError           file, offset, wanted, found
    ├── UntrustedDataError               the global or the name that was refused, and the line that would allow it
    ├── IncompatibleCheckpointError      format or torch version
    ├── CommitUnknownError               the outcome cannot be known; nothing was deleted
    ├── InvalidLocationError             also ValueError: a path or URL that cannot be used
    └── StoreError                       also OSError: operation, key, attempts, errno
        ├── ObjectNotFoundError          also FileNotFoundError: the store has no object of that name
        ├── ObjectExistsError            also FileExistsError: a create found the name taken
        └── ObjectTooShortError          also EOFError: the object ends before the bytes that were asked for

Errors cross process borders inside torch's ``CheckpointException``, so each one pickles whole: message, attributes
and a :class:`Cause` (type, message and errno of what was underneath), never the foreign exception itself.
Handle them by class or by ``.kind``; the text is for people and may change.
"""

from __future__ import annotations

import errno as errno_numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

__all__ = [
    "Cause",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "IncompatibleCheckpointError",
    "InvalidLocationError",
    "NotCommittedError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectTooShortError",
    "StoreError",
    "UntrustedDataError",
    "portable",
]


@dataclass(frozen=True)
class Cause:
    """What was underneath an error, in plain data that always pickles.

    Attributes:
        type: qualified name of the exception's class, e.g. ``"builtins.OSError"``.
        message: its text.
        errno: its ``errno`` where it had one.
    """

    type: str
    message: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """Describes ``error``; never raises, also when its text cannot be had."""
        kind = type(error)
        try:
            message = str(error)
        except Exception as broken:  # noqa: BLE001 - a foreign __str__ may do anything; the error itself must still get through
            message = f"<no text: {type(broken).__name__}>"
        number = getattr(error, "errno", None)
        return cls(f"{kind.__module__}.{kind.__qualname__}", message, number if isinstance(number, int) else None)


def _rebuild(cls: type[CheckpointError], message: str) -> CheckpointError:
    error = cls.__new__(cls, message)
    error.__init__(message)  # type: ignore[misc]
    return error


class CheckpointError(Exception):
    """The base of every error of this package.

    Attributes:
        kind: a stable string to branch on; one per class unless said otherwise.
        path: the checkpoint's folder or URL, None where there is none.
        key: the state-dict key or the object's name that the error is about, None where there is none.
        cause: what was underneath, None where nothing was.
        rank: the rank that raised it, where it came out of a call that all ranks make together; else None.
        failures: rank → error of every rank that failed in that call; empty otherwise.
    """

    default_kind: ClassVar[str] = "checkpoint"
    default_errno: ClassVar[int | None] = None

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        key: str | None = None,
        kind: str | None = None,
        cause: BaseException | Cause | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.path = path
        self.key = key
        self.cause = Cause.of(cause) if isinstance(cause, BaseException) else cause
        self.rank: int | None = None
        self.failures: dict[int, CheckpointError] = {}
        if issubclass(type(self), OSError):
            cast(Any, self).errno = self.default_errno

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # The defaults of Exception and OSError rebuild from args alone and lose every keyword.
        state = dict(self.__dict__)
        if issubclass(type(self), OSError):  # errno lives in a slot of OSError, not in __dict__
            state["errno"] = cast(Any, self).errno
        return _rebuild, (type(self), self.message), state  # apart, as `failures` may hold this error itself


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint at this path already, or another save committed first."""

    default_kind = "exists"
    default_errno = errno_numbers.EEXIST


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path."""

    default_kind = "not-found"
    default_errno = errno_numbers.ENOENT


class NotCommittedError(CheckpointNotFoundError):
    """There are files at this path but no commit that stands: unfinished, deleted, or written by stock torch."""

    default_kind = "not-committed"


class CheckpointReplacedError(CheckpointError):
    """Another save committed, or the checkpoint was deleted, while this load was reading. Load again."""

    default_kind = "replaced"


class CorruptCheckpointError(CheckpointError):
    """Bytes of a committed checkpoint are missing, short or altered.

    Attributes:
        file: name of the file in the checkpoint's folder.
        offset: byte offset in that file at which the damage was seen, None where the whole file is meant.
        wanted: what the manifest says (a size or a CRC-32).
        found: what is there, None where nothing is.
    """

    default_kind = "corrupt"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        offset: int | None = None,
        wanted: int | str | None = None,
        found: int | str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(message, **common)
        self.file = file
        self.offset = offset
        self.wanted = wanted
        self.found = found


class UntrustedDataError(CheckpointError):
    """Data from the store asked for what is not allowed: a global, a name outside the folder, too much memory.

    Attributes:
        name: the global (``"module.qualname"``) or the name that was refused.
    """

    default_kind = "untrusted"

    def __init__(self, message: str, *, name: str | None = None, **common: Any) -> None:
        super().__init__(message, **common)
        self.name = name


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint is whole, but this version or this template cannot take it.

    Attributes:
        missing: keys that the template wants and the checkpoint lacks, sorted.
        unexpected: keys that the checkpoint has inside an entry of the template, and nobody wants, sorted.
        shapes: key → (shape of the template, shape on the store).
        dtypes: key → (dtype of the template, dtype on the store).
    """

    default_kind = "incompatible"

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shapes: Mapping[str, tuple[str, str]] | None = None,
        dtypes: Mapping[str, tuple[str, str]] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(message, **common)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.shapes = dict(shapes or {})
        self.dtypes = dict(dtypes or {})


class CommitUnknownError(CheckpointError):
    """The store did not say whether the commit was made, and it could not be found out. Nothing was deleted."""

    default_kind = "commit-unknown"


class InvalidLocationError(CheckpointError, ValueError):
    """A path or URL that cannot name a checkpoint folder, or whose filesystem is not installed."""

    default_kind = "location"


class StoreError(CheckpointError, OSError):
    """A request to the store failed.

    Attributes:
        operation: the method of :class:`~dcp_storage.store.Store` that failed, e.g. ``"read_into"``.
        attempts: how often it was tried in all.
        transient: whether trying again can help (time-outs, resets, 429, 5xx).
        ambiguous: whether the request may have taken effect all the same (a lost reply).
        errno: the system's number where one is known.
    """

    default_kind = "store"

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        errno: int | None = None,
        transient: bool = False,
        ambiguous: bool = False,
        attempts: int = 1,
        **common: Any,
    ) -> None:
        super().__init__(message, **common)
        self.operation = operation
        self.transient = transient
        self.ambiguous = ambiguous
        self.attempts = attempts
        if errno is None and self.cause is not None:
            errno = self.cause.errno
        if errno is not None:
            self.errno: int | None = errno


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The store has no object (or no bucket) of that name."""

    default_kind = "object-not-found"
    default_errno = errno_numbers.ENOENT


class ObjectExistsError(StoreError, FileExistsError):
    """A create-if-absent found the name taken. It may be our own: see invariant I6."""

    default_kind = "object-exists"
    default_errno = errno_numbers.EEXIST


class ObjectTooShortError(StoreError, EOFError):
    """The object ends before the bytes that were asked for.

    Attributes:
        wanted: the end of the asked range, in bytes from the object's start.
        found: the object's size where it is known.
    """

    default_kind = "object-too-short"

    def __init__(self, message: str, *, wanted: int | None = None, found: int | None = None, **common: Any) -> None:
        super().__init__(message, **common)
        self.wanted = wanted
        self.found = found


def portable(error: BaseException, doing: str, *, path: str | None = None, key: str | None = None) -> CheckpointError:
    """The error as one that crosses process borders whole (invariant I7).

    Args:
        error: anything that was raised inside a hook, by us, by a planner or by a client library.
        doing: what was being done, e.g. ``"planner.resolve_data"``; part of the message of a wrapped error.
        path: the checkpoint, filled in where the error has none.
        key: the state-dict key, filled in where the error has none.

    Returns:
        ``error`` itself if it is one of ours, else a :class:`CheckpointError` of kind ``"hook"`` with its
        :class:`Cause`. The original stays reachable as ``__cause__`` in this process.
    """
    if isinstance(error, CheckpointError):
        error.path = error.path or path
        error.key = error.key or key
        return error
    cause = Cause.of(error)
    about = f" for key {key!r}" if key is not None else ""
    wrapped = CheckpointError(
        f"{doing} failed{about}: {cause.type}: {cause.message}", path=path, key=key, kind="hook", cause=cause
    )
    wrapped.__cause__ = error
    return wrapped
