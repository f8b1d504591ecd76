"""One object of several parts through obstore's own writer.

obstore has no call for a single part: its writer takes a stream, cuts it, and sends several parts at once by itself. So
parts come here in order, are copied, and have gone when they are handed over: a part that failed cannot be sent again
from here, and the upload with it is lost. That is why this client alone lets obstore repeat single requests, and why
nothing that failed here counts as transient: there still is one layer of retries, in another place.

The newest part is held back until the next one comes, so that it can be replaced by sending it again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any

import obstore

from dcp_storage.errors import ObjectNotFoundError, StoreError
from dcp_storage.store import Buffers, Store, Upload, total
from dcp_storage.stores.asking import Request
from dcp_storage.stores.obstore_errors import translated
from dcp_storage.stores.obstore_options import Clients

__all__ = ["StreamUpload"]


class StreamUpload(Upload):
    """An object written in order.

    Args:
        clients: obstore's.
        inner: the fsspec store of the same folder, which ends what obstore leaves open.
        key: the object's key in the bucket.
        request: makes a request about this object from the name of an operation.
        max_concurrency: parts that obstore sends at once.
    """

    def __init__(
        self, clients: Clients, inner: Store, key: str, *, request: Callable[[str], Request], max_concurrency: int
    ) -> None:
        self._clients = clients
        self._inner = inner
        self._key = key
        self._request = request
        self._max_concurrency = max_concurrency
        self._state = "open"
        self._number = 0
        self._offset = 0
        self._held = b""
        self._writer: Any = None
        self._chunk = 0
        self._before: tuple[object, ...] | None = None
        self._begun = False
        self._made = False  # whether an object may have been made
        self._failure: StoreError | None = None

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        """As the contract says; ``crc32`` cannot be sent."""
        request = self._request("write_part")
        if self._state != "open":
            raise self._ended(request)
        again = number == self._number and offset == self._offset
        end = self._offset + len(self._held)
        if not again and (number != self._number + 1 or offset != end):
            raise request.error(
                f"part {self._number + 1} at byte {end} is next, not part {number} at byte {offset}; "
                f"obstore takes parts in order.",
                errno=errno.EINVAL,
            )
        if not again and self._number:
            self._flush(request)
        most = self._inner.max_parts * (self._chunk or max(total(buffers), self._inner.min_part_size))
        if offset + total(buffers) > most:
            raise request.error(
                f"obstore sends parts of the size of the first one, with which an object can have {most} bytes; "
                f"use larger parts.",
                errno=errno.EFBIG,
            )
        self._number, self._offset, self._held = number, offset, b"".join(buffers)

    def complete(self) -> None:
        request = self._request("complete")
        if self._state == "complete":
            return
        if self._state not in ("open", "unsure"):
            raise self._ended(request)
        if self._state == "open" and self._number > 1:
            self._flush(request)
            self._close(request)
        elif self._state == "open":
            self._made = True
            with translated(request):  # may be tried again: it is one put
                obstore.put(self._clients.for_writing(request), self._key, self._held, use_multipart=False)
            self._state = "complete"
        if self._state == "unsure":
            self._look(request)
        self._held = b""

    def _close(self, request: Request) -> None:
        self._made = True
        self._offset, self._held = self._offset + len(self._held), b""
        writer, self._writer = self._writer, None  # which can be neither closed nor aborted once more
        try:
            with translated(request):
                writer.close()
        except StoreError as error:
            self._failure = _for_good(error)
            self._state = "unsure"
        else:
            self._state = "complete"

    def _look(self, request: Request) -> None:
        """After a failed end, whose reply may have been lost: whether the object is there all the same."""
        found = self._seen(request)
        if found is None or found == self._before or found[0] != self._offset:
            assert self._failure is not None
            raise self._failure
        self._state = "complete"

    def abort(self) -> None:
        if self._state == "aborted":
            return
        self._state = "failed"
        request = self._request("abort")
        failures: list[StoreError] = []
        writer, self._writer = self._writer, None
        if writer is not None:
            # What this cannot end is found by name below, and so is what began without telling us its id.
            with contextlib.suppress(StoreError), translated(request):
                writer.__exit__(StoreError, request.error("aborted."), None)
        if self._begun:
            try:
                self._inner.abort_uploads([request.object_name])
            except StoreError as error:
                if error.errno != errno.EOPNOTSUPP:  # a server that cannot list them; the writer has done its own
                    failures.append(error)
        if self._made:  # last: after the aborts no late end can bring the object back
            try:
                self._inner.delete([request.object_name])
            except StoreError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        self._state = "aborted"

    def _flush(self, request: Request) -> None:
        """Hands the held part to the writer, which is opened late: an upload given up early leaves no trace at all."""
        if self._writer is None:
            self._before = self._seen(request)
            self._chunk = max(len(self._held), self._inner.min_part_size)
            self._writer = obstore.open_writer(
                self._clients.for_streams(request),
                self._key,
                buffer_size=self._chunk,
                max_concurrency=self._max_concurrency,
            )
        self._begun = True
        try:
            with translated(request):
                self._writer.write(self._held)
        except StoreError as error:
            self._state = "failed"
            self._failure = _for_good(error)
            raise

    def _seen(self, request: Request) -> tuple[object, ...] | None:
        """Size and identity of the object under the name, None where there is none."""
        try:
            with translated(request):
                found = obstore.head(self._clients.for_reading(request), self._key)
        except ObjectNotFoundError:
            return None
        return found["size"], found["e_tag"], found["last_modified"]

    def _ended(self, request: Request) -> StoreError:
        why = f": {self._failure}" if self._failure is not None else "."
        return request.error(
            f"this upload is {self._state}; begin it again{why}", self._failure, errno=errno.EINVAL, ambiguous=False
        )


def _for_good(error: StoreError) -> StoreError:
    """The error as one that another try cannot help."""
    error.transient = False
    return error
