"""The contract between this package and a place that keeps bytes.

A :class:`Store` is one folder of one filesystem: a flat set of names, each with an object (a run of bytes). All that
the commit protocol and the two pipelines ask of a filesystem is here; only ``dcp_storage/stores/`` implements it, and
everything else (retry, limits, recording, faults) wraps a Store in a Store.

The words MUST, SHOULD and MAY are meant as in RFC 2119. ``dcp_storage.testing.conformance`` checks every MUST that can
be seen from outside; run it on a store of your own.

For every method:

* It MUST be callable from several threads at once.
* It MUST raise :class:`~dcp_storage.errors.StoreError` or a child of it for every failure of the store, with
  ``operation``, ``key`` (the name) and the system's ``errno`` where there is one; ``transient=True`` if and only if
  trying again can help (time-outs, resets, 429, 5xx; never permission, not-found, no-space, wrong arguments), and
  ``ambiguous=True`` if the request may have taken effect all the same.
* It MUST NOT retry. Retrying is a wrapper's work, so that there is one layer of it.
* It MUST NOT answer from a cache that another process's write does not reach.
* Names MUST be single path components: :func:`check_name` holds. No character in a name is special: no globs, no
  percent-decoding, no query strings.
* It MUST NOT change anything of the process: no threads or loops left behind after :meth:`Store.close`, no signal
  handlers, no working directory, no umask.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_storage.names import check_name, is_name

__all__ = ["Atomicity", "Buffers", "Entry", "Store", "Upload", "WrappedStore", "check_name", "is_name", "total"]

Buffers = Sequence[memoryview]
"""Bytes in several pieces, in order: flat (``"B"``, one-dimensional, C-contiguous) memoryviews."""


class Atomicity(enum.Enum):
    """How far a store's create-if-absent can be trusted, for small objects (up to 64 KiB).

    ``ATOMIC``: of any number of racing creates of one name, in any processes, exactly one succeeds, and what readers
    see is nothing or its whole body. ``NONE``: it is known not to hold. ``UNKNOWN``: nobody knows; counts as ``NONE``.
    """

    ATOMIC = "atomic"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Entry:
    """One object in a listing.

    Attributes:
        name: its name in the folder.
        size: bytes.
        modified: seconds since the epoch by the store's own clock, None where the store does not say.
    """

    name: str
    size: int
    modified: float | None


def total(buffers: Buffers) -> int:
    """The bytes in ``buffers``."""
    return sum(b.nbytes for b in buffers)


class Upload(abc.ABC):
    """One object being written in parts.

    * Parts are numbered from 1 without gaps. Every part but the last MUST be at least :attr:`Store.min_part_size`
      bytes; parts need not be of one size; a part MUST NOT be empty.
    * Where :attr:`Store.parallel_parts` is true, :meth:`write_part` MUST be callable from several threads at once, in
      any order; elsewhere the caller sends parts in order, one at a time.
    * Writing a part number again (a retry) MUST replace it.
    * Exactly one of :meth:`complete` and :meth:`abort` ends an upload; both MUST be callable again after a failure.
    """

    @abc.abstractmethod
    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        """Sends part ``number``, whose first byte is byte ``offset`` of the object.

        Args:
            number: from 1.
            offset: bytes before this part.
            buffers: the bytes. The implementation MUST NOT keep them after it returns.
            crc32: the CRC-32 of the bytes where the caller has it; a store that can check it SHOULD send it.
        """

    @abc.abstractmethod
    def complete(self) -> None:
        """Makes the object of all parts. When it returns, the object is visible, whole and durable.

        If the object was completed by an earlier call whose reply was lost, it MUST find that out and return.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Leaves nothing: neither an object under the name nor an open upload, also where an earlier
        :meth:`complete` may have been applied (it looks again). All calls of :meth:`write_part` have returned.
        """


class Store(abc.ABC):
    """One folder of one filesystem. See the module's docstring for what holds for every method."""

    url: str
    """The folder, for messages; without secrets."""

    parallel_parts: bool = False
    """Whether the parts of one upload may be sent at once and in any order."""

    min_part_size: int = 1
    """Smallest part but the last, bytes (S3: 5 MiB)."""

    max_parts: int = 10_000
    """Most parts an upload may have (S3: 10,000)."""

    remote: bool = True
    """Whether a request costs a round trip (pipelines then merge over larger gaps)."""

    @property
    @abc.abstractmethod
    def create_if_absent(self) -> Atomicity:
        """Whether :meth:`create` is atomic. MAY send requests on first use (a probe); then keeps the answer."""

    @abc.abstractmethod
    def make_folder(self) -> None:
        """Makes the folder and its missing parents, durably; nothing to do where folders are not real.

        MUST NOT create a bucket. Raises where the path is a file or cannot be written.
        """

    @abc.abstractmethod
    def entries(self) -> list[Entry]:
        """All objects in the folder, in any order; sub-folders and what is in them are left out.

        MUST see every object whose write returned before the call, whoever wrote it, and MUST raise if any page of
        the listing fails (invariant I10). A folder that does not exist is empty; a bucket that does not exist is
        :class:`~dcp_storage.errors.ObjectNotFoundError`; a path that is a file is a StoreError with ``ENOTDIR``.
        """

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the sub-folders directly in this folder, each once, in any order; no objects.

        As :meth:`entries`: MUST see every sub-folder with an object whose write returned before the call, and MUST
        raise if any page of the listing fails (invariant I10); a folder that does not exist is empty, a bucket that
        does not exist is :class:`~dcp_storage.errors.ObjectNotFoundError`, a path that is a file is a StoreError with
        ``ENOTDIR``. It SHOULD be one listing with a delimiter, which costs nothing for what is in the sub-folders. A
        sub-folder that holds nothing MAY be left out, and one whose name fails :func:`check_name` MUST be: nobody
        could open it.
        """

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """The object's size in bytes. Raises ObjectNotFoundError where there is none."""

    @abc.abstractmethod
    def read(self, name: str, *, limit: int) -> bytes:
        """The whole object.

        Raises:
            ObjectNotFoundError: there is none.
            UntrustedDataError: it is larger than ``limit`` bytes; no more than ``limit`` were fetched.
        """

    @abc.abstractmethod
    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        """Fills ``buffers`` (writable) with the object's bytes from ``offset`` on, in order.

        MUST fill all of them or raise; after raising their content is undefined.

        Raises:
            ObjectNotFoundError: there is no such object.
            ObjectTooShortError: it ends before the last byte asked for.
        """

    @abc.abstractmethod
    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        """Writes or replaces the object, whole and durable when it returns.

        Readers MUST see the old object, the new one, or (where there was none) nothing; never a part. A failed put
        MUST leave no part of the new object visible. ``crc32`` as in :meth:`Upload.write_part`.
        """

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Writes the object only if the name is free; durable when it returns. For small objects (up to 64 KiB).

        How far "only if" holds is :attr:`create_if_absent`. MUST at least look before it writes.

        Raises:
            ObjectExistsError: the name is taken (perhaps by an earlier try of our own: the caller reads it back).
            StoreError: with ``ambiguous=True`` where the object may be there all the same.
        """

    @abc.abstractmethod
    def upload(self, name: str) -> Upload:
        """Begins an object of several parts. Nothing MUST become visible to :meth:`read` under the name before
        :meth:`Upload.complete`, except on local disk, where a growing file may be.
        """

    @abc.abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Removes objects, durably, in the given order or all at once; a name that is not there is no error.

        Where some could not be removed, MUST raise after trying all.
        """

    @abc.abstractmethod
    def open_uploads(self) -> list[Entry]:
        """Uploads begun in this folder, by anybody, and neither completed nor aborted (size 0, ``modified`` the time
        they were begun). Empty where uploads leave nothing that lasts.
        """

    @abc.abstractmethod
    def abort_uploads(self, names: Iterable[str]) -> None:
        """Aborts every open upload of these names, whoever began it."""

    @abc.abstractmethod
    def now(self) -> float:
        """The store's own clock, seconds since the epoch, comparable with :attr:`Entry.modified`.

        MAY write and remove a scratch object whose name begins with ``.claim.``.
        """

    def make_durable(self, names: Iterable[str]) -> None:  # noqa: B027 - true of most stores without a request
        """Makes objects durable that others wrote, their bytes and names: nothing to do where what can be seen is so.

        Raises:
            ObjectNotFoundError: one is not there; a store that has nothing to do need not look.
        """

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Ends connections that only this object uses. The store is not used afterwards."""


class WrappedStore(Store):
    """A Store that hands every call to another; the base of every wrapper.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.parallel_parts = inner.parallel_parts
        self.min_part_size = inner.min_part_size
        self.max_parts = inner.max_parts
        self.remote = inner.remote

    @property
    def create_if_absent(self) -> Atomicity:
        return self.inner.create_if_absent

    def make_folder(self) -> None:
        self.inner.make_folder()

    def entries(self) -> list[Entry]:
        return self.inner.entries()

    def folders(self) -> list[str]:
        return self.inner.folders()

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def read(self, name: str, *, limit: int) -> bytes:
        return self.inner.read(name, limit=limit)

    def read_into(self, name: str, offset: int, buffers: Buffers) -> None:
        self.inner.read_into(name, offset, buffers)

    def put(self, name: str, buffers: Buffers, *, crc32: int | None = None) -> None:
        self.inner.put(name, buffers, crc32=crc32)

    def create(self, name: str, data: bytes) -> None:
        self.inner.create(name, data)

    def upload(self, name: str) -> Upload:
        return self.inner.upload(name)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)

    def open_uploads(self) -> list[Entry]:
        return self.inner.open_uploads()

    def abort_uploads(self, names: Iterable[str]) -> None:
        self.inner.abort_uploads(names)

    def now(self) -> float:
        return self.inner.now()

    def make_durable(self, names: Iterable[str]) -> None:
        self.inner.make_durable(names)

    def close(self) -> None:
        self.inner.close()
