"""One release's loss law on a uniform grid, bounded from above and from below.

A finite measure p on losses has the hockey-stick curve h_p(α) = Σ p_i (1 - α e^{-l_i})_+.
If h_p <= h_r for every α > 0 then h_{p*s} <= h_{r*s} for every measure s on losses, since
h_{p*s}(α) = ∫ h_p(α e^{-l}) ds(l). So bounds of one release's curve, measure by measure,
compose (docs/theorems/fourier-lattice.md). Both bounds are made of the masses (P, Q) of
half cells, the losses between a node l_i = l_0 + i h and the middle to the next:

* upper: the losses between two nodes go to these nodes, with P and Q kept, which are the
  chords of the curve; losses below l_0 go up to l_0, and those above the last node are
  ``infinite``, to be counted in δ as they are.
* lower: the losses within half a step of node i, of masses P and Q and with the gap
  g = P - e^{l_i} Q, are pulled together at the node: at g > 0 with g / (e^h - 1) of the
  mass of the node below, at g < 0 with -g / (1 - e^{-h}) of that of the node above. A node
  that owes more than it has is left out, its debt divided between its neighbours with P
  and Q kept (a chord in place of a concave kink). Losses beyond the outer cells are
  dropped, or join the outer cell where it is open.

Errors bounded here: discretisation, truncation at both ends, the elementary functions
(fewer P and more Q, or the reverse, by the relative error of each cell), the place of the
cells' ends (``misplaced``: every node's mass is spread up by as much), and the arithmetic.
All are relative to a cell's own masses, so that a million releases of a tiny loss each
cost no more digits than that. The nodes themselves are exact: l_0 + i h of two doubles.

References: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots",
PoPETs 2022, for the chords; docs/theorems/fourier-lattice.md for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, LossLaw

_MAX_CHORDS = 4000
"""Chords over debts that are followed one by one; with more the measure is cut instead."""
_WIDEST = 700.0
"""How far below a debt it may be paid, in nats, so that no exponential overflows."""
_ARITHMETIC = 32.0 * UNIT_ROUNDOFF
"""More than the roundings of the few operations that turn the masses of a cell into two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The losses ``origin + i * step`` for 0 <= i < ``size``, in nats."""

    origin: float
    step: float
    size: int

    def losses(self) -> Array:
        """The nodes. In nats, shape (size,)."""
        return self.origin + self.step * np.arange(self.size, dtype=np.float64)

    def edges(self) -> Array:
        """The nodes and what lies half a step beside them, 2 · ``size`` + 1 losses.

        In nats, shape (2 · size + 1,).
        """
        index = np.arange(2 * self.size + 1, dtype=np.float64)
        return self.origin + self.step * (0.5 * (index - 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class LatticeMeasure:
    """P-masses on a grid whose hockey-stick curve bounds that of one release.

    ``masses`` have shape (size,). ``infinite`` is the mass at infinite loss (upper bounds
    only) and ``loss_error`` an amount (nats) by which every node must be raised (upper) or
    lowered (lower) for the bound to hold, for measures whose nodes are themselves rounded.
    ``name`` says all that it follows from, where its transforms may be kept by that.
    """

    grid: Grid
    masses: Array
    infinite: float
    loss_error: float = 0.0
    name: Hashable = None

    def up_to(self, cut: float) -> LatticeMeasure:
        """The part with losses up to ``cut`` (nats), without the infinite ones."""
        size = int(np.searchsorted(self.grid.losses(), cut, side="right"))
        grid = Grid(origin=self.grid.origin, step=self.grid.step, size=max(1, size))
        masses = self.masses[: grid.size] if size else np.zeros(1)
        return LatticeMeasure(grid=grid, masses=masses, infinite=0.0, loss_error=self.loss_error)


@dataclass(frozen=True, kw_only=True, slots=True)
class BinMasses:
    """Masses of one law between a grid's ``edges``, from which both measures are made.

    All four have shape (2 · size + 2,): below the first edge, the half cells, above the
    last. ``relative`` bounds the relative errors of ``p`` and ``q``, that of e^loss times q
    included, and ``misplaced`` (nats) how far off the ends of a cell can be.
    """

    grid: Grid
    p: Array
    q: Array
    relative: Array
    misplaced: Array

    @classmethod
    def of(cls, law: LossLaw, grid: Grid) -> BinMasses:
        """The half cells of ``law`` on ``grid``."""
        edges = grid.edges()
        cells = law.cells(edges)
        # An edge is off by a rounding of what it is summed from, not of itself.
        span = np.abs(np.concatenate((edges[:1], edges))) + abs(grid.origin)
        return cls(
            grid=grid,
            p=cells.p,
            q=cells.q,
            relative=cells.relative + _ARITHMETIC + 4.0 * UNIT_ROUNDOFF * span,
            misplaced=cells.misplaced + 2.0 * UNIT_ROUNDOFF * span,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerRange:
    """The nodes, by index, that a lower measure uses, and where its outer cells are open.

    An open first cell takes in so many cells above its own (``joined``) as well.
    """

    first: int
    last: int
    open_left: bool
    open_right: bool
    joined: int = 0


def upper_measure(cells: BinMasses) -> LatticeMeasure:
    """A measure on the grid whose curve is nowhere below that of the law (Theorem 3)."""
    grid = cells.grid
    alpha, share = np.exp(grid.losses()), -1.0 / np.expm1(-grid.step)
    # A loss outside its cell by what is misplaced is first taken as that much lower, then
    # raised to the cell's lower end if it is below that; see the end for the first half.
    most_p = cells.p * (1.0 + cells.relative)
    least_q = cells.q * (1.0 - cells.relative - cells.misplaced)
    p = most_p[2:-2:2] + most_p[3:-1:2]
    q = least_q[2:-2:2] + least_q[3:-1:2]
    high = np.minimum(share * (p - alpha[:-1] * q), p)
    masses = np.zeros(grid.size)
    masses[0] = most_p[0] + most_p[1]
    masses[:-1] += p - high
    masses[1:] += high
    infinite = float(most_p[-2] + most_p[-1])
    # A half cell's own error is the larger of the two that meet at a node, on either side.
    spread = np.maximum(cells.misplaced[1:-1:2], cells.misplaced[2::2])
    spread[1:] = np.maximum(spread[1:], spread[:-1])
    moved = np.where(spread < grid.step, share * spread, 1.0) * masses
    lost = float(moved[spread >= grid.step].sum())
    masses -= moved
    moved[spread >= grid.step] = 0.0
    masses[1:] += moved[:-1]
    infinite += lost + float(moved[-1])
    return LatticeMeasure(
        grid=grid,
        masses=np.maximum(masses, 0.0) * (1.0 + _ARITHMETIC),
        infinite=infinite * (1.0 + _ARITHMETIC),
    )


def lower_measure(cells: BinMasses, span: LowerRange) -> LatticeMeasure:
    """A measure on the grid whose curve is nowhere above that of the law (Theorem 4)."""
    grid = cells.grid
    masses = np.zeros(grid.size)
    least_p = cells.p * (1.0 - cells.relative)
    most_q = cells.q * (1.0 + cells.relative)
    first, last = span.first, span.last
    p = least_p[1:-1:2][first : last + 1] + least_p[2::2][first : last + 1]
    q = most_q[1:-1:2][first : last + 1] + most_q[2::2][first : last + 1]
    if span.open_left:
        p[0], q[0] = _rest(cells, slice(2 * (first + span.joined) + 3, None))
        p[1 : span.joined + 1] = q[1 : span.joined + 1] = 0.0
    if span.open_right:
        p[-1], q[-1] = _rest(cells, slice(None, 2 * last + 1))
    losses = grid.losses()[first : last + 1]
    alpha = np.exp(losses)
    p, q = _lower_negative_mass(p, q, alpha)
    signed = _merge_steep_cells(p, p - alpha * q, grid.step)
    result = _clip_negative_mass(signed, losses)
    masses[first : first + result.size] = np.maximum(result, 0.0) * (1.0 - 2.0 * _ARITHMETIC)
    return LatticeMeasure(grid=grid, masses=masses, infinite=0.0)


def _rest(cells: BinMasses, others: slice) -> tuple[float, float]:
    """At most the P-mass and at least the Q-mass of an open cell, all but ``others``.

    The complement is good to a rounding of one where the cell holds nearly everything.
    """
    p = 1.0 - float((cells.p[others] * (1.0 + cells.relative[others])).sum())
    q = 1.0 - float((cells.q[others] * (1.0 - cells.relative[others])).sum())
    slack = 2.0 * UNIT_ROUNDOFF * (1.0 + (1.0 - p) * math.log2(cells.p.size + 2))
    return max(0.0, p - slack), q + slack


def _lower_negative_mass(p: Array, q: Array, alpha: Array) -> tuple[Array, Array]:
    """Cells that would draw from above what is hardly there join a cell below instead.

    A cell below its node needs its gap of the curve of everything above it. One that takes
    more than half of that is lowered to the nearest node below that needs none, which costs
    its mass times a step, and is worth it only at a steep end.
    """
    above_p = np.append(np.cumsum(p[::-1])[::-1][1:], 0.0)
    above_q = np.append(np.cumsum(q[::-1])[::-1][1:], 0.0)
    negative = alpha * q - p > 0.5 * (above_p - alpha * above_q)
    negative[0] = False
    targets = np.maximum.accumulate(np.where(negative, 0, np.arange(p.size)))
    merged_p: Array = np.bincount(targets, p, p.size).astype(np.float64)
    merged_q: Array = np.bincount(targets, q, q.size).astype(np.float64)
    return merged_p, merged_q


def _merge_steep_cells(p: Array, gap: Array, step: float) -> Array:
    """Masses of the nodes when every cell has drawn on a neighbour; some may be negative."""
    from_below = np.maximum(gap, 0.0) / np.expm1(step)
    from_above = np.maximum(-gap, 0.0) / -np.expm1(-step)
    # Below the first node there is nothing to draw on, so it drops its gap instead. The last
    # hangs above its node, and is lowered to it: drawing on a thin tail would empty it.
    from_below[-1] = 0.0
    signed = p + from_above
    signed[1:] += from_below[1:] - from_above[:-1]
    signed[:-1] -= from_below[1:]
    signed[0] -= max(float(gap[0]), 0.0)
    size = p + from_above + from_below
    size[1:] += from_above[:-1]
    size[:-1] += from_below[1:]
    lowered: Array = signed - _ARITHMETIC * size
    return lowered


def _clip_negative_mass(signed: Array, losses: Array) -> Array:
    """``signed`` without its negative masses, its curve nowhere raised.

    A run of negative masses leaves, divided between the nodes beside it, which puts a chord
    in place of concave kinks; at the lower end it moves up to the first node that can pay.
    At the upper end there is none, and the measure is cut. Most negative masses are paid
    beside them within a few rounds over all nodes; one that needs many payers is followed by
    itself.
    """
    nodes, masses = np.arange(signed.size), signed
    for _ in range(4):
        owing = masses < 0
        if not owing.any() or owing[-1]:
            break
        stored, negative_masses = np.flatnonzero(~owing), np.flatnonzero(owing)
        after = np.searchsorted(stored, negative_masses)
        before = np.maximum(after - 1, 0)
        first = after == 0
        at, beside = losses[nodes[negative_masses]], losses[nodes[stored]]
        width = np.where(first, 1.0, np.expm1(beside[before] - beside[after]))
        shares = np.where(first, 1.0, np.expm1(beside[before] - at) / width)
        amounts = masses[negative_masses] * (1.0 + _ARITHMETIC)
        nodes, masses = nodes[stored], masses[stored]
        masses = masses + np.bincount(after, amounts * shares, masses.size)
        masses += np.bincount(before, amounts * (1.0 - shares), masses.size)
    masses = _followed(masses, losses[nodes])
    result = np.zeros(signed.size)
    result[nodes[: masses.size]] = np.maximum(masses, 0.0)
    return result


def _followed(signed: Array, losses: Array) -> Array:
    """Every remaining debt followed until the nodes on both sides have paid it.

    A chord from the node before it ends at the first node above that it does not pass over.
    Where that node before comes to owe itself, the chord is begun at the first node below
    that it does not pass over, and so on at either end: a bridge of the curve's convex hull.
    """
    masses, before = signed.copy(), np.arange(-1, signed.size - 1)
    chords = 0
    for debt in np.flatnonzero(masses < 0).tolist():
        start = debt
        while masses[start] < 0:
            chords, left = chords + 1, int(before[start])
            end = _paid_above(masses, losses, start, left) if chords <= _MAX_CHORDS else None
            if end is None:
                return _cut(masses, losses)
            if left >= 0 and masses[left] < 0:
                begun = _paid_below(masses, losses, left, end)
                if begun is None:
                    return _cut(masses, losses)
                left = begun
            start, before[end] = end, left
    return masses


def _paid_above(masses: Array, losses: Array, start: int, left: int) -> int | None:
    """The node that ends the chord from ``left`` over the debt at ``start``, which is laid.

    With A_j = 1 - e^{l_left - l_j}, what has been passed stands at node k with Σ m_j A_j / A_k,
    so the first k at which that sum is not negative ends the chord; ``left`` pays the rest,
    and may come to owe. Before the first node there is none, and all moves up to k.
    """

    def arms(size: int) -> Array:
        if left < 0:
            return np.ones(size)
        return np.asarray(-np.expm1(losses[left] - losses[start : start + size]))

    end, rest = _laid(masses[start:], arms, -1.0)
    if end is None:
        return None
    if left >= 0:
        masses[left] += rest
    return start + end


def _paid_below(masses: Array, losses: Array, start: int, right: int) -> int | None:
    """The node that begins the chord to ``right`` over the debt at ``start``; -1 if none does.

    With A_j = e^{l_right - l_j} - 1, the first node k below with Σ m_j A_j >= 0 begins the
    chord, at mass Σ m_j A_j / A_k; ``right`` pays the rest. Where there is none, all moves up
    to ``right``. What was paid is rounded up, which ends the search early and leaves more at
    the lower node: both lower the curve.
    """
    first = int(np.searchsorted(losses, losses[start] - _WIDEST))

    def arms(size: int) -> Array:
        away = losses[start + 1 - size : start + 1][::-1]
        return np.asarray(np.exp(away[0] - away) * -np.expm1(away - losses[right]))

    end, rest = _laid(masses[first : start + 1][::-1], arms, 1.0)
    if end is None and first > 0:
        return None
    masses[right] += rest
    if end is None:
        masses[: start + 1] = 0.0
        return -1
    return start - end


def _laid(masses: Array, arms: Callable[[int], Array], rounding: float) -> tuple[int | None, float]:
    """Lay a chord from the first of ``masses``, which owes, to the first node that has paid.

    That node, which is left with what was paid over its arm, and the rest of what was passed;
    None, and all of it, where no node has. ``arms`` are the weights A_j of so many nodes, and
    ``rounding`` is 1 or -1 where roundings raise or lower what was paid.
    """
    size = 64
    while True:
        part = masses[:size]
        weights = arms(part.size)
        slack = 4.0 * UNIT_ROUNDOFF * (part.size + 8)
        paid = np.cumsum(part * weights)
        paid += rounding * slack * np.cumsum(np.abs(part) * weights)
        settled = np.flatnonzero(paid >= 0)
        if settled.size or size >= masses.size:
            break
        size *= 8
    end = int(settled[0]) if settled.size else None
    remainder = 0.0 if end is None else float(paid[end] / weights[end])
    passed = part if end is None else part[: end + 1]
    rest = float(passed.sum()) - remainder - slack * float(np.abs(passed).sum())
    if end is not None:
        masses[:end] = 0.0
        masses[end] = remainder
    return end, rest


def _cut(masses: Array, losses: Array) -> Array:
    """The measure up to a node where its curve is not negative, less the curve's value there.

    Debts left before that node are paid by the masses above them: the tails become their
    running minimum, and the node is the last one whose tail is then at least that value.
    """
    weights = np.exp(losses[0] - losses)
    tails = np.cumsum(masses[::-1])[::-1]
    weighted = np.cumsum((masses * weights)[::-1])[::-1]
    slack = 8.0 * UNIT_ROUNDOFF * masses.size * np.cumsum(np.abs(masses)[::-1])[::-1]
    values = np.append(tails[1:] - weighted[1:] / weights[:-1], 0.0)
    slack = np.append(slack[1:], 0.0) + slack * (masses.min() < 0)
    paid = np.minimum.accumulate(tails - slack)
    sound = np.flatnonzero((values >= slack) & (paid >= values + slack))
    if sound.size == 0:
        return np.zeros(1)
    last = int(sound[-1])
    measure: Array = -np.diff(paid[: last + 1], append=values[last] + slack[last])
    return measure
