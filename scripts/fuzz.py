"""Reads fuzzed bytes by every parser of this package: ``python -m scripts.fuzz --inputs 1000000``.

Every input is made from the corpus in git by its number and the seed alone, so that a fault can be had again:
``--seed S --only N``. Prints a line now and then, and at the end how many inputs there were and what became of them;
ends with 1 if any of them ended in anything but a value or an error of this package.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from tests.fuzz.corpus import found, seeds
from tests.fuzz.judging import LOADED, FaultError, attempt, numbered
from tests.fuzz.running import Tally, run
from tests.fuzz.targets import TARGETS

__all__ = ["main"]


def _replay() -> int:
    """Reads every file of the corpus: what is valid loads, what was once found ends well."""
    files = [(name, *one) for name in TARGETS for one in (*seeds(name).items(), *found(name).items())]

    def trial(number: int) -> str:
        target, name, data = files[number]
        outcome = attempt(TARGETS[target], data)
        if name.startswith("seed-") and outcome != LOADED:
            raise FaultError(f"it is valid, and ended in an error of kind {outcome}")
        return outcome

    tally = run(trial, inputs=len(files))
    for fault in tally.faults:
        print(f"corpus/{files[fault.number][0]}/{files[fault.number][1]}: {fault.why}")
    print(f"corpus: {tally}")
    return 1 if tally.faults else 0


def _one(seed: int, number: int, targets: tuple[str, ...]) -> int:
    target, data = numbered(seed, number, targets)
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    print(f"\n{target.name}: {len(data)} bytes", file=sys.stderr)
    return 0


def _progress(every: float) -> Callable[[Tally], None]:
    last = [time.monotonic()]

    def say(tally: Tally) -> None:
        if time.monotonic() - last[0] >= every:
            last[0] = time.monotonic()
            print(f"  {tally}", flush=True)

    return say


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1 << 40, help="how many inputs, at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="how long, at most")
    parser.add_argument("--seed", type=int, help="default: another one each time; it is printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    parser.add_argument("--only", type=int, help="write this input to the standard output")
    parser.add_argument("--replay", action="store_true", help="read the corpus, and nothing else")
    options = parser.parse_args(arguments)
    if options.replay:
        return _replay()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    targets = tuple(options.targets)
    if options.only is not None:
        return _one(seed, options.only, targets)
    if options.inputs == 1 << 40 and options.seconds == 1e9:
        parser.error("say how many inputs (--inputs) or how long (--seconds)")
    print(f"seed {seed}, targets {' '.join(targets)}, from input {options.first}", flush=True)

    def trial(number: int) -> str:
        target, data = numbered(seed, number, targets)
        return f"{target.name} {attempt(target, data)}"

    tally = run(
        trial, first=options.first, inputs=options.inputs, seconds=options.seconds, progress=_progress(every=60)
    )
    for fault in tally.faults:
        where = targets[fault.number % len(targets)]
        print(f"FAULT: input {fault.number} ({where}; --seed {seed} --only {fault.number}): {fault.why}")
    print(f"fuzz: seed {seed}: {tally}")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
