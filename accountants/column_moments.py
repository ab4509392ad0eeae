"""Moments at whole orders of runs that sample the columns of a record step by step.

With L = Σ_π P(π) dN(|C|π, σ²)/dN(0, σ²), π the steps in which a record takes part, the moment of
order α is a mean over α records that are sampled independently,

    E L^α = E exp(Σ_{a<b} ⟨|C|π_a, |C|π_b⟩ / σ²).

It only depends on the recent steps of each record, so it is a product of one matrix per step. Where
there are too many such pasts, a stretch of several steps is one: the moment is then at most that of
records whose chances, up to the largest, are the worst for each past. It bounds the order of the
hypotheses in which the record is present. Other events bound the run in the other order.

>>> run = events.SampledColumns(
...     products=(1.0, 0.5), sampling_probability=0.01, separation=2, steps=100, noise_multiplier=1
... )
>>> round(MomentCurve(runs=(run,), others=()).epsilon(1e-6).upper, 2)
1.76

Reference: docs/theorems/correlated-noise.md, Theorem 16; Mironov, arXiv:1702.07476; Canonne, Kamath
and Steinke, arXiv:2004.00010 (conversion).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import adjusted
from affidavit.accountants.pattern_pairs import ORDERS, log_moment_of_pairs
from affidavit.accountants.protocol import (
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.rounding import Array
from affidavit.plan import events

MAX_TRANSITIONS = 20_000
"""Transitions between states in one moment; larger orders are not computed."""
_MAX_WAITS = 4
"""Waits after which a past is too long for its states to be listed."""
_MAX_ITERATED_STEPS = 400
"""Steps after which the growth of a moment is bounded by its current maximum."""
_NEGLIGIBLE_GROWTH = 1e-6
"""What the extreme growth factors of a moment, all remaining steps together, may concede."""
_RARE = 2.0
"""Mean number of draws within the wait below which moments without it are computed."""
_FEW_LAGS = 3, 2, 1
"""Stretches that are told apart, if a column meets later ones for long."""
_MAX_RATIO = 8.0
"""A bound of the number of transitions, over ``MAX_TRANSITIONS``, above which they are not built.
"""
_MAX_EXPONENT = 300.0
"""Largest exponent whose products do not overflow."""
_MIN_MOMENT = 1e-250
"""Least moment of a state, relative to the largest, that keeps its digits."""
_MAX_LARGER = 3
"""Larger bounds in a row after which no larger order is computed."""
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
def log_moment(run: events.SampledColumns, order: int) -> float:
    """Return an upper bound of log E L^α at whole ``order`` α, or infinity if not computed."""
    if run.records_per_unit > 1:
        return log_moment_of_pairs(run, order)
    lags = max(run.separation, len(run.products)) - 1
    # Of pasts that are that long there are always too many.
    meets_for_long = run.separation > 1 and lags >= _MAX_WAITS * run.separation
    transitions = None
    if not (run.beyond or meets_for_long):
        transitions = _transitions(order, run.separation, lags)
    if transitions is None:
        return min(_log_moment_of_stretches(run, order), log_moment_of_pairs(run, order))
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
    size = float(exponents.max()) + float(np.abs(chances).max()) + 8 * order
    result, moments = _iterated(lambda values: np.asarray(step @ values), states, run.steps)
    return result + math.log(moments.max()) + run.steps * 2.0**-50 * (16 + size)


def _iterated(step: Callable[[Array], Array], states: int, number: int) -> tuple[float, Array]:
    """Return log c and v with A^n 1 <= c v for a ``number`` n of steps A; v has shape (states,).

    A is monotone, and A(cv) = c A(v) for c > 0. The logarithm is infinite where doubles do not
    suffice.
    """
    moments, result, left = np.ones(states), 0.0, number
    while left:
        grown = step(moments)
        if not moments.min() > _MIN_MOMENT:
            return math.inf, moments
        growth = grown / moments
        left -= 1
        scale = float(grown.max())
        moments, result = grown / scale, result + math.log(scale)
        highest, lowest = float(growth.max()), float(growth.min())
        is_steady = left * (highest - lowest) <= _NEGLIGIBLE_GROWTH * highest
        if number - left >= _MAX_ITERATED_STEPS or is_steady:
            # No entry grows faster from here.
            result, left = result + left * math.log(highest), 0
    return result, moments


@dataclass(frozen=True, slots=True)
class _Stretches:
    """The transitions of α records from stretch to stretch.

    A state, a row of ``drawn``, shape (n, lags + 1), has how many were drawn 1, 2, ..., lags
    stretches ago, and earlier. ``target``, shape (n, α + 1), is the state after k more are drawn,
    of the ``free`` ones that have waited long enough.
    """

    drawn: Array
    free: Array
    target: Array


@lru_cache(maxsize=64)
def _stretches(order: int, lags: int, waiting: int, earlier: int) -> _Stretches | None:
    """Return the transitions, or None if there are too many.

    Those of the last ``waiting`` stretches wait. Of earlier ones than ``lags`` at most ``earlier``
    are counted.
    """
    first = (0,) * (lags + 1)
    states, rows, free = {first: 0}, [], []
    for state in (pending := [first]):
        left = order - sum(state[:waiting])
        row = []
        for taken in range(left + 1):
            *shown, last = (taken, *state[:-1])
            following = (*shown, min(earlier, last + state[-1]))
            if following not in states:
                states[following] = len(states)
                pending.append(following)
            row.append(states[following])
        free.append(left)
        rows.append(row + [0] * (order - left))
        if len(states) * (order + 1) > MAX_TRANSITIONS:
            return None
    return _Stretches(
        drawn=np.array(pending, dtype=float), free=np.array(free), target=np.array(rows)
    )


def _log_moment_of_stretches(run: events.SampledColumns, order: int) -> float:
    """Return ``log_moment`` by the shortest stretches that are quick enough."""
    separation = run.separation
    widths = sorted({separation // parts for parts in range(1, separation + 1)})
    # Records that are drawn as soon as they can be have to wait; others need not.
    is_rare = separation * run.sampling_probability < _RARE
    choices = list(product((True, False) if is_rare else (True,), (None, *_FEW_LAGS)))
    for width in widths:
        bounds = [moment_of_stretches(run, order, width, lags, wait=wait) for wait, lags in choices]
        if min(bounds) < math.inf:
            return min(bounds)
    return math.inf


def moment_of_stretches(
    run: events.SampledColumns,
    order: int,
    width: int,
    lags: int | None = None,
    *,
    wait: bool = True,
) -> float:
    """Return an upper bound of log E L^α by stretches of ``width`` <= b steps, or infinity.

    Columns more than ``lags`` stretches apart, of all that meet if it is None, have one product.
    Without ``wait`` records may be drawn again once they meet no other column.
    """
    sizes = np.append(run.products, run.beyond) / run.noise_multiplier**2
    largest = np.maximum.accumulate(sizes[::-1])[::-1]
    number, turns = -(-run.steps // width), run.separation // width
    pairs = math.comb(order, 2) * (-(-number // turns)) ** 2
    # Of columns whose products are negligible all pairs are counted.
    meeting = int(np.count_nonzero(largest * pairs > _NEGLIGIBLE_GROWTH))
    conceded = float(largest[meeting] * pairs) if meeting < len(largest) else 0.0
    meets_forever = meeting == len(largest) and run.beyond > 0
    whole = -(-(meeting - 1) // width) if meeting else 0
    if lags is None and not meets_forever:
        lags = whole
    elif lags is None or lags >= whole + meets_forever:
        return math.inf
    # Steps of two stretches l apart are at least (l - 1) w + 1 steps apart.
    apart = np.arange(lags + 1) * width + 1
    products = largest[np.minimum(apart, len(largest) - 1)]
    if not meets_forever:
        products[apart >= meeting] = 0.0
    most = order * -(-number // turns) if products[-1] > 0 else 0
    waiting = turns - 1 if wait else min(turns - 1, lags)
    if waiting > lags:
        # Those that still wait, and meet as those before them.
        products = np.append(products[:-1], np.full(waiting - lags + 1, products[-1]))
        lags = waiting
    likely = math.comb(order + waiting, waiting) * (order + 1) ** (lags - waiting) * (most + 1)
    if likely * (order + 1) > _MAX_RATIO * MAX_TRANSITIONS:
        return math.inf
    stretches = _stretches(order, lags, waiting, most)
    if stretches is None:
        return math.inf
    taken = np.arange(order + 1)
    exponents = (stretches.drawn @ products)[:, None] * taken
    exponents += taken * (taken - 1) / 2 * largest[0]
    possible = taken <= stretches.free[:, None]
    if exponents[possible].max() > _MAX_EXPONENT:
        return math.inf
    met = np.where(possible, np.exp(np.where(possible, exponents, 0.0)), 0.0)
    q = -math.expm1(width * math.log1p(-run.sampling_probability)) * (1 + 2.0**-50)
    ways = np.array([[math.comb(free, k) for free in taken] for k in taken], dtype=float)
    left_out = np.maximum(taken - taken[:, None], 0)
    chances = ways * q ** taken[:, None] * (1 - q) ** left_out

    def step(values: Array) -> Array:
        # Column f is the mean if f of those that are free are drawn with the chance q.
        means = (met * values[stretches.target]) @ chances
        return np.asarray(np.where(possible, means, 0.0).max(axis=1))

    result, moments = _iterated(step, len(stretches.drawn), number)
    size = float(exponents[possible].max()) + 16 * (order + 1)
    # Nobody was drawn before the run.
    return result + math.log(float(moments[0])) + conceded + number * 2.0**-50 * (16 + size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentCurve:
    """Upper bounds of ``runs`` and ``others`` in the order in which the record is present."""

    runs: tuple[events.SampledColumns, ...]
    others: tuple[events.Event, ...]

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` or errors of ``others``."""
        require_delta(delta)
        least = _least_of_orders(
            (moment + _log_conversion_factor(order) - math.log(delta)) / (order - 1)
            for order, moment in self._moments()
        )
        if math.isinf(least):
            raise OutOfReach("no moment of the run is bounded.", "Use another accountant.")
        return Bracket(lower=0.0, upper=max(0.0, least * (1 + 2.0**-50)))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises errors of ``others``."""
        require_epsilon(epsilon)
        least = _least_of_orders(
            moment + _log_conversion_factor(order) - (order - 1) * epsilon
            for order, moment in self._moments()
        )
        return Bracket(lower=0.0, upper=min(1.0, math.exp(min(0.0, least)) * (1 + 1e-12)))

    def _moments(self) -> Iterator[tuple[int, float]]:
        """Yield increasing orders with a bound of log E L^α of the composition."""
        others = _log_moments(self.others)
        for order in ORDERS:
            total = others.get(order, math.inf)
            yield order, total + sum(log_moment(run, order) for run in self.runs)


def has_columns(event: events.Event) -> bool:
    """Return whether a phase of ``event`` is a run of sampled columns."""
    return any(isinstance(part, events.SampledColumns) for part in _phases(event))


def moment_curve(event: events.Event) -> MomentCurve:
    """Return the curve of the moments of all phases of ``event``."""
    runs = tuple(part for part in _phases(event) if isinstance(part, events.SampledColumns))
    others = tuple(part for part in _phases(event) if not isinstance(part, events.SampledColumns))
    return MomentCurve(runs=runs, others=others)


def _phases(event: events.Event) -> tuple[events.Event, ...]:
    return event.events if isinstance(event, events.Composed) else (event,)


@dataclass(frozen=True, slots=True)
class _LeastUpperEnd:
    """The least of the upper bounds of ``curves``, none of which need be attained."""

    curves: tuple[PrivacyCurve, ...]

    def with_width(self, relative_width: float) -> _LeastUpperEnd:
        """Return this curve with narrower or wider brackets, where they are adjustable."""
        return _LeastUpperEnd(tuple(adjusted(curve, relative_width) for curve in self.curves))

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises if no curve answers."""
        # It is quick to show that a curve is above another.
        return self._least(
            lambda curve: curve.epsilon(delta),
            lambda curve, bound: curve.delta(bound).upper > delta,
        )

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises if no curve answers."""
        return self._least(lambda curve: curve.delta(epsilon), lambda *_: False)

    def _least(
        self,
        answer: Callable[[PrivacyCurve], Bracket],
        is_above: Callable[[PrivacyCurve, float], bool],
    ) -> Bracket:
        least, errors = math.inf, []
        for curve in self.curves:
            try:
                if math.isinf(least) or not is_above(curve, least):
                    least = min(least, answer(curve).upper)
            except AccountantError as error:
                errors.append(error)
        if math.isinf(least) and errors:
            raise errors[0]
        return Bracket(lower=0.0, upper=least)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedByOrder:
    """The least of the upper bounds of ``both`` orders, and of those of each order.

    ``removed`` bounds one order and each of ``added`` the other.
    """

    both: PrivacyCurve
    removed: PrivacyCurve
    added: tuple[PrivacyCurve, ...]

    @property
    def orders(self) -> tuple[_LeastUpperEnd, _LeastUpperEnd]:
        """The curves of the record's removal and of its addition."""
        added = self.added or (self.both,)
        return _LeastUpperEnd((self.removed, self.both)), _LeastUpperEnd(added)

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
                        if math.isinf(upper) or is_below(curve, upper):
                            added = min(added, answer(curve).upper)
        upper = min(upper, max(removed, added))
        if error is not None and math.isinf(upper):
            raise error
        return Bracket(lower=0.0, upper=upper)


def _least_of_orders(bounds: Iterable[float]) -> float:
    """Return the least of ``bounds`` of increasing orders, up to a third one that is larger."""
    least, larger = math.inf, 0
    for bound in bounds:
        larger = larger + 1 if bound >= least else 0
        if larger == _MAX_LARGER:
            break
        least = min(least, bound)
    return least


def _log_conversion_factor(order: int) -> float:
    """Return log max_x (x - 1)/x^α; (L - e^ε)_+ is at most L^α e^{-(α - 1)ε} times its exp."""
    return (order - 1) * math.log(order - 1) - order * math.log(order)


@lru_cache(maxsize=64)
def _log_moments(others: tuple[events.Event, ...]) -> dict[int, float]:
    if not others:
        return dict.fromkeys(ORDERS, 0.0)
    from affidavit.accountants.privacy_filter import renyi_divergences as renyi

    divergences = renyi.divergences(events.Composed(events=others))
    return {
        int(order): (order - 1) * divergence
        for order, divergence in zip(renyi.ORDERS, divergences, strict=True)
        if order in ORDERS
    }
