"""Actors on one folder, and a scheduler that lets one of them make one store request at a time.

Every actor runs the real code in a thread of its own and stops before each request (:class:`Turnstile`). Which goes
next is drawn from a seeded random generator; so are one kill and one fault of the wire at most: a reply that is lost
(the create was made, or lands later), or a request that is delivered once more later. After each request that changes
something an :class:`Oracle`, which knows only the bytes in the dict, says whether an invariant is broken.
"""

from __future__ import annotations

import json
import random
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dcp_storage.errors import CheckpointError, CommitUnknownError, CorruptCheckpointError, StoreError
from dcp_storage.store import Store
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.wrappers import Request, RequestStore
from tests.protocol.oracle import Killed, files_of, highest, stock_view

__all__ = ["Actor", "Oracle", "Outcome", "Run", "Turnstile", "ViolationError"]

T = TypeVar("T")

_CHANGES = frozenset({"put", "create", "delete"})
_PATIENCE = 20.0  # seconds that one request may take before the search itself is taken for broken


class ViolationError(Exception):
    """An invariant was seen broken."""


@dataclass
class Outcome:
    """How an actor ended.

    Attributes:
        result: what it returned.
        error: what it raised; :class:`~tests.protocol.oracle.Killed` where it was killed.
    """

    result: Any = None
    error: BaseException | None = None

    @property
    def reported(self) -> str:
        """What its caller was told: ``success``, ``failure``, ``unknown`` or (it was killed) ``nothing``."""
        if self.error is None:
            return "success"
        if isinstance(self.error, Killed):
            return "nothing"
        return "unknown" if isinstance(self.error, CommitUnknownError) else "failure"


class Actor:
    """Code that works on the folder, and what it is waiting for.

    Args:
        name: for messages, and as the token of what it commits.
        work: called with the actor's own store.
    """

    def __init__(self, name: str, work: Callable[[Store], Any]) -> None:
        self.name = name
        self.work = work
        self.outcome: Outcome | None = None
        self.waiting: Request | None = None
        self.mode = "go"
        self._go = threading.Lock()
        self._ready = threading.Lock()
        self._go.acquire()
        self._ready.acquire()
        self._thread: threading.Thread | None = None

    def start(self, store: Store) -> None:
        """Runs up to the first request."""
        self._thread = threading.Thread(target=self._run, args=(store,), daemon=True)
        self._thread.start()
        self._wait()

    def step(self, mode: str) -> None:
        """Makes the request that it waits for, in some mode, and runs up to the next one."""
        self.mode = mode
        self.waiting = None
        self._go.release()
        self._wait()

    def pause(self, request: Request) -> str:
        """Called on the actor's thread before a request: waits for its turn and says in which mode it is made."""
        if self.mode != "kill":
            self.waiting = request
            self._ready.release()
            self._go.acquire()
        if self.mode == "kill":
            raise Killed
        return self.mode

    def _run(self, store: Store) -> None:
        try:
            self.outcome = Outcome(result=self.work(store))
        except BaseException as error:  # noqa: BLE001 - the error is the outcome
            self.outcome = Outcome(error=error)
        self._ready.release()

    def _wait(self) -> None:
        if not self._ready.acquire(timeout=_PATIENCE):
            raise TimeoutError(f"{self.name} neither made a request nor ended within {_PATIENCE} s")
        if self.outcome is not None and self._thread is not None:
            self._thread.join(_PATIENCE)


class Turnstile(RequestStore):
    """An actor's own way to the shared folder.

    Args:
        inner: the folder.
        actor: who uses it.
        late: where requests are put that are to take effect later.
    """

    def __init__(self, inner: Store, actor: Actor, late: list[tuple[str, Callable[[], object]]]) -> None:
        super().__init__(inner)
        self.actor = actor
        self.late = late

    def delete(self, names: Iterable[str]) -> None:
        for name in names:  # each on its own: a store that deletes many names at once promises no order
            super().delete((name,))

    def request(self, request: Request, call: Callable[[], T]) -> T:
        if request.operation == "create_if_absent":
            return call()
        mode = self.actor.pause(request)
        if mode in ("later", "again"):
            self.late.append((f"{request.operation} {_about(request)} of {self.actor.name}", call))
        if mode != "later":
            answer = call()
            if mode != "lost":
                return answer
        raise StoreError("no reply", operation=request.operation, key=request.name, transient=True, ambiguous=True)


