"""Where it is measured: each setting is a table of cases with the server that they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import Case, Figure, LightServer, interleaved, rounds_of, serving, shaped
from benchmarks.states import make_state
from dcp_storage.codec import bytes_of
from dcp_storage.testing.proxy import Shape
from tests.servers.certificate import make_certificate

__all__ = ["SETTINGS", "Scale"]

LINK = Shape(latency=0.020, rate=60e6)
"""20 ms before each answer, 60 MB/s on each connection."""

S3_PEERS = ("ours", "ours, obstore", "raw s3fs client", "s3torchconnector", "multi-storage-client", "torch Fsspec")

MINUTES = ("multi-storage-client", "torch Fsspec")
"""Who takes minutes to load half a gigabyte over the shaped link."""

BUDGETS = {"gpt2-2": 22 * 2**20, "gpt2-6": 56 * 2**20}
"""A tenth of the state, in bytes."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        state: saved and loaded without shaping.
        local: saved to and loaded from local disk.
        shaped: saved and loaded over the shaped link; stock torch needs half a minute for a gigabyte there.
        rounds: of each case.
        full: whether the settings run that take long.
    """

    state: str
    local: str
    shaped: str
    rounds: int
    full: bool


def _turned(subjects: Sequence[str], number: int) -> list[str]:
    """Each round begins with another subject: what was just freed costs the next one that writes."""
    first = number % len(subjects)
    return [*subjects[first:], *subjects[:first]]


def _both(subjects: Sequence[str], state: str, where: Callable[[str], str], endpoint: str) -> list[Case]:
    return [
        Case(subject, action, state, where(subject), endpoint) for subject in subjects for action in ("save", "load")
    ]


def _in_bucket(scheme: str) -> Callable[[str], str]:
    return lambda subject: f"{scheme}://bench/{subject.replace(' ', '_')}"


def s3_unshaped(scale: Scale) -> list[Figure]:
    """S3, loopback, the light server: what the client costs."""

    def one(number: int) -> list[Figure]:
        server = LightServer("bench")
        try:
            return interleaved(_both(_turned(S3_PEERS, number), scale.state, _in_bucket("s3"), server.url), 1, server)
        finally:
            server.close()

    return rounds_of(scale.rounds, one)


def s3_shaped(scale: Scale) -> list[Figure]:
    """S3 behind a link of 20 ms and 60 MB/s per connection, the light server; five rounds, one of who takes minutes."""
    rounds = max(scale.rounds, 5)

    def one(number: int) -> list[Figure]:
        peers = S3_PEERS if number == rounds - 1 else [peer for peer in S3_PEERS if peer not in MINUTES]
        server = LightServer("bench")
        try:
            with shaped(server.url, LINK) as link:
                return interleaved(
                    _both(_turned(peers, number), scale.shaped, _in_bucket("s3"), link.url), 1, server, link=link
                )
        finally:
            server.close()

    return rounds_of(rounds, one)


def s3_shaped_gpt2(scale: Scale) -> list[Figure]:
    """The same link, saves of all of GPT-2 with AdamW; five rounds, one of stock torch."""
    rounds = max(scale.rounds, 5)
    subjects = ("ours", "ours, obstore", "raw s3fs client", "s3torchconnector", "torch Fsspec")

    def one(number: int) -> list[Figure]:
        peers = [peer for peer in subjects if number == rounds - 1 or peer not in MINUTES]
        server = LightServer("bench", memory=9 * 10**9)
        try:
            with shaped(server.url, LINK) as link:
                cases = _both(_turned(peers, number), "gpt2", _in_bucket("s3"), link.url)
                return interleaved([case for case in cases if case.action == "save"], 1, server, link=link)
        finally:
            server.close()

    return rounds_of(rounds, one)


def s3_seaweed(scale: Scale) -> list[Figure]:
    """S3, loopback, SeaweedFS: a server that signs, checks and writes to disk, on the same two processors."""
    os.environ["BENCH_S3_CREDENTIALS"] = "seaweed-key:seaweed-secret"

    def one(number: int) -> list[Figure]:
        with serving("seaweedfs", "bench") as (url, pid):
            return interleaved(_both(_turned(S3_PEERS, number), scale.state, _in_bucket("s3"), url), 1, pid=pid)

    try:
        return rounds_of(scale.rounds, one)
    finally:
        del os.environ["BENCH_S3_CREDENTIALS"]


def memory(scale: Scale) -> list[Figure]:
    """Ours with a budget of a tenth of the checkpoint: local disk, S3 on the light server, GCS on the strict one."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    budget = {"memory_budget": BUDGETS[scale.shaped]}
    server = LightServer("bench")
    try:
        with serving("gcs", "bench") as (gcs, _), tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as disk:
            places = (
                ("disk", f"{disk}/ours", ""),
                ("S3", "s3://bench/memory", server.url),
                ("GCS", "gs://bench/m", gcs),
            )
            cases = [
                Case("ours", action, scale.shaped, url, endpoint, budget, f"ours, {name}, {budget['memory_budget']} B")
                for name, url, endpoint in places
                for action in ("save", "load")
            ]
            return interleaved(cases, scale.rounds)
    finally:
        server.close()


def s3_tls(scale: Scale) -> list[Figure]:
    """S3 over TLS, loopback, the light server."""
    with tempfile.TemporaryDirectory() as scratch:
        certificate = make_certificate(Path(scratch))
        os.environ["BENCH_CA"] = str(certificate)
        server = LightServer("bench", certificate)
        try:
            subjects = ("ours", "raw s3fs client", "torch Fsspec")
            return interleaved(_both(subjects, scale.state, _in_bucket("s3"), server.url), scale.rounds, server)
        finally:
            server.close()


