"""The loss laws of single releases: Gaussian, Laplace, and combinations of other laws.

With Laplace noise of scale b (in sensitivities) the loss of x is (|x - 1| - |x|) / b, where P is
centred at 0 and Q at 1: 1/b for x <= 0 and -1/b for x >= 1. In between it falls as x grows, with
P-density e^{l/2} and Q-density e^{-l/2}, both times e^{-1/(2b)}/4. The reverse order has the same
law, because x -> 1 - x exchanges P and Q.

Reference: Balle and Wang, arXiv:1805.06530, for the curve 1 - exp((ε - 1/b)/2) of a Laplace
release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from affidavit.accountants.fourier.privacy_loss import (
    UNIT_ROUNDOFF,
    Array,
    Atoms,
    Cells,
    LossLaw,
    Mixture,
    NormalPair,
    maxima_of_neighbours,
)

Kind = Literal["gaussian", "remove", "add", "replace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalMixtureLaw(NormalPair):
    """The loss law of one Gaussian release, subsampled or not.

    μ = ``distance`` / ``noise_multiplier`` is the distance by which a record moves the sum, in
    standard deviations of the noise; both numbers are in clip norms.

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
        """The distance by which a record moves the sum, in standard deviations of the noise."""
        return self.distance / self.noise_multiplier

    @property
    def max_loss(self) -> float:
        """-log(1-q), rounded up, for ``add``, else infinity."""
        if self.kind == "add":
            return -math.log1p(-self.sampling_probability) * (1 + 1e-14)
        return math.inf

    @property
    def bounding_line(self) -> tuple[float, float]:
        """A line above the loss from z = μ/2 on, as slope and height."""
        rise = -math.log1p(-self.sampling_probability) if self.kind == "replace" else 0.0
        return self.mu, rise - self.mu * self.mu / 2

    def loss(self, z: Array) -> Array:
        """Return the loss (nats) at ``z``, both of shape (n,)."""
        mu, q = self.mu, self.sampling_probability
        match self.kind:
            case "gaussian":
                return mu * z - mu * mu / 2
            case "remove":
                return log_mixture(mu * z - mu * mu / 2, q)
            case "add":
                return -log_mixture(-mu * z - mu * mu / 2, q)
            case "replace":
                up = log_mixture(mu * z - mu * mu / 2, q)
                return up - log_mixture(-mu * z - mu * mu / 2, q)

    def inverse_loss(self, losses: Array) -> Array:
        """Return the z at which the loss is ``losses`` (increasing), both of shape (n,)."""
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
    def mixtures(self) -> tuple[Mixture, Mixture]:
        """P and Q."""
        q, mu = self.sampling_probability, self.mu
        zero: Mixture = ((1.0, 0.0),)
        match self.kind:
            case "gaussian":
                return ((1.0, mu),), zero
            case "remove":
                return ((1 - q, 0.0), (q, mu)), zero
            case "add":
                return zero, ((1 - q, 0.0), (q, -mu))
            case "replace":
                return ((1 - q, 0.0), (q, mu)), ((1 - q, 0.0), (q, -mu))

    def _edge_roundings(self, edges: Array, z: Array) -> Array:
        """Bound some roundings of z times the slope of the loss there; all of shape (n,).

        The slope is monotone in z, or even and monotone in |z| between μ and 2μ, so twice the
        mean slope of a cell at the edge bounds it.
        """
        mu = self.mu
        slopes = np.minimum(np.diff(edges) / np.maximum(np.diff(z), 1e-300), mu)
        slopes = 2.0 * maxima_of_neighbours(slopes)
        return 8.0 * np.abs(edges) + slopes * (np.abs(z) + mu) * (8.0 + 2.0 * mu * mu)


def log_mixture(exponent: Array, q: float) -> Array:
    """Return log(1 - q + q·exp(exponent)), both of shape (n,), without overflow or cancellation."""
    small = np.minimum(exponent, 30.0)
    near = np.log1p(q * np.expm1(small))
    far = exponent + math.log(q) + np.log1p((1 - q) / q * np.exp(-np.maximum(exponent, 30.0)))
    return np.where(exponent > 30.0, far, near)


