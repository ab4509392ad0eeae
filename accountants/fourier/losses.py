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

The moments (``Atoms``) steer: they choose tilts, steps and windows, and no bound rests
on them.

References: [1] Zhu, Dong and Wang, arXiv:2106.08567, dominating pairs. [2] docs/theorems/
poisson-add-remove.md, poisson-replace-one.md, without-replacement.md for why these pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-53
_Z_REACH = 12.5
"""Normal deviations kept by the moments; mass beyond is below 1e-35."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """P(L >= l) and Q(L >= l) on a grid of l, with bounds of their errors."""

    p: Array
    q: Array
    relative: Array
    loss_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Atoms:
    """The law of the loss under P as finitely many atoms, accurate but not a bound.

    ``losses`` increase; ``weights`` sum to one.
    """

    losses: Array
    weights: Array

    def cut(self, top: float) -> Atoms:
        """The law without the losses above ``top``, not renormalised."""
        keep = int(np.searchsorted(self.losses, top, side="right"))
        return Atoms(losses=self.losses[:keep], weights=self.weights[:keep])

    def log_moment(self, order: float) -> float:
        """log E[exp(order · L)]."""
        exponents = order * self.losses
        peak = float(exponents.max())
        return peak + math.log(float(self.weights @ np.exp(exponents - peak)))

    def tilted(self, order: float) -> Array:
        """The weights of the law tilted by exp(order · L), summing to one."""
        exponents = order * self.losses
        weights = self.weights * np.exp(exponents - exponents.max())
        return np.asarray(weights / weights.sum(), dtype=np.float64)


class LossLaw(Protocol):
    """The law of one release's privacy loss in one direction of the adjacency."""

    @property
    def ceiling(self) -> float:
        """No loss exceeds this; infinite if unbounded."""
        ...

    def atoms(self) -> Atoms:
        """The law under P, for steering."""
        ...

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses``."""
        ...

    def top(self, probability: float) -> float:
        """A loss that is exceeded under P with about this small probability."""
        ...


Kind = Literal["gaussian", "remove", "add", "replace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalMixtureLaw:
    """The loss law of one Gaussian release, subsampled or not.

    With μ = ``distance`` / ``noise_multiplier`` and z in noise standard deviations:

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
    def _mu(self) -> float:
        return self.distance / self.noise_multiplier

    @property
    def ceiling(self) -> float:
        """No loss exceeds this: -log(1-q), rounded up, for ``add``, else infinity."""
        if self.kind == "add":
            return -math.log1p(-self.sampling_probability) * (1 + 1e-14)
        return math.inf

    def loss(self, z: Array) -> Array:
        """The loss at ``z``."""
        mu, q = self._mu, self.sampling_probability
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

    def atoms(self) -> Atoms:
        """The law under P by the trapezoid rule, which is exact to rounding here.

        The integrand is analytic in a strip of half-width π/(2μ) at least, so a step of
        a tenth of the strip or of a standard deviation leaves less than 1e-17.
        """
        mu = self._mu
        step = min(0.1, 0.25 / mu)
        high = _Z_REACH + (mu if self.kind != "add" else 0.0)
        z = np.arange(-_Z_REACH, high + step, step)
        weights = _density(z, self._p_mixture())
        return Atoms(losses=self.loss(z), weights=weights / weights.sum())

    def top(self, probability: float) -> float:
        """The loss at a z above which P has about this probability."""
        low, high = 0.0, 40.0 + self._mu
        for _ in range(60):
            middle = (low + high) / 2
            tail = sum(w * float(ndtr(m - middle)) for w, m in self._p_mixture())
            low, high = (middle, high) if tail > probability else (low, middle)
        return float(self.loss(np.array([high]))[0])

    def survival(self, losses: Array) -> Survival:
        """Both survival functions; z is cut at ±38, beyond which P and Q vanish."""
        mu, q = self._mu, self.sampling_probability
        with np.errstate(over="ignore", divide="ignore"):
            # Infinities are meant: below its infimum a loss has no z.
            z = self.place(losses)
        reach = 38.0 + mu
        inside = np.clip(z, -reach, reach)
        normal = {
            m: ndtr(m - inside) for m in {m for _, m in (*self._p_mixture(), *self._q_mixture())}
        }
        p = sum(w * normal[m] for w, m in self._p_mixture())
        q_tail = sum(w * normal[m] for w, m in self._q_mixture())
        # ndtr, the sum of two positive terms and the rounding of m - z: the last moves
        # ndtr by a hazard of at most |z| + 1 times an ulp of |z|.
        size = np.maximum(inside, 0.0) + mu + 1.0
        relative = UNIT_ROUNDOFF * (16.0 + 4.0 * size * size)
        span = float(max(abs(losses[0]), abs(losses[-1])))
        spread = span + abs(math.log(q)) + mu * mu
        return Survival(
            p=np.asarray(p),
            q=np.asarray(q_tail),
            relative=relative,
            loss_error=UNIT_ROUNDOFF * (32.0 + 16.0 * spread),
        )

    def place(self, losses: Array) -> Array:
        """The z at which the loss is ``losses`` (increasing); infinite outside its range."""
        mu, q = self._mu, self.sampling_probability
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

    def _p_mixture(self) -> tuple[tuple[float, float], ...]:
        q, mu = self.sampling_probability, self._mu
        match self.kind:
            case "gaussian":
                return ((1.0, mu),)
            case "remove" | "replace":
                return ((1 - q, 0.0), (q, mu))
            case "add":
                return ((1.0, 0.0),)

    def _q_mixture(self) -> tuple[tuple[float, float], ...]:
        q, mu = self.sampling_probability, self._mu
        match self.kind:
            case "gaussian" | "remove":
                return ((1.0, 0.0),)
            case "add" | "replace":
                return ((1 - q, 0.0), (q, -mu))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseOfBothLaw:
    """The law whose curve is the larger, at each α, of a ``remove`` law and its reverse.

    That is ``remove`` where the loss is positive, ``add`` where it is negative, and an
    atom at zero where the two curves cross with a kink: the dominating law of sampling
    without replacement (docs/theorems/without-replacement.md). No single pair of data
    sets need attain it, so it serves upper bounds only.
    """

    remove: NormalMixtureLaw
    add: NormalMixtureLaw

    @property
    def ceiling(self) -> float:
        """No finite ceiling: the positive part is that of ``remove``."""
        return math.inf

    def atoms(self) -> Atoms:
        """The law under P, for steering."""
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
        """Both survival functions; losses too near zero to tell their side are put below it.

        At zero the atom counts as reached, which is the side of ``add``.
        """
        margin = 4.0 * self.remove.survival(losses[[0, -1]]).loss_error
        moved = np.where(np.abs(losses) <= margin, -margin, losses)
        split = int(np.searchsorted(moved, 0.0))
        if split == 0:
            return self.remove.survival(moved)
        low = self.add.survival(moved[:split])
        parts = [low]
        if split < moved.size:
            parts.append(self.remove.survival(moved[split:]))
        return Survival(
            p=np.concatenate([part.p for part in parts]),
            q=np.concatenate([part.q for part in parts]),
            relative=np.concatenate([part.relative for part in parts]),
            loss_error=max(part.loss_error for part in parts) + 2.0 * margin,
        )


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
