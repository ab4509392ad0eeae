"""A selection from below: attacks by what is known of one run's laws P and Q.

The score puts first what has a loss below s, then what has one above t ≥ s, then the rest. With
masses b and a of the first two the best is of the second kind with probability φ(1 - b) -
φ(1 - b - a), under P and under Q. That rises in a and falls in b, so that bounds of these masses
bound the attack.

Reference: docs/theorems/selection.md, Theorem 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import adjusted
from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.protocol import (
    Accountant,
    AccountantError,
    Attaining,
    PrivacyCurve,
    Unsupported,
)
from affidavit.accountants.registry import accountant
from affidavit.accountants.selection.hypotheses import MAX_LOSS, Hypotheses, Masses
from affidavit.accountants.selection.repetitions import ROUNDING, Repetitions
from affidavit.plan import Event, RepeatAndSelect

WIDTH, _NARROW = 1e-2, 1e-3
"""Relative width of the brackets that are asked of a run's δ, by which ε moves far less, and of
those by which an attack is judged."""
_ENGINES = ("gaussian", "fourier", "allocation")
T = TypeVar("T")
Gain = Callable[[Array, Array], Array]
"""What an attack is worth that is right with one probability and wrong with the other."""
FAR = 30.0
"""How far below δ, divided by the mean number of runs, a run's curve is followed."""
_LEAST, _MOST = 1e-30, 1e-4
"""The least and the largest δ to which it is followed where δ is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attacked:
    """Lower ends of a selection among runs of which a pair of data sets has these curves.

    ``first`` is that of one order of the pair and ``second`` that of the other.
    """

    first: PrivacyCurve
    second: PrivacyCurve
    repetitions: Repetitions

    @classmethod
    def of(cls, selection: RepeatAndSelect) -> Attacked:
        """The attacks on ``selection``; raises ``Unsupported`` or ``OutOfReach`` for its run."""
        repetitions = Repetitions(mean=selection.mean, shape=selection.shape)
        first, second = by_engines(lambda engine: _attained(engine, selection.event))
        return cls(
            first=adjusted(first, _NARROW),
            second=adjusted(second, _NARROW),
            repetitions=repetitions,
        )

    def epsilon(self, delta: float) -> Bracket:
        """``[lower end, ∞]`` of ε (nats) at ``delta``; raises as the curves of the run do."""

        def gain(true: Array, false: Array) -> Array:
            with np.errstate(all="ignore"):
                result = np.log((true - delta) / false)
            return np.where((true > delta) & np.isfinite(result), result, -np.inf)

        best = self._best(delta / self.repetitions.mean / FAR, gain) * (1 - ROUNDING) - ROUNDING
        return Bracket(lower=max(0.0, best), upper=math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """``[lower end, 1]`` of δ at ``epsilon`` (nats); raises as the curves of the run do."""
        if epsilon > MAX_LOSS:
            return Bracket(lower=0.0, upper=1.0)
        gamma = math.exp(epsilon) * (1 + ROUNDING)
        best = self._best(near(self.first, epsilon), lambda true, false: true - gamma * false)
        return Bracket(lower=min(1.0, max(0.0, best * (1 - ROUNDING))), upper=1.0)

    def _best(self, delta: float, gain: Gain) -> float:
        best = -math.inf
        for order in ((self.first, self.second), (self.second, self.first)):
            run = Hypotheses(*map(widened, order))
            run.begin(delta)
            best = max(best, _best(run, Hypotheses(*order), self.repetitions, gain))
        return best


def by_engines(answer: Callable[[Accountant], T]) -> T:
    """The first ``answer`` about one run of an engine for runs; raises ``AccountantError``."""
    failures: list[AccountantError] = []
    for name in _ENGINES:
        try:
            return answer(accountant(name))
        except AccountantError as failure:
            failures.append(failure)
    raise next((one for one in failures if not isinstance(one, Unsupported)), failures[0])


def _attained(engine: Accountant, event: Event) -> tuple[PrivacyCurve, PrivacyCurve]:
    assert isinstance(engine, Attaining)
    return engine.attained(event)


def widened(curve: PrivacyCurve) -> PrivacyCurve:
    """``curve`` with brackets of ``WIDTH``, where it can be asked for them."""
    return adjusted(curve, WIDTH)


def near(curve: PrivacyCurve, epsilon: float) -> float:
    """To about which δ the ``curve`` of a run is followed for the δ of a selection at ``epsilon``.

    A selection's losses are larger than its runs', so that it is made at smaller ones.
    """
    try:
        return min(_MOST, max(_LEAST, curve.delta(epsilon).upper))
    except AccountantError:
        return _MOST


def _best(run: Hypotheses, exact: Hypotheses, repetitions: Repetitions, gain: Gain) -> float:
    """What is proved of the attacks that seem best, with nothing put first and with something.

    They are found by ``run`` and judged by ``exact``, the same pair in narrower brackets.
    """
    places, above, below = run.about()
    before = np.array([[0.0, *below.p], [0.0, *below.q]])[:, :, None]
    seems = gain(
        repetitions.within(before[0], above.p),
        repetitions.within(before[1], above.q),
    )
    # What comes before ends where the other set begins, or earlier.
    seems = np.where(places >= np.concatenate(([-np.inf], places))[:, None], seems, -np.inf)
    result = -math.inf
    for rows in (slice(0, 1), slice(1, None)):
        row, column = np.unravel_index(int(np.nanargmax(seems[rows])), seems[rows].shape)
        after = exact.above(float(places[column]))
        first = (
            Masses(p=np.zeros(1), q=np.zeros(1))
            if rows.start == 0
            else exact.below(float(places[row]))
        )
        if after.p.size and first.p.size:
            true = repetitions.within(first.p[:, None], after.p) * (1 - ROUNDING)
            false = repetitions.within(first.q[:, None], after.q) * (1 + ROUNDING)
            result = max(result, float(gain(true, false).min()))
    return result
