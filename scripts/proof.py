"""Every crash: kills a process at each call of each kind of work, on three stores, and lets the power go everywhere.

    python -m scripts.proof [crash] [ranks] [power] [--store local|s3|gcs] [--most 20000]

Without a part all of them are run. Prints some twenty lines for each store while it works, then the tables; the exit
status is 0 only if nothing was broken. What CI runs is a sample of the same: ``tests/crash`` and ``tests/power``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from dcp_storage.testing.ranks import RankPool
from tests.crash.checking import Checker
from tests.crash.gate import Gate
from tests.crash.places import GcsPlace, LocalPlace, Place, S3Place
from tests.crash.rank_trials import RankBench
from tests.crash.scenarios import SCENARIOS, Snapshots
from tests.crash.table import Table, enumerate_calls
from tests.crash.trials import PRELOAD, Bench
from tests.power.replay import WAYS, WORKS, Found, record, replay, replay_after_kills
from tests.servers.gcs import gcs_server
from tests.servers.launchers import ministack_server

__all__ = ["main"]

PARTS = ("crash", "ranks", "power")
STORES = ("local", "s3", "gcs")


@contextlib.contextmanager
def opened(store: str, folder: Path) -> Iterator[Place]:
    """A store with its server, if it has one."""
    folder.mkdir()
    if store == "local":
        yield LocalPlace(folder)
    elif store == "s3":
        with ministack_server(folder) as server, Gate(server.endpoint_url) as gate:
            yield S3Place(server, gate)
    else:
        with gcs_server() as gcs, Gate(gcs.url) as gate:
            yield GcsPlace(gcs, gate)


def tell(line: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def prove_crashes(places: Sequence[Place], pool: RankPool) -> list[str]:
    """Every call of every scenario, in every way; returns what is broken."""
    table = Table()
    for place in places:
        enumerate_calls(table, Bench(place, pool), tell=tell)
    print(table, flush=True)
    return table.total.broken


def prove_ranks(places: Sequence[Place], pool: RankPool) -> list[str]:
    """Each rank of two and of four killed at each of its calls."""
    broken = []
    for place in places:
        for world in (2, 4):
            bench = RankBench(place, pool, world)
            found: Counter[str] = Counter()
            for result in bench.run(bench.trials()):
                found[result.found] += 1
                if result.broken:
                    broken.append(f"{place.name}, {world} ranks: {result.trial}: {result.broken}")
            tell(f"{place.name}: {found.total()} saves of {world} ranks, one killed: {dict(found)}")
    return broken


def prove_power(folder: Path, most: int) -> list[str]:
    """Every state that a power loss may leave at any moment, up to ``most`` choices at each."""
    place = LocalPlace(folder / "snapshots")
    snapshots = Snapshots(place, Checker(place))
    total = Found()
    number = 0
    for way in WAYS:
        for scenario in SCENARIOS:
            if scenario.work not in WORKS:
                continue
            for synced in (True, False) if scenario.work == "adopt" else (True,):
                number += 1
                before = snapshots.of(scenario.before)
                recording = record(scenario.work, before, folder / f"{number}", way=way, synced=synced)
                _tell_found(f"{scenario.name}, commit by {way}", replay(recording, most), total)
                again = replay_after_kills(recording, folder / f"{number}-again", most)
                _tell_found(f"{scenario.name}, commit by {way}, killed, and the next save", again, total)
    _tell_found("power loss in all", total, Found())
    return total.broken


def _tell_found(what: str, found: Found, total: Found) -> None:
    total.add(found)
    tell(
        f"{what}: {found.moments} moments, {found.choices} choices, {found.looked} looked at, {found.states} states: "
        f"{found.old} old, {found.new} new, {found.none} none, {len(found.broken)} broken"
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the parts that are named; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.proof", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="part", choices=[*PARTS, []], help="crash, ranks, power; all by default"
    )
    parser.add_argument("--store", action="append", choices=STORES, help="only on this one; may be repeated")
    parser.add_argument("--most", type=int, default=20_000, help="choices at one moment up to which all are looked at")
    given = parser.parse_args(arguments)
    parts = given.parts or PARTS
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    begun, broken = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="proof-") as folder, ExitStack() as stack:
        if "power" in parts:
            broken += prove_power(Path(folder), given.most)
        if "crash" in parts or "ranks" in parts:
            pool = stack.enter_context(RankPool(preload=PRELOAD))
            places = [stack.enter_context(opened(s, Path(folder, s))) for s in given.store or STORES]
            if "crash" in parts:
                broken += prove_crashes(places, pool)
            if "ranks" in parts:
                broken += prove_ranks(places, pool)
    for line in broken[:50]:
        print(f"BROKEN: {line}")
    tell(f"{len(broken)} broken, {time.monotonic() - begun:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
