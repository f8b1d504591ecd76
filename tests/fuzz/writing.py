"""Writes the corpus anew: ``python -m tests.fuzz.writing``. Only for a new format; what it writes is in git."""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import io
import json
import pickle
import struct
import uuid
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import torch

from tests.fuzz.archives import packed
from tests.fuzz.corpus import FOLDER
from tests.fuzz.opcodes import call, text
from tests.fuzz.sealing import MANIFEST, commit_of, sealed

__all__ = ["attacks", "valid"]

STOCK: Final = Path(__file__).parents[1] / "data" / "pickles" / "stock-torch-2.13.metadata"


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _body(**changes: Any) -> bytes:
    whole = json.loads(commit_of(MANIFEST))
    del whole["crc32"]
    whole.update(changes)
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


def _manifest(**changes: Any) -> bytes:
    item = {
        "key": "w",
        "offsets": [0, 2],
        "index": 1,
        "file": 0,
        "offset": 100,
        "length": 1000,
        "crc32": 2**32 - 1,
        "payload_offset": 64,
        "payload_length": 96,
        "payload_crc32": 0,
        "block": 16384,
        "blocks": [5],
        "dtype": "float32",
        "shape": [4, 6],
        "stride": [1, 4],
    }
    plain = {
        "key": "w",
        "offsets": [0, 0],
        "file": 0,
        "offset": 0,
        "length": 64,
        "payload_length": 32,
        "payload_offset": 4,
    }
    whole: dict[str, Any] = {
        "format": 1,
        "version": "1.0.0",
        "files": [
            {"name": "__0_0.distcp", "size": 5000, "crc32": 1, "rank": 0},
            {"name": "__1_0.distcp", "size": 900, "crc32": None, "rank": 1},
        ],
        "items": [
            {**plain, "dtype": "float32", "shape": [4, 2], "blocks": [7], "block": 16384},
            item,
            {"key": "n", "file": 1, "offset": 0, "length": 900, "payload_length": 900, "block": 512, "blocks": [9, 8]},
        ],
        "entries": {
            "w": {
                "kind": "tensor",
                "dtype": "float32",
                "size": [4, 8],
                "chunks": [{"offsets": [0, 0], "sizes": [4, 2]}, {"offsets": [0, 2], "sizes": [4, 6]}],
            },
            "n": {"kind": "bytes"},
        },
        "planner_data": {"paths": {"w": ["w"], "n": ["a", 0, "n"]}},
        "storage_meta": {"checkpoint_id": "s3://b/k", "save_id": "abc", "modules": ["m"]},
    }
    whole.update(changes)
    return json.dumps(whole).encode()


def _opaque() -> bytes:
    pickled = pickle.dumps({"a": OrderedDict(b=(1, 2))}, protocol=4)
    return _manifest(planner_data={"opaque": base64.b64encode(pickled).decode(), "crc32": zlib.crc32(pickled)})


def valid() -> dict[str, dict[str, bytes]]:
    """Target → name → a valid input."""
    values: dict[str, Any] = {
        "plain": [1, 2**100, -5, 1.5, "é😀", b"\xff", True, None, (1, (2, 3)), {"a": {2: 3}}, {1, 2}, frozenset([3])],
        "containers": [
            OrderedDict(b=1),
            Counter("aab"),
            defaultdict(list, {"a": [1]}),
            deque([1, 2], 5),
            bytearray(b"x"),
        ],
        "times": [
            datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.timezone(datetime.timedelta(hours=5), "IST")),
            datetime.date(2024, 5, 6),
            datetime.timedelta(-3, 4, 5),
            decimal.Decimal("1.50"),
            fractions.Fraction(-1, 3),
            uuid.UUID(int=2**127 + 1),
            range(1, 9, 2),
            slice(1, None, 2),
            1 + 2j,
            PurePosixPath("/a/b"),
        ],
        "numpy": [
            np.arange(6, dtype="f4").reshape(2, 3),
            np.array([1, "a", None], dtype=object),
            np.array(["2020-01-01"], dtype="M8[ns]"),
            np.zeros(2, np.dtype([("a", "i4"), ("b", "f8", (2,))])),
            np.float32(1.5),
        ],
        "torch": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), torch.strided],
    }
    tensors = {
        "dense": {
            "a": torch.arange(6.0).reshape(2, 3),
            "b": torch.arange(5)[1:3],
            "c": torch.ones(2, dtype=torch.bfloat16),
        },
        "dressed": [
            torch.nn.Parameter(torch.ones(2)),
            torch.tensor([1 + 2j]).conj(),
            torch.ones(2, requires_grad=True),
        ],
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0]), (2, 2)).coalesce(),
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
        "newer": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "rng": {"torch": torch.ones(16, dtype=torch.uint8), "numpy": ("MT19937", np.arange(4, dtype="u4"), 3, 0, 0.0)},
    }
    metadata = STOCK.read_bytes()
    whole = pickle.loads(metadata)
    return {
        "commit": {
            "committed": commit_of(MANIFEST),
            "void": _sealed_void(),
            "rank": commit_of(MANIFEST, name="__1.manifest", rank=1),
        },
        "body": {
            "committed": _body(),
            "void": _body(state="void", manifest=None),
            "fence": _body(number=7, restates=6),
        },
        "rank": {"committed": _body(rank=0, label="abc", manifest=_ref("__0.manifest"))},
        "manifest": {"small": _manifest(), "empty": _manifest(files=[], items=[], entries={}), "opaque": _opaque()},
        "folder": {"small": _manifest()},
        "metadata": {
            "stock": metadata,
            **{f"protocol-{number}": pickle.dumps(whole, protocol=number) for number in (2, 4)},
        },
        "planner": {
            f"{name}-{number}": pickle.dumps(value, protocol=number)
            for name, value in values.items()
            for number in (2, 5)
        },
        "object": {name: _saved(value) for name, value in {**values, **tensors}.items()},
        "item": {
            "float32": _saved(torch.arange(4096.0)),
            "int16": _saved(torch.zeros(64, 128, dtype=torch.int16)),
            "complex64": _saved(torch.zeros(2048, dtype=torch.complex64)),
        },
    }


