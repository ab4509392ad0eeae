"""Advice: the mechanisms that meet one budget, each certified.

Every row is a variant of the plan with other noise or another sampler, solved for the noise that
the target needs and certified. Rows are grouped by adjacency: within a group all protect the same
neighbouring data sets, and differ in what the trainer must do; between groups ε means different
things. Under add_remove no mechanism with lots in a fixed order can be certified (a removal moves
the other records), so these are shown under zero_out, in a group of their own.

The Pareto front of a group has the rows that no other row beats in both error and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from affidavit.accountants import decimal_up
from affidavit.assessment.assessment import ReleaseNoise
from affidavit.assessment.certification import certify
from affidavit.assessment.charts import (
    Axis,
    Chart,
    Dots,
    Line,
    draw_panels,
)
from affidavit.assessment.strategy_comparison import (
    INDEPENDENT,
    MechanismCost,
    Progress,
    attempt,
    variant,
)
from affidavit.mechanisms import Correlation, distance_of
from affidavit.mechanisms.strategies import Participation, best_lambda
from affidavit.plan import Plan, RefusedPlan, as_document, plan_from, schedule

MAX_DENSE_STEPS = 1024
"""The most steps for which a dense strategy is optimised."""
GROUP_COUNTS = (2, 4, 8, 16, 32, 64, 128)
"""The numbers of groups tried for cyclic Poisson sampling; a banded strategy has as many bands."""
BIFR_BANDS, INVERSE_BANDS = 64, 4
BLT_BUFFERS = 2
FREE_NOISE_RATIO = 1.001
"""Truncating lots is called free up to this ratio to the noise of lots that are not truncated."""
LOG_AXIS_ERROR_RATIO = 20.0
"""The ratio of errors above which the axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The rows for ε (nats) at δ, grouped by adjacency; the plan's own adjacency is first."""

    epsilon: float
    delta: float
    steps: int
    groups: tuple[tuple[str, tuple[MechanismCost, ...]], ...]

    def front(self, rows: tuple[MechanismCost, ...]) -> tuple[MechanismCost, ...]:
        """Return the Pareto front of ``rows`` in rms error and buffers, ordered by buffers."""
        measured = [row for row in rows if row.is_measured]
        result: list[MechanismCost] = []
        min_rms = math.inf
        for row in sorted(measured, key=lambda row: (row.buffers or 0, row.rms or 0.0)):
            if (rms := row.rms or 0.0) < min_rms:
                result.append(row)
                min_rms = rms
        return tuple(result)

    def as_document(self) -> dict[str, Any]:
        """Return the JSON document of ``affidavit advise``."""
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
        """Return a chart of error against memory, with one panel for each group."""
        charts = [self._chart(adjacency, rows) for adjacency, rows in self.groups]
        title = f"ε = {self.epsilon:g} at δ = {decimal_up(self.delta, 6)}, {self.steps} steps"
        return draw_panels(title, charts, width=560, height=400, columns=1, standalone=True)

    def _chart(self, adjacency: str, rows: tuple[MechanismCost, ...]) -> Chart:
        front = self.front(rows)
        shown = [row for row in rows if row.is_measured]

        def point(row: MechanismCost) -> tuple[float, float]:
            return float((row.buffers or 0) + 1), row.rms or 0.0

        errors = [row.rms or 0.0 for row in shown]
        label = "rms error (clip norms)"
        logarithmic = bool(errors) and max(errors) > LOG_AXIS_ERROR_RATIO * min(errors)
        return Chart(
            title=f"under {adjacency}",
            description="Pareto front: " + "; ".join(row.label for row in front) + ".",
            x=Axis(label="arrays of the model's size for the noise", scale="log"),
            y=Axis(label=label, scale="log") if logarithmic else Axis(label=label, low=0.0),
            marks=(
                Line(name="Pareto front", points=tuple(point(row) for row in front), faint=True),
                Dots(
                    name="certified mechanisms",
                    points=tuple(point(row) for row in shown),
                    labels=tuple(row.label for row in shown),
                ),
            ),
        )


def advise(plan: Plan, progress: Progress = lambda _: None) -> Advice:
    """Certify the mechanisms for the budget of ``plan``.

    Raises ``RefusedPlan`` unless the plan has one phase, a full target, a lot size, and steps or
    epochs.
    """
    query = _query(plan, progress)
    amplified = tuple(_amplified(query))
    groups: tuple[tuple[str, tuple[MechanismCost, ...]], ...]
    if plan.adjacency == "add_remove":
        fixed_order = tuple(_fixed_order(replace(query, adjacency="zero_out")))
        groups = (plan.adjacency, amplified), ("zero_out", fixed_order)
    else:
        groups = ((plan.adjacency, (*amplified, *_fixed_order(query))),)
    epsilon, delta = query.target
    return Advice(epsilon=epsilon, delta=delta, steps=query.steps, groups=groups)


@dataclass(frozen=True, kw_only=True)
class _Query:
    """The parameters that all rows of a group share."""

    plan: Plan
    adjacency: str
    steps: int
    target: tuple[float, float]
    lot: int
    size: int
    progress: Progress

    def row(self, label: str, noise: dict[str, Any], **sampling: Any) -> MechanismCost:
        """Certify one mechanism for the budget; a row that cannot be certified has its reasons."""
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

    def truncated(self, label: str, cap: int | None) -> MechanismCost:
        """Certify independent noise over Poisson lots truncated to ``cap`` records."""
        return self.row(label, INDEPENDENT, scheme="truncated_poisson", max_lot_size=cap)