def _about(request: Request) -> str:
    return request.name or " ".join(request.names)


class Oracle:
    """Says from the bytes in a folder alone what must hold.

    Args:
        store: the folder.
        size: bytes of every shard.
    """

    def __init__(self, store: DictStore, size: int) -> None:
        self.store = store
        self.size = size
        self.before = files_of(store)
        self.foreign = {name: body for name, body in self.before.items() if name == "notes.txt"}
        self.seen = self._commits(self.before)
        self.live = self._live(self.before)

    def look(self) -> None:
        """After a request: commits never change, each new one is the highest, and what counts is whole.

        Raises:
            ViolationError: an invariant is broken.
        """
        files = files_of(self.store)
        if files == self.before:
            return
        self.before = files
        commits = self._commits(files)
        for name, body in self.seen.items():
            if commits.get(name) != body:
                raise ViolationError(f"{name} was {'changed' if name in commits else 'removed'}")
        new = [name for name in commits if name not in self.seen]
        if new and highest(files)[0] != highest(self.seen)[0] + 1:
            raise ViolationError(f"{new[0]} is not the next number")
        live = self._live(files)
        if not new and live != self.live:
            raise ViolationError(f"what is committed went from {self.live} to {live} without a commit")
        if any(files.get(name) != body for name, body in self.foreign.items()):
            raise ViolationError("a foreign file was touched")
        self.seen, self.live = commits, live

    def authors(self) -> set[str]:
        """The author of every commit object there is."""
        return {json.loads(body)["author"] for body in self.seen.values()}

    def at_rest(self) -> None:
        """When all have ended without a fault: the stock view says what the highest commit says.

        Raises:
            ViolationError: it does not.
        """
        number, said = highest(self.before)
        if not number or said is None:
            return
        wanted = None
        if said["state"] == "committed":
            wanted = {record["name"] for record in json.loads(self.before[said["manifest"]["name"]])["files"]}
        found = stock_view(self.before)
        if found != wanted:
            raise ViolationError(f"at rest .metadata names {found}, the highest commit {wanted}")

    def _commits(self, files: dict[str, bytes]) -> dict[str, bytes]:
        return {name: body for name, body in files.items() if re.fullmatch(r"\.commit(\.[0-9]+)?", name)}

    def _live(self, files: dict[str, bytes]) -> str | None:
        """Whose files the highest commit names; all are there, of one author, and as the manifest says."""
        _, said = highest(files)
        if said is None or said["state"] == "void":
            return None
        ref = said["manifest"]
        body = files.get(ref["name"])
        if body is None or (len(body), zlib.crc32(body)) != (ref["size"], ref["crc32"]):
            raise ViolationError(
                f"the committed {ref['name']} is {'gone' if body is None else 'not what was committed'}"
            )
        records = json.loads(body)["files"]
        authors = set()
        for record in records:
            found = files.get(record["name"])
            if found is None or len(found) != self.size or zlib.crc32(found) != record["crc32"]:
                raise ViolationError(
                    f"the committed {record['name']} is {'gone' if found is None else 'of another save'}"
                )
            authors.add(found.decode().rstrip("."))
        if len(authors) != 1 or len(records) != 2:
            raise ViolationError(f"a mixture of {sorted(authors)} is committed")
        author: str = authors.pop()
        if said.get("restates") is None and said["author"] != author:
            raise ViolationError(f"{said['author']} committed the files of {author}")
        return author


