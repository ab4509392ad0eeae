"""Run an attack: draw lots on both data sets, release noisy sums, test them, and count.

For every set S of outputs, ``P(S) - e^ε P'(S)`` is at most δ(ε). ``Executed`` has the outcomes of
an attack's test in many runs on each data set, and bounds that difference with a confidence. None
of it is taken from an accountant: sums are those of the lots, noise is N z with the matrix N that
the trainer injects, and the likelihoods are those of the sums in as many more runs.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import brentq
from scipy.special import betaincinv, logsumexp

from affidavit.accountants import CountingAttack, ScoreAttack, parts
from affidavit.mechanisms import Attack, PhaseAttack, add_same_lot_blocks
from affidavit.plan import (
    Selection,
    events,
    schedule,
)
from tests.assessment.attacks.lots import FRESH, draw_lots

Array = NDArray[np.float64]
DOUBT = 1e-4 if os.environ.get("AFFIDAVIT_SEED") is None else 1e-8
"""Probability with which one bound of a probability fails; lower where seeds are new."""
MAX_SUMS = 4096
"""Different sums of a block whose likelihood is computed."""
MODELLED = 100_000
"""Runs whose sums are the law for a likelihood."""
PILOT = 1500
"""Runs by which the attacker compares the choices that are left to him."""


@dataclass(frozen=True)
class Executed:
    """Outcomes of a test, the larger the more like the first data set, on both data sets.

    Without a ``threshold`` the test is a log likelihood ratio, of which both signs are used.
    """

    first: Array
    second: Array
    threshold: float | None = None

    def most(self, epsilon: float) -> float:
        """The largest δ at ``epsilon`` with which the outcomes agree."""
        return max(up for up, _ in self._bounds(epsilon))

    def least(self, epsilon: float) -> float:
        """The largest δ at ``epsilon`` that the outcomes prove."""
        return max(down for _, down in self._bounds(epsilon))

    def _bounds(self, epsilon: float) -> Iterator[tuple[float, float]]:
        if self.threshold is not None:
            yield _difference(self.first >= self.threshold, self.second >= self.threshold, epsilon)
            return
        yield _difference(self.first > epsilon, self.second > epsilon, epsilon)
        yield _difference(self.second < -epsilon, self.first < -epsilon, epsilon)


@dataclass(frozen=True)
class Selected(Executed):
    """The least and largest losses of the runs among which the best is selected, shape (n, 2).

    The score ranks runs with a loss below s first, then those with a loss above t, and S is the
    set of outputs with a loss above t (docs/theorems/selection.md, Theorem 3). s and t are chosen
    by the first tenth of the outcomes.
    """

    def _bounds(self, epsilon: float) -> Iterator[tuple[float, float]]:
        yield self._bounds_of_order(self.first, self.second, epsilon)
        yield self._bounds_of_order(-self.second[:, ::-1], -self.first[:, ::-1], epsilon)

    @staticmethod
    def _bounds_of_order(first: Array, second: Array, epsilon: float) -> tuple[float, float]:
        chosen = len(first) // 10
        some = first[:chosen][np.isfinite(first[:chosen, 0])]
        below = [-math.inf, *np.quantile(some[:, 0], np.linspace(0, 0.9, 15))]
        above = np.quantile(some[:, 1], np.linspace(0, 1, 40))

        def hits(ends: Array, bounds: tuple[float, float]) -> Array:
            return np.asarray((ends[:, 0] >= bounds[0]) & (ends[:, 1] > bounds[1]))

        def gain(bounds: tuple[float, float]) -> float:
            own, other = (float(hits(ends[:chosen], bounds).mean()) for ends in (first, second))
            return own - math.exp(epsilon) * other

        best = max(itertools.product(below, above), key=gain)
        return _difference(hits(first[chosen:], best), hits(second[chosen:], best), epsilon)


def repetitions(selection: Selection, runs: int, source: np.random.Generator) -> NDArray[np.int64]:
    """The number K of repetitions of each of ``runs`` selections."""
    mean = float(selection.mean)
    match selection.distribution:
        case "poisson":
            return source.poisson(mean, runs)
        case "geometric":
            return source.geometric(1 / mean, runs)
        case "logarithmic":
            rate = brentq(lambda p: -p / (1 - p) / math.log1p(-p) - mean, 1e-9, 1 - 1e-9)
            return source.logseries(rate, runs)
        case other:
            raise NotImplementedError(other)


def _difference(first: Array, second: Array, epsilon: float) -> tuple[float, float]:
    """Upper and lower bounds of P(S) - e^ε P'(S), by Clopper and Pearson."""
    (low, high), (other_low, other_high) = map(_interval, (first, second))
    return high - math.exp(epsilon) * other_low, low - math.exp(epsilon) * other_high


