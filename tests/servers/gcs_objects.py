"""Buckets and objects of the strict GCS server: what may change them, and what they say of themselves."""

from __future__ import annotations

import base64
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from tests.servers.gcs_hashes import Hashed, hashed
from tests.servers.gcs_refusal import Refusal

__all__ = ["Bucket", "Params", "StoredObject", "World", "check_live"]

Params = Mapping[str, str]

FIXED = ("contentType", "contentEncoding", "cacheControl", "contentDisposition", "contentLanguage", "metadata")


@dataclass
class StoredObject:
    """One generation of an object; ``fields`` are those that a client may set."""

    name: str
    data: bytes
    generation: int
    fields: dict[str, Any]
    crc32c: str
    md5: str | None
    components: int | None = None
    metageneration: int = 1
    created: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    updated: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def hash_header(self) -> str:
        """For ``x-goog-hash``."""
        return f"crc32c={self.crc32c}" + ("" if self.md5 is None else f",md5={self.md5}")

    def resource(self, bucket: str) -> dict[str, Any]:
        """The object's JSON form."""
        described = {
            "kind": "storage#object",
            "id": f"{bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "etag": base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode("ascii"),
            "timeCreated": _time(self.created),
            "updated": _time(self.updated),
            **self.fields,
        }
        if self.md5 is not None:
            described["md5Hash"] = self.md5
        if self.components is not None:
            described["componentCount"] = self.components
        return described


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


@dataclass
class Bucket:
    """A bucket with its live objects."""

    name: str
    objects: dict[str, StoredObject] = field(default_factory=dict)

    def resource(self) -> dict[str, Any]:
        """The bucket's JSON form."""
        return {"kind": "storage#bucket", "id": self.name, "name": self.name, "location": "US", "metageneration": "1"}

    def live(self, name: str, params: Params) -> StoredObject:
        """The object that a request means.

        Raises:
            Refusal: 404 where there is none, or not of the ``generation`` asked for.
        """
        found = self.objects.get(name)
        wanted = _number(params, "generation")
        if found is None or wanted not in (None, found.generation):
            raise Refusal(404, f"No such object: {self.name}/{name}")
        return found


class World:
    """All buckets under one lock, so that every change is atomic.

    Attributes:
        with_md5: whether objects have an MD5.
    """

    def __init__(self, *, with_md5: bool = True) -> None:
        self.with_md5 = with_md5
        self.lock = threading.Lock()
        self.buckets: dict[str, Bucket] = {}
        self._generation = secrets.randbelow(1 << 20) + 1_700_000_000_000_000

    def bucket(self, name: str) -> Bucket:
        """Raises Refusal 404 where there is no such bucket."""
        if name not in self.buckets:
            raise Refusal(404, "The specified bucket does not exist.")
        return self.buckets[name]

    def make_bucket(self, name: str) -> Bucket:
        """Raises Refusal 409 where there is one, 400 where the name cannot be one."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", name):
            raise Refusal(400, f"Invalid bucket name: {name!r}")
        if name in self.buckets:
            raise Refusal(409, "Your previous request to create the named bucket succeeded and you already own it.")
        self.buckets[name] = Bucket(name)
        return self.buckets[name]

    def write(
        self,
        bucket: Bucket,
        name: str,
        data: bytes | Hashed,
        resource: Mapping[str, Any],
        *,
        components: int | None = None,
    ) -> StoredObject:
        """Makes ``data`` the live object of this name; a composite one (``components``) has no MD5."""
        if not name or len(name.encode()) > 1024 or "\r" in name or "\n" in name or name in (".", ".."):
            raise Refusal(400, f"Invalid object name: {name!r}")
        self._generation += 1
        if not isinstance(data, Hashed):
            data = hashed(data, with_md5=self.with_md5 and not components)
        fields = {key: resource[key] for key in FIXED if key in resource}
        made = StoredObject(name, data.data, self._generation, fields, data.crc32c_text, data.md5_text, components)
        bucket.objects[name] = made
        return made


def _number(params: Params, key: str) -> int | None:
    if key not in params:
        return None
    if not re.fullmatch(r"\d+", params[key]):
        raise Refusal(400, f"Invalid value for {key}: {params[key]!r}")
    return int(params[key])


def check_live(found: StoredObject | None, params: Params, *, prefix: str = "if", reads: bool = False) -> None:
    """Holds an object (None: there is none) against the preconditions of a request.

    Args:
        found: the live object under the name.
        params: the query.
        prefix: ``"ifSource"`` for those about the source of a copy.
        reads: whether the request only reads; a NotMatch that fails is then 304.

    Raises:
        Refusal: 412 or 304 where one does not hold, 400 where one is no number.
    """
    generation = 0 if found is None else found.generation
    metageneration = None if found is None else found.metageneration
    for key, actual in (("Generation", generation), ("Metageneration", metageneration)):
        wanted, unwanted = (_number(params, f"{prefix}{key}{kind}") for kind in ("Match", "NotMatch"))
        if wanted is not None and wanted != actual:
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")
        if unwanted is not None and (unwanted == actual or actual is None):
            raise Refusal(304 if reads else 412, "At least one of the pre-conditions you specified did not hold.")
