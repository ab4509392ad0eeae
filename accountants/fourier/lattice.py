"""One release's loss law on a uniform grid, bounded from above and from below.

A finite measure p on losses has the hockey-stick curve h_p(α) = Σ p_i (1 - α e^{-l_i})_+.
If h_p <= h_r for every α > 0 then h_{p*s} <= h_{r*s} for every measure s on losses, since
h_{p*s}(α) = ∫ h_p(α e^{-l}) ds(l). So bounds of one release's curve, measure by measure,
compose (docs/theorems/fourier-lattice.md). With H the true curve, nodes l_i = l_0 + i h,
α_i = e^{l_i}, tails S_i = Σ_{j>=i} p_j, and P_i, Q_i the masses of an interval:

* upper: h_p interpolates H at the nodes (chords of a convex curve lie above it),
      S_i = P(L >= l_i) + (P_{i-1} - α_{i-1} Q_{i-1}) / (1 - e^{-h}),
  with interval i from l_i to l_{i+1}; losses below l_0 move up to l_0, and those above
  the last node are ``infinite``, to be counted in δ as they are.
* lower: h_p runs through nodes (α_i, v_i) below the tangents t_e of H at e_i = l_i - h/2,
      v_i = min(t_{e_i}(α_i), t_{e_{i+1}}(α_i)),    S_i = v_i + α_i (v_j - v_i) / (α_i - α_j)
  with j the node before. Concave kinks are replaced by chords, which drops nodes, and S
  by its running minimum; losses outside the edges are dropped, and so is the value of v at the
  last node kept, which is one where v >= 0 and S >= v.

Raising (lowering) every S_i keeps an upper (lower) bound, which is how rounding enters:
each S_i is moved by a bound of its own error. Errors bounded here: discretisation,
truncation at both ends, the elementary functions, the cancellation in the brackets over
1 - e^{-h}, and the placing of the nodes (``loss_error``, to be added to the
loss of every release for upper bounds, subtracted for lower ones).

References: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots",
PoPETs 2022, for the chords; docs/theorems/fourier-lattice.md for the tangents and the
rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.fourier.losses import UNIT_ROUNDOFF, Array, LossLaw


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The losses ``origin + i * step`` for 0 <= i < ``size``."""

    origin: float
    step: float
    size: int

    def losses(self, offset: float = 0.0, extra: int = 0) -> Array:
        """The nodes, moved by ``offset`` steps, with ``extra`` more at the end."""
        index = np.arange(self.size + extra, dtype=np.float64)
        return self.origin + self.step * (index + offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticeMeasure:
    """P-masses on a grid whose hockey-stick curve bounds that of one release.

    ``infinite`` is the mass at infinite loss (upper bounds only) and ``loss_error`` the
    amount by which every node must be raised (upper) or lowered (lower) for the bound to
    hold: the nodes themselves are rounded numbers.
    """

    grid: Grid
    masses: Array
    infinite: float
    loss_error: float


def upper_measure(law: LossLaw, grid: Grid) -> LatticeMeasure:
    """A measure on ``grid`` whose curve is nowhere below that of ``law``."""
    nodes = grid.losses()
    tail = law.survival(nodes)
    interval_p = tail.p[:-1] - tail.p[1:]
    interval_q = tail.q[:-1] - tail.q[1:]
    width = -math.expm1(-grid.step)
    # |e^l Q(L >= l)| <= P(L >= l): one relative error of p covers both survival functions.
    rounding = _widest(tail.relative + UNIT_ROUNDOFF * (4.0 + np.abs(nodes)))
    slack = 5.0 * rounding * tail.p
    slack[1:] += slack[:-1] / width + 4.0 * tail.loss_error / width * np.abs(interval_p)
    tails = tail.p + slack
    tails[1:] += (interval_p - np.exp(nodes[:-1]) * interval_q) / width
    tails[0] = 1.0
    infinite = float(tail.p[-1] * (1.0 + rounding[-1]))
    tails = np.maximum.accumulate(tails[::-1])[::-1]
    tails = np.minimum(tails, 1.0)
    masses = -np.diff(tails, append=tail.p[-1] * (1.0 - rounding[-1]))
    return LatticeMeasure(
        grid=grid,
        masses=np.maximum(masses, 0.0),
        infinite=infinite,
        loss_error=tail.loss_error + 4.0 * UNIT_ROUNDOFF * float(np.abs(nodes).max()),
    )


def lower_measure(
    law: LossLaw, grid: Grid, *, open_left: bool = False, open_right: bool = False
) -> LatticeMeasure:
    """A measure on ``grid`` whose curve is nowhere above that of ``law``.

    ``open_left`` and ``open_right`` let the first (last) cell reach to infinity, with the
    tangent 1 - α (the line 0) as its outer one, for laws that end steeply on that side.
    """
    nodes = grid.losses()
    tail = law.survival(grid.losses(-0.5, extra=1))
    if open_left:
        tail.p[0] = tail.q[0] = 1.0
    if open_right:
        tail.p[-1] = tail.q[-1] = 0.0
    # The law without the losses above the last edge: kept, they would pile up on the last
    # node and could draw the tilt there.
    restricted_p, restricted_q = tail.p - tail.p[-1], tail.q - tail.q[-1]
    p, q = restricted_p[:-1], restricted_q[:-1]
    alpha = np.exp(nodes)
    gap = (p - restricted_p[1:]) - alpha * (q - restricted_q[1:])
    values = p - alpha * q - np.maximum(gap, 0.0)
    slack = 12.0 * (_widest(tail.relative)[:-1] + UNIT_ROUNDOFF * (4.0 + np.abs(nodes)))
    slack *= tail.p[:-1]
    kept = _convex_nodes(alpha, values)
    tails = np.empty(kept.size)
    tails[0] = p[0] - max(gap[0], 0.0) - slack[0]
    here, before = kept[1:], kept[:-1]
    shares = -1.0 / np.expm1(nodes[before] - nodes[here])
    tails[1:] = values[here] + (values[before] - values[here]) * shares
    tails[1:] -= (slack[here] + slack[before]) * (shares + 1.0)
    tails = np.minimum.accumulate(tails)
    values, slack = values[kept], slack[kept]
    if open_right:
        # The outer tangent is the line 0 itself: no rounding enters a value below its cell.
        values[-1] = max(0.0, values[-1]) if gap[-1] > slack[-1] else -1.0
        slack[-1] = 0.0
    sound = np.flatnonzero((values >= slack) & (tails >= values + slack))
    masses = np.zeros(grid.size)
    if sound.size:
        last = int(sound[-1])
        masses[kept[: last + 1]] = -np.diff(tails[: last + 1], append=values[last] + slack[last])
    placing = 4.0 * UNIT_ROUNDOFF * float(np.abs(nodes).max())
    return LatticeMeasure(grid=grid, masses=masses, infinite=0.0, loss_error=placing)


def _convex_nodes(alpha: Array, values: Array) -> NDArray[np.intp]:
    """The nodes left when chords replace concave kinks, round by round.

    A few rounds suffice where the law is smooth; kinks still concave after the last are
    met by the running minimum of the tails.
    """
    kept = np.arange(alpha.size)
    for _ in range(40):
        slopes = np.diff(values[kept]) / np.diff(alpha[kept])
        concave = np.flatnonzero(slopes[1:] < slopes[:-1]) + 1
        if concave.size == 0:
            break
        kept = np.delete(kept, concave)
    return kept


def _widest(rounding: Array) -> Array:
    """The larger of each entry and the next: a bound for an interval's two ends."""
    widest: Array = np.maximum(rounding, np.append(rounding[1:], rounding[-1]))
    return widest
