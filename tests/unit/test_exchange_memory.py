"""The window of a shared load: what it lets in is bounded, and ranks with windows of their own never wait in a ring."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.exchange_memory import EVERYTHING, Held, Spare, Window


def test_memory_is_used_again_up_to_its_bound() -> None:
    """What was kept is handed out for its own size only, and no more is kept than was said."""
    spare = Spare(10)
    first, second = spare.take(8), spare.take(8)
    spare.keep(first)
    spare.keep(second)  # one too many
    assert spare.take(4) is not first
    assert spare.take(8) is first
    assert spare.take(8) is not second


@pytest.mark.parametrize(
    ("items", "room", "limit"),
    [
        ([], 10, EVERYTHING),
        ([Held(0, 3, 5), Held(4, 6, 5)], 10, EVERYTHING),
        ([Held(0, 3, 5), Held(4, 6, 6)], 10, 4),
        ([Held(2, 3, 50), Held(5, 6, 1)], 10, 5),
        ([Held(5, 6, 6), Held(0, 3, 6)], 10, 5),
        ([Held(0, 3, 6), Held(3, 6, 6)], 10, 4),  # the segment in which the first ends has to come
    ],
)
def test_as_many_come_in_as_fit(items: list[Held], room: int, limit: int) -> None:
    """Items in the order of their segments, one at least, and all of what was let in may come."""
    assert Window(items, room).limit == limit


def test_what_is_done_makes_room_for_the_next() -> None:
    """The limit rises when an item is let go, and only if the next one fits then."""
    window = Window([Held(0, 0, 4), Held(1, 1, 4), Held(2, 2, 7), Held(3, 3, 1)], 10)
    assert window.limit == 2
    assert window.free(4) is False
    assert window.free(4) is True
    assert window.limit == EVERYTHING


@dataclass
class Rank:
    """What a rank wants: items by first and last segment, and what has come."""

    items: list[Held]
    window: Window
    come: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)

    def wanted(self) -> set[int]:
        return {number for item in self.items for number in range(item.first, item.last + 1)}

    def held(self) -> int:
        begun = {k for k, item in enumerate(self.items) if self.come & set(range(item.first, item.last + 1))}
        return sum(self.items[k].size for k in begun - self.freed)


def rank_of(lengths: list[tuple[int, int, bool]], room: int) -> Rank:
    items, at = [], 0
    for skipped, length, joined in lengths:
        first = max(at + skipped - (joined and not skipped), 0)
        items.append(Held(first, first + length, 1 + length % 4))
        at = first + length + 1
    return Rank(items, Window(items, room))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 6),
    st.integers(0, 1 << 30),
)
def test_no_two_ranks_wait_for_each_other(wants: list[list[tuple[int, int, bool]]], room: int, seed: int) -> None:
    """Owners that read in order, each segment when all who want it let it in: all comes, whoever is quick or slow.

    And no rank ever holds more than its room or one item, and what begins in one more segment.
    """
    ranks = [rank_of(lengths, room) for lengths in wants]
    chance = random.Random(seed)
    wanted = {k: [rank for rank in ranks if k in rank.wanted()] for k in set().union(*(r.wanted() for r in ranks))}
    owners = {number: chance.randrange(len(takers)) for number, takers in wanted.items()}
    queues: dict[int, list[int]] = {}
    for number in sorted(wanted):
        queues.setdefault(id(wanted[number][owners[number]]), []).append(number)
    while any(queues.values()):
        ready = [row for row in queues.values() if row and all(row[0] < r.window.limit for r in wanted[row[0]])]
        assert ready, "every owner waits"
        row = chance.choice(ready)
        number = row.pop(0)
        for rank in wanted[number]:
            rank.come.add(number)
            largest = max(item.size for item in rank.items)
            at_once = max(sum(item.size for item in rank.items if item.first == segment) for segment in rank.wanted())
            assert rank.held() <= max(room, largest) + at_once
            for k, item in enumerate(rank.items):
                if k not in rank.freed and set(range(item.first, item.last + 1)) <= rank.come:
                    rank.freed.add(k)
                    rank.window.free(item.size)
    assert all(rank.come == rank.wanted() for rank in ranks)
