"""Lower bounds of a selection, from attacks on one run with laws P and Q.

The score ranks outputs with a loss below s first, then those with a loss above t ≥ s, then the
rest. If the first two sets have masses b and a, the best output is in the second set with
probability φ(1 - b) - φ(1 - b - a), under P and under Q. It increases in a and decreases in b, so
bounds of these masses bound the attack.

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
from affidavit.accountants.protocol import (
    Accountant,
    AccountantError,
    Attaining,
    PrivacyCurve,
    Unsupported,
)
from affidavit.accountants.registry import accountant
from affidavit.accountants.rounding import Array
from affidavit.accountants.selection.pair_bounds import MAX_LOSS, Masses, PairBounds
from affidavit.accountants.selection.repetitions import ROUNDING, Repetitions
from affidavit.plan import events

_RUN_WIDTH, _ATTACK_WIDTH = 1e-2, 1e-3
"""Relative widths of a run's brackets of δ, and of the brackets that evaluate an attack."""
_ENGINES = ("gaussian", "fourier", "allocation")
T = TypeVar("T")
Gain = Callable[[Array, Array], Array]
"""The gain of an attack from its true- and false-positive rates."""
DELTA_DIVISOR = 30.0
"""A run's curve is sampled down to δ / (mean number of runs · this)."""
_MIN_RUN_DELTA, _MAX_RUN_DELTA = 1e-30, 1e-4
"""Range of the δ down to which a run's curve is sampled to bound δ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionAttacks:
    """Lower bounds of a selection among runs, from the curves of a pair of data sets.

    ``first`` is the curve of one order of the pair and ``second`` of the other.
    """

    first: PrivacyCurve
    second: PrivacyCurve
    repetitions: Repetitions

    @classmethod
    def of(cls, selection: events.RepeatAndSelect) -> SelectionAttacks:
        """Return the attacks on ``selection``; raises ``Unsupported`` or ``OutOfReach``."""
        repetitions = Repetitions(mean=selection.mean, shape=selection.shape)
        first, second = first_engine_result(lambda engine: _attained(engine, selection.event))
        return cls(
            first=adjusted(first, _ATTACK_WIDTH),
            second=adjusted(second, _ATTACK_WIDTH),
            repetitions=repetitions,
        )

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[lower, ∞]`` of ε (nats) at ``delta``; raises as the curves of the run do."""

        def gain(true: Array, false: Array) -> Array:
            with np.errstate(all="ignore"):
                result = np.log((true - delta) / false)
            return np.where((true > delta) & np.isfinite(result), result, -np.inf)

        best = self._best_gain(delta / self.repetitions.mean / DELTA_DIVISOR, gain)
        return Bracket(lower=max(0.0, best * (1 - ROUNDING) - ROUNDING), upper=math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[lower, 1]`` of δ at ``epsilon`` (nats); raises as the curves of the run do."""
        if epsilon > MAX_LOSS:
            return Bracket(lower=0.0, upper=1.0)
        gamma = math.exp(epsilon) * (1 + ROUNDING)
        delta = run_delta(self.first, epsilon)
        best = self._best_gain(delta, lambda true, false: true - gamma * false)
        return Bracket(lower=min(1.0, max(0.0, best * (1 - ROUNDING))), upper=1.0)

    def _best_gain(self, delta: float, gain: Gain) -> float:
        best = -math.inf
        for order in ((self.first, self.second), (self.second, self.first)):
            run = PairBounds(*map(with_run_width, order))
            run.sample(delta)
            best = max(best, _best_gain(run, PairBounds(*order), self.repetitions, gain))
        return best


def first_engine_result(answer: Callable[[Accountant], T]) -> T:
    """Return the first ``answer`` that an engine gives; raises ``AccountantError`` if none does."""
    failures: list[AccountantError] = []
    for name in _ENGINES:
        try:
            return answer(accountant(name))
        except AccountantError as failure:
            failures.append(failure)
    raise next((one for one in failures if not isinstance(one, Unsupported)), failures[0])


def _attained(engine: Accountant, event: events.Event) -> tuple[PrivacyCurve, PrivacyCurve]:
    assert isinstance(engine, Attaining)
    return engine.attained(event)


def with_run_width(curve: PrivacyCurve) -> PrivacyCurve:
    """Return ``curve`` with brackets of relative width ``_RUN_WIDTH``, if it is adjustable."""
    return adjusted(curve, _RUN_WIDTH)


def run_delta(curve: PrivacyCurve, epsilon: float) -> float:
    """Return the δ down to which a run's ``curve`` is sampled to bound δ at ``epsilon`` (nats).

    A selection has larger losses than its runs, so smaller losses of a run decide.
    """
    try:
        return min(_MAX_RUN_DELTA, max(_MIN_RUN_DELTA, curve.delta(epsilon).upper))
    except AccountantError:
        return _MAX_RUN_DELTA


def _best_gain(run: PairBounds, exact: PairBounds, repetitions: Repetitions, gain: Gain) -> float:
    """Return the proved gain of the best attack, with or without outputs ranked first.

    ``run`` proposes the attacks; ``exact``, the same pair in narrower brackets, evaluates them.
    """
    losses, above, below = run.approximate_masses()
    before = np.array([[0.0, *below.p], [0.0, *below.q]])[:, :, None]
    estimate = gain(
        repetitions.win_probability(before[0], above.p),
        repetitions.win_probability(before[1], above.q),
    )
    # The first set ends before the second starts.
    is_ordered = losses >= np.concatenate(([-np.inf], losses))[:, None]
    estimate = np.where(is_ordered, estimate, -np.inf)
    result = -math.inf
    for rows in (slice(0, 1), slice(1, None)):
        row, column = np.unravel_index(int(np.nanargmax(estimate[rows])), estimate[rows].shape)
        after = exact.masses_above(float(losses[column]))
        first = (
            Masses(p=np.zeros(1), q=np.zeros(1))
            if rows.start == 0
            else exact.masses_below(float(losses[row]))
        )
        if after.p.size and first.p.size:
            true = repetitions.win_probability(first.p[:, None], after.p)
            false = repetitions.win_probability(first.q[:, None], after.q)
            gains = gain(true * (1 - ROUNDING), false * (1 + ROUNDING))
            result = max(result, float(gains.min()))
    return result
