"""Boxes filled from runs of bytes that are cut anywhere and come in any order."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.placing import view_of
from dcp_storage.records import ItemRecord
from dcp_storage.scattering import Box, tiles

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint8]


def saved(shape: list[int], dtype: torch.dtype, turned: bool) -> torch.Tensor:
    count = torch.Size(shape).numel()
    value = torch.arange(count).to(dtype)
    if dtype is torch.bool:
        value = torch.arange(count) % 3 == 0
    return value.reshape(shape[::-1]).permute(list(reversed(range(len(shape))))) if turned else value.reshape(shape)


def payload(value: torch.Tensor) -> bytearray:
    """The bytes of a dense tensor in the order of its memory."""
    flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return bytearray(flat.view(torch.uint8).tolist() if flat.numel() else b"")


def record(value: torch.Tensor) -> ItemRecord:
    name = str(value.dtype).removeprefix("torch.")
    size = value.numel() * value.element_size()
    stride = None if value.is_contiguous() else value.stride()
    return ItemRecord(
        key="k", offsets=(0,) * value.dim(), file=0, offset=0, length=size, payload_length=size, dtype=name,
        shape=tuple(value.shape), stride=stride,
    )  # fmt: skip


@given(st.data())
def test_a_box_is_filled_from_runs_in_any_order(data: st.DataObject) -> None:
    """Whatever the cuts, also through elements, and whatever the order: the box holds what was saved."""
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    value = saved(shape, dtype, data.draw(st.booleans()))
    offsets = [data.draw(st.integers(0, size)) for size in shape]
    lengths = [data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    wanted = value[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    raw = payload(value)
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=8))})
    target = torch.zeros(lengths, dtype=dtype)
    box = Box(record(value), target, offsets, lengths)
    pieces = list(itertools.pairwise(cuts))
    random.Random(len(raw)).shuffle(pieces)
    for start, stop in pieces:
        box.place(start, memoryview(raw)[start:stop])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("kind", ["cast", "strided", "transposed"])
def test_targets_of_other_kinds_are_filled(kind: str) -> None:
    """A target of another dtype, or whose memory is not in one run, takes the same values."""
    value = torch.arange(7 * 11, dtype=torch.float32).reshape(7, 11)
    target = {
        "cast": torch.zeros(4, 5, dtype=torch.float64),
        "strided": torch.zeros(8, 10)[::2, ::2],
        "transposed": torch.zeros(5, 4).T,
    }[kind]
    box = Box(record(value), target, (2, 3), (4, 5))
    raw = payload(value)
    for start in range(0, len(raw), 13):
        box.place(start, memoryview(raw)[start : start + 13])
    assert torch.equal(target.float(), value[2:6, 3:8])


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.complex64, torch.float32, torch.bfloat16])
def test_what_is_copied_begins_on_its_own_border(dtype: torch.dtype) -> None:
    """Wherever a run lies in memory: a vector instruction at another place ends the process."""
    value = torch.arange(12).to(dtype)
    for shift in range(1, 17):
        memory = bytearray(shift) + payload(value)
        for skip in (0, value.element_size()):
            found = view_of(memoryview(memory)[shift:], skip, dtype, (3,), (2,))
            assert found.data_ptr() % value.element_size() == 0
            assert torch.equal(found, value[skip // value.element_size() :][:5:2])


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_tiles_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    """The boxes hold exactly the elements that were asked for, in order, and are few."""
    count = torch.Size(shape).numel()
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    numbers = torch.arange(count).reshape(shape)
    found = list(tiles(shape, first, last))
    inside = [numbers[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] for at, size in found]
    assert torch.cat([part.reshape(-1) for part in inside]).tolist() == list(range(first, last))
    assert len(found) <= max(2 * len(shape) - 1, 1)
