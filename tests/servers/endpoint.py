"""Where a test server is, and what s3fs needs to talk to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from botocore.config import Config
from botocore.session import get_session

__all__ = ["S3Endpoint"]

REGION = "us-east-1"


@dataclass(frozen=True)
class S3Endpoint:
    """A running S3 server.

    Attributes:
        name: which server it is, for test ids.
        endpoint_url: its URL.
        key: an access key that it knows.
        secret: the key's secret.
        lists_uploads: whether it can list open uploads.
        buckets: the buckets that were made through this object, in order.
    """

    name: str
    endpoint_url: str
    key: str
    secret: str
    lists_uploads: bool = True
    buckets: list[str] = field(default_factory=list, compare=False, repr=False)

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for s3fs; a new dict each time."""
        return {
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"endpoint_url": self.endpoint_url, "region_name": REGION},
        }

    def behind(self, endpoint_url: str) -> S3Endpoint:
        """The same server seen through a proxy."""
        return replace(self, endpoint_url=endpoint_url)

    @cached_property
    def client(self) -> Any:
        """A plain botocore client, made once: the oracle, which shares no code with the store."""
        return get_session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(connect_timeout=10, read_timeout=30, s3={"addressing_style": "path"}),
        )

    def make_bucket(self, name: str) -> None:
        """Makes a bucket."""
        self.client.create_bucket(Bucket=name)
        self.buckets.append(name)
