"""Lowering: from a plan to the events that an accountant counts, or to a refusal.

``lower`` decides everything that does not depend on open quantities (noise or steps that are solved
for); ``Lowered.event`` fills them in.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "replace_one", "steps": 10,
...     "sampling": {"scheme": "full_batch"}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}]})
>>> lower(plan).event().events
(Repeated(event=Gaussian(noise_multiplier=2.0), count=10),)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from affidavit.mechanisms.additional_releases import AdditionalEvents, lower_additional_releases
from affidavit.mechanisms.catalogue import mechanism
from affidavit.mechanisms.joint_gaussian import add_same_lot_blocks, joint_noise_multiplier
from affidavit.mechanisms.lowered_phase import LoweredPhase
from affidavit.mechanisms.protocol import Mechanism
from affidavit.mechanisms.sampling_schemes import (
    SCHEMES,
    Sampled,
    distance_of,
    is_amplified,
    sample,
    with_simplest_sampling,
)
from affidavit.plan import (
    FIXED_ORDER,
    MalformedPlan,
    Plan,
    Reason,
    RefusedPlan,
    as_document,
    events,
    plan_from,
    schedule,
    with_fields,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A plan as events."""

    plan: Plan
    mechanism: Mechanism
    phases: tuple[LoweredPhase, ...]
    extra: AdditionalEvents

    def event(
        self, *, scale: float = 1.0, steps: int | None = None
    ) -> events.Composed | events.EitherBound:
        """Return the event of the whole run, with ``scale`` and ``steps`` for open quantities.

        If the plan solves for noise, ``scale`` is σ_joint of the open phases; otherwise it
        multiplies all noise.
        """
        if self.plan.asks_for_noise:
            joints = [scale if p.joint is None else p.joint for p in self.phases]
        else:
            joints = [scale * (p.joint or 0.0) for p in self.phases]
        joints = [add_same_lot_blocks(joint, self.extra.same_lot_multipliers) for joint in joints]
        phases = tuple(
            phase.event(joint, steps) for phase, joint in zip(self.phases, joints, strict=True)
        )
        direct = self.extra.compose_with(phases)
        one = self.single_record_run
        if one is None or len(one.phases) != len(self.phases):
            return direct
        if self._attains_event(phases, joints, steps):
            return direct
        ran, links = self._links(one, joints, steps)
        if all(map(events.is_unsampled, links)):
            return direct
        # Where lots are known a link needs no mixture over all of them.
        known = tuple(
            phase.in_known_lots(joint, steps) or link
            for phase, joint, link in zip(ran, joints, links, strict=True)
        )
        is_user_level = self.plan.dataset.records_per_unit > 1
        replaced = () if is_user_level else _replaced_in_bins(known, phases)
        chains = [self._chain(one, bounds) for bounds in dict.fromkeys((links, known))]
        if (user := self._missing_user_run) is not None:
            _, links = self._links(user, joints, steps)
            chains.append(self._chain(user, links))
        in_bins = map(self.extra.compose_with, replaced)
        return events.EitherBound(events=(*events.alternatives(direct), *in_bins, *chains))

    def _links(
        self, other: Lowered, joints: list[float], steps: int | None
    ) -> tuple[list[LoweredPhase], tuple[events.Event, ...]]:
        """Return the phases of ``other`` with the steps of this run, and what they cost."""
        ran = [
            replace(phase, steps=own.steps)
            for phase, own in zip(other.phases, self.phases, strict=True)
        ]
        return ran, tuple(
            phase.event(joint, steps) for phase, joint in zip(ran, joints, strict=True)
        )

    def _chain(self, one: Lowered, links: tuple[events.Event, ...]) -> events.ChainOfNeighbours:
        """Return the chain of data sets that differ as those of ``one`` do, by its phases."""
        slow: tuple[type[events.Event], ...] = (events.ReplacedAllocationGaussian,)
        if self.plan.dataset.records_per_unit == 1:
            slow = (*slow, events.OverlappingBins)  # a replaced record has a bound of its own
        number = int(distance_of(self.plan) / distance_of(one.plan))
        is_replaced = self.plan.adjacency == "replace_one" != one.plan.adjacency
        return events.ChainOfNeighbours(
            event=one.extra.compose_with(tuple(_without(slow, link) for link in links)),
            links=number,
            replaced=is_replaced and number % 2 == 0,
        )

    @property
    def _missing_user_run(self) -> Lowered | None:
        """The run for data sets of which one lacks a user, where it has bounds of its own."""
        plan = self.plan
        if plan.adjacency != "replace_one" or plan.dataset.records_per_unit == 1:
            return None
        if any(phase.scheme != "b_min_sep" for phase in self.phases):
            return None
        return _run_with(plan, adjacency="zero_out")

    def _attains_event(
        self, phases: tuple[events.Event, ...], joints: list[float], steps: int | None
    ) -> bool:
        """Whether every phase attains its event among ``phases``, at these ``joints``."""
        return all(
            phase.attained(joint, length) == event
            for phase, joint, event in zip(self.phases, joints, phases, strict=True)
            if (length := steps if phase.steps is None else phase.steps) is not None
        )

    @property
    def single_record_run(self) -> Lowered | None:
        """The run for data sets of which one lacks a record, or None if it is not certified.

        Neighbours under replace_one, and those of users, are connected by such pairs. None also if
        the plan itself is for these data sets. Samples of a fixed size, whose bounds are those of
        a replaced record, have chains of their own (``affidavit.accountants.chains``).
        """
        plan = self.plan
        if is_amplified(plan):
            return None
        schemes = {phase.scheme for phase in self.phases}
        # The truncation depends on the size of the data set, which a chain would increase.
        if "truncated_poisson" in schemes and plan.adjacency == "add_remove":
            return None
        return None if "fixed_size" in schemes else _single_record_run(plan)

    @property
    def allocated_record(self) -> events.AllocatedRecord | None:
        """The record in k of T steps whose presence is all that the closed run may show, if any."""
        if len(self.phases) > 1 or self.extra != AdditionalEvents() or not is_amplified(self.plan):
            return None
        match self.phases[0].attack:
            case (events.AllocatedRecord() as record, 1):
                return record
        return None

    def attained(self) -> events.Composed:
        """Return an effect of one record on the run: no upper bound of ε may lie below its ε.

        It is ``event`` wherever the run attains that. Raises ``ValueError`` if steps or noise are
        open.
        """
        return self.extra.compose_with(self.attained_phases())

    def attained_phases(self) -> tuple[events.Event, ...]:
        """Return the effect of one record on each phase; raises as ``attained`` does."""
        joints, effects = [], []
        for phase in self.phases:
            if phase.joint is None or phase.steps is None:
                raise ValueError("the plan leaves its noise or its steps open; close it")
            joints.append(add_same_lot_blocks(phase.joint, self.extra.same_lot_multipliers))
            effects.append(phase.attained(joints[-1], phase.steps))
        if len(effects) == 1:
            return tuple(effects)
        # Imported here because most plans have one phase and need no strategies.
        from affidavit.mechanisms.places import at_one_place

        return at_one_place(self.plan, self.phases, joints, effects)


