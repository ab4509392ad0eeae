"""Measured: what the noise of a plan costs a run, once it is certified what it buys.

A mechanism is measured at the noise multiplier that was certified for it, never at one that
is hoped for. Everything is in clip norms, on the sum over a lot, one coordinate:

* ``step``: rms over steps of the standard deviation of the noise injected at a step;
* ``rms`` and ``max``: of the workload's output, over steps. For the prefix sum that is the noise
  in the sum of all updates so far, which is what training feels;
* ``buffers``: arrays of the model's size that a trainer keeps to generate the noise.

These are figures to choose by. The guarantee is the assessment's, with its sampler and its
adjacency; two rows are comparable where both protect the same neighbouring data sets, and
each only if the trainer samples as its row says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affidavit.certificate.assessment import Assessment, interval
from affidavit.certificate.certification import certify
from affidavit.mechanisms import Correlation, Streamed, lower
from affidavit.mechanisms.strategies import LARGEST_ERROR, Strategy, TooLarge, identity
from affidavit.plan import MalformedPlan, Plan, Reason, RefusedPlan, as_document, plan_from

Array = NDArray[np.float64]

INDEPENDENT = {"kind": "independent"}
LEFT_OUT = frozenset({"name", "notes", "claim", "epochs", "participation"})
"""Fields of a plan that its variants do not share."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One mechanism: its certificate's content and, where it has noise, what that costs."""

    label: str
    assessment: Assessment | None
    reasons: tuple[Reason, ...]
    sampler: str
    adjacency: str
    noise: dict[str, Any]
    buffers: int | None = None
    step: float | None = None
    per_step: Array | None = None

    @property
    def certified(self) -> bool:
        """Whether its target is met by the proved bound."""
        return self.assessment is not None and self.assessment.verdict == "certified"

    @property
    def rms(self) -> float | None:
        """√(mean over steps of the variance) of the workload's output."""
        return None if self.per_step is None else float(np.sqrt(np.mean(self.per_step**2)))

    @property
    def max(self) -> float | None:
        """The largest standard deviation of the workload's output at any step."""
        return None if self.per_step is None else float(np.max(self.per_step))

    def as_dict(self) -> dict[str, Any]:
        """The row of a document."""
        found = self.assessment
        return {
            "mechanism": self.label,
            "noise": self.noise,
            "sampler": self.sampler,
            "adjacency": self.adjacency,
            "verdict": "refused" if found is None else found.verdict,
            "epsilon": None if found is None else interval(found.epsilon),
            "delta": None if found is None else interval(found.delta),
            "confidence": None
            if found is None or found.confidence is None
            else found.confidence.level,
            "noise_multiplier": None if found is None else found.joint,
            "step_noise": self.step,
            "rms_error": self.rms,
            "max_error": self.max,
            "buffers": self.buffers,
            "conditions": [] if found is None else list(found.assumptions[2:]),
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


def measure(label: str, plan: Plan) -> Measured:
    """``plan`` of one phase, certified and measured at the noise that was found or given."""
    phase = plan.phases[0]
    found = certify(plan, second_opinion=False)
    row = Measured(
        label=label,
        assessment=found,
        reasons=found.reasons,
        sampler=phase.sampling.scheme,
        adjacency=plan.adjacency,
        noise=phase.noise.model_dump(mode="json", exclude_none=True, by_alias=True),
    )
    if found.epsilon is None or found.joint is None:
        return row
    strategy, _ = strategy_of(plan)
    step, per_step = _errors(plan, strategy)
    return replace(
        row,
        buffers=strategy.streaming.buffers,
        step=None if step is None else found.joint * step,
        per_step=None if per_step is None else found.joint * per_step,
    )


def strategy_of(plan: Plan) -> tuple[Strategy, Streamed | None]:
    """The strategy of a plan of one phase; the identity where its noise is independent.

    Raises ``RefusedPlan``.
    """
    part = lower(plan).phases[0]
    if part.steps is None:
        raise RefusedPlan(
            Reason(
                code="steps_open",
                pointer="/steps",
                message="the errors of a strategy need its number of steps.",
                remedy="Give steps or epochs.",
            )
        )
    if part.correlation is None:
        return identity(part.steps), None
    streamed = part.correlation.at(part.steps)
    return streamed.strategy, streamed


def variant(
    plan: Plan,
    steps: int,
    target: tuple[float, float],
    *,
    noise: dict[str, Any],
    sampling: dict[str, Any] | None = None,
    adjacency: str | None = None,
) -> Plan:
    """``plan`` with other noise and its multipliers left open, for ε and δ of ``target``.

    Raises ``MalformedPlan`` where the plan lacks what the sampler needs.
    """
    document = {key: value for key, value in as_document(plan).items() if key not in LEFT_OUT}
    document["steps"] = steps
    document["noise"] = noise
    if sampling is not None:
        document["sampling"] = sampling
    if adjacency is not None:
        document["adjacency"] = adjacency
    document["target"] = {"epsilon": target[0], "delta": target[1]}
    document["releases"] = [
        {key: value for key, value in release.items() if not key.startswith("noise_")}
        for release in document["releases"]
    ]
    return plan_from(document)


def attempt(
    label: str,
    plan: Plan,
    steps: int,
    target: tuple[float, float],
    *,
    noise: dict[str, Any],
    sampling: dict[str, Any] | None = None,
    adjacency: str | None = None,
) -> Measured:
    """``variant``, measured; a row that says why not where there is no such plan."""
    try:
        return measure(
            label,
            variant(plan, steps, target, noise=noise, sampling=sampling, adjacency=adjacency),
        )
    except (MalformedPlan, RefusedPlan) as refusal:
        scheme = None if sampling is None else sampling.get("scheme")
        return Measured(
            label=label,
            assessment=None,
            reasons=refusal.reasons,
            sampler=scheme or plan.phases[0].sampling.scheme,
            adjacency=adjacency or plan.adjacency,
            noise=noise,
        )


def _errors(plan: Plan, strategy: Strategy) -> tuple[float | None, Array | None]:
    """rms of the injected noise and the workload's error step by step, at unit noise."""
    workload = Correlation(plan=plan, index=0).workload
    try:
        per_step = strategy.errors(workload).per_step
    except TooLarge:
        return None, None
    return float(np.sqrt(np.mean(_variances(strategy)))), per_step


def _variances(strategy: Strategy) -> Array:
    """Σ_j N[t, j]² for each step t."""
    first = strategy.noise_coefficients
    if first is not None:
        return np.asarray(np.cumsum(first**2))
    steps = strategy.steps
    if steps > LARGEST_ERROR:
        raise TooLarge(f"noise over {steps} steps without Toeplitz structure")
    found = np.zeros(steps)
    width = max(1, 4_000_000 // steps)
    for start in range(0, steps, width):
        found += np.sum(strategy.noise_columns(start, min(start + width, steps)) ** 2, axis=1)
    return found
