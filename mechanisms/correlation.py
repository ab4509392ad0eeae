"""Correlation: a phase whose noise is correlated across steps, as one event.

With C = N⁻¹ of the noise that is injected, the phase is one Gaussian mechanism of
multiplier σ_joint / (d · sens(C)), d the distance that one unit moves the sum (2 under
replace_one, m records a user), or, where a theorem allows more:

====================================  ==================================================
strategy and sampler                  certified as
====================================  ==================================================
any C, a fixed order or full batch    Gaussian, μ = d · sens / σ_joint
b̂-banded C, ``cyclic_poisson``        ⌈T/b⌉ Poisson-subsampled Gaussians, p = B·b/N, of
with b ≥ b̂ groups                     multiplier σ_joint over the largest column norm
any other C, ``cyclic_poisson``       the same over ‖C_S‖, S the steps of a group, or Gaussian with
                                      sens for (⌈T/b⌉, b), whichever costs less
any C, fresh random lots, and         independent noise of multiplier σ_joint over ‖C‖, under
``b_min_sep``                         ``b_min_sep`` drawn with the most that a step's draw can have
any C, any of the last three          or a mixture over how a record happened to be drawn, beside
                                      what it moves in a few lots that are cut
b̂-banded C, ``b_min_sep``             or Poisson-subsampled Gaussians at fewer steps, disclosed,
with b ≥ b̂                            of multiplier σ_joint over what these steps' columns share
b̂-banded C, the same              or the moments of the loss, where few columns share rows
C ≥ 0, ``balls_in_bins``              the mixture over bins, by its Gram matrix
any other C, ``balls_in_bins``        Gaussian, given the bin: no amplification
any C, ``shuffled``                   Gaussian, ``min_separation`` with b = 1
====================================  ==================================================

Blocks of one step are joint as σ_joint: with z independent between blocks,
sens² = sup Σ_ij X_ij Σ_g ⟨x_i^g, x_j^g⟩ / σ_g², attained by all blocks at once.

References: Choquette-Choo et al., arXiv:2306.08153, Theorem 4 (cyclic Poisson);
arXiv:2410.06266 (balls in bins); ``docs/theorems/correlated-noise.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc

from affidavit.mechanisms.correlated_draws import Draw, Route, draw_of
from affidavit.mechanisms.cut_lots import Cut, Uncut, cut_lots, displacement, seen_alone, uncut
from affidavit.mechanisms.samplers import Sampled, distance_of, subsampled_pair
from affidavit.mechanisms.strategies.disclosed_steps import (
    DisclosedSteps,
    disclosed_steps,
    products_of_columns,
)
from affidavit.mechanisms.strategies.noise_file_registry import NotRemembered
from affidavit.mechanisms.strategies.optimal.loss import NotOffered
from affidavit.mechanisms.strategies.participation import Participation, participation_of
from affidavit.mechanisms.strategies.participation_mixture import (
    ParticipationMixture,
    displaced_mixture,
    participation_mixture,
    separated_mixture,
    shown_mixture,
    shown_separated,
)
from affidavit.mechanisms.strategies.registry import Setting, TooManyBuffers, WrongSteps, build
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.sensitivity import Sensitivity, Unaffordable
from affidavit.mechanisms.strategies.strategy import (
    IllConditioned,
    Strategy,
    TooLarge,
    column_norms,
    gram,
)
from affidavit.mechanisms.strategies.white_noise import (
    least_stretch,
    most_stretch,
    shown_along_a_direction,
)
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import (
    BallsInBinsGaussian,
    Composed,
    EitherBound,
    Event,
    Gaussian,
    GaussianMixture,
    Gram,
    Leaf,
    Noise,
    Phase,
    Plan,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    Reason,
    RefusedPlan,
    Repeated,
    SampledColumns,
    SubsampledPair,
    schedule,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrelatedRun:
    """A phase at its length: strategy, participation, sensitivity, and what it is certified as.

    ``sensitivity`` is sens(C) in clip norms before the ``distance`` of the adjacency and of cut
    lots, also in clip norms; under ``cyclic_poisson`` with amplification it is the largest column
    norm. ``turn`` is b in steps. ``unsampled`` is sens(C) without amplification where it may cost
    less.
    """

    strategy: Strategy
    participation: Participation
    sensitivity: Sensitivity
    route: Route
    distance: float
    turn: int
    unsampled: Sensitivity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Phase ``index`` of ``plan``, whose noise is not independent."""

    plan: Plan
    index: int

    @property
    def _phase(self) -> Phase:
        return self.plan.phases[self.index]

    @property
    def sampled(self) -> Sampled:
        """What is known of the phase before its steps are; raises ``RefusedPlan``."""
        phase, draw = self._phase, self._draw
        if phase.clip_schedule is not None and _adapts_its_clip_norm(self.plan):
            raise RefusedPlan(self._two_schedules())
        if self.plan.asks_for_steps:
            self._require_any_length()
        rate = schedule.sampling_probability(self.plan, phase)
        waiting = {"groups": phase.sampling.groups, "separation": phase.sampling.separation}
        for times, lots in waiting.items():
            if lots is not None and rate * lots > 1:
                raise RefusedPlan(self._lot_above_group(times))
        return draw.claimed

    @property
    def _is_alone(self) -> bool:
        """Whether the phase is the whole run: one release alone needs no lattice."""
        return len(self.plan.phases) == 1 and not self.plan.extra

    @property
    def _pair(self) -> SubsampledPair:
        return subsampled_pair(self.plan)

    @property
    def _draw(self) -> Draw:
        return draw_of(self.plan, self.index)

    def event(self, joint: float, steps: int) -> Event:
        """The whole phase at σ_joint; raises ``RefusedPlan``."""
        at, draw = self.at(steps), self._draw
        if at.route == "balls_in_bins":
            return BallsInBinsGaussian(gram=self._gram(steps), noise_multiplier=joint)
        whole = None
        unsampled = at.sensitivity if at.route == "gaussian" else at.unsampled
        if unsampled is not None:
            whole = Gaussian(noise_multiplier=joint / (at.distance * unsampled.value) * _DOWN)
            if at.route == "gaussian" and not draw.fresh:
                return whole
        assert draw.step is not None
        step = draw.step.event(joint / at.sensitivity.value * _DOWN)
        sampled = Repeated(event=step, count=draw.step.times(steps))
        if at.route == "cyclic_poisson":
            return sampled
        bounds: list[Event | None] = [whole] if at.route == "gaussian" else [sampled]
        bounds += [*self._hidden(step, at, joint), whole, self._columns(step, at, joint)]
        distinct = tuple(dict.fromkeys(bound for bound in bounds if bound is not None))
        return distinct[0] if len(distinct) == 1 else EitherBound(events=distinct)

    def _hidden(self, step: Leaf, at: CorrelatedRun, joint: float) -> Iterator[Event]:
        """Bounds that disclose less about a record's lots, which are drawn as in ``step``."""
        lots, half = {0: 0.0}, at.distance / (2 if self._pair == "replace_one" else 1)
        if isinstance(step, Cut):
            lots = cut_lots(step, at.strategy.steps)
            step = uncut(step)
        if not isinstance(step, Uncut):
            return
        with suppress(TooLarge):
            if self._pair == "replace_one" and not self._is_alone:
                raise TooLarge("a lattice for so many moves of a replaced record")
            mixture = self._mixture(step, at)
            for number, more in lots.items():
                moved = displaced_mixture(mixture, number * half * _longest(at.strategy))
                if moved is not None:
                    yield GaussianMixture(
                        weights=moved.weights,
                        noise_multiplier=joint / moved.spacing * _DOWN,
                        conceded=moved.conceded + more,
                        pair=self._pair,
                    )
        if self._is_apart(at.strategy):
            with suppress(TooLarge):
                yield from self._with_disclosed_steps(step.sampling_probability, at, joint)

    def _mixture(self, step: Uncut, at: CorrelatedRun) -> ParticipationMixture:
        """How far a record may move the run that is drawn as in ``step``; raises ``TooLarge``."""
        probability, apart = step.sampling_probability, self._phase.sampling.separation
        if apart is not None and self._is_apart(at.strategy):
            return separated_mixture(_longest(at.strategy), at.strategy.steps, probability, apart)
        records = step.records if isinstance(step, PoissonSampledGroupGaussian) else 1
        return participation_mixture(
            at.strategy, turn=at.turn, probability=probability, records=records
        )

    def _with_disclosed_steps(
        self, probability: float, at: CorrelatedRun, joint: float
    ) -> Iterator[Event]:
        """Bounds that disclose in which steps a record may be; raises ``TooLarge``."""
        apart = self._phase.sampling.separation
        assert apart is not None
        for stretches in STRETCHES_PER_BLOCK:
            disclosed = disclosed_steps(
                at.strategy, separation=apart, probability=probability, stretches=stretches
            )
            if disclosed is not None:
                yield _disclosed_releases(disclosed, joint, self._pair)

    def _columns(self, step: Leaf, at: CorrelatedRun, joint: float) -> SampledColumns | None:
        """The run itself, of whose loss moments are known; None where it has too many states."""
        if not isinstance(step, PoissonSubsampledGaussian) or step.pair == "replace_one":
            return None
        apart, lags = self._phase.sampling.separation or 1, (at.strategy.bands - 1) // at.turn
        # One record that waits has as many states as it waits; others have two for each lag.
        if max(apart, lags) > MAX_APART or (lags >= apart and lags > MAX_LAGS):
            return None
        try:
            products = products_of_columns(at.strategy)
        except TooLarge:
            return None
        return SampledColumns(
            products=products[:: at.turn],
            sampling_probability=step.sampling_probability,
            separation=apart,
            steps=-(-at.strategy.steps // at.turn),
            noise_multiplier=joint * _DOWN,
        )

    def attained(self, joint: float, steps: int) -> Event:
        """What the phase releases of one record that takes part as it likes, at σ_joint.

        ``event`` bounds it from above. In a fixed order the record repeats its gradient, with
        signs, in the worst of its patterns. In random lots it takes part in one step; in those of
        its group, where their columns are orthogonal; in those of its turns whose columns are
        nearly so; or in all of which one direction of the outputs shows something.
        """
        at, draw, apart = self.at(steps), self._draw, self._phase.sampling.separation
        if at.route == "balls_in_bins":
            gram = self._gram(steps, seen=True)
            return BallsInBinsGaussian(gram=gram, noise_multiplier=joint)
        if draw.probability is None and not draw.fresh:
            return Gaussian(noise_multiplier=joint / (at.distance * self._reached(at, steps)) * _UP)
        norms: tuple[tuple[float, int], ...] = ((_column_norm(at.strategy), 1),)
        seen: GaussianMixture | None = None
        chance = None if draw.probability is None else math.nextafter(float(draw.probability), 0.0)
        if self._phase.sampling.groups is not None and at.strategy.bands <= at.turn:
            norms = _norms_of_a_group(at.strategy, at.turn)
        elif at.route == "white_noise" or (
            apart is not None and self.plan.dataset.records_per_unit == 1
        ):
            if apart is None:
                norms = _norms_one_by_one(at.strategy, at.turn)
            elif (spacing := max(apart, at.strategy.bands)) < steps:
                # It waits for none of these steps, if it was in none of the b - 1 before.
                most = float(schedule.highest_probability(self.plan, self._phase))
                drawn = most * (1 - most) ** (apart - 1) * (1 - 1e-12)
                if chance is not None and drawn * (steps // spacing) > chance:
                    norms, chance = _norms_of_a_group(at.strategy, spacing), drawn
            seen = self._along_one_direction(joint, at)

        def leaf(multiplier: float) -> Leaf:
            if chance is None:
                assert draw.step is not None
                return seen_alone(draw.step.event(multiplier))
            return PoissonSubsampledGaussian(
                sampling_probability=chance,
                noise_multiplier=multiplier,
                pair=self._pair,
            )

        one_by_one = Composed(
            events=tuple(
                Repeated(event=leaf(joint / norm * _UP), count=count) for norm, count in norms
            )
        )
        if seen is None:
            return one_by_one
        at_once = Composed(events=(seen,))
        norm, count = norms[0]
        rate = getattr(leaf(joint), "sampling_probability", 1.0)
        of_steps = count * math.log1p(rate**2 * math.expm1(min(100.0, (norm / joint) ** 2)))
        if of_steps > _log_divergence(seen):
            return EitherBound(events=(one_by_one, at_once))
        return EitherBound(events=(at_once, one_by_one))

    def _reached(self, at: CorrelatedRun, steps: int) -> float:
        """What a pattern of the sampler reaches; the plan's participation may allow others."""
        drawn = at.participation
        if self._phase.sampling.separation is None:
            drawn = Participation.fixed_epoch(
                participations=-(-steps // at.turn), separation=at.turn
            )
        try:
            return _sensitivity(at.strategy, drawn).attained
        except Unaffordable:
            return _column_norm(at.strategy)

    def _along_one_direction(self, joint: float, at: CorrelatedRun) -> GaussianMixture | None:
        """The run as one release, along a direction in which its columns are long."""
        draw = self._draw
        farthest = math.inf if self._is_alone else joint * _MAX_SHOWN
        if (apart := self._phase.sampling.separation) is not None:
            shown = _shown_along_a_direction(at.strategy, at.turn)
            most = schedule.highest_probability(self.plan, self._phase)
            mixture = shown_separated(shown, most, apart, farthest)
        else:
            step = None if draw.step is None else seen_alone(draw.step.event(joint))
            if not isinstance(step, Uncut):
                return None
            mixture = _shown_mixture(
                at.strategy,
                at.turn,
                probability=step.sampling_probability,
                records=self.plan.dataset.records_per_unit,
                farthest=farthest,
            )
        if mixture is None:
            return None
        return GaussianMixture(
            weights=mixture.weights,
            noise_multiplier=joint / mixture.spacing * _UP,
            pair=self._pair,
        )

    def at(self, steps: int) -> CorrelatedRun:
        """The phase with ``steps``; raises ``RefusedPlan`` where nothing may be claimed."""
        turns = participation_of(self.plan, self.index, steps)
        draw = self._draw
        try:
            self._require_one_a_step(steps)
            # A strategy for lots that are drawn afresh is optimised for one participation.
            strategy = self._strategy(steps, Participation.single() if draw.fresh else turns)
            route = draw.allows(strategy)
            counted = Participation.single() if route == "cyclic_poisson" else turns
            white = _white_noise(strategy, draw) if route == "gaussian" else None
            try:
                sensitivity = _sensitivity(strategy, counted)
            except Unaffordable:
                if white is None:
                    raise
                sensitivity = white
            unsampled = None
            if white is not None:
                apart = self._is_apart(strategy)
                costs = "less" if apart else _costs(draw, white, sensitivity, steps)
                if costs != "more":
                    unsampled = sensitivity if costs == "either" else None
                    route, sensitivity = "white_noise", white
        except (ValueError, NotRemembered) as error:
            raise RefusedPlan(self._refusal(error)) from None
        return CorrelatedRun(
            strategy=strategy,
            participation=turns,
            sensitivity=sensitivity,
            route=route,
            distance=_distance(draw) or distance_of(self.plan),
            turn=draw.turn,
            unsampled=unsampled,
        )

    @property
    def workload(self) -> Workload:
        """The plan's workload, with the learning rates of this phase's steps."""
        provided = self.plan.workload
        if provided is None:
            return Workload()
        rates = provided.learning_rates
        if rates is not None:
            earlier = [schedule.steps(self.plan, phase) for phase in self.plan.phases]
            rates = rates[sum(steps or 0 for steps in earlier[: self.index]) :]
        return Workload(momentum=provided.momentum or 0.0, learning_rates=rates)

    def _strategy(self, steps: int, turns: Participation) -> Strategy:
        phase, draw = self._phase, self._draw
        period = draw.turn if draw.in_turn else None
        return _built(phase.noise, steps, turns, self.workload, period, phase.clip_schedule)

    def _is_apart(self, strategy: Strategy) -> bool:
        """Whether b_min_sep keeps columns of one record from sharing rows.

        Its law of participations then bounds the run without amplification, too.
        """
        apart = self._phase.sampling.separation
        return apart is not None and strategy.bands <= apart

    def _gram(self, steps: int, *, seen: bool = False) -> Gram:
        at = self.at(steps)
        rows = gram(at.strategy, at.turn, seen=seen)
        return Gram(rows=tuple(tuple(map(float, row)) for row in rows))

    def _require_one_a_step(self, steps: int) -> None:
        """A learning rate and a clip norm for every step, where the plan lists any."""
        schedule_, rates = self._phase.clip_schedule, self.workload.learning_rates
        last = self.index == len(self.plan.phases) - 1
        if schedule_ is not None and len(schedule_) != steps:
            pointer, what = self.plan.pointer(self.index, "clip_schedule"), "clip factors"
        elif rates is not None and (len(rates) < steps or (last and len(rates) > steps)):
            pointer, what = "/workload/learning_rates", "learning rates"
        else:
            return
        raise RefusedPlan.with_reason(
            code="steps_mismatch",
            pointer=pointer,
            message=f"the {what} do not have one value for each of the {steps} steps.",
            remedy="Give one per step.",
        )

    def _require_any_length(self) -> None:
        """Steps can be asked for where noise and participation do not depend on them."""
        phase = self._phase
        if self.workload.learning_rates is not None:
            field, what = "steps", "the workload has a learning rate for each"
        elif phase.clip_schedule is not None:
            field, what = "clip_schedule", "each has a clip norm of its own"
        elif phase.participation is not None and phase.participation.participations is not None:
            field, what = "participation", "the participations are given"
        elif phase.noise.depends_on_steps:
            field, what = "noise", f"a strategy of kind {phase.noise.kind} is made for its steps"
        else:
            return
        raise RefusedPlan.with_reason(
            code="steps_not_open",
            pointer=self.plan.pointer(self.index, field),
            message=f"the plan asks for the most steps, but {what}.",
            remedy="Give the steps.",
        )

    def _two_schedules(self) -> Reason:
        return Reason(
            code="unsupported",
            pointer=self.plan.pointer(self.index, "clip_schedule"),
            message="the clip norm follows a schedule and is adapted to a quantile as well; the "
            "count of the quantile does not follow the schedule.",
            remedy="Keep one of the two.",
        )

    def _lot_above_group(self, times: str) -> Reason:
        return Reason(
            code="lot_above_group",
            pointer=self.plan.pointer(self.index, "sampling", "lot_size"),
            message="a lot is expected to be larger than what it is sampled from, the group or the "
            f"records that have waited long enough: lot_size times {times} is above the size of "
            "the data set.",
            remedy="Use a smaller lot, fewer groups or a smaller separation.",
        )

    def _refusal(self, error: Exception) -> Reason:
        kind = self._phase.noise.kind
        code, remedy = "invalid_noise", "Correct the noise."
        message = f"the {kind} noise cannot be used: {error}."
        if isinstance(error, TooLarge | Unaffordable):
            code, remedy = "too_expensive", "Run fewer steps, or use a structured strategy."
            if isinstance(error, TooManyBuffers):
                remedy = "Ask for fewer buffers, or give the decays and scales."
            message = f"this plan exceeds the computation limit: {error}."
        elif isinstance(error, IllConditioned):
            code, remedy = "ill_conditioned", "Give noise whose inverse is bounded."
        elif isinstance(error, NotOffered):
            code, remedy = "unsupported", "Use another kind of noise."
        elif isinstance(error, WrongSteps):
            code, remedy = "steps_mismatch", "Give as many rows as steps."
        elif isinstance(error, NotRemembered):
            code = "file_not_given"
            message = "the noise is in a file, which cannot be opened here."
            remedy = (
                "At the command line give the plan beside the file (verify: --plan), or give rows."
            )
        return Reason(
            code=code,
            pointer=self.plan.pointer(self.index, "noise"),
            message=message,
            remedy=remedy,
        )


def _disclosed_releases(disclosed: DisclosedSteps, joint: float, pair: SubsampledPair) -> Event:
    """The releases of ``disclosed`` at σ_joint; the first of them concedes what they concede."""
    (norm, _), *_ = disclosed.norms
    missed = 1 - disclosed.probability
    first = GaussianMixture(
        weights=(missed, disclosed.probability),
        noise_multiplier=joint / norm * _DOWN,
        conceded=disclosed.conceded,
        pair=pair,
    )
    others = (
        Repeated(
            event=PoissonSubsampledGaussian(
                sampling_probability=disclosed.probability,
                noise_multiplier=joint / norm * _DOWN,
                pair=pair,
            ),
            count=count - (place == 0),
        )
        for place, (norm, count) in enumerate(disclosed.norms)
    )
    return Composed(events=(first, *others))


def _log_divergence(mixture: GaussianMixture) -> float:
    """log(1 + χ²) of a mixture from its first part, about."""
    moves = np.arange(len(mixture.weights)) / mixture.noise_multiplier
    weights = np.array(mixture.weights)
    products = np.expm1(np.minimum(np.multiply.outer(moves, moves), 100))
    return math.log1p(float(weights @ products @ weights))


def _adapts_its_clip_norm(plan: Plan) -> bool:
    return any(extra.kind == "adaptive_clipping_quantile" for extra in plan.extra)


def _white_noise(strategy: Strategy, draw: Draw) -> Sensitivity | None:
    """‖C_S‖ where rounds with white noise are amplified by their sampling; None elsewhere."""
    if draw.step is None:
        return None
    try:
        return _stretch(strategy, draw.turn)
    except TooLarge:
        return None


def _distance(draw: Draw) -> int | None:
    """How far a unit moves the sum of a lot that may be cut, in clip norms; None of other lots."""
    step = None if draw.step is None else draw.step.event(1.0)
    return displacement(step) if isinstance(step, Cut) else None


def _costs(
    draw: Draw, white: Sensitivity, whole: Sensitivity, steps: int
) -> Literal["less", "more", "either"]:
    """How sampled rounds of white noise compare with the run without amplification.

    They cost less where more rounds than cost as much are drawn with no chance above
    ``RARELY``, and more where no more of them are. Of cut lots that is not known.
    """
    assert draw.step is not None
    cut = _distance(draw) is not None
    rounds, probability = -(-steps // draw.turn), min(1.0, draw.step.probability or 1.0)
    drawn = math.floor((whole.value / white.value) ** 2)
    if white is whole or drawn >= rounds or bdtrc(drawn, rounds, probability) < RARELY:
        return "less"
    return "more" if not cut and bdtr(drawn, rounds, probability) < RARELY else "either"


@lru_cache(maxsize=8)
def _built(
    noise: Noise,
    steps: int,
    turns: Participation,
    workload: Workload,
    period: int | None,
    clip_schedule: tuple[float, ...] | None,
) -> Strategy:
    setting = Setting(steps=steps, participation=turns, workload=workload, period=period)
    strategy = build(noise, setting)
    return strategy if clip_schedule is None else Scheduled.of(strategy, clip_schedule)


STRETCHES_PER_BLOCK = 1, 2, 4, 8
"""Steps of one block in which a record may be, of those that are disclosed."""
MAX_APART = 80
"""Steps from one participation to the next up to which moments of a run are computed."""
MAX_LAGS = 6
"""The same of steps that share rows where a record may be in all of them."""
RARELY = 1e-12
"""A chance of more participations that no δ of a plan notices."""
_UP, _DOWN = 1 + 4 * 2.0**-53, 1 - 4 * 2.0**-53
"""Round a noise multiplier, a product and a quotient, for a bound from below and from above."""
_MAX_SHOWN = 16.0
"""Of what several phases show the largest move, over the noise, for accountants to reach it."""
MAX_NORMS = 16
"""Different column norms of one group that a lower bound tells apart."""


def _longest(strategy: Strategy) -> float:
    """An upper bound of the largest column norm."""
    return _sensitivity(strategy, Participation.single()).value


def _column_norm(strategy: Strategy) -> float:
    """A lower bound of the largest column norm."""
    return _sensitivity(strategy, Participation.single()).attained


@lru_cache(maxsize=8)
def _norms_of_a_group(strategy: Strategy, turn: int) -> tuple[tuple[float, int], ...]:
    """Column norms b apart, each with how many have at least it, for the group that has most."""
    try:
        norms = column_norms(strategy)
    except TooLarge:
        return ((_column_norm(strategy), 1),)
    group = max(range(min(turn, len(norms))), key=lambda first: sum(norms[first::turn] ** 2))
    ordered = np.sort(norms[group::turn])[::-1]
    ordered = ordered[ordered > 0]
    distinct = np.unique(ordered)[::-1]
    if len(distinct) > MAX_NORMS:
        # Norms fall towards the end of a run, and fastest there.
        left = np.unique(np.geomspace(1, len(ordered), MAX_NORMS).astype(int))
        distinct = ordered[len(ordered) - left][::-1]
    at_least = np.searchsorted(-ordered, -distinct, side="right")
    return tuple(zip(map(float, distinct), map(int, np.diff(at_least, prepend=0)), strict=True))


def _norms_one_by_one(strategy: Strategy, turn: int) -> tuple[tuple[float, int], ...]:
    """Norms of releases that steps b = ``turn`` apart show no less than, with how many have each.

    Of C ≥ 0 these are its columns: where they meet, they show more (Kahane's inequality).
    """
    with suppress(TooLarge):
        if strategy.is_nonnegative and column_norms(strategy).size:
            return _norms_of_a_group(strategy, turn)
    return (_least_stretch(strategy, turn),)


@lru_cache(maxsize=8)
def _sensitivity(strategy: Strategy, turns: Participation) -> Sensitivity:
    """sens of a strategy object; ``_built`` returns one object for one description."""
    result = strategy.sensitivity(turns)
    if not (math.isfinite(result.value) and result.value > 0):
        raise IllConditioned("its sensitivity is not a finite positive number")
    return result


@lru_cache(maxsize=8)
def _stretch(strategy: Strategy, turn: int) -> Sensitivity:
    """‖C_S‖ of the steps of a group, and what one step attains of it."""
    return Sensitivity(value=most_stretch(strategy, turn), attained=_column_norm(strategy))


@lru_cache(maxsize=8)
def _least_stretch(strategy: Strategy, turn: int) -> tuple[float, int]:
    return least_stretch(strategy, turn)


@lru_cache(maxsize=8)
def _shown_mixture(
    strategy: Strategy, turn: int, *, probability: float, records: int, farthest: float
) -> ParticipationMixture | None:
    return shown_mixture(
        _shown_along_a_direction(strategy, turn),
        probability=probability,
        records=records,
        farthest=farthest,
    )


@lru_cache(maxsize=8)
def _shown_along_a_direction(strategy: Strategy, turn: int) -> NDArray[np.float64]:
    try:
        return shown_along_a_direction(strategy, turn)
    except TooLarge:
        return np.zeros(1)
