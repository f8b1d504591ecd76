"""Every knob of a save and of a load, and the reports they leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KIB", "MIB", "LoadOptions", "LoadReport", "Problem", "RankFigures", "Report", "SaveOptions", "SaveReport"]

KIB = 1024
MIB = 1024 * 1024
_ENGINES = ("fsspec", "obstore")


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What saving and loading share.

    Attributes:
        max_concurrency: most requests to the store in flight at once, per writer or reader. Default 16.
        part_size: bytes of one part or of one ranged read; at least 64 KiB, sensibly 8 to 64 MiB. Default 16 MiB.
        memory_budget: bytes that parts, ranges and staging buffers of one writer or reader may hold at once, over all
            its saves, files and threads. A single piece larger than the budget still goes through, alone.
            Default 256 MiB.
        attempts: most tries of one store request that failed in a passing way. Default 6.
        deadline: seconds for one store request with all its tries. Default 300.
        engine: what moves the bytes of S3 and GCS: ``"fsspec"`` (s3fs, gcsfs), or ``"obstore"``, whose loads cost
            less CPU and which needs the extra ``[obstore]``. Default ``"fsspec"``.
    """

    max_concurrency: int = 16
    part_size: int = 16 * MIB
    memory_budget: int = 256 * MIB
    attempts: int = 6
    deadline: float = 300.0
    engine: str = "fsspec"

    def __post_init__(self) -> None:
        if self.engine not in _ENGINES:
            raise ValueError(f'engine must be "fsspec" or "obstore", not {self.engine!r}.')
        for name in ("max_concurrency", "part_size", "memory_budget", "attempts"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be an int, not {getattr(self, name)!r}.")
        if (
            isinstance(self.deadline, bool)
            or not isinstance(self.deadline, (int, float))
            or self.deadline != self.deadline
        ):
            raise TypeError(f"deadline must be a number of seconds, not {self.deadline!r}.")
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {self.max_concurrency}.")
        if self.part_size < 64 * KIB:
            raise ValueError(f"part_size is in bytes and must be at least {64 * KIB}, not {self.part_size}.")
        if self.memory_budget < 1:
            raise ValueError(f"memory_budget is in bytes and must be positive, not {self.memory_budget}.")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}.")
        if self.deadline <= 0:
            raise ValueError(f"deadline is in seconds and must be positive, not {self.deadline}.")


