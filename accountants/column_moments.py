"""Moments at whole orders of runs that sample the columns of a record step by step.

With L = Σ_π P(π) dN(|C|π, σ²)/dN(0, σ²), π the steps in which a record takes part, the moment of
order α is a mean over α records that are sampled independently,

    E L^α = E exp(Σ_{a<b} ⟨|C|π_a, |C|π_b⟩ / σ²).

It only depends on the recent steps of each record, so it is a product of one matrix per step. It
bounds the order of the hypotheses in which the record is present. Other events bound the run in
the other order.

>>> run = SampledColumns(
...     products=(1.0, 0.5), sampling_probability=0.01, separation=2, steps=100, noise_multiplier=1
... )
>>> round(MomentCurve(runs=(run,), others=()).epsilon(1e-6).upper, 2)
1.76

Reference: docs/theorems/correlated-noise.md, Theorem 16; Mironov, arXiv:1702.07476; Canonne, Kamath
and Steinke, arXiv:2004.00010 (conversion).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import adjusted
from affidavit.accountants.protocol import (
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.rounding import Array
from affidavit.plan import Composed, Event, SampledColumns

ORDERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
MAX_TRANSITIONS = 20_000
"""Transitions between states in one moment; larger orders are not computed."""
_MAX_ITERATED_STEPS = 400
"""Steps after which the growth of a moment is bounded by its current maximum."""
_CONVERGED = 1e-13
"""Relative difference of the extreme growth factors at which they are equal."""
_MAX_EXPONENT = 300.0
"""Largest exponent whose products do not overflow."""
_MIN_MOMENT = 1e-250
"""Least moment of a state, relative to the largest, that keeps its digits."""
_State = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Transitions:
    """Transitions of α records from a state, ``origin``, to the next one, ``target``, shape (n,).

    In each transition ``drawn`` of the eligible records are drawn and ``left_out`` are not, in
    exp(``ways``) ways. ``meetings``, shape (n, lags + 1), counts the pairs of columns by lag.
    """

    states: int
    origin: Array
    target: Array
    drawn: Array
    left_out: Array
    ways: Array
    meetings: Array


@lru_cache(maxsize=32)
def _transitions(order: int, separation: int, lags: int) -> _Transitions | None:
    """Return the transitions of ``order`` records over ``lags``, or None if there are too many.

    A history has one bit for each lag at which a record took part. A state is the number of records
    with each history.
    """
    if separation > lags and math.comb(order + separation, order) > MAX_TRANSITIONS:
        return None
    waiting, remembered = (1 << (separation - 1)) - 1, (1 << lags) - 1
    states: dict[_State, int] = {((0, order),): 0}
    rows: list[tuple[int, int, int, int, float]] = []
    # The own columns of drawn records: the row, their history, and their number.
    own: list[tuple[int, int, int]] = []
    for state in (pending := list(states)):
        eligible = [0 if history & waiting else count for history, count in state]
        for chosen in product(*(range(number + 1) for number in eligible)):
            following: dict[int, int] = {}
            ways, drawn = 1, sum(chosen)
            for (history, count), number, taken in zip(state, eligible, chosen, strict=True):
                if taken:
                    ways *= math.comb(number, taken)
                    later = (history << 1 | 1) & remembered
                    following[later] = following.get(later, 0) + taken
                    if history:
                        own.append((len(rows), history, taken))
                if count > taken:
                    later = history << 1 & remembered
                    following[later] = following.get(later, 0) + count - taken
            target = tuple(sorted(following.items()))
            if target not in states:
                states[target] = len(states)
                pending.append(target)
            left_out = sum(eligible) - drawn
            rows.append((states[state], states[target], drawn, left_out, math.log(ways)))
        if len(rows) > MAX_TRANSITIONS:
            return None
    origin, targets, drawn_, left_out_, ways_ = map(np.array, zip(*rows, strict=True))
    taken_ = np.zeros((len(states), lags + 1))
    for place, state in enumerate(states):
        for history, count in state:
            taken_[place] += count * _bits(history, lags)
    meetings = drawn_[:, None] * taken_[origin]
    for row, history, count in own:
        meetings[row] -= count * _bits(history, lags)
    meetings[:, 0] = drawn_ * (drawn_ - 1) / 2
    return _Transitions(
        states=len(states),
        origin=origin,
        target=targets,
        drawn=drawn_,
        left_out=left_out_,
        ways=ways_,
        meetings=meetings.astype(np.int16),
    )


@lru_cache(maxsize=1024)
def _bits(history: int, lags: int) -> Array:
    """Return whether ``history`` has a column 0 (never), 1, ... steps ago; shape (lags + 1,)."""
    return np.array([0.0, *(float(history >> lag & 1) for lag in range(lags))])


@lru_cache(maxsize=512)
def log_moment(run: SampledColumns, order: int) -> float:
    """Return an upper bound of log E L^α at whole ``order`` α, or infinity if not computed."""
    lags = max(run.separation, len(run.products)) - 1
    transitions = _transitions(order, run.separation, lags)
    if transitions is None:
        return math.inf
    products = np.zeros(lags + 1)
    products[: len(run.products)] = np.array(run.products) / run.noise_multiplier**2
    exponents = transitions.meetings @ products
    if exponents.max() > _MAX_EXPONENT:
        return math.inf
    p = run.sampling_probability
    chances = transitions.ways + transitions.drawn * math.log(p)
    chances = chances + transitions.left_out * math.log1p(-p)
    from scipy.sparse import csr_array  # imports slowly and is seldom needed

    states = transitions.states
    step = csr_array(
        (np.exp(chances + exponents), (transitions.origin, transitions.target)),
        shape=(states, states),
    )
    moments, result, left = np.ones(states), 0.0, run.steps
    while left:
        grown = step @ moments
        if not moments.min() > _MIN_MOMENT:
            return math.inf
        growth = grown / moments
        left -= 1
        scale = float(grown.max())
        moments, result = grown / scale, result + math.log(scale)
        highest, lowest = float(growth.max()), float(growth.min())
        if run.steps - left >= _MAX_ITERATED_STEPS or highest - lowest <= _CONVERGED * highest:
            # No entry grows faster from here.
            result, left = result + left * math.log(highest), 0
    size = float(exponents.max()) + float(np.abs(chances).max()) + 8 * order
    return result + run.steps * 2.0**-50 * (16 + size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentCurve:
    """Upper bounds of ``runs`` and ``others`` in the order in which the record is present."""

    runs: tuple[SampledColumns, ...]
    others: tuple[Event, ...]

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` or errors of ``others``."""
        require_delta(delta)
        least = math.inf
        for order, moment in self._moments():
            own = (moment + _log_conversion_factor(order) - math.log(delta)) / (order - 1)
            if own > least:
                break
            least = own
        if math.isinf(least):
            raise OutOfReach("no moment of the run is bounded.", "Use another accountant.")
        return Bracket(lower=0.0, upper=max(0.0, least * (1 + 2.0**-50)))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises errors of ``others``."""
        require_epsilon(epsilon)
        least = 0.0
        for order, moment in self._moments():
            own = moment + _log_conversion_factor(order) - (order - 1) * epsilon
            if own > least:
                break
            least = own
        return Bracket(lower=0.0, upper=min(1.0, math.exp(least) * (1 + 1e-12)))

    def _moments(self) -> Iterator[tuple[int, float]]:
        """Yield increasing orders with a bound of log E L^α of the composition."""
        others = _log_moments(self.others)
        for order in ORDERS:
            total = others.get(order, math.inf)
            yield order, total + sum(log_moment(run, order) for run in self.runs)


def has_columns(event: Event) -> bool:
    """Return whether a phase of ``event`` is a run of sampled columns."""
    return any(isinstance(part, SampledColumns) for part in _phases(event))


def moment_curve(event: Event) -> MomentCurve:
    """Return the curve of the moments of all phases of ``event``."""
    runs = tuple(part for part in _phases(event) if isinstance(part, SampledColumns))
    others = tuple(part for part in _phases(event) if not isinstance(part, SampledColumns))
    return MomentCurve(runs=runs, others=others)


def _phases(event: Event) -> tuple[Event, ...]:
    return event.events if isinstance(event, Composed) else (event,)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedByOrder:
    """The least of the upper bounds of ``both`` orders, and of those of each order.

    ``removed`` bounds one order and each of ``added`` the other.
    """

    both: PrivacyCurve
    removed: PrivacyCurve
    added: tuple[PrivacyCurve, ...]

    def with_width(self, relative_width: float) -> BoundedByOrder:
        """Return this curve with narrower or wider brackets, where they are adjustable."""
        return BoundedByOrder(
            both=adjusted(self.both, relative_width),
            removed=self.removed,
            added=tuple(adjusted(curve, relative_width) for curve in self.added),
        )

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises like ``both`` if nothing else answers."""
        # A small ε takes long to compute, but it is quick to show that it is below another.
        return self._least(
            lambda curve: curve.epsilon(delta),
            lambda curve, bound: curve.delta(bound).upper <= delta,
        )

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises like ``both`` if nothing else answers."""
        return self._least(
            lambda curve: curve.delta(epsilon),
            lambda curve, bound: curve.delta(epsilon).upper <= bound,
        )

    def _least(
        self,
        answer: Callable[[PrivacyCurve], Bracket],
        is_below: Callable[[PrivacyCurve, float], bool],
    ) -> Bracket:
        error, upper, removed, added = None, math.inf, math.inf, math.inf
        try:
            upper = answer(self.both).upper
        except AccountantError as raised:
            error = raised
        with suppress(AccountantError):
            removed = answer(self.removed).upper
        if removed < upper:
            # For the other order it suffices to be lower.
            for curve in self.added:
                with suppress(AccountantError):
                    if is_below(curve, removed):
                        added = removed
                        break
            else:
                for curve in self.added:
                    with suppress(AccountantError):
                        added = min(added, answer(curve).upper)
        upper = min(upper, max(removed, added))
        if error is not None and math.isinf(upper):
            raise error
        return Bracket(lower=0.0, upper=upper)


def _log_conversion_factor(order: int) -> float:
    """Return log max_x (x - 1)/x^α; (L - e^ε)_+ is at most L^α e^{-(α - 1)ε} times its exp."""
    return (order - 1) * math.log(order - 1) - order * math.log(order)


@lru_cache(maxsize=64)
def _log_moments(others: tuple[Event, ...]) -> dict[int, float]:
    if not others:
        return dict.fromkeys(ORDERS, 0.0)
    from affidavit.accountants.privacy_filter import renyi_divergences as renyi

    divergences = renyi.divergences(Composed(events=others))
    return {
        int(order): (order - 1) * divergence
        for order, divergence in zip(renyi.ORDERS, divergences, strict=True)
        if order in ORDERS
    }
