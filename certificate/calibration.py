"""Solve for what a plan leaves open, and for the noise that its target requires.

A plan may leave open one of its noise, its steps, its lot size and its sampling
probability. All are one-sided searches with one accountant, over the proved upper bound
alone, and each value is tried as the closed plan that would be certified, with its
multipliers rounded as they are printed: what is returned was itself evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from affidavit.accountants import (
    Accountant,
    AccountantError,
    AllocationAccountant,
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
    find_confirmed_noise,
    find_max_count,
    find_max_probability,
    find_max_steps,
    find_min_noise,
)
from affidavit.mechanisms import (
    Lowered,
    lower,
    with_lot_size,
    with_noise,
    with_placeholder_sampling,
    with_probability,
    with_scaled_noise,
    with_steps,
)
from affidavit.plan import Event, Plan, RefusedPlan, alternatives, schedule

ONE_SIDED = ("participations", "selection", "rdp", "allocation_rdp")
"""Engines whose own lower ends are 0."""

Value = TypeVar("Value", int, float)


def lower_open(plan: Plan) -> Lowered:
    """``plan`` lowered; an open lot is the least one for as long as it is not solved for.

    What may be claimed of a plan, and what it obliges its trainer to, does not depend on
    the size of its lots. Raises ``RefusedPlan``.
    """
    return replace(lower(with_placeholder_sampling(plan)), plan=plan)


def _attacks(closed: Lowered) -> tuple[CountingAttack, ...]:
    """What releases of each phase show that an attacker counts."""
    if closed.extra.selection is not None:
        return ()
    epochs = (phase.attack for phase in closed.phases)
    return tuple(CountingAttack(*epoch) for epoch in epochs if epoch is not None)


def _shown(closed: Lowered) -> tuple[Event, ...]:
    """What a unit shows of a run with nothing open, and what one of its records does alone."""
    one = closed.of_one_record
    runs = (closed,) if one is None else (closed, one)
    # A selection takes long: of each run the first is computed, which seems to show most.
    most = None if closed.extra.selection is None else 1
    events = (
        event for run in runs for event in alternatives(attained_event(run.attained()))[:most]
    )
    return tuple(dict.fromkeys(events))


@dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """One plan's open quantity, searched with one engine.

    Each event is accounted once: what the search found is not computed again to be stated.
    """

    lowered: Lowered
    engine: Accountant
    _curves: dict[Event, PrivacyCurve] = field(default_factory=dict)
    _brackets: dict[tuple[Event, float], Bracket] = field(default_factory=dict)

    def curve(self, event: Event) -> PrivacyCurve:
        """The engine's curve of ``event``; raises ``AccountantError``."""
        if event not in self._curves:
            self._curves[event] = self.engine.curve(event)
        return self._curves[event]

    def enclosed(self, closed: Lowered, *, alone: bool = False) -> PrivacyCurve:
        """The curve of a run with nothing open, its lower ends by what a record attains.

        ``alone`` asks no other engine where this one has no lower ends. Raises ``AccountantError``.
        """
        event, own = closed.event(), closed.attained()
        above, least = self.curve(event), attained_event(own)
        if isinstance(self.engine, Sampling):
            return above if least == event else BracketingCurve(above=above, below=())
        attacks = _attacks(closed)
        if self.engine.name in ONE_SIDED and not alone:
            contained = (PostProcessedCurve(event=shown) for shown in _shown(closed))
            return BracketingCurve(above=above, below=(*contained, *attacks))
        if least == event:
            return above
        below = (*attacks, *(curve for shown in _shown(closed) for curve in self._below(shown)))
        return BracketingCurve(above=above, below=(above, *below) if own == event else below)

    @staticmethod
    def contained(closed: Lowered) -> PrivacyCurve:
        """Lower ends of what a run with nothing open contains, asked of several engines."""
        return PostProcessedCurve(event=attained_event(closed.attained()))

    def _below(self, least: Event) -> tuple[PrivacyCurve, ...]:
        """Curves of what a record attains, by this engine or by those of ours that cover it."""
        try:
            return (self.engine.curve(least),)
        except AccountantError:
            allocation = AllocationAccountant().lower_ends(least)
        contained = PostProcessedCurve(event=least)
        return (contained,) if allocation is None else (contained, allocation)

    def epsilon(self, event: Event, delta: float) -> Bracket:
        """The engine's bracket of ε of ``event`` at ``delta``."""
        if (event, delta) not in self._brackets:
            self._brackets[event, delta] = self.curve(event).epsilon(delta)
        return self._brackets[event, delta]

    def closed(self) -> Lowered:
        """The plan with nothing open, lowered.

        Raises ``AccountantError`` where the engine does not cover the run, and
        ``NoSolution`` where the open quantity has no value that meets the target.
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
        """The least factor on the given noise that meets the full target.

        The search is over σ_joint of the first phase, as it is where the noise is open: the
        same run then requires the same noise, whatever noise its plan gives.
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
        """The largest lot; of a run of so many epochs, also beyond where it loses a step.

        One more record in a lot costs privacy, and one step less saves some: where the steps
        follow from epochs, the first lot of the next shorter run may fit although the last of
        the longer one does not.
        """
        size = self.lowered.plan.dataset.size
        if size is None:
            raise ValueError("a valid plan that asks for its lot size has a data set size")
        lot = self._largest_lot_above(0, size)
        while (shorter := self._first_of_a_shorter_run(lot + 1, size)) is not None and (
            self._upper_of(with_lot_size)(shorter) <= self._target[0]
        ):
            lot = self._largest_lot_above(shorter - 1, size)
        return lot

    def _largest_lot_above(self, fewer: int, size: int) -> int:
        plan, upper = self.lowered.plan, self._upper_of(with_lot_size)
        result = find_max_count(
            lambda more: upper(fewer + more),
            self._target[0],
            ceiling=size - fewer,
            guess=self._guess(lambda more: lower(with_lot_size(plan, fewer + more)).event()),
            what="record a lot",
        )
        return fewer + result

    def _first_of_a_shorter_run(self, lot: int, size: int) -> int | None:
        """The least lot above ``lot`` whose epochs are fewer steps; None without epochs."""
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
        """From a value of what is open to the proved bound on ε of the plan closed with it."""
        plan, delta = self.lowered.plan, self._target[1]
        return lambda value: self.epsilon(_event_of(close(plan, value)), delta).upper

    def _guess(self, event: Callable[[Value], Event]) -> Callable[[Value], float] | None:
        """From a value of what is open to about its ε, where the engine can tell quickly."""
        engine, delta = self.engine, self._target[1]
        if not isinstance(engine, Approximating):
            return None
        return lambda value: engine.approximate_epsilon(event(value), delta)


def _event_of(plan: Plan) -> Event:
    """The event of a closed plan; ``OutOfReach`` where it is too large to be computed."""
    try:
        return lower(plan).event()
    except RefusedPlan as refusal:
        (reason, *_) = refusal.reasons
        if reason.code != "too_expensive":
            raise
        raise OutOfReach(reason.message, reason.remedy) from None
