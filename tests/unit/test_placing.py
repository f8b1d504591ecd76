"""From bytes to tensors: block sums, buffers handed out, boxes put in their places."""

from __future__ import annotations

import itertools
import random
import zlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.errors import CorruptCheckpointError, IncompatibleCheckpointError
from dcp_storage.placing import Place, Taker, check_blocks, dtype_of, is_direct, product, view_of
from dcp_storage.records import ItemRecord


def item(payload: bytes, block: int, **more: object) -> ItemRecord:
    sums = tuple(zlib.crc32(payload[at : at + block]) for at in range(0, len(payload), block))
    fields: dict[str, object] = {
        "key": "a", "offsets": (0,), "file": 0, "offset": 1000, "length": len(payload) + 50, "payload_offset": 20,
        "payload_length": len(payload), "block": block, "blocks": sums,
    }  # fmt: skip
    return ItemRecord(**{**fields, **more})  # type: ignore[arg-type]


def cut(data: bytes, cuts: list[int]) -> list[memoryview]:
    borders = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [memoryview(data)[low:high] for low, high in itertools.pairwise(borders)]


@given(st.integers(1, 300), st.integers(1, 50), st.lists(st.integers(0, 300), max_size=5), st.data())
def test_a_flipped_byte_is_found_in_its_block(size: int, block: int, cuts: list[int], data: st.DataObject) -> None:
    """However the bytes are cut: right ones pass, and a flipped one is reported with its block, sums and place."""
    payload = random.Random(size).randbytes(size)
    record = item(payload, block)
    count = len(record.blocks)
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    run = payload[first * block : last * block]
    assert check_blocks("file", record, first * block, cut(run, cuts)) is None
    at = data.draw(st.integers(0, len(run) - 1))
    bad = run[:at] + bytes([run[at] ^ 1]) + run[at + 1 :]
    error = check_blocks("file", record, first * block, cut(bad, cuts))
    assert isinstance(error, CorruptCheckpointError)
    number = first + at // block
    assert (error.file, error.key, error.wanted) == ("file", "a", record.blocks[number])
    assert error.offset == 1000 + 20 + number * block
    assert error.found == zlib.crc32(bad[(number - first) * block : (number - first + 1) * block])


def test_an_item_without_sums_is_not_checked() -> None:
    """What stock torch wrote has none."""
    assert check_blocks("file", item(b"abc", 1, blocks=()), 0, [memoryview(b"xyz")]) is None


@given(st.lists(st.binary(max_size=9), max_size=8), st.lists(st.integers(0, 12), max_size=12))
def test_buffers_are_handed_out_in_order(buffers: list[bytes], sizes: list[int]) -> None:
    """Runs of any lengths are the bytes in order, from empty buffers as well."""
    whole = b"".join(buffers)
    taker = Taker([memoryview(buffer) for buffer in buffers])
    at = 0
    for size in (*sizes, len(whole)):
        taken = min(size, len(whole) - at)
        assert b"".join(taker.take(taken)) == whole[at : at + taken]
        at += taken
    assert at == len(whole)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), min_size=0, max_size=3),
    st.sampled_from([torch.uint8, torch.int16, torch.float64]),
    st.integers(0, 9),
)
def test_a_staged_box_gets_to_its_place(dims: list[tuple[int, int, int]], dtype: torch.dtype, skip: int) -> None:
    """A box out of saved bytes, at any byte of the staging buffer, fills its place in the target and no other."""
    saved_shape = tuple(before + length + after for before, length, after in dims)
    lengths = tuple(length for _, length, _ in dims)
    source = torch.arange(product(saved_shape)).to(dtype).reshape(saved_shape)
    stride = source.stride()
    offsets = tuple(before for before, _, _ in dims)
    first = sum(o * s for o, s in zip(offsets, stride, strict=True))
    span = sum((n - 1) * s for n, s in zip(lengths, stride, strict=True)) + 1
    raw = source.reshape(-1)[first : first + span].contiguous().view(torch.uint8).numpy().tobytes()
    staging = memoryview(bytearray(skip + len(raw)))
    target = torch.full(tuple(length + after for _, length, after in dims), 77).to(dtype)
    at = tuple(after for _, _, after in dims)
    place = Place(target, at, lengths, partial(view_of, staging, skip, dtype, lengths, stride), "a")
    staging[skip:] = raw  # the bytes arrive after the place was made, as they do in a load
    place()
    wanted = torch.full(target.shape, 77).to(dtype)
    box = source
    for dim, (before, length, after) in enumerate(dims):
        box = box.narrow(dim, before, length)
        assert after + length == target.shape[dim]
    wanted[tuple(slice(after, after + length) for _, length, after in dims)] = box
    assert torch.equal(target, wanted)


@pytest.mark.parametrize(
    ("target", "direct"),
    [
        (torch.zeros(3, 4), True),
        (torch.nn.Parameter(torch.zeros(3, 4)).detach(), True),
        (torch.zeros(100)[12:24].view(3, 4), True),
        (torch.zeros(4, 3).T, False),
        (torch.zeros(3, 8)[:, ::2], False),
        (torch.zeros(1, 4).expand(3, 4), False),
        (torch.zeros(3, 4, dtype=torch.float64), False),
        (torch.zeros(3, 4, dtype=torch.int32), False),
        (torch.zeros(3, 4, device="meta"), False),
        (torch.eye(3, 4).to_sparse(), False),
    ],
)
def test_only_plain_memory_is_filled_directly(target: torch.Tensor, direct: bool) -> None:
    """A target takes bytes as they are only if it is contiguous CPU memory of the very dtype."""
    assert is_direct(target, torch.float32) is direct


def test_lazily_conjugated_memory_is_not_filled_directly() -> None:
    """Its bytes are not its values."""
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()
    assert not is_direct(conjugate, torch.complex64)
    assert not is_direct(conjugate.imag, torch.float32)


def test_an_unknown_dtype_is_incompatible() -> None:
    """A dtype that this torch lacks is named, with the key."""
    with pytest.raises(IncompatibleCheckpointError, match="float3") as caught:
        dtype_of(item(b"abcd", 4, dtype="float3", shape=(1,)))
    assert caught.value.key == "a"


def test_a_shape_that_needs_other_bytes_is_corrupt() -> None:
    """Shape, dtype and payload must fit each other before a buffer is laid over them."""
    assert dtype_of(item(b"abcd", 4, dtype="int16", shape=(2,))) is torch.int16
    with pytest.raises(CorruptCheckpointError) as caught:
        dtype_of(item(b"abcd", 4, dtype="int16", shape=(3,)))
    assert (caught.value.key, caught.value.wanted, caught.value.found) == ("a", 6, 4)


def test_the_product_of_no_sizes_is_one() -> None:
    """A 0-dim tensor has one element."""
    assert (product(()), product((3, 4)), product((3, 0))) == (1, 12, 0)
