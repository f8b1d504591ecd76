"""obstore's clients, made from what s3fs, gcsfs or adlfs found out.

Credentials, endpoint, region and project are asked of the fsspec filesystem of the same ``storage_options``, at first
use: profiles, environments, instance roles and refreshed tokens then work as they do with ``engine="fsspec"``, and are
looked for in the same order. An option that changes requests and has no counterpart in obstore is refused.

obstore's own environment variables for what is set here do not count.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from obstore import exceptions as obstore_errors
from obstore import store as obstore_stores

from dcp_storage.errors import InvalidLocationError
from dcp_storage.stores.asking import Request

if TYPE_CHECKING:
    from dcp_storage.stores.gcs_session import GcsSession
    from dcp_storage.stores.s3_session import S3Client, S3Session

__all__ = ["Clients", "GcsSource", "S3Source", "Settings", "Source", "check_gcs", "check_s3", "runs_here"]

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0  # without a byte of the answer
WRITE_SECONDS = 300.0  # for one request with its body: obstore has no limit on a body that nobody takes, but the whole
_IMPORTED_IN = os.getpid()
TOKEN_MINUTES = 10  # botocore hands out credentials that live at least that long

# Of s3fs and fsspec; what does not reach a request of this engine is among them.
_S3_TAKEN = frozenset(
    {
        *("anon", "endpoint_url", "key", "secret", "token", "username", "password", "use_ssl", "profile", "session"),
        *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "requester_pays", "cache_regions", "loop"),
        *("asynchronous", "default_block_size", "default_fill_cache", "default_cache_type", "fixed_upload_size"),
        *("local_expiry_check", "max_concurrency", "version_aware", "batch_size", "listings_expiry_time", "max_paths"),
        *("skip_instance_cache", "use_listings_cache"),
    }
)
_S3_CLIENT = frozenset(
    {
        *("aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
        *("endpoint_url", "region_name", "use_ssl", "verify"),
    }
)
_S3_CONFIG = frozenset(
    {
        *("connect_timeout", "http_session_cls", "max_pool_connections", "parameter_validation", "read_timeout"),
        *("region_name", "request_checksum_calculation", "response_checksum_validation", "retries", "s3"),
        *("signature_version", "tcp_keepalive", "user_agent", "user_agent_appid", "user_agent_extra"),
    }
)
_S3_STYLE = frozenset({"addressing_style", "payload_signing_enabled"})
_S3_EXTRA = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_GCS_TAKEN = frozenset(
    {
        *("access", "asynchronous", "batch_size", "block_size", "cache_timeout", "check_connection", "consistency"),
        *("default_location", "endpoint_url", "listings_expiry_time", "loop", "max_paths", "project"),
        *("requester_pays", "requests_timeout", "secure_serialize", "session_kwargs", "skip_instance_cache"),
        *("timeout", "token", "use_listings_cache", "version_aware"),
    }
)


def runs_here() -> bool:
    """Whether obstore may be used in this process: not in one that was forked after this module was imported.

    The threads of obstore are not in a child, and what both share (the kernel's list of sockets to watch) still is
    the parent's: a request in the child would hang, and make one of the parent hang.
    """
    return os.getpid() == _IMPORTED_IN


def _refuse(kind: str, left: Iterable[str]) -> None:
    names = sorted(left)
    if names:
        raise ValueError(
            f"storage_options: {', '.join(names)} cannot be carried over from {kind} to obstore; "
            f'use engine="fsspec", or leave {"it" if len(names) == 1 else "them"} out'
        )


def check_s3(options: Mapping[str, Any], bucket: str) -> None:
    """Raises ValueError where options for s3fs have no counterpart in obstore.

    Args:
        options: from :func:`~dcp_storage.stores.s3_session.s3fs_options`.
        bucket: the bucket; access points and directory buckets are refused too.
    """
    if bucket.startswith("arn:") or bucket.endswith("--x-s3"):
        raise ValueError(f'obstore cannot be used for the bucket {bucket!r} here; use engine="fsspec"')
    from botocore import UNSIGNED

    config = options.get("config_kwargs") or {}
    left = [name for name in options if name not in _S3_TAKEN]
    left += [f"client_kwargs.{name}" for name in options.get("client_kwargs") or {} if name not in _S3_CLIENT]
    left += [f"config_kwargs.{name}" for name in config if name not in _S3_CONFIG]
    left += [f"config_kwargs.s3.{name}" for name in config.get("s3") or {} if name not in _S3_STYLE]
    left += [f"s3_additional_kwargs.{name}" for name in options.get("s3_additional_kwargs") or {} if _unknown(name)]
    if config.get("signature_version") not in (None, "s3v4", UNSIGNED):
        left.append("config_kwargs.signature_version")
    _refuse("s3fs", left)


def _unknown(name: str) -> bool:
    return name not in _S3_EXTRA


def check_gcs(options: Mapping[str, Any]) -> None:
    """Raises ValueError where options for gcsfs have no counterpart in obstore.

    Args:
        options: from :func:`~dcp_storage.stores.gcs_session.gcsfs_options`.
    """
    left = [name for name in options if name not in _GCS_TAKEN]
    left += [f"session_kwargs.{name}" for name in options.get("session_kwargs") or {} if name != "timeout"]
    _refuse("gcsfs", left)


@dataclass(frozen=True)
class Settings:
    """What an obstore client is made of.

    Attributes:
        kind: obstore's class.
        config: its settings.
        client: settings of its HTTP client, besides the time-outs.
        provider: gives credentials, again and again; None where requests are not signed.
        connect_seconds: most seconds for a connection.
        read_seconds: most seconds without a byte of an answer.
    """

    kind: Callable[..., Any]
    config: dict[str, Any]
    client: dict[str, Any]
    provider: Callable[[], Any] | None
    connect_seconds: float = CONNECT_SECONDS
    read_seconds: float = READ_SECONDS


class Source(Protocol):
    """Where settings come from."""

    def settings(self, request: Request) -> Settings:
        """Asks the fsspec filesystem; may send requests for credentials. Raises StoreError about ``request``."""


@dataclass
class Clients:
    """The obstore clients of one bucket, made at first use, for all threads; pickles without them.

    Attributes:
        source: where their settings come from.
        retries: of the client for streams, whose single requests nobody else can repeat.
    """

    source: Source
    retries: int = 5
    _made: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def for_reading(self, request: Request) -> Any:
        """Gives up on an answer of which nothing comes; retries nothing."""
        return self._get("reading", request)

    def for_writing(self, request: Request) -> Any:
        """Gives a body its time; retries nothing."""
        return self._get("writing", request)

    def for_streams(self, request: Request) -> Any:
        """As for writing, with retries: see :mod:`dcp_storage.stores.obstore_upload`."""
        return self._get("streams", request)

    def _get(self, use: str, request: Request) -> Any:
        made = self._made.get(use)
        if made is None:
            with self._lock:
                made = self._made.get(use) or self._make(use, request)
                self._made[use] = made
        return made

    def _make(self, use: str, request: Request) -> Any:
        found = self.source.settings(request)
        times = {"connect_timeout": timedelta(seconds=found.connect_seconds)}
        if use == "reading":
            # The total is there only because obstore's default is 30 s: a range may take longer on a slow link.
            times |= {"read_timeout": timedelta(seconds=found.read_seconds), "timeout": timedelta(hours=1)}
        else:
            times |= {"timeout": timedelta(seconds=max(WRITE_SECONDS, found.read_seconds))}
        retry = {
            "max_retries": self.retries if use == "streams" else 0,
            "retry_timeout": timedelta(seconds=WRITE_SECONDS),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=20), "base": 2},
        }
        config, client = found.config, {**found.client, **times}
        try:
            if found.provider is None:
                return found.kind(request.bucket, client_options=client, retry_config=retry, **config)
            return found.kind(
                request.bucket, client_options=client, retry_config=retry, credential_provider=found.provider, **config
            )
        except (TypeError, ValueError, obstore_errors.BaseError) as error:
            raise InvalidLocationError(
                f"{request.url!r} cannot be opened with obstore and these storage_options "
                f'({type(error).__name__}: {error}); use engine="fsspec".',
                path=request.url,
                cause=error,
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "retries": self.retries}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a lock and clients of this process


class S3Source:
    """Asks s3fs.

    Args:
        session: s3fs's filesystem and loop.
        bucket: the bucket, which decides the region where s3fs is asked to look that up.
        options: from :func:`~dcp_storage.stores.s3_session.s3fs_options`.
    """

    def __init__(self, session: S3Session, bucket: str, options: Mapping[str, Any]) -> None:
        self._session = session
        self._bucket = bucket
        self._verify = (options.get("client_kwargs") or {}).get("verify")
        self._extra = {_S3_EXTRA[name]: value for name, value in (options.get("s3_additional_kwargs") or {}).items()}
        self._payer = bool(options.get("requester_pays"))

    def settings(self, request: Request) -> Settings:
        """What s3fs uses, credentials included: that there are some is found out now."""
        from botocore import UNSIGNED

        from dcp_storage.stores.s3_errors import translated as s3_translated

        async def work(client: S3Client) -> tuple[Any, Any, str]:
            filesystem = self._session.filesystem()
            used = await filesystem.get_s3(self._bucket)
            return used.meta, filesystem.session.get_config_variable("ca_bundle"), client.endpoint

        with s3_translated(Request(request.operation, request.url, request.bucket, request.name)):
            meta, ca_bundle, endpoint = self._session.call(work)
            unsigned = meta.config.signature_version is UNSIGNED
            if not unsigned:
                self.credentials()
        style = meta.config.s3 or {}
        virtual = style.get("addressing_style") == "virtual"
        if virtual:  # obstore then wants the bucket in the endpoint
            scheme, _, host = endpoint.partition("://")
            endpoint = f"{scheme}://{self._bucket}.{host}"
        config = {
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,  # else the environment's would count
            "region": meta.region_name or "us-east-1",
            "virtual_hosted_style_request": virtual,
            "skip_signature": unsigned,
            # A SHA-256 of each body costs as much CPU as everything else together; the CRCs of the manifest stay.
            "unsigned_payload": not style.get("payload_signing_enabled", False),
            "request_payer": self._payer,
            **self._extra,
        }
        verify = ca_bundle if self._verify in (None, True) else self._verify
        return Settings(
            obstore_stores.S3Store,
            config,
            _tls(endpoint, verify),
            None if unsigned else self.credentials,
            connect_seconds=float(meta.config.connect_timeout),
            read_seconds=float(meta.config.read_timeout),
        )

    def credentials(self) -> dict[str, Any]:
        """What s3fs signs with now, refreshed where that is due; for obstore, which calls it when it needs some."""
        from botocore.exceptions import NoCredentialsError

        async def work(client: S3Client) -> Any:
            used = await self._session.filesystem().get_s3(self._bucket)
            held = used._get_credentials()
            if held is None:
                raise NoCredentialsError
            frozen = held.get_frozen_credentials()
            return await frozen if inspect.isawaitable(frozen) else frozen

        frozen = self._session.call(work)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(minutes=TOKEN_MINUTES),
        }


class GcsSource:
    """Asks gcsfs.

    Args:
        session: gcsfs's filesystem and loop.
    """

    def __init__(self, session: GcsSession) -> None:
        self._session = session

    def settings(self, request: Request) -> Settings:
        """What gcsfs uses, credentials included: that there are some is found out now."""
        from dcp_storage.stores.gcs_errors import translated as gcs_translated

        with gcs_translated(Request(request.operation, request.url, request.bucket, request.name)):
            filesystem = self._session.filesystem()
            self.credentials()
        endpoint = cast(str, filesystem.base).removesuffix("/").removesuffix("/storage/v1")
        payer = filesystem._get_params({}).get("userProject")
        client = _tls(endpoint, None) | ({"default_headers": {"x-goog-user-project": payer}} if payer else {})
        limit = filesystem.requests_timeout
        return Settings(
            obstore_stores.GCSStore,
            # Not skip_signature for anonymous access: obstore then still looks on the network for a token for writes.
            {"base_url": endpoint, "skip_signature": False},
            client,
            self.credentials,
            read_seconds=float(limit) if isinstance(limit, (int, float)) else READ_SECONDS,
        )

    def credentials(self) -> dict[str, Any]:
        """The token that gcsfs uses now, refreshed where that is due; empty for anonymous access."""
        held = self._session.filesystem().credentials
        if held.credentials is None:
            return {"token": "", "expires_at": None}
        held.maybe_refresh()
        expiry = getattr(held.credentials, "expiry", None)  # google-auth means UTC and does not say so
        return {
            "token": held.credentials.token,
            "expires_at": None if expiry is None else expiry.replace(tzinfo=timezone.utc),
        }


def _tls(endpoint: str, verify: bool | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Settings of the HTTP client; ``verify`` as botocore takes it, where a file is trusted besides others."""
    client: dict[str, Any] = {"allow_http": endpoint.startswith("http://")}
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif verify not in (None, True):
        client["root_certificate"] = Path(cast(str, verify)).read_bytes()
    return client
