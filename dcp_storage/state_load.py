"""Loading a whole state: the template is held against the checkpoint, then filled in one load, then put into effect."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader

from dcp_storage.errors import CheckpointError, IncompatibleCheckpointError, portable
from dcp_storage.options import LoadReport
from dcp_storage.state_findings import Findings, Wish
from dcp_storage.state_keys import KeyChoice
from dcp_storage.state_optimizers import OptimizerPart
from dcp_storage.state_ranks import Ranks, check_same, unwrapped
from dcp_storage.state_sharing import Sharing, Wants, wants_of
from dcp_storage.state_source import Source
from dcp_storage.state_spread import Spread, hold
from dcp_storage.state_view import View, view_of
from dcp_storage.state_walk import Parts, parts_of

__all__ = ["load_state"]

_SHOWN = 20


@dataclass
class _Told:
    """What a rank tells the others of its template."""

    entries: tuple[str, ...]
    missing: list[str]
    unexpected: list[str]
    shapes: dict[str, tuple[str, str]]
    dtypes: dict[str, tuple[str, str]]
    asks: bool
    wants: Wants
    how: tuple[bool, bool, str | None]
    idle: list[str]


@dataclass
class _Load:
    """One load on one rank."""

    state: MutableMapping[str, Any]
    choice: KeyChoice
    how: tuple[bool, bool, str | None]  # strict, allow_dtype_cast, where
    parts: Parts = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    spread: Spread = field(default_factory=Spread)
    view: View | None = None

    def hold(self, source: Source, ranks: Ranks, path: str | None) -> _Told:
        self.parts = parts_of(self.state)
        try:
            self.view = view_of(source.look(), self.choice, ranks)
            self.findings = Findings(
                excluded=self.view.leaves_out,
                differ=self.view.differ,
                renamed=self.choice.name_of,
            )
            self.spread = hold(self.parts, self.view, self.findings, ranks)
            return self.tell()
        except Exception as error:
            raised = portable(error, "Comparing the template with the checkpoint", path=path)
            if raised is error:
                raise
            raise raised from error

    def tell(self) -> _Told:
        assert self.view is not None
        found = self.findings
        left = [key for key in self.view.names(self.state) if key not in found.used and not self.view.leaves_out(key)]
        asks = any(part.questions() for part in self.optimizers)
        wants = wants_of(found.wishes, self.view)
        idle = self.choice.idle([*found.used, *found.missing])
        return _Told(tuple(self.state), found.missing, left, found.shapes, found.dtypes, asks, wants, self.how, idle)

    @property
    def optimizers(self) -> list[OptimizerPart]:
        return [part for part in self.parts if isinstance(part, OptimizerPart) and not self.spread.has(part)]


def load_state(
    ranks: Ranks,
    state: MutableMapping[str, Any],
    reader: StorageReader,
    planner: LoadPlanner | None,
    *,
    strict: bool,
    allow_dtype_cast: bool,
    choice: KeyChoice,
    sharing: Sharing | None = None,
) -> LoadReport:
    """Fills a state from a checkpoint, on all ranks together.

    Args:
        ranks: who loads.
        state: live objects are filled in place, plain values replaced.
        reader: pointed to the checkpoint already.
        planner: the user's; it is given flat keys of the store.
        strict: whether everything has to fit.
        allow_dtype_cast: whether tensors may be filled from another dtype.
        choice: which keys, and their names.
        sharing: how reads may be shared between the ranks; None if they are not to be.

    Raises:
        IncompatibleCheckpointError: the template does not fit; nothing has changed.
        CheckpointError: see the reader.
    """
    path = getattr(reader, "checkpoint_id", None)
    path = None if path is None else str(path)
    source = Source(reader, ranks.rank)
    load = _Load(state, choice, (strict, allow_dtype_cast, path))
    told = ranks.agree(
        "Comparing the template with the checkpoint",
        path,
        lambda: load.hold(source, ranks, path),
        plain=(TypeError, ValueError),
    )
    for at, name in enumerate(("strict", "allow_dtype_cast", "checkpoint_id")):
        check_same(name, [one.how[at] for one in told], "Nothing was changed.", path)
    if sharing is not None:
        sharing.decide(False)  # the few objects that are asked for first are not worth it
    if any(one.asks for one in told):
        told = _ask(ranks, load, source, planner, path)
    unexpected = _unexpected(told)
    _judge(told, unexpected, strict, allow_dtype_cast, path)

    if sharing is not None:
        sharing.decide(sharing.pays([one.wants for one in told]))
    wishes = load.findings.wishes
    flat = {wish.source: wish.value for wish in wishes}
    _read(ranks, flat, source, planner, path)
    for wish in wishes:
        wish.value = flat[wish.source]
    notes = ranks.agree("Putting into effect what was loaded", path, lambda: _apply(load))[ranks.rank]
    notes = [*notes, *(f"keys: there is nothing to load under {prefix!r}." for prefix in _idle(told))]

    known = getattr(reader, "report", None)
    report = known if isinstance(known, LoadReport) else LoadReport(path or "")
    return _fill(report, load, [key for key in unexpected if _inside(key, state)], notes)


def _read(ranks: Ranks, flat: dict[str, Any], source: Source, planner: LoadPlanner | None, path: str | None) -> None:
    before = source.failure

    def reason() -> CheckpointError | None:
        return source.failure if source.failure is not before else None

    with unwrapped(ranks, "Loading", path, reason):
        _load_state_dict(flat, source, ranks.group, 0, ranks.alone, planner or DefaultLoadPlanner())


def _ask(ranks: Ranks, load: _Load, source: Source, planner: LoadPlanner | None, path: str | None) -> list[_Told]:
    """Reads the few objects that tell whether an optimizer fits, before any tensor changes."""
    answers: dict[str, Any] = {key: None for part in load.optimizers for key in part.questions()}
    _read(ranks, answers, source, planner, path)

    def go_on() -> _Told:
        for part in load.optimizers:
            part.answered(answers, load.findings)
        return load.tell()

    return ranks.agree("Comparing the optimizer with the checkpoint", path, go_on)


def _unexpected(told: Sequence[_Told]) -> list[str]:
    """Keys inside an entry of some rank's template that no rank takes."""
    candidates = {key for one in told for key in one.unexpected}
    left = [set(one.unexpected) for one in told]
    return sorted(
        key
        for key in candidates
        if all(key in mine or not _inside(key, one.entries) for one, mine in zip(told, left, strict=True))
    )


