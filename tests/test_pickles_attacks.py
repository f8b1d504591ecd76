"""What a hostile pickle tries: none of it runs, none of it takes memory, all of it ends in one of our errors."""

from __future__ import annotations

import gc
import io
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from dcp_storage.errors import CheckpointError, CorruptCheckpointError, UntrustedDataError
from dcp_storage.pickles import load_metadata, load_object, load_plain

STOCK = (Path(__file__).parent / "data" / "pickles" / "stock-torch-2.13.metadata").read_bytes()
MIB = 1 << 20


def text(value: str) -> bytes:
    """A string as an opcode."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(module: str, name: str, *args: bytes) -> bytes:
    """A call of a global with arguments that are opcodes already."""
    return text(module) + text(name) + b"\x93(" + b"".join(args) + b"tR"


def plain(body: bytes, **options: Any) -> Any:
    """Loads opcodes as a planner's data."""
    return load_plain(b"\x80\x04" + body + b".", what="planner_data", **options)


def entry(body: bytes, **records: bytes) -> bytes:
    """An object entry whose data.pkl are these opcodes, with storages ``s0``, ``s1``, …"""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        for name, content in records.items():
            target.writestr(f"archive/data/{name[1:]}", content)
    return out.getvalue()


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that Python allocated at most while ``action`` ran, touched or not."""
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


GADGETS = [
    "os.system",
    "posix.system",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.__import__",
    "builtins.open",
    "builtins.print",
    "builtins.type",
    "builtins.object",
    "builtins.globals",
    "builtins.map",
    "operator.attrgetter",
    "functools.partial",
    "functools.reduce",
    "importlib.import_module",
    "pickle.loads",
    "_pickle.loads",
    "marshal.loads",
    "types.CodeType",
    "types.FunctionType",
    "sys.exit",
    "shutil.rmtree",
    "pathlib.Path.unlink",
    "pathlib.os.system",
    "copyreg._reconstructor",
    "torch.load",
    "torch.serialization.load",
    "torch.serialization.os.system",
    "torch.storage._load_from_bytes",
    "torch.jit.load",
    "torch.jit._script.os.system",
    "torch.hub.load",
    "torch.utils.cpp_extension.load",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._tensor._rebuild_from_type_v2",
    "torch.nn.Module",
    "torch.Tensor",
    "numpy.load",
    "numpy.frombuffer",
    "numpy.f2py.compile",
    "numpy.memmap",
    "numpy.matrix",
    "collections.namedtuple",
    "torch.distributed.checkpoint.metadata.os.system",
    "torch.distributed.checkpoint.metadata.Metadata.__init__.__globals__",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter",
    "dcp_storage.pickles.pickle.loads",
]


class TestGlobals:
    @pytest.mark.parametrize("name", GADGETS)
    def test_refused_however_it_is_split(self, name: str) -> None:
        """A global off the list is refused wherever its name is split, with the line that would allow it."""
        parts = name.split(".")
        for at in range(1, len(parts)):
            module, attribute = ".".join(parts[:at]), ".".join(parts[at:])
            loads = (
                lambda m=module, a=attribute: plain(call(m, a)),
                lambda m=module, a=attribute: plain(f"c{m}\n{a}\n)R".encode()),
                lambda m=module, a=attribute: load_metadata(b"\x80\x02" + f"c{m}\n{a}\n.".encode()),
                lambda m=module, a=attribute: load_object(entry(f"c{m}\n{a}\n)R".encode())),
            )
            for load in loads:
                with pytest.raises(UntrustedDataError) as caught:
                    load()
                assert caught.value.name == name
                assert str(caught.value).endswith(f'LoadOptions(trusted_globals=["{name}"])')

    def test_nothing_runs(self, tmp_path: Path) -> None:
        """A pickle that Python would run leaves no trace when it goes through us."""
        witness = tmp_path / "ran"

        class Gadget:
            def __init__(self, call: Any, *args: Any) -> None:
                self.made = (call, args)

            def __reduce__(self) -> Any:
                return self.made

        for gadget in (
            Gadget(Path.touch, witness),
            Gadget(open, str(witness), "w"),
            Gadget(eval, f"open({str(witness)!r}, 'w')"),
        ):
            out = io.BytesIO()
            torch.save({"a": [gadget]}, out)
            with pytest.raises(UntrustedDataError):
                load_object(out.getvalue())
            for protocol in (2, 3, 4, 5):
                with pytest.raises(UntrustedDataError):
                    load_metadata(pickle.dumps(gadget, protocol=protocol))
            assert not witness.exists()

    def test_names_of_python_2(self) -> None:
        """A protocol 2 pickle reaches no more by the names of Python 2."""
        for old, new in (("__builtin__\neval", "builtins.eval"), ("cPickle\nloads", "pickle.loads")):
            with pytest.raises(UntrustedDataError) as caught:
                load_plain(f"\x80\x02c{old}\n.".encode("latin-1"), what="planner_data")
            assert caught.value.name == new

    def test_a_name_that_would_break_the_message(self) -> None:
        """A name with quotes, line ends and escapes is shown harmless, and a huge one is not shown at all."""
        with pytest.raises(UntrustedDataError) as caught:
            plain(text('a"]); b\n\x1b[2J') + text("c") + b"\x93")
        assert str(caught.value).endswith(r'LoadOptions(trusted_globals=["a\"]); b\n\u001b[2J.c"])')
        with pytest.raises(CorruptCheckpointError):
            plain(text("a" * 2000) + text("b") + b"\x93")
        with pytest.raises(CorruptCheckpointError):
            plain(b"c" + b"a" * 2000 + b"\nb\n")

    def test_a_name_that_is_no_string(self) -> None:
        """STACK_GLOBAL with other things than strings is damage."""
        for body in (b"NN\x93", text("os") + b"K\x01\x93", b"\x93"):
            with pytest.raises(CorruptCheckpointError):
                plain(body)

    @pytest.mark.parametrize(
        "opcode",
        [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"P1\n", b"NQ", b"(i", b"(o", b"\x97", b"\x98"],
    )
    def test_opcodes_that_reach_outside(self, opcode: bytes) -> None:
        """Extension codes, persistent ids, INST, OBJ and out-of-band buffers are damage in a plain pickle."""
        with pytest.raises(CorruptCheckpointError):
            plain(opcode)

    def test_calling_what_is_only_a_value(self) -> None:
        """What may be named as a value, and results of calls, cannot be called."""
        with pytest.raises(UntrustedDataError, match="not allowed"):
            plain(call("builtins", "list", b"K\x01"))
        with pytest.raises(UntrustedDataError, match="not allowed"):
            plain(call("builtins", "int", text("1")))
        for body in (text("x") + b")R", b"K\x01)R", call("builtins", "set") + b")R", b"))R", b"))\x81"):
            with pytest.raises(CorruptCheckpointError, match="it calls a"):
                plain(body)

    def test_arguments_that_are_no_tuple(self) -> None:
        """Arguments of a call must be a tuple, and its keywords a dict."""
        for body in (b"ccollections\nOrderedDict\n]R", b"ccollections\nOrderedDict\n)]\x92"):
            with pytest.raises(CorruptCheckpointError):
                plain(body)

    def test_keywords(self) -> None:
        """A call may not carry keywords that the class's own pickling never writes."""
        with pytest.raises(CorruptCheckpointError):
            plain(b"ccollections\ndeque\n)}" + text("bad") + b"Ns\x92")

    def test_codecs(self) -> None:
        """The codec that stands for bytes takes text and latin-1, nothing else."""
        assert plain(call("_codecs", "encode", text("é"), text("latin1"))) == b"\xe9"
        for args in ((text("x"), text("rot13")), (text("x"), text("zlib")), (b"C\x01x", text("latin1")), (text("x"),)):
            with pytest.raises(CheckpointError):
                plain(call("_codecs", "encode", *args))


INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81"


class TestState:
    def test_attributes_that_hide_methods(self) -> None:
        """State may not put attributes in front of methods, which pickle and copy would then call."""
        for name in (
            "__reduce_ex__",
            "__reduce__",
            "__class__",
            "__getstate__",
            "__deepcopy__",
            "items",
            "keys",
            "popitem",
        ):
            with pytest.raises(UntrustedDataError) as caught:
                plain(b"ccollections\nOrderedDict\n)R}" + text(name) + b"cbuiltins\nlist\nsb")
            assert caught.value.name == "collections.OrderedDict"

    def test_attributes_that_state_dicts_have(self) -> None:
        """The ``_metadata`` of a module's state dict comes back."""
        state: Any = OrderedDict(a=1)
        state._metadata = OrderedDict({"": {"version": 1}})
        out = io.BytesIO()
        torch.save(state, out)
        found = load_object(out.getvalue())
        assert found == state
        assert found._metadata == state._metadata

    @pytest.mark.parametrize("state", [b"}" + text("__hash__") + b"cbuiltins\nlist\ns", b"K\x01", b"]", b"}K\x01Ns"])
    def test_a_record_s_state(self, state: bytes) -> None:
        """A stock class takes its fields and nothing that hides a method."""
        with pytest.raises(UntrustedDataError):
            plain(b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81" + state + b"b")

    def test_state_twice(self) -> None:
        """An object's state is set once, so what was hashed or checked cannot change after."""
        state = b"}" + text("fqn") + text("a") + b"sb"
        with pytest.raises(CorruptCheckpointError, match="sets the state"):
            plain(INDEX + state + state)

    def test_state_of_what_has_none(self) -> None:
        """State for a list, a class or a set is damage."""
        for body in (b"]}b", b"cbuiltins\nlist\n}b", call("builtins", "set") + b"}b"):
            with pytest.raises(CorruptCheckpointError, match="sets the state"):
                plain(body)

    def test_an_index_of_other_things(self) -> None:
        """A MetadataIndex, which is hashed next, holds a string and a size, nothing deep."""
        named = text("fqn") + text("a")
        for state in (
            text("fqn") + b"K\x01",
            named + text("offset") + b")",
            named + text("index") + text("x"),
            b"K\x01K\x01",
        ):
            with pytest.raises(CheckpointError):
                plain(INDEX + b"}(" + state + b"ub")

    @pytest.mark.parametrize("state", [b")", b"(NNNNNt", b"}"])
    def test_tensor_properties(self, state: bytes) -> None:
        """TensorProperties take their five fields by type."""
        with pytest.raises(UntrustedDataError):
            plain(b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81" + state + b"b")

    def test_items_into_other_things(self) -> None:
        """Items go only into lists, deques, dicts and sets."""
        for body in (
            b")K\x01a",
            b")(K\x01e",
            b"N(K\x01e",
            b")K\x01Ns",
            b"](K\x01Nu",
            b"](K\x01\x90",
            b"}(K\x01\x90",
            INDEX + b"K\x01Ns",
        ):
            with pytest.raises(CorruptCheckpointError):
                plain(body)
        with pytest.raises(CorruptCheckpointError, match="a key has no value"):
            plain(b"}(K\x01u")


HUGE = struct.pack("<I", 0xFFFFFFF0)
HUGER = struct.pack("<Q", 1 << 40)


def sometimes(cases: list[bytes]) -> list[Any]:
    """The same cases, four of five of them marked slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] if k % 5 else []) for k, case in enumerate(cases)]


ASKS = [
    b"B" + HUGE,
    b"X" + HUGE,
    b"\x8b" + struct.pack("<i", 0x7FFFFFF0),
    b"\x8e" + HUGER,
    b"\x8d" + HUGER,
    b"\x96" + HUGER,
    b"\x95" + HUGER,
    b"j" + HUGE,
    b"I" + b"9" * 5000 + b"\n",
    call("builtins", "bytearray", b"J\x00\x00\x00\x40"),
    call("builtins", "bytes", b"J\x00\x00\x00\x40"),
    call("builtins", "list", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01")),
    call("builtins", "set", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01")),
    call("builtins", "frozenset", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01")),
    call("collections", "deque", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01")),
    call("torch", "Size", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01")),
    call("collections", "Counter", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01")),
    call("fractions", "Fraction", text("1e1000000000")),
    call("numpy", "ndarray", b"J\xff\xff\xff\x7f\x85"),
    call("numpy._core.multiarray", "_reconstruct", b"cnumpy\nndarray\n", b"J\xff\xff\xff\x7f\x85", b"C\x01b"),
    call("numpy._core.multiarray", "scalar", call("numpy", "dtype", text("V999999999"), b"\x89", b"\x88")),
]


@pytest.mark.slow
class TestMemory:
    # Each takes a process of its own and two seconds: every fifth always, all of them in CI.
    @pytest.mark.parametrize("ask", sometimes(ASKS), ids=lambda ask: repr(ask[:40]))
    def test_a_few_bytes_that_ask_for_gigabytes(self, ask: bytes) -> None:
        """A length, a memo index or a call that asks for gigabytes is refused before anything is taken."""

        def load() -> None:
            with pytest.raises(CheckpointError):
                plain(ask)

        load()  # so that what is imported on the way is not counted
        assert peak_of(load) < 4 * MIB

    def test_a_length_that_is_not_there(self) -> None:
        """A length beyond the end is told with what is left, and so is a frame's."""
        with pytest.raises(CorruptCheckpointError, match="asks for 4294967280 bytes where 1 are left"):
            plain(b"B" + HUGE)
        with pytest.raises(CorruptCheckpointError, match="announces 1099511627776 bytes where 1 are left"):
            plain(b"\x95" + HUGER)

    def test_a_large_memo_index_that_is_used(self) -> None:
        """A memo index may be any number: it costs what one entry costs."""
        body = b"K\x07r" + HUGE + b"0j" + HUGE
        assert plain(body) == 7
        assert peak_of(lambda: plain(body)) < MIB

    SET = text("builtins") + text("set") + b"\x93\x94"

    @pytest.mark.parametrize(
        "body",
        sometimes(
            [
                b"(" + b"\x8f" * 40_000 + b"t",
                b"(" + b"]" * 100_000 + b"t",
                b"(" + b"}K\x01Ns" * 30_000 + b"t",
                b"(" * 100_000,
                b"N" + b"\x94" * 60_000,
                b"ccollections\ndeque\n\x94(" + b"h\x00)R" * 12_000 + b"t",
                b"ctorch\nSize\n\x94(" + b"h\x00)R" * 60_000 + b"t",
                b"(" + b"G\x01\x01\x01\x01\x01\x01\x01\x01" * 200_000 + b"t",
                # One megabyte, again and again: by copies of bytes, of a list, of a dict.
                text("builtins")
                + text("bytearray")
                + b"\x93\x940B"
                + struct.pack("<I", MIB)
                + bytes(MIB)
                + b"\x85\x940("
                + b"h\x00h\x01R" * 100
                + b"t",
                SET
                + b"0]("
                + b"".join(b"M" + struct.pack("<H", n) for n in range(30_000))
                + b"e\x85\x940("
                + b"h\x00h\x01R" * 50
                + b"t",
                b"ccollections\nCounter\n\x940}("
                + b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(30_000))
                + b"u\x85\x940("
                + b"h\x00h\x01R" * 50
                + b"t",
            ]
        ),
        ids=lambda body: repr(body[:24]),
    )
    def test_many_small_things(self, body: bytes) -> None:
        """Whatever the objects are, they end at the limit, and really take no more than half as much again."""
        limit = 4 * MIB

        def load() -> None:
            with pytest.raises(UntrustedDataError, match="bytes of memory"):
                plain(body, limit=limit)

        load()
        assert peak_of(load) < 1.5 * limit + 2 * len(body)

    def test_enough_room(self) -> None:
        """The stock file needs no more than a hundred times its own size."""
        load_metadata(STOCK, limit=100 * len(STOCK))
        with pytest.raises(UntrustedDataError, match="bytes of memory"):
            load_metadata(STOCK, limit=len(STOCK))


def doubled(levels: int, last: bytes) -> bytes:
    """A tuple of itself, and again, ``levels`` times: 2 ** levels leaves in a few bytes."""
    return (
        b")\x940"
        + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x940" for n in range(levels))
        + b"h"
        + bytes([levels])
        + last
    )


class TestTime:
    @pytest.mark.parametrize(
        "body",
        [
            b"}" + doubled(26, b"Ns"),
            b"\x8f(" + doubled(26, b"\x90"),
            b"(" + doubled(26, b"\x91"),
            call("builtins", "set", b"](" + doubled(26, b"e")),
            b"ccollections\nOrderedDict\n)R" + doubled(26, b"Ns"),
        ],
        ids=["dict", "set", "frozenset", "set-call", "ordered"],
    )
    def test_a_key_of_a_billion_laughs(self, body: bytes) -> None:
        """A key whose hash would walk 2 ** 26 parts is refused at once."""
        with pytest.raises(UntrustedDataError, match="hash"):
            plain(body)

    def test_shared_values_are_free(self) -> None:
        """The same structure as a value, which nothing walks, loads."""
        assert len(plain(b"]" + doubled(60, b"a"))) == 1

    def test_a_key_that_is_a_huge_number(self) -> None:
        """A number whose hash takes long each time is no key."""
        with pytest.raises(UntrustedDataError, match="1024 bits"):
            plain(b"}\x8b" + struct.pack("<i", 100_000) + b"\x01" * 100_000 + b"Ns")

    def test_unhashable_keys(self) -> None:
        """A list or a half-made index as a key is damage."""
        for body in (b"}]Ns", b"\x8f(}\x90", b"}]\x85Ns", b"}" + INDEX + b"Ns"):
            with pytest.raises(CorruptCheckpointError):
                plain(body)


DEEP = 300_000


class TestDepth:
    def test_deep_keys(self) -> None:
        """A key of many levels, whose hash recurses in C, is refused."""
        with pytest.raises(UntrustedDataError, match="levels"):
            plain(b"})" + b"\x85" * DEEP + b"Ns")

    def test_deep_values(self) -> None:
        """Lists and tuples of any depth load and are freed; handing them on is refused."""
        assert type(plain(b")" + b"\x85" * DEEP)) is tuple
        assert type(plain(b"]" * DEEP + b"a" * (DEEP - 1))) is list

    @pytest.mark.parametrize("kind", ["deque", "defaultdict"])
    def test_chains_that_are_freed_by_recursion(self, kind: str) -> None:
        """Deques and defaultdicts in each other, which CPython frees by recursion, are bounded from both ends."""
        make = f"ccollections\n{kind}\n)R".encode()
        put = b"a" if kind == "deque" else b"s"
        key = b"" if kind == "deque" else b"K\x01"
        inner_first = (make + key) * 1000 + make + put * 1000
        few = (make + key) * 50 + make + put * 50
        assert len(plain(few)) == 1
        # Each is filled only after it sits in the one before: then no level can be counted on the way.
        outer_first = (
            make
            + b"\x940"
            + b"".join(b"j" + struct.pack("<I", n) + key + make + b"\x94" + put + b"0" for n in range(1000))
            + b"N"
        )
        for body in (inner_first, outer_first):
            with pytest.raises(UntrustedDataError, match="nested"):
                plain(body)

    def test_slices_hold_no_slices(self) -> None:
        """A slice, which CPython frees by recursion, holds plain values only."""
        inner = call("builtins", "slice", b"N", b"N", b"N")
        with pytest.raises(UntrustedDataError) as caught:
            plain(call("builtins", "slice", inner, b"N", b"N"))
        assert caught.value.name == "builtins.slice"

    def test_arrays_of_objects_hold_no_such_arrays(self) -> None:
        """An array of objects in another, which numpy frees by recursion, is refused."""
        inner = np.empty(1, dtype=object)
        outer = np.empty(1, dtype=object)
        outer[0] = inner
        with pytest.raises(UntrustedDataError) as caught:
            load_plain(pickle.dumps(outer, protocol=2), what="planner_data")
        assert caught.value.name == "numpy._core.multiarray._reconstruct"

    def test_dtypes_of_many_levels(self) -> None:
        """A dtype nested deeper than anyone does by hand is refused."""
        dtype = np.dtype([("a", "f8")])
        for _ in range(20):
            dtype = np.dtype([("a", dtype)])
        with pytest.raises(UntrustedDataError) as caught:
            load_plain(pickle.dumps(dtype), what="planner_data")
        assert caught.value.name == "numpy.dtype"


class TestNumpy:
    def test_pointers_from_bytes(self) -> None:
        """A dtype whose flags hide that it holds objects makes no array whose bytes are taken for pointers."""
        dtype = call("numpy", "dtype", text("V8"), b"\x89", b"\x88")
        fields = b"}" + text("a") + call("numpy", "dtype", text("O8"), b"\x89", b"\x88") + b"K\x00\x86s"
        state = b"(K\x03" + text("|") + b"N" + text("a") + b"\x85" + fields + b"K\x08K\x01K\x00tb"
        with pytest.raises(UntrustedDataError) as caught:
            plain(dtype + state)
        assert caught.value.name == "numpy.dtype"

    def test_flags(self) -> None:
        """The flags of a dtype, which say what its bytes are, are numpy's own and not the data's."""
        field = b"}" + text("a") + call("numpy", "dtype", text("f8"), b"\x89", b"\x88") + b"K\x00\x86s"
        state = b"(K\x03" + text("|") + b"N" + text("a") + b"\x85" + field + b"K\x08K\x01K?tb"
        found = plain(call("numpy", "dtype", text("V8"), b"\x89", b"\x88") + state)
        assert found == np.dtype([("a", "f8")])
        assert found.flags == np.dtype([("a", "f8")]).flags
        assert not found.hasobject

    @pytest.mark.parametrize("code", ["object", "i4,O", "(3,)f8", "f8;import os", "", "O", "f-8"])
    def test_codes_of_dtypes(self, code: str) -> None:
        """A dtype is named by one letter and a size, as numpy writes it."""
        with pytest.raises(UntrustedDataError):
            plain(call("numpy", "dtype", text(code), b"\x89", b"\x88"))

    def test_arrays_of_another_size(self) -> None:
        """An array's bytes must be as many as its shape and dtype need."""
        base = pickle.dumps(np.arange(4, dtype="u1"), protocol=2)
        assert b"K\x04\x85" in base
        with pytest.raises(CorruptCheckpointError, match="an array of"):
            load_plain(base.replace(b"K\x04\x85", b"K\x05\x85"), what="planner_data")
        modern = pickle.dumps(np.arange(4, dtype="u1"), protocol=5)
        assert b"K\x04\x85" in modern
        with pytest.raises(CorruptCheckpointError, match="the buffer"):
            load_plain(modern.replace(b"K\x04\x85", b"K\x05\x85"), what="planner_data")

    def test_other_kinds_of_arrays(self) -> None:
        """Children of ndarray, which may have behaviour of their own, are refused by name."""
        with pytest.raises(UntrustedDataError) as caught:
            load_plain(pickle.dumps(np.ma.masked_array([1], [True])), what="planner_data")
        assert str(caught.value.name).startswith("numpy.ma.")


def rebuild(*args: bytes, function: str = "_rebuild_tensor_v2", **records: bytes) -> Any:
    """Loads an entry that rebuilds one tensor of float32 on the storage ``s0``."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
    return load_object(
        entry(f"ctorch._utils\n{function}\n(".encode() + storage + b"".join(args) + b"tR", s0=bytes(16), **records)
    )


HOOKS = b"ccollections\nOrderedDict\n)R"
BILLION = b"J\x00\xca\x9a\x3b"


class TestTensors:
    def test_a_tensor_that_fits(self) -> None:
        """The form that the tests below spoil loads as it is."""
        assert rebuild(b"K\x00", b"K\x04\x85", b"K\x01\x85", b"\x89", HOOKS).tolist() == [0.0] * 4

    @pytest.mark.parametrize(
        "place",
        [
            (b"K\x00", BILLION + b"\x85", b"K\x01\x85"),
            (b"K\x00", b"K\x02\x85", BILLION + b"\x85"),
            (BILLION, b"K\x01\x85", b"K\x01\x85"),
            (b"K\x01", b"K\x04\x85", b"K\x01\x85"),
            (b"K\x05", b"K\x00\x85", b"K\x01\x85"),
            (b"J\xff\xff\xff\xff", b"K\x01\x85", b"K\x01\x85"),
            (b"K\x03", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
            (b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"),
            (b"K\x00", b"K\x02K\x02\x86", b"K\x01\x85"),
            (b"K\x00", b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85", b"K\x00\x85"),
            (b"K\x00", BILLION * 3 + b"\x87", b"K\x00K\x00K\x00\x87"),
        ],
    )
    def test_a_tensor_that_does_not_fit(self, place: tuple[bytes, bytes, bytes]) -> None:
        """A tensor outside of its storage is refused; torch would let the storage grow to any size."""
        with pytest.raises(CheckpointError):
            rebuild(*place, b"\x89", HOOKS)

    @pytest.mark.parametrize(
        "dress",
        [
            (b"\x89", call("collections", "OrderedDict") + b"K\x01Ns"),
            (b"\x89", b"}"),
            (b"K\x01", HOOKS),
            (b"\x89", HOOKS, b"}" + text("other") + b"\x88s"),
            (b"\x89", HOOKS, b"]"),
        ],
    )
    def test_hooks_and_properties(self, dress: tuple[bytes, ...]) -> None:
        """A tensor comes with no hooks and no properties but those torch has."""
        with pytest.raises(CheckpointError):
            rebuild(b"K\x00", b"K\x04\x85", b"K\x01\x85", *dress)

    @pytest.mark.parametrize(
        "function",
        [
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
            "_rebuild_qtensor",
            "_rebuild_parameter",
            "_rebuild_sparse_tensor",
        ],
    )
    def test_other_arguments(self, function: str) -> None:
        """A rebuilding function given anything else ends in one of our errors."""
        for args in ((), (b"N",), (b"N", b"N"), (b"N", b"N", b"N"), (b"N",) * 6, (b"N",) * 7):
            with pytest.raises(CheckpointError):
                plain(call("torch._utils", function, *args))
            with pytest.raises(CheckpointError):
                rebuild(*args, function=function)

    def test_a_quantized_tensor_that_does_not_fit(self) -> None:
        """A quantized tensor may not be larger than its storage, not even by strides of zero."""
        params = b"ctorch\nper_tensor_affine\nG\x3f\xf0\x00\x00\x00\x00\x00\x00K\x00\x87"
        with pytest.raises(UntrustedDataError, match="larger than its storage"):
            rebuild(b"K\x00", BILLION + b"\x85", b"K\x00\x85", params, b"\x89", HOOKS, function="_rebuild_qtensor")

    def test_sparse_indices_out_of_range(self) -> None:
        """The indices of a sparse tensor are checked as it is made, not left to its first use."""
        good = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([1.0]), (2,), check_invariants=True)
        out = io.BytesIO()
        torch.save(good, out)
        data = out.getvalue()
        assert load_object(data).to_dense().tolist() == [0.0, 1.0]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {f"s{n}": archive.read(f"archive/data/{n}") for n in range(2)}
            body = archive.read("archive/data.pkl")[2:-1]
        records["s0"] = struct.pack("<q", 77)
        with pytest.raises(CorruptCheckpointError):
            load_object(entry(body, **records))

    @pytest.mark.parametrize(
        "reference",
        [
            b"N",
            b")",
            text("x"),
            b"(" + text("module") + b"NNNNt",
            b"(" + text("storage") + b"N" + text("0") + text("cpu") + b"K\x04t",
            b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("../0") + text("cpu") + b"K\x04t",
            b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"J\xff\xff\xff\xfft",
            b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + BILLION + b"t",
        ],
    )
    def test_references_to_storages(self, reference: bytes) -> None:
        """A persistent id that is no reference to a storage that is there is damage."""
        with pytest.raises(CorruptCheckpointError):
            load_object(entry(reference + b"Q", s0=bytes(16)))


class TestDamage:
    def test_cut_at_every_byte(self) -> None:
        """A stock file cut anywhere is damage of ``.metadata``, never another error and never a value."""
        for size in range(len(STOCK)):
            with pytest.raises(CorruptCheckpointError) as caught:
                load_metadata(STOCK[:size], path="memory://run")
            assert (caught.value.kind, caught.value.file, caught.value.path) == ("corrupt", ".metadata", "memory://run")
            assert ".metadata" in str(caught.value)

    def test_something_after_the_end(self) -> None:
        """Bytes behind the end mark, an open mark and a second value are damage."""
        for data in (STOCK + b"x", b"\x80\x04N(.", b"\x80\x04NN."):
            with pytest.raises(CorruptCheckpointError, match="left over"):
                load_plain(data, what="planner_data")

    def test_every_byte_changed(self) -> None:
        """A stock file with any one byte changed gives Metadata or one of our errors."""
        for at in range(len(STOCK)):
            spoilt = bytearray(STOCK)
            spoilt[at] ^= 0xFF
            self.expect_metadata_or_error(bytes(spoilt))

    @staticmethod
    def outcome(load: Callable[[], object]) -> object:
        """What ``load`` returns, or the error of ours that it raises."""
        try:
            return load()
        except (CorruptCheckpointError, UntrustedDataError) as error:
            return error

    def expect_metadata_or_error(self, data: bytes) -> None:
        """Fails on any other outcome."""
        found = self.outcome(lambda: load_metadata(data, limit=64 * MIB))
        assert type(found) in (Metadata, CorruptCheckpointError, UntrustedDataError)

    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(
            st.tuples(st.integers(0, len(STOCK) - 1), st.integers(0, 8), st.binary(max_size=6)), min_size=1, max_size=6
        )
    )
    def test_spliced_at_random(self, edits: list[tuple[int, int, bytes]]) -> None:
        """A stock file with pieces cut out and put in at random gives Metadata or one of our errors."""
        data = STOCK
        for at, gone, new in edits:
            data = data[:at] + new + data[at + gone :]
        self.expect_metadata_or_error(data)

    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.binary(max_size=60))
    def test_bytes_at_random(self, body: bytes) -> None:
        """Random opcodes give one of our errors or a value."""
        found = self.outcome(lambda: plain(body, limit=64 * MIB))
        assert not isinstance(found, BaseException) or str(found)
