"""What a save tells: one structured record, the figures of every rank, a line on who was slow."""

from __future__ import annotations

import logging
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_storage import FsspecStorageWriter, SaveOptions
from dcp_storage.options import LoadReport, RankFigures
from dcp_storage.store import Store, WrappedStore
from dcp_storage.stores.opening import open_store
from dcp_storage.telling import straggler, tell_load
from dcp_storage.testing.faulty import Fault, FaultyStore
from dcp_storage.testing.ranks import RankPool
from tests.e2e import ALONE, Place, save
from tests.tools import state

pytestmark = pytest.mark.filterwarnings(ALONE)


def test_a_save_leaves_one_record_with_its_figures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At level INFO there is one record of a save, whose fields are those of the report."""
    place = Place(str(tmp_path / "c"))
    writer = place.writer()
    with caplog.at_level(logging.INFO, logger="dcp_storage"):
        save(state(), writer)
    (record,) = [r for r in caplog.records if r.name == "dcp_storage"]
    report = writer.report
    assert report is not None
    fields = {name.removeprefix("dcp_"): value for name, value in vars(record).items() if name.startswith("dcp_")}
    assert fields["event"] == "save"
    assert (fields["path"], fields["commit"], fields["rank"]) == (place.url, 1, 0)
    assert (fields["files"], fields["bytes"]) == (1, place.files()["__0_0.distcp"])
    assert fields["seconds"] == report.seconds
    assert set(report.seconds) >= {"begin", "write", "commit"}
    assert (fields["requests"], fields["retries"]) == (report.requests, 0)
    assert place.url in record.getMessage()


def test_nothing_is_shown_unless_it_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a word to logging, a save writes nothing to the terminal."""
    save(state(), Place(str(tmp_path / "c")).writer())
    assert capfd.readouterr() == ("", "")


def test_a_load_is_told_by_the_same_means(caplog: pytest.LogCaptureFixture) -> None:
    """The record of a load has the report's figures."""
    report = LoadReport("/c", seconds={"read": 1.5}, loaded=["a", "b"], bytes_needed=10, bytes_read=12, commit=3)
    with caplog.at_level(logging.INFO, logger="dcp_storage"):
        tell_load(report)
    (record,) = caplog.records
    assert (record.dcp_event, record.dcp_keys, record.dcp_bytes) == ("load", 2, 12)  # type: ignore[attr-defined]
    assert record.dcp_seconds == {"read": 1.5}  # type: ignore[attr-defined]


def test_retries_are_in_the_figures(tmp_path: Path) -> None:
    """A request that was tried again is counted in the report and in the rank's figures."""
    writer = Place(str(tmp_path / "c")).writer()

    def opener(location: Any, options: Any, concurrency: int) -> Store:
        return FaultyStore(
            open_store(location, options, max_concurrency=concurrency), [Fault("write_part", when="lost")]
        )

    writer._opener = opener
    save(state(), writer)
    assert writer.report is not None
    assert writer.report.retries == 1
    assert [figures.retries for figures in writer.report.ranks] == [1]


class Slow(WrappedStore):
    """A store on which completing an upload takes its time."""

    def upload(self, name: str) -> Any:
        time.sleep(1.3)
        return super().upload(name)


def _save_slowly(rank: int, world: int, path: str) -> tuple[list[RankFigures], str, bytes]:
    writer = FsspecStorageWriter(path)
    if rank == 1:
        writer._opener = lambda location, options, count: Slow(open_store(location, options, max_concurrency=count))
    dcp.save({f"of-{rank}": torch.ones(100 * (rank + 1))}, storage_writer=writer)
    report = writer.report
    assert report is not None
    return report.ranks, report.straggler, pickle.dumps(report)


def test_the_coordinator_hears_of_every_rank_and_of_who_was_slow(ranks: RankPool, tmp_path: Path) -> None:
    """Seconds, bytes and requests of all ranks reach the coordinator's report, and the slow one is named."""
    told = ranks.run(_save_slowly, 3, str(tmp_path / "c"))
    figures, sentence, _ = told[0]
    assert [f.rank for f in figures] == [0, 1, 2]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "c").glob("*.distcp")}
    assert [f.nbytes for f in figures] == [sizes[f"__{rank}_0.distcp"] for rank in range(3)]
    assert figures[1].seconds["write"] >= 1.3
    assert re.match(r"rank 1 took [0-9.]+ s for 'write', the median of 3 ranks is ", sentence)
    assert told[1][:2] == ([], "")


def figures(rank: int, **seconds: float) -> RankFigures:
    return RankFigures(rank, seconds, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ([], ""),
        ([figures(0, write=9.0)], ""),
        ([figures(n, write=10.0 + n / 10) for n in range(8)], ""),
        ([figures(0, write=0.1), figures(1, write=0.1), figures(2, write=0.9)], ""),
        ([figures(0, write=5.0), figures(1, write=5.0), figures(2, write=9.0)], "rank 2 took 9.0 s for 'write'"),
        (
            [figures(0, write=5.0, wait=9.0), figures(1, write=5.0), figures(2, write=9.0)],
            "rank 0 took 9.0 s for 'wait'",
        ),
    ],
)
def test_a_straggler_stands_out_from_the_median(ranks: list[RankFigures], wanted: str) -> None:
    """Only a rank far above the median by share and by seconds is named, the worst phase of all."""
    said = straggler(ranks)
    assert said.startswith(wanted)
    assert bool(said) is bool(wanted)


def test_options_reach_the_writer_unchanged(tmp_path: Path) -> None:
    """Telling changes nothing of what is written: two saves give the same shard, byte for byte."""
    first, second = Place(str(tmp_path / "a")), Place(str(tmp_path / "b"))
    for place in (first, second):
        save(state(), place.writer(options=SaveOptions(shard_size=600_000)))
    assert {n: first.get(n) for n in first.shards()} == {n: second.get(n) for n in second.shards()}