def _ref(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(commit_of(MANIFEST, name=name))["manifest"]
    return found


def _sealed_void() -> bytes:
    return sealed(_body(state="void", manifest=None))


def _plain(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def _entry(body: bytes, size: int = 16) -> bytes:
    return packed({"archive/data.pkl": b"\x80\x02" + body + b".", "archive/data/0": bytes(size)})


def _laughs(levels: int) -> bytes:
    """A tuple of itself twice, ``levels`` times over: it has 2 ** levels leaves, and a text or a hash has no end."""
    return (
        b")\x940"
        + b"".join(b"h" + bytes([n, ord("h"), n]) + b"\x86\x940" for n in range(levels))
        + b"h"
        + bytes([levels])
    )


def _many(value: bytes, times: int) -> bytes:
    """A tuple of the same value, many times over."""
    return value + b"\x940(" + b"h\x00" * times + b"t"


def attacks() -> dict[str, dict[str, bytes]]:
    """Target → name → an input that once took hours, gigabytes or another error than ours."""
    wide = b"\x8a\x08" + b"\xff" * 7 + b"\x3f"  # 2 ** 62 - 1
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    metadata = "torch.distributed.checkpoint.metadata"
    described = b"(K\x03" + text("|") + b"N"
    tail = b"K\x08K\x01K\x00tb"
    void8 = call("numpy.dtype", text("V8"), b"\x89", b"\x88")
    field = b"}" + text("a") + call("numpy.dtype", text("f8"), b"\x89", b"\x88") + b"K\x00"
    large = struct.pack("<I", 9000)
    return {
        "rank": {
            "ranks-without-number": _body(rank=0, label="abc", world_size=2**62, manifest=_ref("__0.manifest")),
            "another-rank": _body(rank=1, label="abc", manifest=_ref("__0.manifest")),
        },
        "manifest": {
            "module-as-dtype": _manifest(
                entries={"w": {"kind": "tensor", "dtype": "_dynamo", "size": [], "chunks": []}}
            ),
            "endless-product": _manifest(
                entries={"w": {"kind": "tensor", "dtype": "int8", "size": [2**62] * 1500, "chunks": []}}
            ),
            "long-key": _manifest(
                entries={"k" * 9000: {"kind": "tensor", "dtype": "int8", "size": [2], "chunks": [{}]}}
            ),
        },
        "metadata": {
            "key-without-end": _plain(
                f"c{metadata}\nMetadata\n)\x81}}(".encode("latin-1")
                + text("state_dict_metadata")
                + b"}"
                + _laughs(14)
                + b"Ns"
                + text("storage_data")
                + b"}ub"
            ),
            "attribute-without-end": _plain(f"c{metadata}\nMetadata\n)\x81}}".encode("latin-1") + _laughs(14) + b"Nsb"),
        },
        "planner": {
            "fraction-of-huge-ints": _plain(
                call("fractions.Fraction", b"\x8b" + large + b"\x55" * 9000, b"\x8b" + large + b"\x33" * 9000)
            ),
            "range-of-huge-ints": _plain(
                call("builtins.range", b"K\x00", b"\x8b" + large + b"\x55" * 9000, b"\x8a\xff" + b"\x33" * 255)
            ),
            "long-decimal": _plain(call("decimal.Decimal", text("9" * 11_000))),
            "dtype-names-without-end": _plain(void8 + described + _laughs(40) + b"\x85" + field + b"\x86s" + tail),
            "dtype-title-without-end": _plain(
                void8 + described + text("a") + b"\x85" + field + _laughs(40) + b"\x87s" + tail
            ),
            "array-of-endless-shape": _plain(
                _many(wide, 6000)
                + b"\x940"
                + call("numpy._core.numeric._frombuffer", b"C\x00", void8, b"h\x01", text("C"))
            ),
            "size-without-end": _plain(_many(b"K\x01", 6000) + b"\x940" + call("torch.Size", b"h\x01")),
        },
        "object": {
            "tensor-of-endless-size": _entry(
                _many(wide, 6000) + b"\x940" + rebuild + b"(" + storage + b"K\x00h\x01h\x01\x89" + hooks + b"tR"
            ),
        },
        "item": {
            "place-of-endless-size": _entry(
                _many(b"\x8a\xff" + b"\x7f" * 255, 3000)
                + b"\x940"
                + rebuild
                + b"("
                + storage
                + b"K\x00h\x01h\x01\x89"
                + hooks
                + b"tR",
                17_000,
            ),
        },
    }


def main() -> None:
    """Writes every file of the corpus."""
    for kind, inputs in (("seed", valid()), ("found", attacks())):
        for target, named in inputs.items():
            (FOLDER / target).mkdir(parents=True, exist_ok=True)
            for name, data in named.items():
                (FOLDER / target / f"{kind}-{name}").write_bytes(data)


if __name__ == "__main__":
    main()