@dataclass
class Run:
    """One schedule: actors on a folder, in an order drawn from a seed.

    Attributes:
        store: the folder, as it is before.
        actors: who works on it.
        seed: of everything that is random.
        size: bytes of every shard.
        reads: names of actors that only read.
        may_vanish: whether a reader may find that nothing is committed.
    """

    store: DictStore
    actors: Sequence[Actor]
    seed: int
    size: int
    reads: frozenset[str] = frozenset({"R"})
    may_vanish: bool = True
    trace: list[str] = field(default_factory=list)
    late: list[tuple[str, Callable[[], object]]] = field(default_factory=list)

    def play(self, wrap: Callable[[Store], Store] = lambda store: store) -> None:
        """Plays the schedule to its end.

        Args:
            wrap: put around the folder for all actors.

        Raises:
            ViolationError: an invariant was broken; the message has the seed and every request.
        """
        oracle = Oracle(self.store, self.size)
        try:
            self._play(oracle, wrap(self.store))
        except ViolationError as error:
            told = "\n  ".join(self.trace)
            raise ViolationError(f"seed {self.seed}: {error}\n  {told}") from None
        finally:
            for actor in self.actors:
                while actor.waiting is not None:
                    actor.step("kill")

    def _play(self, oracle: Oracle, shared: Store) -> None:
        draw = random.Random(self.seed)
        for actor in self.actors:
            actor.start(Turnstile(shared, actor, self.late))
        kill_at = draw.randrange(4, 60) if draw.random() < 0.35 else -1
        wire = draw.random() < 0.6
        faults, steps = 0, 0
        last: Actor | None = None
        while True:
            able = [actor for actor in self.actors if actor.waiting is not None]
            if not able and not self.late:
                break
            steps += 1
            pick = draw.randrange(len(able) + len(self.late))
            if last is not None and last in able and draw.random() < 0.6:
                pick = able.index(last)  # long runs of one actor reach what short ones never do
            if pick >= len(able):
                self._land(pick - len(able))
            else:
                last = able[pick]
                request = last.waiting
                assert request is not None
                mode = "go"
                if steps == kill_at:
                    mode, faults = "kill", faults + 1
                elif wire and faults < 2 and not self.late:
                    mode = _wire(draw, request)
                    faults += mode != "go"
                    wire = mode == "go"
                self.trace.append(f"{last.name}: {request.operation} {_about(request)}" + f" ({mode})" * (mode != "go"))
                last.step(mode)
                if request.operation not in _CHANGES:
                    continue
            oracle.look()
        self._judge(oracle, faultless=faults == 0)

    def _land(self, place: int) -> None:
        name, call = self.late.pop(place)
        self.trace.append(f"late: {name}")
        try:
            call()
        except StoreError:
            self.trace.append("  (refused)")

    def _judge(self, oracle: Oracle, *, faultless: bool) -> None:
        landed = oracle.authors()
        for actor in self.actors:
            outcome = actor.outcome
            assert outcome is not None
            self.trace.append(f"{actor.name} ended: {outcome.reported} {outcome.error or ''}")
            if outcome.error is not None and not isinstance(outcome.error, (CheckpointError, Killed)):
                raise outcome.error
            if actor.name in self.reads:
                if isinstance(outcome.error, CorruptCheckpointError):
                    raise ViolationError("a reader called a checkpoint corrupt that was never damaged")
                if isinstance(outcome.error, FileNotFoundError) and not self.may_vanish:
                    raise ViolationError("a reader found nothing, though a checkpoint was there all the time")
                if outcome.reported == "success" and len(set(outcome.result)) != 1:
                    raise ViolationError(f"a reader got a mixture of {sorted(set(outcome.result))}")
                continue
            token = outcome.result if outcome.reported == "success" else actor.name
            if outcome.reported == "success" and token is not None and token not in landed:
                raise ViolationError(f"{actor.name} reported success, but its commit is not there")
            if outcome.reported == "failure" and actor.name in landed:
                raise ViolationError(f"{actor.name} reported failure, but its commit is there")
        if faultless:
            oracle.at_rest()
            savers = [a for a in self.actors if a.name not in self.reads and len(a.name) == 16]
            others = [a for a in self.actors if a.name not in self.reads and len(a.name) != 16]
            if savers and not others and all(a.outcome and a.outcome.error for a in savers):
                raise ViolationError("every one of the racing saves failed")


def _wire(draw: random.Random, request: Request) -> str:
    """Whether this request meets a fault of the wire, and which."""
    if request.operation == "create":
        chance = draw.random()
        return "lost" if chance < 0.15 else "later" if chance < 0.3 else "again" if chance < 0.4 else "go"
    if request.operation in _CHANGES and draw.random() < 0.04:
        return "again"
    return "go"
