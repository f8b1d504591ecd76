"""A real model's whole state: training goes on after a load as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_storage.testing.ranks import RankPool
from tests.e2e import Place
from tests.topology.training import Job, train

TOLERANCE = 1e-4
"""How far, relative, losses may lie apart where other ranks add in another order. Forgetting the optimizer's state
moves them much further, which is tested, too."""

SLOW = pytest.mark.slow

PLAIN, DDP = Job("plain", (1,)), Job("ddp", (2,))
FSDP, HSDP, MIXED = Job("fsdp", (3,)), Job("hsdp", (2, 2)), Job("fsdp+tp", (2, 2))


def run(ranks: RankPool, job: Job, *args: object) -> list[float]:
    outcomes = ranks.run(train, job.world, job, *args, timeout=100)
    assert all(losses == outcomes[0] for losses in outcomes)
    losses: list[float] = outcomes[0]
    return losses


def apart(found: list[float], wanted: list[float]) -> float:
    """The greatest relative distance of two rows of losses."""
    return max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("job", [PLAIN, DDP, *(pytest.param(job, marks=SLOW) for job in (FSDP, HSDP, MIXED))], ids=str)
def test_the_same_job_goes_on_bit_for_bit(tmp_path: Path, ranks: RankPool, job: Job) -> None:
    """Two uninterrupted runs have equal losses, and so has a fresh run from the third step's checkpoint."""
    place = Place(str(tmp_path / "step-3"))
    saved = run(ranks, job, 6, 0, None, place)
    assert run(ranks, job, 6, 0) == saved
    assert run(ranks, job, 3, 3, place) == saved[3:]


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        pytest.param(MIXED, [PLAIN, FSDP], marks=SLOW, id="fsdp+tp to fewer"),
        pytest.param(MIXED, [DDP, HSDP, Job("fsdp+tp", (1, 4)), Job("fsdp+tp", (2, 1))], marks=SLOW, id="fsdp+tp"),
        pytest.param(HSDP, [MIXED, DDP], marks=SLOW, id="hsdp"),
        pytest.param(DDP, [MIXED], marks=SLOW, id="ddp"),
        pytest.param(PLAIN, [FSDP], id="plain"),
    ],
)
def test_another_job_goes_on(tmp_path: Path, ranks: RankPool, source: Job, targets: list[Job]) -> None:
    """Another kind of parallelism on another number of ranks goes on with the losses of the uninterrupted run."""
    place = Place(str(tmp_path / "step-3"))
    wanted = run(ranks, source, 6, 0, None, place)[3:]
    for target in targets:
        assert apart(run(ranks, target, 3, 3, place), wanted) < TOLERANCE, str(target)


def test_a_state_that_is_not_loaded_is_noticed(tmp_path: Path, ranks: RankPool) -> None:
    """Without the optimizer's state the losses leave the tolerance: the tests above can fail."""
    place = Place(str(tmp_path / "step-3"))
    wanted = run(ranks, DDP, 6, 0, None, place)[3:]
    assert apart(run(ranks, DDP, 3, 3, place, None, ("model",)), wanted) > 10 * TOLERANCE
