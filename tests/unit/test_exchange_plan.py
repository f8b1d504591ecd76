"""Sharing planned, against brute force: which rank reads which byte."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_storage.exchange_plan import SHARING_PAYS, Segment, share, totals, worth_sharing
from dcp_storage.plan_slices import merged

BLOCK = 5
Wants = list[list[tuple[int, int, int]]]


def ranges() -> st.SearchStrategy[Wants]:
    """What up to five ranks want, in blocks of two files."""
    one = st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 12)).map(
        lambda found: (found[0], found[1] * BLOCK, (found[1] + found[2]) * BLOCK)
    )
    return st.lists(st.lists(one, max_size=6).map(lambda found: merged(found, 0)), min_size=1, max_size=5)


def cut(wants: Wants, size: int) -> list[Segment]:
    return share(wants, size=size, border=lambda _, at: at // BLOCK * BLOCK)


@given(ranges(), st.integers(1, 60))
def test_each_wanted_byte_is_read_once_by_a_rank_that_wants_it(wants: Wants, size: int) -> None:
    """Every byte that a rank wants is in exactly one segment, which names exactly the ranks that want it."""
    wanted = [{(file, at) for file, start, stop in own for at in range(start, stop)} for own in wants]
    seen: set[tuple[int, int]] = set()
    for segment in cut(wants, size):
        ranks = sorted((segment.owner, *segment.takers))
        for at in range(segment.start, segment.stop):
            byte = (segment.file, at)
            assert byte not in seen
            seen.add(byte)
            assert [rank for rank, own in enumerate(wanted) if byte in own] == ranks
    assert seen == set().union(*wanted)


@given(ranges(), st.integers(1, 60))
def test_segments_are_in_order_and_cut_at_blocks(wants: Wants, size: int) -> None:
    """Segments come in the order of their places, numbered, cut only at blocks, no longer than size and a block."""
    found = cut(wants, size)
    assert [segment.number for segment in found] == list(range(len(found)))
    assert sorted(found, key=lambda s: (s.file, s.start)) == found
    for segment in found:
        assert segment.start % BLOCK == segment.stop % BLOCK == 0
        assert segment.stop - segment.start <= max(size, 2 * BLOCK)
        assert segment.owner not in segment.takers


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_replicas_read_equal_shares(ranks: int) -> None:
    """Where all want all, each rank reads its share, a segment more or less."""
    found = cut([[(0, 0, 10_000)] for _ in range(ranks)], 50)
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for segment in found:
        loads[segment.owner] += segment.stop - segment.start
    assert max(loads.values()) - min(loads.values()) <= 50
    assert sum(loads.values()) == 10_000


def test_who_reads_much_alone_reads_less_for_others() -> None:
    """What a rank reads for itself counts: the other one reads all that both want, if that is no more."""
    found = cut([[(0, 0, 1000), (1, 0, 1000)], [(1, 0, 1000)]], 100)
    assert {segment.owner for segment in found if segment.file == 1} == {1}


def test_small_neighbours_go_to_one_reader() -> None:
    """Many small pieces in a row that are wanted by changing ranks make few changes of the reader."""
    pieces = [(0, 20 * k, 20 * k + 10) for k in range(100)]
    found = cut([pieces, pieces, pieces[::2]], 250)
    changes = sum(a.owner != b.owner for a, b in itertools.pairwise(found))
    assert changes <= 1000 // 250 + 1


def test_without_a_border_nothing_is_cut() -> None:
    """A block that is longer than a segment stays whole."""
    found = share([[(0, 0, 1000)]] * 2, size=10, border=lambda file, at: 0 if at < 1000 else 1000)
    assert [(segment.start, segment.stop) for segment in found] == [(0, 1000)]


@given(ranges())
def test_totals_count_bytes(wants: Wants) -> None:
    """The totals are the bytes of all ranks together, and of their union."""
    each = [{(file, at) for file, start, stop in own for at in range(start, stop)} for own in wants]
    assert totals(wants) == (sum(map(len, each)), len(set().union(*each)))


@pytest.mark.parametrize(
    ("wanted", "distinct", "ranks", "remote", "worth"),
    [
        (4 * SHARING_PAYS, SHARING_PAYS, 4, True, True),
        (4 * SHARING_PAYS, SHARING_PAYS, 4, False, False),
        (2 * SHARING_PAYS, SHARING_PAYS, 2, True, True),
        (2 * SHARING_PAYS - 1, SHARING_PAYS, 2, True, False),
        (SHARING_PAYS, SHARING_PAYS, 8, True, False),
        (4 * SHARING_PAYS, SHARING_PAYS, 1, True, False),
    ],
)
def test_sharing_pays_where_much_is_saved_over_a_network(
    wanted: int, distinct: int, ranks: int, remote: bool, worth: bool
) -> None:
    """It is worth it for several ranks, a store that is not this machine's, and a saving above the threshold."""
    assert worth_sharing(wanted=wanted, distinct=distinct, ranks=ranks, remote=remote) is worth
