"""The loss laws of single releases: Gaussian, Laplace, and what is made of other laws."""

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
    Survival,
    maxima_of_neighbours,
)

Kind = Literal["gaussian", "remove", "add", "replace"]


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
        slopes = 2.0 * maxima_of_neighbours(slopes)
        return 8.0 * np.abs(edges) + slopes * (np.abs(z) + mu) * (8.0 + 2.0 * mu * mu)

    @property
    def _spread(self) -> float:
        return abs(math.log(self.sampling_probability)) + self.mu * self.mu


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


_ATOMS = 201
"""Between the two ends of the law."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaplaceLaw:
    """The law of the loss of a Laplace release of this ``scale``."""

    scale: float

    @property
    def ceiling(self) -> float:
        """No loss exceeds this (nats)."""
        return 1 / self.scale

    def atoms(self) -> Atoms:
        """The law under P: both ends, and what is between them in cells."""
        edges = np.linspace(-self.ceiling, self.ceiling, _ATOMS + 1)
        p, _ = self._between(edges)
        losses = np.concatenate((edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]))
        return Atoms(losses=losses, weights=np.concatenate(([self._rare / 2], p, [0.5])))

    def top(self, probability: float) -> float:  # noqa: ARG002  (half of P is at the ceiling)
        """The largest loss."""
        return self.ceiling

    def survival(self, losses: Array) -> Survival:
        """Both survival functions.

        ``losses`` in nats and each part of the answer have shape (n,).
        """
        inside = np.clip(losses, -self.ceiling, self.ceiling)
        lost = -np.expm1((inside - self.ceiling) / 2)
        p, q = (1 + lost) / 2, np.exp(-(inside + self.ceiling) / 2) / 2
        all_of_it, none = losses <= -self.ceiling, losses > self.ceiling
        return Survival(
            p=np.where(all_of_it, 1.0, np.where(none, 0.0, p)),
            q=np.where(all_of_it, 1.0, np.where(none, 0.0, q)),
            relative=np.full(losses.shape, self._relative),
            loss_error=self._misplaced(losses),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses between ``edges``, shape (n,), and beyond them, each with its ends' atoms."""
        inside = np.clip(edges, -self.ceiling, self.ceiling)
        p, q = self._between(np.concatenate(([-self.ceiling], inside, [self.ceiling])))
        low, high = np.searchsorted(edges, (-self.ceiling, self.ceiling))
        p[low] += self._rare / 2
        q[low] += 0.5
        p[high] += 0.5
        q[high] += self._rare / 2
        return Cells(
            p=p,
            q=q,
            relative=np.full(p.size, self._relative),
            misplaced=np.full(p.size, self._misplaced(edges)),
        )

    @property
    def _rare(self) -> float:
        return math.exp(-self.ceiling)

    def _between(self, losses: Array) -> tuple[Array, Array]:
        """P- and Q-masses between increasing ``losses`` within the law's ends."""
        shares = -np.expm1(-np.diff(losses) / 2) / 2
        p = np.exp((losses[1:] - self.ceiling) / 2) * shares
        q = np.exp(-(losses[:-1] + self.ceiling) / 2) * shares
        return p, q

    @property
    def _relative(self) -> float:
        return UNIT_ROUNDOFF * (16.0 + 4.0 * self.ceiling)

    def _misplaced(self, losses: Array) -> float:
        """How far a loss may be from the edge it is read at, ends of the law included (nats)."""
        return UNIT_ROUNDOFF * 8.0 * (self.ceiling + float(np.abs(losses).max()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RevealedMixtureLaw:
    """``second`` with probability ``weight``, else ``first``, and it is known which."""

    first: LossLaw
    second: LossLaw
    weight: float

    @property
    def ceiling(self) -> float:
        """No loss of either exceeds this (nats)."""
        return max(self.first.ceiling, self.second.ceiling)

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        parts = (self.first.atoms(), 1 - self.weight), (self.second.atoms(), self.weight)
        losses = np.concatenate([atoms.losses for atoms, _ in parts])
        weights = np.concatenate([share * atoms.weights for atoms, share in parts])
        order = np.argsort(losses, kind="stable")
        return Atoms(losses=losses[order], weights=weights[order])

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats), weighed."""
        first, second = self.first.survival(losses), self.second.survival(losses)
        rest = 1 - self.weight
        return Survival(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            loss_error=max(first.loss_error, second.loss_error),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``, weighed."""
        first, second = self.first.cells(edges), self.second.cells(edges)
        rest = 1 - self.weight
        return Cells(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            misplaced=np.maximum(first.misplaced, second.misplaced),
        )

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with at most about this small probability.

        Half of it for either law, since the bound of ε that needs no transform rests on it.
        """
        half = probability / 2
        if self.weight <= half:
            return self.first.top(half)
        return max(self.first.top(half), self.second.top(half / self.weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftedLaw:
    """``law`` with every loss ``shift`` (nats) higher, as Q has e^-shift of its mass."""

    law: LossLaw
    shift: float

    @property
    def ceiling(self) -> float:
        """No loss exceeds this (nats)."""
        return self.law.ceiling + self.shift + 1e-15

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        atoms = self.law.atoms()
        return Atoms(losses=atoms.losses + self.shift, weights=atoms.weights)

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats)."""
        own = self.law.survival(losses - self.shift)
        return Survival(
            p=own.p,
            q=own.q * math.exp(-self.shift),
            relative=own.relative + 2.0**-51,
            loss_error=own.loss_error + float(self._rounding(losses).max()),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``."""
        own = self.law.cells(edges - self.shift)
        beside = self._rounding(edges)
        return Cells(
            p=own.p,
            q=own.q * math.exp(-self.shift),
            relative=own.relative + 2.0**-51,
            misplaced=own.misplaced + np.maximum(np.append(beside, 0), np.insert(beside, 0, 0)),
        )

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with about this small probability."""
        return self.law.top(probability) + self.shift

    def _rounding(self, losses: Array) -> Array:
        return np.asarray(2.0**-52 * (np.abs(losses) + abs(self.shift)))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseOfBothLaw:
    """The law whose curve is that of ``remove`` for α >= 1 and that of ``add`` below.

    That is ``remove`` where the loss is positive, ``add`` where it is negative, and an ``atom``
    (its probability) at zero, where the two curves meet with a kink: the dominating law of
    sampling without replacement (docs/theorems/without-replacement.md) and of displaced records
    (docs/theorems/truncated-poisson.md). No single pair of data sets need attain it, so it
    serves upper bounds only.
    """

    remove: NormalPair
    add: NormalPair
    atom: float

    @property
    def ceiling(self) -> float:
        """That of ``remove`` (nats), whose part the positive losses are."""
        return self.remove.ceiling

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        low, high = self.add.atoms(), self.remove.atoms()
        below, above = low.losses < 0, high.losses > 0
        weights = np.concatenate((low.weights[below], [0.0], high.weights[above]))
        weights[int(below.sum())] = max(0.0, 1.0 - float(weights.sum()))
        losses = np.concatenate((low.losses[below], [0.0], high.losses[above]))
        return Atoms(losses=losses, weights=weights / weights.sum())

    def top(self, probability: float) -> float:
        """A loss that is exceeded under P with about this small probability."""
        return max(0.0, self.remove.top(probability))

    def survival(self, losses: Array) -> Survival:
        """Both survival functions; at zero the atom counts as reached, which is ``add``."""
        split = int(np.searchsorted(losses, 0.0, side="right"))
        if split == 0:
            return self.remove.survival(losses)
        low = self.add.survival(losses[:split])
        if split == losses.size:
            return low
        high = self.remove.survival(losses[split:])
        return Survival(
            p=np.concatenate((low.p, high.p)),
            q=np.concatenate((low.q, high.q)),
            relative=np.concatenate((low.relative, high.relative)),
            loss_error=max(low.loss_error, high.loss_error),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses between ``edges``; the cell that holds zero has both laws and the atom."""
        if edges[0] >= 0.0 or edges[-1] <= 0.0:
            return self._cells_on_one_side(edges)
        split = int(np.searchsorted(edges, 0.0))
        low = self.add.cells(np.append(edges[:split], 0.0))
        high = self.remove.cells(np.insert(edges[split:], 0, 0.0))

        def joined(below: Array, above: Array, middle: float) -> Array:
            return np.concatenate((below[:split], [middle], above[2:]))

        return Cells(
            p=joined(low.p, high.p, float(low.p[split] + high.p[1]) + self.atom),
            q=joined(low.q, high.q, float(low.q[split] + high.q[1]) + self.atom),
            relative=joined(
                low.relative, high.relative, float(max(low.relative[split], high.relative[1]))
            ),
            misplaced=joined(
                low.misplaced, high.misplaced, float(max(low.misplaced[split], high.misplaced[1]))
            ),
        )

    def _cells_on_one_side(self, edges: Array) -> Cells:
        """The cells when no two edges have zero between them: one more edge, and less."""
        beyond = float(np.abs(edges).max()) + 1.0
        if edges[0] >= 0.0:
            cells, ends = self.cells(np.insert(edges, 0, -beyond)), slice(0, 2)
        else:
            cells, ends = self.cells(np.append(edges, beyond)), slice(-2, None)

        def merged(values: Array, joined: float) -> Array:
            if ends.start == 0:
                return np.insert(values[2:], 0, joined)
            return np.append(values[:-2], joined)

        return Cells(
            p=merged(cells.p, float(cells.p[ends].sum())),
            q=merged(cells.q, float(cells.q[ends].sum())),
            relative=merged(cells.relative, float(cells.relative[ends].max())),
            misplaced=merged(cells.misplaced, float(cells.misplaced[ends].max())),
        )
