"""Upper bounds of a selection, from the curves of one run by any engine.

Order the outputs of a run by score. An output lies above a set of probability b under P and x under
Q. Its density as the best output is φ'(1 - b) times its own, and b ≥ β(x) = ``min_p_mass``. So

    δ(ε) ≤ E_Q ψ(P/Q),   ψ(r) = sup_x (φ'(1 - β(x)) r - e^ε φ'(1 - x))_+,

and ψ, the maximum of some lines, is a sum of hinges: δ(ε) ≤ Σ w_j H(e^ε κ_j) with w_j and κ_j that
do not depend on ε. Releases beside the selection are composed with the run in H. Bins of correlated
noise count as known. Lower bounds come from attacks (``attacks.py``).

>>> from affidavit.plan.events import Gaussian, RepeatAndSelect
>>> run = Gaussian(noise_multiplier=2.0)
>>> event = RepeatAndSelect(event=run, mean=10.0, shape=1.0)
>>> 3.25 < SelectionAccountant().curve(event).epsilon(1e-6).upper < 3.27
True

Reference: docs/theorems/selection.md, Theorems 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import BracketingCurve, orders_of
from affidavit.accountants.chains import ChainedCurve
from affidavit.accountants.composition import parts
from affidavit.accountants.gaussian import EMPTY_CURVE
from affidavit.accountants.participations import with_bins_known
from affidavit.accountants.protocol import (
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import AFFIDAVIT_VERSION, find_curve
from affidavit.accountants.rounding import Array
from affidavit.accountants.selection.attacks import (
    DELTA_DIVISOR,
    first_engine_result,
    run_delta,
    with_run_width,
)
from affidavit.accountants.selection.pair_bounds import MAX_LOSS, PairBounds
from affidavit.accountants.selection.repetitions import ROUNDING, Repetitions
from affidavit.plan import events

_REFINEMENTS = 2
_STEEP_LOG_DROP = 50.0
"""Log drop of the best run's density above which Rényi bounds may be lower than hinges, as for a
Poisson number of runs with a large mean."""
_INITIAL_CELLS, _MAX_CELLS = 500, 8000
_CELL_LOG_WIDTH = 1e-3
"""Increase of the log of a line's slope over its intercept within one cell."""
_MIN_SLOPE = 1e-200
"""Added to all slopes, so that none underflows."""
_CHORD_LOG_DROP, _LINE_LOG_DROP = 0.3, 0.15
"""Drop of log δ between sampled points, where a chord or a line is relevant."""
_RELEVANT_CHORD, _RELEVANT_LINE = 1e-3, 1e-2
"""Share of the largest term from which its chord or its line is relevant."""

