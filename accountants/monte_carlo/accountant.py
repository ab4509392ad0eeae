"""The Monte-Carlo accountant: balls in bins with correlated noise, with stated confidence.

A record's bin is uniform, its means are correlated, and no closed form or transform gives
the curve of a mixture of correlated Gaussians. So δ is the mean of bounded draws, and what
is published is a confidence bound for that mean, in both orders of the pair.

>>> from affidavit.plan.events import BallsInBinsGaussian, Gram
>>> gram = Gram(((1.0, 0.5), (0.5, 1.0)))
>>> event = BallsInBinsGaussian(gram=gram, noise_multiplier=2.0)
>>> curve = MonteCarloAccountant().curve(event)
>>> bracket = curve.epsilon(1e-5)
>>> 1.6 < bracket.lower < bracket.upper < 1.8, curve.failure_probability
(True, 1e-09)

Guarantees
    * Each bracket holds with probability at least 1 - ``failure_probability`` over the seed, and
      so do all of up to ``LOOKS`` brackets together, as a search for the noise asks for them.
    * Brackets are the same on every run and on any number of workers: draws are generated
      from ``seed``, which the Gram matrices and a published word determine.
    * Where draws decide nothing the bound that holds without them (a Rényi bound, with
      certainty) is returned.

The seed is not chosen by whoever asks, so that nobody can try seeds; whoever tries plans
instead until one of them fails by chance needs about 1e9 of them, of seconds each, to
lower ε by about a hundredth of itself. Generators of numpy are taken for ideal.

References: Choquette-Choo, Ganesh, Haque, Steinke and Thakurta, arXiv:2410.06266; Chua et
al., arXiv:2412.16802; docs/theorems/balls-in-bins-correlated.md for what is proved here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scipy.special import log_ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.monte_carlo.dominating_pair import Pair, pair_of
from affidavit.accountants.monte_carlo.importance_sampling import (
    DIRECTIONS,
    Direction,
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
    first_true,
    last_true,
    log_capital_above,
    log_capital_below,
    predicted_epsilon,
    stream_of,
)
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.registry import AFFIDAVIT_VERSION
from affidavit.plan import Event

FAILURE_PROBABILITY = 1e-9
LOOKS = 64
"""Brackets that one question may take, in a search for the noise."""
MIN_DELTA, MAX_DELTA = 1e-15, 0.5
MAX_EPSILON = 1000.0
"""Nats."""
FINENESS = 1e-5
"""Relative accuracy of the searches over ε and δ, rounded to the safe side."""
MAX_SLIP = 1e-3
"""Rounding of a draw's value, relative to it, above which nothing is bounded."""
_SIGMAS = 8.0
"""Deviations of the Gaussian whose products are ``Pair.excess``; beyond lies 6.3e-16."""


