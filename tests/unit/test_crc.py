"""Adding up CRC-32s against zlib over the whole bytes."""

from __future__ import annotations

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.crc import combine, combine_all, crc32_of


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_pieces(first: bytes, second: bytes) -> None:
    """The sum of two is zlib's of both in a row, empty ones included."""
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=64), max_size=40))
def test_a_row_of_pieces(pieces: list[bytes]) -> None:
    """The sum of any row is zlib's of all in a row."""
    assert combine_all([(zlib.crc32(piece), len(piece)) for piece in pieces]) == zlib.crc32(b"".join(pieces))


@given(st.binary(min_size=1, max_size=3000), st.integers(1, 300))
def test_a_row_of_equal_pieces(data: bytes, size: int) -> None:
    """Long rows of one length, and a shorter last one, take the way by tables and come to the same."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert combine_all([(zlib.crc32(piece), len(piece)) for piece in pieces]) == zlib.crc32(data)


def test_pieces_that_nobody_could_hold() -> None:
    """Lengths of many gigabytes: a run of zeros, whose sum zlib's own algebra gives by doubling."""
    crc, length = zlib.crc32(b"\0"), 1
    while length < 1 << 40:
        crc, length = combine(crc, crc, length), 2 * length
    # The same by another way of cutting: 2^40 = 3 * (2^40 // 3) + 1.
    third = (1 << 40) // 3
    assert crc == combine_all([(zeros(third), third)] * 3 + [(zlib.crc32(b"\0"), 1)])
    small = 1 << 16
    assert zeros(small) == zlib.crc32(bytes(small))


def zeros(length: int) -> int:
    """CRC-32 of so many zero bytes, by squaring."""
    total, crc = 0, 0
    for bit in reversed(range(length.bit_length())):
        crc, total = combine(crc, crc, total), 2 * total
        if length >> bit & 1:
            crc, total = combine(crc, zlib.crc32(b"\0"), 1), total + 1
    assert total == length
    return crc


def test_buffers_in_a_row() -> None:
    """Any cut of the bytes into buffers has the sum of the whole; no bytes have zero."""
    data = random.Random(1).randbytes(10_000)
    assert crc32_of([]) == 0
    assert crc32_of([memoryview(data)[:17], b"", data[17:]]) == zlib.crc32(data)