def _amplified(query: _Query) -> Iterator[MechanismCost]:
    """Yield the plan's own mechanism and those whose sampling amplifies."""
    phase = query.plan.phases[0]
    if phase.noise.kind != "independent":
        noise = phase.noise.model_dump(mode="json", exclude_none=True, by_alias=True)
        sampling = phase.sampling.model_dump(mode="json", exclude_none=True)
        yield query.row(f"as planned ({phase.noise.kind})", noise, **sampling)
    poisson = query.row("independent, amplified", INDEPENDENT, scheme="poisson")
    yield poisson
    if phase.sampling.scheme == "truncated_poisson":
        cap = phase.sampling.max_lot_size
        yield query.truncated(f"independent, cut at {cap}", cap)
        assessed = poisson.assessment if poisson.certified else None
        if assessed is not None and (free := _free_cap(query, assessed.releases)) != cap:
            yield query.truncated(f"independent, cut at {free} at no cost", free)
    yield query.row("independent, in bins", INDEPENDENT, scheme="balls_in_bins")
    taken = round(query.steps * query.lot / query.size)
    if 1 < taken < query.steps and distance_of(query.plan) == 1:
        yield query.row(
            f"independent, {taken} of {query.steps} steps",
            INDEPENDENT,
            scheme="random_allocation",
            lot_size=None,
            participations=taken,
        )
    buffered = {"kind": "blt", "buffers": BLT_BUFFERS}
    yield query.row(f"BLT-{BLT_BUFFERS}, fresh lots", buffered, scheme="poisson")
    yield from _best_groups(query, "banded", lambda groups: {"kind": "bsr", "bands": groups})
    yield from _best_groups(query, "bidiagonal", lambda _: {"kind": "bidiagonal"})


def _free_cap(query: _Query, untruncated: Sequence[ReleaseNoise]) -> int:
    """Return about the least cap at which lots need hardly more noise than untruncated ones."""
    needed = [FREE_NOISE_RATIO * (release.required or 0.0) for release in untruncated]

    def is_free(cap: int) -> bool:
        query.progress(f"lots of at most {cap} records")
        sampling = {"scheme": "truncated_poisson", "lot_size": query.lot, "max_lot_size": cap}
        changed = {"noise": INDEPENDENT, "sampling": sampling, "adjacency": query.adjacency}
        document = as_document(variant(query.plan, query.steps, query.target, **changed))
        for release, noise in zip(document["releases"], needed, strict=True):
            release["noise_multiplier"] = noise
        return certify(plan_from(document), second_opinion=False).verdict == "certified"

    spread = math.sqrt(query.lot)
    low, high = query.lot, min(query.size, query.lot + math.ceil(2 * spread))
    while high < query.size and not is_free(high):
        low, high = high, min(query.size, query.lot + 2 * (high - query.lot))
    while high - low > max(1.0, spread / 20):
        middle = (low + high) // 2
        low, high = (low, middle) if is_free(middle) else (middle, high)
    return high


def _best_groups(
    query: _Query, label: str, noise_for: Callable[[int], dict[str, Any]]
) -> Iterator[MechanismCost]:
    """Yield the best number of groups for cyclic Poisson sampling with the noise ``noise_for``."""
    tried = [
        query.row(
            f"{label}-{groups}, cyclic Poisson",
            noise_for(groups),
            scheme="cyclic_poisson",
            groups=groups,
        )
        for groups in GROUP_COUNTS
        if groups * query.lot <= query.size and groups <= query.steps
    ]
    if measured := [row for row in tried if row.is_measured]:
        yield min(measured, key=lambda row: row.rms or 0.0)
    else:
        yield from tried[:1]


def _fixed_order(query: _Query) -> Iterator[MechanismCost]:
    """Yield mechanisms with lots in one order for all epochs, which nothing amplifies."""
    yield query.row("independent, fixed order", INDEPENDENT, scheme="cyclic")
    lots = max(1, query.size // query.lot)
    turns = Participation.fixed_epoch(participations=-(-query.steps // lots), separation=lots)
    workload = Correlation(plan=query.plan, index=0).workload
    best = round(best_lambda(query.steps, workload, turns), 6)
    yield query.row("bidiagonal", {"kind": "bidiagonal", "lambda": best}, scheme="cyclic")
    for label, kind, most in (
        ("BandInvMF", "banded_inverse", INVERSE_BANDS),
        ("BIFR", "bifr", BIFR_BANDS),
    ):
        bands = min(most, query.steps)
        yield query.row(f"{label}-{bands}", {"kind": kind, "bands": bands}, scheme="cyclic")
    blt = {"kind": "blt", "buffers": BLT_BUFFERS}
    yield query.row(f"BLT-{BLT_BUFFERS}", blt, scheme="cyclic")
    if query.steps <= MAX_DENSE_STEPS:
        yield query.row("dense", {"kind": "dense"}, scheme="cyclic")


def _query(plan: Plan, progress: Progress) -> _Query:
    """Return the parameters of the rows; raises ``RefusedPlan`` if one is missing."""
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
    return _Query(
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
