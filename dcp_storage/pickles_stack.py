"""The half of the pickle machine that knows no globals: plain values, the stack, the memo, the containers.

Every operation first takes what it will use from a budget of memory, so that a load ends when its data asks for more
than it was given. Nothing here calls what the data names; :mod:`dcp_storage.pickles_machine` adds that, by rules.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from dcp_storage.errors import CorruptCheckpointError, UntrustedDataError

__all__ = ["LONGEST_NAME", "VALUE_OPS", "Stack"]

LONGEST_NAME: Final = 1000
"""Characters that a module and a name may have."""

_DEEPEST: Final = 100
_ATOMS: Final = frozenset({str, float, bool, bytes, complex, type(None)})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})


class Stack:
    """What a pickle in the middle of being read consists of.

    Args:
        data: the whole pickle.
        limit: bytes of memory that the objects may take, estimated from above.
        file: name of the file, for errors.
        path: the checkpoint, for errors.
        key: the state-dict key, for errors.
        base: where the pickle begins in the file, for errors.
    """

    def __init__(
        self, data: bytes, *, limit: int, file: str | None, path: str | None, key: str | None, base: int = 0
    ) -> None:
        self._data = data
        self._limit = self._room = limit
        self._file, self._path, self._about = file, path, key
        self._base = base
        self._at = 0
        self._protocol = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._trusted: dict[int, Any] = {}  # by id: objects that the user vouches for
        self._levels: dict[int, int] = {}
        self._inner: set[int] = set()
        self._visits = 4096 + 64 * len(data)

    def _corrupt(self, what: str, cause: BaseException | None = None) -> CorruptCheckpointError:
        at = self._base + self._at
        about = f" (key {self._about!r:.200})" if self._about is not None else ""
        return CorruptCheckpointError(
            f"The pickle in {self._file or 'an object entry'}{about} is damaged at byte {at}: {what}.",
            file=self._file,
            offset=at,
            path=self._path,
            key=self._about,
            cause=cause,
        )

    def _too_much(self, what: str) -> UntrustedDataError:
        name = self._file or "an object entry"
        return UntrustedDataError(
            f"The pickle in {name} is refused: {what}.", name=self._file, path=self._path, key=self._about
        )

    # Reading.

    def _take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise self._corrupt(f"it asks for {size} bytes where {len(piece)} are left")
        self._at += size
        return piece

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + LONGEST_NAME)
        if end < 0:
            raise self._corrupt("a name has no end")
        return self._take(end + 1 - self._at)[:-1].decode()

    def _proto(self) -> None:
        self._protocol = self._number(1)
        if not 2 <= self._protocol <= pickle.HIGHEST_PROTOCOL:
            raise self._corrupt(f"protocol {self._protocol} is not known here")

    def _frame(self) -> None:
        if (size := self._number(8)) > len(self._data) - self._at:
            raise self._corrupt(f"it announces {size} bytes where {len(self._data) - self._at} are left")

    # Plain values.

    def _constant(self, value: Any) -> None:
        self._stack.append(value)
        self._room -= 8

    def _value(self, value: Any, cost: int) -> None:
        self._stack.append(value)
        self._room -= cost

    def _signed(self) -> None:
        self._value(int.from_bytes(self._take(4), "little", signed=True), 40)

    def _long(self, width: int) -> None:
        raw = self._take(self._number(width))
        self._value(int.from_bytes(raw, "little", signed=True), 48 + 2 * len(raw))

    def _float(self) -> None:
        self._value(struct.unpack(">d", self._take(8))[0], 48)

    def _text(self, width: int) -> None:
        raw = self._take(self._number(width))
        # One character outside the basic plane makes every character of the string four bytes wide.
        self._value(raw.decode("utf-8", "surrogatepass"), 64 + (len(raw) if raw.isascii() else 6 * len(raw)))

    def _bytes(self, width: int) -> None:
        raw = self._take(self._number(width))
        self._value(raw, 48 + len(raw))

    def _bytearray(self) -> None:
        raw = self._take(self._number(8))
        self._value(bytearray(raw), 64 + len(raw))

    # Stack and memo.

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []
        self._room -= 96

    def _since_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]
        self._room -= 140

    def _small_number(self) -> None:
        self._stack.append(self._data[self._at])
        self._at += 1
        self._room -= 8

    def _memoize(self) -> None:
        memo = self._memo
        memo[len(memo)] = self._stack[-1]
        self._room -= 140

    def _small_get(self) -> None:
        self._stack.append(self._memo[self._data[self._at]])
        self._at += 1
        self._room -= 8

    def _large_get(self) -> None:
        at = self._at
        self._get(int.from_bytes(self._data[at : at + 4], "little"))
        self._at = at + 4

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])
        self._room -= 8

    # Containers.

    def _tuple(self, items: list[Any]) -> None:
        self._value(tuple(items), 64 + 8 * len(items))

    def _small_tuple(self, size: int) -> None:
        stack = self._stack
        if len(stack) < size:
            raise self._corrupt("a tuple lacks items")
        stack[-size:] = [tuple(stack[-size:])]
        self._room -= 64 + 8 * size

    def _frozenset(self) -> None:
        items = self._since_mark()
        self._value(frozenset(self._keys(items)), 256 + 130 * len(items))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        self._room -= 32 + 16 * len(items)
        if type(target) is deque:
            self._nest(target, items)
        elif type(target) is not list and id(target) not in self._trusted:
            raise self._corrupt(f"it appends to a {type(target).__name__}")
        for item in items:
            target.append(item)

    def _add(self) -> None:
        items = self._since_mark()
        target = self._stack[-1]
        self._room -= 130 * len(items)
        if type(target) is not set and id(target) not in self._trusted:
            raise self._corrupt(f"it adds to a {type(target).__name__}")
        for item in self._keys(items):
            target.add(item)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise self._corrupt("a key has no value")
        self._room -= 120 + 56 * len(items)
        if type(target) is defaultdict:
            self._nest(target, items)
        elif type(target) not in _MAPPINGS and id(target) not in self._trusted:
            raise self._corrupt(f"it sets items of a {type(target).__name__}")
        for at in range(0, len(items), 2):
            key = items[at]
            if type(key) is not str:
                self._keys((key,))
            target[key] = items[at + 1]

    def _keys(self, items: Iterable[Any]) -> Iterable[Any]:
        """Checks that hashing ``items`` ends soon: a hash walks shared parts again and again, and recurses in C."""
        for item in items:
            if type(item) in _ATOMS:
                continue
            pending = [(item, 1)]
            while pending:
                part, level = pending.pop()
                self._visits -= 1
                if self._visits < 0 or level > _DEEPEST:
                    raise self._too_much(f"its keys are too large to hash, or have more than {_DEEPEST} levels")
                if isinstance(part, (tuple, frozenset)):
                    pending.extend((inner, level + 1) for inner in part)
                elif type(part) is int and part.bit_length() > 1024:
                    raise self._too_much("it has a key of more than 1024 bits")
        return items

    def _nest(self, outer: Any, items: list[Any]) -> None:
        """Bounds how deep deques and defaultdicts sit directly in each other: CPython frees these by recursion in C."""
        for item in items:
            if isinstance(item, (deque, defaultdict)):
                level = max(self._levels.get(id(outer), 1), 1 + self._levels.get(id(item), 1))
                # What is already inside another may not grow: the outer one's level was counted without it.
                if level > _DEEPEST or id(outer) in self._inner:
                    raise self._too_much(f"deques or defaultdicts are nested more than {_DEEPEST} levels or in cycles")
                self._levels[id(outer)] = level
                self._inner.add(id(item))


VALUE_OPS: Final[dict[int, Callable[[Any], None]]] = {
    code[0]: operation
    for code, operation in (
        (pickle.PROTO, Stack._proto),
        (pickle.FRAME, Stack._frame),
        (pickle.NONE, lambda m: m._constant(None)),
        (pickle.NEWTRUE, lambda m: m._constant(True)),
        (pickle.NEWFALSE, lambda m: m._constant(False)),
        (pickle.BININT, Stack._signed),
        (pickle.BININT1, Stack._small_number),
        (pickle.BININT2, lambda m: m._value(m._number(2), 40)),
        (pickle.LONG1, lambda m: m._long(1)),
        (pickle.LONG4, lambda m: m._long(4)),
        (pickle.BINFLOAT, Stack._float),
        (pickle.SHORT_BINUNICODE, lambda m: m._text(1)),
        (pickle.BINUNICODE, lambda m: m._text(4)),
        (pickle.BINUNICODE8, lambda m: m._text(8)),
        (pickle.SHORT_BINBYTES, lambda m: m._bytes(1)),
        (pickle.BINBYTES, lambda m: m._bytes(4)),
        (pickle.BINBYTES8, lambda m: m._bytes(8)),
        (pickle.BYTEARRAY8, Stack._bytearray),
        (pickle.MARK, Stack._mark),
        (pickle.POP, Stack._pop),
        (pickle.POP_MARK, Stack._pop_mark),
        (pickle.MEMOIZE, Stack._memoize),
        (pickle.BINPUT, lambda m: m._put(m._number(1))),
        (pickle.LONG_BINPUT, lambda m: m._put(m._number(4))),
        (pickle.BINGET, Stack._small_get),
        (pickle.LONG_BINGET, Stack._large_get),
        (pickle.EMPTY_TUPLE, lambda m: m._constant(())),
        (pickle.EMPTY_LIST, lambda m: m._value([], 72)),
        (pickle.EMPTY_DICT, lambda m: m._value({}, 72)),
        (pickle.EMPTY_SET, lambda m: m._value(set(), 248)),
        (pickle.TUPLE, lambda m: m._tuple(m._since_mark())),
        (pickle.TUPLE1, lambda m: m._small_tuple(1)),
        (pickle.TUPLE2, lambda m: m._small_tuple(2)),
        (pickle.TUPLE3, lambda m: m._small_tuple(3)),
        (pickle.FROZENSET, Stack._frozenset),
        (pickle.APPEND, lambda m: m._append([m._stack.pop()])),
        (pickle.APPENDS, lambda m: m._append(m._since_mark())),
        (pickle.ADDITEMS, Stack._add),
        (pickle.SETITEM, lambda m: m._set_items([m._stack.pop(), m._stack.pop()][::-1])),
        (pickle.SETITEMS, lambda m: m._set_items(m._since_mark())),
    )
}
"""What each opcode does, as a function of the machine."""
