"""The parameters that a certificate requires of every step of its run, as plain numbers.

A plan may leave its noise, steps, lot size or sampling probability to be solved for. The
certificate contains the plan as requested and the solution; ``certified_plan`` joins the two. A
trainer runs this plan and no other.

``Execution`` lists the steps of that plan: for each its phase, the clip norm and the standard
deviation of the noise (on the sum) of every release, and the divisor. A trainer compares its
settings with it before it starts, and a run record is checked against it afterwards. A clip
schedule changes the clip norm of a step and leaves the noise as it is; ``ClipAdaptation`` computes
clip norms that follow a quantile of the records' norms.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

from affidavit.assessment.assessment import Assessment
from affidavit.mechanisms import noise_multiplier, with_lot_size, with_probability, with_steps
from affidavit.plan import ClippingQuantile, CodedError, Phase, Plan, Release, plan_from, schedule

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
"""The obligations that a training loop meets by clipping, summing and adding noise as required."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequirement:
    """One step: its phase, its index in the phase, and its public privacy parameters by release.

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
        """Return the execution of ``plan``; raises ``ValueError`` if the plan has unknowns."""
        lengths = tuple(_phase_steps(plan, phase) for phase in plan.phases)
        return cls(plan=plan, lengths=lengths)

    @property
    def steps(self) -> int:
        """T, the steps of all phases together."""
        return sum(self.lengths)

    @property
    def has_independent_steps(self) -> bool:
        """Whether each step is a mechanism of its own, with its own lot and noise.

        Then two runs that share no step number cost together as much as one. Lots kept for several
        steps, correlated noise and error feedback make steps dependent.
        """
        return self.plan.optimizer.name != "dp_dice" and all(
            phase.sampling.scheme == "poisson" and phase.noise.kind == "independent"
            for phase in self.plan.phases
        )

    def at(self, step: int) -> StepRequirement:
        """Return the requirement of ``step``; raises ``IndexError`` beyond the plan."""
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
        """Return every phase as a run record describes it."""
        return [
            _phase_document(self.plan, phase, steps)
            for phase, steps in zip(self.plan.phases, self.lengths, strict=True)
        ]


def noise_std(release: Release, clip_norm: float | None = None) -> float:
    """Return σ_g C_g of the noise on the sum, rounded up; raises ``ValueError`` if it is unknown.

    C_g is ``clip_norm``, by default the release's own.
    """
    return std_of(noise_multiplier(release), clip_norm or release.clip_norm)


def std_of(noise_multiplier: float | Fraction, clip_norm: float) -> float:
    """Return σC, rounded up, so that equal factors have equal products."""
    exact = Fraction(noise_multiplier) * Fraction(clip_norm)
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def _phase_steps(plan: Plan, phase: Phase) -> int:
    result = schedule.steps(plan, phase)
    if result is None or any(not release.has_noise for release in phase.releases):
        raise ValueError("the plan leaves its steps or its noise open")
    if phase.clip_schedule is not None and len(phase.clip_schedule) != result:
        raise ValueError("the clip schedule does not have one factor per step")
    return result


def _phase_document(plan: Plan, phase: Phase, steps: int) -> dict[str, Any]:
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
    """The certificate lacks the solution of its plan's unknowns, so it allows no run."""


def certified_plan(predicate: dict[str, Any]) -> Plan:
    """Return the closed plan of a certificate's predicate.

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
            f"the certificate lacks the solution of its plan's unknowns ({error})"
        ) from None
    return plan


def closed_plan(assessment: Assessment) -> Plan:
    """Return the plan of ``assessment`` with its solution; raises ``PlanNotClosed``."""
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
    """The certificate allows no run."""


def certified_execution(predicate: dict[str, Any], fulfilled: frozenset[str]) -> Execution:
    """Return the execution that a verified certificate allows a trainer.

    ``fulfilled`` are the codes of the obligations that the trainer meets. Raises ``NotTrainable``
    for a verdict other than certified, an obligation that is not in ``fulfilled``, and a plan that
    the certificate does not close; ``PlanError`` for a plan of another schema.
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
    plan = certified_plan(predicate)
    if any(phase.sampling.drop_last is False for phase in plan.phases):
        raise NotTrainable(
            "short_last_lot",
            "the plan keeps a smaller last lot in each epoch, and this trainer draws full lots.",
            "Certify the plan without drop_last: false.",
        )
    try:
        return Execution.of(plan)
    except ValueError as error:
        raise NotTrainable(
            "open_plan", f"the plan cannot be executed: {error}.", "Certify the plan again."
        ) from None


# ---- adaptive clip norms ----------------------------------------------------------------

QUANTILE, LEARNING_RATE = 0.5, 0.2
"""γ and η if the plan gives none, as in the paper."""
MAX_CLIP_NORM_RATIO = 1e6
"""The most by which a clip norm may grow or shrink."""

