"""The machine: hypothesis chooses who works on the folder, who goes on, and what befalls whom; the model looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from dcp_storage.store import Store
from dcp_storage.testing.faults import HEALTHY, NamedFault
from tests.machine import works
from tests.machine.beds import Bed
from tests.machine.judge import judge
from tests.machine.members import WRITES, Gate, Late, Member, about, operation_of
from tests.machine.model import Doer, Model, ViolationError, number_of
from tests.machine.places import FOREIGN, MISHAPS, PLACES, SAVING, is_at
from tests.machine.tally import Tally

__all__ = ["Machine", "machine_on"]

GRACE = 7 * 86400.0
END = 200  # more requests than any member makes
STOCK = 900_000  # authors of what stock torch has saved
MOST = 4  # members at once
CHANGES = WRITES | {"upload", "write_part", "complete", "abort", "abort_uploads"}

RUN = st.one_of(st.integers(0, 14), st.integers(0, 14), st.integers(0, 14), st.just(END))
WHO = st.integers(0, MOST - 1)
HOW = st.sampled_from(["plain", "later", "by_ranks"])


class Machine(RuleBasedStateMachine):
    """One run: a new folder, the members at work on it, requests that are still on their way, and the model."""

    make_bed: ClassVar[Callable[[], Bed]]
    fault: ClassVar[NamedFault] = HEALTHY
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.bed = type(self).make_bed()
        self.model = Model()
        self.members: list[Member] = []
        self.late: list[Late] = []
        self.trace: list[str] = []
        self.writers = works.Writers(self.fault)
        self.authors = 0
        self.chosen = 0
        self.passed = 0.0
        self.broken = False
        self.tally.runs += 1
        for name, body in FOREIGN.items():
            self.bed.put(name, body)
        self.model.age(self.bed.snapshot())

    # -- who begins --------------------------------------------------------------------------------------------------

    def room(self) -> bool:
        return len(self.members) < MOST

    @precondition(room)
    @rule(how=HOW, overwrite=st.sampled_from([True, True, False]), run=RUN)
    def save(self, how: str, overwrite: bool, run: int) -> None:
        self.authors += 1
        author, method = self.authors, getattr(self.writers, how)
        doer = Doer(f"save {author} ({how}{', overwrite' * overwrite})", "save", author, overwrite)
        self._begin(doer, lambda store: method(store, author, overwrite), run)

    @precondition(room)
    @rule(stock=st.booleans(), run=RUN)
    def load(self, stock: bool, run: int) -> None:
        into = works.template()
        doer = Doer(f"load {self.chosen}", "load")
        self._begin(doer, lambda store: works.load(store, self.fault, not stock, into), run, into, stock)

    @precondition(lambda self: self.room() and (self.model.now.state == "live" or self.chosen % 8 == 0))
    @rule(how=st.sampled_from(["bare", "bare", "retire", "forced"]), run=RUN)
    def delete(self, how: str, run: int) -> None:
        doer = Doer(f"delete {self.chosen} ({how})", "delete")
        self._begin(doer, lambda store: works.delete(store, self.fault, how, GRACE), run)

    @precondition(room)
    @rule(grace=st.sampled_from([0.0, GRACE]), whole=st.booleans(), run=RUN)
    def prune(self, grace: float, whole: bool, run: int) -> None:
        alone = whole and not (self.members or self.late)
        grace = grace or self.bed.none
        doer = Doer(f"prune {self.chosen} (grace {grace:.0f}{', alone' * alone})", "prune", grace=grace)
        self._begin(doer, lambda store: works.prune(store, self.fault, grace, alone), END if alone else run)

    @precondition(
        lambda self: self.room() and self.bed.exact and (self.model.now.state == "void" or self.chosen % 8 == 0)
    )
    @rule(run=RUN)
    def finish_delete(self, run: int) -> None:
        doer = Doer(f"finish {self.chosen}", "prune")
        self._begin(doer, lambda store: works.delete(store, self.fault, "finish", GRACE), run)

    @precondition(lambda self: self.room() and (self.model.now.state == "stock" or self.chosen % 8 == 0))
    @rule(run=RUN)
    def adopt(self, run: int) -> None:
        doer = Doer(f"adopt {self.chosen}", "adopt")
        self._begin(doer, lambda store: works.adopt(store, self.fault), run)

    # -- who goes on, and what befalls whom --------------------------------------------------------------------------

    def busy(self) -> bool:
        return bool(self.members)

    @precondition(busy)
    @rule(who=WHO, run=RUN)
    def go_on(self, who: int, run: int) -> None:
        self._note(f"go_on {who} {run}")
        self._run(self._chosen(who), run)

    @precondition(busy)
    @rule(who=WHO, place=st.sampled_from(["commit", *sorted(PLACES)]), past=st.integers(0, 1))
    def stop_at(self, who: int, place: str, past: int) -> None:
        """Before a request, or right behind it."""
        self._note(f"stop_at {who} {place} {past}")
        member = self._chosen(who)
        if self._to(member, place):
            self._run(member, past)

    @precondition(busy)
    @rule(who=WHO, place=st.sampled_from(sorted(PLACES)), run=st.integers(0, 2), sent=st.booleans())
    def kill(self, who: int, place: str, run: int, sent: bool) -> None:
        """Before a request or behind it; or when it is sent, and then it takes effect later all the same."""
        self._note(f"kill {who} {place} {run} {sent}")
        member = self._chosen(who)
        self._to(member, place)
        self._run(member, run)
        if sent and self.bed.loses and operation_of(member) in WRITES:
            self._step(member, "later")
        if member.waiting is not None:
            self._step(member, "kill")

    @precondition(lambda self: self.busy() and self.bed.loses)
    @rule(
        who=WHO,
        place=st.sampled_from([*SAVING, "removal"]),
        mode=st.sampled_from(["lost", "later", "again"]),
        run=RUN,
    )
    def lose(self, who: int, place: str, mode: str, run: int) -> None:
        self._befall(who, place, mode, run)

    @precondition(busy)
    @rule(who=WHO, place=st.sampled_from([*sorted(PLACES), "listing"]), run=RUN)
    def refuse(self, who: int, place: str, run: int) -> None:
        self._befall(who, place, "refuse", run)

    @precondition(lambda self: self.busy() and self.bed.loses)
    @rule(who=WHO, run=RUN)
    def write_elsewhere(self, who: int, run: int) -> None:
        self._befall(who, "file", "nowhere", run)

    @precondition(room)
    @rule(how=HOW, mishap=st.sampled_from(MISHAPS), place=st.sampled_from(SAVING), run=RUN)
    def unlucky_save(self, how: str, mishap: str, place: str, run: int) -> None:
        """A save that may replace, and meets something on its way."""
        self.save(how, True, 0)
        if self.members and (self.bed.loses or mishap in {"refuse", "kill"}):
            self._befall(len(self.members) - 1, "file" if mishap == "nowhere" else place, mishap, run)

    @precondition(lambda self: self.room() and self.model.now.state in {"live", "stock"})
    @rule(kind=st.sampled_from(["load", "delete", "save", "adopt"]), run=RUN)
    def outage(self, kind: str, run: int) -> None:
        """Somebody who cannot list a folder in which a checkpoint is."""
        if kind == "load":
            self.load(self.model.now.state == "stock", 0)
        elif kind == "delete":
            self.delete("bare", 0)
        elif kind == "save":
            self.save("plain", False, 0)
        else:
            self.adopt(0)
        if self.members:
            self._befall(len(self.members) - 1, "listing", "refuse", run)

    @precondition(room)
    @rule(past=st.integers(0, 2), run=RUN, leftovers=st.booleans())
    def slow_prune(self, past: int, run: int, leftovers: bool) -> None:
        """A prune that takes everything that nothing names stands still around its fence, and somebody saves."""
        if leftovers:  # else it may well find nothing to take, and makes no fence
            self.unlucky_save("plain", "kill", "commit", 0)
        self.prune(0.0, False, 0)
        if self.members and self._to(self.members[-1], "commit"):
            self._run(self.members[-1], past)
            if self.room():
                self.save("plain", True, run)

    @precondition(lambda self: bool(self.late))
    @rule(which=st.integers(0, 9))
    def land(self, which: int) -> None:
        self._note(f"land {which}")
        self._land(self.late.pop(which % len(self.late)))

    # -- what comes from outside -------------------------------------------------------------------------------------

    @precondition(lambda self: self.bed.ages)
    @rule(share=st.sampled_from([0.3, 1.2]))
    def wait(self, share: float) -> None:
        """Time passes; whoever began longer ago than the grace is no longer to be believed."""
        self._note(f"wait {share} of the grace")
        self.bed.age(share * GRACE)
        self.passed += share * GRACE
        self.model.age(self.bed.snapshot())
        for member in list(self.members):
            if self.passed - member.began >= GRACE * 0.99:
                self._step(member, "kill")
        self.late[:] = [each for each in self.late if self.passed - each.member.began < GRACE * 0.99]

    def bare(self) -> bool:
        return not self.members and not self.late and len(self.model.files) == len(FOREIGN)

    @precondition(bare)
    @rule(author=st.integers(STOCK, STOCK + 1))
    def stock(self, author: int) -> None:
        """Stock torch saves, where nobody is at work and nothing of ours lies."""
        self._note(f"stock torch saves as {author}")
        for name, body in works.stock_files(author).items():
            self.bed.put(name, body)
        self.model.put_stock(self.bed.snapshot(), author)

    @precondition(lambda self: self.model.now.state == "live" and not self.model.now.damaged)
    @rule(how=st.sampled_from(["flip", "cut", "gone"]), which=st.integers(0, 3), look=st.booleans())
    def damage(self, how: str, which: int, look: bool) -> None:
        """A shard of what is committed is damaged, and perhaps somebody loads it."""
        shards = sorted(name for name in self.model.held if name.startswith("__"))
        name = shards[which % len(shards)]
        self._note(f"damage: {how} {name}")
        self.late[:] = [each for each in self.late if name not in each.says.split()]  # those would mend it
        body = self.model.held[name]
        if how == "gone":
            self.bed.remove(name)
        elif how == "cut" or (self.model.now.author or 0) >= STOCK:  # who adopts promises sizes only
            how = "cut"
            self.bed.put(name, body[:-7])
        else:
            self.bed.put(name, works.flipped(body, self.model.now.author or 0))
        self.model.damage(self.bed.snapshot(), name, how)
        if look and self.room():
            self.load(False, END)

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if not self.broken:
                self._settle()
        finally:
            for member in self.members:
                if member.waiting is not None:
                    member.step("kill")
            self.bed.close()
            if self.broken:
                note("\n".join(["the last requests:", *self.trace[-80:]]))

    def _settle(self) -> None:
        """All end, what is late arrives; then load, prune, load, save, load, prune: nothing is lost, nothing left."""
        while self.members:
            self._run(self.members[0], END)
        while self.late:
            self._land(self.late.pop(0))
        self._probe()
        self._whole_prune()
        self._probe()
        self.save("plain", True, END)
        if (self.model.now.state, self.model.now.author) != ("live", self.authors):
            self._fail("I3", "at rest a save that may overwrite did not commit")
        self._probe()
        self._whole_prune()
        if self.model.files.keys() - {".metadata", ".commit"} != {*FOREIGN, *self.model.held, *self._numbers()}:
            self._fail("I4", f"at rest a save and a prune leave {sorted(self.model.files)}")

    def _numbers(self) -> set[str]:
        return {name for name in self.model.files if number_of(name)} - {".commit"}

    def _probe(self) -> None:
        """A load, alone, which the judge holds against the model."""
        self.load(self.model.now.state == "stock", END)

    def _whole_prune(self) -> None:
        self.prune(0.0, True, END)
        left = {n for n in self.model.files if not number_of(n)} - {*FOREIGN, ".metadata", *self.model.held}
        if left and not self.model.now.damaged and self.model.now.state != "stock":
            self._fail("I4", f"at rest a prune leaves {sorted(left)}")

    # -- small things ------------------------------------------------------------------------------------------------

    def _begin(
        self,
        doer: Doer,
        work: Callable[[Store], Any],
        run: int,
        into: dict[str, Any] | None = None,
        stock: bool = False,
    ) -> None:
        self._note(f"{doer.name} begins")
        member = Member(doer, work, len(self.model.log) - 1, self.passed)
        member.into = {} if into is None else into
        member.stock = stock
        self.members.append(member)
        with self._broken_on_error():
            member.start(Gate(self.bed.open(), member, self.late))
            self._after(member)
        self._run(member, run)

    def _chosen(self, who: int) -> Member:
        return self.members[who % len(self.members)]

    def _run(self, member: Member, count: int) -> None:
        for _ in range(count):
            if member.waiting is None:
                return
            self._step(member, "go")

    def _to(self, member: Member, place: str) -> bool:
        """Lets a member go on up to a place; False where it ended before."""
        for _ in range(END):
            if member.waiting is None:
                return False
            if is_at(member.waiting, place):
                return True
            self._step(member, "go")
        return False

    def _befall(self, who: int, place: str, mode: str, run: int) -> None:
        self._note(f"{mode} {who} {place}")
        member = self._chosen(who)
        if self._to(member, place) and (mode != "nowhere" or operation_of(member) == "put"):
            self._step(member, mode)
            self.tally.faults[mode] += 1
            self._run(member, run)

    def _step(self, member: Member, mode: str) -> None:
        request = member.waiting
        assert request is not None
        self.trace.append(f"  {member.name}: {request.operation} {about(request)}{f' ({mode})' * (mode != 'go')}")
        self.bed.tick()
        with self._broken_on_error():
            member.step(mode)
            self.tally.requests += 1
            if request.operation in CHANGES:
                self.model.look(self.bed.snapshot(), member.doer, self.bed.now())
            self._after(member)

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        """After an error nothing more is tried on this folder."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def _after(self, member: Member) -> None:
        if member.outcome is None:
            return
        self.members.remove(member)
        how = "killed" if member.killed else type(member.outcome.error).__name__ if member.outcome.error else "ok"
        self.tally.ended[f"{member.doer.kind}/{how}"] += 1
        self.trace.append(f"  {member.name} ended: {how} {member.outcome.error or ''}")
        judge(member, self.model, self.late)

    def _land(self, late: Late) -> None:
        self.trace.append(f"  late: {late.says} of {late.member.name}")
        self.bed.tick()
        try:
            late.call()
        except OSError as refused:  # every error of a store is one; nobody waits for this answer
            self.trace.append(f"  (refused: {refused})")
        with self._broken_on_error():
            self.model.look(self.bed.snapshot(), late.member.doer, self.bed.now())

    def _note(self, text: str) -> None:
        self.tally.steps += 1
        self.chosen += 1
        self.trace.append(text)

    def _fail(self, invariant: str, text: str) -> None:
        self.broken = True
        raise ViolationError(invariant, text)


def machine_on(make_bed: Callable[[], Bed], tally: Tally, fault: NamedFault = HEALTHY) -> type[Machine]:
    """A machine that plays on such folders.

    Args:
        make_bed: makes a folder for each run.
        tally: counts what is done.
        fault: what all members do wrong.
    """
    return type("Played", (Machine,), {"make_bed": staticmethod(make_bed), "tally": tally, "fault": fault})
