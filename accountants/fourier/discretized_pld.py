"""One release's loss law on a uniform grid, bounded from above and from below.

A finite measure p on losses has the hockey-stick curve h_p(α) = Σ p_i (1 - α e^{-l_i})_+.
If h_p <= h_r for every α > 0 then h_{p*s} <= h_{r*s} for every measure s on losses, since
h_{p*s}(α) = ∫ h_p(α e^{-l}) ds(l). So bounds of one release's curve, measure by measure,
compose (docs/theorems/fourier-lattice.md). Both bounds are made from the masses (P, Q) of
half cells, the losses between a node l_i = l_0 + i h and the middle to the next:

* upper: the losses between two nodes move to these nodes, with P and Q kept, which are the
  chords of the curve. Losses below l_0 move up to l_0, and those above the last node are
  ``infinite``, to be counted in δ as they are.
* lower: the losses within half a step of node i, of masses P and Q and with the gap
  g = P - e^{l_i} Q, are pulled together at the node: at g > 0 with g / (e^h - 1) of the
  mass of the node below, at g < 0 with -g / (1 - e^{-h}) of that of the node above. A node
  whose mass becomes negative is removed, and its mass divided between its neighbours with P
  and Q kept (a chord in place of a concave kink). Losses beyond the outer cells are
  dropped, or join the outer cell where it is open.

Errors bounded here: discretisation, truncation at both ends, the elementary functions (less P and
more Q, or the reverse, by the relative error of each cell), the place of the cells' ends
(``edge_error``: every node's mass is spread up by as much), and the arithmetic. All are relative
to a cell's own masses, so that a million releases of a tiny loss each cost no more digits than
that. The nodes themselves are exact: l_0 + i h of two doubles.

References: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots",
PoPETs 2022, for the chords; docs/theorems/fourier-lattice.md for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Cells, LossLaw

_MAX_CHORDS = 4000
"""Chords that are laid one by one over negative masses; with more the measure is cut instead."""
_MAX_CHORD_NATS = 700.0
"""Length of a chord below a negative mass (nats), so that no exponential overflows."""
_ARITHMETIC_ERROR = 32.0 * UNIT_ROUNDOFF
"""Bounds the roundings of the few operations that turn the masses of a cell into two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The losses ``origin + i * step`` for 0 <= i < ``size``, in nats."""

    origin: float
    step: float
    size: int

    def losses(self) -> Array:
        """Return the nodes (nats), of shape (size,)."""
        return self.origin + self.step * np.arange(self.size, dtype=np.float64)

    def edges(self) -> Array:
        """Return the nodes and the middles beside them (nats), of shape (2 · size + 1,)."""
        index = np.arange(2 * self.size + 1, dtype=np.float64)
        return self.origin + self.step * (0.5 * (index - 1.0))

    def cells(self, law: LossLaw) -> Cells:
        """Return the masses of ``law`` between ``edges``, each of shape (2 · size + 2,).

        These are the mass below the first edge, the half cells, and the mass above the last.
        """
        edges = self.edges()
        cells = law.cells(edges)
        # An edge is off by a rounding of its terms, not of itself.
        terms = np.abs(np.concatenate((edges[:1], edges))) + abs(self.origin)
        return replace(
            cells,
            relative_error=cells.relative_error + _ARITHMETIC_ERROR + 4.0 * UNIT_ROUNDOFF * terms,
            edge_error=cells.edge_error + 2.0 * UNIT_ROUNDOFF * terms,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticeMeasure:
    """P-masses on a grid whose hockey-stick curve bounds that of one release.

    ``masses`` have shape (size,). ``infinite`` is the mass at infinite loss (upper bounds only).
    ``loss_error`` is an amount (nats) by which every node must be raised (upper) or lowered (lower)
    for the bound to hold, for measures whose nodes are themselves rounded.
    """

    grid: Grid
    masses: Array
    infinite: float
    loss_error: float = 0.0

    def up_to(self, cut: float) -> LatticeMeasure:
        """Return the part with finite losses up to ``cut`` (nats)."""
        size = int(np.searchsorted(self.grid.losses(), cut, side="right"))
        grid = Grid(origin=self.grid.origin, step=self.grid.step, size=max(1, size))
        masses = self.masses[: grid.size] if size else np.zeros(1)
        return LatticeMeasure(grid=grid, masses=masses, infinite=0.0, loss_error=self.loss_error)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerRange:
    """The nodes, by index, that a lower measure uses, and whether its outer cells are open.

    An open first cell also includes the ``joined`` cells above its own.
    """

    first: int
    last: int
    open_left: bool
    open_right: bool
    joined: int = 0


def upper_measure(cells: Cells, grid: Grid) -> LatticeMeasure:
    """Return a measure on ``grid`` whose curve is nowhere below that of the law (Theorem 3).

    ``cells`` are those of ``grid.cells``.
    """
    alpha, share = np.exp(grid.losses()), -1.0 / np.expm1(-grid.step)
    # A loss outside its cell by the edge error is first lowered by as much, then raised to the
    # cell's lower end if it is below that; see the end for the first half.
    max_p = cells.p * (1.0 + cells.relative_error)
    min_q = cells.q * (1.0 - cells.relative_error - cells.edge_error)
    p = max_p[2:-2:2] + max_p[3:-1:2]
    q = min_q[2:-2:2] + min_q[3:-1:2]
    high = np.minimum(share * (p - alpha[:-1] * q), p)
    masses = np.zeros(grid.size)
    masses[0] = max_p[0] + max_p[1]
    masses[:-1] += p - high
    masses[1:] += high
    infinite = float(max_p[-2] + max_p[-1])
    # A half cell's own error is the larger of the two that meet at a node, on either side.
    spread = np.maximum(cells.edge_error[1:-1:2], cells.edge_error[2::2])
    spread[1:] = np.maximum(spread[1:], spread[:-1])
    moved = np.where(spread < grid.step, share * spread, 1.0) * masses
    lost = float(moved[spread >= grid.step].sum())
    masses -= moved
    moved[spread >= grid.step] = 0.0
    masses[1:] += moved[:-1]
    infinite += lost + float(moved[-1])
    return LatticeMeasure(
        grid=grid,
        masses=np.maximum(masses, 0.0) * (1.0 + _ARITHMETIC_ERROR),
        infinite=infinite * (1.0 + _ARITHMETIC_ERROR),
    )


def lower_measure(cells: Cells, grid: Grid, span: LowerRange) -> LatticeMeasure:
    """Return a measure on ``grid`` whose curve is nowhere above that of the law (Theorem 4).

    ``cells`` are those of ``grid.cells``.
    """
    masses = np.zeros(grid.size)
    min_p = cells.p * (1.0 - cells.relative_error)
    max_q = cells.q * (1.0 + cells.relative_error)
    first, last = span.first, span.last
    p = min_p[1:-1:2][first : last + 1] + min_p[2::2][first : last + 1]
    q = max_q[1:-1:2][first : last + 1] + max_q[2::2][first : last + 1]
    if span.open_left:
        p[0], q[0] = _open_cell(cells, slice(2 * (first + span.joined) + 3, None))
        p[1 : span.joined + 1] = q[1 : span.joined + 1] = 0.0
    if span.open_right:
        p[-1], q[-1] = _open_cell(cells, slice(None, 2 * last + 1))
    losses = grid.losses()[first : last + 1]
    alpha = np.exp(losses)
    p, q = _lower_thin_cells(p, q, alpha)
    signed = _draw_on_neighbours(p, p - alpha * q, grid.step)
    result = _remove_negative_masses(signed, losses)
    masses[first : first + result.size] = np.maximum(result, 0.0) * (1.0 - 2.0 * _ARITHMETIC_ERROR)
    return LatticeMeasure(grid=grid, masses=masses, infinite=0.0)


def _open_cell(cells: Cells, others: slice) -> tuple[float, float]:
    """Return at most the P-mass and at least the Q-mass of an open cell, all but ``others``.

    The complement is good to a rounding of one where the cell holds nearly everything.
    """
    p = 1.0 - float((cells.p[others] * (1.0 + cells.relative_error[others])).sum())
    q = 1.0 - float((cells.q[others] * (1.0 - cells.relative_error[others])).sum())
    slack = 2.0 * UNIT_ROUNDOFF * (1.0 + (1.0 - p) * math.log2(cells.p.size + 2))
    return max(0.0, p - slack), q + slack


def _lower_thin_cells(p: Array, q: Array, alpha: Array) -> tuple[Array, Array]:
    """Join cells that would draw on a thin tail above to a cell below.

    A cell below its node needs its gap of the curve of everything above it. A cell that takes more
    than half of that is lowered to the nearest node below that takes less, which costs its mass
    times a step, and is worth it only at a steep end.
    """
    above_p = np.append(np.cumsum(p[::-1])[::-1][1:], 0.0)
    above_q = np.append(np.cumsum(q[::-1])[::-1][1:], 0.0)
    thin = alpha * q - p > 0.5 * (above_p - alpha * above_q)
    thin[0] = False
    targets = np.maximum.accumulate(np.where(thin, 0, np.arange(p.size)))
    merged_p: Array = np.bincount(targets, p, p.size).astype(np.float64)
    merged_q: Array = np.bincount(targets, q, q.size).astype(np.float64)
    return merged_p, merged_q


def _draw_on_neighbours(p: Array, gap: Array, step: float) -> Array:
    """Return the masses of nodes whose cells draw on a neighbour; some may be negative."""
    from_below = np.maximum(gap, 0.0) / np.expm1(step)
    from_above = np.maximum(-gap, 0.0) / -np.expm1(-step)
    # Nothing lies below the first node, so it drops its gap instead. The last hangs above its
    # node, and is lowered to it: drawing on a thin tail would empty it.
    from_below[-1] = 0.0
    signed = p + from_above
    signed[1:] += from_below[1:] - from_above[:-1]
    signed[:-1] -= from_below[1:]
    signed[0] -= max(float(gap[0]), 0.0)
    size = p + from_above + from_below
    size[1:] += from_above[:-1]
    size[:-1] += from_below[1:]
    lowered: Array = signed - _ARITHMETIC_ERROR * size
    return lowered


def _remove_negative_masses(signed: Array, losses: Array) -> Array:
    """Return ``signed`` without its negative masses, its curve nowhere raised.

    A run of negative masses is divided between the nodes beside it, which puts a chord in place of
    concave kinks; at the lower end it moves up to the first node that outweighs it. At the upper
    end there is none, and the measure is cut. Most negative masses vanish within a few rounds over
    all nodes; the others are followed one by one.
    """
    nodes, masses = np.arange(signed.size), signed
    for _ in range(4):
        negative = masses < 0
        if not negative.any() or negative[-1]:
            break
        positive, removed = np.flatnonzero(~negative), np.flatnonzero(negative)
        after = np.searchsorted(positive, removed)
        before = np.maximum(after - 1, 0)
        first = after == 0
        at, neighbours = losses[nodes[removed]], losses[nodes[positive]]
        width = np.where(first, 1.0, np.expm1(neighbours[before] - neighbours[after]))
        shares = np.where(first, 1.0, np.expm1(neighbours[before] - at) / width)
        amounts = masses[removed] * (1.0 + _ARITHMETIC_ERROR)
        nodes, masses = nodes[positive], masses[positive]
        masses = masses + np.bincount(after, amounts * shares, masses.size)
        masses += np.bincount(before, amounts * (1.0 - shares), masses.size)
    masses = _bridge_negative_masses(masses, losses[nodes])
    result = np.zeros(signed.size)
    result[nodes[: masses.size]] = np.maximum(masses, 0.0)
    return result


def _bridge_negative_masses(signed: Array, losses: Array) -> Array:
    """Return ``signed`` with a chord laid over every negative mass.

    A chord from the node before it ends at the first node above that outweighs the passed masses.
    Where that node before becomes negative, the chord begins at the first node below that outweighs
    it, and so on at either end: a bridge of the curve's convex hull.
    """
    masses, before = signed.copy(), np.arange(-1, signed.size - 1)
    chords = 0
    for negative in np.flatnonzero(masses < 0).tolist():
        start = negative
        while masses[start] < 0:
            chords, left = chords + 1, int(before[start])
            end = _end_chord(masses, losses, start, left) if chords <= _MAX_CHORDS else None
            if end is None:
                return _truncated(masses, losses)
            if left >= 0 and masses[left] < 0:
                begin = _begin_chord(masses, losses, left, end)
                if begin is None:
                    return _truncated(masses, losses)
                left = begin
            start, before[end] = end, left
    return masses


def _end_chord(masses: Array, losses: Array, start: int, left: int) -> int | None:
    """Lay the chord from ``left`` over the negative mass at ``start``; return its end.

    With A_j = 1 - e^{l_left - l_j}, the passed masses stand at node k with Σ m_j A_j / A_k,
    so the first k at which that sum is not negative ends the chord. ``left`` takes the rest, and
    may become negative. Before the first node there is none, and all moves up to k.
    """

    def arms(size: int) -> Array:
        if left < 0:
            return np.ones(size)
        return np.asarray(-np.expm1(losses[left] - losses[start : start + size]))

    end, rest = _lay_chord(masses[start:], arms, -1.0)
    if end is None:
        return None
    if left >= 0:
        masses[left] += rest
    return start + end


def _begin_chord(masses: Array, losses: Array, start: int, right: int) -> int | None:
    """Extend the chord to ``right`` down over the negative mass at ``start``; return its begin.

    With A_j = e^{l_right - l_j} - 1, the first node k below with Σ m_j A_j >= 0 begins the chord,
    at mass Σ m_j A_j / A_k, and ``right`` takes the rest. Without such a node all moves up to
    ``right``, and the result is -1. The sum is rounded up, which ends the search early and leaves
    more at the lower node: both lower the curve.
    """
    first = int(np.searchsorted(losses, losses[start] - _MAX_CHORD_NATS))

    def arms(size: int) -> Array:
        away = losses[start + 1 - size : start + 1][::-1]
        return np.asarray(np.exp(away[0] - away) * -np.expm1(away - losses[right]))

    end, rest = _lay_chord(masses[first : start + 1][::-1], arms, 1.0)
    if end is None and first > 0:
        return None
    masses[right] += rest
    if end is None:
        masses[: start + 1] = 0.0
        return -1
    return start - end


def _lay_chord(
    masses: Array, arms: Callable[[int], Array], rounding: float
) -> tuple[int | None, float]:
    """Lay a chord from the first of ``masses``, which is negative, to the first that outweighs it.

    Return that node, which keeps the weighted sum over its arm, and the rest of the passed mass;
    None and all of the mass if there is no such node. ``arms`` returns the weights A_j of as many
    nodes, and ``rounding`` is 1 or -1 to round the sum up or down.
    """
    size = 64
    while True:
        part = masses[:size]
        weights = arms(part.size)
        slack = 4.0 * UNIT_ROUNDOFF * (part.size + 8)
        sums = np.cumsum(part * weights)
        sums += rounding * slack * np.cumsum(np.abs(part) * weights)
        enough = np.flatnonzero(sums >= 0)
        if enough.size or size >= masses.size:
            break
        size *= 8
    end = int(enough[0]) if enough.size else None
    remainder = 0.0 if end is None else float(sums[end] / weights[end])
    passed = part if end is None else part[: end + 1]
    rest = float(passed.sum()) - remainder - slack * float(np.abs(passed).sum())
    if end is not None:
        masses[:end] = 0.0
        masses[end] = remainder
    return end, rest


def _truncated(masses: Array, losses: Array) -> Array:
    """Return the measure up to a node where its curve is not negative, less the curve there.

    The masses above absorb negative ones left before that node: the tails become their running
    minimum, and the node is the last one whose tail is then at least that value.
    """
    weights = np.exp(losses[0] - losses)
    tails = np.cumsum(masses[::-1])[::-1]
    weighted = np.cumsum((masses * weights)[::-1])[::-1]
    slack = 8.0 * UNIT_ROUNDOFF * masses.size * np.cumsum(np.abs(masses)[::-1])[::-1]
    values = np.append(tails[1:] - weighted[1:] / weights[:-1], 0.0)
    slack = np.append(slack[1:], 0.0) + slack * (masses.min() < 0)
    minima = np.minimum.accumulate(tails - slack)
    sound = np.flatnonzero((values >= slack) & (minima >= values + slack))
    if sound.size == 0:
        return np.zeros(1)
    last = int(sound[-1])
    measure: Array = -np.diff(minima[: last + 1], append=values[last] + slack[last])
    return measure
