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

What a lattice does not hold: terms above a cut, and terms too small to matter.

``remove``: X is heavy-tailed, and a lattice up to its largest values would be endless. On
the event J that some X_i exceeds the cut R the payoff is linear but for a shortfall,

    E[(S - α)_+; J] = E[S; J] - α Pr(J) + E[(α - S)_+; J],

where the first two are closed: with Q = Pr(X > R), P = E[X; X > R] the chance of the same
under the record's own normal law, Pr(J) = 1 - (1-Q)^b and E[S; J] = 1 - (1-P)(1-Q)^{b-1}.
The shortfall is at least 0 and, by a union bound over which term exceeds R, at most
Q E (bα - R - W)_+ with W a sum of b - 1 terms, which Chernoff's bound holds:
y_+ <= e^{τy}/(eτ). So R need only reach from the least that the others come to up to bα.

``add``: a term below exp(-10/σ - 1/(2σ²)) is left out; as the payoff (1 - αS)_+ is at most 1,
it costs at most the chance of one.

Reference: ``docs/theorems/random-allocation.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from affidavit.accountants.cyclic_convolution import UNIT_ROUNDOFF, Array
from affidavit.accountants.random_allocation.power import Calls, Term

_ROUNDS = 60


class Bounded(Protocol):
    """One V, restricted to V <= ``top``, of which ``mass`` is the chance, rounded up."""

    @property
    def top(self) -> float:
        """The largest V that counts."""
        ...

    @property
    def mass(self) -> float:
        """Pr(V <= top)."""
        ...

    def calls(self, points: Array) -> Calls:
        """The tail and the call function at ``points``, of shape (n,)."""
        ...


def upper_masses(term: Bounded, nodes: Array, *, raise_below: bool = True) -> Array:
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
    stored = _convex_nodes(nodes[: last + 1], values)
    slopes = -np.diff(values[stored]) / np.diff(nodes[stored]) * (1 - 4 * UNIT_ROUNDOFF)
    tails = np.concatenate(([mass * (1 - 1e-13)], slopes))
    tails = np.minimum.accumulate(tails)
    masses[stored] = -np.diff(tails, append=0.0)
    return masses


def _convex_nodes(nodes: Array, values: Array) -> NDArray[np.intp]:
    """The nodes left when chords replace concave kinks, round by round."""
    stored = np.arange(nodes.size)
    for _ in range(_ROUNDS):
        slopes = np.diff(values[stored]) / np.diff(nodes[stored])
        concave = np.flatnonzero(slopes[1:] < slopes[:-1]) + 1
        if concave.size == 0:
            break
        stored = np.delete(stored, concave)
    return stored


_Z = np.linspace(-10.0, 10.0, 1001)
_TILTS = np.logspace(-7.0, 3.0, 81)
_MIN_Z = -10.0


class Beyond(Protocol):
    """The part of δ that the lattice leaves out, at α = e^ε."""

    def upper(self, ratios: Array) -> Array:
        """Upper bounds of it at each α of ``ratios``, shape (n,) as they."""
        ...

    def lower(self, ratios: Array) -> Array:
        """Lower bounds of it at each α of ``ratios``, shape (n,) as they."""
        ...


@dataclass(frozen=True, kw_only=True)
class SmallTerms:
    """The side ``add``, with terms below ``least`` left out."""

    bins: int
    rate: float

    @property
    def least(self) -> float:
        """The least X on the lattice."""
        return math.exp(self.rate * _MIN_Z - self.rate**2 / 2)

    def upper(self, ratios: Array) -> Array:
        """Pr(some term is left out), at most, whatever α is."""
        return np.full(ratios.size, self.bins * float(ndtr(_MIN_Z)) * (1 + 1e-9))

    def lower(self, ratios: Array) -> Array:
        """0: nothing is claimed."""
        return np.zeros(ratios.size)


