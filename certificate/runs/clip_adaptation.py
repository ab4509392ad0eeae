"""Adaptive clip norms: they follow a quantile of the records' norms by each step's noisy counts.

A plan with an ``adaptive_clipping_quantile`` releases at every step, for every block b, how many
records of the lot have a norm of at most C_b(t), each as +1/2 or -1/2, with noise. From that

    C_b(t+1) = C_b(t) · exp(-η (s_b(t) / B + 1/2 - γ)),

s_b the noisy sum, B the divisor of the step, γ the quantile and η the learning rate. The noise of
a block is its multiplier times C_b(t). All of it follows from released values, so that a record
of a run can be checked against it.

>>> from affidavit.certificate import Execution
>>> from affidavit.plan import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "add_remove", "steps": 3, "dataset": {"size": 90},
...     "sampling": {"scheme": "poisson", "lot_size": 9}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 4}],
...     "extra": [{"kind": "adaptive_clipping_quantile", "name": "clip", "noise_std": 1}]})
>>> adaptation, execution = ClipAdaptation.of(plan), Execution.of(plan)
>>> adaptation.at(execution.at(0)).noise_std
{'all[0]': 2.0}
>>> adaptation.follow({"all[0]": -4.5}, execution.at(0))  # nobody is within: the norm grows
>>> round(adaptation.at(execution.at(1)).clip_norm["all[0]"], 4)
0.5526

Reference: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871, Algorithm 1 (γ = 0.5 and
η = 0.2, its values, where a plan gives none).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from affidavit.certificate.runs.step_requirements import StepRequirement, noise_std
from affidavit.plan import ClippingQuantile, Plan

QUANTILE = 0.5
LEARNING_RATE = 0.2
FURTHEST = 1e6
"""How many times its first value a clip norm may become, and how much less."""

FLAT = "all"
"""The one block of flat clipping."""


def block_name(release: str, place: int) -> str:
    """The name of one block of a release."""
    return f"{release}[{place}]"


@dataclass(kw_only=True, slots=True)
class ClipAdaptation:
    """The current clip norms of a run; ``factors`` is C_b(t) over C_b(0), by block.

    ``blocks`` has the block of every name that a run record gives a clip norm for: blocks
    themselves, or releases under flat clipping, which have one norm together.
    """

    plan: Plan
    event: ClippingQuantile
    blocks: dict[str, str]
    releases: dict[str, str]
    factors: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> ClipAdaptation | None:
        """None where clip norms are fixed.

        Raises ``ValueError`` for a plan that has not one count for each clip norm.
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
        """``required`` with the current clip norms and the noise that they need."""
        of = {release.name: release for release in self.plan.phases[required.phase].releases}
        norms = {
            name: of[release].clip_norm * self.factors[self.blocks[name]]
            for name, release in self.releases.items()
        }
        return replace(
            required,
            clip_norm=norms,
            noise_std={name: self.noise_for(name, norm, required) for name, norm in norms.items()},
        )

    def noise_for(self, name: str, clip_norm: float, required: StepRequirement) -> float:
        """The least deviation of the noise beside ``clip_norm``, rounded up."""
        releases = self.plan.phases[required.phase].releases
        (release,) = (item for item in releases if item.name == self.releases[name])
        return noise_std(release, clip_norm)

    def follow(self, sums: Mapping[str, float], required: StepRequirement) -> None:
        """Take the noisy ``sums`` of a step, by block, in records."""
        quantile = QUANTILE if self.event.quantile is None else self.event.quantile
        rate = self.event.learning_rate or LEARNING_RATE
        divisor = float(Fraction(required.divisor))
        for block, before in self.factors.items():
            # Far off, exp would overflow; the factor ends at its bound either way.
            distance = max(-50.0, min(50.0, rate * (sums[block] / divisor + 0.5 - quantile)))
            self.factors[block] = min(FURTHEST, max(1 / FURTHEST, before * math.exp(-distance)))
