"""Who is measured: each subject saves a state to a place and loads it back."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_storage.codec import bytes_of

__all__ = ["SUBJECTS", "Place", "Subject", "subject"]

State = dict[str, torch.Tensor]
PART = 16 * 1024 * 1024
IN_FLIGHT = 16


@dataclass(frozen=True)
class Place:
    """Where a subject saves to.

    Attributes:
        url: the folder.
        endpoint: the server's URL, for S3 and GCS.
        options: more options for ours, e.g. ``max_concurrency`` or ``engine``.
    """

    url: str
    endpoint: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """A way to save and to load; both are timed from the call to its return."""

    save: Callable[[State, Place], None]
    load: Callable[[State, Place], None]


def _credentials() -> tuple[str, str]:
    key, secret = os.environ.get("BENCH_S3_CREDENTIALS", "bench:bench-secret").split(":")
    return key, secret


def _s3_options(place: Place) -> dict[str, Any]:
    key, secret = _credentials()
    options: dict[str, Any] = {"key": key, "secret": secret, "endpoint_url": place.endpoint}
    if place.endpoint.startswith("https"):
        options["client_kwargs"] = {"verify": os.environ["BENCH_CA"]}
    return options


def _gcs_options(place: Place) -> dict[str, Any]:
    return {"endpoint_url": place.endpoint, "token": "anon", "project": "bench"}


def _storage_options(place: Place) -> dict[str, Any]:
    if place.url.startswith("s3://"):
        return _s3_options(place)
    return _gcs_options(place) if place.url.startswith("gs://") else {}


def _ours() -> Subject:
    from dcp_storage import FsspecStorageReader, FsspecStorageWriter, LoadOptions, SaveOptions

    def save(state: State, place: Place) -> None:
        options = SaveOptions(**place.options)
        writer = FsspecStorageWriter(
            place.url, storage_options=_storage_options(place), overwrite=True, options=options
        )
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())

    def load(state: State, place: Place) -> None:
        options = LoadOptions(**place.options)
        reader = FsspecStorageReader(place.url, storage_options=_storage_options(place), options=options)
        dcp.load(state, storage_reader=reader, no_dist=not torch.distributed.is_initialized())

    return Subject(save, load)


def _ours_obstore() -> Subject:
    ours = _ours()

    def on_obstore(place: Place) -> Place:
        return replace(place, options={**place.options, "engine": "obstore"})

    return Subject(
        lambda state, place: ours.save(state, on_obstore(place)),
        lambda state, place: ours.load(state, on_obstore(place)),
    )


def _torch_fs() -> Subject:
    def save(state: State, place: Place) -> None:
        writer = dcp.FileSystemWriter(place.url)
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())

    def load(state: State, place: Place) -> None:
        reader = dcp.FileSystemReader(place.url)
        dcp.load(state, storage_reader=reader, no_dist=not torch.distributed.is_initialized())

    return Subject(save, load)


def _torch_fsspec() -> Subject:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    def save(state: State, place: Place) -> None:
        writer = FsspecWriter(place.url, sync_files=False, **_storage_options(place))
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())

    def load(state: State, place: Place) -> None:
        reader = FsspecReader(place.url, **_storage_options(place))
        dcp.load(state, storage_reader=reader, no_dist=not torch.distributed.is_initialized())

    return Subject(save, load)


def _s3torchconnector() -> Subject:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    def settings(place: Place) -> None:
        key, secret = _credentials()
        os.environ.update(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret)
        os.environ["AWS_ENDPOINT_URL"] = place.endpoint

    def save(state: State, place: Place) -> None:
        settings(place)
        config = S3ClientConfig(force_path_style=True)
        writer = S3StorageWriter("us-east-1", place.url, s3client_config=config, overwrite=True)
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())

    def load(state: State, place: Place) -> None:
        settings(place)
        reader = S3StorageReader("us-east-1", place.url, s3client_config=S3ClientConfig(force_path_style=True))
        dcp.load(state, storage_reader=reader, no_dist=not torch.distributed.is_initialized())

    return Subject(save, load)


def _multi_storage_client() -> Subject:
    from multistorageclient.contrib.torch import MultiStorageFileSystemReader, MultiStorageFileSystemWriter

    def where(place: Place) -> str:
        key, secret = _credentials()
        bucket, _, folder = place.url.removeprefix("s3://").partition("/")
        profile = {
            "storage_provider": {
                "type": "s3",
                "options": {"base_path": bucket, "endpoint_url": place.endpoint, "region_name": "us-east-1"},
            },
            "credentials_provider": {
                "type": "S3Credentials",
                "options": {"access_key": key, "secret_key": secret},
            },
        }
        config = Path(os.environ["BENCH_SCRATCH"]) / f"msc-{os.getpid()}.json"
        config.write_text(json.dumps({"profiles": {"bench": profile}}))
        os.environ["MSC_CONFIG"] = str(config)
        return f"msc://bench/{folder}"

    def save(state: State, place: Place) -> None:
        writer = MultiStorageFileSystemWriter(where(place))
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())

    def load(state: State, place: Place) -> None:
        reader = MultiStorageFileSystemReader(where(place))
        dcp.load(state, storage_reader=reader, no_dist=not torch.distributed.is_initialized())

    return Subject(save, load)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor)


def _parts_of(state: State) -> list[list[memoryview]]:
    """All bytes of a state in parts of 16 MiB, each a list of pieces."""
    parts: list[list[memoryview]] = [[]]
    room = PART
    for tensor in state.values():
        rest = bytes_of(tensor)
        while rest.nbytes:
            if not room:
                parts.append([])
                room = PART
            taken, rest = rest[:room], rest[room:]
            parts[-1].append(taken)
            room -= taken.nbytes
    return parts


def _raw_s3() -> Subject:
    """The client library of our default engine (s3fs's client), moving the same bytes, and nothing else.

    Eight requests in flight, parts and ranges of 16 MiB, one object. The settings are ours: no second checksum by the
    client library, payload unsigned. No CRC is made, nothing is committed.
    """
    from s3fs import S3FileSystem

    def run(place: Place, work: Callable[[Any, str, str], Awaitable[None]]) -> None:
        config = {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
            "max_pool_connections": IN_FLIGHT,
        }
        filesystem = S3FileSystem(**_s3_options(place), config_kwargs=config)
        bucket, _, folder = place.url.removeprefix("s3://").partition("/")

        async def main() -> None:
            await filesystem.set_session()
            await work(filesystem.s3, bucket, f"{folder}/raw")

        asyncio.run_coroutine_threadsafe(main(), filesystem.loop).result()

    def save(state: State, place: Place) -> None:
        async def work(client: Any, bucket: str, key: str) -> None:
            target = {"Bucket": bucket, "Key": key}
            upload = (await client.create_multipart_upload(**target))["UploadId"]
            free = asyncio.Semaphore(IN_FLIGHT)

            async def one(number: int, part: list[memoryview]) -> dict[str, Any]:
                async with free:
                    body = io.BytesIO(b"".join(part))
                    answer = await client.upload_part(**target, UploadId=upload, PartNumber=number, Body=body)
                    return {"PartNumber": number, "ETag": answer["ETag"]}

            parts = await asyncio.gather(*(one(k, part) for k, part in enumerate(_parts_of(state), 1)))
            await client.complete_multipart_upload(**target, UploadId=upload, MultipartUpload={"Parts": parts})

        run(place, work)

    def load(state: State, place: Place) -> None:
        async def work(client: Any, bucket: str, key: str) -> None:
            free = asyncio.Semaphore(IN_FLIGHT)

            async def one(number: int, part: list[memoryview]) -> None:
                async with free:
                    start = number * PART
                    stop = start + sum(p.nbytes for p in part) - 1
                    answer = await client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop}")
                    async with answer["Body"] as body:
                        data = memoryview(await body.read())
                    for piece in part:
                        piece[:] = data[: piece.nbytes]
                        data = data[piece.nbytes :]

            await asyncio.gather(*(one(k, part) for k, part in enumerate(_parts_of(state))))

        run(place, work)

    return Subject(save, load)


def _dd() -> Subject:
    """The same bytes with dd, in blocks of 16 MiB: from a file in the page cache to the disk with fsync; and back."""

    def save(state: State, place: Place) -> None:
        source = os.environ["BENCH_SOURCE"]
        command = ["dd", f"if={source}", f"of={place.url}/dd", "bs=16M", "conv=fsync", "status=none"]
        subprocess.run(command, check=True)

    def load(state: State, place: Place) -> None:
        subprocess.run(["dd", f"if={place.url}/dd", "of=/dev/null", "bs=16M", "status=none"], check=True)

    return Subject(save, load)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "ours": _ours,
    "ours, obstore": _ours_obstore,
    "torch FileSystem": _torch_fs,
    "torch Fsspec": _torch_fsspec,
    "s3torchconnector": _s3torchconnector,
    "multi-storage-client": _multi_storage_client,
    "raw s3fs client": _raw_s3,
    "dd": _dd,
}


def subject(name: str) -> Subject:
    """Makes a subject; imports only what that one needs."""
    return SUBJECTS[name]()
