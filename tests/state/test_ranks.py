"""Values that differ between ranks, and modules of every kind of parallelism, on real ranks."""

from __future__ import annotations

import random
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from dcp_storage import DCP, CheckpointError, IncompatibleCheckpointError, PerRank, RngState
from dcp_storage.per_rank import seed_of
from dcp_storage.testing.ranks import RankPool
from tests.state import assert_equal

WORLDS = (1, 2, 4, 8)
HEAVY = {(a, b) for a in WORLDS for b in WORLDS} - {(2, 2), (4, 2), (1, 2), (2, 1)}


class Loader:
    """A Stateful with a place and a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.place = rank
        self.generator = torch.Generator().manual_seed(rank)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": self.generator.get_state(), "tail": {"a": [self.place]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.generator.set_state(state["generator"])
        assert state["tail"] == {"a": [self.place]}


def plain_values(rank: int) -> dict[str, Any]:
    """What a rank has that the others have not."""
    return {
        "rng": {"torch": torch.full((4,), rank, dtype=torch.uint8), "same": 1, "python": (rank, (1, 2))},
        "py": f"rank{rank}",
        "w": torch.tensor([2.0 * rank, 2.0 * rank + 1]),
        "step": 7,
        "equal": {"set": {"a", "b", "c"}, "t": torch.arange(3)},
    }


def save_all(rank: int, world: int, path: str) -> Any:
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    state = {
        **plain_values(rank),
        "generators": RngState(),
        "loader": Loader(rank),
        "explicit": PerRank({"rank": rank}),
        "wrapped": PerRank(Loader(10 + rank)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = DCP.save(state, checkpoint_id=path)
    told = [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "differ" in str(w.message)]
    return report.warnings, told, torch.rand(1).item(), random.random()


def load_all(rank: int, world: int, path: str) -> Any:
    loader, wrapped = Loader(50), Loader(60)
    state = {
        **plain_values(99),
        "generators": RngState(),
        "loader": loader,
        "explicit": PerRank({"rank": None}),
        "wrapped": PerRank(wrapped),
    }
    report = DCP.load(state, checkpoint_id=path)
    drawn = (torch.rand(1).item(), random.random())
    explicit, held = state["explicit"], state["wrapped"]
    return (
        {name: state[name] if not isinstance(state[name], PerRank) else state[name].saved for name in plain_values(0)},
        drawn,
        (loader.place, loader.generator.initial_seed(), wrapped.place),
        (explicit.value, explicit.saved, None if held.saved is None else [one["place"] for one in held.saved]),
        (report.per_rank, report.warnings, report.untouched),
    )


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(a, b, marks=[pytest.mark.slow] if (a, b) in HEAVY else []) for a in WORLDS for b in WORLDS],
)
def test_every_rank_gets_what_is_its_own(tmp_path: Path, ranks: RankPool, saved: int, loaded: int) -> None:
    """On as many ranks each has its own back; on others the lists have all, and generators are seeded by the rule."""
    path = str(tmp_path / "c")
    before = ranks.run(save_all, saved, path)
    names = ["loader.generator", "loader.place", "loader.tail.a", "py", "rng.python", "rng.torch", "w"]
    for rank, (sentences, told, *_) in enumerate(before):
        if saved == 1:
            assert not sentences
            continue
        assert all(repr(name) in sentences[0] for name in names)
        assert not any(repr(name) in sentences[0] for name in ("rng.same", "step", "equal.set", "equal.t", "explicit"))
        assert told == (sentences if rank == 0 else [])
    first = ranks.run(load_all, loaded, path)
    for rank, (plain, drawn, places, (value, everyone, wrapped), (outcome, notes, untouched)) in enumerate(first):
        if saved == loaded:
            assert_equal(plain, plain_values(rank))
            assert list(drawn) == list(before[rank][2:])
            assert places == (rank, places[1], 10 + rank)
            assert (value, everyone, wrapped) == ({"rank": rank}, None, None)
            assert outcome["generators"] == "own"
            assert not untouched
            continue
        assert value == {"rank": None}
        assert everyone == [{"rank": number} for number in range(saved)]
        assert wrapped == [10 + number for number in range(saved)]
        assert outcome["generators"] == "reseeded"
        assert outcome["explicit"] == outcome["wrapped"] == "list"
        assert len(notes) == len(outcome)
        if saved == 1:
            assert_equal(plain, plain_values(0))
            assert places[0] == 0
            continue
        assert outcome["loader"] == "untouched"
        assert untouched == ["loader"]
        assert places[0] == 50
        for name in ("rng", "py", "w"):
            assert outcome[name] == "list"
            assert_equal(plain[name], [plain_values(number)[name] for number in range(saved)])
        assert_equal(plain["equal"], plain_values(0)["equal"])
        assert plain["step"] == 7
    again = ranks.run(load_all, loaded, path)
    assert [one[1] for one in again] == [one[1] for one in first]
    assert len({one[1] for one in first}) == loaded


def test_the_rule_of_the_new_seeds() -> None:
    """The seed is the start of SHA-256 over state, name, rank and number of ranks, as the docstring says it."""
    state = {"torch": torch.arange(4, dtype=torch.uint8)}
    # sha256(b"\x00\x01\x02\x03torch:1/2")
    assert seed_of(state, "torch", 1, 2) == int.from_bytes(bytes.fromhex("445c019a39a0a85d"), "little") & (
        (1 << 63) - 1
    )


def refuse(rank: int, world: int, path: str) -> Any:
    with pytest.raises(CheckpointError) as caught:
        DCP.save({"a": {"b": rank}, "same": 1}, checkpoint_id=path, differing="error")
    assert "Nothing was saved" in caught.value.message
    return caught.value.kind, caught.value.key


def test_a_difference_may_be_an_error(tmp_path: Path, ranks: RankPool) -> None:
    """With ``differing="error"`` the save is refused on every rank, names the value, and writes nothing."""
    assert ranks.run(refuse, 2, str(tmp_path / "c")) == [("differs", "a.b")] * 2
    assert not (tmp_path / "c").exists()


def stages(rank: int, world: int, path: str) -> Any:
    """Every rank has a stage of a pipeline: other names, and a dict of plain tensors under names of its own."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({str(rank): nn.Linear(3, 3)})
    state = {"model": model, "extra": {f"t{rank}": torch.full((2,), float(rank))}, "n": 1}
    report = DCP.save(state, checkpoint_id=path)
    other = nn.ModuleDict({str(world - 1 - rank): nn.Linear(3, 3)})
    found = {"model": other, "extra": {f"t{world - 1 - rank}": torch.zeros(2)}, "n": 0}
    DCP.load(found, checkpoint_id=path)
    torch.manual_seed(world - 1 - rank)
    assert_equal(other[str(world - 1 - rank)].state_dict(), nn.Linear(3, 3).state_dict())
    return report.warnings, found["extra"]


