"""E[e^{sL}] of one release at complex s, by a rule on z with a bound of its error.

The integrand is analytic in z, so the Clenshaw-Curtis rule needs some hundred places where a
lattice of losses needs thousands. The integrand on an ellipse around the range of places bounds its
error. Places outside the range are left out, and their masses are known.

Reference: docs/theorems/direct-inversion.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw, RevealedMixtureLaw
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Atoms, LossLaw
from affidavit.accountants.fourier.schedules import ExtrapolatedLaw

Complex = NDArray[np.complex128]

POINTS = tuple(n * 2**k for k in range(8) for n in (96, 128))
"""Numbers of intervals of the rules; a test compares their weights with 40 digits."""
_MAX_WORK = 50_000_000
"""Frequencies times intervals."""
MAX_SAMPLING_PROBABILITY = 0.9
"""Near 1 the loss of an unlikely place is a small difference of large numbers."""
_ELLIPSE_CELLS, _DENSITY_CELLS = 48, 128
"""Cells on which an integrand on an ellipse is bounded, and cells of a density."""
_CHUNK_TERMS = 256
"""Terms that are summed before others are added."""
_ELLIPSE_EDGES = np.linspace(-1.0, 1.0, _ELLIPSE_CELLS + 1)
_ELLIPSE_HEIGHTS = np.sqrt(1.0 - np.minimum(_ELLIPSE_EDGES[1:] ** 2, _ELLIPSE_EDGES[:-1] ** 2))
"""Ends of the cells, and the largest height of an ellipse over each, in units of its half axes."""
_ELLIPSE_SHARES = 0.55 ** np.arange(7)
"""Ellipses that are tried, as shares of the widest."""
_SQRT_TAU = math.sqrt(2 * math.pi)


class Unanswered(Exception):
    """The method's errors would be too large, or its work."""


@lru_cache(maxsize=len(POINTS))
def rule(intervals: int) -> tuple[Array, Array]:
    """Return increasing nodes and weights of the Clenshaw-Curtis rule on [-1, 1].

    ``intervals`` is even; both arrays have shape (intervals + 1,).

    >>> nodes, weights = rule(8)
    >>> abs(float(weights @ nodes**8) - 2 / 9) < 1e-15
    True
    """
    half = intervals // 2
    sines = np.sin(math.pi / intervals * np.arange(half + 1))
    odd = np.zeros(2 * intervals)  # and odd about its middle: its transform is one by sines
    odd[1:intervals:2] = 1.0 / np.arange(1, intervals, 2)
    odd[intervals + 1 :] = -odd[intervals - 1 : 0 : -1]
    # The weights of Fejér's second rule, of one sign, corrected for the last cosine.
    weights = np.empty(half + 1)
    weights[0] = end = 1.0 / (intervals**2 - 1)
    weights[1:] = 2.0 / intervals * sines[1:] * -np.fft.rfft(odd).imag[1 : half + 1]
    weights[1::2] -= 2 * end
    weights[2::2] += 2 * end
    nodes = np.sin(math.pi / (2 * intervals) * np.arange(-intervals, intervals + 1, 2))
    weights = np.append(weights, weights[-2::-1])
    return nodes, weights


@dataclass(frozen=True, slots=True)
class Transform:
    """One law's transform at an order λ and frequencies θ, and its moments at given orders.

    ``logs`` (F,) are log of E[e^{(λ+iθ)(L-c)}] over its value at θ = 0, with c the ``centre``
    (nats), and ``errors`` bound the errors of these quotients. ``log_moments`` (K,) are
    log E[e^{oL}] at each order o, and ``moment_errors`` bound their relative errors.
    """

    logs: Complex
    errors: Array
    log_moments: Array
    moment_errors: Array
    centre: float


