"""CRC-32C, the checksum that GCS checks: of buffers, and of their concatenation without reading them again."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import google_crc32c

from dcp_storage.store import Buffers

__all__ = ["combine", "combine_all", "crc32c_of", "crc32c_text"]

PIECE = 1 << 18  # bytes copied at once: the C code wants bytes, and a copy of this size stays in the cache
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_ONE = 1 << 31  # the polynomial 1 in that order of bits


def crc32c_of(buffers: Buffers) -> int:
    """The CRC-32C of buffers in a row."""
    crc = 0
    for buffer in buffers:
        for start in range(0, buffer.nbytes, PIECE):
            crc = google_crc32c.extend(crc, bytes(buffer[start : start + PIECE]))
    return crc


def crc32c_text(crc: int) -> str:
    """The checksum as GCS writes it: big-endian, in base64."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32C of A + B from those of A and B, where B has ``length`` bytes."""
    power, shift = 1 << 23, _ONE  # x^8 for one byte, and x^(8·length) as it grows
    while length:
        if length & 1:
            shift = _multiply(shift, power)
        power = _multiply(power, power)
        length >>= 1
    return _multiply(shift, first) ^ second


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32C of a row of pieces, each given as (CRC-32C, bytes)."""
    crc = 0
    for piece, length in pieces:
        crc = combine(crc, piece, length)
    return crc


def _multiply(a: int, b: int) -> int:
    """a·b modulo the polynomial, all in reflected bit order."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