FLAT = "all"
"""The one block of flat clipping."""


def block_name(release: str, place: int) -> str:
    """Return the name of one block of a release."""
    return f"{release}[{place}]"


@dataclass(kw_only=True, slots=True)
class ClipAdaptation:
    """Adaptive clip norms, which follow a quantile of the records' norms by noisy counts.

    A plan with an ``adaptive_clipping_quantile`` releases at every step, for every block b, how
    many records of the lot have a norm of at most C_b(t), each as +1/2 or -1/2, with noise. Then

        C_b(t+1) = C_b(t) · exp(-η (s_b(t) / B + 1/2 - γ)),

    where s_b is the noisy sum, B the divisor of the step, γ the quantile and η the learning rate.
    The noise of a block is its multiplier times C_b(t). All of it follows from released values, so
    that a run record can be checked against it.

    ``factors`` is C_b(t) over C_b(0), by block. ``blocks`` maps every name for which a run record
    gives a clip norm to its block: a block itself, or a release under flat clipping.

    >>> from affidavit.plan import plan_from
    >>> plan = plan_from({"version": 1, "adjacency": "add_remove", "steps": 3,
    ...     "dataset": {"size": 90}, "target": {"delta": 1e-5},
    ...     "sampling": {"scheme": "poisson", "lot_size": 9},
    ...     "releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 4}],
    ...     "extra": [{"kind": "adaptive_clipping_quantile", "name": "clip", "noise_std": 1}]})
    >>> adaptation, execution = ClipAdaptation.of(plan), Execution.of(plan)
    >>> adaptation.at(execution.at(0)).noise_std
    {'all[0]': 2.0}
    >>> adaptation.update({"all[0]": -4.5}, execution.at(0))  # no norm is within: C grows
    >>> round(adaptation.at(execution.at(1)).clip_norm["all[0]"], 4)
    0.5526

    Reference: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871, Algorithm 1.
    """

    plan: Plan
    event: ClippingQuantile
    blocks: dict[str, str]
    releases: dict[str, str]
    factors: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> ClipAdaptation | None:
        """Return the adaptation of ``plan``, or None if its clip norms are fixed.

        Raises ``ValueError`` unless the plan has one count for each clip norm.
        """
        events = [event for event in plan.extra if isinstance(event, ClippingQuantile)]
        if not events:
            return None
        phase = plan.phases[0]
        releases = {
            name: release.name
            for release in phase.releases
            for name in (
                [release.name]
                if phase.clipping == "flat"
                else [block_name(release.name, place) for place in range(release.count)]
            )
        }
        blocks = {name: FLAT if phase.clipping == "flat" else name for name in releases}
        needed = len(set(blocks.values()))
        if len(events) > 1 or events[0].count != needed:
            raise ValueError(
                f"{sum(event.count for event in events)} counts steer the {needed} clip norms of "
                f"the plan. Give one adaptive_clipping_quantile with count: {needed}"
            )
        if any(item.clip_schedule is not None for item in plan.phases):
            raise ValueError(
                "adaptive clip norms cannot follow a schedule. Remove clip_schedule or "
                "adaptive_clipping_quantile"
            )
        return cls(
            plan=plan,
            event=events[0],
            blocks=blocks,
            releases=releases,
            factors=dict.fromkeys(blocks.values(), 1.0),
        )

    def at(self, required: StepRequirement) -> StepRequirement:
        """Return ``required`` with the current clip norms and the noise that they need."""
        norms = {
            name: self._release(name, required).clip_norm * self.factors[block]
            for name, block in self.blocks.items()
        }
        return replace(
            required,
            clip_norm=norms,
            noise_std={name: self.noise_for(name, norm, required) for name, norm in norms.items()},
        )

    def noise_for(self, name: str, clip_norm: float, required: StepRequirement) -> float:
        """Return the least standard deviation of the noise at ``clip_norm``, rounded up."""
        return noise_std(self._release(name, required), clip_norm)

    def _release(self, name: str, required: StepRequirement) -> Release:
        releases = self.plan.phases[required.phase].releases
        (release,) = (item for item in releases if item.name == self.releases[name])
        return release

    def update(self, sums: Mapping[str, float], required: StepRequirement) -> None:
        """Update the clip norms by the noisy ``sums`` of a step, by block, in records."""
        quantile = QUANTILE if self.event.quantile is None else self.event.quantile
        rate = self.event.learning_rate or LEARNING_RATE
        divisor = float(Fraction(required.divisor))
        for block, before in self.factors.items():
            # Larger exponents could overflow; the factor ends at its bound either way.
            exponent = max(-50.0, min(50.0, rate * (sums[block] / divisor + 0.5 - quantile)))
            factor = before * math.exp(-exponent)
            self.factors[block] = min(MAX_CLIP_NORM_RATIO, max(1 / MAX_CLIP_NORM_RATIO, factor))
