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
from typing import Literal, Protocol

import numpy as np
from scipy.special import ndtr

from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array, normal_masses

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


Kind = Literal["gaussian", "remove", "add", "replace"]


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
            misplaced=UNIT_ROUNDOFF * np.maximum(_ends(places), _ends(places, first=False)),
        )

    def _means(self) -> set[float]:
        return {m for _, m in (*self.p_mixture, *self.q_mixture)}


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalMixtureLaw(NormalPair):
    """The loss law of one Gaussian release, subsampled or not.

    With μ = ``distance`` / ``noise_multiplier``, how far a record moves the sum and the
    noise's standard deviation, both in clip norms, and z in noise standard deviations:

    ========  ===========================  ==============================
    kind      P                            Q
    ========  ===========================  ==============================
    gaussian  N(μ)                         N(0)
    remove    (1-q) N(0) + q N(μ)          N(0)
    add       N(0)                         (1-q) N(0) + q N(-μ)
    replace   (1-q) N(0) + q N(μ)          (1-q) N(0) + q N(-μ)
    ========  ===========================  ==============================

    ``add`` is the reverse of ``remove``, reflected so that its loss increases in z.
    """

    kind: Kind
    noise_multiplier: float
    sampling_probability: float = 1.0
    distance: float = 1.0

    @property
    def mu(self) -> float:
        """How far a record moves the sum, in standard deviations of the noise."""
        return self.distance / self.noise_multiplier

    @property
    def ceiling(self) -> float:
        """No loss exceeds this: -log(1-q), rounded up, for ``add``, else infinity."""
        if self.kind == "add":
            return -math.log1p(-self.sampling_probability) * (1 + 1e-14)
        return math.inf

    @property
    def line(self) -> tuple[float, float]:
        """A line that the loss is nowhere above from z = μ/2 on, as slope and height."""
        more = -math.log1p(-self.sampling_probability) if self.kind == "replace" else 0.0
        return self.mu, more - self.mu * self.mu / 2

    def loss(self, z: Array) -> Array:
        """The loss at ``z``. In nats, of the shape of ``z``."""
        mu, q = self.mu, self.sampling_probability
        match self.kind:
            case "gaussian":
                return mu * z - mu * mu / 2
            case "remove":
                return _log_mixture(mu * z - mu * mu / 2, q)
            case "add":
                return -_log_mixture(-mu * z - mu * mu / 2, q)
            case "replace":
                up = _log_mixture(mu * z - mu * mu / 2, q)
                return up - _log_mixture(-mu * z - mu * mu / 2, q)

    def place(self, losses: Array) -> Array:
        """The z at which the loss is ``losses`` (increasing); infinite outside its range.

        Both have shape (n,).
        """
        mu, q = self.mu, self.sampling_probability
        match self.kind:
            case "gaussian":
                return losses / mu + mu / 2
            case "remove":
                return _inverse_log_mixture(losses, q) / mu + mu / 2
            case "add":
                return -(_inverse_log_mixture(-losses[::-1], q)[::-1] / mu + mu / 2)
            case "replace":
                scale = (1 - q) / q * math.exp(mu * mu / 2)
                return (losses / 2 + np.arcsinh(scale * np.sinh(losses / 2))) / mu

    @property
    def p_mixture(self) -> Mixture:
        """Weights and means of P."""
        q, mu = self.sampling_probability, self.mu
        match self.kind:
            case "gaussian":
                return ((1.0, mu),)
            case "remove" | "replace":
                return ((1 - q, 0.0), (q, mu))
            case "add":
                return ((1.0, 0.0),)

    @property
    def q_mixture(self) -> Mixture:
        """Weights and means of Q."""
        q, mu = self.sampling_probability, self.mu
        match self.kind:
            case "gaussian" | "remove":
                return ((1.0, 0.0),)
            case "add" | "replace":
                return ((1 - q, 0.0), (q, -mu))

    def _misplaced(self, edges: Array, z: Array) -> Array:
        """What rounding there is in finding z, at most some roundings of z times the slope there.

        The slope is monotone in z, or even and monotone in |z| between μ and 2μ, so twice the
        mean slope of a cell at the edge bounds it.
        """
        mu = self.mu
        slopes = np.minimum(np.diff(edges) / np.maximum(np.diff(z), 1e-300), mu)
        slopes = 2.0 * np.maximum(_ends(slopes), _ends(slopes, first=False))
        return 8.0 * np.abs(edges) + slopes * (np.abs(z) + mu) * (8.0 + 2.0 * mu * mu)

    @property
    def _spread(self) -> float:
        return abs(math.log(self.sampling_probability)) + self.mu * self.mu


def _ends(values: Array, *, first: bool = True) -> Array:
    """One entry more than ``values``: each entry's predecessor, or with not ``first`` itself."""
    if first:
        return np.concatenate((values[:1], values))
    return np.concatenate((values, values[-1:]))


def _density(z: Array, mixture: tuple[tuple[float, float], ...]) -> Array:
    total = np.zeros_like(z)
    for weight, mean in mixture:
        total += weight * np.exp(-((z - mean) ** 2) / 2)
    return total


def _log_mixture(exponent: Array, q: float) -> Array:
    """log(1 - q + q·exp(exponent)), without overflow or cancellation."""
    small = np.minimum(exponent, 30.0)
    near = np.log1p(q * np.expm1(small))
    far = exponent + math.log(q) + np.log1p((1 - q) / q * np.exp(-np.maximum(exponent, 30.0)))
    return np.where(exponent > 30.0, far, near)


def _inverse_log_mixture(losses: Array, q: float) -> Array:
    """The exponent at which ``_log_mixture`` is ``losses``; -inf below log(1-q).

    (e^l - (1-q))/q is formed as 1 + expm1(l)/q near l = 0, as e^l - (1-q) where l is
    well below 0 (there both terms are exact to an ulp of e^l), and in logarithms where
    e^l would overflow. ``losses`` increase.
    """
    split = np.searchsorted(losses, (-0.5, 30.0))
    low, near, far = np.split(losses, split)
    return np.concatenate(
        (
            np.log(np.maximum(np.exp(low) - (1 - q), 0.0) / q),
            np.log1p(np.maximum(np.expm1(near) / q, -1.0)),
            far - math.log(q) + np.log1p(-(1 - q) * np.exp(-far)),
        )
    )