@dataclass(frozen=True, kw_only=True)
class SaveOptions(_Common):
    """How to save. Frozen; every field has a default that is right for most runs.

    Attributes:
        max_concurrency: most requests to the store in flight at once, per writer. Default 16.
        part_size: bytes of one upload part, at most: down to 8 MiB fewer where that keeps all requests in flight busy,
            more by itself where a file nears the store's limit of parts, and never less than the store takes (5 MiB on
            S3). Default 16 MiB.
        memory_budget: bytes of parts in flight of this writer, over all its saves, files and threads. A single part
            larger than the budget still goes through, alone. Default 256 MiB.
        attempts: most tries of one store request that failed in a passing way. Default 6.
        deadline: seconds for one store request with all its tries. Default 300.
        engine: what moves the bytes of S3 and GCS: ``"fsspec"`` (s3fs, gcsfs), or ``"obstore"``, which saves no
            faster and needs the extra ``[obstore]``. Default ``"fsspec"``.
        shard_size: bytes after which a rank begins its next file; one item is never split over files.
            Default 4 GiB.
        assume_single_writer: allow overwrite on a store that cannot refuse a second create, on your word that no
            other job writes to the folder. Default False.
        label: only with ``use_collectives=False``: what all ranks of one save agree on and no other save has, e.g.
            the step and the job's id. Default: agreed through the default process group's key-value store.
        lone_ranks: only with ``use_collectives=False``: how many ranks save, where that is not the size of the default
            process group (with ``no_dist=True`` inside a job: 1). Default: the default group's size.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is out of its range.
    """

    shard_size: int = 4096 * MIB
    assume_single_writer: bool = False
    label: str | None = None
    lone_ranks: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.shard_size) is not int:
            raise TypeError(f"shard_size must be an int, not {self.shard_size!r}.")
        if not isinstance(self.assume_single_writer, bool):
            raise TypeError(f"assume_single_writer must be True or False, not {self.assume_single_writer!r}.")
        if self.label is not None and not isinstance(self.label, str):
            raise TypeError(f"label must be a str or None, not {self.label!r}.")
        if self.lone_ranks is not None and type(self.lone_ranks) is not int:
            raise TypeError(f"lone_ranks must be an int or None, not {self.lone_ranks!r}.")
        if self.shard_size < 1:
            raise ValueError(f"shard_size is in bytes and must be positive, not {self.shard_size}.")
        if self.lone_ranks is not None and self.lone_ranks < 1:
            raise ValueError(f"lone_ranks must be at least 1, not {self.lone_ranks}.")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(_Common):
    """How to load. Frozen; every field has a default that is right for most runs.

    Attributes:
        max_concurrency: most requests to the store in flight at once, per reader. Default 16.
        part_size: bytes of one ranged read, at most. Default 16 MiB.
        memory_budget: bytes of staging buffers of this reader, over all its loads and threads; what is read straight
            into a target does not count. A single piece larger than the budget still goes through, alone. Default
            256 MiB.
        attempts: most tries of one store request that failed in a passing way. Default 6.
        deadline: seconds for one store request with all its tries. Default 300.
        engine: what moves the bytes of S3 and GCS: ``"fsspec"`` (s3fs, gcsfs), or ``"obstore"``, whose loads cost
            less CPU and which needs the extra ``[obstore]``. Default ``"fsspec"``.
        max_gap: bytes that are as dear as one more request: so many may be read and thrown away to save one. Default
            None: 64 KiB on this machine's disks, 1 MiB over a network.
        share_reads: whether the ranks of the reader's ``process_group`` read each byte that several of them want once,
            and send it to each other. Default False.
        trusted_globals: classes, functions or dotted names that a checkpoint's Python objects may use beyond the
            published safe list (``dcp_storage.pickles.SAFE_GLOBALS``). They are called while loading: name only what
            you would run. Default none.

    Raises:
        TypeError: a value, or an entry of ``trusted_globals``, is of the wrong type.
        ValueError: a value is out of its range.
    """

    max_gap: int | None = None
    share_reads: bool = False
    trusted_globals: Sequence[type | Callable[..., Any] | str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_gap is not None and type(self.max_gap) is not int:
            raise TypeError(f"max_gap must be an int or None, not {self.max_gap!r}.")
        if self.max_gap is not None and self.max_gap < 0:
            raise ValueError(f"max_gap is in bytes and must not be negative, not {self.max_gap}.")
        if not isinstance(self.share_reads, bool):
            raise TypeError(f"share_reads must be True or False, not {self.share_reads!r}.")
        if isinstance(self.trusted_globals, str):
            raise TypeError('trusted_globals is a sequence, e.g. ["package.module.Name"], not a single string.')
        object.__setattr__(self, "trusted_globals", tuple(self.trusted_globals))
        for trusted in self.trusted_globals:
            if not (isinstance(trusted, str) or callable(trusted)):
                raise TypeError(f"trusted_globals takes classes, functions and dotted names, not {trusted!r}.")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: a stable string to branch on.
        file: name of the file it is in, None where it is in none.
        key: the state-dict key it concerns, None where it concerns none.
        wanted: what should be there.
        found: what is there.
        advice: one sentence: what to do.
    """

    kind: str
    file: str | None = None
    key: str | None = None
    wanted: int | str | None = None
    found: int | str | None = None
    advice: str = ""


@dataclass
class Report:
    """What happened, as data.

    Attributes:
        path: the checkpoint's folder.
        problems: what is wrong with the checkpoint; empty where ``ok``.
        warnings: sentences about what does not touch the checkpoint itself, e.g. a stale stock view.
        seconds: wall time by phase.
        requests: requests sent to the store by this rank.
        retries: of these, how many were tried again.
    """

    path: str
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    requests: int = 0
    retries: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the checkpoint."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, fit for JSON."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class RankFigures:
    """What one rank's writing took.

    Attributes:
        rank: which rank.
        seconds: wall time by phase.
        files: files that it wrote.
        nbytes: bytes in them.
        requests: requests that it sent to the store.
        retries: of these, how many were tried again.
    """

    rank: int
    seconds: dict[str, float]
    files: int
    nbytes: int
    requests: int
    retries: int


@dataclass
class SaveReport(Report):
    """What a save did, seen from this rank.

    Attributes:
        files: files this rank wrote.
        bytes_written: bytes in them.
        commit: number of the commit object; None on ranks that do not coordinate.
        single_writer: whether the store could not promise create-if-absent, so that the promise holds for one writer
            only.
        ranks: on the coordinator, the figures of every rank that wrote anything, by rank.
        straggler: on the coordinator, a sentence on the rank and phase that took far longer than the median; empty
            where none did.
    """

    files: int = 0
    bytes_written: int = 0
    commit: int | None = None
    single_writer: bool = False
    ranks: list[RankFigures] = field(default_factory=list)
    straggler: str = ""


@dataclass
class LoadReport(Report):
    """What a load did, seen from this rank.

    Attributes:
        loaded: keys that were filled, sorted.
        bytes_needed: bytes of the items that were wanted.
        bytes_read: bytes read from the store by this rank, commit and manifest included.
        bytes_received: bytes that other ranks sent: the manifest, and what they read for this rank.
        bytes_unchecked: of the bytes that tensors were filled with, those that no checksum is known for: slices of
            tensors that stock torch wrote.
        shared: whether bytes were read once and shared; if that was asked for and not done, ``warnings`` says why.
        commit: number of the commit that was read; None for a checkpoint without one.
        missing: keys of the template that the checkpoint lacks, sorted. This and what follows is of ``DCP.load``.
        unexpected: keys of the checkpoint inside an entry of the template that nobody wanted, sorted.
        shapes: keys that were left alone since another shape was saved, sorted.
        cast: keys that were filled from another dtype, sorted.
        untouched: keys of the template that kept what they had, for whatever reason, sorted.
        per_rank: entry → what became of a value that was kept for every rank: ``"own"`` (this rank got its own),
            ``"reseeded"``, ``"list"`` (all ranks' are in a ``PerRank``), ``"untouched"``.
    """

    loaded: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_unchecked: int = 0
    shared: bool = False
    commit: int | None = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)
    per_rank: dict[str, str] = field(default_factory=dict)
