"""Exactly the same run: losses, data and random numbers after a load are those of a run that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.state.training import SAVE_AT, STEPS, run, run_elsewhere


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", [2, 4])
def test_the_same_run_bit_for_bit(tmp_path: Path, ranks: RankPool, world: int) -> None:
    """On 2 and 4 ranks (FSDP2, dropout, AdamW, cosine, a shuffled loader) the second half is that of two whole runs."""
    path = str(tmp_path / "c")
    whole = ranks.run(run, world, path, "whole", timeout=100)
    saving = ranks.run(run, world, path, "saving", timeout=100)
    resumed = ranks.run(run, world, path, "resumed", timeout=100)
    assert len({losses[-1] for losses, _, _ in whole}) == world
    for (losses, order, _), (again, order_again, _), (later, order_later, outcome) in zip(
        whole, saving, resumed, strict=True
    ):
        assert len(losses) == STEPS
        assert again == losses
        assert order_again == order
        assert later == losses[SAVE_AT:]
        assert order_later == order[SAVE_AT:]
        assert outcome == {"rng": "own", "loader": "own"}
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (2, 4), (4, 1)])
def test_the_same_run_on_another_topology(tmp_path: Path, ranks: RankPool, saved: int, loaded: int) -> None:
    """On another number of ranks the losses are within 1e-4, relative; without the optimizer's state far from that."""
    path = str(tmp_path / "c")
    wanted = ranks.run(run_elsewhere, saved, path, "saving", timeout=100)[0][SAVE_AT:]
    (found, *_) = ranks.run(run_elsewhere, loaded, path, "resumed", timeout=100)
    (forgetful, *_) = ranks.run(run_elsewhere, loaded, path, "forgetful", timeout=100)
    away = [abs(a - b) / b for a, b in zip(found, wanted, strict=True)]
    lost = [abs(a - b) / b for a, b in zip(forgetful, wanted, strict=True)]
    assert max(away) < 1e-4
    assert max(lost) > 100 * max(away)
