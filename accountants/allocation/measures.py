"""One term's law on a uniform grid, bounded in convex order from above and from below.

The payoff (Σ V - Θ)_+ is convex and increasing in every V, so replacing the law of V by a
measure with a call function that is nowhere lower (higher) raises (lowers) its mean, one
term after the other (docs/theorems/random-allocation.md). With C the call function and
T the tail of V, nodes a_0 < ... < a_K and edges e_i half-way between them:

* upper: the chords of C over the nodes. Right of a_K the function is 0, so a_K must be at
  least the top; left of a_0 its slope is the whole mass, which raises smaller V to a_0, or
  nothing is claimed there.
* lower: the values v_i = min(t_i(a_i), t_{i+1}(a_i)) of the tangents t_i of C at e_i, whose
  chords lie below them. The outer tangents are 0 on the right, so that the last node must
  lie at or below the barycentre of its cell, and on the left either the line of all mass
  and mean or the tangent at e_0, which drops what lies below it.

A measure's call function is the integral of its tails from the right. Raising (lowering)
the tails raises (lowers) it, which is how rounding enters and how the tails are made
monotone. Both constructions are second order in the step, with the mean kept.

References: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots", PoPETs
2022, for the chords; docs/theorems/fourier-lattice.md for the same on losses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.allocation.terms import UNIT_ROUNDOFF, Array, Term

_ROUNDS = 60


def upper_masses(term: Term, nodes: Array, *, raise_below: bool = True) -> Array:
    """Masses on ``nodes`` whose call function is nowhere below that of ``term``.

    The last node must not lie below ``term.top``. Without ``raise_below`` smaller V are left
    out, and the call function is bounded from the first node on only: enough where V <= 0
    and no Θ lies below that node.

    ``nodes`` increase, shape (n,); so are the masses.
    """
    calls = term.calls(nodes)
    values = calls.value + calls.error
    steps = np.diff(nodes)
    slopes = (values[:-1] - values[1:] + 4 * UNIT_ROUNDOFF * values[:-1]) / steps
    slopes = slopes * (1 + 4 * UNIT_ROUNDOFF)
    tails = np.concatenate(([term.mass if raise_below else slopes[0]], slopes))
    tails = np.maximum.accumulate(tails[::-1])[::-1]
    return np.maximum(-np.diff(tails, append=0.0), 0.0)


def lower_masses(term: Term, nodes: Array, *, open_left: bool) -> Array:
    """Masses on ``nodes`` whose call function is nowhere above that of ``term``.

    ``open_left`` lets the first cell reach down to X = 0 (on the side ``remove``).

    ``nodes`` increase, shape (n,), as have the masses.
    """
    half = (nodes[1] - nodes[0]) / 2
    edges = np.concatenate(([nodes[0] - half], (nodes[:-1] + nodes[1:]) / 2))
    calls = term.calls(edges)
    left = calls.value - (nodes - edges) * calls.tail
    mass = float(calls.tail[0])
    if open_left:
        bottom = term.calls(np.zeros(1))
        mass = float(bottom.tail[0])
        left[0] = float(bottom.value[0]) - nodes[0] * mass
    right = calls.value[1:] - (nodes[:-1] - edges[1:]) * calls.tail[1:]
    error = calls.error + 8 * UNIT_ROUNDOFF * (np.abs(left) + calls.value)
    slack = 2 * np.maximum(error, np.append(error[1:], 0.0))
    # Values that do not fall are lowered until they do; where they end, so does the measure.
    values = np.minimum.accumulate(np.minimum(left[:-1], right) - slack[:-1])
    end = int(np.count_nonzero(values > 0))
    sound = np.flatnonzero(left[: end + 1] > slack[: end + 1])
    masses = np.zeros(nodes.size)
    if end == 0 or sound.size == 0:
        return masses
    last = int(sound[-1])
    values = np.append(values[:last], 0.0)
    kept = _convex_nodes(nodes[: last + 1], values)
    slopes = -np.diff(values[kept]) / np.diff(nodes[kept]) * (1 - 4 * UNIT_ROUNDOFF)
    tails = np.concatenate(([mass * (1 - 1e-13)], slopes))
    tails = np.minimum.accumulate(tails)
    masses[kept] = -np.diff(tails, append=0.0)
    return masses


def _convex_nodes(nodes: Array, values: Array) -> NDArray[np.intp]:
    """The nodes left when chords replace concave kinks, round by round."""
    kept = np.arange(nodes.size)
    for _ in range(_ROUNDS):
        slopes = np.diff(values[kept]) / np.diff(nodes[kept])
        concave = np.flatnonzero(slopes[1:] < slopes[:-1]) + 1
        if concave.size == 0:
            break
        kept = np.delete(kept, concave)
    return kept
