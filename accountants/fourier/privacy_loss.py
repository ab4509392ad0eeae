"""The privacy loss of one release, as a law on the real line.

A pair (P, Q) of hypotheses is known here through the loss L = log dP/dQ. Every pair
below is a pair of mixtures of unit normals in z (the released coordinate over the noise
standard deviation) whose loss increases in z, so the law of L is two survival functions:

* ``P(L >= l)`` and ``Q(L >= l)``, read off at z(l), the inverse of the loss;
* and its exponential moments, by the trapezoid rule over z.

``Survival`` carries what the numbers may be wrong by. ``relative`` bounds the relative
error of both survival functions at the z that was really used; ``loss_error`` bounds how
far the loss of that z is from the l that was asked for. Both are counted in units of
u = 2**-53 from the operations made: cephes' ``ndtr`` is exp(-z²/2) times a rational
function, so its relative error grows like z²/2 roundings.

The moments (``Atoms``) choose_grid: they choose tilts, steps and windows, and no bound rests
on them.

References: [1] Zhu, Dong and Wang, arXiv:2106.08567, dominating pairs. [2] docs/theorems/
poisson-add-remove.md, poisson-replace-one.md, without-replacement.md for why these pairs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-53
_PIECE = 8192

_Z_REACH, _UNSEEN = 12.5, 1e-40
"""Normal deviations kept by the moments; mass beyond is below 1e-35."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """P(L >= l) and Q(L >= l) on a grid of n losses l, with bounds of their errors.

    All three arrays have shape (n,); ``relative`` is of ``p`` and ``q``, ``loss_error`` in nats.
    """

    p: Array
    q: Array
    relative: Array
    loss_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """P- and Q-masses of the losses below, between and above increasing edges.

    All four arrays have shape (n + 1,) for n edges. ``relative`` bounds the relative error
    of ``p`` and ``q``, and ``misplaced`` how far, in nats, the loss at either end of a cell
    can be from the edge that was asked for.
    """

    p: Array
    q: Array
    relative: Array
    misplaced: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Atoms:
    """The law of the loss under P as finitely many atoms, accurate but not a bound.

    ``losses`` (nats) increase; ``weights`` sum to one. Both have shape (n,).
    """

    losses: Array
    weights: Array

    def cut(self, top: float) -> Atoms:
        """The law without the losses above ``top``, not renormalised.

        The atoms are coarse: an atom at ``top`` itself stands for what is between.
        """
        keep = int(np.searchsorted(self.losses, top, side="right"))
        if keep == 0 or keep == self.losses.size:
            return self
        return Atoms(
            losses=np.append(self.losses[:keep], top),
            weights=np.append(self.weights[:keep], self.weights[keep]),
        )

    def log_moment(self, order: float) -> float:
        """log E[exp(order · L)], ``order`` in 1/nat."""
        exponents = order * self.losses
        peak = float(exponents.max())
        return peak + math.log(float(self.weights @ np.exp(exponents - peak)))

    def log_moments(self, orders: Array) -> Array:
        """log E[exp(order · L)] at each of ``orders``.

        ``orders`` and what is returned have shape (m,).
        """
        exponents = np.outer(orders, self.losses)
        peaks = exponents.max(axis=1)
        sums: Array = peaks + np.log(np.exp(exponents - peaks[:, None]) @ self.weights)
        return sums

    def tilted(self, order: float) -> Array:
        """The weights of the law tilted by exp(order · L), summing to one.

        Shape (n,), as the atoms.
        """
        exponents = order * self.losses
        weights = self.weights * np.exp(exponents - exponents.max())
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    def median(self, order: float) -> float:
        """The median of the tilted law, in nats."""
        cumulative = np.cumsum(self.tilted(order))
        return float(self.losses[int(np.searchsorted(cumulative, 0.5))])


class LossLaw(Protocol):
    """The law of one release's privacy loss, in nats, in one direction of the adjacency."""

    @property
    def ceiling(self) -> float:
        """No loss exceeds this (nats); infinite if unbounded."""
        ...

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        ...

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses``.

        ``losses`` in nats and each part of the answer have shape (n,).
        """
        ...

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between increasing ``edges``, and beyond them.

        ``edges`` in nats have shape (n,), and the masses (n + 1,): below the first, between them,
        above the last.
        """
        ...

    def top(self, probability: float) -> float:
        """A loss that is exceeded under P with about this small probability."""
        ...


