"""The connection of a GCS store: gcsfs's credentials, HTTP session and event loop, called from plain threads.

gcsfs gives credentials, project, endpoint, client certificates and the loop; its verbs are not used, because each is
tried six times below us and answers from caches. Requests are made here on its aiohttp session, once each.

The class is :class:`gcsfs.core.GCSFileSystem`, and no other is ever made. ``gcsfs.GCSFileSystem`` is, by default, a
subclass of it which asks over gRPC what kind of bucket it has, and hangs where only HTTP is served; the environment
variable that switches this off (``GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT``) is read when gcsfs is imported and changes
gcsfs for the whole process, so it is left as the user has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import requests
from fsspec.config import apply_config
from gcsfs.core import GCSFileSystem
from google.auth.transport.requests import Request as AuthRequest
from yarl import URL

from dcp_storage.errors import InvalidLocationError
from dcp_storage.stores.asking import CONNECT_TIMEOUT, READ_TIMEOUT, SLOWEST
from dcp_storage.stores.gcs_errors import Refused

__all__ = ["Answer", "Body", "GcsClient", "GcsSession", "gcsfs_options"]

T = TypeVar("T")
Body = Callable[[], AsyncIterator[bytes]]

CANCEL_WAIT = 10.0  # seconds that an interrupted call waits for its request to let go of the caller's memory
WRONG_OPTION = (AttributeError, LookupError, TypeError, ValueError)  # an option of the wrong kind, met where it is used
GOOGLE_HOSTS = (".googleapis.com",)


def gcsfs_options(storage_options: Mapping[str, Any] | None, *, silence: float = READ_TIMEOUT) -> dict[str, Any]:
    """The options for gcsfs: the user's, with the time-outs that they do not set.

    Args:
        storage_options: the user's; not changed.
        silence: seconds without a byte of the answer after which a request has failed.

    Raises:
        ValueError: ``asynchronous=True``, whose filesystem has no loop to call from a thread.
    """
    options: dict[str, Any] = apply_config(GCSFileSystem, dict(storage_options or {}))
    if options.get("asynchronous"):
        raise ValueError("storage_options: asynchronous=True cannot be used; the store is called from plain threads.")
    # A session of our own comes of this as well: fsspec hands out one filesystem for the same options.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT, silence), sock_read=silence)
    return {**options, "session_kwargs": {"timeout": timeout, **(options.get("session_kwargs") or {})}}


@dataclass(frozen=True)
class Answer:
    """A success.

    Attributes:
        status: the HTTP status.
        headers: the answer's, with names in any case.
        body: all of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object."""
        value: dict[str, Any] = json.loads(self.body)
        return value


class GcsClient:
    """Sends requests for one filesystem object; on its loop only.

    Attributes:
        on_google: whether requests go to Google itself.
        kept: a dict that lives as long as the filesystem object, shared by all stores on it.
    """

    def __init__(self, filesystem: Any, session: aiohttp.ClientSession, deadline: float) -> None:
        self._deadline = deadline
        self._filesystem = filesystem
        self._session = session
        self._base: str = filesystem.base
        self.on_google = (urlsplit(self._base).hostname or "").endswith(GOOGLE_HOSTS)
        self.kept: dict[str, Any] = filesystem.__dict__.setdefault("_dcp_storage_kept", {})

    def url(self, *path: str, upload: bool = False) -> str:
        """The URL of a resource: ``url("b", bucket, "o", key)``; no character of the parts is special."""
        base = self._base
        if upload:
            base = base.removesuffix("/storage/v1/") + "/upload/storage/v1/"
        return base + "/".join(quote(part, safe="") for part in path)

    async def send(
        self,
        method: str,
        url: str,
        params: Mapping[str, str] | None = None,
        *,
        json: object = None,
        body: Body | None = None,
        size: int = 0,
        headers: Mapping[str, str] | None = None,
        also: frozenset[int] = frozenset(),
    ) -> Answer:
        """One request.

        Args:
            method: the HTTP verb.
            url: from :meth:`url`, or one that the server gave.
            params: the query, besides the project that pays where the user said one.
            json: the body, as JSON.
            body: the body, made anew at each call.
            size: its bytes.
            headers: besides the credentials.
            also: statuses that are answers here, besides 2xx.

        Raises:
            Refused: any other status.
        """
        async with self.open(
            method, url, params, json=json, body=body, size=size, headers=headers, also=also
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        params: Mapping[str, str] | None = None,
        *,
        json: object = None,
        body: Body | None = None,
        size: int = 0,
        headers: Mapping[str, str] | None = None,
        also: frozenset[int] = frozenset(),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """As :meth:`send`, for reading the answer as it comes."""
        query = urlencode(self._filesystem._get_params(dict(params or {})))
        if query:
            url += ("&" if "?" in url else "?") + query
        # Never compressed: a range then counts the bytes that are stored.
        wanted = {"Accept-Encoding": "identity", **(headers or {})}
        if body is not None or (method in ("PUT", "POST") and json is None):
            wanted["Content-Length"] = str(size)

        def once() -> Awaitable[aiohttp.ClientResponse]:
            return self._session.request(
                method,
                URL(url, encoded=True),
                json=json,
                data=None if body is None else body(),
                headers=self._filesystem._get_headers(wanted),
                allow_redirects=False,
                **self._timeout(size),
            )

        token = _token_of(self._filesystem)
        response = await once()
        if response.status == 401 and self._filesystem.credentials.credentials is not None:
            # Nothing was done; the token may have been revoked, or the clocks differ. Not a retry: another request.
            response.close()
            await self._renew(token)
            response = await once()
        async with response:
            if not 200 <= response.status < 300 and response.status not in also:
                raise Refused(response.status, response.headers, await response.read())
            yield response

    def _timeout(self, size: int) -> dict[str, Any]:
        """The time-out of one request where it is not the session's."""
        if self._filesystem.requests_timeout is not None:
            return {"timeout": self._filesystem.requests_timeout}
        own = self._session.timeout
        if own.total is not None:
            return {}
        connect, read = own.sock_connect or CONNECT_TIMEOUT, own.sock_read or READ_TIMEOUT
        most = max(self._deadline, connect, read)  # one beyond the deadline is the user's own wish
        limit = min(connect + read + size / SLOWEST, most) if size else most
        return {"timeout": aiohttp.ClientTimeout(limit, own.connect, own.sock_read, own.sock_connect)}

    async def _renew(self, stale: str | None) -> None:
        """Renews the credentials unless somebody has: their token is no longer ``stale``."""
        held = self._filesystem.credentials

        def work() -> None:
            with held.lock, requests.Session() as session:
                if _token_of(self._filesystem) == stale:
                    held.credentials.refresh(AuthRequest(session))

        # In a thread for this once: it waits for the network, and the loop is everybody's.
        pool = ThreadPoolExecutor(1)
        try:
            await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            pool.shutdown(wait=False)


