"""What no save or load asks of a server, but ``doctor`` does: below the contract, so with a piece for each store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_storage.store import Store, WrappedStore

if TYPE_CHECKING:
    from dcp_storage.stores.gcs import GcsStore
    from dcp_storage.stores.s3 import S3Store

__all__ = ["refuses_second_multipart"]

_BODY = b"dcp_storage doctor"


def refuses_second_multipart(store: Store, name: str) -> bool | None:
    """Whether the server refuses to make an object of parts, on condition that its name is free, where it is taken.

    The object ``name`` must be there. Whatever the answer, it may have been replaced, and no upload is left open.

    Returns:
        True or False; None where the store has no such request, or its server says that it does not know it.

    Raises:
        StoreError: the server failed.
    """
    while isinstance(store, WrappedStore):
        store = store.inner
    kind = f"{type(store).__module__}.{type(store).__name__}"
    # By name: the packages behind the other store need not be installed.
    if kind == "dcp_storage.stores.s3.S3Store":
        return _of_s3(store, name)  # type: ignore[arg-type]
    if kind == "dcp_storage.stores.gcs.GcsStore":
        return _of_gcs(store, name)  # type: ignore[arg-type]
    return None


def _of_s3(store: S3Store, name: str) -> bool | None:
    from botocore.exceptions import ClientError

    from dcp_storage.stores.s3_bodies import body_of
    from dcp_storage.stores.s3_errors import status_of

    target = {"Bucket": store._bucket, "Key": store._key(name)}

    async def work(client: Any) -> bool | None:
        upload = (await client.send("create_multipart_upload", **target))["UploadId"]
        try:
            body = body_of([memoryview(_BODY)])
            part = await client.send("upload_part", **target, UploadId=upload, PartNumber=1, Body=body)
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            await client.send(
                "complete_multipart_upload", **target, UploadId=upload, MultipartUpload=parts, IfNoneMatch="*"
            )
        except ClientError as error:
            await client.send("abort_multipart_upload", **target, UploadId=upload)
            if status_of(error) in (409, 412):
                return True
            if status_of(error) in (400, 501):  # it knows the header, and does not take it here
                return None
            raise
        return False

    return store._call(store._request("complete", name, changes=True), work)


def _of_gcs(store: GcsStore, name: str) -> bool | None:
    from dcp_storage.stores.gcs_errors import Refused
    from dcp_storage.stores.gcs_sending import CREATE

    key = store._key(name)

    async def work(client: Any) -> bool | None:
        sources = {"sourceObjects": [{"name": key}]}
        url = client.url("b", store._bucket, "o", key, "compose")
        try:
            await client.send("POST", url, CREATE, json={**sources, "destination": {}})
        except Refused as error:
            if error.status == 412:
                return True
            if error.status in (400, 501):
                return None
            raise
        return False

    return store._call(store._request("complete", name, changes=True), work)
