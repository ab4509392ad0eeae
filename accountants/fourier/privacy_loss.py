"""The privacy loss of one release, as a law on the real line.

A pair (P, Q) of hypotheses is represented by its loss L = log dP/dQ. Most pairs are mixtures of
unit normals in z, the released coordinate over the noise standard deviation, whose loss increases
in z. Their masses are read at z(l), the inverse of the loss.

Rounding errors are counted in units of u = 2**-53 from the operations. cephes' ``ndtr`` is
exp(-z²/2) times a rational function, so its relative error grows like z²/2 roundings. A mass taken
as the difference of two distribution functions is only good to a rounding of *those*, which would
dominate where a million releases each have a tiny loss. Narrow cells are therefore summed as a
series about their centre.

``Atoms`` and ``tails`` choose tilts, steps and windows. No bound rests on them.

>>> masses, errors = normal_masses(np.array([0.0, 1e-9]), 0.0)
>>> bool(abs(masses[1] / 1e-9 - 0.3989422804014327) < 1e-15)
True

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

_CHUNK_POINTS = 8192
"""Points of a chunk of ``normal_masses`` that stays in the processor's cache."""
_ATOM_REACH, _NEGLIGIBLE_WEIGHT = 12.5, 1e-40
"""Standard deviations that the atoms cover, and weights that they ignore: less than 1e-35."""
_MAX_PLACE = 38.0
"""Standard deviations beyond which a normal tail vanishes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """P- and Q-masses of the losses below, between and above increasing edges.

    All four arrays have shape (n + 1,) for n edges. ``relative_error`` bounds the relative error
    of ``p`` and ``q``, and ``edge_error`` the distance (nats) of the loss at either end of a cell
    from the requested edge.
    """

    p: Array
    q: Array
    relative_error: Array
    edge_error: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Atoms:
    """The law of the loss under P as finitely many atoms, accurate but not a bound.

    ``losses`` (nats) increase and ``weights`` sum to one. Both have shape (n,).
    """

    losses: Array
    weights: Array

    def cut(self, top: float) -> Atoms:
        """Return the law without the losses above ``top`` (nats), not renormalised.

        The atoms are coarse, so an atom at ``top`` replaces the first one beyond it.
        """
        keep = int(np.searchsorted(self.losses, top, side="right"))
        if keep == 0 or keep == self.losses.size:
            return self
        return Atoms(
            losses=np.append(self.losses[:keep], top),
            weights=np.append(self.weights[:keep], self.weights[keep]),
        )

    def log_moment(self, order: float) -> float:
        """Return log E[exp(order · L)], ``order`` in 1/nat."""
        exponents = order * self.losses
        peak = float(exponents.max())
        return peak + math.log(float(self.weights @ np.exp(exponents - peak)))

    def log_moments(self, orders: Array) -> Array:
        """Return log E[exp(order · L)] at each of ``orders`` (1/nat), both of shape (m,)."""
        exponents = np.outer(orders, self.losses)
        peaks = exponents.max(axis=1)
        sums: Array = peaks + np.log(np.exp(exponents - peaks[:, None]) @ self.weights)
        return sums

    def tilted(self, order: float) -> Array:
        """Return the weights tilted by exp(order · L), normalised, of shape (n,)."""
        exponents = order * self.losses
        weights = self.weights * np.exp(exponents - exponents.max())
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    def median(self, order: float) -> float:
        """Return the median (nats) of the tilted law."""
        cumulative = np.cumsum(self.tilted(order))
        return float(self.losses[int(np.searchsorted(cumulative, 0.5))])


class LossLaw(Protocol):
    """The law of one release's privacy loss, in nats, in one direction of the adjacency."""

    @property
    def max_loss(self) -> float:
        """An upper bound of the loss (nats); infinite if there is none."""
        ...

    def atoms(self) -> Atoms:
        """Return the law under P for choosing grids."""
        ...

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l) up to rounding, for choosing grids.

        The increasing ``losses`` (nats) and both results have shape (n,).
        """
        ...

    def cells(self, edges: Array) -> Cells:
        """Return the masses between increasing ``edges`` (nats), of shape (n,)."""
        ...

    def upper_quantile(self, probability: float) -> float:
        """Return a loss (nats) that P exceeds with about this small probability."""
        ...


Mixture = tuple[tuple[float, float], ...]
"""Weights and means of unit normals, in standard deviations of the noise."""


class NormalPair(ABC):
    """A pair of mixtures of unit normals in z whose loss increases in z."""

    __slots__ = ()

    @property
    @abstractmethod
    def mu(self) -> float:
        """The distance by which a record moves the sum, in standard deviations of the noise."""
        ...

    @property
    def max_loss(self) -> float:
        """An upper bound of the loss (nats); infinite if there is none."""
        return math.inf

    @property
    @abstractmethod
    def mixtures(self) -> tuple[Mixture, Mixture]:
        """P and Q."""
        ...

    @property
    def p_mixture(self) -> Mixture:
        """The mixture P."""
        return self.mixtures[0]

    @property
    def q_mixture(self) -> Mixture:
        """The mixture Q."""
        return self.mixtures[1]

    @property
    @abstractmethod
    def bounding_line(self) -> tuple[float, float]:
        """A line above the loss from z = μ/2 on, where the loss is unbounded.

        Its slope in nats per standard deviation, and its height at z = 0 in nats.
        """
        ...

    @abstractmethod
    def loss(self, z: Array) -> Array:
        """Return the loss (nats) at ``z``, both of shape (n,)."""
        ...

    @abstractmethod
    def inverse_loss(self, losses: Array) -> Array:
        """Return the z at which the loss is ``losses`` (increasing); infinite outside its range.

        Both have shape (n,).
        """
        ...

    @abstractmethod
    def _edge_roundings(self, edges: Array, z: Array) -> Array:
        """Bound the distance of the loss at ``z`` from ``edges``, in roundings; all (n,)."""
        ...

    def atoms(self) -> Atoms:
        """Return the law under P by the trapezoid rule, which is exact to rounding here.

        The integrand is analytic in a strip of half-width π/(2μ) at least, so a step of a tenth of
        the strip or of a standard deviation leaves less than 1e-17.
        """
        means = [0.0, *(mean for weight, mean in self.p_mixture if weight > _NEGLIGIBLE_WEIGHT)]
        step = min(0.1, 0.25 / self.mu)
        z = np.arange(min(means) - _ATOM_REACH, max(means) + _ATOM_REACH + step, step)
        weights = np.zeros_like(z)
        for weight, mean in self.p_mixture:
            weights += weight * np.exp(-((z - mean) ** 2) / 2)
        return Atoms(losses=self.loss(z), weights=weights / weights.sum())

    def upper_quantile(self, probability: float) -> float:
        """Return the loss (nats) at a z that P exceeds with about this probability."""
        low, high = 0.0, 40.0 + self.mu
        mixture = self.p_mixture
        for _ in range(45):
            middle = (low + high) / 2
            tail = sum(w * math.erfc((middle - m) * math.sqrt(0.5)) for w, m in mixture) / 2
            low, high = (middle, high) if tail > probability else (low, middle)
        return float(self.loss(np.array([high]))[0])

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l) up to rounding; all have shape (n,)."""
        with np.errstate(over="ignore", divide="ignore"):
            # Below its infimum a loss has no z, and the result is infinite.
            z = self.inverse_loss(losses)
        reach = _MAX_PLACE + self.mu
        inside = np.clip(z, -reach, reach)
        normal = {m: ndtr(m - inside) for m in self._means()}
        p = sum(w * normal[m] for w, m in self.p_mixture)
        q = sum(w * normal[m] for w, m in self.q_mixture)
        return np.asarray(p), np.asarray(q)

    def cells(self, edges: Array) -> Cells:
        """Return the masses between ``edges`` (n,), each good to a few roundings of itself.

        The cells are cut at the computed z, which is then taken as exact: its rounding is in
        ``edge_error``.
        """
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            z = np.maximum.accumulate(self.inverse_loss(edges))
        reach = _MAX_PLACE + self.mu
        z = np.clip(z, -reach, reach)
        normal = {m: normal_masses(z, m) for m in self._means()}
        p, p_error = (sum(w * normal[m][k] for w, m in self.p_mixture) for k in (0, 1))
        q, q_error = (sum(w * normal[m][k] for w, m in self.q_mixture) for k in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.maximum(np.nan_to_num(p_error / p), np.nan_to_num(q_error / q))
        return Cells(
            p=np.asarray(p),
            q=np.asarray(q),
            relative_error=error + 4.0 * UNIT_ROUNDOFF,
            edge_error=UNIT_ROUNDOFF * maxima_of_neighbours(self._edge_roundings(edges, z)),
        )

    def _means(self) -> set[float]:
        return {m for _, m in (*self.p_mixture, *self.q_mixture)}


def maxima_of_neighbours(values: Array) -> Array:
    """Return the larger of the entries before and after each place between ``values``.

    ``values`` have shape (n,), the maxima (n + 1,).
    """
    return np.maximum(np.append(values[:1], values), np.append(values, values[-1:]))


def normal_masses(z: Array, mean: float) -> tuple[Array, Array]:
    """Return masses of N(mean, 1) below, between and above ``z``, and bounds of their errors.

    ``z`` increases, of shape (n,) and in standard deviations. Both results have shape (n + 1,); the
    errors are absolute.

    A cell [c - d, c + d] that is narrow against the density's own scale has

        2 d φ(c) Σ_k He_2k(c) d^2k / (2k+1)!,

    summed to k = 4: the next term is below 3 units of rounding where (1 + |c|) d <= 0.08.
    The half width is that of z itself, so the rounding of z - mean widens no cell. A wider cell is
    the difference of two tails, taken on the side where they are small. Where the argument is
    rounded the density moves by as many ulp as |z - mean| (|z| + |mean|).
    """
    at = z - mean
    masses, errors = np.empty(z.size + 1), np.empty(z.size + 1)
    masses[:1], errors[:1] = _tails(at[:1], mean)
    masses[-1:], errors[-1:] = _tails(-at[-1:], mean)
    for start in range(0, z.size - 1, _CHUNK_POINTS):
        chunk = slice(start, min(start + _CHUNK_POINTS, z.size - 1) + 1)
        inside = slice(chunk.start + 1, chunk.stop)
        masses[inside], errors[inside] = _inner_masses(z[chunk], at[chunk], mean)
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
    """Return Φ at ``at`` and a bound of its error in roundings, that of ``at`` included."""
    tails = ndtr(at)
    sizes = np.minimum(np.abs(at), 40.0) + (abs(mean) + 1.0)
    return tails, (16.0 + 4.0 * sizes * sizes) * tails
