"""Lowering: from a plan to the events that an accountant counts, or to a refusal.

``lower`` decides everything that does not depend on the numbers still open (the noise of
a plan that is solved for, or its steps); ``Lowered.event`` fills those in.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "replace_one", "steps": 10,
...     "sampling": {"scheme": "full_batch"}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}]})
>>> lower(plan).event().events
(Repeated(event=Gaussian(noise_multiplier=2.0), count=10),)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from affidavit.mechanisms.additional_releases import AdditionalEvents, lower_additional_releases
from affidavit.mechanisms.catalogue import mechanism
from affidavit.mechanisms.joint_gaussian import add_same_lot_blocks, joint_noise_multiplier
from affidavit.mechanisms.protocol import Mechanism, WholeRun
from affidavit.mechanisms.samplers import SCHEMES, Sampled, distance_of, is_amplified, sample
from affidavit.plan import (
    ChainOfNeighbours,
    Composed,
    EitherBound,
    Event,
    Gaussian,
    MalformedPlan,
    Plan,
    RandomAllocationGaussian,
    Reason,
    RefusedPlan,
    Repeated,
    ReplacedAllocationGaussian,
    ShuffledEpoch,
    alternatives,
    as_document,
    plan_from,
    schedule,
    with_fields,
)

if TYPE_CHECKING:
    from affidavit.mechanisms.correlation import Correlation


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredPhase:
    """One phase: its sampler, and the steps and joint noise multiplier if they are given.

    ``whole`` is the phase as one Gaussian mechanism, where a step is not released by itself; it
    then stands in for the sampler's events.
    ``correlation`` does so where the noise is correlated across steps.
    """

    sampled: Sampled
    steps: int | None
    joint: float | None
    whole: WholeRun | None = None
    correlation: Correlation | None = None

    def event(self, joint: float, steps: int | None) -> Event:
        """The phase's event at a joint noise multiplier σ_joint, and at ``steps`` where left open.

        Raises ``ValueError`` where neither the plan nor the caller gives the steps.
        """
        length = self.steps if self.steps is not None else steps
        if length is None:
            raise ValueError("the plan leaves its steps open; give steps")
        if self.correlation is not None:
            return self.correlation.event(joint, length)
        if self.whole is not None:
            return Gaussian(noise_multiplier=joint / self.whole.sensitivity(length))
        if self.sampled.run is not None:
            return self.sampled.run(joint, length)
        return Repeated(event=self.sampled.event(joint), count=self.sampled.times(length))

    def attained(self, joint: float, steps: int) -> Event:
        """What one record can do to the phase, of which ``event`` is a bound from above."""
        if self.correlation is not None:
            return self.correlation.attained(joint, steps)
        if self.whole is not None:
            return self.whole.attained(joint, steps)
        if self.sampled.attained is not None:
            return self.sampled.attained(joint, steps)
        return self.event(joint, steps)

    @property
    def attack(self) -> tuple[ShuffledEpoch, int] | None:
        """The epoch of an attack on a phase with nothing open, and the number of such epochs."""
        if self.sampled.attack is None or self.joint is None or self.steps is None:
            return None
        return None if self.whole is not None else self.sampled.attack(self.joint, self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A plan that can be accounted."""

    plan: Plan
    mechanism: Mechanism
    phases: tuple[LoweredPhase, ...]
    extra: AdditionalEvents

    def event(self, *, scale: float = 1.0, steps: int | None = None) -> Composed | EitherBound:
        """The whole run, with ``scale`` and ``steps`` standing in for what is open.

        Where the plan leaves noise open, ``scale`` is the open phases' σ_joint and the
        given ones stay; where it gives all noise, ``scale`` multiplies it.
        """
        if self.plan.asks_for_noise:
            joints = [scale if p.joint is None else p.joint for p in self.phases]
        else:
            joints = [scale * (p.joint or 0.0) for p in self.phases]
        joints = [add_same_lot_blocks(joint, self.extra.same_lot_multipliers) for joint in joints]
        phases = tuple(
            phase.event(joint, steps) for phase, joint in zip(self.phases, joints, strict=True)
        )
        own = self.extra.compose_with(phases)
        one = self.of_one_record
        if one is None or len(one.phases) != len(self.phases):
            return own
        if not self._is_bounded_only(phases, joints, steps):
            return own
        links = tuple(
            replace(phase, steps=ran.steps).event(joint, steps)
            for phase, ran, joint in zip(one.phases, self.phases, joints, strict=True)
        )
        if all(map(_is_unsampled, links)):
            return own
        own_bins = None if self.plan.dataset.records_per_unit > 1 else _replaced_on_bins(links)
        chain = ChainOfNeighbours(
            event=one.extra.compose_with(links), links=int(distance_of(self.plan))
        )
        replaced = () if own_bins is None else (one.extra.compose_with((own_bins,)),)
        return EitherBound(events=(*alternatives(own), *replaced, chain))

    def _is_bounded_only(
        self, phases: tuple[Event, ...], joints: list[float], steps: int | None
    ) -> bool:
        """Whether a phase does not attain its event among ``phases``, at these ``joints``."""
        return any(
            phase.attained(joint, length) != event
            for phase, joint, event in zip(self.phases, joints, phases, strict=True)
            if (length := steps if phase.steps is None else phase.steps) is not None
        )

    @property
    def of_one_record(self) -> Lowered | None:
        """The run for data sets that differ in one record, one of them without it.

        Such data sets are among those of replace_one, and of users. None where the plan is for
        these itself, or where they are not certified.
        """
        plan = self.plan
        if is_amplified(plan):
            return None
        # How often a lot is cut depends on the size of the data set, which a chain would raise.
        cut = any(phase.sampling.scheme == "truncated_poisson" for phase in plan.phases)
        if cut and plan.adjacency == "add_remove":
            return None
        return _of_one_record(plan)

    def attained(self) -> Composed:
        """What one record can do to a run with nothing open: no bound of ε may lie below its ε.

        It is ``event`` wherever that is what the run releases, and no bound on it. Raises
        ``ValueError`` where the plan leaves steps or noise open.
        """
        phases = []
        for phase in self.phases:
            if phase.joint is None or phase.steps is None:
                raise ValueError("the plan leaves its noise or its steps open; close it")
            phases.append(
                phase.attained(
                    add_same_lot_blocks(phase.joint, self.extra.same_lot_multipliers), phase.steps
                )
            )
        return self.extra.compose_with(phases)


