"""The questions that ``doctor`` asks, each a function of one :class:`Bench`."""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from dcp_storage.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooShortError, StoreError
from dcp_storage.names import CLAIM, new_token
from dcp_storage.store import Atomicity, Store
from dcp_storage.stores.probing import refuses_second_multipart
from dcp_storage.tools.crew import Crew

__all__ = ["CHECKS", "Answer", "Bench", "Failed"]

_BODY = bytes(range(256)) * 16
_RACERS, _ROUNDS = 8, 5
_SAMPLES = 5
_LARGE = 8 << 20
_SKEW = 60.0  # seconds between two clocks that are worth a word


@dataclass(frozen=True)
class Answer:
    """One question and its answer.

    Attributes:
        question: which one; a stable string.
        ok: True: as checkpoints need it. False: a promise of this package does not hold here. None: not as it could
            be, or not to be found out, but nothing depends on it.
        found: what the store did.
        means: what that means for checkpoints.
    """

    question: str
    ok: bool | None
    found: str
    means: str


class Failed(Exception):  # noqa: N818 - never leaves doctor
    """The store did not do what it must.

    Attributes:
        means: what follows for checkpoints.
    """

    def __init__(self, found: str, means: str) -> None:
        super().__init__(found)
        self.means = means


@dataclass
class Bench:
    """A place to try a store on: scratch names, all of them removed at the end.

    Attributes:
        store: the folder.
        names: every name that was used.
        create_if_absent: what the store says of itself.
        latency: median seconds of small requests.
        throughput: bytes per second.
    """

    store: Store
    names: list[str] = field(default_factory=list)
    create_if_absent: str = ""
    latency: dict[str, float] = field(default_factory=dict)
    throughput: dict[str, float] = field(default_factory=dict)

    def name(self) -> str:
        """A fresh scratch name; saves respect it, and prune would remove it."""
        self.names.append(f"{CLAIM}.{new_token()}")
        return self.names[-1]

    def wrote(self, data: bytes = _BODY) -> str:
        """The name of a new object."""
        name = self.name()
        self.store.put(name, [memoryview(data)], crc32=zlib.crc32(data))
        return name

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._clean()
        except KeyboardInterrupt:  # pressed once more: what lies on the store goes all the same
            self._clean()
            raise
        except StoreError:
            if error is None:
                raise
            return  # what went wrong first is the one to see: a store that cannot be written to, say
        if isinstance(error, KeyboardInterrupt):
            self._clean()  # a request that was let go of may have arrived behind the first delete

    def _clean(self) -> None:
        self.store.delete(self.names)
        left = (self.open_uploads() or set()) & set(self.names)
        if left:
            self.store.abort_uploads(sorted(left))

    def open_uploads(self) -> set[str] | None:
        """Names of open uploads; None where the store does not tell them."""
        try:
            return {e.name for e in self.store.open_uploads()}
        except StoreError:
            return None


def _write(bench: Bench) -> Answer:
    name = bench.wrote()
    back = bench.store.read(name, limit=len(_BODY))
    size = bench.store.size(name)
    if back != _BODY or size != len(_BODY):
        raise Failed(f"{len(_BODY)} bytes were written; {size} are reported, {len(back)} came back", _LOST)
    return Answer("write", True, "what is written comes back, with its size", "Files and commits can be kept here.")


_LOST = "What is saved here may not be what is loaded: do not use this store."


def _list(bench: Bench) -> Answer:
    name = bench.wrote()
    _listed(bench, name, len(_BODY))
    bench.store.put(name, [memoryview(_BODY[:100])], crc32=zlib.crc32(_BODY[:100]))
    _listed(bench, name, 100)
    bench.store.delete([name])
    _listed(bench, name, None)
    return Answer(
        "list", True, "a listing shows what was just written, replaced and deleted", "Commits are found at once."
    )


def _listed(bench: Bench, name: str, wanted: int | None) -> None:
    found = next((e.size for e in bench.store.entries() if e.name == name), None)
    if found != wanted:
        did = "deleted" if wanted is None else f"written with {wanted} bytes"
        raise Failed(
            f"an object that was just {did} is listed {'not at all' if found is None else f'with {found} bytes'}",
            "Loads may find an old checkpoint or none, and saves may replace what they should not: listings of this "
            "store lag behind.",
        )