@dataclass(frozen=True, slots=True)
class AnalyticPart:
    """A law on the places between ``low`` and ``high``; ``outside`` are P's and Q's masses beyond.

    With A = 1 - q and B(x) = q e^{μx - μ²/2} a loss is log(A + B(z)), minus log(A + B(-z)), or
    the sum of the two.
    """

    law: NormalMixtureLaw
    low: float
    high: float

    @classmethod
    def of(cls, law: NormalMixtureLaw, rare: float) -> AnalyticPart:
        """Return ``law`` without the places of probability ``rare`` or so on either side.

        Raises ``Unanswered`` for sampling probabilities near 1.
        """
        if law.kind != "gaussian" and law.sampling_probability > MAX_SAMPLING_PROBABILITY:
            raise Unanswered
        ends = [(mean, -float(ndtri(min(0.3, rare / weight)))) for weight, mean in law.p_mixture]
        # Rounded outward, so that plans of a sweep share the same places.
        low = math.floor(2 * min(mean - reach for mean, reach in ends)) / 2
        high = math.ceil(2 * max(mean + reach for mean, reach in ends)) / 2
        return cls(law, low, high)

    @property
    def outside(self) -> tuple[float, float]:
        """P's and Q's masses beyond the range, rounded up."""
        p, q = (
            sum(w * float(ndtr(self.low - m) + ndtr(m - self.high)) for w, m in mixture)
            for mixture in (self.law.p_mixture, self.law.q_mixture)
        )
        return p * (1 + 1e-9), q * (1 + 1e-9)

    @property
    def half(self) -> float:
        """Half the length of the range."""
        return (self.high - self.low) / 2

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.high + self.low) / 2

    def places(self, points: int) -> Array:
        """Return the nodes of a rule in z, (points + 1,)."""
        return self.middle + self.half * rule(points)[0]

    def atoms(self, points: int) -> Atoms:
        """Return the law on these places with the weights of the rule, which sum to about one."""
        z = self.places(points)
        density = sum(w * np.exp(-((z - m) ** 2) / 2) for w, m in self.law.p_mixture)
        weights = rule(points)[1] * (self.half / _SQRT_TAU * density)
        return Atoms(losses=self.law.loss(z), weights=weights)

    def log_errors(self, orders: Array, thetas: Array, bar: float) -> tuple[Array, int]:
        """Return log of a bound of the rule's error in E[e^{sL}], s = o ± iθ of each pair, (K,).

        The second result is the least number of intervals at which all are at most ``bar``. Raises
        ``Unanswered`` if that is too large. On an ellipse whose foci are the ends of the
        range, at an angle φ = μ|y| < π,

            |A + B e^{iφ}| <= A + B,    >= |A + B e^{iφ}| if φ <= π/2,    >= (A + B) cos(φ/2),

        and its argument is at most that at φ <= π/2, or both φ and, for B < A, arcsin(B / A). All
        of these are monotone in x and φ, so the ends of a cell bound them.
        """
        law, mu, q = self.law, self.law.mu, self.law.sampling_probability
        b = min(6.0, 2.6 / mu) * _ELLIPSE_SHARES[:, None]
        radius = b / self.half + np.hypot(1.0, b / self.half)
        reach = self.half * (radius + 1 / radius) / 2
        edges = self.middle + reach * _ELLIPSE_EDGES
        across = b * _ELLIPSE_HEIGHTS
        density = np.zeros(across.shape)
        for weight, mean in law.p_mixture:
            ends = np.exp(-((edges - mean) ** 2) / 2)
            density += weight * np.maximum(ends[:, 1:], ends[:, :-1])
        angle = mu * across
        steep, slant = angle > math.pi / 2, np.cos(angle / 2)
        cos, sin = np.cos(angle), np.sin(angle)

        def bounds(low: Array, high: Array) -> tuple[Array, Array, Array]:
            """Return log of the largest and of the least size, and the largest argument."""
            a, least, most = 1 - q, self._big(low), self._big(high)
            size = np.where(steep, (a + least) * slant, np.hypot(a + least * cos, least * sin))
            beyond = np.where(most < a, np.arcsin(np.minimum(1.0, most / max(a, 1e-16))), angle)
            turned = np.where(steep, beyond, np.arctan2(most * sin, a + most * cos))
            return np.log(a + most), np.log(size), turned

        highest, lowest, turn = np.zeros((3, *angle.shape))
        if law.kind != "add":
            highest, lowest, turn = bounds(edges[:, :-1], edges[:, 1:])
        if law.kind in ("add", "replace"):
            most, least, argument = bounds(-edges[:, 1:], -edges[:, :-1])
            highest, lowest, turn = highest - least, lowest - most, turn + argument
        with np.errstate(divide="ignore"):
            # Between two places a normal density exceeds both of its values there by at most this.
            here = np.log(density) + across * across / 2 + (2 * reach / _ELLIPSE_CELLS) ** 2 / 8
        above, theta = np.maximum(orders, 0.0), thetas[:, None, None]
        below = orders - above
        grown = here + above[:, None, None] * highest + below[:, None, None] * lowest + theta * turn
        largest = grown.max(axis=2) + np.log(4.2 * self.half / _SQRT_TAU / (radius[:, 0] - 1))
        rates = np.log(radius[:, 0])
        needed = (largest.max(axis=0) - bar) / rates
        best = int(np.argmin(needed))
        points = next((n for n in POINTS if n >= needed[best]), None)
        if points is None:
            raise Unanswered
        return largest[:, best] - points * rates[best], points

    def layers(self, order: float, log_moment: float) -> tuple[Array, Array]:
        """Return half lengths (nats) and weights of uniform parts of e^{order · L - log_moment} P.

        Both have shape (L,). The density of the loss is that of z over the slope of the loss. On a
        cell it is at least the least of the first, at either end, over the largest of the second.
        If these fall on either side of the largest, the part above a height is one interval.
        """
        z = np.linspace(self.low, self.high, _DENSITY_CELLS + 1)
        losses = self.law.loss(z)
        density = np.zeros(_DENSITY_CELLS)
        for weight, mean in self.law.p_mixture:
            ends = np.exp(-((z - mean) ** 2) / 2)
            density += (weight / _SQRT_TAU) * np.minimum(ends[1:], ends[:-1])
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            heights = np.exp(order * losses[:-1] - log_moment) * density / self._steepest(z)
        heights = np.where(heights < np.inf, heights, 0.0) * (1 - 1e-9)
        top = int(np.argmax(heights))
        heights[: top + 1] = np.minimum.accumulate(heights[top::-1])[::-1]
        heights[top:] = np.minimum.accumulate(heights[top:])
        highest = np.argsort(-heights)
        widths, heights = np.cumsum(np.diff(losses)[highest]), heights[highest]
        return widths / 2, (heights - np.append(heights[1:], 0.0)) * widths

    def _big(self, x: Array) -> Array:
        """Return B(x)."""
        mu, q = self.law.mu, self.law.sampling_probability
        return np.asarray(q * np.exp(np.minimum(mu * x - mu * mu / 2, 300.0)))

    def _steepest(self, z: Array) -> Array:
        """Return the largest slope of the loss between increasing places ``z``."""
        mu, a = self.law.mu, 1 - self.law.sampling_probability
        up, down = self._big(z[1:]), self._big(-z[:-1])
        match self.law.kind:
            case "gaussian":
                return np.full(z.size - 1, mu)
            case "remove":
                return np.asarray(mu * up / (a + up))
            case "add":
                return np.asarray(mu * down / (a + down))
            case "replace":
                return np.asarray(mu * (up / (a + up) + down / (a + down)))

    def roundings(self, points: int, losses: Array) -> tuple[Array, Array]:
        """Return roundings of a node's share, relative to it, and of its loss, (points + 1,) each.

        Both are in units of ``UNIT_ROUNDOFF``, the second in nats. The slope of a loss is
        monotone in z, or even and monotone in \\|z\\| between μ and 2μ, so twice
        the larger of the mean slopes beside a place bounds it.
        """
        mu, z = self.law.mu, self.places(points)
        reach = self.half + abs(self.middle) + mu
        slopes = np.diff(losses) / np.diff(z)
        beside = np.maximum(np.append(slopes, slopes[-1]), np.append(slopes[:1], slopes))
        apart = 480.0 * self.law.sampling_probability if self.law.kind == "replace" else 0.0
        moved = 32.0 * np.abs(losses) + 8.0 * reach * np.minimum(2.0 * beside, 2.0 * mu) + apart
        return 128.0 + 4.0 * reach * (np.abs(z) + mu), moved


