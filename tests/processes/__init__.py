"""Processes, forks, threads and event loops around saves and loads; the place of a test as plain data."""

from __future__ import annotations

from tests.e2e import Place, assert_same, like, load, save, small_state

__all__ = ["plain", "round_trip"]


def plain(place: Place) -> Place:
    """The same place without its server, whose client does not pickle and does not belong in another process."""
    return Place(place.url, place.options)


def round_trip(place: Place, seed: int) -> None:
    """Saves and loads from this process alone; what comes back must be what went out."""
    save(small_state(seed), place.writer())
    found = like(small_state())
    load(found, place.reader())
    assert_same(found, small_state(seed))
