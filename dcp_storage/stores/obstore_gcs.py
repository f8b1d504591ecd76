"""One object of several parts on GCS, whose parts obstore sends.

A part on GCS is an object of its own, so obstore's put will do for it; the object is composed as without obstore, and
GCS's own CRC-32C of the whole is held against that of the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import obstore

from dcp_storage.store import Buffers, total
from dcp_storage.stores.asking import Request
from dcp_storage.stores.gcs_crc32c import crc32c_of
from dcp_storage.stores.gcs_session import GcsSession
from dcp_storage.stores.gcs_upload import GcsUpload
from dcp_storage.stores.obstore_errors import translated
from dcp_storage.stores.obstore_options import Clients

__all__ = ["ObstoreGcsUpload"]


class ObstoreGcsUpload(GcsUpload):
    """An object in parts.

    Args:
        clients: obstore's.
        session: where everything but the parts is sent.
        key: the object's key in the bucket.
        request: makes a request about this object from the name of an operation.
    """

    def __init__(self, clients: Clients, session: GcsSession, key: str, *, request: Callable[[str], Request]) -> None:
        begun = request("upload")
        super().__init__(session, key, url=begun.url, bucket=begun.bucket, name=begun.object_name)
        self._clients = clients
        self._made_request = request

    def write_part(self, number: int, offset: int, buffers: Buffers, *, crc32: int | None = None) -> None:
        """As the contract says; ``crc32`` cannot be sent, GCS knows another."""
        request = self._made_request("write_part")
        size, crc32c, key = total(buffers), crc32c_of(buffers), self._fresh_key()
        client = self._clients.for_writing(request)
        with translated(request):
            made: Any = obstore.put(client, key, list(buffers), attributes=self._note, use_multipart=False)
        generation = made["version"]
        if generation is None:
            raise request.error("the server did not say which generation of the part it made.")
        # Safe without the loop: each step in it is one of the interpreter's; no number is sent by two threads at once.
        self._keep(number, offset, key, generation, size, crc32c)