@dataclass(frozen=True, kw_only=True)
class MonteCarloAccountant:
    """Two-sided confidence bounds for runs with bins.

    ``failure_probability`` is what the brackets of one question may fail with; ``workers`` are
    threads, and change nothing but the time.
    """

    failure_probability: float = FAILURE_PROBABILITY
    workers: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.failure_probability < 1:
            raise ValueError(
                f"failure_probability must lie between 0 and 1, got {self.failure_probability}"
            )

    @property
    def name(self) -> str:
        """``monte_carlo``."""
        return "monte_carlo"

    @property
    def version(self) -> str:
        """The version of Affidavit, whose own method this is."""
        return AFFIDAVIT_VERSION

    def curve(self, event: Event) -> MonteCarloCurve:
        """The curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        return MonteCarloCurve(
            pair=None if not parts else pair_of(parts),
            failure_probability=self.failure_probability,
            workers=self.workers,
        )

    def approximate_epsilon(self, event: Event, delta: float) -> float:
        """About the upper end of ``epsilon(delta)``, from pilot draws; **not a bound**."""
        return self.curve(event).predicted_epsilon(delta)


@dataclass(frozen=True, kw_only=True)
class MonteCarloCurve:
    """ε against δ of one run with bins, each bracket with confidence.

    ``pair`` is None for a run that releases nothing; the rest is as above.
    """

    pair: Pair | None
    failure_probability: float
    workers: int = 1
    _families: dict[Direction, tuple[Tilt, ...]] = field(default_factory=dict, repr=False)

    @property
    def confidence(self) -> float:
        """Least probability with which each bracket holds, over the seed."""
        return 1 - self.failure_probability

    @property
    def seed(self) -> str | None:
        """What every draw is generated from: 128 bits in hexadecimal; None where none is drawn."""
        return None if self.pair is None else self.pair.seed

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` beyond the δ that are bounded.
        """
        require_delta(delta)
        if self.pair is None:
            return Bracket(lower=0.0, upper=0.0)
        if not MIN_DELTA <= delta <= MAX_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{MIN_DELTA:g}, {MAX_DELTA:g}].",
                "Ask within that range.",
            )
        best = Bracket(lower=0.0, upper=0.0)
        for direction in DIRECTIONS:
            family = self._family(direction)
            if self._ruled_out(family, best.upper, delta):
                continue
            result = self._epsilon(family, delta)
            best = best.larger(result)
        return best

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        if self.pair is None:
            return Bracket(lower=0.0, upper=0.0)
        # A δ that underflows is still bounded above zero.
        best = Bracket(lower=0.0, upper=math.ulp(0.0))
        for direction in DIRECTIONS:
            family = self._family(direction)
            certain = min(1.0, math.exp(min(tilt.log_range(epsilon) for tilt in family)))
            if certain <= best.lower:
                continue
            result = self._delta(family, epsilon, certain)
            best = best.larger(result)
        return best

    def predicted_epsilon(self, delta: float) -> float:
        """About the upper end of ``epsilon(delta)``, from pilot draws; **not a bound**."""
        result = 0.0
        for direction in DIRECTIONS if self.pair is not None else ():
            family = self._family(direction)
            if min(tilt.epsilon(delta) for tilt in family) > result:
                about = predicted_epsilon(family, delta, self._log_failure, self.workers)
                result = max(result, about)
        return result

    @property
    def _log_failure(self) -> float:
        """log(1/β) of one test: looks, directions, two sides, and ruling out before."""
        return math.log(LOOKS * len(DIRECTIONS) * 2 * 2 / self.failure_probability)

    def _family(self, direction: Direction) -> tuple[Tilt, ...]:
        if self.pair is not None and direction not in self._families:
            self._families[direction] = tilts(self.pair, direction)
        return self._families[direction]

    def _ruled_out(self, family: tuple[Tilt, ...], epsilon: float, delta: float) -> bool:
        """Whether this direction is shown to cross ``delta`` no later than at ``epsilon``."""
        if min(tilt.epsilon(delta) for tilt in family) <= epsilon:
            return True
        if epsilon == 0:
            return False
        design = design_to_rule_out(family, epsilon, delta, self._log_failure, self.workers)
        return design is not None and self._test(design, 1).rejects_above(epsilon, delta)

    def _epsilon(self, family: tuple[Tilt, ...], delta: float) -> Bracket:
        certain = min(tilt.epsilon(delta) for tilt in family)
        if certain > MAX_EPSILON:
            raise OutOfReach(
                f"epsilon is about {certain:.4g}, above {MAX_EPSILON:g}.",
                "Add noise or run fewer steps.",
            )
        test = self._test(design_at_delta(family, delta, self._log_failure, self.workers), 0)
        fineness = FINENESS * max(1e-3, certain)
        upper = first_true(
            lambda e: test.rejects_above(e, delta), test.design.base, certain, fineness
        )
        lower = last_true(lambda e: test.rejects_below(e, delta), 0.0, upper, fineness)
        return Bracket(lower=min(lower, upper), upper=upper)

    def _delta(self, family: tuple[Tilt, ...], epsilon: float, certain: float) -> Bracket:
        test = self._test(design_at_epsilon(family, epsilon, self._log_failure, self.workers), 0)
        top = math.log(certain)
        upper = first_true(
            lambda x: test.rejects_above(epsilon, math.exp(x)), top - 80, top, FINENESS
        )
        lower = last_true(
            lambda x: test.rejects_below(epsilon, math.exp(x)), top - 80, upper, FINENESS
        )
        return Bracket(lower=math.exp(lower) if lower > top - 80 else 0.0, upper=math.exp(upper))

    def _test(self, design: Design, purpose: int) -> _Test:
        direction = design.tilts[0].direction
        drawn = draw(
            design.tilts,
            design.draws,
            stream=stream_of(direction, 63 * purpose),
            workers=self.workers,
        )
        return _Test(design=design, drawn=drawn, log_failure=self._log_failure)


@dataclass(frozen=True, kw_only=True)
class _Test:
    """The deciding draws of one direction, and the rounding that is charged to them."""

    design: Design
    drawn: Draws
    log_failure: float
    slip: float = field(init=False)
    inflation: float = field(init=False)
    top: float = field(init=False)

    def __post_init__(self) -> None:
        pair, shift = self.design.tilts[0].pair, self.design.shift
        slip = 2 * pair.slip(shift)
        spread = (shift + 2) * slip + 4e-9
        if spread > MAX_SLIP:
            raise OutOfReach(
                "rounding would decide the answer: the noise is too small.", "Add noise."
            )
        object.__setattr__(self, "slip", slip)
        object.__setattr__(self, "inflation", math.exp(spread))
        top = math.exp(self.design.log_range(self.design.base - slip)) * math.exp(2 * spread)
        object.__setattr__(self, "top", top)

    @property
    def _bias(self) -> float:
        return self.design.tilts[0].pair.bias

    def rejects_above(self, epsilon: float, delta: float) -> bool:
        """Whether the draws show that δ(``epsilon``) is not above ``delta``."""
        values = self.drawn.values(epsilon - self.slip) * (self.inflation / self.top)
        mean = delta / self.top - self._bias
        capital = log_capital_above(values, len(self.drawn), mean, self.design.bet_above)
        return capital >= self.log_failure

    def rejects_below(self, epsilon: float, delta: float) -> bool:
        """Whether the draws show that δ(``epsilon``) is above ``delta``."""
        beside = math.sqrt(self.design.tilts[0].pair.excess)
        moved = epsilon + beside**2 / 2 + _SIGMAS * beside + self.slip
        values = self.drawn.values(moved) / (self.inflation * self.top)
        lost = math.exp(float(log_ndtr(-_SIGMAS)))
        reach = max(0.0, self.design.log_range(moved) - math.log(self.top))
        mean = (delta + lost) / self.top + self._bias * math.exp(reach)
        capital = log_capital_below(values, len(self.drawn), mean, self.design.bet_below)
        return capital >= self.log_failure
