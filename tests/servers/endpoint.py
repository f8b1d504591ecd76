"""Where a test server is, and what s3fs needs to talk to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from botocore.config import Config
from botocore.exceptions import ClientError
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
        buckets: the buckets that were made through this object, in order.
    """

    name: str
    endpoint_url: str
    key: str
    secret: str
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

    def open_uploads(self, bucket: str) -> list[dict[str, Any]]:
        """The multipart uploads of a bucket that are neither completed nor aborted."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
        try:
            return [item for page in pages for item in page.get("Uploads", ())]
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchUpload":  # rclone's way to say that there are none
                return []
            raise