def test_the_stages_of_a_pipeline(tmp_path: Path, ranks: RankPool) -> None:
    """Keys that only some ranks have are neither per rank nor unexpected, and load on whichever rank wants them."""
    out = ranks.run(stages, 2, str(tmp_path / "c"))
    for rank, (sentences, extra) in enumerate(out):
        assert sentences == []
        assert_equal(extra, {f"t{1 - rank}": torch.full((2,), float(1 - rank))})


class Block(nn.Module):
    """Two layers that tensor parallelism can split, one of an odd size for FSDP, a tied pair and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.odd = nn.Linear(6, 5, bias=False)
        self.same = self.odd
        self.mean = nn.Buffer(torch.full((2,), float(seed)))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.odd.weight.sum() * 0 + x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def make(kind: str, world: int, seed: int) -> tuple[nn.Module, nn.Module]:
    """The bare module and the one that the kind of parallelism makes of it."""
    bare = Block(seed)
    if kind == "plain":
        return bare, bare
    if kind == "ddp":
        return bare, DistributedDataParallel(bare)
    if kind == "compiled ddp":
        return bare, torch.compile(DistributedDataParallel(bare), backend="eager")  # type: ignore[return-value]
    mesh = init_device_mesh("cpu", (world,))
    if kind == "tp":
        parallelize_module(bare, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return bare, bare
    fully_shard(bare, mesh=mesh)
    return bare, torch.compile(bare, backend="eager") if kind == "compiled fsdp" else bare  # type: ignore[return-value]


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        model(torch.linspace(-1, 1, 12).reshape(2, 6) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(rank: int, world: int, path: str, saver: str, loader: str, trained: bool) -> Any:
    """Saves as one kind and loads as another; the numbers of both, whole, under the names of the bare module."""
    bare, model = make(saver, world, 1)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 6))  # FSDP2 leaves the outermost module's parameters whole, which no optimizer has
    DCP.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    other, wrapped = make(loader, world, 2)
    found = AdamW(wrapped.parameters(), lr=0.3)
    if trained:
        train(wrapped, found)
    DCP.load({"model": wrapped, "optimizer": found}, checkpoint_id=path)
    states = [[whole(o.state[p]) for p in m.parameters()] for m, o in ((bare, optimizer), (other, found))]
    assert other.odd is other.same
    return whole(bare.state_dict()), whole(other.state_dict()), *states, found.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("ddp", "fsdp"),
        ("fsdp", "tp"),
        ("tp", "ddp"),
        pytest.param("compiled fsdp", "compiled ddp", marks=pytest.mark.slow),
        pytest.param("plain", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_from_one_parallelism_to_another(tmp_path: Path, ranks: RankPool, saver: str, loader: str) -> None:
    """Parameters, buffers and optimizer state arrive bit for bit, from whatever wrapping into whatever other."""
    out = ranks.run(parallel, 2, str(tmp_path / "c"), saver, loader, saver == "fsdp", timeout=90)
    for model, other, state, found, rate in out:
        assert_equal(dict(other), dict(model))
        for one, two in zip(found, state, strict=True):
            assert_equal(two, one)
        assert rate == 0.1


def failing(rank: int, world: int, path: str) -> Any:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise RuntimeError("no state here")
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if rank == 1:
                raise RuntimeError("cannot take it")

    with pytest.raises(CheckpointError) as first:
        DCP.save({"broken": Broken()}, checkpoint_id=path + "-a")
    DCP.save({"broken": {"a": 1}, "m": nn.Linear(2, 2)}, checkpoint_id=path)
    with pytest.raises(CheckpointError) as second:
        DCP.save({"broken": {"a": 1}}, checkpoint_id=path)
    with pytest.raises(CheckpointError) as third:
        DCP.load({"broken": type("Plain", (Broken,), {"state_dict": lambda self: {"a": 2}})()}, checkpoint_id=path)
    with pytest.raises(IncompatibleCheckpointError) as fourth:
        DCP.load({"m": nn.Linear(2, 3 if rank == 1 else 2)}, checkpoint_id=path)
    return [
        (type(e.value).__name__, e.value.key, e.value.rank, sorted(e.value.failures)) for e in (first, second, third)
    ], (fourth.value.shapes)


def test_one_rank_fails_and_all_know(tmp_path: Path, ranks: RankPool) -> None:
    """Whatever fails on one rank raises on all, as the error itself with its rank, key and all failures."""
    out = ranks.run(failing, 2, str(tmp_path / "c"))
    for errors, shapes in out:
        assert errors == [
            ("CheckpointError", "broken", 1, [1]),
            ("CheckpointExistsError", None, 0, [0]),
            ("CheckpointError", "broken", 1, [1]),
        ]
        assert shapes == {"m.weight": ("(3, 2)", "(2, 2)"), "m.bias": ("(3,)", "(2,)")}


def in_group(rank: int, world: int, path: str) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ValueError, match="not in process_group"):
            DCP.save({"a": 1}, checkpoint_id=path, process_group=group)
        DCP.save({"mine": 5}, checkpoint_id=path + "-0", no_dist=True)
        return None
    DCP.save({"a": PerRank(rank), "b": 2}, checkpoint_id=path, process_group=group)
    state: dict[str, Any] = {"a": PerRank(), "b": 0}
    DCP.load(state, checkpoint_id=path, process_group=group)
    return state["a"].value, state["b"]


def test_on_a_part_of_the_ranks(tmp_path: Path, ranks: RankPool) -> None:
    """Only the group's ranks save and load, numbered within the group; another rank may save alone meanwhile."""
    assert ranks.run(in_group, 3, str(tmp_path / "c")) == [None, (1, 2), (2, 2)]
    assert (tmp_path / "c-0" / ".commit").exists()


