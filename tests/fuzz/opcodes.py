"""Mutations of pickles that stay rows of opcodes: taken out, doubled, moved, put in, and whole programs of snippets."""

from __future__ import annotations

import functools
import pickletools
import struct
from collections.abc import Sequence
from typing import Final

from tests.fuzz.choices import Choices

__all__ = ["call", "invented", "mutated", "text"]

_HUGE: Final = struct.pack("<I", 0xFFFFFFF0)
_HUGER: Final = struct.pack("<Q", 1 << 40)


def text(value: str) -> bytes:
    """A string as opcodes."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(name: str, *args: bytes) -> bytes:
    """A call of a global with arguments that are opcodes already."""
    module, _, last = name.rpartition(".")
    return text(module) + text(last) + b"\x93(" + b"".join(args) + b"tR"


_META: Final = "torch.distributed.checkpoint.metadata"
_GLOBALS: Final = (
    "builtins.set", "builtins.frozenset", "builtins.bytearray", "builtins.complex", "builtins.range", "builtins.slice",
    "builtins.list", "builtins.int", "builtins.getattr", "builtins.eval", "os.system", "_codecs.encode",
    "collections.OrderedDict", "collections.defaultdict", "collections.deque", "collections.Counter",
    "datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.timezone", "decimal.Decimal",
    "fractions.Fraction", "pathlib.PosixPath", "uuid.UUID", "numpy.dtype", "numpy.ndarray",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer",
    "torch.Size", "torch.device", "torch.float32", "torch.FloatStorage", "torch.QInt8Storage", "torch.LongStorage",
    "torch.storage.UntypedStorage", "torch.serialization._get_layout", "torch.per_tensor_affine",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_parameter",
    f"{_META}.Metadata", f"{_META}.MetadataIndex", f"{_META}.TensorStorageMetadata", f"{_META}.TensorProperties",
    f"{_META}.ChunkStorageMetadata", f"{_META}.BytesStorageMetadata", f"{_META}.StorageMeta",
    f"{_META}._MEM_FORMAT_ENCODING", "torch.distributed.checkpoint.filesystem._StorageInfo",
)  # fmt: skip
_VALUES: Final = (
    b"N", b"\x88", b"\x89", b"K\x00", b"K\x01", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00",
    b"\x8b" + struct.pack("<I", 400) + b"\x01" * 400,
    b"G\x7f\xf8" + bytes(6), b"G\x3f\xf0" + bytes(6), b"C\x00", b"C\x04abcd",
    b"C\x0a\x07\xe8\x05\x06\x07\x08\x09\x00\x00\x0a",
    text(""), text("a"), text("fqn"), text("offset"), text("size"), text("latin1"), text("0"), text("cpu"),
    text("storage"),
    text("__class__"), text("\ud800"), text("1/3"), text("1e9999"), text("f4"), text("V8"), text("|"), text("<"),
    b")", b"]", b"}", b"\x8f", b"(t", b"K\x02\x85", b"K\x02K\x03\x86", b"K\x00K\x01K\x02\x87",
)  # fmt: skip
_STEPS: Final = (
    b"(", b"0", b"1", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"b", b"R",
    b"\x81", b"\x92", b"\x90", b"\x91", b"\x93", b"\x94", b"Q", b"h\x00", b"h\x01", b"h\x02", b"q\x00", b"q\x01", b".",
    b"j\x03\x00\x00\x00", b"r\x03\x00\x00\x00", b"B" + _HUGE, b"X" + _HUGE, b"\x8b" + _HUGE, b"\x8e" + _HUGER,
    b"\x8d" + _HUGER, b"\x96" + _HUGER, b"\x95" + _HUGER, b"j" + _HUGE, b"r" + _HUGE, b"\x82\x01", b"c\n\n", b"P1\n",
    b"h\x00h\x00\x86\x94" * 12, b"]" * 60, b"(" * 60, b"\x85" * 120, b"a" * 20,
)  # fmt: skip


def _snippet(choices: Choices) -> bytes:
    way = choices.below(5)
    if way == 0:
        return choices.pick(_VALUES)
    if way == 1:
        return choices.pick(_STEPS)
    name = choices.pick(_GLOBALS)
    if way == 2:
        module, _, last = name.rpartition(".")
        return f"c{module}\n{last}\n".encode()
    args = [choices.pick(_VALUES) for _ in range(choices.below(5))]
    if way == 3:
        return call(name, *args)
    return call(name, *args) + choices.pick((b"}b", b"(K\x03NNNNNNNtb", b"b", b"}K\x01Ns", b"\x94", b"a", b"s"))


@functools.lru_cache(maxsize=256)
def _operations(data: bytes) -> tuple[bytes, ...]:
    """A valid pickle as its operations, without frames, whose lengths a change would make wrong."""
    places = [(op.name, at or 0) for op, _, at in pickletools.genops(data)]
    ends = [at for _, at in places[1:]] + [len(data)]
    return tuple(data[at:end] for (name, at), end in zip(places, ends, strict=True) if name != "FRAME")


def mutated(choices: Choices, data: bytes, others: Sequence[bytes]) -> bytes:
    """The pickle after one to five changes of its row of operations; its header stays.

    Args:
        choices: decides.
        data: a valid pickle.
        others: valid ones of the same kind, to take operations from.
    """
    head, *row = _operations(data)
    for _ in range(1 + choices.below(5)):
        at = choices.below(len(row) + 1)
        way = choices.below(7)
        if way == 0:
            del row[at : at + 1 + choices.below(4)]
        elif way == 1:
            row[at:at] = row[at : at + 1 + choices.below(6)] * (30 if choices.one_in(20) else 1)
        elif way == 2:
            row.insert(at, _snippet(choices))
        elif way == 3:
            row[at : at + 1] = [_snippet(choices)]
        elif way == 4:
            other = _operations(choices.pick(others))
            first = choices.below(len(other))
            row[at:at] = other[first : first + 1 + choices.below(8)]
        elif way == 5 and row:
            first, second = choices.below(len(row)), choices.below(len(row))
            row[first], row[second] = row[second], row[first]
        elif at < len(row) and len(row[at]) > 1:
            raw = bytearray(row[at])
            raw[1 + choices.below(len(raw) - 1)] = choices.pick((0, 1, 2, 0x7F, 0x80, 0xFF))
            row[at] = bytes(raw)
    return head + b"".join(row)


def invented(choices: Choices) -> bytes:
    """A pickle that nobody wrote: snippets in a row, each plausible for itself."""
    body = b"".join(_snippet(choices) for _ in range(1 + choices.below(25)))
    return bytes([0x80, choices.pick((2, 3, 4, 5))]) + body + b"."
