"""The parameters that a certificate requires of every step of its run, as plain numbers.

A plan may leave its noise, steps, lot size or sampling probability to be solved for. The
certificate carries the plan as requested and, beside it, the solution; ``certified_plan`` joins
the two. A trainer runs this plan and no other.

``Execution`` lists the steps of that plan: for each its phase, the clip norm and the standard
deviation of the noise (on the sum) of every release, and the divisor. A trainer compares itself
with it before it starts, and a run record is checked against it afterwards. A clip schedule
changes the clip norm of a step and leaves the noise as it is.

Guarantees
    * Solved noise is the ``required`` multiplier, digit for digit as signed.
    * A solved sampling probability was rounded down to its digits, so the outward rounding of a
      signed decimal never raises it.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "zero_out", "steps": 3, "dataset": {"size": 9},
...     "sampling": {"scheme": "cyclic", "lot_size": 3}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 4}]})
>>> execution = Execution.of(plan)
>>> execution.steps, execution.at(2).noise_std, execution.at(2).divisor
(3, {'all': 2.0}, '3')
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from affidavit.certificate.assessment import Assessment
from affidavit.mechanisms import noise_multiplier, with_lot_size, with_probability, with_steps
from affidavit.plan import CodedError, Phase, Plan, Release, plan_from, schedule

STEP_OBLIGATIONS = frozenset(
    {
        "sampler_of_the_plan",
        "clip_each_record",
        "every_tensor_in_one_block",
        "noise_once_per_lot",
        "cryptographic_generator",
        "empty_lot_counts",
        "non_finite_is_zero",
        "no_mixing_of_records",
        "charge_every_step",
        "one_lot_for_all_blocks",
        "probes_independent_of_noise",
        "clip_by_the_schedule",
    }
)
"""Obligations that any loop meets whose releases are clipped, summed and noised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequirement:
    """One step: its phase, its place in it, and its public privacy parameters by release.

    ``clip_norm`` is in l2, ``noise_std`` on the sum, and ``divisor`` B, an exact fraction as text.
    """

    phase: int
    place: int
    clip_norm: dict[str, float]
    noise_std: dict[str, float]
    divisor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """All steps of a closed plan, counted from 0; ``lengths`` has those of each phase."""

    plan: Plan
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Execution:
        """Raises ``ValueError`` for a plan that leaves something open."""
        lengths = tuple(_length(plan, phase) for phase in plan.phases)
        return cls(plan=plan, lengths=lengths)

    @property
    def steps(self) -> int:
        """T, of all phases together."""
        return sum(self.lengths)

    @property
    def steps_stand_alone(self) -> bool:
        """Whether each step is a mechanism of its own, on a lot and with noise of its own.

        Then steps of two runs that share no step's number cost together what those of one cost.
        Lots that outlast a step, correlated noise and an error that is fed back bind steps.
        """
        return self.plan.optimizer.name != "dp_dice" and all(
            phase.sampling.scheme == "poisson" and phase.noise.kind == "independent"
            for phase in self.plan.phases
        )

    def at(self, step: int) -> StepRequirement:
        """The requirement of ``step``; raises ``IndexError`` beyond the plan."""
        ends = list(accumulate(self.lengths))
        if not 0 <= step < self.steps:
            raise IndexError(f"the plan has {self.steps} steps; there is no step {step}")
        index = bisect_right(ends, step)
        place = step - (ends[index] - self.lengths[index])
        phase = self.plan.phases[index]
        factor = 1.0 if phase.clip_schedule is None else phase.clip_schedule[place]
        return StepRequirement(
            phase=index,
            place=place,
            clip_norm={release.name: release.clip_norm * factor for release in phase.releases},
            noise_std={item.name: noise_std(item) for item in phase.releases},
            divisor=str(schedule.divisor(self.plan, phase)),
        )

    def phases(self) -> list[dict[str, Any]]:
        """Every phase in the words of a run record."""
        return [
            _described(self.plan, phase, steps)
            for phase, steps in zip(self.plan.phases, self.lengths, strict=True)
        ]


def noise_std(release: Release, clip_norm: float | None = None) -> float:
    """σ_g C_g of the noise on the sum, rounded up; raises ``ValueError`` where it is open.

    C_g is the release's own ``clip_norm`` where none is named.
    """
    return std_of(noise_multiplier(release), clip_norm or release.clip_norm)


