"""Items against ``torch.save`` itself."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_storage.codec import bytes_of, contiguous_stride, dtype_named, encode, encode_object, name_of_dtype


def stock(tensor: torch.Tensor) -> bytes:
    """What stock DCP writes: ``torch.save`` to a buffer, of a clone where the storage is larger than the tensor."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, in order, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def joined(buffers: list[memoryview]) -> bytes:
    return b"".join(buffers)


BASE = torch.arange(4 * 5 * 6, dtype=torch.float32).reshape(4, 5, 6)
CASES: dict[str, torch.Tensor] = {
    "plain": BASE.clone(),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0),
    "empty-2d": torch.zeros(2, 0, 3),
    "one": torch.ones(1, dtype=torch.int8),
    "dense-view": torch.arange(1000.0)[100:200],
    "holes": BASE[:, 1:3, ::2],
    "transposed": BASE.clone().permute(2, 0, 1),
    "transposed-view": torch.arange(1000.0)[:20].reshape(4, 5).T,
    "channels-last": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": torch.arange(3.0).expand(4, 3),
    "ones-of-odd-stride": torch.arange(12.0).as_strided((1, 3), (77, 1)),
    "parameter": torch.nn.Parameter(torch.ones(3, 3)),
    "grad": torch.ones(3, requires_grad=True),
    "conjugate": torch.ones(3, dtype=torch.complex64).mul(2j).conj(),
    "negative": torch.ones(3, dtype=torch.complex64).mul(2j).conj().imag,
    "bool": torch.tensor([True, False]),
    "sparse": torch.eye(3).to_sparse(),
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "float8": torch.arange(7.0).to(torch.float8_e4m3fn),
    "uint64": torch.tensor([2**63], dtype=torch.uint64),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_torch_save(name: str) -> None:
    """Head, payload and tail in a row are what stock torch writes for the same tensor."""
    tensor = CASES[name]
    item = encode(tensor)
    assert joined(item.buffers) == stock(tensor)
    assert item.length == sum(buffer.nbytes for buffer in item.buffers)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"sparse", "conjugate", "negative"}))
def test_the_payload_is_the_memory_of_the_tensor(name: str) -> None:
    """A plain tensor's payload, read with its dtype, shape and strides, is the tensor."""
    tensor = CASES[name].detach()
    item = encode(tensor)
    assert item.dtype == str(tensor.dtype).split(".")[1]
    assert item.shape == tuple(tensor.shape)
    assert item.payload_length == tensor.numel() * tensor.element_size()
    raw = joined(item.buffers)[item.payload_offset : item.payload_offset + item.payload_length]
    assert len(raw) == item.payload_length
    if raw:
        flat = torch.frombuffer(bytearray(raw), dtype=tensor.dtype)
        again = flat.as_strided(item.shape, item.stride or contiguous_stride(item.shape))
        assert bits(again) == bits(tensor)


def test_a_plain_tensor_is_not_copied() -> None:
    """The payload buffer is the tensor's own memory, also for a dense view of a larger storage."""
    whole = torch.zeros(100_000)
    for tensor in (whole, whole[5000:60_000], whole.reshape(100, 1000).T):
        item = encode(tensor)
        assert item.copied < 2048
        (payload,) = (buffer for buffer in item.buffers if buffer.nbytes == item.payload_length)
        tensor.fill_(7)
        assert bytes(payload[:4]) == bytes(payload[-4:]) == b"\0\0\xe0@"
        tensor.fill_(0)


def test_a_tensor_with_holes_is_counted_as_copied() -> None:
    """What had to be cloned is told to the budget."""
    item = encode(torch.zeros(1000, 100)[:, ::2])
    assert 200_000 <= item.copied < 203_000


def test_a_subclass_travels_whole() -> None:
    """A tensor of another class is serialised by torch itself; its payload is all of the item."""
    item = encode(torch.eye(3).to_sparse())
    assert (item.dtype, item.shape, item.payload_offset) == (None, None, 0)
    assert item.payload_length == item.length


def test_python_attributes_are_kept() -> None:
    """A tensor with attributes of its own is saved with them, as torch does."""
    tensor = torch.ones(3)
    tensor.note = "mine"  # type: ignore[attr-defined]
    item = encode(tensor)
    found = torch.load(io.BytesIO(joined(item.buffers)), weights_only=False)
    assert torch.equal(found, tensor)
    assert joined(item.buffers) == stock(tensor)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_any_strided_view(shape: list[int], data: st.DataObject) -> None:
    """Views of any order, start and step give torch's bytes, and load as the view."""
    base = torch.arange(2000, dtype=torch.int32)
    order = data.draw(st.permutations(range(len(shape))))
    step = data.draw(st.integers(1, 2))
    stride = [0] * len(shape)
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    view = base.as_strided(shape, stride, data.draw(st.integers(0, 3)))
    item = encode(view)
    assert joined(item.buffers) == stock(view)
    assert torch.equal(torch.load(io.BytesIO(joined(item.buffers)), weights_only=True), view)


def test_the_memory_of_a_tensor() -> None:
    """The view of a tensor's memory is writable, flat, and keeps the tensor alive."""
    tensor = torch.zeros(4, dtype=torch.int16)
    view = bytes_of(tensor)
    view[:] = random.Random(1).randbytes(8)
    assert view.nbytes == 8
    assert tensor.numpy().tobytes() == bytes(view)
    wanted = bytes(view)
    del tensor
    assert bytes(view) == wanted
    assert bytes_of(torch.zeros(0)).nbytes == 0


def test_objects_are_kept_as_they_are() -> None:
    """An object's buffers are its item, all of it payload."""
    item = encode_object([memoryview(b"abc"), memoryview(b""), memoryview(b"de")])
    assert joined(item.buffers) == b"abcde"
    assert (item.length, item.payload_offset, item.payload_length, item.dtype) == (5, 0, 5, None)


def test_names_of_dtypes() -> None:
    """Every dtype has a name that finds it again; other names of torch find nothing."""
    dtypes: list[Any] = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    assert len(dtypes) > 30
    for dtype in dtypes:
        assert dtype_named(name_of_dtype(dtype)) is dtype
    for name in ("", "nn", "float33", "float 32", "load", "nn.Module"):
        assert dtype_named(name) is None


@given(st.lists(st.integers(0, 6), max_size=5))
def test_strides_of_contiguous_tensors(shape: list[int]) -> None:
    """They are those that torch gives a new tensor."""
    assert contiguous_stride(tuple(shape)) == torch.empty(shape).stride()
