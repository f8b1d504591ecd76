"""The CRC-32s of one shard file while its bytes go by once, in parts (pure).

A file is a row of *cells* (an item's head, each block of its payload, its tail), and it is sent as a row of *parts*,
whose borders fall anywhere. Each part is checksummed in pieces, split where cells end; the pieces then add up to the
CRC-32 of blocks, payloads, items, parts and the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dcp_storage.codec import Encoded
from dcp_storage.crc import combine_all, crc32
from dcp_storage.records import block_size
from dcp_storage.store import Buffers

__all__ = ["Item", "PartSums", "cells_of", "known_of", "piece_sums", "sums_of_items"]

Piece = tuple[int, int]
"""A CRC-32 and the bytes it is of."""


@dataclass
class PartSums:
    """The pieces of one part, in order, and the CRC-32 of the part."""

    pieces: list[Piece] = field(default_factory=list)
    crc32: int = 0


@dataclass(frozen=True)
class Item:
    """The sums of one item: of all of it, of its payload, and of the payload's blocks."""

    crc32: int
    payload_crc32: int
    block: int
    blocks: tuple[int, ...]


def cells_of(item: Encoded) -> list[int]:
    """The bytes of each cell of an item: head (may be 0), blocks, tail (may be 0)."""
    block = block_size(item.payload_length)
    full, rest = divmod(item.payload_length, block)
    tail = item.length - item.payload_offset - item.payload_length
    return [item.payload_offset, *[block] * full, *([rest] if rest else []), tail]


def known_of(item: Encoded) -> list[int | None]:
    """The CRC-32 of each cell of an item where it is known before the bytes go by, else None."""
    blocks = -(-item.payload_length // block_size(item.payload_length))
    return [None, *(item.blocks or [None] * blocks), None]


def piece_sums(buffers: Buffers, lengths: Sequence[int], known: Sequence[int | None] = ()) -> PartSums:
    """Checksums a part's bytes.

    Args:
        buffers: the part.
        lengths: bytes of each piece, in order; they add up to the part.
        known: the CRC-32 of each piece, None where it must be made; empty: of every piece.
    """
    out = PartSums()
    source = iter(buffers)
    rest = memoryview(b"")
    for length, found in zip(lengths, known or (None for _ in lengths), strict=True):
        crc, missing = 0, length
        while missing:
            if not rest.nbytes:
                rest = next(source)
                continue
            taken = rest[:missing]
            if found is None:
                crc = crc32(taken, crc)
            missing -= taken.nbytes
            rest = rest[taken.nbytes :]
        out.pieces.append((crc if found is None else found, length))
    out.crc32 = combine_all(out.pieces)
    return out


def sums_of_items(items: Sequence[Encoded], parts: Sequence[PartSums]) -> list[Item]:
    """Puts the items' sums together from those of a file's parts.

    Args:
        items: the file's items, in order; their buffers are not looked at.
        parts: the file's parts, in order.
    """
    pieces = (piece for part in parts for piece in part.pieces)
    out = []
    for item in items:
        head, *lengths, tail = cells_of(item)
        first = _cell(pieces, head)
        if item.blocks:
            blocks, payload = item.blocks, item.payload_crc32
            _pass(pieces, item.payload_length)
        else:
            cells = [_cell(pieces, length) for length in lengths]
            blocks, payload = tuple(crc for crc, _ in cells), combine_all(cells)
        whole = combine_all([first, (payload, item.payload_length), _cell(pieces, tail)])
        out.append(Item(whole, payload, block_size(item.payload_length), blocks))
    return out


def _pass(pieces: Iterator[Piece], length: int) -> None:
    while length:
        length -= next(pieces)[1]


def _cell(pieces: Iterator[Piece], length: int) -> Piece:
    if not length:
        return 0, 0
    piece = next(pieces)
    if piece[1] == length:  # nearly all of them: parts have few borders
        return piece
    found = [piece]
    missing = length - piece[1]
    while missing:
        piece = next(pieces)
        found.append(piece)
        missing -= piece[1]
    return combine_all(found), length
