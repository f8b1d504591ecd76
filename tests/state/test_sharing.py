"""``DCP.load`` has the ranks share their reads where they want the same bytes of a remote store, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dcp_storage import DCP, FsspecStorageReader, LoadOptions
from dcp_storage.state_ranks import Ranks
from dcp_storage.state_sharing import Sharing, Wants
from dcp_storage.testing.ranks import RankPool
from tests.e2e import place_of

MIB = 1024 * 1024
SIZE = 2112  # a square of them is 17 MiB


def load(rank: int, world: int, url: str, options: dict[str, Any], asked: bool) -> Any:
    model = nn.Linear(SIZE, SIZE, bias=False)
    state = {"model": model, "step": 0}
    report = DCP.load(state, checkpoint_id=url, storage_options=options or None, options=LoadOptions(share_reads=asked))
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(SIZE, SIZE, bias=False).weight)
    assert state["step"] == 3
    return report.shared, report.bytes_read


@pytest.mark.parametrize(
    ("kind", "asked", "shared"),
    [pytest.param("moto", False, True, marks=pytest.mark.slow), ("local", False, False), ("local", True, True)],
)
def test_where_reads_are_shared(
    request: pytest.FixtureRequest, ranks: RankPool, kind: str, asked: bool, shared: bool
) -> None:
    """Two replicas on S3 read each byte once together; on a local disk each reads for itself, unless asked to share."""
    place = place_of(request, kind)
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE, bias=False)
    DCP.save({"model": model, "step": 3}, checkpoint_id=place.url, storage_options=place.options or None)
    out = ranks.run(load, 2, place.url, place.options, asked, timeout=90)
    assert [one[0] for one in out] == [shared, shared]
    size = model.weight.numel() * 4
    assert sum(one[1] for one in out) == pytest.approx(size if shared else 2 * size, rel=0.05)


@pytest.mark.parametrize(
    ("wants", "remote", "pays"),
    [
        ([(20, b"a", 20), (20, b"a", 20)], True, True),
        ([(20, b"a", 20), (20, b"a", 20)], False, False),
        ([(10, b"a", 20), (10, b"a", 20)], True, False),
        ([(20, b"a", 20), (20, b"b", 20)], True, False),
        ([(15, b"a", 15), (15, b"a", 15)], True, False),
    ],
)
def test_when_it_pays(wants: list[tuple[int, bytes, int]], remote: bool, pays: bool) -> None:
    """Replicas of enough bytes of a remote store share; shards, stages of a pipeline and small states do not."""
    sharing = Sharing(Ranks(0, 2, None, False), remote, FsspecStorageReader("memory://nowhere"))
    assert sharing.pays([Wants(own * MIB, keys, whole * MIB) for own, keys, whole in wants]) is pays