def _without(slow: tuple[type[events.Event], ...], link: events.Event) -> events.Event:
    """Return ``link`` without ``slow`` bounds, which take seconds for each link."""
    if not isinstance(link, events.EitherBound):
        return link
    bounds = tuple(bound for bound in link.events if not isinstance(bound, slow))
    return events.EitherBound(events=bounds) if len(bounds) > 1 else bounds[0]


def _replaced_in_bins(
    links: tuple[events.Event, ...], phases: tuple[events.Event, ...]
) -> tuple[tuple[events.Event, ...], ...]:
    """Return the costs of a replaced record, phase by phase, where it is allocated in some of them.

    ``links`` are the cost of a missing record. Phases that allocate nothing cost as ``phases`` say.
    """
    allocated = [_each_replaced(link) for link in links]
    if not any(allocated):
        return ()
    if len(allocated) == 1:
        return tuple((bound,) for bound in allocated[0])
    return (tuple(one[0] if one else phase for one, phase in zip(allocated, phases, strict=True)),)


def _each_replaced(link: events.Event) -> list[events.Event]:
    """Return the bounds of ``link`` that are allocations, for a replaced record."""
    bounds = (_replaced(bound) for bound in events.alternatives(link))
    return [bound for bound in bounds if bound is not None and not events.is_unsampled(bound)]


def _replaced(bound: events.Event) -> events.Event | None:
    """Return an allocation of a missing record for a replaced one, or None if it is none.

    Releases beside it show the record as it is, or what replaces it, at twice the distance.
    """
    match bound:
        case events.RandomAllocationGaussian(bins=bins, released=released, noise_multiplier=sigma):
            shown = released or bins
            drawn = schedule.double_up(Fraction(shown, bins))
            return events.ReplacedAllocationGaussian(
                bins=shown, noise_multiplier=sigma, drawn=drawn
            )
        case events.OverlappingBins():
            return replace(bound, pair="replace_one")
        case events.Gaussian(noise_multiplier=sigma):
            return events.Gaussian(noise_multiplier=sigma / 2)
        case events.Repeated(event=inner, count=count):
            one = _replaced(inner)
            return None if one is None else events.Repeated(event=one, count=count)
        case events.Composed(events=members):
            parts = [_replaced(event) for event in members]
            known = tuple(part for part in parts if part is not None)
            return events.Composed(events=known) if len(known) == len(parts) else None
        case _:
            return None


def _single_record_run(plan: Plan) -> Lowered | None:
    adjacency, is_replaced = plan.adjacency, plan.adjacency == "replace_one"
    if is_replaced and not all(phase.sampling.scheme in FIXED_ORDER for phase in plan.phases):
        # Under add_remove a record that contributes nothing is a missing record.
        adjacency = "zero_out"
    elif is_replaced and plan.dataset.records_per_unit == 1:
        return None  # samples of an order have bounds of a replaced record
    return _run_with(plan, adjacency=adjacency, unit="example")


