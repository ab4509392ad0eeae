"""Advise: the mechanisms that meet one budget, side by side, each certified.

Every row is a plan of its own, the given one with other noise or another sampler, solved for the
noise that the target needs and certified. Rows fall into groups by adjacency: within a
group all protect the same neighbouring data sets, and differ in what the trainer must do;
between groups ε means different things. Under add_remove no mechanism with lots in a fixed
order can be certified (a removal moves the other records), so these are shown under
zero_out, in a group of their own.

The Pareto front of a group is what no other row of it beats in both error and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from affidavit.certificate.assessment import ReleaseNoise
from affidavit.certificate.certification import certify
from affidavit.certificate.charts import Axis, Chart, Dots, Line, draw_panels
from affidavit.certificate.strategy_comparison import (
    INDEPENDENT,
    MechanismCost,
    Progress,
    attempt,
    variant,
)
from affidavit.mechanisms import Correlation
from affidavit.mechanisms.strategies import Participation, best_lambda
from affidavit.plan import Plan, RefusedPlan, as_document, plan_from, schedule

MAX_DENSE = 1024
"""Steps up to which optimising a dense strategy is waited for."""
GROUPS = (2, 4, 8, 16, 32, 64, 128)
"""Groups tried for cyclic Poisson sampling; a banded strategy has as many bands."""
BISR_BANDS = 64
BUFFERS = 2
FREE = 1.001
"""Of the noise of lots that are never cut, what cut ones may need to cost nothing."""
FAR_APART = 20.0
"""Ratio of errors above which they are drawn by powers of ten."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The rows for ε (nats) at δ, in groups by adjacency; the plan's own adjacency first."""

    epsilon: float
    delta: float
    steps: int
    groups: tuple[tuple[str, tuple[MechanismCost, ...]], ...]

    def front(self, rows: tuple[MechanismCost, ...]) -> tuple[MechanismCost, ...]:
        """The certified rows that no other beats in both rms error and buffers, by buffers."""
        known = [row for row in rows if row.is_measured]
        result: list[MechanismCost] = []
        least = math.inf
        for row in sorted(known, key=lambda row: (row.buffers or 0, row.rms or 0.0)):
            if (rms := row.rms or 0.0) < least:
                result.append(row)
                least = rms
        return tuple(result)

    def as_document(self) -> dict[str, Any]:
        """The JSON document of ``affidavit advise``."""
        return {
            "target": {"epsilon": self.epsilon, "delta": self.delta},
            "steps": self.steps,
            "groups": [
                {
                    "adjacency": adjacency,
                    "mechanisms": [row.as_dict() for row in rows],
                    "pareto": [row.label for row in self.front(rows)],
                }
                for adjacency, rows in self.groups
            ],
        }

    @property
    def certified(self) -> bool:
        """Whether any mechanism meets the budget under the plan's own adjacency."""
        return any(row.certified for row in self.groups[0][1])

    def picture(self) -> str:
        """Error against memory, one panel a group, with its front."""
        charts = [self._chart(adjacency, rows) for adjacency, rows in self.groups]
        title = f"ε = {self.epsilon:g} at δ = {self.delta:g}, {self.steps} steps"
        return draw_panels(title, charts, width=560, height=400, columns=1, standalone=True)

    def _chart(self, adjacency: str, rows: tuple[MechanismCost, ...]) -> Chart:
        front = self.front(rows)
        shown = [row for row in rows if row.is_measured]

        def point(row: MechanismCost) -> tuple[float, float]:
            return float((row.buffers or 0) + 1), row.rms or 0.0

        return Chart(
            title=f"under {adjacency}",
            description="Pareto front: " + "; ".join(row.label for row in front) + ".",
            x=Axis(label="arrays of the model's size for the noise", scale="log"),
            y=_error_axis([row.rms or 0.0 for row in shown]),
            marks=(
                Line(name="Pareto front", points=tuple(point(row) for row in front), faint=True),
                Dots(
                    name="certified mechanisms",
                    points=tuple(point(row) for row in shown),
                    labels=tuple(row.label for row in shown),
                ),
            ),
        )