@dataclass(frozen=True, slots=True)
class AnalyticLaw:
    """A weighted sum of laws on ranges of places; some weights may be negative.

    It is nowhere negative, and nowhere less than the weighted sum ``least``.
    """

    parts: tuple[tuple[AnalyticPart, float], ...]
    least: tuple[tuple[AnalyticPart, float], ...]

    @classmethod
    def of(cls, law: LossLaw, rare: float) -> AnalyticLaw:
        """Return ``law`` without the places of probability ``rare`` or so on either side.

        Raises ``Unanswered`` for laws that are no such sum, and sampling probabilities near 1.
        """
        match law:
            case NormalMixtureLaw():
                own = ((AnalyticPart.of(law, rare), 1.0),)
                return cls(own, own)
            case RevealedMixtureLaw(first=first, second=second, weight=weight):
                rest = 1 - weight
                both = (cls.of(first, rare / rest), rest), (cls.of(second, rare / weight), weight)
                return cls(
                    tuple((part, w * own) for one, w in both for part, own in one.parts),
                    tuple((part, w * own) for one, w in both for part, own in one.least),
                )
            case ExtrapolatedLaw(lower=lower, near=near, share=share) as line:
                above, below = AnalyticPart.of(near, rare), AnalyticPart.of(lower, rare)
                # Where the law of ``near`` is left out, nothing is taken from it.
                low, high = lower.inverse_loss(near.loss(np.array([above.low, above.high])))
                below = replace(below, low=max(low, below.low), high=min(high, below.high))
                return cls(((above, 1 + share), (below, -share)), ((above, line.min_density),))
            case _:
                raise Unanswered

    @property
    def outside(self) -> tuple[float, float]:
        """Upper bounds of P's and Q's masses outside of the parts."""
        p = q = 0.0
        for part, weight in self.parts:
            beyond = part.outside
            p, q = p + abs(weight) * beyond[0], q + abs(weight) * beyond[1]
        return p, q

    @property
    def signed(self) -> bool:
        """Whether a part is subtracted, so that its left-out places may add to the law."""
        return any(weight < 0 for _, weight in self.parts)

    def atoms(self, points: int) -> Atoms:
        """Return the law on the places of rules with ``points`` intervals, unordered."""
        atoms = [(part.atoms(points), weight) for part, weight in self.parts]
        return Atoms(
            losses=np.concatenate([one.losses for one, _ in atoms]),
            weights=np.concatenate([weight * one.weights for one, weight in atoms]),
        )

    def transform(self, orders: Array, thetas: Array, bar: float) -> Transform:
        """Return the transform at the first of ``orders``, at all ``thetas``.

        ``orders`` are (K,) and ``thetas``, multiples of the second, (F,), both in 1/nat. ``bar`` is
        log of the allowed error of the rule, relative to a moment of about 1. Raises ``Unanswered``
        for too much work.
        """
        turned = np.zeros(orders.size)
        turned[0] = thetas[-1]
        rules = [
            (part, weight, *part.log_errors(orders, turned, bar - math.log(abs(weight))))
            for part, weight in self.parts
        ]
        if thetas.size * sum(points for *_, points in rules) > _MAX_WORK:
            raise Unanswered
        nodes = [(part.atoms(points), weight) for part, weight, _, points in rules]
        losses = np.concatenate([atoms.losses for atoms, _ in nodes])
        weights = np.concatenate([weight * atoms.weights for atoms, weight in nodes])
        own, moved = np.concatenate(
            [
                part.roundings(points, atoms.losses)
                for (part, *_, points), (atoms, _) in zip(rules, nodes, strict=True)
            ],
            axis=1,
        )
        logs = np.logaddexp.reduce([log + math.log(abs(weight)) for _, weight, log, _ in rules])
        exponents = np.outer(orders, losses)
        peaks = exponents.max(axis=1)
        exponents -= peaks[:, None]
        shares = np.exp(exponents) * weights
        totals = shares.sum(axis=1)
        log_moments = peaks + np.log(totals)
        shares /= totals[:, None]
        own = own + np.abs(exponents) + np.abs(orders)[:, None] * moved
        tilted, sizes = shares[0], np.abs(shares)
        rounded = (sizes * own).sum(axis=1)
        sums = sizes.sum(axis=1)
        errors = np.exp(np.minimum(logs - log_moments, 0.0))
        centre = float(tilted @ losses)
        apart = losses - centre
        far = np.abs(apart)
        # Each quotient is one plus a sum of shares times e^{iθ(L-c)} - 1 of at most this size.
        size = np.minimum(2.0 * sums[0], thetas * float(sizes[0] @ far))
        roundings = (8.0 * (2 * _CHUNK_TERMS + losses.size / _CHUNK_TERMS) + 64.0) * size
        roundings += np.minimum(
            2.0 * (1.0 + sums[0]) * rounded[0],
            thetas * float((sizes[0] * far) @ (own[0] + rounded[0])),
        )
        powers = 8.0 * (1 + math.log2(thetas.size))
        roundings += thetas * float(sizes[0] @ (moved + powers * far))
        one = float(thetas[1]) if thetas.size > 1 else 0.0
        return Transform(
            _log1p(_turned_sums(tilted, one * apart, thetas.size)),
            1.01 * (2.0 * errors[0] + UNIT_ROUNDOFF * roundings),
            log_moments,
            errors + UNIT_ROUNDOFF * (128.0 * sums + rounded),
            centre,
        )

    def layers(self, order: float, log_moment: float) -> tuple[Array, Array]:
        """Return half lengths (nats) and weights of uniform parts of the tilted law; (L,) each."""
        layers = [
            part.layers(order, log_moment - math.log(weight))
            for part, weight in self.least
            if weight > 0
        ]
        halves, weights = zip(*layers, strict=True)
        return np.concatenate(halves), np.concatenate(weights)


