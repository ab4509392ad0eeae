"""The Monte-Carlo accountant: balls in bins with correlated noise, with stated confidence.

A record's bin is uniform and its means are correlated. No closed form or transform gives the curve
of a mixture of correlated Gaussians. So δ is the mean of bounded draws, and the accountant returns
confidence bounds of that mean, in both orders of the pair.

>>> from affidavit.plan.events import BallsInBinsGaussian, Gram
>>> gram = Gram(((1.0, 0.5), (0.5, 1.0)))
>>> event = BallsInBinsGaussian(gram=gram, noise_multiplier=2.0)
>>> curve = MonteCarloAccountant().curve(event)
>>> bracket = curve.epsilon(1e-5)
>>> 1.6 < bracket.lower < bracket.upper < 1.8, curve.failure_probability
(True, 1e-09)

Guarantees
    * Each bracket holds with probability at least 1 - ``failure_probability`` over the seed, and so
      do up to ``MAX_BRACKETS`` brackets together, as in a search for the noise.
    * Brackets are reproducible: draws are generated from ``seed``, which the Gram matrices and a
      published word determine.
    * If draws decide nothing, the accountant returns a Rényi bound, which holds with certainty.

Callers cannot choose the seed, so they cannot try seeds. To lower ε by about a hundredth, they
would have to try about 1e9 plans, at seconds each. numpy's generators are assumed to be ideal.

References: Choquette-Choo, Ganesh, Haque, Steinke and Thakurta, arXiv:2410.06266; Chua et
al., arXiv:2412.16802; docs/theorems/balls-in-bins-correlated.md for what is proved here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from scipy.special import log_ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.gaussian import EMPTY_CURVE, GaussianCurve
from affidavit.accountants.monte_carlo.dominating_pair import Pair, build_pair
from affidavit.accountants.monte_carlo.importance_sampling import (
    DIRECTIONS,
    Draws,
    Tilt,
    draw,
    tilts,
)
from affidavit.accountants.monte_carlo.pilot import (
    Design,
    design_at_delta,
    design_at_epsilon,
    design_to_rule_out,
    find_first_true,
    find_last_true,
    log_capital_above,
    log_capital_below,
    predicted_epsilon,
    stream_number,
)
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.registry import AFFIDAVIT_VERSION
from affidavit.plan import events

FAILURE_PROBABILITY = 1e-9
MAX_BRACKETS = 64
"""Brackets of one search for the noise."""
MIN_DELTA, MAX_DELTA = 1e-15, 0.5
MAX_EPSILON = 1000.0
"""Nats."""
SEARCH_ACCURACY = 1e-5
"""Relative accuracy of the searches over ε and δ, rounded to the safe side."""
MAX_ROUNDING = 1e-3
"""Relative rounding of a draw's value above which the accountant refuses."""
_EXCESS_Z = 8.0
"""Deviations of the Gaussian whose products are ``Pair.excess``; the mass beyond is 6.3e-16."""


@dataclass(frozen=True, kw_only=True)
class MonteCarloAccountant:
    """Two-sided confidence bounds for runs with bins.

    ``failure_probability`` is the probability that any bracket of one search is wrong.
    """

    failure_probability: float = FAILURE_PROBABILITY
    name: str = "monte_carlo"
    version: str = AFFIDAVIT_VERSION

    def __post_init__(self) -> None:
        if not 0 < self.failure_probability < 1:
            raise ValueError(
                f"failure_probability must lie between 0 and 1, got {self.failure_probability}"
            )

    def curve(self, event: events.Event) -> MonteCarloCurve | GaussianCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        if not parts:
            return EMPTY_CURVE
        return MonteCarloCurve(pair=build_pair(parts), failure_probability=self.failure_probability)

    def approximate_epsilon(self, event: events.Event, delta: float) -> float:
        """Return about the upper bound of ``epsilon(delta)``, from pilot draws; **not a bound**."""
        curve = self.curve(event)
        return curve.predicted_epsilon(delta) if isinstance(curve, MonteCarloCurve) else 0.0