def _delete(bench: Bench) -> Answer:
    name = bench.wrote()
    bench.store.delete([name, bench.name()])  # the second was never there
    try:
        bench.store.read(name, limit=len(_BODY))
    except ObjectNotFoundError:
        return Answer("delete", True, "what is deleted is gone; deleting nothing is no error", "prune works here.")
    raise Failed("an object that was just deleted can be read", "Deleted checkpoints may come back.")


def _range(bench: Bench) -> Answer:
    name = bench.wrote()
    buffer = bytearray(1000)
    bench.store.read_into(name, 300, [memoryview(buffer)])
    if bytes(buffer) != _BODY[300:1300]:
        raise Failed("bytes 300 to 1300 were asked for, others came", "Tensors would be filled with wrong bytes.")
    try:
        bench.store.read_into(name, len(_BODY) - 10, [memoryview(bytearray(20))])
    except ObjectTooShortError:
        return Answer("range", True, "ranges of bytes come right, and end where the object ends", "Parts can be read.")
    raise Failed("bytes beyond an object's end came", "A file that was cut short would not be noticed by its length.")


_NO_RACE = (
    "Two jobs that save to one folder could both believe that they committed. Saves warn and say single_writer in the "
    "commit; overwrite and prune need assume_single_writer=True, your word that one job writes at a time."
)


def _create(bench: Bench) -> Answer:
    said = bench.store.create_if_absent
    bench.create_if_absent = said.value
    worst = max(_race(bench) for _ in range(_ROUNDS))
    if said is not Atomicity.ATOMIC:
        seen = f"of {_RACERS} creates of one name at once, up to {worst} succeeded"
        why = "it replaces what is there" if said is Atomicity.NONE else "it has no such request, or nobody knows"
        raise Failed(f"a second create is not refused by the store itself ({why}); {seen}", _NO_RACE)
    if worst != 1:
        raise Failed(
            f"of {_RACERS} creates of one name at once, {worst} succeeded, although single ones are refused",
            "Checkpoints are not safe here when two jobs save to one folder: the store promises what it does not keep.",
        )
    return Answer(
        "create",
        True,
        f"of {_RACERS} creates of one name at once, one succeeded, {_ROUNDS} times",
        "A commit is won by exactly one job, whoever else saves to the same folder.",
    )


def _race(bench: Bench) -> int:
    """How many of some creates of one name at once say that they made it."""
    name = bench.name()
    start = threading.Barrier(_RACERS)
    won = [False] * _RACERS

    def one(number: int) -> None:
        start.wait(timeout=60)
        try:
            bench.store.create(name, _BODY + bytes([number]))
        except ObjectExistsError:
            return
        except StoreError as error:
            if error.ambiguous or error.transient:
                return  # a conflict that the server could not settle: it did not say yes
            raise
        won[number] = True

    with Crew(_RACERS, _RACERS) as crew:  # which ends only when all have ended, also after an interrupt
        try:
            for number in range(_RACERS):
                crew.do(1, functools.partial(one, number))
        except BaseException:
            start.abort()  # those that wait for the rest
            raise
    body = bench.store.read(name, limit=len(_BODY) + 1) if any(won) else b""
    if any(won) and not won[body[-1]]:
        return max(2, sum(won))  # one that was told no has its bytes there
    return sum(won)


def _create_in_parts(bench: Bench) -> Answer:
    found = refuses_second_multipart(bench.store, bench.wrote())
    means = "Nothing depends on it: files of parts have names that no other save uses."
    if found is None:
        return Answer("create-in-parts", None, "the store has no such request", means)
    if found:
        return Answer("create-in-parts", True, "a second object of parts is refused where the name is taken", means)
    return Answer("create-in-parts", None, "an object of parts replaces one that is there, although told not to", means)


