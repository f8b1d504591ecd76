"""A pickle machine that runs only what a list allows and takes no more memory than it was given (invariant I9).

:class:`Machine` reads the opcodes of a pickle one after the other and does itself what each asks for. It knows no
global: for each one a :class:`Rule` is looked up, and where there is none the load ends. A rule's token is what the
pickle gets to hold; its ``call`` and ``build`` decide what may be made of it. So importing, attribute look-ups and
calls happen only where a rule does them, never because the data says so.

Only what picklers of protocol 2 to 5 write is understood. ``docs/design/004-nothing-trusted.md`` says why there is a
machine of our own at all, and how its bound on memory works.
"""

from __future__ import annotations

import json
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dcp_storage.errors import CheckpointError, UntrustedDataError
from dcp_storage.pickles_stack import LONGEST_NAME, VALUE_OPS, Stack

__all__ = ["Machine", "NotAllowedError", "Rule", "refused_global"]


_TUPLE: Final = 16
_PER_ITEM: Final[dict[type, int]] = {
    str: 4,
    bytes: 4,
    bytearray: 4,
    tuple: _TUPLE,
    **dict.fromkeys((list, dict, set, frozenset, deque, OrderedDict, defaultdict, Counter), 130),
}  # bytes that a copy takes per item


class NotAllowedError(ValueError):
    """A rule was given arguments or a state that the class's own pickling never writes."""


@dataclass(frozen=True)
class Rule:
    """What may be done with one global.

    Attributes:
        token: what the pickle gets on its stack: the class or value itself, or for a function the checked stand-in.
        call: makes the object from the arguments of REDUCE (and of NEWOBJ, where ``new`` is None); None: not callable.
        new: makes the object from the arguments and keywords of NEWOBJ.
        build: takes the object and the state of BUILD, once per object; None: the object has no state.
        cost: bytes of memory that one object takes at most, its parts not counted.
        hashes: the items of the first argument get hashed.
        trusted: the user vouches for it, so its objects may also take items as lists, sets and dicts do.
    """

    token: Any
    call: Callable[..., Any] | None = None
    new: Callable[..., Any] | None = None
    build: Callable[[Any, Any], None] | None = None
    cost: int = 512
    hashes: bool = False
    trusted: bool = False


def refused_global(name: str, why: str, **where: Any) -> UntrustedDataError:
    """The error for a global that was refused; its message ends with the line that would allow it."""
    return UntrustedDataError(
        f"The checkpoint asks for {json.dumps(name)}, {why}. If you trust whoever wrote it, allow it with "
        f"LoadOptions(trusted_globals=[{json.dumps(name)}])",
        name=name,
        **where,
    )


