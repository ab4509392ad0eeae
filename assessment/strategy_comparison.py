"""The cost of a plan's noise, compared with independent noise at the same guarantee.

A mechanism is measured at the noise multiplier that was certified for it. All figures are in clip
norms, on the sum over a lot, for one coordinate:

* ``step``: rms over steps of the standard deviation of the noise injected at a step;
* ``rms`` and ``max``: of the workload's output, over steps. For the prefix sum that is the noise
  in the sum of all updates so far;
* ``buffers``: arrays of the model's size that a trainer stores to generate the noise.

These are utility figures. The guarantee is the assessment's, with its sampler and adjacency. Two
rows are comparable if both protect the same neighbouring data sets, and each holds only if the
trainer samples as its row says.

``compare`` certifies independent noise twice: under the plan's own sampler, and under Poisson
lots of the same size, where it is amplified. At small ε the amplified one often has the smaller
error, because correlated noise pays for every participation of a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from affidavit.assessment.assessment import Assessment, interval
from affidavit.assessment.certification import certify
from affidavit.assessment.charts import (
    Axis,
    Chart,
    Line,
    draw,
)
from affidavit.mechanisms import CorrelatedRun, Correlation, lower
from affidavit.mechanisms.strategies import Errors, Strategy, TooLarge, identity
from affidavit.plan import MalformedPlan, Plan, Reason, RefusedPlan, as_document, plan_from

INDEPENDENT = {"kind": "independent"}
OMITTED_FIELDS = frozenset({"name", "notes", "claim", "epochs", "participation"})
"""The fields of a plan that its variants do not have."""
MAX_POINTS = 400
"""The most steps of a run that a chart shows."""
MAX_COEFFICIENTS = 4096
"""The most coefficients of a recurrence that a document lists; an exported file has all."""
RESULT_FIELDS = ("verdict", "plan_digest", "epsilon", "delta", "confidence", "adjacency",
                 "noise_multiplier", "mu", "reasons", "warnings")  # fmt: skip
"""The fields of the plan's own result that the document repeats."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MechanismCost:
    """One mechanism: its assessment and, if it has noise, the cost of that noise."""

    label: str
    assessment: Assessment | None
    reasons: tuple[Reason, ...]
    sampler: str
    adjacency: str
    noise: dict[str, Any]
    buffers: int | None = None
    step: float | None = None
    errors: Errors | None = None

    @property
    def certified(self) -> bool:
        """Whether the proved bound meets the target."""
        return self.assessment is not None and self.assessment.verdict == "certified"

    @property
    def is_measured(self) -> bool:
        """Whether the mechanism is certified and its error is known."""
        return self.certified and self.errors is not None

    @property
    def rms(self) -> float | None:
        """√(mean over steps of the variance) of the workload's output."""
        return None if self.errors is None else self.errors.rms

    @property
    def max(self) -> float | None:
        """The largest standard deviation of the workload's output at any step."""
        return None if self.errors is None else self.errors.max

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        result = self.assessment
        return {
            "mechanism": self.label,
            "noise": self.noise,
            "sampler": self.sampler,
            "adjacency": self.adjacency,
            "verdict": "refused" if result is None else result.verdict,
            "epsilon": None if result is None else interval(result.epsilon),
            "delta": None if result is None else interval(result.delta),
            "confidence": None if result is None else result.level,
            "noise_multiplier": None if result is None else result.joint,
            "step_noise": self.step,
            "rms_error": self.rms,
            "max_error": self.max,
            "buffers": self.buffers,
            "conditions": [] if result is None else list(result.assumptions[2:]),
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


def measure(label: str, plan: Plan) -> MechanismCost:
    """Certify ``plan``, of one phase, and measure it at its noise."""
    phase = plan.phases[0]
    result = certify(plan, second_opinion=False)
    row = MechanismCost(
        label=label,
        assessment=result,
        reasons=result.reasons,
        sampler=phase.sampling.scheme,
        adjacency=plan.adjacency,
        noise=phase.noise.model_dump(mode="json", exclude_none=True, by_alias=True),
    )
    if result.epsilon is None or result.joint is None:
        return row
    strategy, _ = strategy_of(plan)
    step, errors = _errors(plan, strategy)
    return replace(
        row,
        buffers=strategy.streaming.buffers,
        step=None if step is None else result.joint * step,
        errors=None if errors is None else errors.at_noise(result.joint),
    )


def strategy_of(plan: Plan) -> tuple[Strategy, CorrelatedRun | None]:
    """Return the strategy of a plan of one phase; the identity for independent noise.

    Raises ``RefusedPlan`` if the number of steps is unknown.
    """
    part = lower(plan).phases[0]
    if part.steps is None:
        raise RefusedPlan.with_reason(
            code="steps_open",
            pointer="/steps",
            message="errors of a strategy depend on the number of steps.",
            remedy="Give steps or epochs.",
        )
    if part.correlation is None:
        return identity(part.steps), None
    streamed = part.correlation.at(part.steps)
    return streamed.strategy, streamed


def variant(plan: Plan, steps: int, target: tuple[float, float], **changed: Any) -> Plan:
    """Return ``plan`` with the fields ``changed`` and its noise multipliers left open.

    ``target`` is ε and δ. Raises ``MalformedPlan`` if the plan lacks a field for the sampler.
    """
    document = as_document(plan)
    document = {key: value for key, value in document.items() if key not in OMITTED_FIELDS}
    document |= changed
    document |= {"steps": steps, "target": {"epsilon": target[0], "delta": target[1]}}
    document["releases"] = [
        {key: value for key, value in release.items() if not key.startswith("noise_")}
        for release in document["releases"]
    ]
    return plan_from(document)


def attempt(
    label: str, plan: Plan, steps: int, target: tuple[float, float], **changed: Any
) -> MechanismCost:
    """Measure a ``variant``; the row has the reasons if there is no such plan."""
    try:
        return measure(label, variant(plan, steps, target, **changed))
    except (MalformedPlan, RefusedPlan) as refusal:
        scheme = changed.get("sampling", {}).get("scheme")
        return MechanismCost(
            label=label,
            assessment=None,
            reasons=refusal.reasons,
            sampler=scheme or plan.phases[0].sampling.scheme,
            adjacency=changed.get("adjacency", plan.adjacency),
            noise=changed["noise"],
        )


def _errors(plan: Plan, strategy: Strategy) -> tuple[float | None, Errors | None]:
    """Return the rms of the injected noise and the workload's errors, at unit noise."""
    workload = Correlation(plan=plan, index=0).workload
    try:
        return strategy.injected_noise(), strategy.errors(workload)
    except TooLarge:
        return None, None


@dataclass(frozen=True, kw_only=True)
class StrategyComparison:
    """The costs of a plan's own mechanism, which is the first row, and of independent noise."""

    assessment: Assessment
    strategy: Strategy
    streamed: CorrelatedRun | None
    rows: tuple[MechanismCost, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence for each other certified row that compares its cost with the plan's own."""
        own, *others = self.rows
        result = []
        for other in others:
            if own.rms is None or other.rms is None or not other.certified:
                continue
            ratio = own.rms / other.rms
            mechanism = f"{other.label} noise under {other.sampler} sampling at the same ε"
            result.append(
                f"{mechanism} has the smaller rms error: {other.rms:.4g} against {own.rms:.4g} "
                f"({ratio:.2f} times), if the trainer samples so."
                if ratio > 1
                else f"the rms error is {own.rms:.4g}, {ratio:.2f} times that of {mechanism} "
                f"({other.rms:.4g})."
            )
        return tuple(result)

    def as_document(self) -> dict[str, Any]:
        """Return the JSON document of ``affidavit strategy``."""
        result = self.assessment.as_result()
        streaming, own = self.strategy.streaming, self.rows[0]
        return {
            **{name: result[name] for name in RESULT_FIELDS},
            "strategy": {
                **result.get("strategy", {"kind": "independent"}),
                "steps": self.strategy.steps,
                "certified_as": "independent" if self.streamed is None else self.streamed.route,
                "step_noise": own.step,
                "rms_error_at_noise": own.rms,
                "max_error_at_noise": own.max,
                "streaming": {
                    "form": streaming.form,
                    "buffers": streaming.buffers,
                    "recurrence": streaming.recurrence,
                    "coefficients": list(streaming.coefficients)
                    if len(streaming.coefficients) <= MAX_COEFFICIENTS
                    else None,
                    "scaled": streaming.scaled,
                },
            },
            "comparison": [row.as_dict() for row in self.rows],
            "remarks": list(self.remarks),
        }

    def picture(self) -> str:
        """Return a chart of the error by step, as one SVG with its own colours."""
        lines = tuple(
            Line(name=f"{row.label}, {row.sampler}", points=_points(row))
            for row in self.rows
            if row.errors is not None
        )
        chart = Chart(
            title="Error of the workload, step by step",
            description=" ".join(self.remarks),
            x=Axis(label="step"),
            y=Axis(label="standard deviation (clip norms)", low=0.0),
            marks=lines,
        )
        return draw(chart, width=640, height=400, standalone=True)


def compare(plan: Plan, progress: Progress = lambda _: None) -> StrategyComparison | Assessment:
    """Compare ``plan`` with independent noise, or return its assessment if it has no bound.

    Raises ``RefusedPlan`` unless the plan has one phase and a number of steps.
    """
    if len(plan.phases) > 1:
        raise RefusedPlan.with_reason(
            code="one_phase",
            pointer="/phases",
            message=f"errors are computed for one phase, but the plan has {len(plan.phases)}.",
            remedy="Give a plan of the one phase.",
        )
    if plan.is_open and not plan.asks_for_noise:
        raise RefusedPlan.with_reason(
            code="plan_open",
            message="the plan leaves its steps or its lots open, and errors depend on them.",
            remedy="Give them, or have them solved for by certify first.",
        )
    progress("certifying the plan")
    own = measure("this plan", plan)
    result = own.assessment
    if result is None or result.epsilon is None or result.delta is None:
        assert result is not None
        return result
    strategy, streamed = strategy_of(plan)
    rows = [own]
    target = result.epsilon.upper, result.delta.upper
    if plan.phases[0].noise.kind != "independent":
        progress("certifying independent noise under the same sampler")
        rows.append(attempt("independent", plan, strategy.steps, target, noise=INDEPENDENT))
    sampling = plan.phases[0].sampling
    if sampling.scheme != "poisson" and sampling.lot_size is not None:
        progress("certifying independent noise under Poisson lots")
        poisson = {"scheme": "poisson", "lot_size": sampling.lot_size}
        changed = {"noise": INDEPENDENT, "sampling": poisson}
        rows.append(attempt("independent, amplified", plan, strategy.steps, target, **changed))
    return StrategyComparison(
        assessment=result, strategy=strategy, streamed=streamed, rows=tuple(rows)
    )


def _points(row: MechanismCost) -> tuple[tuple[float, float], ...]:
    assert row.errors is not None
    per_step, places = row.errors.per_step, row.errors.places
    steps = len(per_step)
    shown = np.unique(np.linspace(0, steps - 1, min(steps, MAX_POINTS)).round().astype(int))
    at = shown if places is None else places[shown]
    return tuple(zip((at + 1.0).tolist(), per_step[shown].tolist(), strict=True))