def log_laplace(tilts: Array, rate: float) -> Array:
    """log E exp(-τX) at each τ, from above: chords over cells of exact mass and mean.

    ``tilts`` τ has shape (m,), as has what is returned.
    """
    x = np.exp(rate * _Z - rate**2 / 2)
    mass, mean = np.diff(ndtr(_Z)), np.diff(ndtr(_Z - rate))
    above = mean - x[:-1] * mass
    heights = np.exp(-np.outer(tilts, x))
    slopes = np.diff(heights, axis=1) / np.diff(x)
    outside = float(ndtr(_Z[0])) + float(ndtr(-_Z[-1])) * heights[:, -1]
    return np.asarray(np.log(heights[:, :-1] @ mass + slopes @ above + outside + 1e-13))


@dataclass(frozen=True, kw_only=True)
class LeastOfOthers:
    """Bounds of E (y - W)_+ for a sum W of ``bins`` - 1 terms."""

    bins: int
    rate: float

    @cached_property
    def _log_transforms(self) -> Array:
        return log_laplace(_TILTS, self.rate)

    def shortfall(self, reach: Array) -> Array:
        """An upper bound of E (``reach`` - W)_+; 0 where ``reach`` is not positive.

        ``reach`` and the bound have shape (n,).
        """
        with np.errstate(over="ignore"):
            bounds = np.exp(
                np.outer(reach, _TILTS)
                + (self.bins - 1) * self._log_transforms
                - np.log(math.e * _TILTS)
            ).min(axis=1)
        return np.where(reach > 0, np.minimum(bounds * (1 + 1e-9), reach), 0.0)


@dataclass(frozen=True, kw_only=True)
class LargeTerms:
    """The side ``remove``, with terms above ``cut`` left out of the lattice."""

    others: LeastOfOthers
    cut: float

    @cached_property
    def _chances(self) -> tuple[float, float, float, float]:
        """E[S; J], Pr(J), Q, and a relative bound of the error of each."""
        rate, bins = self.others.rate, self.others.bins
        z = math.log(self.cut) / rate + rate / 2
        q, p = float(ndtr(-z)), float(ndtr(rate - z))
        none = (bins - 1) * math.log1p(-q)
        mean = -math.expm1(none + math.log1p(-p)) if p < 1 else 1.0
        error = 2.0**-53 * (128 + 8 * (abs(z) + rate + 1) * (abs(z) + 2 * rate + 1))
        return mean, -math.expm1(none + math.log1p(-q)), q, error

    def _linear(self, ratios: Array) -> tuple[Array, Array]:
        mean, chance, _, error = self._chances
        return mean - ratios * chance, error * (mean + ratios * chance)

    def upper(self, ratios: Array) -> Array:
        """Upper bounds of E[(S - α)_+; J]."""
        linear, error = self._linear(ratios)
        mean, _, q, relative = self._chances
        reach = self.others.bins * ratios * (1 + 1e-15) - self.cut
        short = q * self.others.shortfall(reach) * (1 + relative)
        # numpy's keep a NaN, which bounds nothing.
        return np.maximum(0.0, np.minimum(mean * (1 + relative), linear + error + short))

    def lower(self, ratios: Array) -> Array:
        """Lower bounds of E[(S - α)_+; J]."""
        linear, error = self._linear(ratios)
        return np.maximum(0.0, linear - error)


def choose_cut(others: LeastOfOthers, ratio: float, allowed: float) -> float:
    """About the least R at which ``LargeTerms.upper`` gives away at most about ``allowed``."""
    rate, whole = others.rate, others.bins * ratio
    highest = math.exp(min(700.0, rate * 10.5 - rate**2 / 2 + rate**2))
    cuts = np.geomspace(1e-2, max(min(highest, whole), 1.0), 400)
    z = np.log(cuts) / rate + rate / 2
    crude = ndtr(rate - z) + others.bins * ndtr(-z)
    given_away = np.minimum(crude, ndtr(-z) * others.shortfall(whole - cuts))
    good = np.flatnonzero(given_away <= allowed)
    return float(cuts[good[0]] if good.size else cuts[-1])
