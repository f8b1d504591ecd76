"""What may become of an input: a value, or an error of this package that a person can read. All else is a fault."""

from __future__ import annotations

import pickle
import resource
import time
from typing import Final

from dcp_storage.errors import CheckpointError
from tests.fuzz.choices import Choices, Seeded
from tests.fuzz.corpus import found, seeds
from tests.fuzz.targets import LIMIT, TARGETS, Target

__all__ = ["LOADED", "SLOW", "FaultError", "attempt", "input_of", "numbered"]

LOADED: Final = "loaded"

SLOW: Final = 5.0
"""Seconds of processor time that one input may take; the slowest of a good run take some hundredths."""

_SPARE: Final = 2 * LIMIT
_LONGEST: Final = 2000


class FaultError(Exception):
    """An input ended as no input may."""


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(target: Target, data: bytes) -> str:
    """Reads one input; :data:`LOADED`, or the kind of the error of ours that it ended in.

    Raises:
        FaultError: it ended in any other error, in one that hides a lack of memory, that is no sentence or does not
            pickle; or it took too much time or memory.
    """
    began, before = time.process_time(), _peak()
    outcome = LOADED
    try:
        target.run(data)
    except CheckpointError as error:
        outcome = error.kind
        _check(error)
    except Exception as error:
        raise FaultError(f"{type(error).__name__}: {error}"[:500]) from error
    took, grew = time.process_time() - began, _peak() - before
    if took > SLOW:
        raise FaultError(f"it took {took:.1f} s of processor time")
    if grew > LIMIT + _SPARE:
        raise FaultError(f"memory grew by {grew} bytes, and the limit was {LIMIT}")
    return outcome


def _check(error: CheckpointError) -> None:
    text = str(error)
    if error.cause is not None and error.cause.type == "builtins.MemoryError":
        raise FaultError(f"there was not enough memory: {text[:300]}") from error
    if "\n" in text or not text.strip() or len(text) > _LONGEST:
        raise FaultError(f"no sentence, of {len(text)} characters: {text[:300]!r}") from error
    again = pickle.loads(pickle.dumps(error))
    if (type(again), str(again), again.kind) != (type(error), text, error.kind):
        raise FaultError(f"it does not pickle whole: {text[:300]}") from error


def input_of(target: Target, choices: Choices) -> bytes:
    """An input for a target, made of its corpus."""
    valid = [*seeds(target.name).values()]
    known = [*found(target.name).values()]
    data = choices.pick(known) if known and choices.one_in(16) else choices.pick(valid)
    try:
        return target.mutate(choices, data, valid)
    except (LookupError, ValueError):  # what was once found is no valid input, so that its structure cannot be mutated
        return target.mutate(choices, choices.pick(valid), valid)


def numbered(seed: int, number: int, kinds: tuple[str, ...] = tuple(TARGETS)) -> tuple[Target, bytes]:
    """Input ``number`` of the run ``seed``: the same always."""
    target = TARGETS[kinds[number % len(kinds)]]
    return target, input_of(target, Seeded(seed, number))
