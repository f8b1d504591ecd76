"""The connection of an S3 store: s3fs's session, client and event loop, called from plain threads.

s3fs gives credentials, profiles, regions and the loop; its verbs are not used, because it retries below us. Neither
is anything below s3fs left to retry: see :func:`s3fs_options`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from fsspec.config import apply_config
from s3fs import S3FileSystem

from dcp_storage.errors import InvalidLocationError
from dcp_storage.stores.asking import CONNECT_TIMEOUT, READ_TIMEOUT, SLOWEST
from dcp_storage.stores.s3_bodies import Body

__all__ = ["OneTrySession", "S3Client", "S3Session", "s3fs_options"]

T = TypeVar("T")

CANCEL_WAIT = 10.0  # seconds that an interrupted call waits for its request to let go of the caller's memory
LEAST_POOL = 10  # botocore's own default
WRONG_OPTION = (AttributeError, LookupError, TypeError, ValueError)  # an option of the wrong kind, met where it is used


class OneTrySession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's HTTP session without aiohttp's own second try.

    aiohttp sends a GET, PUT or DELETE again when the connection breaks before the answer; a conditional PUT whose
    reply was lost then comes back as a conflict with itself.
    """

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return cast(aiohttp.ClientSession, session)


def s3fs_options(
    storage_options: Mapping[str, Any] | None, *, max_concurrency: int, silence: float = READ_TIMEOUT
) -> dict[str, Any]:
    """The options for s3fs: the user's, with what the user did not set set so that only our own layer retries.

    Args:
        storage_options: the user's; not changed. ``config_kwargs`` are botocore's ``Config`` fields.
        max_concurrency: requests in flight at once; the connection pool is at least as large.
        silence: seconds without a byte of the answer after which a request has failed.

    Raises:
        ValueError: ``asynchronous=True``, whose filesystem has no loop to call from a thread; or an ``s3`` of
            ``config_kwargs`` that is no mapping.
    """
    options: dict[str, Any] = apply_config(S3FileSystem, dict(storage_options or {}))
    if options.get("asynchronous"):
        raise ValueError("storage_options: asynchronous=True cannot be used; the store is called from plain threads.")
    defaults: dict[str, Any] = {
        "connect_timeout": min(CONNECT_TIMEOUT, silence),
        "read_timeout": silence,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": max(LEAST_POOL, max_concurrency),
        # CRCs are the caller's, made once; otherwise botocore reads every body again to make its own.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "http_session_cls": OneTrySession,
    }
    config = {**defaults, **(options.get("config_kwargs") or {})}
    # The CRC-32 that goes with every body is part of what is signed; a SHA-256 of the body besides costs as much CPU as
    # everything else together. botocore leaves it out only over TLS and where it made the checksum itself.
    users = config.get("s3") or {}
    if not isinstance(users, Mapping):
        raise ValueError(f"storage_options: config_kwargs['s3'] must be a mapping, not {type(users).__name__}.")
    config["s3"] = {"payload_signing_enabled": False, **users}
    return {**options, "config_kwargs": config}