def read_plainly(rank: int, world: int, path: str) -> Any:
    found: dict[str, Any] = {"step": 0, "__per_rank__": {str(rank): {"py": ""}}}
    dcp.load(found, checkpoint_id=path)
    return found


def test_plain_torch_reads_what_is_shared_and_what_is_own(tmp_path: Path, ranks: RankPool) -> None:
    """Stock ``dcp.load`` finds shared values under their names and each rank's under ``__per_rank__.<rank>``."""
    path = str(tmp_path / "c")
    ranks.run(save_all, 2, path)
    wanted = [{"step": 7, "__per_rank__": {str(rank): {"py": f"rank{rank}"}}} for rank in range(2)]
    assert ranks.run(read_plainly, 2, path) == wanted


def another_head(rank: int, world: int, path: str) -> Any:
    """A sharded model whose last layer has grown, beside a fresh optimizer."""

    def made(out: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, out))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made(4)
    step(model, optimizer)
    DCP.save({"model": model, "opt": optimizer, "step": 5}, checkpoint_id=path)
    model, optimizer = made(6)
    template = {"model": model, "opt": optimizer, "step": 0}
    with pytest.raises(IncompatibleCheckpointError) as caught:
        DCP.load(template, checkpoint_id=path)
    report = DCP.load(template, checkpoint_id=path, strict=False)
    step(model, optimizer)
    return caught.value.message, report.shapes, template["step"]


