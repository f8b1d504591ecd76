"""An item whose sums are put in afterwards is, byte for byte, what torch.save writes."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import serialization

from dcp_storage import sealing
from dcp_storage.codec import encode
from dcp_storage.sealing import Seal, UnlikeError, can_seal

SHAPES = [(), (1,), (5, 7), (3, 1, 4), (513, 1025), (2, 600, 700)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def saved(tensor: torch.Tensor) -> bytes:
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was found out about this torch is forgotten before and after."""
    sealing._seals_alike.cache_clear()
    yield
    sealing._seals_alike.cache_clear()


def test_this_torch_can_be_sealed() -> None:
    """On the torch that is installed the fast way is taken; without this every other test here says nothing."""
    assert can_seal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Contiguous tensors of any size and dtype give the bytes of torch.save, and each block's CRC-32."""
    tensor = (torch.rand(shape) * 100).to(dtype)
    item = encode(tensor)
    data = b"".join(item.buffers)
    assert data == saved(tensor)
    payload = data[item.payload_offset :][: item.payload_length]
    block = -(-len(payload) // 128)
    block = min(max(block, 16384), 1 << 20)
    assert list(item.blocks) == [zlib.crc32(payload[at : at + block]) for at in range(0, len(payload), block)]


def test_a_second_tensor_of_one_kind_is_as_right_as_the_first() -> None:
    """What surrounds small tensors of one shape is remembered; their own bytes and sums are not."""
    for seed in range(3):
        tensor = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
        assert b"".join(encode(tensor).buffers) == saved(tensor)


def test_other_strides_are_kept() -> None:
    """A transposed tensor gives the bytes of torch.save, small and large."""
    for size in (8, 1500):
        tensor = torch.rand(size, size + 1).t()
        assert b"".join(encode(tensor).buffers) == saved(tensor)


def test_every_sum_in_the_archive_is_right() -> None:
    """The zip library, which checks each record's CRC-32, finds no fault."""
    with zipfile.ZipFile(io.BytesIO(b"".join(encode(torch.rand(777, 33)).buffers))) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) >= 6


def test_the_setting_without_sums_is_followed() -> None:
    """Where the user told torch to leave its CRC-32s out, ours are not put in."""
    tensor = torch.rand(300, 10)
    serialization.set_crc32_options(False)
    try:
        assert b"".join(encode(tensor).buffers) == saved(tensor)
    finally:
        serialization.set_crc32_options(True)


@pytest.mark.parametrize("shape", [(7, 5), (700, 701)], ids=str)
def test_another_alignment_is_followed(shape: tuple[int, ...]) -> None:
    """Torch's alignment setting moves the payload, also of a kind that was seen before, as in torch.save."""
    from torch.utils.serialization import config

    tensor = torch.rand(shape)
    before = encode(tensor).payload_offset
    with config.patch("save.storage_alignment", 4096):  # type: ignore[attr-defined]  # torch puts it there
        item = encode(tensor)
        assert b"".join(item.buffers) == saved(tensor)
    assert item.payload_offset % 4096 == 0 < before % 4096
    assert b"".join(encode(tensor).buffers) == saved(tensor)


@pytest.mark.parametrize("error", [TypeError, AttributeError, RuntimeError])
def test_another_torch_does_it_all(fresh: None, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Where torch's inside is not as expected, torch.save is used, and the bytes are right."""
    through: list[object] = []

    def other(*arguments: object) -> None:
        through.append(arguments)
        raise error("this torch is another one")

    tensor = torch.rand(300, 10)
    wanted = saved(tensor)
    monkeypatch.setattr(sealing, "write_unsummed", other)
    assert not can_seal()
    assert through
    assert b"".join(encode(tensor).buffers) == wanted


def test_other_sums_are_noticed(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that derives its archive's identity in another way is found out by the first try."""
    monkeypatch.setattr(sealing, "_combined", lambda seed, value: seed + value)
    assert not can_seal()


@pytest.mark.parametrize("cut", [1, 22, 60, 200])
def test_an_archive_that_is_none_is_refused(cut: int) -> None:
    """Bytes that are no such archive raise, and are not taken for one."""
    data = saved(torch.arange(16.0))
    with pytest.raises(UnlikeError):
        Seal(data[:704], 64, data[768:-cut])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_than_four_gigabytes() -> None:
    """Where sizes and places need ZIP64, every byte but the payload's is torch's."""
    tensor = torch.zeros((1 << 32) // 4 + 1000, dtype=torch.float32)
    tensor[::4096] = 1.5

    class Around:
        """Keeps what is not the payload."""

        def __init__(self) -> None:
            self.kept = bytearray()

        def write(self, data: memoryview | bytes) -> int:
            view = memoryview(data)
            if view.nbytes < 1 << 30:
                self.kept += view
            return view.nbytes

        def flush(self) -> None:
            """Nothing is held back."""

    around: Any = Around()
    torch.save(tensor, around)
    item = encode(tensor)
    assert bytes(item.buffers[0]) + bytes(item.buffers[2]) == bytes(around.kept)
    assert item.payload_length == tensor.numel() * 4