def _turned_sums(shares: Array, angles: Array, count: int) -> Complex:
    """Return Σ share · (e^{ikx} - 1) over the angles x at each k < ``count``.

    Sums are of chunks of terms and then of these sums, so that rounding grows little with their
    number.
    """
    if count == 1:
        return np.zeros(1, dtype=np.complex128)
    block = math.isqrt(count) + 1
    sums = np.zeros((-(-count // block), block), dtype=np.complex128)
    for part in _chunks(angles.size):
        sines = np.sin(angles[part] / 2)
        first = 2.0 * sines * (1j * np.cos(angles[part] / 2) - sines)
        inner = _multiples(first, block + 1)
        outer = _multiples(inner[-1], len(sums)) * shares[part]
        sums += outer @ (1.0 + inner[:-1]).T + inner[:-1] @ shares[part]
    return sums.ravel()[:count]


def _multiples(first: Complex, count: int) -> Complex:
    """Return e^{ikx} - 1 at k < ``count``, (count, n), from its values at k = 1.

    The value at x + y is e(1 + f) + f, with the values e at x and f at y.
    """
    result = np.zeros((count, first.size), dtype=np.complex128)
    size, last = 1, first
    while size < count:
        more = result[size : 2 * size]
        np.multiply(result[: len(more)], 1.0 + last, out=more)
        more += last
        size, last = 2 * size, last * (2.0 + last)
    return result


def _chunks(size: int) -> Iterator[slice]:
    parts = max(1, size // _CHUNK_TERMS)
    ends = [size * k // parts for k in range(parts + 1)]
    return map(slice, ends[:-1], ends[1:])


def _log1p(x: Complex) -> Complex:
    """Return log(1 + x), good to some roundings of x."""
    result = np.log(1.0 + x)
    near = np.abs(x) < 0.5
    small = x[near]
    result.real[near] = 0.5 * np.log1p(small.real * (2.0 + small.real) + small.imag**2)
    return result