def _inside(key: str, entries: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in entries)


def _idle(told: Sequence[_Told]) -> list[str]:
    """Chosen prefixes under which no rank has anything to fill, as with a slip in one: nothing would be loaded."""
    return sorted(set.intersection(*(set(one.idle) for one in told)))


def _judge(
    told: Sequence[_Told], unexpected: list[str], strict: bool, allow_dtype_cast: bool, path: str | None
) -> None:
    missing = sorted({key for one in told for key in one.missing}.union(_idle(told)))
    shapes = {key: pair for one in told for key, pair in one.shapes.items()}
    dtypes = {} if allow_dtype_cast else {key: pair for one in told for key, pair in one.dtypes.items()}
    if not (dtypes or (strict and (missing or unexpected or shapes))):
        return
    pairs = [("shape", shapes), ("dtype", dtypes)]
    parts = [f"missing: {_shown(missing)}"] if missing else []
    parts += [f"unexpected: {_shown(unexpected)}"] if unexpected else []
    for what, found in pairs:
        if found:
            each = [f"{key} is {here} here and {there} there" for key, (here, there) in sorted(found.items())]
            parts.append(f"wrong {what}: {_shown(each)}")
    advice = "strict=False loads what fits"
    if dtypes:
        advice += ", allow_dtype_cast=True casts"
    raise IncompatibleCheckpointError(
        f"{path}: the checkpoint does not fit this state, and nothing was changed; {'; '.join(parts)}. {advice}; keys= "
        "chooses and renames.",
        path=path,
        missing=missing,
        unexpected=unexpected,
        shapes=shapes,
        dtypes=dtypes,
    )


def _shown(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _apply(load: _Load) -> list[str]:
    notes = []
    for part in load.parts:
        if not load.spread.has(part):
            notes += part.apply()
    return [*load.spread.apply(), *notes]


def _fill(report: LoadReport, load: _Load, unexpected: list[str], notes: list[str]) -> LoadReport:
    found = load.findings
    wishes: list[Wish] = found.wishes
    report.loaded = sorted(wish.key for wish in wishes)
    report.missing = sorted(found.missing)
    report.unexpected = unexpected
    report.shapes = sorted(found.shapes)
    report.cast = sorted(found.dtypes)
    report.untouched = sorted({*found.untouched, *found.missing, *found.shapes})
    report.per_rank = dict(load.spread.outcome)
    report.warnings = [*report.warnings, *notes]
    return report
