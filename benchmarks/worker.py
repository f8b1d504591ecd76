"""One measurement in a process of its own: warm up, then one save or load, timed; prints a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.states import empty_like, is_state, make_state, size_of
from benchmarks.subjects import Place, subject

__all__ = ["main"]


def _cpu() -> float:
    """User and system seconds of this process and of the children that ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}.")


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject")
    parser.add_argument("action", choices=["save", "load"])
    parser.add_argument("--state", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--options", default="{}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    own = f"rank{dist.get_rank()}." if ranks > 1 else ""
    one = subject(arguments.subject)
    options = json.loads(arguments.options)
    warm_url = f"{arguments.url}-warm-{os.getppid()}"
    if "://" not in warm_url:
        Path(warm_url).mkdir(parents=True, exist_ok=True)
        Path(arguments.url).mkdir(parents=True, exist_ok=True)
    place = Place(arguments.url, arguments.endpoint, options)
    if arguments.subject != "dd":  # with the options only where they are measured: others may not know them
        saving, loading = (options, {}) if arguments.action == "save" else ({}, options)
        one.save(make_state("warm"), Place(warm_url, arguments.endpoint, saving))
        one.load(empty_like("warm"), Place(warm_url, arguments.endpoint, loading))
    made = make_state(arguments.state) if arguments.action == "save" else empty_like(arguments.state)
    state = {own + name: tensor for name, tensor in made.items()}
    if ranks > 1:
        dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, man 5 proc
    before = _memory("VmRSS")
    cpu, start = _cpu(), time.perf_counter()
    (one.save if arguments.action == "save" else one.load)(state, place)
    wall, cpu = time.perf_counter() - start, _cpu() - cpu
    peak = _memory("VmHWM") - before
    right = True
    if arguments.action == "load" and arguments.subject != "dd":
        right = is_state({name.removeprefix(own): tensor for name, tensor in state.items()}, arguments.state)
    found = {"wall": wall, "cpu": cpu, "peak": peak, "bytes": size_of(state), "right": right}
    if ranks > 1:
        all_found: list[dict[str, Any]] = [{} for _ in range(ranks)]
        dist.all_gather_object(all_found, found)
        found = {name: (max if name in ("wall", "peak") else sum)([f[name] for f in all_found]) for name in found}
        found["right"] = all(f["right"] for f in all_found)
        last = dist.get_rank() == 0
        dist.destroy_process_group()
        if not last:
            return
    print(json.dumps(found))


if __name__ == "__main__":
    main()
