"""Moments of the loss of a run into which a record is drawn step by step, at whole orders.

With L = Σ_π P(π) dN(|C|π, σ²)/dN(0, σ²), π the steps that a record takes part in, a moment is over
as many records that are drawn independently of each other,

    E L^α = E exp(Σ_{a<b} ⟨|C|π_a, |C|π_b⟩ / σ²),

and it suffices to know which of the last steps each of them took part in: that is a product of as
many matrices as there are steps. It bounds the order of the hypotheses in which the record is
there. In the other one the run is bounded by other events.

>>> run = SampledColumns(
...     products=(1.0, 0.5), sampling_probability=0.01, separation=2, steps=100, noise_multiplier=1
... )
>>> round(MomentCurve(runs=(run,), beside=()).epsilon(1e-6).upper, 2)
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
from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.protocol import (
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    require_delta,
    require_epsilon,
)
from affidavit.plan import Composed, Event, SampledColumns

ORDERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
MAX_TRANSITIONS = 20_000
"""Between the states of the records of one moment; larger orders are not computed."""
_ROUNDS = 400
"""Steps after which a moment is known to grow no faster."""
_STEADY = 1e-13
"""Relative difference of a growth's ends at which it changes no more."""
_LARGEST = 300.0
"""Exponents of which doubles hold the products."""
_SMALLEST = 1e-250
"""Of a state, relative to the largest, before it loses digits."""
_State = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Transitions:
    """Steps of α records from one state, ``origin``, to a next one, ``target``; all of shape (n,).

    So many of the records that may be ``drawn`` are drawn, or are ``left_out``, in so many ``ways``
    (their logarithm). They meet each of the others' columns so many lags apart as often as
    ``meetings``, of shape (n, lags + 1), says.
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
    """Those of ``order`` records over so many ``lags``; None where there are too many.

    A history is the lags, a bit each, at which a record took part, and a state how many records
    have which.
    """
    if separation > lags and math.comb(order + separation, order) > MAX_TRANSITIONS:
        return None
    waiting, remembered = (1 << (separation - 1)) - 1, (1 << lags) - 1
    states: dict[_State, int] = {((0, order),): 0}
    rows: list[tuple[int, int, int, int, float]] = []
    # Of a record that is drawn the columns that are its own: the step, its history, how many.
    own: list[tuple[int, int, int]] = []
    for state in (pending := list(states)):
        may = [0 if history & waiting else count for history, count in state]
        for chosen in product(*(range(number + 1) for number in may)):
            following: dict[int, int] = {}
            ways, drawn = 1, sum(chosen)
            for (history, count), number, taken in zip(state, may, chosen, strict=True):
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
            rows.append((states[state], states[target], drawn, sum(may) - drawn, math.log(ways)))
        if len(rows) > MAX_TRANSITIONS:
            return None
    origin, targets, drawn_, left_out, ways_ = map(np.array, zip(*rows, strict=True))
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
        left_out=left_out,
        ways=ways_,
        meetings=meetings.astype(np.int16),
    )


@lru_cache(maxsize=1024)
def _bits(history: int, lags: int) -> Array:
    """Whether ``history`` has a column 0 (never), 1, ... steps ago; shape (lags + 1,)."""
    return np.array([0.0, *(float(history >> lag & 1) for lag in range(lags))])


@lru_cache(maxsize=512)
def log_moment(run: SampledColumns, order: int) -> float:
    """At least log E L^α at whole ``order`` α from any start; infinite where it is not computed."""
    lags = max(run.separation, len(run.products)) - 1
    known = _transitions(order, run.separation, lags)
    if known is None:
        return math.inf
    products = np.zeros(lags + 1)
    products[: len(run.products)] = np.array(run.products) / run.noise_multiplier**2
    exponents = known.meetings @ products
    if exponents.max() > _LARGEST:
        return math.inf
    p = run.sampling_probability
    chances = known.ways + known.drawn * math.log(p) + known.left_out * math.log1p(-p)
    from scipy.sparse import csr_array  # imports slowly, and is seldom needed

    states = known.states
    step = csr_array(
        (np.exp(chances + exponents), (known.origin, known.target)), shape=(states, states)
    )
    moments, result, left = np.ones(states), 0.0, run.steps
    while left:
        grown = step @ moments
        if not moments.min() > _SMALLEST:
            return math.inf
        growth = grown / moments
        left -= 1
        scale = float(grown.max())
        moments, result = grown / scale, result + math.log(scale)
        highest, lowest = float(growth.max()), float(growth.min())
        if run.steps - left >= _ROUNDS or highest - lowest <= _STEADY * highest:
            # No entry grows faster from here on.
            result, left = result + left * math.log(highest), 0
    size = float(exponents.max()) + float(np.abs(chances).max()) + 8 * order
    return result + run.steps * 2.0**-50 * (16 + size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentCurve:
    """Upper ends of ``runs`` and what is ``beside`` them in the order in which a record is there.

    None are of the other order.
    """

    runs: tuple[SampledColumns, ...]
    beside: tuple[Event, ...]

    def epsilon(self, delta: float) -> Bracket:
        """``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` or what is beside them does."""
        require_delta(delta)
        least = math.inf
        for order, moment in self._moments():
            own = (moment + _share(order) - math.log(delta)) / (order - 1)
            if own > least:
                break
            least = own
        if math.isinf(least):
            raise OutOfReach("no moment of the run is known", "use another accountant")
        return Bracket(lower=0.0, upper=max(0.0, least * (1 + 2.0**-50)))

    def delta(self, epsilon: float) -> Bracket:
        """``[0, δ]`` at ``epsilon`` (nats); raises what is beside the runs does."""
        require_epsilon(epsilon)
        least = 0.0
        for order, moment in self._moments():
            own = moment + _share(order) - (order - 1) * epsilon
            if own > least:
                break
            least = own
        return Bracket(lower=0.0, upper=min(1.0, math.exp(least) * (1 + 1e-12)))

    def _moments(self) -> Iterator[tuple[int, float]]:
        """Rising orders, each with a bound of the logarithm of E L^α of everything."""
        others = _log_moments_beside(self.beside)
        for order in ORDERS:
            total = others.get(order, math.inf)
            yield order, total + sum(log_moment(run, order) for run in self.runs)


def has_columns(event: Event) -> bool:
    """Whether a phase of ``event`` is a run of sampled columns."""
    return any(isinstance(part, SampledColumns) for part in _phases(event))


def moment_curve(event: Event) -> MomentCurve:
    """The moments of all phases of ``event``."""
    runs = tuple(part for part in _phases(event) if isinstance(part, SampledColumns))
    beside = tuple(part for part in _phases(event) if not isinstance(part, SampledColumns))
    return MomentCurve(runs=runs, beside=beside)


def _phases(event: Event) -> tuple[Event, ...]:
    return event.events if isinstance(event, Composed) else (event,)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedByOrder:
    """The least upper ends of ``both`` orders of the hypotheses, and of one by ``removed``.

    Of the latter the other order is the least of ``added``.
    """

    both: PrivacyCurve
    removed: PrivacyCurve
    added: tuple[PrivacyCurve, ...]

    def with_width(self, relative_width: float) -> BoundedByOrder:
        """The same with narrower or wider brackets, where they can be had."""
        return BoundedByOrder(
            both=adjusted(self.both, relative_width),
            removed=self.removed,
            added=tuple(adjusted(curve, relative_width) for curve in self.added),
        )

    def epsilon(self, delta: float) -> Bracket:
        """``[0, ε]`` (nats) at ``delta``; raises what ``both`` raises if nothing else answers."""
        # A small ε takes long to compute; that it is below another is soon known.
        return self._least(
            lambda curve: curve.epsilon(delta),
            lambda curve, bound: curve.delta(bound).upper <= delta,
        )

    def delta(self, epsilon: float) -> Bracket:
        """``[0, δ]`` at ``epsilon`` (nats); raises what ``both`` raises if nothing else answers."""
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
            # No more is needed of the other order than that it is the lesser one.
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


def _share(order: int) -> float:
    """Of log max_x (x - 1)/x^α: (L - e^ε)_+ is at most L^α e^{-(α - 1)ε} times it."""
    return (order - 1) * math.log(order - 1) - order * math.log(order)


@lru_cache(maxsize=64)
def _log_moments_beside(beside: tuple[Event, ...]) -> dict[int, float]:
    if not beside:
        return dict.fromkeys(ORDERS, 0.0)
    from affidavit.accountants.privacy_filter import renyi_divergences as renyi

    divergences = renyi.divergences(Composed(events=beside))
    return {
        int(order): (order - 1) * divergence
        for order, divergence in zip(renyi.ORDERS, divergences, strict=True)
        if order in ORDERS
    }