@lru_cache(maxsize=64)
def _run_with(plan: Plan, **fields: str) -> Lowered | None:
    """Return the run of ``plan`` with other ``fields``, or None if it is not certified."""
    document = with_fields(as_document(plan), **fields)
    if "unit" in fields:
        for field in ("contributions_per_user", "users_per_record"):
            document["dataset"].pop(field, None)
    try:
        return lower(plan_from(document))
    except (MalformedPlan, RefusedPlan):
        return None


def lower(plan: Plan) -> Lowered:
    """Lower ``plan``; raises ``RefusedPlan`` with every reason that applies."""
    reasons: list[Reason] = []
    optimiser = mechanism(plan.optimizer.name)
    reasons += optimiser.find_mismatches(plan)
    if plan.dataset.size is not None and plan.dataset.records_per_unit > plan.dataset.size:
        raise RefusedPlan(*reasons, _user_above_data_set(plan))
    if plan.dataset.users_per_record is not None and plan.adjacency == "add_remove":
        raise RefusedPlan(*reasons, _removal_of_shared_records(plan))
    extra = AdditionalEvents()
    try:
        extra = lower_additional_releases(plan)
    except RefusedPlan as refusal:
        reasons += refusal.reasons
    phases: list[LoweredPhase] = []
    for index, phase in enumerate(plan.phases):
        if phase.clipping == "randomised":
            reasons.append(_randomised_clipping(plan, index))
        try:
            phases.append(_phase(plan, index, optimiser))
        except RefusedPlan as refusal:
            reasons += refusal.reasons
    if reasons:
        raise RefusedPlan(*reasons)
    return Lowered(plan=plan, mechanism=optimiser, phases=tuple(phases), extra=extra)


def _phase(plan: Plan, index: int, optimiser: Mechanism) -> LoweredPhase:
    whole = optimiser.whole_run(plan, index)
    plan = with_simplest_sampling(plan, index)
    phase = plan.phases[index]
    steps, joint = schedule.steps(plan, phase), joint_noise_multiplier(phase)
    field = next((name for name in _RUN_FIELDS if getattr(phase, name) is not None), None)
    needs_run = field is not None or SCHEMES[phase.sampling.scheme].independent is None
    if phase.noise.kind == "independent" and not (needs_run and whole is None):
        if field is not None:
            raise RefusedPlan(_unsupported_field(plan, index, field))
        sampled = sample(plan, index)
        if sampled.attained is not None and whole is None:
            sampled = replace(sampled, attained=_AttainedAlone(plan, index, sampled))
        return LoweredPhase(
            scheme=phase.sampling.scheme,
            sampled=sampled,
            steps=steps,
            joint=joint,
            whole=whole,
        )
    # Imported here because most plans have independent noise and need no strategies.
    from affidavit.mechanisms.correlation import Correlation

    correlation = Correlation(plan=plan, index=index)
    result = LoweredPhase(
        scheme=phase.sampling.scheme,
        sampled=correlation.sampled,
        steps=steps,
        joint=joint,
        correlation=correlation,
    )
    if steps is not None:
        correlation.at(steps)
    return result


@dataclass(frozen=True)
class _AttainedAlone:
    """What one unit attains of a phase whose noise is independent."""

    plan: Plan
    index: int
    alone: Sampled

    def __call__(self, joint: float, steps: int) -> events.Event:
        # Imported here because most plans have independent noise and need no strategies.
        from affidavit.mechanisms.correlation import Correlation

        run = Correlation(plan=self.plan, index=self.index)
        return run.attained_alone(self.alone, joint, steps)


def _user_above_data_set(plan: Plan) -> Reason:
    return Reason(
        code="user_above_data_set",
        pointer="/dataset/contributions_per_user",
        message=f"a user has up to {plan.dataset.records_per_unit} records, and the data set has "
        f"{plan.dataset.size}.",
        remedy="Correct one of the two.",
    )


def _removal_of_shared_records(plan: Plan) -> Reason:
    return Reason(
        code="shared_records",
        pointer="/adjacency",
        message=f"a record belongs to up to {plan.dataset.users_per_record} users. Removing a user "
        "removes records of others, and may change which records are chosen for training.",
        remedy="Write adjacency: zero_out or replace_one, under which every record stays and only "
        "the contents of a user's records change.",
    )


def _randomised_clipping(plan: Plan, index: int) -> Reason:
    return Reason(
        code="randomised_clipping",
        pointer=plan.pointer(index, "clipping"),
        message="the norm that a contribution is scaled by is estimated, so that the contribution "
        "may exceed clip_norm by a random amount; no theorem here bounds a run whose sensitivity "
        "is random.",
        remedy="Scale each contribution by its exact norm, or one that is never below it: "
        "clipping: per_block or flat.",
    )


_RUN_FIELDS = ("participation", "clip_schedule")
"""Fields that concern all steps of a record together."""


def _unsupported_field(plan: Plan, index: int, field: str) -> Reason:
    return Reason(
        code="unsupported",
        pointer=plan.pointer(index, field),
        message=f"the theorems for {plan.optimizer.name} do not cover {field}.",
        remedy=f"Remove {field}.",
    )