def _abort(bench: Bench) -> Answer:
    kept = "Failed saves leave parts that cost money and that no listing shows: set a lifecycle rule that ends them."
    listed = False
    for by_name in (False, True):
        name = bench.name()
        upload = bench.store.upload(name)
        known = bench.open_uploads() is not None
        try:
            upload.write_part(1, 0, [memoryview(_BODY)], crc32=zlib.crc32(_BODY))
            listed = listed or name in (bench.open_uploads() or ())
            if bench.store.remote and any(e.name == name for e in bench.store.entries()):
                raise Failed("an upload shows before it is complete", "Loads may see files that are not whole.")
            if by_name and known:
                bench.store.abort_uploads([name])
        finally:
            upload.abort()
        if name in (bench.open_uploads() or ()):
            raise Failed("an upload that was aborted is still open", kept)
        if any(e.name == name for e in bench.store.entries()):
            raise Failed("an upload that was aborted left an object", kept)
    if not known:
        return Answer(
            "abort",
            None,
            "uploads are aborted, but the store does not tell which are open",
            f"prune cannot find those of killed saves. {kept}",
        )
    shown = "and listed while open" if listed else "open ones are not listed, or need no abort here"
    return Answer(
        "abort", True, f"uploads are aborted, {shown}", "Failed saves leave nothing, and prune finds the rest."
    )


def _checksum(bench: Bench) -> Answer:
    name = bench.name()
    wrong = zlib.crc32(_BODY) ^ 1
    taken = []
    try:
        bench.store.put(name, [memoryview(_BODY)], crc32=wrong)
        taken.append("whole objects")
    except StoreError:
        bench.store.delete([name])
    upload = bench.store.upload(bench.name())
    try:
        upload.write_part(1, 0, [memoryview(_BODY)], crc32=wrong)
        upload.complete()
        taken.append("parts")
    except StoreError:
        pass  # refused, as it should be; the upload is aborted below
    finally:
        with contextlib.suppress(StoreError):  # whether uploads can be aborted is another question
            upload.abort()
    if not taken:
        return Answer(
            "checksum", True, "bytes with a wrong CRC-32 are refused", "What is altered on the way is sent again."
        )
    return Answer(
        "checksum",
        None,
        f"{' and '.join(taken)} with a wrong CRC-32 were taken",
        "What is altered on the way to the store is only found by loading, or by verify with depth data, which hold "
        "every byte against the CRC-32 in the manifest. (GCS and TLS check by sums of their own.)",
    )


def _clock(bench: Bench) -> Answer:
    name = bench.wrote()
    modified = next((e.modified for e in bench.store.entries() if e.name == name), None)
    now = bench.store.now()
    if modified is None:
        return Answer("clock", None, "the store does not say when objects were written", "prune keeps all leftovers.")
    if abs(now - modified) > _SKEW:
        raise Failed(
            f"what was just written is {now - modified:.0f} s old by the store's own clock",
            "prune could take files of a save under way for old ones: do not prune here.",
        )
    skew = now - time.time()
    return Answer(
        "clock", True, f"the store's clock is {skew:+.1f} s from this machine's", "prune goes by the store's clock."
    )


def _speed(bench: Bench) -> Answer:
    small = bench.wrote()
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: bench.store.put(small, [memoryview(_BODY)]),
        "read": lambda: bench.store.read(small, limit=len(_BODY)),
        "list": bench.store.entries,
    }
    for kind, call in calls.items():
        bench.latency[kind] = statistics.median(_seconds(call) for _ in range(_SAMPLES))
    large = memoryview(bytearray(_BODY * (_LARGE // len(_BODY))))
    name = bench.name()
    crc = zlib.crc32(large)
    bench.throughput["write"] = _LARGE / _seconds(lambda: bench.store.put(name, [large], crc32=crc))
    bench.throughput["read"] = _LARGE / _seconds(lambda: bench.store.read_into(name, 0, [large]))
    said = ", ".join(f"{kind} {seconds * 1000:.1f} ms" for kind, seconds in bench.latency.items())
    rate = ", ".join(f"{kind} {speed / 1e6:.0f} MB/s" for kind, speed in bench.throughput.items())
    return Answer(
        "speed",
        True,
        f"{said}; one request of 8 MiB at a time: {rate}",
        "A save or load keeps max_concurrency of them in flight; bench finds how many pay here.",
    )


def _seconds(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return max(time.monotonic() - begun, 1e-9)


CHECKS: tuple[tuple[str, Callable[[Bench], Answer]], ...] = (
    ("write", _write),
    ("list", _list),
    ("delete", _delete),
    ("range", _range),
    ("create", _create),
    ("create-in-parts", _create_in_parts),
    ("abort", _abort),
    ("checksum", _checksum),
    ("clock", _clock),
    ("speed", _speed),
)
"""Every question by its name, in the order in which they are asked."""