class S3Client:
    """aiobotocore's client for one bucket, with the request options that the user gave s3fs.

    Attributes:
        endpoint: the URL that requests go to.
        kept: a dict that lives as long as the filesystem object, shared by all stores on it; for the event loop only.
    """

    def __init__(self, client: Any, filesystem: Any, deadline: float) -> None:
        self._client = client
        self._deadline = deadline
        # botocore asks for the server's consent before each body that is a file: a round trip for each part, and a
        # wait that no time-out of aiohttp covers.
        client.meta.events.register_last("before-call.s3", _without_expect, unique_id="dcp_storage-without-expect")
        self._extra: dict[str, Any] = {**filesystem.s3_additional_kwargs, **filesystem.req_kw}
        self.endpoint: str = client.meta.endpoint_url
        self.kept: dict[str, Any] = filesystem.__dict__.setdefault("_dcp_storage_kept", {})

    async def send(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request, e.g. ``send("put_object", Bucket=..., ...)``.

        ``s3_additional_kwargs`` (encryption, ACL, ...) and ``requester_pays`` are added where S3 takes them.
        """
        meta = self._client.meta
        known = meta.service_model.operation_model(meta.method_to_api_mapping[method]).input_shape.members
        extra = {name: value for name, value in self._extra.items() if name in known}
        # aiohttp has no time-out for a body that nobody takes, only for the whole; the answer's body is read later.
        return await asyncio.wait_for(getattr(self._client, method)(**{**extra, **arguments}), self._limit(arguments))

    def _limit(self, arguments: Mapping[str, Any]) -> float | None:
        """Seconds for one request up to its answer; None where the user wants no time-out."""
        config, body = self._client.meta.config, arguments.get("Body")
        if config.connect_timeout is None or config.read_timeout is None:
            return None
        size = body.size or 0 if isinstance(body, Body) else 0
        # A time-out beyond the deadline is the user's own wish.
        most = max(self._deadline, config.connect_timeout, config.read_timeout)
        return float(min(config.connect_timeout + config.read_timeout + size / SLOWEST, most))


def _without_expect(params: dict[str, Any], **_: object) -> None:
    params["headers"].pop("Expect", None)


class S3Session:
    """Runs coroutines on s3fs's loop for plain threads.

    Args:
        options: for ``S3FileSystem``, from :func:`s3fs_options`.
        bucket: the bucket, which decides the region where s3fs is asked to look that up (``cache_regions``).
        deadline: seconds after which one request is given up.
    """

    def __init__(self, options: Mapping[str, Any], bucket: str, deadline: float = 300.0) -> None:
        self._options = dict(options)
        self._deadline = deadline
        self._bucket = bucket
        self._held: tuple[int, Any] | None = None
        self._inherited: list[Any] = []

    def filesystem(self) -> Any:
        """The s3fs filesystem of this process.

        A forked child gets one of its own: fsspec's loop is a thread, which a fork does not copy. No lock: it could
        be held at the fork, and two threads that come here at once get the same object from fsspec's cache.
        """
        held = self._held
        if held is not None and held[0] == os.getpid():
            return held[1]
        if held is not None:
            # Kept alive, since its finalizer would wait a second for the loop that is not there.
            self._inherited.append(held[1])
        filesystem = S3FileSystem(**self._options)
        self._held = (os.getpid(), filesystem)
        return filesystem

    def call(self, work: Callable[[S3Client], Awaitable[T]]) -> T:
        """Runs ``work`` on the loop and waits for it; what it raises is raised here.

        Also right inside a running event loop of the caller's own, which it blocks as any other call would.

        Raises:
            RuntimeError: called on fsspec's own loop, where waiting would never end.
        """
        filesystem = self.filesystem()
        loop: asyncio.AbstractEventLoop = filesystem.loop
        if _running_loop() is loop:
            raise RuntimeError("A store cannot be called on fsspec's own event loop: it would wait for itself.")
        ended = threading.Event()

        async def run() -> T:
            try:
                client = await self._connected(filesystem)
                return await work(client)
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of this thread: nothing may go on filling or reading the caller's memory.
            if future.cancel():
                ended.wait(CANCEL_WAIT)
            raise

    async def _connected(self, filesystem: Any) -> S3Client:
        """The client; s3fs looks at most of its options only now.

        Raises:
            InvalidLocationError: an option that s3fs or botocore does not take.
        """
        try:
            await filesystem.set_session()
            return S3Client(await filesystem.get_s3(self._bucket), filesystem, self._deadline)
        except WRONG_OPTION as error:
            raise InvalidLocationError(
                f"The bucket {self._bucket!r} cannot be opened with these storage_options "
                f"({type(error).__name__}: {error}).",
                path=f"s3://{self._bucket}",
                cause=error,
            ) from error

    def close(self) -> None:
        """Lets go of the filesystem. fsspec keeps it for other users of the same options; it closes it at exit."""
        self._held = None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
