"""Resumable uploads of the strict GCS server.

The rules, from the published page "Perform resumable uploads": chunks but the last are multiples of 256 KiB; ``bytes
*/N`` asks how far the upload is; 308 says so in ``Range``, which is absent while nothing is kept; bytes at offsets
that are kept already are ignored; cancelling answers 499. A chunk that begins after what is kept is refused with 400.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.servers.gcs_hashes import Hashing, check_hashes
from tests.servers.gcs_objects import Params, StoredObject, World, check_live
from tests.servers.gcs_refusal import Refusal

__all__ = ["CHUNK", "Resumable"]

CHUNK = 256 * 1024


@dataclass
class Resumable:
    """One session.

    Attributes:
        bucket: where the object goes.
        name: its name.
        resource: what the client said of it when it began.
        params: the query it began with; its preconditions are checked at the beginning and at the end.
        hashing: the hashes of ``kept``.
        kept: the bytes that have arrived.
        made: the object, once it is there.
        cancelled: whether a DELETE has ended it.
    """

    bucket: str
    name: str
    resource: Mapping[str, Any]
    params: Params
    hashing: Hashing
    kept: bytearray = field(default_factory=bytearray)
    made: StoredObject | None = None
    cancelled: bool = False
    size: int | None = None

    def put(
        self, world: World, content_range: str | None, body: bytes | bytearray, hashes: str | None
    ) -> StoredObject | None:
        """A chunk, the last chunk, or a question how far it is.

        Returns:
            The object when it is there; None where more is wanted (308).

        Raises:
            Refusal: 400 for what breaks a rule, 410 after a cancel, 412 where a precondition no longer holds.
        """
        first, last, size = self._parse(content_range, body)
        if self.cancelled:
            raise Refusal(410, "The upload was cancelled.")
        if self.made is not None:
            return self.made
        if size is not None:
            if self.size not in (None, size):
                raise Refusal(400, f"The size was {self.size}, now it is {size}.")
            self.size = size
        if first is not None and last is not None:
            if last - first + 1 != len(body):
                raise Refusal(400, f"Content-Range says {last - first + 1} bytes, {len(body)} came.")
            if size is not None and last >= size:
                raise Refusal(400, "The chunk reaches beyond the end.")
            if first > len(self.kept):
                raise Refusal(400, f"The chunk begins at {first}, but only {len(self.kept)} bytes are kept.")
            if (size is None or last + 1 < size) and len(body) % CHUNK:
                raise Refusal(400, f"{len(body)} bytes, but a chunk that is not the last is a multiple of 256 KiB.")
            self._keep(memoryview(body)[len(self.kept) - first :])
        if self.size is None or len(self.kept) < self.size:
            return None
        return self._finish(world, hashes)

    def cut(self, content_range: str | None, body: bytes | bytearray) -> None:
        """A chunk whose connection broke after ``body``: what fills whole 256 KiB is kept."""
        match = re.fullmatch(r"bytes (\d+)-\d+/(?:\d+|\*)", content_range or f"bytes 0-{len(body)}/*")
        if match is None or self.made is not None or self.cancelled or int(match[1]) > len(self.kept):
            return
        end = (int(match[1]) + len(body)) // CHUNK * CHUNK
        self._keep(memoryview(body)[len(self.kept) - int(match[1]) : max(end - int(match[1]), 0)])

    def cancel(self) -> None:
        """Always ends in a Refusal: 499, or 410 where there was nothing to cancel."""
        if self.cancelled or self.made is not None:
            raise Refusal(410, "The upload has ended before.")
        self.cancelled = True
        raise Refusal(499, "Client Closed Request")

    @property
    def range(self) -> dict[str, str]:
        """The headers of a 308."""
        return {"Range": f"bytes=0-{len(self.kept) - 1}"} if self.kept else {}

    def _parse(self, content_range: str | None, body: bytes | bytearray) -> tuple[int | None, int | None, int | None]:
        if content_range is None:
            return (0, len(body) - 1, len(body)) if body else (None, None, 0)
        match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", content_range)
        if match is None:
            raise Refusal(400, f"Invalid Content-Range: {content_range!r}")
        if match[1] is None and body:
            raise Refusal(400, "A question how far an upload is has no body.")
        size = None if match[3] == "*" else int(match[3])
        return (None, None, size) if match[1] is None else (int(match[1]), int(match[2]), size)

    def _keep(self, view: memoryview) -> None:
        piece = bytes(view)
        self.kept += piece
        self.hashing.take(piece)

    def _finish(self, world: World, hashes: str | None) -> StoredObject:
        bucket = world.bucket(self.bucket)
        data = self.hashing.of(bytes(self.kept))
        try:
            check_live(bucket.objects.get(self.name), self.params)
            check_hashes(data, self.resource, hashes)
        except Refusal:
            self.cancelled = True
            raise
        self.made = world.write(bucket, self.name, data, self.resource)
        self.kept.clear()
        return self.made
