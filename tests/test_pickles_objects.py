"""Every kind of value of the safe list comes back bit for bit; what is not on it is refused by name."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import fractions
import io
import pickle
import random
import struct
import sys
import threading
import uuid
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from dcp_storage.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedDataError,
)
from dcp_storage.pickles import SAFE_GLOBALS, load_object, load_plain, reserialized

GOLDEN = (Path(__file__).parent / "data" / "pickles" / "stock-torch-2.13.pt").read_bytes()


def saved(value: Any) -> bytes:
    """The bytes that torch.save gives."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def same(found: Any, wanted: Any) -> None:
    """Type, value and, in arrays and tensors, every bit agree."""
    assert type(found) is type(wanted)
    if isinstance(wanted, (np.ndarray, np.generic)):
        assert found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted, strict=True)
        if not found.dtype.hasobject:
            assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted
        assert repr(found) == repr(wanted)


RECORD = np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", [("d", "u1")])])
ZONE = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")
FILLED: defaultdict[str, list[int]] = defaultdict(list, {"a": [1, 2]})
VALUES = [
    None,
    True,
    -5,
    2**100,
    -(2**3000),
    1.5,
    float("inf"),
    "",
    "é😀",
    "a" * 300,
    b"",
    b"abc\xff",
    bytes(300),
    bytearray(),
    bytearray(b"abc\xff"),
    (),
    (1, (2, 3), 4, 5),
    [[], [1]],
    {"a": {"b": 1}, 2: None, (3, 4): 5},
    {1, 2},
    set(),
    frozenset([3, (4, 5)]),
    slice(1, None, 2),
    range(1, 9, 2),
    1 + 2j,
    OrderedDict(b=1, a=2),
    Counter("aab"),
    FILLED,
    defaultdict(None, {1: 2}),
    deque([1, 2]),
    deque([1, 2], 5),
    PurePosixPath("/a/b"),
    PureWindowsPath("C:/x"),
    Path("a/b"),
    datetime.date(2024, 5, 6),
    datetime.time(1, 2, 3, 4),
    datetime.datetime(2024, 5, 6, 7, 8, 9, 10),
    datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=ZONE),
    datetime.timedelta(-3, 4, 5),
    datetime.timezone.utc,
    ZONE,
    decimal.Decimal("1.50"),
    decimal.Decimal("-Infinity"),
    fractions.Fraction(-1, 3),
    fractions.Fraction(7),
    uuid.UUID(int=2**127 + 1),
    torch.device("cuda", 1),
    torch.device("cpu"),
    torch.bfloat16,
    torch.strided,
    torch.Size([1, 2]),
    np.arange(6, dtype="f4").reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype="i8").reshape(2, 3)),
    np.array(3.0),
    np.zeros((0, 3), "c8"),
    np.array([True, False]),
    np.array(["a", "bcd"]),
    np.array([b"x", b"yz"]),
    np.array([1, "a", None, [2]], dtype=object),
    np.array(["2020-01-01", "NaT"], dtype="M8[ns]"),
    np.array([1, 2], dtype="m8[15m]"),
    np.array([(1, (2.0, 3.0), (4,))], dtype=RECORD),
    np.array([(1, 2.0)], dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.array([(1, 2.0)], dtype=np.dtype({"names": ["a", "b"], "formats": ["i1", "f4"], "titles": ["x", None]})),
    np.float32(3),
    np.int64(-1),
    np.bool_(True),
    np.complex128(1 + 2j),
    np.str_("ab"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.datetime64("2020-01-01"),
    np.timedelta64(3, "m"),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    np.dtype("f8"),
    np.dtype(">i4"),
    np.dtype("M8[us]"),
    np.dtype("M8"),
    RECORD,
    random.Random(7).getstate(),
    np.random.RandomState(7).get_state(),
    np.random.default_rng(7).bit_generator.state,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{value!r:.20}")
class TestValues:
    def test_as_an_object_entry(self, value: Any) -> None:
        """It comes back from the bytes of torch.save as it was."""
        wanted = pickle.loads(pickle.dumps(value, protocol=2))  # numpy itself makes some arrays native on the way
        same(load_object(saved(value)), wanted)

    def test_as_a_plain_pickle(self, value: Any) -> None:
        """It comes back from a pickle of any protocol from 2 to 5 as pickle itself gives it."""
        for protocol in (2, 3, 4, 5):
            data = pickle.dumps(value, protocol=protocol)
            same(load_plain(data, what="planner_data"), pickle.loads(data))

    def test_handed_to_a_planner(self, value: Any) -> None:
        """It comes back from our own bytes through torch.load without any list, which is what planners do."""
        loaded = load_object(saved(value))
        same(torch.load(io.BytesIO(reserialized(loaded)), weights_only=False), loaded)


TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor(3),
    torch.empty(0),
    torch.empty(0, 4, dtype=torch.int16),
    torch.arange(10)[::3],
    torch.arange(6).reshape(2, 3).t(),
    torch.ones(1).expand(5),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(3).to(torch.uint16),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.tensor([1 + 2j]).conj().imag,
    torch.get_rng_state(),
    torch.arange(3.0, requires_grad=True),
]


class TestTensors:
    @pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}")
    def test_dense(self, tensor: torch.Tensor) -> None:
        """A dense tensor has its values, dtype, strides and requires_grad again."""
        found = load_object(saved(tensor))
        assert type(found) is torch.Tensor
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert found.requires_grad == tensor.requires_grad
        assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert torch.equal(found, tensor)

    def test_float8(self) -> None:
        """A dtype that has no storage class of its own comes back bit for bit."""
        tensor = torch.arange(4.0).to(torch.float8_e4m3fn)
        found = load_object(saved(tensor))
        assert found.dtype is torch.float8_e4m3fn
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))

    def test_a_parameter(self) -> None:
        """A parameter is one again."""
        found = load_object(saved(torch.nn.Parameter(torch.ones(2), requires_grad=False)))
        assert type(found) is torch.nn.Parameter
        assert not found.requires_grad
        assert torch.equal(found, torch.ones(2))

    def test_shared_storage(self) -> None:
        """Two views of one storage share it again, so a write to one is seen in the other."""
        whole = torch.arange(6.0)
        one, other = load_object(saved((whole, whole[2:4])))
        one[2] = 77
        assert other[0] == 77

    @pytest.mark.parametrize("layout", ["coo", "csr"])
    def test_sparse(self, layout: str) -> None:
        """A sparse tensor has its layout and values again."""
        dense = torch.eye(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls CSR a beta, once per process
            data = saved(dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())
        found = load_object(data)
        assert str(found.layout) == f"torch.sparse_{layout}"
        assert torch.equal(found.to_dense(), dense)

    def test_quantized(self) -> None:
        """Quantized tensors, per tensor and per channel, have their bits, scales and zero points again."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch deprecates them; checkpoints still hold them
            one = torch.quantize_per_tensor(torch.arange(3.0), 0.1, 2, torch.qint8)
            scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
            many = torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.quint8)
            data = saved((one, many))
        found, per_channel = load_object(data)
        assert torch.equal(found.int_repr(), one.int_repr())
        assert (found.q_scale(), found.q_zero_point()) == (0.1, 2)
        assert torch.equal(per_channel.int_repr(), many.int_repr())
        assert torch.equal(per_channel.q_per_channel_scales(), many.q_per_channel_scales())
        assert torch.equal(per_channel.q_per_channel_zero_points(), zeros)

    def test_the_other_byte_order(self) -> None:
        """An archive that says it has the other byte order is swapped to this machine's."""
        data = saved(torch.tensor([1, 256], dtype=torch.int32))
        other = {"little": "big", "big": "little"}[sys.byteorder]
        found = load_object(_with_record(data, "byteorder", other.encode()))
        assert found.tolist() == [1 << 24, 1 << 16]


def _with_record(data: bytes, name: str, content: bytes | None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive again by Python's zipfile, with one record replaced, or left out where ``content`` is None."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", compression) as target:
        found = {info.filename.partition("/")[2]: source.read(info) for info in source.infolist()}
        found[name] = content if content is not None else b""
        for record, body in found.items():
            if record != name or content is not None:
                target.writestr(f"archive/{record}", body)
    return out.getvalue()


class TestArchive:
    def test_the_golden_entry(self) -> None:
        """An entry that torch 2.13 wrote holds what was saved."""
        found = load_object(GOLDEN)
        assert list(found) == ["array", "path", "deque", "filled", "moment", "tensor"]
        np.testing.assert_array_equal(found["array"], [[0, 1, 2], [3, 4, 5]])
        assert found["path"] == PurePosixPath("/a/b")
        assert found["deque"] == deque([1, 2])
        assert found["deque"].maxlen == 5
        assert found["filled"] == {"a": [1]}
        assert found["filled"]["new"] == []
        assert found["moment"] == datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.timezone.utc)
        assert found["tensor"].tolist() == [0, 1, 2]

    def test_any_buffer(self) -> None:
        """bytes, bytearray and memoryview are read alike."""
        data = saved([1, 2])
        assert load_object(bytearray(data)) == load_object(memoryview(data)) == load_object(data) == [1, 2]

    def test_a_flipped_bit(self) -> None:
        """A changed byte of a tensor is seen by the archive's own CRC-32."""
        data = bytearray(saved(torch.full((100,), 7.0)))
        at = data.index(struct.pack("<f", 7.0) * 20)
        data[at] ^= 1
        with pytest.raises(CorruptCheckpointError, match="CRC-32"):
            load_object(data, path="memory://run", key="rng")

    def test_without_crcs(self) -> None:
        """An entry saved with torch's CRCs switched off loads."""
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            data = saved(torch.arange(3))
        finally:
            torch.serialization.set_crc32_options(before)
        assert load_object(data).tolist() == [0, 1, 2]

    def test_cut_at_every_byte(self) -> None:
        """An entry cut anywhere is damage of that key, never another error and never a value."""
        data = saved({"a": torch.arange(3), "b": "text"})
        for size in range(len(data)):
            with pytest.raises(CorruptCheckpointError) as caught:
                load_object(data[:size], path="memory://run", key="rng")
            assert (caught.value.path, caught.value.key) == ("memory://run", "rng")

    def test_a_compressed_record(self) -> None:
        """A compressed record, which could grow without bound, is refused."""
        bomb = _with_record(saved(torch.arange(3)), "data/0", bytes(1 << 20), zipfile.ZIP_DEFLATED)
        with pytest.raises(CorruptCheckpointError, match="compressed"):
            load_object(bomb)

    def test_records_that_overlap(self) -> None:
        """Records that together are larger than the archive, so share its bytes, are refused."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as target:
            target.writestr("archive/data/0", bytes(4000))
            for number in range(1, 20):
                again = copy.copy(target.getinfo("archive/data/0"))
                again.filename = f"archive/data/{number}"
                target.filelist.append(again)
        with pytest.raises(CorruptCheckpointError, match="larger than"):
            load_object(out.getvalue())

    def test_a_record_twice(self) -> None:
        """Two records of one name are refused: readers would differ in which they take."""
        out = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as target:
            warnings.simplefilter("ignore", UserWarning)  # zipfile's own, on writing the second
            target.writestr("archive/data.pkl", pickle.dumps(1, protocol=2))
            target.writestr("archive/data.pkl", pickle.dumps(2, protocol=2))
        with pytest.raises(CorruptCheckpointError, match="two records"):
            load_object(out.getvalue())

    @pytest.mark.parametrize("record", ["data.pkl", "data/0"])
    def test_a_missing_record(self, record: str) -> None:
        """An archive without its pickle or without a storage is damaged."""
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            load_object(_with_record(saved(torch.arange(3)), record, None))

    def test_a_storage_smaller_than_it_says(self) -> None:
        """A storage is as large as its record; a reference that calls it larger is refused."""
        with pytest.raises(CorruptCheckpointError, match="is called one of 3 elements"):
            load_object(_with_record(saved(torch.arange(3)), "data/0", bytes(16)))

    @pytest.mark.parametrize("data", [b"", b"PK", pickle.dumps(1, protocol=2), b"x" * 100])
    def test_no_archive(self, data: bytes) -> None:
        """Bytes that are no archive of torch.save are damage."""
        with pytest.raises(CorruptCheckpointError):
            load_object(data)


@dataclass
class Mine:
    """A class of the user's."""

    x: int
    y: list[int]


class Slotted:
    """A class with slots, whose state pickles as a pair."""

    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


class Listed(list[int]):
    """A list of the user's."""


class Mapped(dict[str, int]):
    """A dict of the user's."""


class Colour(enum.Enum):
    """An enum of the user's."""

    RED = "red"


class TestTrusted:
    NAME = f"{Mine.__module__}.Mine"

    def test_refused_by_default(self) -> None:
        """A class of the user's is refused; the error names it and ends with the line that allows it."""
        with pytest.raises(UntrustedDataError) as caught:
            load_object(saved(Mine(1, [2])), path="memory://run", key="mine")
        assert caught.value.name == self.NAME
        assert str(caught.value).endswith(f'LoadOptions(trusted_globals=["{self.NAME}"])')
        assert (caught.value.kind, caught.value.path, caught.value.key) == ("untrusted", "memory://run", "mine")

    @pytest.mark.parametrize("trusted", [Mine, f"{Mine.__module__}.Mine"])
    def test_allowed_by_class_and_by_name(self, trusted: Any) -> None:
        """The class and its dotted name both allow it, in objects and in plain pickles."""
        wanted = Mine(1, [2])
        assert load_object(saved(wanted), trusted_globals=[trusted]) == wanted
        assert load_plain(pickle.dumps(wanted), trusted_globals=[trusted], what="planner_data") == wanted

    def test_every_shape_of_a_class(self) -> None:
        """Slots, list and dict children and enums load as pickle itself loads them."""
        trusted = [Slotted, Listed, Mapped, Colour]
        one, two, three, four = load_object(
            saved((Slotted(5), Listed([1, 2]), Mapped(a=1), Colour.RED)), trusted_globals=trusted
        )
        assert (type(one), one.a) == (Slotted, 5)
        assert (type(two), two) == (Listed, [1, 2])
        assert (type(three), three) == (Mapped, {"a": 1})
        assert four is Colour.RED

    def test_as_a_default_factory(self) -> None:
        """A class that is trusted may be what a defaultdict fills in; one that is not may not."""
        value = defaultdict(Mapped, {"a": Mapped(b=1)})
        assert load_object(saved(value), trusted_globals=[Mapped])["new"] == {}
        with pytest.raises(UntrustedDataError, match="Mapped"):
            load_object(saved(value))

    def test_a_name_that_cannot_be_imported(self) -> None:
        """A trusted name that does not exist here is an error that says so."""
        data = b"\x80\x02cno_such_module\nThing\n."
        with pytest.raises(IncompatibleCheckpointError, match=r"no_such_module\.Thing"):
            load_plain(data, trusted_globals=["no_such_module.Thing"], what="planner_data")

    def test_a_name_is_imported_only_when_data_asks(self) -> None:
        """A trusted name that data does not use is not imported."""
        assert load_object(saved(1), trusted_globals=["no_such_module.Thing"]) == 1

    def test_something_else_is_refused(self) -> None:
        """What is no class, function or name is wrong use."""
        with pytest.raises(TypeError, match="trusted_globals"):
            load_object(saved(1), trusted_globals=[3])  # type: ignore[list-item]

    def test_an_error_in_a_trusted_class(self) -> None:
        """Whatever a trusted class raises on a bad state arrives as damage, with its cause."""
        data = b"\x80\x02cdatetime\ntimedelta\n(X\x01\x00\x00\x00xtR."
        with pytest.raises(CorruptCheckpointError) as caught:
            load_plain(data, trusted_globals=["datetime.timedelta"], what="planner_data")
        assert caught.value.cause is not None
        assert caught.value.cause.type == "builtins.TypeError"


class TestReserialized:
    def test_too_deep(self) -> None:
        """A list nested deeper than pickle can follow is refused, not a RecursionError."""
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(UntrustedDataError, match="nested"):
            reserialized(deep)

    def test_what_cannot_be_pickled(self) -> None:
        """An object that pickle refuses is one of our errors."""
        with pytest.raises(CheckpointError) as caught:
            reserialized(threading.Lock())
        assert caught.value.kind == "hook"

    def test_it_is_an_archive_of_its_own(self) -> None:
        """What is handed on was written anew: only our records, each with a right CRC."""
        with zipfile.ZipFile(io.BytesIO(reserialized(load_object(GOLDEN)))) as archive:
            for info in archive.infolist():
                assert zlib.crc32(archive.read(info)) == info.CRC


def test_torch_s_own_list_is_untouched() -> None:
    """Loading neither reads nor changes torch's process-wide list of safe globals."""
    before = torch.serialization.get_safe_globals()
    load_object(saved(Mine(1, [])), trusted_globals=[Mine])
    load_object(saved(VALUES[:20]))
    assert torch.serialization.get_safe_globals() == before


def test_the_published_list() -> None:
    """The list is sorted, without doubles, of dotted names, and holds nothing that runs or opens things."""
    assert list(SAFE_GLOBALS) == sorted(set(SAFE_GLOBALS))
    assert all("." in name for name in SAFE_GLOBALS)
    assert {"collections.deque", "numpy._core.multiarray._reconstruct", "pathlib.PosixPath"} <= set(SAFE_GLOBALS)
    for name in (
        "builtins.eval",
        "builtins.exec",
        "os.system",
        "torch.load",
        "numpy.load",
        "torch.storage._load_from_bytes",
    ):
        assert name not in SAFE_GLOBALS
