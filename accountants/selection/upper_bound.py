"""A selection from above, by what is known of one run's laws P and Q.

A run's output lies, in the order of the score, above what has probability b under P and
x under Q; its density as the best is φ'(1 - b) times its own, and b ≥ β(x) = ``least_mass``. So

    δ(ε) ≤ E_Q ψ(P/Q),   ψ(r) = sup_x (φ'(1 - β(x)) r - e^ε φ'(1 - x))_+,

and ψ, the largest of some lines, is a sum of hinges: δ(ε) ≤ Σ w_j H(e^ε κ_j) with w_j and κ_j that
do not depend on ε. What is released beside the selection is composed with the run in H.

Reference: docs/theorems/selection.md, Theorems 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.selection.hypotheses import MAX_LOSS, Hypotheses
from affidavit.accountants.selection.repetitions import ROUNDING, Repetitions

_CELLS, _MAX_CELLS = 500, 8000
_COARSE = 1e-3
"""How far a cell may raise the log of a line's slope over what is taken from it."""
_LEAST = 1e-200
"""Added to all slopes, so that none underflows."""
_FALL, _FALL_OF_LINES = 0.3, 0.15
"""How far log δ may fall between places at which it is asked, where a chord or a line matters."""
_SHARE, _MAX_SHARE = 1e-3, 1e-2
"""Of the largest term, from which on its chord or its line matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hinges:
    """Σ ``weights`` · H(e^ε ``factors``) bounds δ(ε); ``masses`` are the x of their lines.

    All have shape (n,), the factors rising.
    """

    weights: Array
    factors: Array
    masses: Array

    @classmethod
    def of(cls, run: Hypotheses, repetitions: Repetitions) -> Hinges:
        """The hinges for what is known of one ``run``."""
        edges = _edges(run, repetitions)
        # More slope, and less taken from it, over every cell.
        slopes = repetitions.density(run.least_mass(edges))[:-1] * (1 + ROUNDING) + _LEAST
        taken = repetitions.density(edges)[1:] * (1 - ROUNDING)
        active = _envelope(slopes, taken)
        slopes, taken = slopes[active], taken[active]
        weights = np.diff(slopes, prepend=0.0)
        factors = np.diff(taken, prepend=0.0) / weights
        return cls(weights=weights, factors=factors, masses=edges[active])

    def delta(self, whole: Hypotheses, epsilon: float) -> float:
        """The bound of δ at ``epsilon`` (nats), of a run ``whole`` with what is beside it."""
        return float(self._terms(whole, epsilon).sum()) * (1 + ROUNDING)

    def _terms(self, whole: Hypotheses, epsilon: float) -> Array:
        factors = self.factors * (1 - ROUNDING) * math.exp(epsilon)
        return self.weights * (1 + ROUNDING) * whole.highest(factors)

    def epsilon(self, whole: Hypotheses, delta: float) -> float:
        """Where the bound passes ``delta``, in nats; infinite where it does not."""
        low, high = 0.0, MAX_LOSS
        if self.delta(whole, low) <= delta:
            return 0.0
        if self.delta(whole, high) > delta:
            return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(whole, middle) <= delta else (middle, high)
        return high

    def sharpen(self, run: Hypotheses, whole: Hypotheses, epsilon: float) -> None:
        """Ask both where the bound at ``epsilon`` (nats) is made."""
        terms = self._terms(whole, epsilon)
        matters = np.flatnonzero(terms > _SHARE * terms.max())
        first, last = epsilon + np.log(self.factors[matters[[0, -1]]])
        whole.fill(float(first), float(last), _FALL)
        lines = run.places[run.lines(self.masses[terms > _MAX_SHARE * terms.max()])]
        run.fill(float(lines.min()), float(lines.max()), _FALL_OF_LINES)


def _edges(run: Hypotheses, repetitions: Repetitions) -> Array:
    """Cells of x in [0, 1], fine where their lines may be the largest. Shape (n,), rising."""
    rough = np.unique(
        np.concatenate(([0.0], np.geomspace(1e-16, 1.0, _CELLS), np.linspace(0.0, 1.0, _CELLS)))
    )
    slopes, taken = repetitions.density(run.least_mass(rough)), repetitions.density(rough)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(slopes), np.log(taken)
        reaches = logs[0][:-1] - logs[1][1:] >= np.nanmax(logs[0] - logs[1])
    end = int(np.flatnonzero(np.nan_to_num(reaches, nan=1.0)).max(initial=0)) + 1
    rises = -(logs[0] + logs[1])[: end + 1]
    rises = np.maximum.accumulate(np.nan_to_num(rises - rises[0], posinf=1e6))
    cells = min(_MAX_CELLS, math.ceil(rises[-1] / _COARSE) + 2)
    fine = np.interp(np.linspace(0.0, rises[-1], cells), rises, rough[: end + 1])
    return np.unique(np.concatenate((fine, rough)))


def _envelope(slopes: Array, taken: Array) -> NDArray[np.intp]:
    """Which lines, of r, are somewhere the largest and above zero: the lower hull of the points."""
    order = np.lexsort((taken, slopes))
    hull: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    for index, slope, intercept in zip(
        order.tolist(), slopes[order].tolist(), taken[order].tolist(), strict=True
    ):
        if slope <= hull[-1][0]:
            continue
        while len(hull) > 1:
            (a, b, _), (c, d, _) = hull[-2], hull[-1]
            if (d - b) * (slope - a) >= (intercept - b) * (c - a):
                hull.pop()
            else:
                break
        hull.append((slope, intercept, index))
    return np.array([index for _, _, index in hull[1:]], dtype=np.intp)