def _interval(hits: Array) -> tuple[float, float]:
    number, total = int(np.count_nonzero(hits)), hits.size
    low = 0.0 if number == 0 else float(betaincinv(number, total - number + 1, DOUBT))
    high = 1.0 if number == total else float(betaincinv(number + 1, total - number, 1 - DOUBT))
    return low, high


@dataclass(frozen=True)
class Choice:
    """What is left to the attacker in a phase: the unit's sign by step, 0 for none, and places."""

    signs: tuple[float, ...]
    places: tuple[int, ...]


class Execution:
    """The runs of an ``attack``; ``right_angle`` chooses among what others may contribute."""

    def __init__(
        self, attack: Attack, source: np.random.Generator, *, right_angle: bool = False
    ) -> None:
        self.attack, self.source, self.right_angle = attack, source, right_angle
        self.plan = attack.run.plan
        self.phases = [Phase(self, index, phase) for index, phase in enumerate(attack.phases)]
        best = max(itertools.product(*(phase.choices() for phase in self.phases)), key=self._value)
        for phase, choice in zip(self.phases, best, strict=True):
            phase.choice = choice

    def _value(self, choices: Sequence[Choice]) -> float:
        """About E e^{⟨m, m'⟩} for two independent runs, with m their distance to no record."""
        if self._in_order and len({choice.places for choice in choices}) > 1:
            return -math.inf  # a record has one place in all phases
        total = np.zeros(PILOT // 2)
        for phase, choice in zip(self.phases, choices, strict=True):
            phase.choice = choice
            moved = phase.pilot_means()
            half = PILOT // 2
            total += (moved[:half] * moved[half : 2 * half]).sum(axis=1)
        return float(logsumexp(total) - math.log(total.size))

    @property
    def _in_order(self) -> bool:
        return any(phase.sampling.scheme == "cyclic" for phase in self.plan.phases)

    def run(self, runs: int, delta: float) -> Executed:
        """Run the attack on both data sets; ``delta`` is that for which it counts."""
        match self.attack.tested:
            case (events.ShuffledEpoch() as epoch, times):
                return self._count_epochs(epoch, times, runs, delta)
            case (events.AllocatedRecord() as record, times):
                return self._add_scores(record, times, runs, delta)
        selection = self.attack.run.extra.selection
        if selection is None:
            return Executed(self._losses(runs, True), self._losses(runs, False))
        return self._select(runs, selection)

    def _select(self, runs: int, selection: Selection) -> Executed:
        """Release the best of several runs; ``Selected`` has the score."""
        outcomes = []
        for present in (True, False):
            numbers = repetitions(selection, runs, self.source)
            losses = self._losses(int(numbers.sum()), present)
            some = np.flatnonzero(numbers)
            begins = (np.cumsum(numbers) - numbers)[some]
            ends = np.full((runs, 2), [np.inf, -np.inf])
            ends[some, 0] = np.minimum.reduceat(losses, begins)
            ends[some, 1] = np.maximum.reduceat(losses, begins)
            outcomes.append(ends)
        return Selected(*outcomes)

    def _add_scores(
        self, record: events.AllocatedRecord, times: int, runs: int, delta: float
    ) -> Executed:
        test = ScoreAttack(record, times).test(delta)
        passes, outcomes = times // len(self.attack.counted), []
        for present in (True, False):
            cells = np.zeros(runs, dtype=np.int64)
            for phase in (self.phases[index] for index in self.attack.counted):
                # The outputs of a bin that is the same in several epochs are one sum.
                together = phase.steps // record.steps // passes
                last = passes * together * record.steps + record.longer
                seen = phase.release(runs, present)[:, :last, 0]
                whole = np.zeros((runs, -(-last // record.steps) * record.steps))
                whole[:, :last] = seen
                seen = whole.reshape(runs, passes, -1, record.steps).sum(axis=2)
                longer = np.arange(record.steps) < record.longer
                seen /= phase.sigma * np.sqrt(together + longer)
                for edges, of in ((test.edges[0], longer), (test.edges[-1], ~longer)):
                    scores = np.searchsorted(edges, seen[..., of], side="right")
                    if test.side == "add":
                        scores = edges.size - scores
                    cells += scores.sum(axis=(1, 2))
            outcomes.append(cells.astype(float))
        if test.side == "add":
            outcomes.reverse()
        return Executed(*outcomes, threshold=test.threshold)

    def _count_epochs(
        self, epoch: events.ShuffledEpoch, times: int, runs: int, delta: float
    ) -> Executed:
        threshold, count = CountingAttack(epoch, times).test(delta)
        outcomes = []
        for present in (True, False):
            large = np.zeros(runs)
            for phase in (self.phases[index] for index in self.attack.counted):
                whole = phase.steps // epoch.lots
                sums = phase.release(runs, present)[:, : whole * epoch.lots, 0] + phase.lot_size
                largest = sums.reshape(runs, whole, epoch.lots).max(axis=2)
                large += (largest > threshold * phase.sigma).sum(axis=1)
            outcomes.append(large)
        return Executed(*outcomes, threshold=count)

    def _losses(self, runs: int, present: bool) -> Array:
        result = np.zeros(runs)
        for phase in self.phases:
            result += phase.losses(phase.release(runs, present))
        return result + self._losses_of_others(runs, present)

    def _losses_of_others(self, runs: int, present: bool) -> Array:
        """The losses of what is released besides the training steps."""
        extra, result = self.attack.run.extra, np.zeros(runs)
        beside = events.Composed(events=(*extra.released_once, *extra.released_per_repetition))
        for leaf, count in parts(beside):
            shape, sigma = (runs, count), leaf.noise_multiplier
            drawn = np.full(shape, float(present))
            rate = 1.0
            if isinstance(leaf, events.PoissonSubsampledGaussian):
                rate = leaf.sampling_probability
                drawn *= self.source.random(shape) < rate
            if isinstance(leaf, events.Laplace):
                value = drawn + self.source.laplace(scale=sigma, size=shape)
                loss = (np.abs(value) - np.abs(value - 1)) / sigma
            else:
                assert isinstance(leaf, events.Gaussian | events.PoissonSubsampledGaussian)
                value = drawn + self.source.normal(scale=sigma, size=shape)
                loss = np.log1p(rate * np.expm1((value - 0.5) / sigma**2))
            result += loss.sum(axis=1)
        return result


class Phase:
    """One phase of an execution: sums along the direction of the unit, and at a right angle."""

    def __init__(self, execution: Execution, index: int, attack: PhaseAttack) -> None:
        self.execution, self.index, self.attack = execution, index, attack
        self.plan, run = execution.plan, execution.attack.run
        # Data sets that are not neighbours show nothing about the plan.
        assert attack.records <= self.plan.dataset.records_per_unit
        self.absent = attack.absent if self.plan.adjacency == "replace_one" else 0.0
        self.sampling = self.plan.phases[index].sampling
        lowered = run.phases[index]
        assert lowered.steps is not None
        assert lowered.joint is not None
        self.steps = lowered.steps
        self.sigma = add_same_lot_blocks(lowered.joint, run.extra.same_lot_multipliers)
        self.turn = schedule.lots_in_turn(self.plan, self.plan.phases[index])
        self.lot_size = self.sampling.lot_size or 0
        self.choice = Choice((1.0,) * self.steps, ())
        self._pilots: dict[tuple[int, ...], Array] = {}
        self.noise, self.clip_norms = np.eye(self.steps), np.ones(self.steps)
        self.is_correlated = lowered.correlation is not None
        self.is_whole_run = lowered.whole is not None
        if lowered.correlation is not None:
            self.noise = lowered.correlation.at(self.steps).strategy.injected.noise_matrix()
            if (scheduled := self.plan.phases[index].clip_schedule) is not None:
                self.clip_norms = np.array(scheduled)

    @cached_property
    def _root(self) -> Array:
        """The triangle whose inverse makes the noise of the run white."""
        return np.linalg.cholesky(self.noise @ self.noise.T)

    def _whiten(self, releases: Array) -> Array:
        """Releases (runs, steps, directions), in standard deviations of white noise."""
        if not self.is_correlated:
            return releases / self.sigma
        flat = np.moveaxis(releases, 1, 0).reshape(self.steps, -1)
        white = solve_triangular(self._root, flat, lower=True) / self.sigma
        return np.moveaxis(white.reshape(self.steps, len(releases), -1), 0, 1)

    def choices(self) -> list[Choice]:
        """What the attacker may choose, by his description."""
        return [
            Choice(signs, places)
            for places in self._places()
            for steps in self._steps()
            for signs in self._signs(steps)
        ]

    def _places(self) -> list[tuple[int, ...]]:
        size, records = self.plan.dataset.size or 0, self.attack.records
        match self.sampling.scheme:
            case "cyclic":
                last = min(size, self.turn * self.lot_size)
                starts = range(0, max(1, last - min(records, last) + 1), self.lot_size)
                return [tuple(range(one, one + min(records, size))) for one in starts]
            case "cyclic_poisson":
                return [(group,) for group in range(self.turn)]
            case _:
                return [()]

    def _steps(self) -> list[tuple[int, ...]]:
        every, number = range(self.steps), self.attack.steps
        if number is None:
            return [tuple(every)]
        apart = (every[first::by] for by in range(1, self.steps + 1) for first in range(by))
        found = {tuple(steps[:number]) for steps in apart if len(steps) >= number}
        return sorted(found)

    def _signs(self, steps: tuple[int, ...]) -> Iterator[tuple[float, ...]]:
        patterns: list[Sequence[float]] = [np.ones(len(steps))]
        if self.attack.signed and len(steps) > 1:
            turns = np.array(steps) // self.turn
            patterns += [(-1.0) ** np.arange(len(steps)), (-1.0) ** turns]
            if (moving := int(turns.max()) + 1) <= 8 and self.sampling.scheme != "full_batch":
                patterns += [
                    np.array(signs)[turns] for signs in itertools.product((1, -1), repeat=moving)
                ]
            elif len(steps) <= 8:
                patterns += list(itertools.product((1.0, -1.0), repeat=len(steps)))
        for pattern in {tuple(map(float, one)) for one in patterns}:
            signs = np.zeros(self.steps)
            signs[list(steps)] = pattern
            yield tuple(signs)

    def pilot_means(self) -> Array:
        """How far a few runs are moved, in standard deviations of white noise.

        The lots are those of all choices of the same places, so that these are compared.
        """
        if self.choice.places not in self._pilots:
            self._pilots[self.choice.places] = self._lots(PILOT, True)[:, :, :1].astype(float)
        moved = self._whiten(self._signed(self._pilots[self.choice.places]))
        return moved.reshape(PILOT, -1) * (2 if self.attack.others == "opposite" else 1)

    def _lots(self, runs: int, present: bool) -> NDArray[np.int64]:
        removed = not present and self.plan.adjacency == "add_remove"
        size, records = self.plan.dataset.size, self.attack.records
        return draw_lots(
            self.plan,
            self.index,
            self.steps,
            runs,
            self.execution.source,
            records=0 if removed else records,
            others=None if size is None else max(0, size - records),
            places=self.choice.places,
        )

    def _signed(self, sums: Array) -> Array:
        sums = sums * self.clip_norms[:, None]
        sums[:, :, 0] *= np.array(self.choice.signs)
        return sums if self.execution.right_angle else sums[:, :, :1]

    def sums(self, runs: int, present: bool) -> Array:
        """The clipped sums of ``runs`` runs on the first or second data set."""
        counts = self._lots(runs, present).astype(float)
        own, others = counts[:, :, 0], counts[:, :, 1]
        own *= 1.0 if present else self.absent
        if self.attack.others == "opposite":
            own -= others
        return self._with_error(counts) if self.is_whole_run else self._signed(counts)

    def _with_error(self, sums: Array) -> Array:
        """What DP-Dice releases, times its divisor: clipped sums and the clipped error state."""
        optimizer, phase = self.plan.optimizer, self.plan.phases[self.index]
        divisor = float(schedule.divisor(self.plan, phase) or 1)
        most = divisor * (optimizer.error_clip_norm or 0.0) / phase.releases[0].clip_norm
        raw = sums * (1e9 if self.attack.keeps_error else 1.0)
        error, result = np.zeros_like(sums[:, 0]), np.empty_like(sums)
        for step in range(self.steps):
            result[:, step] = sums[:, step] + error.clip(-most, most)
            error += raw[:, step] - result[:, step]
        return self._signed(result)

    def release(self, runs: int, present: bool) -> Array:
        """What ``runs`` runs release: sums and the noise N z."""
        sums = self.sums(runs, present)
        if not self.is_correlated:
            return sums + self.sigma * self.execution.source.normal(size=sums.shape)
        white = self.execution.source.normal(size=(self.noise.shape[1], sums[:, 0].size))
        noise = (self.noise @ white).reshape(self.steps, *sums[:, 0].shape) * self.sigma
        return sums + np.moveaxis(noise, 0, 1)

    def _blocks(self) -> list[slice]:
        """Steps whose lots are independent of all others, if their noise is."""
        scheme, width = self.sampling.scheme, self.steps
        if not (self.is_correlated or self.is_whole_run):
            if scheme in FRESH or scheme == "cyclic":
                width = 1
            elif scheme == "shuffled" or self.sampling.bins_drawn == "each_epoch":
                width = self.turn
        return [slice(first, first + width) for first in range(0, self.steps, width)]

    def losses(self, releases: Array) -> Array:
        """The log likelihood ratio of ``releases``."""
        white, result = self._whiten(releases), np.zeros(len(releases))
        for block in self._blocks():
            seen = white[:, block].reshape(len(white), -1)
            first, second = self._laws.get(block.start, self._laws[0])
            result += first.log_likelihood(seen) - second.log_likelihood(seen)
        return result

    @cached_property
    def _laws(self) -> dict[int, tuple[Sums, Sums]]:
        """The laws of the blocks' sums on both data sets, by the first step of a block."""
        sums = [self._whiten(self.sums(MODELLED, present)) for present in (True, False)]
        blocks = self._blocks()
        if self.sampling.scheme in FRESH and len(blocks) > 1:
            blocks = blocks[:1]
        return {
            block.start: tuple(Sums.of(one[:, block].reshape(MODELLED, -1)) for one in sums)
            for block in blocks
        }


@dataclass(frozen=True)
class Sums:
    """A law of sums (n, d) with the logarithms of their weights; others are 0."""

    moving: NDArray[np.int64]
    means: Array
    weights: Array

    @classmethod
    def of(cls, drawn: Array) -> Sums:
        moving = np.flatnonzero(np.any(drawn, axis=0))
        if not moving.size:
            return cls(moving, np.zeros((1, 0)), np.zeros(1))
        # Equal rows have equal products with any vector, and others hardly ever.
        keys = (drawn[:, moving] @ np.sqrt(np.arange(2.0, 2 + moving.size))).round(7)
        _, places, numbers = np.unique(keys, return_index=True, return_counts=True)
        if len(places) > MAX_SUMS:
            common = np.argsort(-numbers)[:MAX_SUMS]
            places, numbers = places[common], numbers[common]
        means = drawn[places][:, moving]
        weights = np.log(numbers / numbers.sum()) - (means**2).sum(axis=1) / 2
        return cls(moving, means, weights)

    def log_likelihood(self, seen: Array) -> Array:
        """The log density of ``seen`` (n, d) over that of noise about 0."""
        result = np.empty(len(seen))
        rows = max(1, 2_000_000 // len(self.means))
        for first in range(0, len(seen), rows):
            part = slice(first, first + rows)
            logs = seen[part][:, self.moving] @ self.means.T + self.weights
            most = logs.max(axis=1)
            logs -= most[:, None]
            result[part] = most + np.log(np.exp(logs, out=logs).sum(axis=1))
        return result