def std_of(noise_multiplier: float | Fraction, clip_norm: float) -> float:
    """σC, rounded up, so that equal factors have equal products."""
    exact = Fraction(noise_multiplier) * Fraction(clip_norm)
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def _length(plan: Plan, phase: Phase) -> int:
    result = schedule.steps(plan, phase)
    if result is None or any(not release.has_noise for release in phase.releases):
        raise ValueError("the plan leaves its steps or its noise open")
    if phase.clip_schedule is not None and len(phase.clip_schedule) != result:
        raise ValueError("the clip schedule does not have one factor per step")
    return result


def _described(plan: Plan, phase: Phase, steps: int) -> dict[str, Any]:
    sampling = phase.sampling.model_dump(mode="json", exclude_none=True)
    return {
        "steps": steps,
        "sampling": {**sampling, "probability": str(schedule.sampling_probability(plan, phase))},
        "divisor": str(schedule.divisor(plan, phase)),
        "clipping": phase.clipping,
        "scheduled": phase.clip_schedule is not None,
        "noise": phase.noise.model_dump(mode="json", exclude_none=True, by_alias=True),
        "releases": [
            {
                "name": release.name,
                "count": release.count,
                "clip_norm": release.clip_norm,
                "noise_std": noise_std(release),
            }
            for release in phase.releases
        ],
    }


class PlanNotClosed(ValueError):
    """The certificate lacks what its plan left open, so it allows no run."""


def certified_plan(predicate: dict[str, Any]) -> Plan:
    """The closed plan of a certificate's predicate.

    Raises ``PlanNotClosed``, and ``MalformedPlan`` for a plan of another schema.
    """
    plan = plan_from(predicate["plan"])
    try:
        entry = predicate["sampling"][0]
        if plan.asks_for_lot_size:
            plan = with_lot_size(plan, int(entry["lot_size"]))
        if plan.asks_for_probability:
            plan = with_probability(plan, float(entry["probability"]))
        if plan.asks_for_steps:
            plan = with_steps(plan, int(entry["steps"]))
        if plan.asks_for_noise:
            plan = _with_noise(plan, predicate["noise_multiplier"]["releases"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PlanNotClosed(
            f"the certificate does not say what its plan left open ({error})"
        ) from None
    return plan


def closed_plan(assessment: Assessment) -> Plan:
    """The plan of ``assessment`` with what it left open as certified; raises ``PlanNotClosed``."""
    return certified_plan(
        {
            "plan": assessment.plan,
            "sampling": assessment.sampling,
            "noise_multiplier": assessment.as_result()["noise_multiplier"],
        }
    )


def _with_noise(plan: Plan, solved: list[dict[str, Any]]) -> Plan:
    required = {
        (entry.get("phase", 0), entry["name"]): float(entry["required"]) for entry in solved
    }
    if not all(0 < sigma < math.inf for sigma in required.values()):
        raise ValueError("a noise multiplier is positive")
    return plan.with_noise_multipliers(
        lambda index, release: None if release.has_noise else required[index, release.name]
    )


class NotTrainable(CodedError):
    """A certificate that allows no run."""


def certified_execution(predicate: dict[str, Any], fulfilled: frozenset[str]) -> Execution:
    """The execution that a verified certificate allows a trainer which fulfils ``fulfilled``.

    Raises ``NotTrainable`` for a verdict other than certified, an obligation that is not in
    ``fulfilled``, and a plan that the certificate does not close; ``PlanError`` for a plan of
    another schema.
    """
    verdict = predicate["verdict"]
    if verdict != "certified" or not predicate.get("guarantee"):
        reasons = predicate.get("reasons", [])[:2]
        detail = "; ".join(str(reason.get("message", "")) for reason in reasons)
        raise NotTrainable(
            str(verdict),
            f"the certificate's verdict is {verdict}: nothing may be trained. {detail}".strip(),
            "Correct the plan as the certificate says, and certify it again.",
        )
    unknown = sorted({entry["code"] for entry in predicate["obligations"]} - fulfilled)
    if unknown:
        raise NotTrainable(
            "unknown_obligation",
            f"the certificate requires {', '.join(unknown)}, which this trainer does not support.",
            "Use a trainer that does, or certify a plan without it.",
        )
    try:
        return Execution.of(certified_plan(predicate))
    except ValueError as error:
        raise NotTrainable(
            "open_plan", f"the plan cannot be executed: {error}.", "Certify the plan again."
        ) from None
