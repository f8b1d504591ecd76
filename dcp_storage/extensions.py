"""Undoing stock torch's stream extensions (``_extensions=``, e.g. ZStandard) on items that were saved through them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO, cast

from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from dcp_storage.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, UntrustedDataError

__all__ = ["untransformed"]

_PIECE = 1 << 20


def untransformed(
    data: memoryview, descriptors: Sequence[str], *, limit: int, path: str | None = None, key: str | None = None
) -> memoryview:
    """The bytes of an item before the extensions.

    Args:
        data: the item as it is in the file.
        descriptors: the extensions' names, in the order in which they are undone.
        limit: bytes; a small file can unpack to gigabytes.
        path: the checkpoint, for errors.
        key: the state-dict key, for errors.

    Raises:
        IncompatibleCheckpointError: an extension that this torch does not have, or whose package is not installed.
        UntrustedDataError: more than ``limit`` bytes come out.
        CorruptCheckpointError: the bytes cannot be undone.
    """
    if not descriptors:
        return data
    try:
        extensions = ExtensionRegistry().from_descriptor_list(descriptors)
    except ValueError as error:
        raise IncompatibleCheckpointError(
            f"{path}: {key!r} was saved through stream extensions ({', '.join(descriptors)}) that cannot be undone "
            f"here: {error}",
            path=path,
            key=key,
            cause=error,
        ) from error
    stream: IO[bytes] = io.BytesIO(data)
    for extension in extensions:
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    out = bytearray()
    try:
        while len(out) <= limit and (piece := cast("bytes | None", stream.read(_PIECE))):
            out += piece
    except CheckpointError:
        raise
    except Exception as error:  # whatever the extension's own library raises for bytes that it did not write
        raise CorruptCheckpointError(
            f"{path}: the bytes of {key!r} cannot be undone by {', '.join(descriptors)}: {error}",
            path=path,
            key=key,
            cause=error,
        ) from error
    if len(out) > limit:
        raise UntrustedDataError(
            f"{path}: {key!r} unpacks to more than the {limit} bytes that it may have.", path=path, key=key
        )
    return memoryview(out)
