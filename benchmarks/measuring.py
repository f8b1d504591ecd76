"""Runs workers in turn, each in its own process, and sums up what they measured."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dcp_storage.testing.proxy import Shape

__all__ = ["Case", "Figure", "LightServer", "Link", "interleaved", "process_cpu", "rounds_of", "serving", "shaped"]

LIMIT = 900  # seconds for one worker
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """One row of a table: who does what to which state, where.

    Attributes:
        subject: from :data:`benchmarks.subjects.SUBJECTS`.
        action: ``save`` or ``load``.
        state: from :data:`benchmarks.states.STATES`.
        url: the folder; each subject has its own.
        endpoint: the server's URL.
        options: of ours.
        label: how the row is called; the subject by default.
        ranks: processes, each with a state of its own.
    """

    subject: str
    action: str
    state: str
    url: str
    endpoint: str = ""
    options: dict[str, int] = field(default_factory=dict)
    label: str = ""
    ranks: int = 1


@dataclass
class Figure:
    """What the rounds of one case gave; lists have one number for each round."""

    case: Case
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    bytes: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, one: Figure) -> None:
        """Takes the rounds of another figure of this case to its own."""
        for name in ("wall", "cpu", "server_cpu", "peak"):
            getattr(self, name).extend(getattr(one, name))
        for name in ("bytes", "requests", "bytes_in", "bytes_out"):
            setattr(self, name, getattr(one, name))

    @property
    def median_wall(self) -> float:
        """Seconds."""
        return statistics.median(self.wall)

    @property
    def median_cpu(self) -> float:
        """Seconds of the client."""
        return statistics.median(self.cpu)

    def row(self) -> dict[str, Any]:
        """All of it, and the figures that are printed."""
        size = self.bytes / 1e9
        return {
            **asdict(self.case),
            "gb": size,
            "wall": self.wall,
            "median_wall": self.median_wall,
            "spread": [min(self.wall), max(self.wall)],
            "gb_per_s": size / self.median_wall,
            "cpu_per_gb": self.median_cpu / size,
            "server_cpu_per_gb": statistics.median(self.server_cpu) / size if self.server_cpu else None,
            "peak_mib": statistics.median(self.peak) / 2**20,
            "requests": self.requests,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


class LightServer:
    """The light S3 server in a process of its own.

    Args:
        bucket: made at once.
        certificate: PEM file with certificate and key, to serve HTTPS; the caller trusts it.
        memory: bytes that it has ready for objects; beyond them it finds and clears pages while it is measured.
    """

    def __init__(self, bucket: str, certificate: Path | None = None, memory: int = 4 * 10**9) -> None:
        command = [sys.executable, "-m", "benchmarks.light_server", "--memory", str(memory)]
        if certificate is not None:
            command += ["--cert", str(certificate)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self._certificate = certificate
        self._ask(bucket, "PUT")

    def _ask(self, path: str, method: str = "GET") -> bytes:
        context = None
        if self._certificate is not None:
            import ssl

            context = ssl.create_default_context(cafile=str(self._certificate))
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            data: bytes = answer.read()
        return data

    def stats(self) -> dict[str, Any]:
        """Requests by verb, bytes in and out, CPU seconds, all since the start."""
        found: dict[str, Any] = json.loads(self._ask("_stats"))
        return found

    def close(self) -> None:
        """Ends the process."""
        self.process.terminate()
        self.process.wait(timeout=10)


def process_cpu(pid: int) -> float:
    """User and system seconds of a process and of its living children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / TICK + sum(process_cpu(int(child)) for child in children)


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "benchmarks.serve", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.terminate()  # it ends what it started
        process.wait(timeout=60)


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """What :mod:`benchmarks.serve` serves, in a process of its own; gives its URL and process id."""
    with _process(*arguments) as (url, process):
        yield url, process.pid


@dataclass(frozen=True)
class Link:
    """A shaped way to a server.

    Attributes:
        url: the URL to use.
        process: the proxy's.
    """

    url: str
    process: subprocess.Popen[str]

    def moved(self) -> tuple[int, int]:
        """Bytes that went up and down through it, since it began."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        up, down = self.process.stdout.readline().split()
        return int(up), int(down)


@contextlib.contextmanager
def shaped(url: str, shape: Shape) -> Iterator[Link]:
    """The server behind a link of this shape."""
    total = [] if shape.total_rate is None else [str(shape.total_rate)]
    with _process("proxy", url, str(shape.latency), str(shape.rate), *total) as (proxied, process):
        yield Link(proxied, process)


def _once(case: Case) -> dict[str, Any]:
    launch = ["-W", "ignore"]
    if case.ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    command = [sys.executable, *launch, "-m", "benchmarks.worker", case.subject, case.action]
    command += ["--state", case.state, "--url", case.url, "--endpoint", case.endpoint]
    command += ["--options", json.dumps(case.options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["right"]:
        raise RuntimeError(f"{case}: what was loaded is not what was saved.")
    return found


def interleaved(
    cases: Sequence[Case],
    rounds: int,
    server: LightServer | None = None,
    pid: int | None = None,
    link: Link | None = None,
) -> list[Figure]:
    """Measures all cases in turn, ``rounds`` times over; a load finds what the save of its subject left.

    Args:
        cases: what is measured.
        rounds: how often.
        server: the light server, where it is one.
        pid: the process of another server, for its CPU seconds.
        link: the shaped way that the cases are to take.

    Raises:
        RuntimeError: a case loaded something else than was saved, or its bytes did not go through the link: a
            server that names itself in an answer is a way past it.
    """
    figures = [Figure(case) for case in cases]
    for number in range(rounds):
        for figure in figures:
            before = server.stats() if server else None
            moved = link.moved() if link else (0, 0)
            busy = process_cpu(pid) if pid is not None else 0.0
            found = _once(figure.case)
            figure.wall.append(found["wall"])
            figure.cpu.append(found["cpu"])
            figure.peak.append(found["peak"])
            figure.bytes = found["bytes"]
            if server and before:
                after = server.stats()
                figure.server_cpu.append(after["cpu"] - before["cpu"])
                figure.requests = {k: v - before["requests"].get(k, 0) for k, v in after["requests"].items()}
                figure.bytes_in = after["bytes_in"] - before["bytes_in"]
                figure.bytes_out = after["bytes_out"] - before["bytes_out"]
            elif pid is not None:
                figure.server_cpu.append(process_cpu(pid) - busy)
            case = figure.case
            if link:
                figure.bytes_in, figure.bytes_out = (now - was for now, was in zip(link.moved(), moved, strict=True))
                if max(figure.bytes_in, figure.bytes_out) < figure.bytes:
                    raise RuntimeError(f"{case}: {figure.bytes} bytes, but they did not go through the link.")
            print(
                f"  {number + 1}/{rounds} {case.label or case.subject}: {case.action} {found['wall']:.2f} s", flush=True
            )
    return figures


def rounds_of(rounds: int, one: Callable[[int], list[Figure]]) -> list[Figure]:
    """Sums up rounds that each begin with nothing: a run saves to a new folder, it does not replace its last step.

    Args:
        rounds: how many.
        one: given the number of the round, from 0 on, measures its cases, in any order; a round may leave some out.

    Returns:
        A figure for each case, in the order of the first round, those that it left out last.
    """
    figures: dict[tuple[str, str], Figure] = {}
    for number in range(rounds):
        for figure in one(number):
            name = figure.case.label or figure.case.subject, figure.case.action
            if name in figures:
                figures[name].add(figure)
            else:
                figures[name] = figure
    return list(figures.values())
