"""CRC-32 of pieces, and of their concatenation without reading them again (pure).

Every byte is checksummed once, in the piece in which it passes by; the sums of blocks, items, parts and files are
then put together from those of the pieces. The algebra is that of zlib's ``crc32_combine``: appending n bytes to a
message multiplies its CRC by x^(8n) modulo the CRC polynomial.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

try:
    from isal.isal_zlib import crc32  # the same sums, about three times as fast (docs/design/015)
except ImportError:  # no wheel for this processor
    from zlib import crc32

__all__ = ["block_sums", "combine", "combine_all", "crc32", "crc32_of"]

_POLYNOMIAL = 0xEDB88320  # reflected, as zlib has it
_WORTH_TABLES = 8  # pieces of one length beyond which building tables pays
_ONE = 1 << 31  # the polynomial 1 in that order of bits


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


@functools.lru_cache(maxsize=1)
def _squares() -> tuple[int, ...]:
    """x^(8·2^k) for k = 0 … 62."""
    power = 1 << 23  # x^8
    out = []
    for _ in range(63):
        out.append(power)
        power = _multiply(power, power)
    return tuple(out)


@functools.lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8·length)."""
    product = _ONE
    for k, square in enumerate(_squares()):
        if length >> k & 1:
            product = _multiply(product, square)
        if not length >> k:
            break
    return product


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of A + B from those of A and B, where B has ``length`` bytes."""
    return _multiply(_shift(length), first) ^ second


@functools.lru_cache(maxsize=256)
def _tables(length: int) -> tuple[tuple[int, ...], ...]:
    """Multiplication by x^(8·length) as four lookups, for lengths that recur (blocks, parts)."""
    shift = _shift(length)
    images = [_multiply(shift, 1 << bit) for bit in range(32)]
    tables = []
    for byte in range(4):
        row = [0] * 256
        for value in range(1, 256):
            low = value & -value
            row[value] = row[value ^ low] ^ images[8 * byte + low.bit_length() - 1]
        tables.append(tuple(row))
    return tuple(tables)


def combine_all(pieces: Sequence[tuple[int, int]]) -> int:
    """The CRC-32 of a row of pieces, each given as (CRC-32, bytes)."""
    often: dict[int, tuple[tuple[int, ...], ...]] = {}
    if len(pieces) > _WORTH_TABLES:  # a file's blocks have a few lengths, which its items' heads and tails lie between
        counts = Counter(length for _, length in pieces)
        often = {length: _tables(length) for length, count in counts.items() if count > _WORTH_TABLES}
    crc = 0
    for piece, length in pieces:
        tables = often.get(length)
        if tables is not None:
            t0, t1, t2, t3 = tables
            crc = t0[crc & 255] ^ t1[crc >> 8 & 255] ^ t2[crc >> 16 & 255] ^ t3[crc >> 24] ^ piece
        else:
            crc = combine(crc, piece, length) if crc else piece  # the shift of zero is zero
    return crc


def crc32_of(buffers: Iterable[memoryview | bytes]) -> int:
    """The CRC-32 of buffers in a row."""
    crc = 0
    for buffer in buffers:
        crc = crc32(buffer, crc)
    return crc


def block_sums(data: memoryview, block: int) -> tuple[int, ...]:
    """The CRC-32 of each run of ``block`` bytes; the last may be shorter."""
    return tuple(crc32(data[at : at + block]) for at in range(0, data.nbytes, block))