@dataclass(frozen=True, kw_only=True)
class MonteCarloCurve:
    """Privacy curve of one run with bins, each bracket with confidence."""

    pair: Pair
    failure_probability: float

    @property
    def confidence(self) -> float:
        """Least probability, over the seed, with which each bracket holds."""
        return 1 - self.failure_probability

    @property
    def seed(self) -> str:
        """The seed of all draws, 128 bits in hexadecimal."""
        return self.pair.seed

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` for a δ out of range.
        """
        require_delta(delta)
        if not MIN_DELTA <= delta <= MAX_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{MIN_DELTA:g}, {MAX_DELTA:g}].",
                "Choose δ in that range.",
            )
        best = Bracket(lower=0.0, upper=0.0)
        for family in self._families:
            if not self._is_ruled_out(family, best.upper, delta):
                best = best.larger(self._epsilon(family, delta))
        return best

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        # A δ that underflows is still bounded above zero.
        best = Bracket(lower=0.0, upper=math.ulp(0.0))
        for family in self._families:
            certain = min(1.0, math.exp(min(tilt.log_range(epsilon) for tilt in family)))
            if certain > best.lower:
                best = best.larger(self._delta(family, epsilon, certain))
        return best

    def predicted_epsilon(self, delta: float) -> float:
        """Return about the upper bound of ``epsilon(delta)``, from pilot draws; **not a bound**."""
        result = 0.0
        for family in self._families:
            if min(tilt.epsilon(delta) for tilt in family) > result:
                result = max(result, predicted_epsilon(family, delta, self._log_failure))
        return result

    @property
    def _log_failure(self) -> float:
        """log(1/β) of one test, over brackets, directions, both sides and the ruling-out tests."""
        return math.log(MAX_BRACKETS * len(DIRECTIONS) * 2 * 2 / self.failure_probability)

    @cached_property
    def _families(self) -> tuple[tuple[Tilt, ...], ...]:
        """The tilts of each direction."""
        return tuple(tilts(self.pair, direction) for direction in DIRECTIONS)

    def _is_ruled_out(self, family: tuple[Tilt, ...], epsilon: float, delta: float) -> bool:
        """Return whether this direction is shown to reach ``delta`` at or before ``epsilon``."""
        if min(tilt.epsilon(delta) for tilt in family) <= epsilon:
            return True
        if epsilon == 0:
            return False
        design = design_to_rule_out(family, epsilon, delta, self._log_failure)
        return design is not None and self._test(design, 1).rejects_above(epsilon, delta)

    def _epsilon(self, family: tuple[Tilt, ...], delta: float) -> Bracket:
        certain = min(tilt.epsilon(delta) for tilt in family)
        if certain > MAX_EPSILON:
            raise OutOfReach(
                f"epsilon is about {certain:.4g}, above {MAX_EPSILON:g}.",
                "Add noise or run fewer steps.",
            )
        design, _ = design_at_delta(family, delta, self._log_failure)
        test = self._test(design, 0)
        accuracy = SEARCH_ACCURACY * max(1e-3, certain)
        upper = find_first_true(
            lambda e: test.rejects_above(e, delta), test.design.base, certain, accuracy
        )
        lower = find_last_true(lambda e: test.rejects_below(e, delta), 0.0, upper, accuracy)
        return Bracket(lower=min(lower, upper), upper=upper)

    def _delta(self, family: tuple[Tilt, ...], epsilon: float, certain: float) -> Bracket:
        test = self._test(design_at_epsilon(family, epsilon, self._log_failure), 0)
        top = math.log(certain)
        upper = find_first_true(
            lambda x: test.rejects_above(epsilon, math.exp(x)), top - 80, top, SEARCH_ACCURACY
        )
        lower = find_last_true(
            lambda x: test.rejects_below(epsilon, math.exp(x)), top - 80, upper, SEARCH_ACCURACY
        )
        return Bracket(lower=math.exp(lower) if lower > top - 80 else 0.0, upper=math.exp(upper))

    def _test(self, design: Design, purpose: int) -> _Test:
        direction = design.tilts[0].direction
        drawn = draw(design.tilts, design.draws, stream=stream_number(direction, 63 * purpose))
        return _Test(design=design, drawn=drawn, log_failure=self._log_failure)


@dataclass(frozen=True, kw_only=True)
class _Test:
    """The deciding draws of one direction, and tests that allow for their rounding."""

    design: Design
    drawn: Draws
    log_failure: float

    @property
    def _pair(self) -> Pair:
        return self.design.tilts[0].pair

    @cached_property
    def _loss_error(self) -> float:
        """Bound (nats) on the rounding of a draw's loss."""
        return 2 * self._pair.loss_error(self.design.shift)

    @cached_property
    def _rounding(self) -> float:
        """Bound on the relative rounding of a draw's value."""
        rounding = (self.design.shift + 2) * self._loss_error + 4e-9
        if rounding > MAX_ROUNDING:
            raise OutOfReach(
                "rounding would decide the answer: the noise is too small.", "Add noise."
            )
        return rounding

    @cached_property
    def _max_value(self) -> float:
        """Upper bound of a draw's value."""
        log_range = self.design.log_range(self.design.base - self._loss_error)
        return math.exp(log_range) * math.exp(2 * self._rounding)

    def rejects_above(self, epsilon: float, delta: float) -> bool:
        """Return whether the draws show that δ(``epsilon``) is not above ``delta``."""
        inflation = math.exp(self._rounding)
        values = self.drawn.values(epsilon - self._loss_error) * (inflation / self._max_value)
        mean = delta / self._max_value - self._pair.bias
        capital = log_capital_above(values, len(self.drawn), mean, self.design.bet_above)
        return capital >= self.log_failure

    def rejects_below(self, epsilon: float, delta: float) -> bool:
        """Return whether the draws show that δ(``epsilon``) is above ``delta``."""
        mu = math.sqrt(self._pair.excess)
        moved = epsilon + mu**2 / 2 + _EXCESS_Z * mu + self._loss_error
        values = self.drawn.values(moved) / (math.exp(self._rounding) * self._max_value)
        lost = math.exp(float(log_ndtr(-_EXCESS_Z)))
        log_excess = max(0.0, self.design.log_range(moved) - math.log(self._max_value))
        mean = (delta + lost) / self._max_value + self._pair.bias * math.exp(log_excess)
        capital = log_capital_below(values, len(self.drawn), mean, self.design.bet_below)
        return capital >= self.log_failure
