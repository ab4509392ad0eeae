"""Solve for the unknown of a plan, and for the noise that its target requires.

A plan may leave open its noise, its steps, its lot size or its sampling probability. All searches
are one-sided, with one accountant, over the proved upper bound alone. Each value is tried as the
closed plan that would be certified, with its multipliers rounded as they are printed, so that the
returned value was itself evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeVar

from affidavit.accountants import (
    Accountant,
    AccountantError,
    Approximating,
    Bracket,
    BracketingCurve,
    CountingAttack,
    OutOfReach,
    PostProcessedCurve,
    PrivacyCurve,
    Sampling,
    Unsupported,
    attained_event,
    close_bracket,
    find_confirmed_noise,
    find_max_count,
    find_max_probability,
    find_max_steps,
    find_min_noise,
)
from affidavit.mechanisms import (
    Attack,
    Lowered,
    attacks_of,
    lower,
    with_lot_size,
    with_noise,
    with_placeholder_sampling,
    with_probability,
    with_scaled_noise,
    with_steps,
)
from affidavit.plan import (
    Plan,
    RefusedPlan,
    events,
    schedule,
)

UPPER_BOUND_ENGINES = ("participations", "selection", "rdp", "allocation_rdp")
"""The engines whose own lower ends are 0."""

Value = TypeVar("Value", int, float)


def lower_open(plan: Plan) -> Lowered:
    """Lower ``plan``, with the smallest lot in place of an open one.

    The assumptions and obligations of a plan do not depend on the size of its lots. Raises
    ``RefusedPlan``.
    """
    return replace(lower(with_placeholder_sampling(plan)), plan=plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """The search for one plan's unknown with one engine; each event is accounted once."""

    lowered: Lowered
    engine: Accountant
    _curves: dict[events.Event, PrivacyCurve] = field(default_factory=dict)
    _brackets: dict[tuple[events.Event, float], Bracket] = field(default_factory=dict)

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the engine's curve of ``event``; raises ``AccountantError``."""
        if event not in self._curves:
            self._curves[event] = self.engine.curve(event)
        return self._curves[event]

    def bracketing_curve(self, closed: Lowered, *, one_engine: bool = False) -> PrivacyCurve:
        """Return the curve of a closed run, with the lower ends that a record attains.

        With ``one_engine`` no other engine is used if this one has no lower ends. Raises
        ``AccountantError``.
        """
        event, attained = closed.event(), closed.attained()
        above, least = self.curve(event), attained_event(attained)
        if isinstance(self.engine, Sampling):
            return above if least == event else BracketingCurve(above=above, below=())
        has_lower_ends = one_engine or self.engine.name not in UPPER_BOUND_ENGINES
        if has_lower_ends and least == event:
            return above
        below = tuple(
            curve
            for attack in attacks_of(closed)
            for curve in self._lower_curves(attack, one_engine=one_engine)
        )
        own = (above,) if has_lower_ends and attained == event else ()
        bracket = BracketingCurve(above=above, below=(*own, *below))
        record = closed.allocated_record
        if record is None or self.engine.name != "allocation":
            return bracket
        from affidavit.accountants import NarrowerCurve

        return replace(bracket, narrower=NarrowerCurve(bracket=bracket, record=record))

    def strongest_attack(self, closed: Lowered, delta: float) -> tuple[Attack, float]:
        """Return the attack on a closed run with the largest ε (nats) at ``delta``, and this ε."""

        def epsilon(attack: Attack) -> float:
            curves = self._lower_curves(attack)
            if attack.event == closed.event():
                with suppress(AccountantError):
                    curves = (*curves, self.curve(attack.event))
            return close_bracket(math.inf, curves, lambda curve: curve.epsilon(delta)).lower

        return max(((attack, epsilon(attack)) for attack in attacks_of(closed)), key=itemgetter(1))

    def _lower_curves(
        self, attack: Attack, *, one_engine: bool = False
    ) -> tuple[PrivacyCurve, ...]:
        """Return curves whose lower ends ``attack`` attains, by this engine or by others."""
        match attack.tested:
            case (events.AllocatedRecord() as record, times):
                from affidavit.accountants import ScoreAttack

                return (ScoreAttack(record, times),)
            case (events.ShuffledEpoch() as epoch, times):
                return (CountingAttack(epoch, times),)
            case (events.DisplacedSum() as sums, _):
                from affidavit.accountants import DisplacedSumAttack

                return (DisplacedSumAttack(sums),)
        event = attained_event(attack.event)
        contained = PostProcessedCurve(event=event)
        # What is sampled below another event would have a confidence of its own.
        sampled_below = isinstance(self.engine, Sampling) and event not in self._curves
        if sampled_below or (self.engine.name in UPPER_BOUND_ENGINES and not one_engine):
            return (contained,)
        try:
            return (self.engine.curve(event),)
        except AccountantError:
            from affidavit.accountants import AllocationAccountant

            allocation = AllocationAccountant().lower_ends(event)
        return (contained,) if allocation is None else (contained, allocation)

    def epsilon(self, event: events.Event, delta: float) -> Bracket:
        """Return the engine's bracket of ε of ``event`` at ``delta``."""
        if (event, delta) not in self._brackets:
            self._brackets[event, delta] = self.curve(event).epsilon(delta)
        return self._brackets[event, delta]

    def solve(self) -> Lowered:
        """Solve the plan and lower it.

        Raises ``AccountantError`` if the engine does not cover the run, and ``NoSolution`` if no
        value of the unknown meets the target.
        """
        plan = self.lowered.plan
        if plan.asks_for_noise:
            return lower(with_noise(plan, self._least_scale(with_noise)))
        if plan.is_open and isinstance(self.engine, Sampling):
            raise Unsupported(
                f"the {self.engine.name} accountant takes seconds per plan and can search only for "
                "the noise.",
                "Give the steps and the lot size, and leave the noise open.",
            )
        if plan.asks_for_steps:
            steps = find_max_steps(
                self._upper_of(with_steps),
                self._target[0],
                guess=self._guess(lambda steps: _event_of(with_steps(plan, steps))),
            )
            return lower(with_steps(plan, steps))
        if plan.asks_for_lot_size:
            return lower(with_lot_size(plan, self._largest_lot()))
        if plan.asks_for_probability:
            result = find_max_probability(
                self._upper_of(with_probability),
                self._target[0],
                guess=self._guess(lambda q: lower(with_probability(plan, q)).event()),
            )
            return lower(with_probability(plan, result))
        return self.lowered

    def required_scale(self) -> float:
        """Return the least factor on the given noise that meets the full target.

        The search is over σ_joint of the first phase, as for open noise: the required noise of a
        run then does not depend on the noise that its plan gives.
        """
        unit = self.lowered.phases[0].joint or 1.0
        return (
            self._least_scale(lambda plan, joint: with_scaled_noise(plan, joint / unit), unit)
            / unit
        )

    def _least_scale(self, close: Callable[[Plan, float], Plan], unit: float = 1.0) -> float:
        guess = self._guess(lambda scale: self.lowered.event(scale=scale / unit))
        if isinstance(self.engine, Sampling) and guess is not None:
            return find_confirmed_noise(self._upper_of(close), self._target[0], guess=guess)
        return find_min_noise(self._upper_of(close), self._target[0], guess=guess)

    def _largest_lot(self) -> int:
        """Return the largest lot that meets the target.

        One more record in a lot costs privacy, and one step less saves some: if the steps follow
        from epochs, the smallest lot of the next shorter run may meet the target although the
        largest of the longer run does not.
        """
        size = self.lowered.plan.dataset.size
        if size is None:
            raise ValueError("a valid plan that asks for its lot size has a data set size")
        lot = self._largest_lot_above(0, size)
        while (shorter := self._smallest_lot_with_fewer_steps(lot + 1, size)) is not None and (
            self._upper_of(with_lot_size)(shorter) <= self._target[0]
        ):
            lot = self._largest_lot_above(shorter - 1, size)
        return lot

    def _largest_lot_above(self, start: int, size: int) -> int:
        plan, upper = self.lowered.plan, self._upper_of(with_lot_size)
        result = find_max_count(
            lambda more: upper(start + more),
            self._target[0],
            ceiling=size - start,
            guess=self._guess(lambda more: lower(with_lot_size(plan, start + more)).event()),
            what="record a lot",
        )
        return start + result

    def _smallest_lot_with_fewer_steps(self, lot: int, size: int) -> int | None:
        """Return the smallest lot above ``lot`` whose epochs are fewer steps, or None."""
        plan = self.lowered.plan
        (phase,) = plan.phases
        if phase.epochs is None or lot > size:
            return None

        def steps_at(lot_size: int) -> int:
            closed = with_lot_size(plan, lot_size)
            return schedule.steps(closed, closed.phases[0]) or 0

        shorter = steps_at(lot) - 1
        if steps_at(size) > shorter:
            return None
        low, high = lot, size
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if steps_at(middle) > shorter else (low, middle)
        return high

    @property
    def _target(self) -> tuple[float, float]:
        epsilon, delta = self.lowered.plan.target.epsilon, self.lowered.plan.target.delta
        if epsilon is None or delta is None:
            raise ValueError("solving needs a full target")
        return epsilon, delta

    def _upper_of(self, close: Callable[[Plan, Value], Plan]) -> Callable[[Value], float]:
        """Return a function from a value of the unknown to the proved bound on ε."""
        plan, delta = self.lowered.plan, self._target[1]
        return lambda value: self.epsilon(_event_of(close(plan, value)), delta).upper

    def _guess(self, event: Callable[[Value], events.Event]) -> Callable[[Value], float] | None:
        """Return a function from a value of the unknown to an approximate ε, if there is one."""
        engine, delta = self.engine, self._target[1]
        if not isinstance(engine, Approximating):
            return None
        return lambda value: engine.approximate_epsilon(event(value), delta)


def _event_of(plan: Plan) -> events.Event:
    """Return the event of a closed plan; raises ``OutOfReach`` if it is too large to compute."""
    try:
        return lower(plan).event()
    except RefusedPlan as refusal:
        (reason, *_) = refusal.reasons
        if reason.code != "too_expensive":
            raise
        raise OutOfReach(reason.message, reason.remedy) from None
