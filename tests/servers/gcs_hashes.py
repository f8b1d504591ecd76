"""The hashes of the strict GCS server: each of a body's bytes is read once for each of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from tests.servers.gcs_refusal import Refusal

__all__ = ["Hashed", "Hashing", "check_hashes", "hashed"]


@dataclass(frozen=True)
class Hashed:
    """Bytes and their hashes, big-endian; ``md5`` is None where it was not made."""

    data: bytes
    crc32c: bytes
    md5: bytes | None

    @property
    def crc32c_text(self) -> str:
        """As GCS writes it, in base64."""
        return base64.b64encode(self.crc32c).decode("ascii")

    @property
    def md5_text(self) -> str | None:
        """As GCS writes it, in base64."""
        return None if self.md5 is None else base64.b64encode(self.md5).decode("ascii")


@dataclass
class Hashing:
    """The hashes of bytes that come in pieces.

    Attributes:
        with_md5: whether an MD5 is made; it takes more than a second of a processor for each GB.
    """

    with_md5: bool = True
    crc: int = 0
    md5: Any = field(default_factory=lambda: hashlib.md5(usedforsecurity=False))

    def take(self, piece: bytes) -> None:
        """Adds the next bytes."""
        self.crc = google_crc32c.extend(self.crc, piece)
        if self.with_md5:
            self.md5.update(piece)

    def of(self, data: bytes) -> Hashed:
        """The result, with all bytes once more."""
        return Hashed(data, self.crc.to_bytes(4, "big"), self.md5.digest() if self.with_md5 else None)


def hashed(data: bytes, *, with_md5: bool = True) -> Hashed:
    """Hashes bytes that are all there."""
    hashing = Hashing(with_md5)
    hashing.take(data)
    return hashing.of(data)


def check_hashes(data: Hashed, resource: Mapping[str, Any], header: str | None) -> None:
    """Holds bytes against the hashes that came with them, in the resource or in ``x-goog-hash``.

    Raises:
        Refusal: 400 where one is malformed or differs.
    """
    given: list[tuple[str, Any]] = [("crc32c", resource.get("crc32c")), ("md5", resource.get("md5Hash"))]
    for item in (header or "").split(","):
        kind, _, value = item.strip().partition("=")
        if kind:
            given.append((kind, value))
    for kind, value in given:
        if value is None:
            continue
        try:
            wanted = base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise Refusal(400, f"Invalid {kind}: {value!r}") from None
        if kind == "crc32c":
            actual = data.crc32c
        elif kind == "md5":
            actual = data.md5 or hashlib.md5(data.data, usedforsecurity=False).digest()
        else:
            raise Refusal(400, f"Unknown hash {kind!r}")
        if wanted != actual:
            raise Refusal(400, f"Provided {kind} {value!r} does not match that of the content.")