def test_a_fresh_optimizer_of_a_model_that_has_grown(tmp_path: Path, ranks: RankPool) -> None:
    """Every shape that does not fit is named, the moments' too; what fits is loaded where that is asked for, and the
    next step goes well.
    """
    wanted = [f"model.1.{name}" for name in ("bias", "weight")]
    wanted += [f"opt.state.1.{name}.{moment}" for name in ("bias", "weight") for moment in ("exp_avg", "exp_avg_sq")]
    for message, shapes, step in ranks.run(another_head, 2, str(tmp_path / "c")):
        assert (sorted(shapes), step) == (wanted, 5)
        assert all(key in message for key in wanted)


def apart(rank: int, world: int, path: str) -> Any:
    """Ranks that ask for different things: each call's kind of error, and what the state is afterwards."""
    said = []
    state: dict[str, Any] = {"a": torch.ones(2), "b": torch.ones(2)}
    DCP.save(state, checkpoint_id=path)
    into: dict[str, Any] = {"a": torch.zeros(2), "b": torch.zeros(3)}
    calls = [
        lambda: DCP.load(into, checkpoint_id=path, strict=rank == 0),
        lambda: DCP.load(into, checkpoint_id=path, strict=False, allow_dtype_cast=rank == 0),
        lambda: DCP.save(state, checkpoint_id=path + "b", differing="warn" if rank else "error"),
        lambda: DCP.save(state, checkpoint_id=f"{path}b{rank}"),
        lambda: DCP.load(into, checkpoint_id=path if rank else f"{path}/../c", strict=False),
        lambda: DCP.async_save(state, checkpoint_id=f"{path}b{rank}").wait(),
    ]
    for call in calls:
        with pytest.raises(CheckpointError) as caught:
            call()  # type: ignore[no-untyped-call]
        said.append((caught.value.kind, str(caught.value)))
    return said, into["a"].tolist()


def test_ranks_that_ask_for_different_things(tmp_path: Path, ranks: RankPool) -> None:
    """All are told at once what differs and where, and nothing is loaded or saved; nobody waits for the time-out."""
    for said, kept in ranks.run(apart, 2, str(tmp_path / "c")):
        assert [kind for kind, _ in said] == ["options"] * 6
        for (_, text), name in zip(
            said, ("strict", "allow_dtype_cast", "differing", *["checkpoint_id"] * 3), strict=True
        ):
            assert name in text
            assert "rank 1" in text
        assert kept == [0.0, 0.0]
    assert not list(tmp_path.glob("cb*/.commit*"))


def lazy(rank: int, world: int, path: str) -> tuple[str, float]:
    """A parameter without a shape on rank 1."""
    module = nn.LazyLinear(1) if rank else nn.Linear(1, 1)
    begun = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        DCP.save({"a": module}, checkpoint_id=path)
    return f"{caught.value.rank} {caught.value.key}", time.monotonic() - begun


def test_a_parameter_without_a_shape(tmp_path: Path, ranks: RankPool) -> None:
    """One that cannot be taken, as a lazy module's, is named on all ranks at once."""
    for said, took in ranks.run(lazy, 2, str(tmp_path / "c"), timeout=40):
        assert said in ("1 a.weight", "1 a.bias")
        assert took < 20


def stuck(rank: int, world: int, path: str) -> float:
    """Rank 1 does not come to the second asynchronous save; how long rank 0 waits for it."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    DCP.async_save({"a": 1}, checkpoint_id=f"{path}/1", process_group=group).wait()
    begun = time.monotonic()
    if rank == 0:
        with pytest.raises(CheckpointError):
            DCP.async_save({"a": 1}, checkpoint_id=f"{path}/2", process_group=group).wait()
    else:
        time.sleep(12)
    return time.monotonic() - begun


def test_a_rank_that_does_not_come_to_an_asynchronous_save(tmp_path: Path, ranks: RankPool) -> None:
    """The others wait for the time-out of the group that was given, not for torch's default of half an hour."""
    first, _ = ranks.run(stuck, 2, str(tmp_path), timeout=60)
    assert 3 < first < 10