def _error_axis(errors: list[float]) -> Axis:
    """From zero, or by powers of ten where one mechanism would press the others together."""
    far = bool(errors) and max(errors) > FAR_APART * min(errors)
    if far:
        return Axis(label="rms error (clip norms)", scale="log")
    return Axis(label="rms error (clip norms)", low=0.0)


def advise(plan: Plan, progress: Progress = lambda _: None) -> Advice:
    """The mechanisms for the budget of ``plan``; raises ``RefusedPlan`` if it has none.

    The plan has one phase, a full target, a lot size, and steps or epochs.
    """
    bench = _bench(plan, progress)
    groups = [(plan.adjacency, tuple(_amplified(bench)))]
    if plan.adjacency == "add_remove":
        groups.append(("zero_out", tuple(_fixed_order(replace(bench, adjacency="zero_out")))))
    else:
        groups = [(plan.adjacency, (*groups[0][1], *_fixed_order(bench)))]
    return Advice(
        epsilon=bench.target[0], delta=bench.target[1], steps=bench.steps, groups=tuple(groups)
    )


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What all rows of a group share."""

    plan: Plan
    adjacency: str
    steps: int
    target: tuple[float, float]
    lot: int
    size: int
    progress: Progress

    def row(self, label: str, noise: dict[str, Any], **sampling: Any) -> MechanismCost:
        """One mechanism, certified for the budget, or the reasons why it is not."""
        self.progress(f"{label}, {self.adjacency}")
        return attempt(
            label,
            self.plan,
            self.steps,
            self.target,
            noise=noise,
            sampling={"lot_size": self.lot, **sampling},
            adjacency=self.adjacency,
        )

    def cut(self, label: str, cap: int | None) -> MechanismCost:
        """Independent noise over Poisson lots that are cut to ``cap`` records."""
        return self.row(label, INDEPENDENT, scheme="truncated_poisson", max_lot_size=cap)


def _amplified(bench: _Bench) -> Iterator[MechanismCost]:
    """The plan's own mechanism, and those whose sampling amplifies."""
    phase = bench.plan.phases[0]
    if phase.noise.kind != "independent":
        noise = phase.noise.model_dump(mode="json", exclude_none=True, by_alias=True)
        sampling = phase.sampling.model_dump(mode="json", exclude_none=True)
        yield bench.row(f"as planned ({phase.noise.kind})", noise, **sampling)
    poisson = bench.row("independent, amplified", INDEPENDENT, scheme="poisson")
    yield poisson
    if phase.sampling.scheme == "truncated_poisson":
        cap = phase.sampling.max_lot_size
        yield bench.cut(f"independent, cut at {cap}", cap)
        assessed = poisson.assessment if poisson.certified else None
        if assessed is not None and (free := _free_cap(bench, assessed.releases)) != cap:
            yield bench.cut(f"independent, cut at {free} at no cost", free)
    yield bench.row("independent, in bins", INDEPENDENT, scheme="balls_in_bins")
    buffered = {"kind": "blt", "buffers": BUFFERS}
    yield bench.row(f"BLT-{BUFFERS}, fresh lots", buffered, scheme="poisson")
    grouped: dict[str, Callable[[int], dict[str, Any]]] = {
        "banded": lambda groups: {"kind": "bsr", "bands": groups},
        "bidiagonal": lambda _: {"kind": "bidiagonal"},
    }
    for label, noise_for in grouped.items():
        best = _best_groups(bench, label, noise_for)
        if best is not None:
            yield best


