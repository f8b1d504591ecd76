"""What the conformance tests share: bytes to write, short forms of the store's calls, threads that start at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dcp_storage.errors import ObjectNotFoundError, StoreError
from dcp_storage.store import Store, Upload

__all__ = [
    "CLOCK_SECONDS",
    "FOLDERS",
    "NAMES",
    "SLOW_SECONDS",
    "at_once",
    "missing",
    "noise",
    "open_names",
    "pieces",
    "put",
    "read",
    "send",
    "sizes",
    "three_parts",
]

NAMES = (
    *("[1]", "[!a]", "a?b", "*", "a*", "a b", " a", "#1", "a#b", "%41", "a%20b", "a%2Fb", "&", "a&b=c", "a+b", "+"),
    *(".hidden", "..a", "a:b", "~", "~a", "-rf", "$HOME", "{a}", "{a,b}", "'a'", '"a"', "<a>", "a;b", "a|b", "@", "!"),
    *("grün", "日本", "\N{GRINNING FACE}", "n" * 200),
)
"""Names in which some layer below may find something special."""

FOLDERS = ("step-1", "step-1 [2]", "a b", ".hidden", "%41", "a#b", "a+b", "grün", "日本")
"""Names of folders likewise."""

CLOCK_SECONDS = 5.0
"""How far the store's clock and a time that it has just written may lie apart."""

SLOW_SECONDS = 30.0
"""The same with some dozens of requests in between."""


def noise(count: int, seed: int = 0) -> bytes:
    """``count`` bytes, the same for the same seed."""
    return random.Random(seed).randbytes(count)


def pieces(data: bytes, *lengths: int) -> list[memoryview]:
    """``data`` in pieces of these lengths and one of the rest."""
    views, offset = [], 0
    for length in (*lengths, len(data) - sum(lengths)):
        views.append(memoryview(data)[offset : offset + length])
        offset += length
    return views


def put(store: Store, name: str, data: bytes) -> None:
    """Puts ``data`` from one buffer."""
    store.put(name, pieces(data))


def read(store: Store, name: str) -> bytes:
    """The whole object, of up to 64 MiB."""
    return store.read(name, limit=1 << 26)


def sizes(store: Store) -> dict[str, int]:
    """The listing, sizes by name."""
    return {entry.name: entry.size for entry in store.entries()}


def missing(store: Store, name: str) -> bool:
    """Whether both the name itself and the listing say that there is no such object."""
    try:
        store.size(name)
    except ObjectNotFoundError:
        return name not in sizes(store)
    return False


def open_names(store: Store) -> list[str]:
    """The names of the open uploads."""
    return [entry.name for entry in store.open_uploads()]


def three_parts(store: Store, seed: int = 0) -> list[bytes]:
    """Three parts of three sizes, the last one smaller than the smallest that others may have."""
    least = max(store.min_part_size, 1000)
    return [noise(least + 13, seed), noise(least, seed + 1), noise(777, seed + 2)]


def send(upload: Upload, parts: Sequence[bytes], *numbers: int) -> None:
    """Sends the parts of these numbers, or all, one after another."""
    for number in numbers or range(1, len(parts) + 1):
        upload.write_part(number, sum(map(len, parts[: number - 1])), pieces(parts[number - 1], 5, 0))


def at_once(calls: Sequence[Callable[[], object]]) -> list[object]:
    """Makes all calls at the same moment; what each returned, or the StoreError that it raised."""
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[], object]) -> object:
        gate.wait(30)
        try:
            return call()
        except StoreError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))