Order = tuple[PrivacyCurve, PrivacyCurve]
"""The curves of P against Q and of Q against P."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionCurve:
    """Upper bounds of a selection, from the curves of one ``run`` in each order.

    ``whole`` has the curves of the run composed with the releases beside the selection. The bounds
    of ``other`` replace higher ones.
    """

    run: tuple[Order, ...]
    whole: tuple[Order, ...]
    repetitions: Repetitions
    other: PrivacyCurve | None

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``ValueError`` unless 0 < δ < 1."""
        require_delta(delta)
        upper = 0.0
        bounds = self._bounds(delta / self.repetitions.mean / DELTA_DIVISOR)
        for bound in sorted(bounds, key=lambda bound: -bound.epsilon(delta)):
            result = bound.epsilon(delta)
            for _ in range(_REFINEMENTS):
                if result <= upper or math.isinf(result):
                    break
                bound.refine(result)
                result = min(result, bound.epsilon(delta))
            upper = max(upper, result)
        if self.other is not None:
            upper = min(upper, self.other.epsilon(delta).upper)
        if not math.isfinite(upper):
            raise OutOfReach("no ε was found for this δ.", "Choose a larger δ.")
        return Bracket(lower=0.0, upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        epsilon = min(epsilon, MAX_LOSS)
        upper = 0.0
        for order, bound in enumerate(self._bounds(run_delta(self.run[0][0], epsilon))):
            for _ in range(_REFINEMENTS):
                if order and bound.delta(epsilon) <= upper:
                    break
                bound.refine(epsilon)
            upper = max(upper, bound.delta(epsilon))
        if self.other is not None:
            upper = min(upper, self.other.delta(epsilon).upper)
        return Bracket(lower=0.0, upper=min(1.0, upper))

    def _bounds(self, delta: float) -> list[HingeBound]:
        """Return the bound of each order; the curves of a run are sampled down to ``delta``."""
        result = []
        for run, whole in zip(self.run, self.whole, strict=True):
            one = PairBounds(*run)
            one.sample(delta)
            both = one
            if whole != run:
                both = PairBounds(*whole)
                both.sample(delta)
            result.append(HingeBound(one, both, self.repetitions))
        return result


class HingeBound:
    """The bound Σ w_j H(e^ε κ_j) of δ in one order, for a ``run`` and the ``whole`` release."""

    def __init__(self, run: PairBounds, whole: PairBounds, repetitions: Repetitions) -> None:
        self._run, self._whole, self._repetitions = run, whole, repetitions
        self._compute_hinges()

    def _compute_hinges(self) -> None:
        edges = _edges(self._run, self._repetitions)
        # Round up the slope and round down the intercept over every cell.
        slopes = self._repetitions.density(self._run.min_p_mass(edges))[:-1]
        slopes = slopes * (1 + ROUNDING) + _MIN_SLOPE
        intercepts = self._repetitions.density(edges)[1:] * (1 - ROUNDING)
        active = _envelope(slopes, intercepts)
        self._masses = edges[active]
        self._weights = np.diff(slopes[active], prepend=0.0)
        self._factors = np.diff(intercepts[active], prepend=0.0) / self._weights

    def _terms(self, epsilon: float) -> Array:
        factors = self._factors * (1 - ROUNDING) * math.exp(epsilon)
        return self._weights * (1 + ROUNDING) * self._whole.hockey_stick_upper(factors)

    def delta(self, epsilon: float) -> float:
        """Return the bound of δ at ``epsilon`` (nats)."""
        return float(self._terms(epsilon).sum()) * (1 + ROUNDING)

    def epsilon(self, delta: float) -> float:
        """Return the ε (nats) at which the bound reaches ``delta``, or infinity."""
        low, high = 0.0, MAX_LOSS
        if self.delta(low) <= delta:
            return 0.0
        if self.delta(high) > delta:
            return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def refine(self, epsilon: float) -> None:
        """Sample the curves more densely where the bound at ``epsilon`` (nats) is made."""
        terms = self._terms(epsilon)
        relevant = np.flatnonzero(terms > _RELEVANT_CHORD * terms.max())
        first, last = epsilon + np.log(self._factors[relevant[[0, -1]]])
        self._whole.refine(float(first), float(last), _CHORD_LOG_DROP)
        lines = self._run.active_losses(self._masses[terms > _RELEVANT_LINE * terms.max()])
        self._run.refine(float(lines.min()), float(lines.max()), _LINE_LOG_DROP)
        self._compute_hinges()


def _edges(run: PairBounds, repetitions: Repetitions) -> Array:
    """Return edges of cells of x in [0, 1], increasing, fine where lines may be the largest.

    Shape (n,).
    """
    rough = np.unique(
        np.concatenate(
            (
                [0.0],
                np.geomspace(1e-16, 1.0, _INITIAL_CELLS),
                np.linspace(0.0, 1.0, _INITIAL_CELLS),
            )
        )
    )
    slopes, intercepts = repetitions.density(run.min_p_mass(rough)), repetitions.density(rough)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(slopes), np.log(intercepts)
        reaches = logs[0][:-1] - logs[1][1:] >= np.nanmax(logs[0] - logs[1])
    end = int(np.flatnonzero(np.nan_to_num(reaches, nan=1.0)).max(initial=0)) + 1
    rises = -(logs[0] + logs[1])[: end + 1]
    rises = np.maximum.accumulate(np.nan_to_num(rises - rises[0], posinf=1e6))
    cells = min(_MAX_CELLS, math.ceil(rises[-1] / _CELL_LOG_WIDTH) + 2)
    fine = np.interp(np.linspace(0.0, rises[-1], cells), rises, rough[: end + 1])
    return np.unique(np.concatenate((fine, rough)))


def _envelope(slopes: Array, intercepts: Array) -> NDArray[np.intp]:
    """Return the indices of the lines in r that are somewhere the largest and positive.

    They are the lower hull of the points.
    """
    order = np.lexsort((intercepts, slopes))
    hull: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    for index, slope, intercept in zip(
        order.tolist(), slopes[order].tolist(), intercepts[order].tolist(), strict=True
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionAccountant:
    """Upper bounds of one selection among runs that an engine bounds, and releases beside it."""

    name: str = "selection"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        own = self._curve(event)
        for bound in events.alternatives(event):
            if isinstance(bound, events.ChainOfNeighbours):
                link = self._curve(bound.event)
                return ChainedCurve(above=(own,), below=(), neighbours=link, links=bound.links)
        return own

    def _curve(self, event: events.Event) -> PrivacyCurve:
        event = with_bins_known(event)
        releases = parts(event)
        if not releases:
            return EMPTY_CURVE
        selections = [(part, n) for part, n in releases if isinstance(part, events.RepeatAndSelect)]
        if len(selections) != 1 or selections[0][1] != 1:
            raise Unsupported(
                "this accountant is for one selection among repeated runs.",
                "Use another accountant.",
            )
        ((selection, _),) = selections
        beside = [
            events.Repeated(event=part, count=n)
            for part, n in releases
            if not isinstance(part, events.RepeatAndSelect)
        ]
        run = _orders(selection.event)
        whole = _orders(events.Composed(events=(selection.event, *beside))) if beside else run
        orders = max(len(run), len(whole))
        repetitions = Repetitions(mean=selection.mean, shape=selection.shape)
        is_steep = repetitions.log_density_drop > _STEEP_LOG_DROP
        return SelectionCurve(
            run=run * (orders // len(run)),
            whole=whole * (orders // len(whole)),
            repetitions=repetitions,
            other=find_curve("rdp", event) if is_steep else None,
        )


def _orders(event: events.Event) -> tuple[Order, ...]:
    """Return the curves of ``event`` in one order, or in both if they differ."""
    curve = first_engine_result(lambda engine: engine.curve(event))
    if isinstance(curve, BracketingCurve):
        curve = curve.above
    one, other = orders_of(with_run_width(curve))
    return ((one, other),) if one == other else ((one, other), (other, one))