def _replaced_on_bins(links: tuple[Event, ...]) -> ReplacedAllocationGaussian | None:
    """What a replaced record costs where one that is not there costs ``links``.

    Of one allocation; a part of a pass costs at most the whole. None elsewhere.
    """
    match links:
        case (RandomAllocationGaussian(bins=bins, noise_multiplier=sigma),) if bins > 1:
            return ReplacedAllocationGaussian(bins=bins, noise_multiplier=sigma)
    return None


def _is_unsampled(event: Event) -> bool:
    """Whether ``event`` is Gaussian: of twice the distance it costs less than two neighbours."""
    match event:
        case Repeated(event=inner):
            return _is_unsampled(inner)
        case Composed(events=events):
            return all(map(_is_unsampled, events))
        case _:
            return isinstance(event, Gaussian)


@lru_cache(maxsize=64)
def _of_one_record(plan: Plan) -> Lowered | None:
    # Under add_remove a record that contributes nothing is one that is not there.
    adjacency = "zero_out" if plan.adjacency == "replace_one" else plan.adjacency
    document = with_fields(as_document(plan), adjacency=adjacency, unit="example")
    document["dataset"].pop("contributions_per_user", None)
    try:
        return lower(plan_from(document))
    except (MalformedPlan, RefusedPlan):
        return None


def lower(plan: Plan) -> Lowered:
    """Lower ``plan``; raises ``RefusedPlan`` with every reason that applies."""
    reasons: list[Reason] = []
    optimiser = mechanism(plan.optimizer.name)
    reasons += optimiser.find_mismatches(plan)
    extra = AdditionalEvents()
    try:
        extra = lower_additional_releases(plan)
    except RefusedPlan as refusal:
        reasons += refusal.reasons
    phases: list[LoweredPhase] = []
    for index in range(len(plan.phases)):
        try:
            phases.append(_phase(plan, index, optimiser))
        except RefusedPlan as refusal:
            reasons += refusal.reasons
    if reasons:
        raise RefusedPlan(*reasons)
    return Lowered(plan=plan, mechanism=optimiser, phases=tuple(phases), extra=extra)


def _phase(plan: Plan, index: int, optimiser: Mechanism) -> LoweredPhase:
    phase = plan.phases[index]
    steps, joint = schedule.steps(plan, phase), joint_noise_multiplier(phase)
    whole = optimiser.whole_run(plan, index)
    field = next((name for name in _OF_STREAMS if getattr(phase, name) is not None), None)
    in_turn = field is not None or SCHEMES[phase.sampling.scheme].independent is None
    if phase.noise.kind == "independent" and not (in_turn and whole is None):
        if field is not None:
            raise RefusedPlan(_unused(plan, index, field))
        return LoweredPhase(sampled=sample(plan, index), steps=steps, joint=joint, whole=whole)
    # Most noise is independent, and need not wait for the strategies to load.
    from affidavit.mechanisms.correlation import Correlation

    correlation = Correlation(plan=plan, index=index)
    result = LoweredPhase(
        sampled=correlation.sampled, steps=steps, joint=joint, correlation=correlation
    )
    if steps is not None:
        correlation.at(steps)
    return result


_OF_STREAMS = ("participation", "clip_schedule")
"""Fields that are about a record's steps taken together."""


def _unused(plan: Plan, index: int, field: str) -> Reason:
    return Reason(
        code="unsupported",
        pointer=plan.pointer(index, field),
        message=f"the theorems for {plan.optimizer.name} do not cover {field}.",
        remedy=f"Remove {field}.",
    )
