"""One object of several parts on GCS: the parts are objects of their own, which GCS then composes on its side.

A part is sent in one request. Where that broke, the next try opens a resumable session, which later tries of the part
go on with. The parts' names are the object's with a token behind it, and another token for each try, so that a late
duplicate of a request changes nothing that counts. They are names of ours, so that prune finds what a kill leaves, and
each carries a note which upload it belongs to.

Parts are removed when the upload ends, so it needs the right to delete. Where a bucket's retention policy forbids
that, the removal fails with ``EACCES``; under soft delete the bucket keeps, and bills, removed parts for a while.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_storage.errors import StoreError
from dcp_storage.names import new_token
from dcp_storage.store import Buffers, Upload, total
from dcp_storage.stores.asking import Request
from dcp_storage.stores.gcs_crc32c import combine_all, crc32c_of, crc32c_text
from dcp_storage.stores.gcs_errors import Refused, translated
from dcp_storage.stores.gcs_sending import ResumableSession, send_whole
from dcp_storage.stores.gcs_session import GcsClient, GcsSession
from dcp_storage.stores.parts import Parts

__all__ = ["UPLOAD_NOTE", "GcsUpload", "delete_keys"]

UPLOAD_NOTE = "dcp-storage-upload"
"""The custom metadata of a part: the token of the upload that it belongs to."""

MOST_SOURCES = 32  # of one compose
RESUMABLE_FROM = 1 << 23  # bytes from which on a second try is worth the request that opens a session
AT_ONCE = 16


@dataclass(frozen=True)
class _Piece:
    key: str
    generation: str
    size: int
    crc32c: int


class GcsUpload(Upload):
    """An object in parts.

    Args:
        session: where requests are sent.
        key: the object's key in the bucket.
        url: the folder, for messages.
        bucket: its bucket.
        name: the object's name in the folder.
    """

    def __init__(self, session: GcsSession, key: str, *, url: str, bucket: str, name: str) -> None:
        self._session = session
        self._key = key
        self._url, self._bucket, self._name = url, bucket, name
        self._note = {UPLOAD_NOTE: new_token()}
        # All of these are touched on the loop alone, but for the places, which lock themselves.
        self._places = Parts()
        self._pieces: dict[int, _Piece] = {}
        self._failed: set[int] = set()
        self._sessions: dict[int, ResumableSession] = {}
        self._litter: set[str] = set()
        self._complete_sent = False
        self._completed = False

    def _request(self, operation: str) -> Request:
        return Request(operation, self._url, self._bucket, self._name, changes=True)

    def _fresh_key(self) -> str:
        key = f"{self._key}.{new_token()}"
        self._litter.add(key)
        return key

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        request = self._request("write_part")
        size, crc32c = total(buffers), crc32c_of(buffers)

        async def work(client: GcsClient) -> None:
            if number in self._failed and size >= RESUMABLE_FROM:
                made = await self._resume(client, request, number, buffers, size, crc32c)
            else:
                self._failed.add(number)
                made = await send_whole(
                    client, self._bucket, self._fresh_key(), buffers, crc32c=crc32c, metadata=self._note
                )
            self._failed.discard(number)
            self._keep(number, offset, made["name"], str(made["generation"]), size, crc32c)

        with translated(request):
            self._session.call(work)

    def _keep(self, number: int, offset: int, key: str, generation: str, size: int, crc32c: int) -> None:
        """Notes a part that has arrived."""
        self._pieces[number] = _Piece(key, generation, size, crc32c)
        self._places.add(number, offset, size)

    async def _resume(
        self, client: GcsClient, request: Request, number: int, buffers: Buffers, size: int, crc32c: int
    ) -> dict[str, Any]:
        session = self._sessions.get(number)
        if session is not None and (session.size, session.crc32c) != (size, crc32c):  # other bytes than before
            await session.cancel(client)
            session = None
        if session is None:
            session = self._sessions[number] = await ResumableSession.begin(
                client, self._bucket, self._fresh_key(), size=size, crc32c=crc32c, metadata=self._note
            )
        try:
            made = await session.send(client, request, buffers)
        except Refused as error:
            if error.status not in (404, 410):
                raise
            del self._sessions[number]
            raise request.error("the resumable session is gone.", error, transient=True) from error
        del self._sessions[number]
        return made

    def complete(self) -> None:
        request = self._request("complete")
        size = self._places.size(operation="complete", url=self._url, name=self._name)

        async def work(client: GcsClient) -> None:
            if not self._completed:
                self._complete_sent = True
                await self._make(client, request, size)
                self._completed = True
            await self._clear(client, request)

        with translated(request):
            self._session.call(work)

    async def _make(self, client: GcsClient, request: Request, size: int) -> None:
        pieces = [self._pieces[number] for number in sorted(self._pieces)]
        if not pieces:  # GCS composes no fewer than one
            await send_whole(client, self._bucket, self._key, [], crc32c=0)
            return
        # Done again as a whole after a lost reply: the parts are still there, and the outcome is the same.
        while len(pieces) > MOST_SOURCES:
            groups = [pieces[at : at + MOST_SOURCES] for at in range(0, len(pieces), MOST_SOURCES)]
            pieces = await _all(self._compose(client, request, self._fresh_key(), g, self._note) for g in groups)
        made = await self._compose(client, request, self._key, pieces, None)
        if made.size != size:
            raise request.error(f"the object has {made.size} bytes instead of {size}.", errno=errno.EIO)

    async def _compose(
        self,
        client: GcsClient,
        request: Request,
        key: str,
        pieces: Sequence[_Piece],
        note: dict[str, str] | None,
    ) -> _Piece:
        sources = [{"name": piece.key, "generation": piece.generation} for piece in pieces]
        destination: dict[str, Any] = {"contentType": "application/octet-stream"}
        if note is not None:
            destination["metadata"] = note
        answer = await client.send(
            "POST",
            client.url("b", self._bucket, "o", key, "compose"),
            json={"sourceObjects": sources, "destination": destination},
        )
        made = answer.json()
        crc32c = combine_all([(piece.crc32c, piece.size) for piece in pieces])
        if made.get("crc32c", crc32c_text(crc32c)) != crc32c_text(crc32c):
            raise request.error(
                f"the composed object has the CRC-32C {made['crc32c']} instead of {crc32c_text(crc32c)}.",
                errno=errno.EIO,
            )
        return _Piece(key, str(made["generation"]), int(made["size"]), crc32c)

    def abort(self) -> None:
        request = self._request("abort")

        async def work(client: GcsClient) -> None:
            failures: list[StoreError] = []
            for number, session in list(self._sessions.items()):
                try:
                    with translated(request):
                        await session.cancel(client)
                    del self._sessions[number]
                except StoreError as error:
                    failures.append(error)
            for step in (self._clear, self._remove):
                try:
                    with translated(request):
                        await step(client, request)
                except StoreError as error:
                    failures.append(error)
            if failures:
                raise failures[0]

        with translated(request):
            self._session.call(work)

    async def _clear(self, client: GcsClient, request: Request) -> None:
        """Removes the parts; what could not be removed is kept in mind for another call."""
        failures = await delete_keys(client, dict.fromkeys(sorted(self._litter), request))
        self._litter = set(failures)
        if failures:
            raise next(iter(failures.values()))

    async def _remove(self, client: GcsClient, request: Request) -> None:
        # After the parts: without them no late compose can bring the object back.
        if self._complete_sent:
            failures = await delete_keys(client, {self._key: request})
            if failures:
                raise failures[self._key]


async def _all(works: Iterable[Any]) -> list[_Piece]:
    """The results in order; waits for all before it raises the first failure."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(work: Any) -> _Piece:
        async with free:
            made: _Piece = await work
            return made

    results = await asyncio.gather(*(one(work) for work in works), return_exceptions=True)
    found: list[_Piece] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


async def delete_keys(
    client: GcsClient, requests: Mapping[str, Request], *, at_once: int = AT_ONCE
) -> dict[str, StoreError]:
    """Deletes objects, each for a request of its own; one that is gone is no failure. Returns what failed, by key."""
    free = asyncio.Semaphore(at_once)
    failures: dict[str, StoreError] = {}

    async def one(key: str, request: Request) -> None:
        async with free:
            try:
                with translated(request):
                    await client.send("DELETE", client.url("b", request.bucket, "o", key), also=frozenset({404}))
            except StoreError as error:
                failures[key] = error

    await asyncio.gather(*(one(key, request) for key, request in requests.items()))
    return failures
