"""Where the nodes of each release lie: what makes a lower bound narrow, never what makes it true.

Any nodes give sound measures (``discretized_pld.py``). A law that is wide against the step is
met by both to second order wherever the nodes are; one that rises or falls within a step is
not, and at small sampling probabilities, or beside phases of a larger scale, nearly all laws
do. So one node is anchored a hair below the barycentre of the cell that matters most, and the
cells above it which could not pay for themselves join it.
"""

from __future__ import annotations

import math

import numpy as np

from affidavit.accountants.fourier.discretized_pld import Grid, LowerRange
from affidavit.accountants.fourier.privacy_loss import Atoms, LossLaw
from affidavit.accountants.fourier.tail_bounds import tilted_floor

_MAX_JOINED = 16
"""Most cells that may join the first; beyond them next to nothing is left."""


def grids_of(
    atoms: Atoms,
    law: LossLaw,
    top: float,
    order: float,
    tolerance: float,
    step: float,
    joining: bool,
) -> tuple[Grid, LowerRange]:
    """Grids for the upper and the lower measure of one release, on common nodes.

    ``law`` is the attained one and ``atoms`` those of the dominating one, cut above ``top``;
    ``top`` and ``step`` are in nats, ``order`` is the tilt (1/nat) and ``tolerance`` the width
    wanted of log δ, a release. Cells may be joined to the first only where ``joining``.

    One node is anchored where most depends on it, a hair below the barycentre of its
    cell: in a first cell that takes in a steep lower end of the law, else in a last cell
    that takes in a steep upper end, else in the cell that holds the bulk.
    """
    floor, center = tilted_floor(atoms, order, 0.005 * tolerance), atoms.median(order)
    hair, most = 1e-3 * tolerance / (1.0 + order) + 1e-16, _MAX_JOINED if joining else 0
    first = _end_cell(law, floor, center + step, step, lower=True)
    last = None if first is not None else _end_cell(law, center - step, top, step, lower=False)
    anchor = first if first is not None else last
    joined = 0
    if anchor is None:
        anchor = _bulk_cell(law, center, step)
    elif first is not None:
        anchor, joined = _merge_negative_mass(law, first, step, hair, most)
    anchor = _settled(law, anchor - hair, step, first is not None, last is not None, joined)
    below = max(1, math.ceil((anchor - floor) / step) + 1)
    above = max(1, math.ceil((top - anchor) / step) + 1, joined + 1)
    upper = Grid(origin=anchor - below * step, step=step, size=below + above + 1)
    lower = LowerRange(
        first=below if first is not None else 0,
        last=below if first is None and last is not None else upper.size - 1,
        open_left=first is not None,
        open_right=last is not None,
        joined=joined,
    )
    return upper, lower


def _merge_negative_mass(
    law: LossLaw, anchor: float, step: float, hair: float, most: int
) -> tuple[float, int]:
    """The barycentre of a first cell that takes in the cells above that could not pay.

    Where a law falls steeply within a step above its lower end, a cell there needs more of
    the curve above it than there is and would be lowered by a step; together with the first
    they cost the lower bound their variance only. With it, how many these are.
    """
    for joined in range(most):
        edges = anchor + step * (joined + np.array([0.5, 1.5]))
        tail = law.survival(edges)
        p, q = float(tail.p[0] - tail.p[1]), float(tail.q[0] - tail.q[1])
        alpha = math.exp(anchor + step * (joined + 1))
        owed = alpha * q - p
        if p * step <= hair or owed <= 0.5 * float(tail.p[1] - alpha * tail.q[1]):
            return anchor, joined
        anchor = _barycentre_below(law, anchor, step * (joined + 1.5))
    return anchor, most


def _barycentre_below(law: LossLaw, anchor: float, reach: float) -> float:
    """The barycentre of all losses below an edge ``reach`` above it, found from ``anchor``."""
    for _ in range(20):
        tail = law.survival(np.array([anchor + reach]))
        moved = float(np.log((1.0 - tail.p[0]) / (1.0 - tail.q[0])))
        result, anchor = abs(moved - anchor) <= 1e-3 * reach, moved
        if result:
            break
    return anchor


def _end_cell(law: LossLaw, low: float, high: float, step: float, *, lower: bool) -> float | None:
    """The barycentre of a cell that takes in a steep end of the law, if there is one.

    All losses beyond an edge half a step from their barycentre. A law that rises from
    nothing within a step, as at small sampling probabilities, would otherwise cost the
    lower bound the outer cells' mass times the distance to their nodes. None where such a
    cell would hold little mass, that is, where the law tails off gently.
    """
    sign = 1.0 if lower else -1.0
    barycentre = None
    for _ in range(3):
        edges = np.linspace(low, high, 64)
        tail = law.survival(edges)
        p, q = (1.0 - tail.p, 1.0 - tail.q) if lower else (tail.p, tail.q)
        holds = p >= 1e-4
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = sign * (edges - np.log(p / q))
        # From the outside in, the first edge that holds mass and reaches past half a step.
        far = np.flatnonzero(holds & (reach >= step / 2))
        if far.size == 0:
            return barycentre
        index = int(far[0] if lower else far[-1])
        inner, outer = index, index - 1 if lower else index + 1
        if not 0 <= outer < edges.size:
            return barycentre
        if holds[outer]:
            barycentre = float(np.log(p[index] / q[index]))
        low, high = sorted((float(edges[inner]), float(edges[outer])))
    return barycentre


def _bulk_cell(law: LossLaw, center: float, step: float) -> float:
    """The barycentre of the cell that holds the bulk, found by letting the cell follow it."""
    for _ in range(3):
        tail = law.survival(np.array([center - step / 2, center + step / 2]))
        p, q = float(tail.p[0] - tail.p[1]), float(tail.q[0] - tail.q[1])
        if not (p > 0 and q > 0):
            break
        center = math.log(p / q)
    return center


def _settled(
    law: LossLaw, anchor: float, step: float, first: bool, last: bool, joined: int
) -> float:
    """``anchor`` moved down until it is at or below the barycentre of its own cell.

    Above it, even by a rounding, it would cost the lower bound the cell's mass times the
    distance, which can be all there is beyond the cell.
    """
    for _ in range(20):
        tail = law.survival(np.array([anchor - step / 2, anchor + step * (joined + 0.5)]))
        lower_p, lower_q = (1.0, 1.0) if first else (float(tail.p[0]), float(tail.q[0]))
        upper_p, upper_q = (0.0, 0.0) if last else (float(tail.p[1]), float(tail.q[1]))
        p, q = lower_p - upper_p, lower_q - upper_q
        if not (p > 0 and q > 0) or not (first or last or p > 0.5):
            # A cell that holds little is one of many alike, and the loss is second order.
            break
        excess = anchor - math.log(p / q)
        if excess < -1e-15:
            break
        anchor -= 1.5 * excess + 1e-15 + 1e-15 * abs(anchor)
    return anchor