class Machine(Stack):
    """One run over one pickle.

    Args:
        data: the whole pickle; bytes after its end are an error.
        find: the rule for a global's dotted name, None where it is not allowed.
        limit: bytes of memory that the objects may take, estimated from above.
        file: name of the file, for errors.
        path: the checkpoint, for errors.
        key: the state-dict key, for errors.
        base: where the pickle begins in the file, for errors.
        persistent: what a persistent id stands for; None: there are none.
    """

    def __init__(
        self,
        data: bytes,
        find: Callable[[str], Rule | None],
        *,
        limit: int,
        file: str | None = None,
        path: str | None = None,
        key: str | None = None,
        base: int = 0,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(data, limit=limit, file=file, path=path, key=key, base=base)
        self._find = find
        self._persistent = persistent
        self._names: dict[str, Rule] = {}
        self._rules: dict[int, tuple[str, Rule]] = {}  # by id of the token, which the rule keeps alive
        self._unbuilt: dict[int, tuple[Any, str, Callable[[Any, Any], None]]] = {}

    def run(self) -> Any:
        """The object of the pickle.

        Raises:
            UntrustedDataError: it asks for a global that is not allowed, or for too much memory.
            CorruptCheckpointError: anything else is wrong with it.
        """
        try:
            return self._run()
        except CheckpointError:
            raise
        except Exception as error:  # constructors run here, trusted ones too: whatever they raise, the data is bad
            said = " ".join(f"{type(error).__name__}: {error}"[:300].split())  # torch's have several lines
            raise self._corrupt(said, error) from error

    def _run(self) -> Any:
        data, end, ops = self._data, len(self._data), _OPS
        if data[:1] != pickle.PROTO:
            raise self._corrupt("it does not begin like a pickle of protocol 2 or later")
        while True:
            if self._at >= end:
                raise self._corrupt("it ends before its end mark")
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            operation = ops.get(code)
            if operation is None:
                raise self._corrupt(f"opcode 0x{code:02x} is none that a checkpoint holds")
            operation(self)
            if self._room < 0:
                raise self._out_of_room()
        if self._at != end or self._marks or len(self._stack) != 1:
            raise self._corrupt("it has something left over at its end mark")
        return self._stack.pop()

    def _out_of_room(self) -> UntrustedDataError:
        return self._too_much(f"its objects take more than {self._limit} bytes of memory")

    def _refused(self, name: str, why: str) -> UntrustedDataError:
        return refused_global(name, why, path=self._path, key=self._about)

    def _global(self) -> None:
        module = self._line()
        self._push_global(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str or len(name) + len(module) > LONGEST_NAME:
            raise self._corrupt("the name of a global is not a name")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        if self._protocol < 3:  # such pickles use the names of Python 2, also when Python 3 writes them
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[module, name]
            else:
                module = IMPORT_MAPPING.get(module, module)
        dotted = f"{module}.{name}"
        rule = self._names.get(dotted)
        if rule is None:
            rule = self._find(dotted)
            if rule is None:
                raise self._refused(dotted, "which is not on the list of what may be rebuilt")
            self._names[dotted] = rule
            self._rules[id(rule.token)] = dotted, rule
        self._constant(rule.token)

    def _reduce(self) -> None:
        args, token = self._stack.pop(), self._stack.pop()
        self._make(token, args, {}, new=False)

    def _new_object(self) -> None:
        args, token = self._stack.pop(), self._stack.pop()
        self._make(token, args, {}, new=True)

    def _new_object_with_keywords(self) -> None:
        keywords, args, token = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._make(token, args, keywords, new=True)

    def _make(self, token: Any, args: Any, keywords: Any, *, new: bool) -> None:
        name, rule = self._rules.get(id(token), ("", None))
        if rule is None or type(args) is not tuple or type(keywords) is not dict:
            raise self._corrupt(f"it calls a {type(token).__name__}")
        make = rule.new if new and rule.new is not None else rule.call
        if make is None:
            raise self._refused(name, "and calls it, which is not allowed")
        if rule.hashes and args and type(args[0]) in (list, tuple):
            self._keys(args[0])
        self._weigh(args, rule.cost)
        try:
            made = make(*args, **keywords)
        except NotAllowedError as error:
            raise self._refused(name, f"with what its own pickling never writes ({error})") from error
        self._stack.append(made)
        if rule.build is not None:
            self._unbuilt[id(made)] = made, name, rule.build
        if rule.trusted:
            self._trusted[id(made)] = made

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        # Once per object: nothing that was hashed, checked or shared since may change under its holders.
        made, name, build = self._unbuilt.pop(id(target), (None, "", None))
        if build is None or made is not target:
            raise self._corrupt(f"it sets the state of a {type(target).__name__}")
        self._weigh((state,), 0)
        try:
            build(target, state)
        except NotAllowedError as error:
            raise self._refused(name, f"with a state that its own pickling never writes ({error})") from error

    def _weigh(self, args: tuple[Any, ...], cost: int) -> None:
        """Takes what a call may need, before it: its result may hold a copy of each argument, again on every call."""
        for part in args:
            unit = _PER_ITEM.get(type(part))
            if unit is not None:
                cost += unit * len(part)
                if unit == _TUPLE:
                    for inner in part:
                        unit = _PER_ITEM.get(type(inner))
                        if unit is not None:
                            cost += unit * len(inner)
        self._room -= cost
        if self._room < 0:
            raise self._out_of_room()

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise self._corrupt("it refers to something outside of itself")
        self._value(self._persistent(self._stack.pop()), 512)


_STOP: Final = pickle.STOP[0]
_OPS: Final[dict[int, Callable[[Any], None]]] = {
    **VALUE_OPS,
    pickle.GLOBAL[0]: Machine._global,
    pickle.STACK_GLOBAL[0]: Machine._stack_global,
    pickle.REDUCE[0]: Machine._reduce,
    pickle.NEWOBJ[0]: Machine._new_object,
    pickle.NEWOBJ_EX[0]: Machine._new_object_with_keywords,
    pickle.BUILD[0]: Machine._build,
    pickle.BINPERSID[0]: Machine._persistent_id,
}