def _free_cap(bench: _Bench, uncut: Sequence[ReleaseNoise]) -> int:
    """About the least cap at which lots need hardly more noise than ``uncut`` ones."""
    needed = [FREE * (release.required or 0.0) for release in uncut]

    def is_free(cap: int) -> bool:
        bench.progress(f"lots of at most {cap} records")
        sampling = {"scheme": "truncated_poisson", "lot_size": bench.lot, "max_lot_size": cap}
        changed = {"noise": INDEPENDENT, "sampling": sampling, "adjacency": bench.adjacency}
        document = as_document(variant(bench.plan, bench.steps, bench.target, **changed))
        for release, noise in zip(document["releases"], needed, strict=True):
            release["noise_multiplier"] = noise
        return certify(plan_from(document), second_opinion=False).verdict == "certified"

    spread = math.sqrt(bench.lot)
    low, high = bench.lot, min(bench.size, bench.lot + math.ceil(2 * spread))
    while high < bench.size and not is_free(high):
        low, high = high, min(bench.size, bench.lot + 2 * (high - bench.lot))
    while high - low > max(1.0, spread / 20):
        middle = (low + high) // 2
        low, high = (low, middle) if is_free(middle) else (middle, high)
    return high


def _best_groups(
    bench: _Bench, label: str, noise_for: Callable[[int], dict[str, Any]]
) -> MechanismCost | None:
    """The best number of groups for cyclic Poisson sampling, with ``noise_for`` each."""
    tried = [
        bench.row(
            f"{label}-{groups}, cyclic Poisson",
            noise_for(groups),
            scheme="cyclic_poisson",
            groups=groups,
        )
        for groups in GROUPS
        if groups * bench.lot <= bench.size and groups <= bench.steps
    ]
    known = [row for row in tried if row.is_measured] or tried[:1]
    return min(known, key=lambda row: row.rms or 0.0, default=None)


def _fixed_order(bench: _Bench) -> Iterator[MechanismCost]:
    """Lots in one order for all epochs, which nothing amplifies."""
    yield bench.row("independent, fixed order", INDEPENDENT, scheme="cyclic")
    best = _best_lambda(bench)
    yield bench.row("bidiagonal", {"kind": "bidiagonal", "lambda": best}, scheme="cyclic")
    bands = min(BISR_BANDS, bench.steps)
    yield bench.row(f"BISR-{bands}", {"kind": "bisr", "bands": bands}, scheme="cyclic")
    yield bench.row(f"BLT-{BUFFERS}", {"kind": "blt", "buffers": BUFFERS}, scheme="cyclic")
    if bench.steps <= MAX_DENSE:
        yield bench.row("dense", {"kind": "dense"}, scheme="cyclic")


def _best_lambda(bench: _Bench) -> float:
    """λ for k passes in one order, to the digits that a plan states."""
    lots = max(1, bench.size // bench.lot)
    turns = Participation.fixed_epoch(participations=-(-bench.steps // lots), separation=lots)
    workload = Correlation(plan=bench.plan, index=0).workload
    return round(best_lambda(bench.steps, workload, turns), 6)


def _bench(plan: Plan, progress: Progress) -> _Bench:
    """What is compared for ``plan``; raises ``RefusedPlan`` for what is missing."""
    epsilon, delta = plan.target.epsilon, plan.target.delta
    if len(plan.phases) > 1:
        raise _missing("/phases", "the plan has several phases.", "Give a plan of one phase.")
    if epsilon is None or delta is None:
        raise _missing("/target", "a budget needs both ε and δ.", "Give both in target.")
    lot, size = plan.phases[0].sampling.lot_size, plan.dataset.size
    if lot is None or size is None:
        raise _missing(
            "/sampling",
            "comparing samplers needs a lot size and a data set size.",
            "Give sampling.lot_size and dataset.size.",
        )
    steps = schedule.steps(plan, plan.phases[0])
    if steps is None:
        raise _missing("/steps", "the steps are open.", "Give steps or epochs.")
    return _Bench(
        plan=plan,
        adjacency=plan.adjacency,
        steps=steps,
        target=(epsilon, delta),
        lot=lot,
        size=size,
        progress=progress,
    )


def _missing(pointer: str, message: str, remedy: str) -> RefusedPlan:
    return RefusedPlan.with_reason(
        code="no_budget", pointer=pointer, message=message, remedy=remedy
    )