class GcsSession:
    """Runs coroutines on gcsfs's loop for plain threads.

    Args:
        options: for ``GCSFileSystem``, from :func:`gcsfs_options`.
        url: the folder, for messages.
        deadline: seconds after which one request is given up.
    """

    def __init__(self, options: Mapping[str, Any], url: str, deadline: float = 300.0) -> None:
        self._deadline = deadline
        self._options = dict(options)
        self._url = url
        self._held: tuple[int, Any] | None = None
        self._inherited: list[Any] = []

    def filesystem(self) -> Any:
        """The gcsfs filesystem of this process, made at first use: that looks for credentials.

        A forked child gets one of its own: fsspec's loop is a thread, which a fork does not copy. No lock: it could
        be held at the fork, and two threads that come here at once get the same object from fsspec's cache.

        Raises:
            InvalidLocationError: gcsfs does not take the options.
        """
        held = self._held
        if held is not None and held[0] == os.getpid():
            return held[1]
        if held is not None:
            # Kept alive, since its finalizer would wait for the loop that is not there.
            self._inherited.append(held[1])
        try:
            filesystem = GCSFileSystem(**self._options)
        except WRONG_OPTION as error:
            raise self._wrong_option(error) from error
        self._held = (os.getpid(), filesystem)
        return filesystem

    def call(self, work: Callable[[GcsClient], Awaitable[T]]) -> T:
        """Runs ``work`` on the loop and waits for it; what it raises is raised here.

        Also right inside a running event loop of the caller's own, which it blocks as any other call would.

        Raises:
            RuntimeError: called on fsspec's own loop, where waiting would never end.
        """
        filesystem = self.filesystem()
        if _running_loop() is filesystem.loop:
            raise RuntimeError("A store cannot be called on fsspec's own event loop: it would wait for itself.")
        # Here, not on the loop, which everybody in the process would wait for.
        filesystem.credentials.maybe_refresh()
        ended = threading.Event()

        async def run() -> T:
            try:
                try:
                    session = await filesystem._set_session()
                except WRONG_OPTION as error:  # of session_kwargs, which are looked at only now
                    raise self._wrong_option(error) from error
                # aiohttp sends a GET, PUT or DELETE again when the connection breaks before the answer.
                session._retry_connection = False
                return await work(GcsClient(filesystem, session, self._deadline))
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), filesystem.loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of this thread: nothing may go on filling or reading the caller's memory.
            if future.cancel():
                ended.wait(CANCEL_WAIT)
            raise

    def _wrong_option(self, error: Exception) -> InvalidLocationError:
        return InvalidLocationError(
            f"{self._url!r} cannot be opened with these storage_options ({type(error).__name__}: {error}).",
            path=self._url,
            cause=error,
        )

    def close(self) -> None:
        """Lets go of the filesystem. fsspec keeps it for other users of the same options; it closes it at exit."""
        self._held = None


def _token_of(filesystem: Any) -> str | None:
    token: str | None = getattr(filesystem.credentials.credentials, "token", None)
    return token


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
