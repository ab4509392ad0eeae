"""Correlation: a phase whose noise is correlated across steps, as one event.

With C = N⁻¹ for the injected noise N, the phase is one Gaussian mechanism with multiplier
σ_joint / (d · sens(C)), where d is how far one privacy unit moves the sum of a lot (2 under
replace_one, m for a user of m records, or of as many as a lot holds). Theorems allow more in these
cases:

====================================  ==================================================
strategy and sampler                  certified as
====================================  ==================================================
a multiple of I, any sampler          independent noise
any C, a fixed order or full batch    Gaussian, μ = d · sens / σ_joint
b̂-banded C, ``cyclic_poisson``        ⌈T/b⌉ Poisson-subsampled Gaussians, p = B·b/N, of
with b ≥ b̂ groups                     multiplier σ_joint over the largest column norm
any other C, ``cyclic_poisson``       the same over ‖C_S‖, S the steps of a group, or Gaussian with
                                      sens for (⌈T/b⌉, b), whichever costs less
any C, ``cyclic_poisson``,            Gaussian, or a mixture over the participations
replace_one                           of a record
any C, fresh random lots, and         independent noise of multiplier σ_joint over ‖C‖; under
``b_min_sep``                         ``b_min_sep``, with the largest probability of a step
any C, fresh random lots              or moments of the products of its columns, where the phase is
                                      the whole run
any C, any of these random lots       or a mixture over the participations of a record, plus its
                                      effect on a few truncated lots; a record in a lot of fixed
                                      size moves the sum two clip norms from the others
b̂-banded C, ``b_min_sep``             or Poisson-subsampled Gaussians at fewer, disclosed steps, of
with b ≥ b̂                            multiplier σ_joint over what the columns of these steps share
b̂-banded C, the same                  or the moments of the loss, if few columns share rows
C that forgets, ``b_min_sep``         as the banded C of its first b entries, and a Gaussian beside
C ≥ 0, ``balls_in_bins``              the mixture over bins, by its Gram matrix
any other C, ``balls_in_bins``,       Gaussian, given the bin, or one random allocation: with
and more than 1024 bins               independent noise σ_joint over ‖C‖, or to fewer bins, told
                                      which; of a user, by the places of its records
any C, ``shuffled``                   Gaussian, ``one_per_epoch``; within one epoch, or a
                                      sample without replacement of the records in its lots;
                                      or as bins, where others stand in for a record
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
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.special import bdtr, bdtrc

from affidavit.mechanisms.fixed_size_lots import (
    FixedSize,
    at_least_drawn,
    at_most_drawn,
)
from affidavit.mechanisms.noise_files import UnregisteredNoise
from affidavit.mechanisms.sampling_schemes import (
    DISTANCE,
    SCHEMES,
    Place,
    Route,
    RunSampler,
    Sampled,
    is_amplified,
    is_placed_at_random,
    lot_distance,
    place_of,
    record_distance,
    sample_of_lots,
    sample_run,
    subsampled_pair,
    with_simplest_sampling,
)
from affidavit.mechanisms.strategies.disclosed_steps import (
    DisclosedSteps,
    disclosed_steps,
)
from affidavit.mechanisms.strategies.epoch_patterns import pattern_sensitivity
from affidavit.mechanisms.strategies.lengths_by_place import lengths_by_place
from affidavit.mechanisms.strategies.lots_apart import (
    DisclosedLots,
    LotsApart,
    disclosed_lots,
    log_divergence,
    longer_lots,
    lots_apart,
    nodes_of_levels,
    overlapping_lots,
    placed_divergence,
    products_by_lag,
    sum_of_products,
)
from affidavit.mechanisms.strategies.moves_along_direction import (
    MAX_LEVELS,
    displaced_draws_mixture,
    independent_draws_mixture,
    kept_bins_mixture,
    separated_draws_mixture,
    shuffled_epochs_mixture,
)
from affidavit.mechanisms.strategies.numerics import Array, gamma
from affidavit.mechanisms.strategies.optimal.loss import UnsupportedObjective
from affidavit.mechanisms.strategies.participation import (
    Participation,
    optimised_participation,
    participation_of,
    sampler_participation,
)
from affidavit.mechanisms.strategies.participation_mixture import (
    ParticipationMixture,
    displaced_mixture,
    participation_mixture,
    placed_mixture,
    reordered_mixture,
    separated_mixture,
)
from affidavit.mechanisms.strategies.registry import Setting, StepsMismatch, TooManyBuffers, build
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.sensitivity import Sensitivity, Unaffordable
from affidavit.mechanisms.strategies.strategy import (
    COEFFICIENT_ERROR,
    MAX_VECTOR,
    IllConditioned,
    Strategy,
    TooLarge,
    column_norms,
    gram,
)
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.strategies.tree_moves import tree_mixture
from affidavit.mechanisms.strategies.white_noise import (
    max_stretch,
    min_stretch,
    project_blocks,
    project_columns,
)
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.mechanisms.truncated_lots import (
    Truncated,
    Untruncated,
    among_zero_records,
    at_least_left,
    crowded_probability,
    displacement,
    draws_above,
    truncated_draw_counts,
    without_truncation,
)
from affidavit.plan import (
    Noise,
    Phase,
    Plan,
    RefusedPlan,
    events,
    schedule,
)

STRETCHES_PER_BLOCK = 1, 2, 4, 8
"""Numbers of stretches per block for which steps are disclosed."""
MAX_OVERLAPS = 6
"""Later steps that share rows up to which the moments of a run are computed, where a record may be
in all of them."""
_LAGS_PER_SEPARATION = 64
"""Least distances of two participations of a record for which products are told apart."""
NEGLIGIBLE_PROBABILITY = 1e-12
"""A probability of more participations that is below every δ of a plan."""
_MAX_CONCEDED = 1e-4
"""The largest probability of a draw into a truncated lot that is conceded."""
MAX_NORMS = 16
"""Different column norms of one group that a lower bound distinguishes."""
_UP, _DOWN = 1 + 4 * 2.0**-53, 1 - 4 * 2.0**-53
"""Round a noise multiplier, a product and a quotient, for a lower and for an upper bound."""
_EQUAL = 1e-9
"""The relative difference of column norms that are computed apart and count as equal."""
_MAX_RATIO = 4.0
"""The most by which the estimated divergence of a bound that is computed is above the least."""
_WIDTHS = 2
"""Distances of lots that are told, of which each bound is computed."""
_MAX_FORGOTTEN = 0.2
"""The most, over the noise, that entries of C are left out for."""
_MAX_MOVE = 16.0
"""The largest move over the noise that is counted in one of several phases."""
_PARTS = 0.2, 0.35, 0.5
"""Parts of the noise for what shows whether a record is drawn."""
_MAX_SHOWN = 3.0
"""The largest squared move of a run, over its noise, at which that costs less."""
_BLOCKS = tuple(2**k for k in range(1, 14))
"""Numbers of blocks of a run, each of which is seen along a direction of its own."""
_BLOCK_LEVELS = 150
"""Distances of a block, in which few draws fall."""
_BLOCKS_GAIN = 1.05
"""How much more than the whole run, seen along one direction, blocks of it must show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrelatedRun:
    """A phase of a given length: its strategy, participation, sensitivity and certified route.

    ``sensitivity`` is sens(C) in clip norms; ``distance``, also in clip norms, is how far a unit
    moves the sum of one lot. Under ``cyclic_poisson`` with amplification the sensitivity is the
    largest column norm. ``turn`` is b in steps. ``unsampled`` is sens(C) without amplification, if
    that may cost less.
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
    """Phase ``index`` of ``plan``, whose noise is correlated.

    ``plan`` has its simplest sampling in this phase, in whatever words it was given.
    """

    plan: Plan
    index: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", with_simplest_sampling(self.plan, self.index))

    @property
    def _phase(self) -> Phase:
        return self.plan.phases[self.index]

    @property
    def _sampler(self) -> RunSampler:
        return sample_run(self.plan, self.index)

    @property
    def _pair(self) -> events.SubsampledPair:
        return subsampled_pair(self.plan)

    @property
    def _is_whole_run(self) -> bool:
        """Whether the phase is the whole run: a single release needs no common lattice."""
        return len(self.plan.phases) == 1 and not self.plan.extra

    @property
    def sampled(self) -> Sampled:
        """The certified sampler, for any number of steps; raises ``RefusedPlan``."""
        phase, sampler = self._phase, self._sampler
        adapts_clip_norm = any(
            release.kind == "adaptive_clipping_quantile" for release in self.plan.extra
        )
        if phase.clip_schedule is not None and adapts_clip_norm:
            raise self._refused(
                code="unsupported",
                field="clip_schedule",
                message="the clip norm both follows a schedule and adapts to a quantile; the "
                "count of the quantile does not follow the schedule.",
                remedy="Keep one of the two.",
            )
        if self.plan.asks_for_steps:
            self._require_any_length()
        rate = schedule.sampling_probability(self.plan, phase)
        waiting = {"groups": phase.sampling.groups, "separation": phase.sampling.separation}
        for name, lots in waiting.items():
            if lots is not None and rate * lots > 1:
                raise RefusedPlan.with_reason(
                    code="lot_above_group",
                    pointer=self.plan.pointer(self.index, "sampling", "lot_size"),
                    message="the expected lot is larger than the set it is sampled from, the group "
                    f"or the records that have waited long enough: lot_size times {name} is "
                    "above the size of the data set.",
                    remedy="Use a smaller lot, fewer groups or a smaller separation.",
                )
        return sampler.claimed

    def event(self, joint: float, steps: int) -> events.Event:
        """Return the event of the whole phase at σ_joint; raises ``RefusedPlan``."""
        at, sampler = self.at(steps), self._sampler
        if (independent := self._independent(at)) is not None:
            alone, entry = independent
            return alone.of_run(joint / entry.value, steps)
        if at.route == "balls_in_bins":
            return events.BallsInBinsGaussian(gram=self._gram(at), noise_multiplier=joint)
        whole = None
        unsampled = at.sensitivity if at.route == "gaussian" else at.unsampled
        if unsampled is not None:
            whole = events.Gaussian(
                noise_multiplier=joint / (at.distance * unsampled.value) * _DOWN
            )
            if at.route == "gaussian" and not self._may_be_in_any_step:
                others = (
                    *self._replaced_in_groups(at, joint),
                    *self._left_out_lots(at, joint),
                    *self._lots_at_random(at, joint),
                    *self._placed_user(at, joint),
                )
                return events.EitherBound(events=(whole, *others)) if others else whole
        assert sampler.step is not None
        step = sampler.step.event(joint / at.sensitivity.value * _DOWN)
        sampled = events.Repeated(event=step, count=sampler.step.times(steps))
        if at.route == "cyclic_poisson":
            return sampled
        bounds: list[events.Event | None] = [whole] if at.route == "gaussian" else [sampled]
        bounds += [*self._mixture_bounds(step, at, joint), whole]
        bounds += self._overlapping_columns(step, at, joint)
        bounds.append(self._sampled_columns(step, at, joint))
        bounds += self._forgetting(step, at, joint)
        distinct = tuple(dict.fromkeys(bound for bound in bounds if bound is not None))
        return distinct[0] if len(distinct) == 1 else events.EitherBound(events=distinct)

    def in_known_lots(self, joint: float, steps: int) -> tuple[events.Event, ...]:
        """Return bounds of a run of bins whose Gram matrix is its event, told all or most bins."""
        at = self.at(steps)
        if at.route != "balls_in_bins":
            return ()
        whole = events.Gaussian(
            noise_multiplier=joint / (at.distance * at.sensitivity.value) * _DOWN
        )
        others = tuple(self._lots_at_random(at, joint))
        return (whole, *others) if others else ()

    @property
    def _may_be_in_any_step(self) -> bool:
        """Whether a step may take any record, and the sampler amplifies it."""
        sampler = self._sampler
        is_separated = self._phase.sampling.separation is not None
        return sampler.fresh or (is_separated and sampler.step is not None)

    @property
    def _waits_at_random(self) -> bool:
        """Whether a record under ``b_min_sep`` is not drawn as soon as it may be."""
        if self._phase.sampling.separation is None:
            return False
        return schedule.highest_probability(self.plan, self._phase) < 1

    def _independent(self, at: CorrelatedRun) -> tuple[Sampled, Sensitivity] | None:
        """Return the sampler for independent noise and the entry of C, if C is a multiple of I."""
        sampler, scheme = self._sampler, SCHEMES[self._phase.sampling.scheme]
        if scheme.independent is None or not (sampler.fresh or sampler.probability is not None):
            return None  # what is not drawn is one Gaussian
        entry = _entry_of_identity(at.strategy)
        return None if entry is None else (scheme.independent(self.plan, self.index), entry)

    def _mixture_bounds(
        self, step: events.Leaf, at: CorrelatedRun, joint: float
    ) -> Iterator[events.Event]:
        """Bounds that keep secret in which of the steps, sampled as ``step``, a record is."""
        longest, pair = _max_column_norm(at.strategy), self._pair
        drawn, displaces, counts = _independent_draws(step, at.strategy.steps)
        if drawn is None:
            return
        # How the draws of a record are counted: its pair, its reach, and more in truncated lots.
        ways: list[tuple[events.SubsampledPair, float, float, float]] = []
        if not displaces:
            ways = [(pair, 1.0, 0.0, 0.0)]
        if isinstance(step, Truncated):
            per_draw = 2.0 if step.neighbours == "add_remove" else 1.0
            ways = [
                (pair, 1.0, number * per_draw * longest, more) for number, more in counts.items()
            ]
        replaces = displaces and self.plan.adjacency != "add_remove"
        if displaces:
            # A record that is set to zero is replaced as well, and takes the place of another.
            ways.append(("replace_one" if replaces else pair, DISTANCE, 0.0, 0.0))
        if not self._is_whole_run:
            # Moves of a replaced record have no lattice in common with another phase.
            ways, replaces = [way for way in ways if way[0] != "replace_one"], False
        with suppress(TooLarge):
            mixture = self._participation_mixture(drawn, at)
            for pair, reach, beyond, more in ways:
                moved = displaced_mixture(mixture, beyond)
                if moved is not None:
                    yield events.GaussianMixture(
                        weights=moved.weights,
                        noise_multiplier=joint / (reach * moved.spacing) * _DOWN,
                        conceded=moved.conceded + more,
                        pair=pair,
                    )
            if replaces:
                yield events.FixedSizeRun(
                    weights=mixture.weights,
                    noise_multiplier=joint / (DISTANCE * mixture.spacing) * _DOWN,
                    conceded=mixture.conceded,
                )
            if replaces and self.plan.adjacency == "zero_out":
                # Told who is drawn: a record is one clip norm from what contributes nothing.
                never, once, *others = mixture.weights
                yield events.FixedSizeRun(
                    weights=(1e-300, never + once, *others),
                    noise_multiplier=joint / mixture.spacing * _DOWN,
                    conceded=mixture.conceded,
                )
        separation = self._phase.sampling.separation
        is_one = isinstance(drawn, events.PoissonSubsampledGaussian)
        if separation is not None and is_one and self._has_disjoint_columns(at.strategy):
            with suppress(TooLarge):
                for stretches in STRETCHES_PER_BLOCK:
                    disclosed = disclosed_steps(
                        at.strategy,
                        separation=separation,
                        probability=drawn.sampling_probability,
                        stretches=stretches,
                    )
                    if disclosed is not None:
                        yield _disclosed_releases(disclosed, joint, self._pair)

    def _forgetting(
        self, step: events.Leaf, at: CorrelatedRun, joint: float
    ) -> Iterator[events.Event]:
        """Bounds of ``b_min_sep`` by the first b entries of C, and by what the others may add.

        Source: docs/theorems/correlated-noise.md, Theorem 24.
        """
        separation, column = self._phase.sampling.separation, at.strategy.strategy_coefficients
        if separation is None or column is None or at.strategy.bands <= separation:
            return
        size = np.abs(column)
        shown, rest = (float(np.linalg.norm(part)) for part in np.split(size, [separation]))
        # Products of two columns are larger by no more than this for the rest.
        more = (2 * shown + rest) * rest * (1 + gamma(len(size) + 8))
        records = self.plan.dataset.records_per_unit * record_distance(self.plan)
        moved = math.sqrt(more) * -(-at.strategy.steps // separation) * records
        joint *= (1 - at.strategy.residual) / (1 + COEFFICIENT_ERROR) * _DOWN
        if not 0 < moved <= _MAX_FORGOTTEN * joint:
            return
        beside = events.Gaussian(noise_multiplier=joint / moved * _DOWN)
        cut = replace(at, strategy=_cut(at.strategy, separation))
        bounds = *self._mixture_bounds(step, cut, joint), self._sampled_columns(step, cut, joint)
        for bound in bounds:
            if bound is not None:
                yield events.Composed(events=(bound, beside))

    def _left_out_lots(self, at: CorrelatedRun, joint: float) -> Iterator[events.Event]:
        """The bound of a shuffled run within one epoch, by the records in its lots."""
        steps = at.strategy.steps
        if self._phase.sampling.scheme == "shuffled" and steps <= at.turn:
            alone = joint / _max_column_norm(at.strategy) * _DOWN
            if (sample := sample_of_lots(self.plan, self.index, steps, alone)) is not None:
                yield sample

    def _lots_at_random(self, at: CorrelatedRun, joint: float) -> Iterator[events.Event]:
        """Bounds of a record that is in one random lot of each epoch."""
        plan, steps, scheme = self.plan, at.strategy.steps, self._phase.sampling.scheme
        if scheme == "balls_in_bins":
            is_hidden, place = is_amplified(plan), None
        elif scheme == "shuffled":
            is_hidden, place = is_placed_at_random(plan, self.index, steps), place_of(plan)
        else:
            return
        independent = SCHEMES[scheme].independent
        if not is_hidden or independent is None:
            return
        epochs, scale = -(-steps // at.turn), (record_distance(plan) / joint) ** 2
        known = (at.distance * at.sensitivity.value / joint) ** 2
        stretch, white, apart = math.inf, math.inf, math.inf
        lots: LotsApart | None = None
        disclosed: list[DisclosedLots] = []
        with suppress(TooLarge):
            stretch = max_stretch(at.strategy, 1)
            white = log_divergence(
                at.turn, epochs * stretch**2 * scale
            )  # a bin is that of all epochs
            if place is not None:
                white = epochs * placed_divergence([(at.turn, (stretch / joint) ** 2)], place)
        with suppress(TooLarge):
            chosen_at = scale if place is None else 1 / joint**2
            disclosed = disclosed_lots(at.strategy, turn=at.turn, scale=chosen_at, place=place)
            apart = disclosed[0].log_divergence if disclosed else math.inf
            if place is None:
                lots = lots_apart(at.strategy, turn=at.turn, scale=scale)
        common = math.inf if lots is None else lots.log_divergence(scale)
        most = min(known, _MAX_RATIO * min(white, apart, common))
        if white < most:
            run = independent(plan, self.index).of_run(joint / stretch * _DOWN, steps)
            yield from (
                bound for bound in events.alternatives(run) if not events.is_unsampled(bound)
            )
        if lots is not None and common < most:
            yield _allocated_apart(lots, joint)
        if place is None:
            with suppress(TooLarge):
                overlapping = overlapping_lots(at.strategy, turn=at.turn)
                if self._is_whole_run and overlapping.log_divergence(scale) < most:
                    yield events.OverlappingBins(
                        products=overlapping.products,
                        noise_multiplier=joint / record_distance(plan) * _DOWN,
                        longer=overlapping.longer,
                        less=overlapping.less,
                    )
            if disclosed and (few := disclosed[0]).width > 1 and apart < most:
                width, alone = few.width, joint / few.stretch
                shown, at_least = -(-steps // width), math.sqrt(max(1, steps // at.turn))
                longer = longer_lots(steps, turn=at.turn, width=width, lots=few.lots)
                yield events.RandomAllocationGaussian(
                    bins=few.lots,
                    noise_multiplier=alone / math.sqrt(epochs) * _DOWN,
                    attained_at=None if longer is None else alone / at_least * _DOWN,
                    released=shown if shown < few.lots else None,
                    longer=longer,
                )
            return
        for few in disclosed[:_WIDTHS]:
            if few.log_divergence < most:
                yield _placed_in_disclosed(few, joint, place, turn=at.turn, steps=steps)
        if epochs == 1:
            with suppress(TooLarge):
                scale = (DISTANCE / joint) ** 2
                revealed = lots_apart(at.strategy, turn=at.turn, scale=scale)
                # Two links, each as far apart as two records.
                if revealed is not None and revealed.log_divergence(scale) < known / 4:
                    yield events.ChainOfNeighbours(
                        event=_allocated_apart(revealed, joint / DISTANCE), links=2
                    )

    def _placed_user(self, at: CorrelatedRun, joint: float) -> Iterator[events.Event]:
        """Bounds of a unit whose records are in random lots of the epochs, by how these meet."""
        records, scheme = self.plan.dataset.records_per_unit, self._phase.sampling.scheme
        is_shuffled, pair = scheme == "shuffled", self._pair
        # Costs given the lots, and moves of a replaced record, are not composed with others.
        alone = is_shuffled or pair == "replace_one"
        if alone and not self._is_whole_run:
            return
        if records == 1 and is_shuffled and at.strategy.steps > at.turn:
            with suppress(TooLarge):
                reordered = reordered_mixture(at.strategy, turn=at.turn)
                yield events.FixedSizeRun(
                    weights=reordered.weights,
                    noise_multiplier=joint
                    / (reordered.spacing * record_distance(self.plan))
                    * _DOWN,
                    conceded=reordered.conceded,
                )
        if records == 1 or not (is_shuffled or scheme == "balls_in_bins"):
            return
        with suppress(TooLarge):
            placed = placed_mixture(
                at.strategy,
                turn=at.turn,
                records=records,
                drawn_anew=is_shuffled,
                distinct_of=self.plan.dataset.size if is_shuffled else None,
            )
            multiplier = joint / placed.spacing * _DOWN
            if is_shuffled:
                yield events.FixedSizeRun(
                    weights=placed.weights,
                    noise_multiplier=multiplier / record_distance(self.plan),
                    conceded=placed.conceded,
                )
            else:
                yield events.GaussianMixture(
                    weights=placed.weights,
                    noise_multiplier=multiplier,
                    conceded=placed.conceded,
                    pair=pair,
                )

    def _replaced_in_groups(self, at: CorrelatedRun, joint: float) -> Iterator[events.Event]:
        """Bounds of a replaced record of ``cyclic_poisson``, which may change its group."""
        step = self._drawn_in_group(joint)
        if self._pair == "replace_one" and isinstance(step, events.PoissonSubsampledGaussian):
            yield from self._mixture_bounds(step, at, joint)
            if self._is_whole_run:
                with suppress(TooLarge):
                    yield self._replaced_columns(step, at, joint)

    def _replaced_columns(
        self, step: events.PoissonSubsampledGaussian, at: CorrelatedRun, joint: float
    ) -> events.OverlappingColumns:
        """Return the columns of a record and of another group's that takes its place.

        Steps of the two are matched, at most half a turn apart. Raises ``TooLarge``.
        Source: docs/theorems/correlated-noise.md, after Theorem 23.
        """
        products = np.maximum.accumulate(products_by_lag(at.strategy)[::-1])[::-1]
        further = products[(at.turn + 1) // 2 :: at.turn]
        others = 2 * float(further.sum()) * (1 + len(products) * 2.0**-52)
        return events.OverlappingColumns(
            own=max(float(products[0]), others),
            others=others,
            largest_other=float(further.max(initial=0.0)),
            draws=1,
            sampling_probability=step.sampling_probability,
            steps=-(-at.strategy.steps // at.turn) + 1,
            noise_multiplier=joint * _DOWN,
            neighbours="replace_one",
        )

    def _drawn_in_group(self, joint: float) -> Untruncated | None:
        """Return a step of ``cyclic_poisson`` that draws a unit's records, or None without one."""
        records, chance = self.plan.dataset.records_per_unit, self._sampler.probability
        if self._phase.sampling.groups is None or chance is None or records > events.MAX_RECORDS:
            return None
        probability = schedule.double_up(chance)
        if records == 1:
            return events.PoissonSubsampledGaussian(
                sampling_probability=probability, noise_multiplier=joint, pair=self._pair
            )
        return events.PoissonSampledGroupGaussian(
            records=records,
            sampling_probability=probability,
            noise_multiplier=joint,
            pair=self._pair,
        )

    def _participation_mixture(self, step: Untruncated, at: CorrelatedRun) -> ParticipationMixture:
        """Return how far a record, sampled as in ``step``, moves the run; raises ``TooLarge``."""
        probability, separation = step.sampling_probability, self._phase.sampling.separation
        records = step.records if isinstance(step, events.PoissonSampledGroupGaussian) else 1
        is_alone = records == 1 and self._has_disjoint_columns(at.strategy)
        if isinstance(at.strategy, Tree):
            with suppress(TooLarge):
                return tree_mixture(
                    at.strategy,
                    turn=at.turn,
                    probability=probability,
                    records=records,
                    separation=separation or 1,
                )
        if separation is not None and is_alone:
            return separated_mixture(
                _max_column_norm(at.strategy), at.strategy.steps, probability, separation
            )
        return participation_mixture(
            at.strategy, turn=at.turn, probability=probability, records=records
        )

    def _overlapping_columns(
        self, step: events.Leaf, at: CorrelatedRun, joint: float
    ) -> Iterator[events.Event]:
        """Bounds of a whole run that may draw a record in every step, by products of its steps."""
        if not (self._may_be_in_any_step and self._is_whole_run):
            return
        steps = at.strategy.steps
        drawn, displaces, _ = _independent_draws(step, steps)
        if drawn is None:
            return
        ways = [(float(displaces), 0.0)]
        if isinstance(step, Truncated):
            # Only in lots that are cut the record takes the place of another, or that it is in any
            # is conceded.
            crowded, (drawn_there, *_) = crowded_probability(step), draws_above(step, steps)
            ways = [(crowded, 0.0)] if drawn_there > NEGLIGIBLE_PROBABILITY else []
            if drawn_there < _MAX_CONCEDED:
                ways.append((0.0, drawn_there))
        with suppress(TooLarge):
            products = products_by_lag(at.strategy)
            largest = float(products[1:].max(initial=0.0))
            run = events.OverlappingColumns(
                own=float(products[0]),
                others=max(largest, sum_of_products(at.strategy)),
                largest_other=largest,
                draws=getattr(drawn, "records", 1),
                sampling_probability=drawn.sampling_probability,
                steps=steps,
                noise_multiplier=joint * _DOWN,
            )
            nodes = nodes_of_levels(at.strategy)
            for crowded, conceded in ways:
                neighbours = self.plan.adjacency if crowded else self._pair
                yield replace(
                    run,
                    neighbours=neighbours,
                    crowded=crowded,
                    conceded=conceded,
                    nodes=nodes,
                )
            if isinstance(step, FixedSize) and run.draws == 1:
                entire = (run.own + run.others) / joint**2
                for part in _PARTS if entire < _MAX_SHOWN else ():
                    yield _with_shown_draws(run, self.plan.adjacency, part)

    def _sampled_columns(
        self, step: events.Leaf, at: CorrelatedRun, joint: float
    ) -> events.SampledColumns | None:
        """Return the run as columns, whose moments are computed; None for too many states."""
        if not isinstance(step, Untruncated) or step.pair == "replace_one":
            return None
        separation, records = self._phase.sampling.separation or 1, getattr(step, "records", 1)
        if records > 1 and separation == 1:
            return None
        # Without a wait there are two states per overlap, and a record may be in all of them.
        if separation == 1 and (at.strategy.bands - 1) // at.turn > MAX_OVERLAPS:
            return None
        try:
            products = products_by_lag(at.strategy)[:: at.turn]
        except TooLarge:
            return None
        shown = _LAGS_PER_SEPARATION * separation if separation > 1 else len(products)
        return events.SampledColumns(
            products=tuple(map(float, products[:shown])),
            sampling_probability=step.sampling_probability,
            separation=separation,
            steps=-(-at.strategy.steps // at.turn),
            noise_multiplier=joint * _DOWN,
            beyond=float(products[shown:].max(initial=0.0)),
            records_per_unit=records,
        )

    def attained(self, joint: float, steps: int) -> events.Event:
        """Return a release that one unit can cause at σ_joint, whose loss ``event`` bounds.

        In a fixed order the record repeats its gradient, with signs, in the worst of its patterns.
        In random lots it takes part in one step; in the steps of its group or bin, if their columns
        are orthogonal; in the turns whose columns are nearly so; or in all of them, as seen along
        one direction of the outputs, or as so many steps or bins that show nothing together.
        """
        return _attained(self, joint, steps)

    def attack(self, joint: float, steps: int) -> tuple[events.TestedSums, int] | None:
        """Return what an attack tests on a record in the place of others, and the number of such.

        All others contribute the opposite in lots of a fixed size, and the record is set to zero.
        """
        return _attack(self, joint, steps)

    def find_attack(self, joint: float, steps: int) -> tuple[events.TestedSums, int] | None:
        """Find what ``attack`` returns, in some hundredths of a second."""
        at, sampled, plan = self.at(steps), self._sampler.claimed, self.plan
        if (independent := self._independent(at)) is not None:
            entry = independent[1].attained
            return None if sampled.attack is None else sampled.attack(joint / entry * _UP, steps)
        is_one = plan.dataset.records_per_unit == 1 and plan.adjacency == "zero_out"
        if not (is_one and self._is_whole_run and self._phase.sampling.scheme == "fixed_size"):
            return None
        lot = self._lot_of_fixed_size(joint)
        mixture = displaced_draws_mixture(
            project_columns(at.strategy, at.turn),
            probability=at_least_drawn(lot).sampling_probability,
        )
        if mixture is None:
            return None
        multiplier = joint / mixture.spacing * _UP
        return events.DisplacedSum(weights=mixture.weights, noise_multiplier=multiplier), 1

    def find_attained(self, joint: float, steps: int) -> events.Event:
        """Find the release that ``attained`` returns, in a tenth of a second."""
        at, sampler = self.at(steps), self._sampler
        if (independent := self._independent(at)) is not None:
            alone, entry = independent
            return self.attained_alone(alone, joint / entry.attained, steps)
        if at.route == "balls_in_bins":
            gram = self._gram(at, visible_only=True)
            return events.BallsInBinsGaussian(gram=gram, noise_multiplier=joint)
        if sampler.probability is None and not sampler.fresh:
            sensitivity = self._attained_sensitivity(at)
            return events.Gaussian(noise_multiplier=joint / (at.distance * sensitivity) * _UP)
        norms, drawn = self._steps_apart(at, joint)
        leaves = [(self._drawn_apart(joint / norm * _UP, drawn), count) for norm, count in norms]
        one_by_one = events.Composed(
            events=tuple(events.Repeated(event=leaf, count=count) for leaf, count in leaves)
        )
        shown = one_by_one, *self._seen_together(joint, at)
        if len(shown) == 1:
            return one_by_one
        along_direction, *others = shown[1:]
        if isinstance(along_direction, events.Composed) and isinstance(
            first := along_direction.events[0], events.GaussianMixture
        ):
            norm, count = norms[0]
            rate = getattr(leaves[0][0], "sampling_probability", 1.0)
            of_steps = count * math.log1p(rate**2 * math.expm1(min(100.0, (norm / joint) ** 2)))
            if of_steps <= _log_divergence(first):
                return events.EitherBound(events=(along_direction, one_by_one, *others))
        return events.EitherBound(events=shown)

    def attained_alone(self, alone: Sampled, joint: float, steps: int) -> events.Event:
        """Return ``attained`` for independent noise, from what ``alone`` attains.

        The outputs of each epoch are added up. Orders are independent, and bins that are kept are
        in each whole epoch once.
        """
        attained = alone.attained_by_run(joint, steps)
        in_turns = self._phase.sampling.scheme in ("balls_in_bins", "shuffled")
        # Where the bound is attained nothing shows more.
        if not (in_turns and alone.attained and (turn := self._sampler.turn) <= MAX_VECTOR):
            return attained
        epochs, rest = divmod(steps, turn)
        together = []
        for released, count in ((turn, epochs), (rest, 1)):
            if released and count:
                shown = np.full(released, math.sqrt(1 / released) * _DOWN)
                epoch = self._seen_along_direction(joint, shown, turn)
                if epoch is None:
                    return attained
                together.append(events.Repeated(event=epoch, count=count))
        return events.EitherBound(events=(attained, events.Composed(events=tuple(together))))

    def _steps_apart(
        self, at: CorrelatedRun, joint: float
    ) -> tuple[tuple[tuple[float, int], ...], float | None]:
        """Return steps that show at least so many separate releases, and their probability.

        Of each there are the column norm, or less, and the number. The probability is that of a
        record, or None if the sampler of a step has it.
        """
        sampler, steps = self._sampler, at.strategy.steps
        norms: tuple[tuple[float, int], ...] = ((_attained_column_norm(at.strategy), 1),)
        probability, separation = None, self._phase.sampling.separation
        if sampler.probability is not None:
            probability = math.nextafter(float(sampler.probability), 0.0)
        in_groups = self._phase.sampling.groups is not None
        if self._phase.sampling.scheme == "balls_in_bins":
            norms = ((max(norms[0][0], _longest_bin(at.strategy, at.turn)), 1),)
        elif in_groups and at.strategy.bands <= at.turn:
            norms = _norms_of_a_group(at.strategy, at.turn)
        elif separation is not None:
            if (spacing := max(separation, at.strategy.bands)) < steps:
                # The record waits for none of these steps if it was in none of the b - 1 before.
                largest = float(schedule.highest_probability(self.plan, self._phase))
                drawn = largest * (1 - largest) ** (separation - 1) * (1 - 1e-12)
                if probability is not None and drawn * (steps // spacing) > probability:
                    norms, probability = _norms_of_a_group(at.strategy, spacing), drawn
        elif sampler.fresh or in_groups:
            shown = _norms_one_by_one(at.strategy, at.turn)
            if at.route == "white_noise" or _divergence(shown, joint) >= _divergence(norms, joint):
                norms = shown
        return norms, probability

    def _drawn_apart(self, multiplier: float, probability: float | None) -> events.Leaf:
        """Return a release of a step, whose records have this ``probability``, of all of a unit.

        In random orders each lot is a sample of a fixed size; others contribute the opposite of a
        replaced record.
        """
        sampler, records = self._sampler, self.plan.dataset.records_per_unit
        if probability is None:
            assert sampler.step is not None
            return among_zero_records(sampler.step.event(multiplier))
        pair = self._pair
        if self._phase.sampling.scheme in ("shuffled", "fixed_size"):
            reach = DISTANCE if pair == "replace_one" else 1.0
            return at_least_drawn(self._lot_of_fixed_size(multiplier / reach * _UP))
        if records == 1 or records > events.MAX_RECORDS:
            return events.PoissonSubsampledGaussian(
                sampling_probability=probability, noise_multiplier=multiplier, pair=pair
            )
        return events.PoissonSampledGroupGaussian(
            records=records,
            sampling_probability=probability,
            noise_multiplier=multiplier,
            pair=pair,
        )

    def _lot_of_fixed_size(self, multiplier: float) -> FixedSize:
        """Return the release of one lot, a sample without replacement."""
        records, sampling = self.plan.dataset.records_per_unit, self._phase.sampling
        size, lot = self.plan.dataset.size, sampling.lot_size
        assert size is not None
        assert lot is not None
        if records == 1:
            return events.WithoutReplacementGaussian(
                dataset_size=size, sample_size=lot, noise_multiplier=multiplier
            )
        return events.WithoutReplacementGroupGaussian(
            records=records, dataset_size=size, sample_size=lot, noise_multiplier=multiplier
        )

    def _attained_sensitivity(self, at: CorrelatedRun) -> float:
        """Return what a pattern of the sampler attains; the plan may allow other patterns."""
        participation = sampler_participation(self.plan, self.index, at.strategy.steps)
        try:
            return _sensitivity(at.strategy, participation).attained
        except Unaffordable:
            return _attained_column_norm(at.strategy)

    def _seen_together(self, joint: float, at: CorrelatedRun) -> Iterator[events.Event]:
        """Yield what the run shows of all steps of a unit, the quickest first."""
        in_turns = self._phase.sampling.scheme in ("balls_in_bins", "shuffled")
        shown = project_columns(at.strategy, 1 if in_turns else at.turn)
        if (together := self._seen_along_direction(joint, shown, at.turn)) is not None:
            yield events.Composed(events=(together,))
        if at.strategy.is_nonnegative:
            if (in_blocks := self._seen_in_blocks(joint, at, together)) is not None:
                yield in_blocks
            if (allocated := self._allocated(joint, at)) is not None:
                yield allocated

    def _seen_in_blocks(
        self, joint: float, at: CorrelatedRun, together: events.Leaf | None
    ) -> events.Event | None:
        """Return stretches of a run as releases of their own, if they show more than ``together``.

        Source: docs/theorems/correlated-noise.md, Theorem 13.
        """
        draws_alike = self._phase.sampling.separation is None and (
            self._phase.sampling.scheme not in ("balls_in_bins", "shuffled")
        )
        if not (draws_alike and isinstance(together, events.GaussianMixture)):
            return None
        result, most = None, _BLOCKS_GAIN * _log_divergence(together)
        for number in _BLOCKS:
            if (blocks := project_blocks(at.strategy, at.turn, number)) is None:
                break
            shown, count = blocks
            leaf = self._seen_along_direction(joint, shown, at.turn, levels=_BLOCK_LEVELS)
            if not isinstance(leaf, events.GaussianMixture):
                break
            if (shows := count * _log_divergence(leaf)) > most:
                result, most = events.Repeated(event=leaf, count=count), shows
            elif result is not None:
                break
        return None if result is None else events.Composed(events=(result,))

    def _allocated(self, joint: float, at: CorrelatedRun) -> events.Event | None:
        """Return a random allocation of one record that the run of a C ≥ 0 shows at least."""
        scheme, steps = self._phase.sampling.scheme, at.strategy.steps
        if scheme not in ("balls_in_bins", "shuffled"):
            return None
        try:
            if scheme == "shuffled" or steps <= at.turn:
                norms = column_norms(at.strategy)
            else:
                norms = lengths_by_place(at.strategy, at.turn)
        except TooLarge:
            return None
        if scheme == "shuffled":
            alone = SCHEMES["shuffled"].independent
            assert alone is not None
            # Steps at the end of the run have the shortest columns.
            norms = np.minimum.accumulate(norms)
            number = _most_shown(norms, joint)
            least = float(norms[number - 1])
            return alone(self.plan, self.index).attained_by_run(joint / least * _UP, number)
        norms = -np.sort(-norms)
        number, rest = _most_shown(norms, joint), steps % at.turn
        shown, least = len(norms), float(norms[-1])
        if number == shown == at.turn and steps > at.turn and rest:
            number = rest  # the bins of a last, partial epoch
        is_whole = number == at.turn
        two_kinds = not is_whole and shown == at.turn and least > 0
        return events.RandomAllocationGaussian(
            bins=at.turn,
            noise_multiplier=joint / float(norms[number - 1]) * _UP,
            attained_at=joint / least * _UP if two_kinds else None,
            released=None if is_whole or two_kinds else number,
            longer=number if two_kinds else None,
        )

    def _seen_along_direction(
        self, joint: float, shown: Array, turn: int, *, levels: int = MAX_LEVELS
    ) -> events.Leaf | None:
        """Return the run as one release, along a direction that shows so much of each step."""
        step, pair, scheme = self._sampler.step, self._pair, self._phase.sampling.scheme
        records, separation = self.plan.dataset.records_per_unit, self._phase.sampling.separation
        farthest = math.inf if self._is_whole_run else joint * _MAX_MOVE
        opposite = pair == "replace_one" and scheme in ("fixed_size", "shuffled")
        # All others have the opposite gradient, and so has what replaces the record.
        reach = DISTANCE if opposite else 1.0
        if opposite:
            pair, farthest = "add_remove", farthest / reach
        mixture: ParticipationMixture | None
        if separation is not None:
            mixture = separated_draws_mixture(
                shown,
                probability=schedule.highest_probability(self.plan, self._phase),
                separation=separation,
                records=records,
                farthest=farthest,
            )
        elif scheme == "balls_in_bins":
            mixture = kept_bins_mixture(shown, turn=turn, records=records, farthest=farthest)
        elif scheme == "shuffled":
            lot = self._lot_of_fixed_size(joint)
            mixture = shuffled_epochs_mixture(
                shown,
                turn=turn,
                size=lot.dataset_size,
                lot=lot.sample_size,
                records=records,
                farthest=farthest,
            )
        else:
            leaf: events.Leaf | None = self._drawn_in_group(joint)
            if leaf is None and step is not None:
                leaf = step.event(joint)
            if isinstance(leaf, FixedSize):
                leaf = at_least_drawn(leaf)
            elif isinstance(leaf, Truncated):
                leaf = at_least_left(leaf)
            if not isinstance(leaf, Untruncated):
                return None
            mixture = independent_draws_mixture(
                shown,
                probability=leaf.sampling_probability,
                records=getattr(leaf, "records", 1),
                farthest=farthest,
                levels=levels,
            )
        if mixture is None:
            return None
        multiplier = joint / (reach * mixture.spacing) * _UP
        if max(mixture.weights) == 1:
            # Nothing but the noise is random.
            surely = mixture.weights.index(1.0) * (2 if pair == "replace_one" else 1)
            return events.Gaussian(noise_multiplier=multiplier / surely * _UP)
        return events.GaussianMixture(
            weights=mixture.weights, noise_multiplier=multiplier, pair=pair
        )

    def at(self, steps: int) -> CorrelatedRun:
        """Return the phase with ``steps``; raises ``RefusedPlan`` if nothing may be claimed."""
        participation = participation_of(self.plan, self.index, steps)
        sampler, phase = self._sampler, self._phase
        try:
            self._require_values_per_step(steps)
            # A strategy for fresh lots is optimised for one participation, whatever the unit: links
            # of a chain and groups of records are bounded for the run of another unit.
            optimised_for = (
                Participation.single()
                if sampler.fresh or self._waits_at_random
                else optimised_participation(self.plan, self.index, steps)
            )
            period = sampler.turn if sampler.strategies_restart else None
            strategy = _built(
                phase.noise, steps, optimised_for, self.workload, period, phase.clip_schedule
            )
            route = sampler.route(strategy)
            counted = Participation.single() if route == "cyclic_poisson" else participation
            white = _white_noise(strategy, sampler) if route == "gaussian" else None
            try:
                sensitivity = _sensitivity(strategy, counted)
            except Unaffordable:
                if white is None:
                    raise
                sensitivity = white
            unsampled = None
            if white is not None:
                costs = "less"
                if not self._has_disjoint_columns(strategy):
                    costs = _compare_costs(sampler, white, sensitivity, steps)
                if costs != "more":
                    unsampled = sensitivity if costs == "either" else None
                    route, sensitivity = "white_noise", white
        except (ValueError, UnregisteredNoise) as error:
            raise self._refused_strategy(error) from None
        return CorrelatedRun(
            strategy=strategy,
            participation=participation,
            sensitivity=sensitivity,
            route=route,
            distance=_truncated_distance(sampler) or lot_distance(self.plan, self.index),
            turn=sampler.turn,
            unsampled=unsampled,
        )

    @property
    def workload(self) -> Workload:
        """The workload of the plan, with the learning rates of the steps of this phase."""
        provided = self.plan.workload
        if provided is None:
            return Workload()
        rates = provided.learning_rates
        if rates is not None:
            earlier = [schedule.steps(self.plan, phase) for phase in self.plan.phases]
            rates = rates[sum(steps or 0 for steps in earlier[: self.index]) :]
        return Workload(momentum=provided.momentum or 0.0, learning_rates=rates)

    def _has_disjoint_columns(self, strategy: Strategy) -> bool:
        """Whether ``b_min_sep`` keeps the columns of one record from sharing rows.

        The distribution of its participations then also bounds the run without amplification.
        """
        separation = self._phase.sampling.separation
        return separation is not None and strategy.bands <= separation

    def _gram(self, at: CorrelatedRun, *, visible_only: bool = False) -> events.Gram:
        rows = gram(at.strategy, at.turn, visible_only=visible_only)
        return events.Gram(rows=tuple(tuple(map(float, row)) for row in rows))

    def _require_values_per_step(self, steps: int) -> None:
        """Require one learning rate and one clip norm per step, where the plan lists any."""
        clip_norms, rates = self._phase.clip_schedule, self.workload.learning_rates
        is_last = self.index == len(self.plan.phases) - 1
        if clip_norms is not None and len(clip_norms) != steps:
            pointer, what = self.plan.pointer(self.index, "clip_schedule"), "clip factors"
        elif rates is not None and (len(rates) < steps or (is_last and len(rates) > steps)):
            pointer, what = "/workload/learning_rates", "learning rates"
        else:
            return
        raise RefusedPlan.with_reason(
            code="steps_mismatch",
            pointer=pointer,
            message=f"the {what} must have one value for each of the {steps} steps.",
            remedy="Give one value per step.",
        )

    def _require_any_length(self) -> None:
        """Require noise and participation that do not depend on the steps, to solve for them."""
        phase = self._phase
        if self.workload.learning_rates is not None:
            field, why = "steps", "the workload lists a learning rate per step"
        elif phase.clip_schedule is not None:
            field, why = "clip_schedule", "the clip schedule lists a factor per step"
        elif phase.participation is not None and phase.participation.participations is not None:
            field, why = "participation", "the participations are given"
        elif phase.noise.depends_on_steps:
            field, why = "noise", f"the {phase.noise.kind} strategy depends on the number of steps"
        else:
            return
        raise self._refused(
            code="steps_not_open",
            field=field,
            message=f"the steps cannot be solved for, because {why}.",
            remedy="Give the steps.",
        )

    def _refused_strategy(self, error: Exception) -> RefusedPlan:
        """Return the refusal for an error of building the strategy or of its sensitivity."""
        kind = self._phase.noise.kind
        message = f"the {kind} noise cannot be used: {error}."
        match error:
            case TooLarge() | Unaffordable():
                has_too_many_buffers = isinstance(error, TooManyBuffers)
                return self._refused(
                    code="too_expensive",
                    message=f"this plan exceeds the computation limit: {error}.",
                    remedy="Run fewer steps, or use a structured strategy."
                    if not has_too_many_buffers
                    else "Ask for fewer buffers, or give the decays and scales.",
                )
            case IllConditioned():
                remedy = "Give noise whose inverse is bounded."
                return self._refused(code="ill_conditioned", message=message, remedy=remedy)
            case UnsupportedObjective():
                remedy = "Use another kind of noise."
                return self._refused(code="unsupported", message=message, remedy=remedy)
            case StepsMismatch():
                remedy = "Give as many rows as steps."
                return self._refused(code="steps_mismatch", message=message, remedy=remedy)
            case UnregisteredNoise():
                return self._refused(
                    code="file_not_given",
                    message="the noise is in a file, which cannot be opened here.",
                    remedy="At the command line give the plan beside the file (verify: --plan), "
                    "or give rows.",
                )
            case _:
                remedy = "Correct the noise."
                return self._refused(code="invalid_noise", message=message, remedy=remedy)

    def _refused(
        self, *, code: str, message: str, remedy: str, field: str = "noise"
    ) -> RefusedPlan:
        pointer = self.plan.pointer(self.index, field)
        return RefusedPlan.with_reason(code=code, pointer=pointer, message=message, remedy=remedy)


@lru_cache(maxsize=8)
def _attained(correlation: Correlation, joint: float, steps: int) -> events.Event:
    return correlation.find_attained(joint, steps)


@lru_cache(maxsize=8)
def _attack(
    correlation: Correlation, joint: float, steps: int
) -> tuple[events.TestedSums, int] | None:
    return correlation.find_attack(joint, steps)


def _independent_draws(
    step: events.Leaf, steps: int
) -> tuple[Untruncated | None, bool, dict[int, float]]:
    """Return what is drawn for itself in a step, and whether it takes the place of others.

    Draws into truncated lots may be counted instead: by number, with the probability of more. There
    are no draws if they are not independent, or if all succeed.
    """
    if isinstance(step, FixedSize):
        return at_most_drawn(step), True, {}
    if isinstance(step, Truncated):
        counts = truncated_draw_counts(step, steps)
        return without_truncation(step), 0 not in counts, counts
    return (step, False, {}) if isinstance(step, Untruncated) else (None, False, {})


def _with_shown_draws(
    run: events.OverlappingColumns, adjacency: events.Neighbours, part: float
) -> events.OverlappingColumns:
    """Return ``run`` with a ``part`` of its noise for releases that show if a record is drawn.

    Whose place the record takes adds nothing to that. Source: docs/theorems/correlated-noise.md,
    Theorem 32.
    """
    return replace(
        run,
        noise_multiplier=run.noise_multiplier * math.sqrt(1 - part) * _DOWN,
        neighbours="replace_one" if adjacency == "replace_one" else "add_remove",
        shown=(run.own + run.others) / run.noise_multiplier**2 / part * (1 + 2.0**-50),
    )


def _allocated_apart(lots: LotsApart, joint: float) -> events.Event:
    """Return the cost of ``lots`` at σ_joint, in the distance that a record moves a lot."""
    allocated = events.RandomAllocationGaussian(
        bins=lots.lots,
        noise_multiplier=joint / math.sqrt(lots.own) * _DOWN,
        attained_at=None if lots.longer is None else joint / math.sqrt(lots.less) * _DOWN,
        released=lots.released,
        longer=lots.longer,
    )
    if not lots.common:
        return allocated
    shared = events.Gaussian(noise_multiplier=joint / math.sqrt(lots.common) * _DOWN)
    return events.Composed(events=(shared, allocated))


def _placed_in_disclosed(
    disclosed: DisclosedLots, joint: float, place: Place, *, turn: int, steps: int
) -> events.Event:
    """Return the cost of ``disclosed`` lots by epochs, for a record in another's place."""
    epochs, rest = divmod(steps, turn)
    parts = (
        (disclosed.lots, epochs),
        (min(disclosed.lots, -(-rest // disclosed.width)), 1 if rest else 0),
    )
    longer = 2 * disclosed.ends or disclosed.lots
    return events.Composed(
        events=tuple(
            events.Repeated(
                event=events.ReplacedAllocationGaussian(
                    bins=released,
                    noise_multiplier=joint / disclosed.stretch * _DOWN,
                    drawn=schedule.double_up(Fraction(released, disclosed.lots)),
                    place=place,
                    longer=longer if longer < released else None,
                    others_at=joint / disclosed.inner * _DOWN if longer < released else None,
                ),
                count=count,
            )
            for released, count in parts
            if count
        )
    )


def _disclosed_releases(
    disclosed: DisclosedSteps, joint: float, pair: events.SubsampledPair
) -> events.Event:
    """Return the releases of ``disclosed`` at σ_joint; the first one concedes its probability."""
    (norm, _), *_ = disclosed.norms
    first = events.GaussianMixture(
        weights=(1 - disclosed.probability, disclosed.probability),
        noise_multiplier=joint / norm * _DOWN,
        conceded=disclosed.conceded,
        pair=pair,
    )
    others = (
        events.Repeated(
            event=events.PoissonSubsampledGaussian(
                sampling_probability=disclosed.probability,
                noise_multiplier=joint / norm * _DOWN,
                pair=pair,
            ),
            count=count - (place == 0),
        )
        for place, (norm, count) in enumerate(disclosed.norms)
    )
    return events.Composed(events=(first, *others))


def _log_divergence(mixture: events.GaussianMixture) -> float:
    """Return about log(1 + χ²) of a mixture from its first component."""
    moves = np.arange(len(mixture.weights)) / mixture.noise_multiplier
    weights = np.array(mixture.weights)
    products = np.expm1(np.minimum(np.multiply.outer(moves, moves), 100))
    return math.log1p(float(weights @ products @ weights))


def _white_noise(strategy: Strategy, sampler: RunSampler) -> Sensitivity | None:
    """Return ‖C_S‖ if sampling amplifies rounds with white noise, else None.

    C_S has the steps of a group. One step attains the largest column norm.
    """
    if sampler.step is None:
        return None
    try:
        stretch = max_stretch(strategy, sampler.turn)
    except TooLarge:
        return None
    return Sensitivity(value=stretch, attained=_attained_column_norm(strategy))


def _truncated_distance(sampler: RunSampler) -> int | None:
    """Return how far a unit moves the sum of a truncated lot, in clip norms; None without one."""
    step = None if sampler.step is None else sampler.step.event(1.0)
    return displacement(step) if isinstance(step, Truncated) else None


def _compare_costs(
    sampler: RunSampler, white: Sensitivity, whole: Sensitivity, steps: int
) -> Literal["less", "more", "either"]:
    """Return whether sampled rounds of white noise cost less than the run without amplification.

    They cost less if more rounds than break even have the unit with at most
    ``NEGLIGIBLE_PROBABILITY``, and more if no more of them are drawn. For truncated lots the second
    is not known.
    """
    assert sampler.step is not None
    truncated = _truncated_distance(sampler) is not None
    rounds, chance = -(-steps // sampler.turn), min(1.0, sampler.step.probability or 1.0)
    records = getattr(sampler.step.event(1.0), "records", 1)
    probability = chance if records == 1 else 1 - (1 - chance) ** records
    drawn = math.floor((whole.value / white.value) ** 2)
    if white is whole:
        return "less"
    if sampler.step.attained is not None:
        return "either"  # the bound of a step is that of a record that moves it further
    if drawn >= rounds:
        return "less"
    if bdtrc(drawn, rounds, probability) < NEGLIGIBLE_PROBABILITY:
        return "less"
    is_rare = bdtr(drawn, rounds, probability) < NEGLIGIBLE_PROBABILITY
    return "more" if is_rare and not truncated else "either"


@lru_cache(maxsize=8)
def _built(
    noise: Noise,
    steps: int,
    participation: Participation,
    workload: Workload,
    period: int | None,
    clip_schedule: tuple[float, ...] | None,
) -> Strategy:
    setting = Setting(steps=steps, participation=participation, workload=workload, period=period)
    strategy = build(noise, setting)
    return strategy if clip_schedule is None else Scheduled.of(strategy, clip_schedule)


@lru_cache(maxsize=8)
def _cut(strategy: Strategy, bands: int) -> Strategy:
    """Return the Toeplitz strategy of the first ``bands`` coefficients, without their signs."""
    column = strategy.strategy_coefficients
    assert column is not None
    return Toeplitz.from_strategy(np.abs(column[:bands]).tolist(), steps=strategy.steps)


@lru_cache(maxsize=8)
def _sensitivity(strategy: Strategy, participation: Participation) -> Sensitivity:
    """Return sens of a strategy object; ``_built`` returns one object for one description."""
    result = pattern_sensitivity(strategy, participation)
    if not (math.isfinite(result.value) and result.value > 0):
        raise IllConditioned("its sensitivity is not a finite positive number")
    return result


def _max_column_norm(strategy: Strategy) -> float:
    """Return an upper bound of the largest column norm."""
    return _sensitivity(strategy, Participation.single()).value


def _entry_of_identity(strategy: Strategy) -> Sensitivity | None:
    """Return the entry of C if it is a multiple of I, rounded past one quotient; else None."""
    if strategy.bands > 1:
        return None
    columns = strategy.strategy_coefficients, strategy.noise_coefficients
    if all(column is not None and column[0] == 1 for column in columns):
        return Sensitivity(value=1.0, attained=1.0)
    largest, smallest = _max_column_norm(strategy), float(column_norms(strategy).min())
    if smallest < largest * (1 - _EQUAL):
        return None
    return Sensitivity(value=largest * _UP, attained=smallest * _DOWN)


def _attained_column_norm(strategy: Strategy) -> float:
    """Return a lower bound of the largest column norm."""
    return _sensitivity(strategy, Participation.single()).attained


@lru_cache(maxsize=8)
def _norms_of_a_group(strategy: Strategy, turn: int) -> tuple[tuple[float, int], ...]:
    """Return column norms b apart, with the number of columns that have at least each.

    They are those of the group with the largest sum of squares.
    """
    try:
        norms = column_norms(strategy)
    except TooLarge:
        return ((_attained_column_norm(strategy), 1),)
    group = max(range(min(turn, len(norms))), key=lambda first: sum(norms[first::turn] ** 2))
    ordered = np.sort(norms[group::turn])[::-1]
    ordered = ordered[ordered > 0]
    distinct = np.unique(ordered)[::-1]
    if len(distinct) > MAX_NORMS:
        # Norms fall towards the end of a run, and fastest there.
        remaining = np.unique(np.geomspace(1, len(ordered), MAX_NORMS).astype(int))
        distinct = ordered[len(ordered) - remaining][::-1]
    at_least = np.searchsorted(-ordered, -distinct, side="right")
    return tuple(zip(map(float, distinct), map(int, np.diff(at_least, prepend=0)), strict=True))


def _longest_bin(strategy: Strategy, turn: int) -> float:
    """Return how far a record moves the run in the first bin, or any of as many steps."""
    try:
        lengths = lengths_by_place(strategy, turn)
    except TooLarge:
        return 0.0
    # Bins that have no step more than others.
    return float(lengths[: (strategy.steps % turn) or len(lengths)].max())


def _divergence(norms: tuple[tuple[float, int], ...], joint: float) -> float:
    """Return about the divergence of releases of these norms and numbers, but for the rate."""
    return sum(count * math.expm1(min(100.0, (norm / joint) ** 2)) for norm, count in norms)


def _most_shown(norms: Array, joint: float) -> int:
    """Return how many of the ``norms``, which fall, show most if they count as the least."""
    divergences = np.expm1(np.minimum((norms / joint) ** 2, 100.0))
    return int(np.argmax(np.arange(1, len(norms) + 1) * divergences)) + 1


def _norms_one_by_one(strategy: Strategy, turn: int) -> tuple[tuple[float, int], ...]:
    """Return norms and counts of releases that steps b = ``turn`` apart show at least.

    For C ≥ 0 these are its columns: where they overlap, they show more (Kahane's inequality).
    """
    with suppress(TooLarge):
        if strategy.is_nonnegative and column_norms(strategy).size:
            return _norms_of_a_group(strategy, turn)
    return (min_stretch(strategy, turn),)