def s3_concurrency(scale: Scale) -> list[Figure]:
    """S3, shaped, ours: GB/s over requests in flight."""
    server = LightServer("bench")
    try:
        with shaped(server.url, LINK) as link:
            cases = [
                Case("ours", action, scale.shaped, "s3://bench/c", link.url, {"max_concurrency": n}, f"{n} in flight")
                for n in (1, 2, 4, 8, 16)
                for action in ("save", "load")
            ]
            return interleaved(cases, 1 if not scale.full else scale.rounds, server, link=link)
    finally:
        server.close()


def s3_ranks(scale: Scale) -> list[Figure]:
    """S3, shaped, ours and stock: GB/s over ranks, each with a state of its own, on the processors of this machine."""
    server = LightServer("bench")
    try:
        with shaped(server.url, LINK) as link:
            cases = [
                Case(who, action, "gpt2-2", f"s3://bench/{who[:4]}{n}", link.url, label=f"{who}, {n} ranks", ranks=n)
                for who in ("ours", "torch Fsspec")
                for n in (1, 2, 4)
                for action in ("save", "load")
            ]
            return interleaved(cases, 1 if not scale.full else 3, server, link=link)
    finally:
        server.close()


def gcs_shaped(scale: Scale) -> list[Figure]:
    """GCS behind the same link, the strict server of the tests (a Python process, part of each figure); five rounds.

    Stock torch takes more than a minute for a load: it loads once.
    """
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks an emulator for gRPC first
    rounds = max(scale.rounds, 5)

    def one(number: int) -> list[Figure]:
        with serving("gcs", "bench") as (gcs, pid), shaped(gcs, LINK) as link:
            peers = _turned(("ours", "ours, obstore", "torch Fsspec"), number)
            cases = [
                case
                for case in _both(peers, scale.shaped, _in_bucket("gs"), link.url)
                if number == rounds - 1 or (case.subject, case.action) != ("torch Fsspec", "load")
            ]
            return interleaved(cases, 1, pid=pid, link=link)

    return rounds_of(rounds, one)


def _read_all(folder: Path) -> None:
    """Brings every file of a folder into the page cache."""
    piece = bytearray(1 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def local(scale: Scale) -> list[Figure]:
    """Local disk (the folder for temporary files, or BENCH_DISK), saves with fsync, loads from a warm page cache."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as folder:
        source = Path(folder) / "source"
        with source.open("wb") as file:
            for tensor in make_state(scale.local).values():
                file.write(bytes_of(tensor))
        os.environ["BENCH_SOURCE"] = str(source)
        subjects = ("ours", "dd", "torch FileSystem")

        def one(number: int) -> list[Figure]:
            figures = []
            for subject in _turned(subjects, number):
                # Each begins with nobody's files in the page cache: a page that was freed just now costs less than
                # another, above all in a virtual machine, whose host has to find it first.
                place = Path(folder) / "checkpoint"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                subprocess.run(["sync", "-f", folder], check=True)
                for case in _both((subject,), scale.local, lambda _: str(place), ""):  # noqa: B023 - now
                    if case.action == "load":
                        _read_all(place)  # a save that goes past the page cache leaves nothing there
                    figures += interleaved([case], 1)
            return figures

        return rounds_of(scale.rounds, one)


def small(scale: Scale) -> list[Figure]:
    """10,000 tensors of 4 KB: local disk, and S3 on the light server."""
    server = LightServer("bench")
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as folder:
            cases = _both(("ours", "torch Fsspec"), "small", _in_bucket("s3"), server.url)
            disk = ("ours", "torch FileSystem")
            for case in _both(disk, "small", lambda subject: f"{folder}/{subject.replace(' ', '_')}", ""):
                cases.append(Case(case.subject, case.action, "small", case.url, label=f"{case.subject}, disk"))
            files = {"shard_size": 60_000}  # about a thousand files
            for action in ("save", "load"):
                cases.append(
                    Case(
                        "ours",
                        action,
                        "small",
                        f"{folder}/files",
                        "",
                        files if action == "save" else {},
                        "ours, 1,000 files",
                    )
                )
            return interleaved(cases, scale.rounds)
    finally:
        server.close()


def large(scale: Scale) -> list[Figure]:
    """One tensor of 8 GB: local disk, and S3 on the light server; needs 20 GB of memory. Only with --full."""
    if not scale.full:
        return []
    server = LightServer("bench")
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as folder:
            cases = _both(("ours",), "one-8gb", _in_bucket("s3"), server.url)
            cases += [Case("ours", c.action, c.state, f"{folder}/ours", label="ours, disk") for c in cases]
            return interleaved(cases, 1)
    finally:
        server.close()


SETTINGS: dict[str, Callable[[Scale], list[Figure]]] = {
    "local": local,
    "s3_unshaped": s3_unshaped,
    "s3_shaped": s3_shaped,
    "s3_shaped_gpt2": s3_shaped_gpt2,
    "s3_seaweed": s3_seaweed,
    "s3_tls": s3_tls,
    "s3_concurrency": s3_concurrency,
    "s3_ranks": s3_ranks,
    "gcs_shaped": gcs_shaped,
    "memory": memory,
    "small": small,
    "large": large,
}