def _inverse_log_mixture(losses: Array, q: float) -> Array:
    """Return the exponent at which ``log_mixture`` is ``losses``; -inf below log(1-q).

    (e^l - (1-q))/q is computed as 1 + expm1(l)/q near l = 0, as e^l - (1-q) where l is well below
    0 (there both terms are exact to an ulp of e^l), and in logarithms where e^l would overflow.
    ``losses`` increase.
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


_LAPLACE_ATOMS = 201
"""Atoms between the two ends of a Laplace release's law."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaplaceLaw:
    """The loss law of a Laplace release of this ``scale``."""

    scale: float

    @property
    def max_loss(self) -> float:
        """The largest loss (nats), which half of P has."""
        return 1 / self.scale

    def atoms(self) -> Atoms:
        """Return the law under P: both ends, and cells between them."""
        edges = np.linspace(-self.max_loss, self.max_loss, _LAPLACE_ATOMS + 1)
        p, _ = self._masses_between(edges)
        losses = np.concatenate((edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]))
        least = math.exp(-self.max_loss) / 2
        return Atoms(losses=losses, weights=np.concatenate(([least], p, [0.5])))

    def upper_quantile(self, probability: float) -> float:  # noqa: ARG002  (half of P is there)
        """Return the largest loss (nats)."""
        return self.max_loss

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l); all have shape (n,)."""
        inside = np.clip(losses, -self.max_loss, self.max_loss)
        lost = -np.expm1((inside - self.max_loss) / 2)
        p, q = (1 + lost) / 2, np.exp(-(inside + self.max_loss) / 2) / 2
        everything, nothing = losses <= -self.max_loss, losses > self.max_loss
        return (
            np.where(everything, 1.0, np.where(nothing, 0.0, p)),
            np.where(everything, 1.0, np.where(nothing, 0.0, q)),
        )

    def cells(self, edges: Array) -> Cells:
        """Return the masses between ``edges`` (n,), atoms at the law's ends included."""
        inside = np.clip(edges, -self.max_loss, self.max_loss)
        p, q = self._masses_between(np.concatenate(([-self.max_loss], inside, [self.max_loss])))
        low, high = np.searchsorted(edges, (-self.max_loss, self.max_loss))
        least = math.exp(-self.max_loss) / 2
        p[low] += least
        q[low] += 0.5
        p[high] += 0.5
        q[high] += least
        largest = self.max_loss + float(np.abs(edges).max())
        return Cells(
            p=p,
            q=q,
            relative_error=np.full(p.size, UNIT_ROUNDOFF * (16.0 + 4.0 * self.max_loss)),
            edge_error=np.full(p.size, UNIT_ROUNDOFF * 8.0 * largest),
        )

    def _masses_between(self, losses: Array) -> tuple[Array, Array]:
        """Return the masses between increasing ``losses`` (n,) within the law's ends."""
        shares = -np.expm1(-np.diff(losses) / 2) / 2
        p = np.exp((losses[1:] - self.max_loss) / 2) * shares
        q = np.exp(-(losses[:-1] + self.max_loss) / 2) * shares
        return p, q


