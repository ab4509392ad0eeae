"""Comparison: one plan's strategy beside independent noise at the same guarantee.

Independent noise is certified twice: under the plan's own sampler, and under Poisson lots of
the same size, where it is amplified. At small ε the amplified one often has the smaller
error, because correlated noise pays for every participation of a record; a report that
compares correlated noise with unamplified noise alone hides that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.charts import Axis, Chart, Line, draw
from affidavit.certificate.measured import (
    INDEPENDENT,
    Measured,
    attempt,
    measure,
    strategy_of,
)
from affidavit.mechanisms import Streamed
from affidavit.mechanisms.strategies import Strategy
from affidavit.plan import Plan, Reason, RefusedPlan

MOST_POINTS = 400
"""Steps drawn of a long run."""
MOST_COEFFICIENTS = 4096
"""Coefficients of a recurrence written into a document; a file holds more."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan's own mechanism, first, and what independent noise would cost."""

    assessment: Assessment
    strategy: Strategy
    streamed: Streamed | None
    rows: tuple[Measured, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What each other row that is certified costs beside the plan's own, in words."""
        return tuple(_remarks(self.rows))

    def as_document(self) -> dict[str, Any]:
        """The JSON document of ``affidavit strategy``."""
        result = self.assessment.as_result()
        streaming, own = self.strategy.streaming, self.rows[0]
        return {
            "verdict": result["verdict"],
            "plan_digest": result["plan_digest"],
            "epsilon": result["epsilon"],
            "delta": result["delta"],
            "confidence": result["confidence"],
            "adjacency": result["adjacency"],
            "noise_multiplier": result["noise_multiplier"],
            "mu": result["mu"],
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
                    if len(streaming.coefficients) <= MOST_COEFFICIENTS
                    else None,
                    "scaled": streaming.scaled,
                },
            },
            "comparison": [row.as_dict() for row in self.rows],
            "remarks": list(self.remarks),
            "reasons": result["reasons"],
            "warnings": result["warnings"],
        }

    def picture(self) -> str:
        """The error step by step, as one SVG with its own colours."""
        lines = tuple(
            Line(name=f"{row.label}, {row.sampler}", points=_points(row))
            for row in self.rows
            if row.per_step is not None
        )
        chart = Chart(
            title="Error of the workload, step by step",
            description=" ".join(self.remarks),
            x=Axis(label="step"),
            y=Axis(label="standard deviation (clip norms)", low=0.0),
            marks=lines,
        )
        return draw(chart, width=640, height=400, standalone=True)


def compare(plan: Plan, progress: Progress = lambda _: None) -> Comparison | Assessment:
    """``plan`` of one phase beside independent noise; its assessment where that is refused.

    Raises ``RefusedPlan`` where the plan is not of one phase or leaves its steps open.
    """
    if len(plan.phases) > 1:
        raise RefusedPlan(
            Reason(
                code="one_phase",
                pointer="/phases",
                message="the errors of a strategy are those of one phase, and the plan has "
                f"{len(plan.phases)}.",
                remedy="Give a plan of the one phase.",
            )
        )
    if plan.is_open and not plan.asks_for_noise:
        raise RefusedPlan(
            Reason(
                code="plan_open",
                pointer="",
                message="the plan leaves its steps or its lots open, and errors depend on them.",
                remedy="Give them, or have them solved for by certify first.",
            )
        )
    progress("certifying the plan")
    own = measure("this plan", plan)
    found = own.assessment
    if found is None or found.epsilon is None or found.delta is None:
        assert found is not None
        return found
    strategy, streamed = strategy_of(plan)
    rows = [own]
    target = found.epsilon.upper, found.delta.upper
    if plan.phases[0].noise.kind != "independent":
        progress("certifying independent noise under the same sampler")
        rows.append(attempt("independent", plan, strategy.steps, target, noise=INDEPENDENT))
    sampling = plan.phases[0].sampling
    if sampling.scheme != "poisson" and sampling.lot_size is not None:
        progress("certifying independent noise under Poisson lots")
        poisson = {"scheme": "poisson", "lot_size": sampling.lot_size}
        rows.append(
            attempt(
                "independent, amplified",
                plan,
                strategy.steps,
                target,
                noise=INDEPENDENT,
                sampling=poisson,
            )
        )
    return Comparison(
        assessment=found,
        strategy=strategy,
        streamed=streamed,
        rows=tuple(rows),
    )


def _remarks(rows: tuple[Measured, ...]) -> list[str]:
    own, others = rows[0], rows[1:]
    found = []
    for other in others:
        if own.rms is None or other.rms is None or not other.certified:
            continue
        ratio = own.rms / other.rms
        how = f"{other.label} noise under {other.sampler} sampling at the same ε"
        if ratio > 1:
            found.append(
                f"{how} has the smaller rms error: {other.rms:.4g} against {own.rms:.4g} "
                f"({ratio:.2f} times). It wins here, if the trainer samples so."
            )
        else:
            found.append(
                f"the rms error is {own.rms:.4g}, {ratio:.2f} times that of {how} "
                f"({other.rms:.4g})."
            )
    return found


def _points(row: Measured) -> tuple[tuple[float, float], ...]:
    assert row.per_step is not None
    steps = len(row.per_step)
    shown = np.unique(np.linspace(0, steps - 1, min(steps, MOST_POINTS)).round().astype(int))
    return tuple((float(step + 1), float(row.per_step[step])) for step in shown)
