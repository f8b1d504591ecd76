"""Whether a manifest has all that it says: every tensor's chunks fill it, and every chunk is somewhere (pure).

A load fills what the chunks of a tensor cover and leaves the rest of its target alone; so whatever they do not cover
has to be found before.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from dcp_storage.errors import CorruptCheckpointError
from dcp_storage.records import Chunk, Manifest, TensorEntry
from dcp_storage.shapes import elements

__all__ = ["check_whole", "fills"]

_MOST_CORNERS = 1 << 24  # of all chunks of a tensor together: millions of chunks that are cut along four dimensions


def check_whole(manifest: Manifest, *, path: str, file: str) -> None:
    """Checks a manifest that is one of a whole checkpoint, not of one rank's part.

    Args:
        manifest: decoded, each place in it within its tensor and file.
        path: the checkpoint, for errors.
        file: the manifest's own name, for errors.

    Raises:
        CorruptCheckpointError: a tensor's chunks leave some of it out or overlap, or a chunk or an object has no item.
    """
    there = {(item.key, item.offsets or ()) for item in manifest.items}
    for key, entry in manifest.entries.items():
        if not isinstance(entry, TensorEntry):
            if (key, ()) not in there:
                raise _not_whole(path, file, key, "has no item for it")
            continue
        wanted, found = elements(entry.size), sum(elements(chunk.sizes) or 0 for chunk in entry.chunks)
        if found != wanted or not fills(entry.size, entry.chunks):
            raise _not_whole(
                path,
                file,
                key,
                f"has chunks of {found} elements for it, which has {wanted}; they leave some out, or overlap",
                wanted=wanted,
                found=found,
            )
        if not all((key, chunk.offsets) in there for chunk in entry.chunks if 0 not in chunk.sizes):
            raise _not_whole(path, file, key, "has no item for a chunk of it")


def _not_whole(
    path: str, file: str, key: str, what: str, *, wanted: int | None = None, found: int | None = None
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {file} lists {key!r:.200}, but {what}.", path=path, file=file, key=key, wanted=wanted, found=found
    )


def fills(size: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether chunks of a tensor, each within it and as many elements together as it has, cover each element once.

    Args:
        size: the tensor's shape.
        chunks: its parts.
    """
    boxes = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if len(boxes) <= 1:
        return True  # as many elements, and inside
    cut = [dim for dim, whole in enumerate(size) if any(box.sizes[dim] != whole for box in boxes)]
    if len(cut) == 1:
        runs = sorted((box.offsets[cut[0]], box.sizes[cut[0]]) for box in boxes)
        return all(first + count == after for (first, count), (after, _) in itertools.pairwise(runs))
    if len(boxes) << len(cut) > _MOST_CORNERS:
        return False
    # The chunks' indicator functions add up to the tensor's if their mixed differences do; those are one at each
    # corner, with alternating signs.
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        _add_corners(corners, [(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in cut], 1)
    _add_corners(corners, [(0, size[dim]) for dim in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], bounds: list[tuple[int, int]], sign: int) -> None:
    for picks in itertools.product((0, 1), repeat=len(bounds)):
        at = tuple(bound[pick] for bound, pick in zip(bounds, picks, strict=True))
        corners[at] += sign if sum(picks) % 2 == 0 else -sign