Mixture = tuple[tuple[float, float], ...]
"""Weights and means of unit normals, in standard deviations of the noise."""


class NormalPair(ABC):
    """A pair of mixtures of unit normals in z whose loss increases in z.

    What every such pair reads off z alike; a pair states its mixtures, its loss and where a
    loss is (``place``), with the rounding of that (``_misplaced`` and ``_spread``).
    """

    __slots__ = ()

    @property
    @abstractmethod
    def mu(self) -> float:
        """How far a record moves the sum, in standard deviations of the noise."""
        ...

    @property
    @abstractmethod
    def ceiling(self) -> float:
        """No loss exceeds this (nats); infinite if unbounded."""
        ...

    @property
    @abstractmethod
    def p_mixture(self) -> Mixture:
        """Weights and means of P."""
        ...

    @property
    @abstractmethod
    def q_mixture(self) -> Mixture:
        """Weights and means of Q."""
        ...

    @property
    @abstractmethod
    def line(self) -> tuple[float, float]:
        """A line that the loss is nowhere above from z = μ/2 on, where it has no ceiling.

        Its slope in nats a standard deviation, and its height at z = 0 in nats.
        """
        ...

    @abstractmethod
    def loss(self, z: Array) -> Array:
        """The loss at ``z``. In nats, of the shape of ``z``."""
        ...

    @abstractmethod
    def place(self, losses: Array) -> Array:
        """The z at which the loss is ``losses`` (increasing); infinite outside its range.

        Both have shape (n,).
        """
        ...

    @abstractmethod
    def _misplaced(self, edges: Array, z: Array) -> Array:
        """How far the loss at ``z`` is from ``edges``, in roundings; both of shape (n,)."""
        ...

    @property
    @abstractmethod
    def _spread(self) -> float:
        """What the rounding of a z that was found adds to a loss, in sixteen roundings."""
        ...

    def atoms(self) -> Atoms:
        """The law under P by the trapezoid rule, which is exact to rounding here.

        The integrand is analytic in a strip of half-width π/(2μ) at least, so a step of
        a tenth of the strip or of a standard deviation leaves less than 1e-17.
        """
        means = [0.0, *(mean for weight, mean in self.p_mixture if weight > _UNSEEN)]
        step = min(0.1, 0.25 / self.mu)
        z = np.arange(min(means) - _Z_REACH, max(means) + _Z_REACH + step, step)
        weights = _density(z, self.p_mixture)
        return Atoms(losses=self.loss(z), weights=weights / weights.sum())

    def top(self, probability: float) -> float:
        """The loss (nats) at a z above which P has about this probability."""
        low, high = 0.0, 40.0 + self.mu
        mixture = self.p_mixture
        for _ in range(45):
            middle = (low + high) / 2
            tail = sum(w * math.erfc((middle - m) * math.sqrt(0.5)) for w, m in mixture) / 2
            low, high = (middle, high) if tail > probability else (low, middle)
        return float(self.loss(np.array([high]))[0])

    def survival(self, losses: Array) -> Survival:
        """Both survival functions; z is cut at ±38, beyond which P and Q vanish.

        ``losses`` in nats and each part of the answer have shape (n,).
        """
        mu = self.mu
        with np.errstate(over="ignore", divide="ignore"):
            # Infinities are meant: below its infimum a loss has no z.
            z = self.place(losses)
        reach = 38.0 + mu
        inside = np.clip(z, -reach, reach)
        normal = {m: ndtr(m - inside) for m in self._means()}
        p = sum(w * normal[m] for w, m in self.p_mixture)
        q_tail = sum(w * normal[m] for w, m in self.q_mixture)
        # ndtr, the sum of two positive terms and the rounding of m - z: the last moves
        # ndtr by a hazard of at most |z| + 1 times an ulp of |z|.
        size = np.maximum(inside, 0.0) + mu + 1.0
        relative = UNIT_ROUNDOFF * (16.0 + 4.0 * size * size)
        span = float(max(abs(losses[0]), abs(losses[-1])))
        return Survival(
            p=np.asarray(p),
            q=np.asarray(q_tail),
            relative=relative,
            loss_error=UNIT_ROUNDOFF * (32.0 + 16.0 * (span + self._spread)),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses between ``edges``, shape (n,), each with a few ulp of error of its own.

        The cells are cut at the z found for the edges, which are taken as exact: what
        rounding there is in finding them is ``misplaced``.
        """
        mu = self.mu
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            z = np.maximum.accumulate(self.place(edges))
        reach = 38.0 + mu
        z = np.clip(z, -reach, reach)
        normal = {m: normal_masses(z, m) for m in self._means()}
        p, p_error = (sum(w * normal[m][k] for w, m in self.p_mixture) for k in (0, 1))
        q, q_error = (sum(w * normal[m][k] for w, m in self.q_mixture) for k in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.maximum(np.nan_to_num(p_error / p), np.nan_to_num(q_error / q))
        places = self._misplaced(edges, z)
        return Cells(
            p=np.asarray(p),
            q=np.asarray(q),
            relative=relative + 4.0 * UNIT_ROUNDOFF,
            misplaced=UNIT_ROUNDOFF * maxima_of_neighbours(places),
        )

    def _means(self) -> set[float]:
        return {m for _, m in (*self.p_mixture, *self.q_mixture)}


def maxima_of_neighbours(values: Array) -> Array:
    """Return the larger of the entries before and after each edge of ``values``.

    ``values`` have shape (n,), the maxima (n + 1,).
    """
    return np.maximum(np.append(values[:1], values), np.append(values, values[-1:]))


def _density(z: Array, mixture: tuple[tuple[float, float], ...]) -> Array:
    total = np.zeros_like(z)
    for weight, mean in mixture:
        total += weight * np.exp(-((z - mean) ** 2) / 2)
    return total


def normal_masses(z: Array, mean: float) -> tuple[Array, Array]:
    """Masses of N(mean, 1) below, between and above ``z``, and bounds of their absolute errors.

    ``z`` increases, shape (n,) and in standard deviations; both results have shape (n + 1,).

    A cell [c - d, c + d] that is narrow against the density's own scale has

        2 d φ(c) Σ_k He_2k(c) d^2k / (2k+1)!,

    summed to k = 4: the next term is below 3 units of rounding where (1 + |c|) d <= 0.08.
    The half width is that of z itself, so no cell is widened by the rounding of z - mean. A
    wider one is the difference of two tails, taken on the side where they are small. Where
    the argument is rounded the density moves by as many ulp as |z - mean| (|z| + |mean|).
    """
    at = z - mean
    masses, errors = np.empty(z.size + 1), np.empty(z.size + 1)
    masses[:1], errors[:1] = _tails(at[:1], mean)
    masses[-1:], errors[-1:] = _tails(-at[-1:], mean)
    # Piece by piece, so that what is passed over many times stays in the cache.
    for start in range(0, z.size - 1, _PIECE):
        piece = slice(start, min(start + _PIECE, z.size - 1) + 1)
        inside = slice(piece.start + 1, piece.stop)
        masses[inside], errors[inside] = _inner_masses(z[piece], at[piece], mean)
    return masses, UNIT_ROUNDOFF * errors


def _inner_masses(z: Array, at: Array, mean: float) -> tuple[Array, Array]:
    centre, half = (at[:-1] + at[1:]) / 2, np.diff(z) / 2
    x, y = centre * centre, half * half
    distance = np.abs(centre)
    width = (1 + distance) * half
    series = y * (((x - 6) * x + 3) / 120)
    if width.max() > 0.004:
        # Below that the terms left out, at most 15 · 0.004^6 / 5040, are less than u / 8.
        higher = ((((x - 28) * x + 210) * x - 420) * x + 105) / 362880
        series += y * y * ((((x - 15) * x + 45) * x - 15) / 5040 + y * higher)
    series = y * ((x - 1) / 6 + series)
    masses = np.exp(-x / 2) * ((1 + series) * half * math.sqrt(2 / math.pi))
    sizes = distance + (abs(mean) + 1.0)
    errors = (32.0 + 4.0 * sizes * sizes) * masses
    wide = np.flatnonzero(width > 0.08)
    if wide.size:
        mirrored = np.where(centre[wide] > 0, -1.0, 1.0)
        low, low_error = _tails(mirrored * at[wide], mean)
        high, high_error = _tails(mirrored * at[wide + 1], mean)
        masses[wide] = np.abs(high - low)
        errors[wide] = low_error + high_error
    return masses, errors


def _tails(at: Array, mean: float) -> tuple[Array, Array]:
    """Φ at ``at``, and a bound of its error in units of rounding, that of ``at`` included."""
    tails = ndtr(at)
    sizes = np.minimum(np.abs(at), 40.0) + (abs(mean) + 1.0)
    return tails, (16.0 + 4.0 * sizes * sizes) * tails