@dataclass(frozen=True, kw_only=True, slots=True)
class RevealedMixtureLaw:
    """``second`` with probability ``weight``, else ``first``; the release reveals which."""

    first: LossLaw
    second: LossLaw
    weight: float

    @property
    def max_loss(self) -> float:
        """The larger of both laws' (nats)."""
        return max(self.first.max_loss, self.second.max_loss)

    def atoms(self) -> Atoms:
        """Return the law under P."""
        parts = (self.first.atoms(), 1 - self.weight), (self.second.atoms(), self.weight)
        losses = np.concatenate([atoms.losses for atoms, _ in parts])
        weights = np.concatenate([share * atoms.weights for atoms, share in parts])
        order = np.argsort(losses, kind="stable")
        return Atoms(losses=losses[order], weights=weights[order])

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l); all have shape (n,)."""
        first, second = self.first.tails(losses), self.second.tails(losses)
        return self._average(first[0], second[0]), self._average(first[1], second[1])

    def cells(self, edges: Array) -> Cells:
        """Return the masses of both laws between ``edges`` (n,), weighted."""
        first, second = self.first.cells(edges), self.second.cells(edges)
        return Cells(
            p=self._average(first.p, second.p),
            q=self._average(first.q, second.q),
            relative_error=np.maximum(first.relative_error, second.relative_error) + 2.0**-51,
            edge_error=np.maximum(first.edge_error, second.edge_error),
        )

    def _average(self, first: Array, second: Array) -> Array:
        return (1 - self.weight) * first + self.weight * second

    def upper_quantile(self, probability: float) -> float:
        """Return a loss (nats) that P exceeds with at most about this small probability.

        Each law gets half of the probability, because a bound of ε rests on the sum.
        """
        half = probability / 2
        if self.weight <= half:
            return self.first.upper_quantile(half)
        return max(self.first.upper_quantile(half), self.second.upper_quantile(half / self.weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantLaw:
    """Outputs that all have one ``loss`` (nats)."""

    loss: float

    @property
    def max_loss(self) -> float:
        """The loss (nats), rounded up."""
        return self.loss + 1e-15

    def atoms(self) -> Atoms:
        """Return the law under P: one atom."""
        return Atoms(losses=np.array([self.loss]), weights=np.ones(1))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l); all have shape (n,)."""
        p = np.where(losses <= self.loss, 1.0, 0.0)
        return p, p * math.exp(-self.loss)

    def cells(self, edges: Array) -> Cells:
        """Return the masses of both laws between ``edges`` (n,)."""
        p = np.zeros(edges.size + 1)
        p[int(np.searchsorted(edges, self.loss))] = 1.0
        return Cells(
            p=p,
            q=p * math.exp(-self.loss),
            relative_error=np.full(p.size, 8.0 * UNIT_ROUNDOFF),
            edge_error=np.full(p.size, 8.0 * UNIT_ROUNDOFF * abs(self.loss)),
        )

    def upper_quantile(self, probability: float) -> float:  # noqa: ARG002  (all of P is there)
        """Return the loss (nats)."""
        return self.loss


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseOfBothLaw:
    """The law whose curve is that of ``remove`` for α >= 1 and that of ``add`` below.

    That is ``remove`` for positive losses, ``add`` for negative ones, and an ``atom`` (its
    probability) at zero, where the two curves meet with a kink: the dominating law of sampling
    without replacement (docs/theorems/without-replacement.md) and of displaced records
    (docs/theorems/truncated-poisson.md). No pair of data sets need attain it, so it serves upper
    bounds only.
    """

    remove: NormalPair
    add: NormalPair
    atom: float

    @property
    def max_loss(self) -> float:
        """That of ``remove`` (nats), to which the positive losses belong."""
        return self.remove.max_loss

    def atoms(self) -> Atoms:
        """Return the law under P."""
        low, high = self.add.atoms(), self.remove.atoms()
        below, above = low.losses < 0, high.losses > 0
        weights = np.concatenate((low.weights[below], [0.0], high.weights[above]))
        weights[int(below.sum())] = max(0.0, 1.0 - float(weights.sum()))
        losses = np.concatenate((low.losses[below], [0.0], high.losses[above]))
        return Atoms(losses=losses, weights=weights / weights.sum())

    def upper_quantile(self, probability: float) -> float:
        """Return a loss (nats) that P exceeds with about this small probability."""
        return max(0.0, self.remove.upper_quantile(probability))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l), the atom included at zero; all have shape (n,)."""
        split = int(np.searchsorted(losses, 0.0, side="right"))
        if split == 0:
            return self.remove.tails(losses)
        if split == losses.size:
            return self.add.tails(losses)
        low, high = self.add.tails(losses[:split]), self.remove.tails(losses[split:])
        return np.append(low[0], high[0]), np.append(low[1], high[1])

    def cells(self, edges: Array) -> Cells:
        """Return the masses between ``edges`` (n,); the cell around zero has both and the atom."""
        # Zero must lie between two edges: one more is added, and its cell joined to the next.
        beyond = float(np.abs(edges).max()) + 1.0
        if edges[0] >= 0.0:
            return _joined(self.cells(np.insert(edges, 0, -beyond)), 0)
        if edges[-1] <= 0.0:
            return _joined(self.cells(np.append(edges, beyond)), edges.size)
        split = int(np.searchsorted(edges, 0.0))
        low = self.add.cells(np.append(edges[:split], 0.0))
        high = self.remove.cells(np.insert(edges[split:], 0, 0.0))

        def stacked(below: Array, above: Array) -> Array:
            return np.concatenate((below[: split + 1], above[1:]))

        result = _joined(
            Cells(
                p=stacked(low.p, high.p),
                q=stacked(low.q, high.q),
                relative_error=stacked(low.relative_error, high.relative_error),
                edge_error=stacked(low.edge_error, high.edge_error),
            ),
            split,
        )
        result.p[split] += self.atom
        result.q[split] += self.atom
        return result


def _joined(cells: Cells, first: int) -> Cells:
    """Return ``cells`` with the cell at ``first`` and the next one joined."""

    def joined(values: Array, result: float) -> Array:
        return np.concatenate((values[:first], [result], values[first + 2 :]))

    pair = slice(first, first + 2)
    return Cells(
        p=joined(cells.p, cells.p[pair].sum()),
        q=joined(cells.q, cells.q[pair].sum()),
        relative_error=joined(cells.relative_error, cells.relative_error[pair].max()),
        edge_error=joined(cells.edge_error, cells.edge_error[pair].max()),
    )
