"""Balls that contain φ(s + it) = E e^{(s+it)L} of one release, at t = 0, η, 2η, ….

L is the privacy loss of the release's dominating pair under P. The pairs are mixtures of two
unit normals, so that with z = s + it, n the unit normal density and u, v = ±μx - μ²/2

    φ(z) = ∫ n(x) a(x)^{z+1} b(x)^{-z} dx,   a = 1-q + q e^u or 1,   b = 1-q + q e^v or 1,

which the trapezoid rule sums. docs/theorems/checker.md proves the bounds of its error; the
names below are those of that page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flint import acb, acb_mat, arb, ctx

if TYPE_CHECKING:
    from collections.abc import Iterator

PRECISION = 96
"""Bits of the balls."""
MOST_PRODUCTS = 60_000_000
"""Quadrature points times frequencies of one law, a few seconds on one core."""
MOST_POINTS = 100_000
_CUT = 48
"""The integrand is cut where it is below e^-``_CUT``, so that the cut hardly costs."""
_CELL = 0.0625
"""Width of the cells in which the integrand is bounded off the real line."""


class Unproved(Exception):
    """What the checker does not prove, with a stable code."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.code, self.message, self.remedy = code, message, remedy


@dataclass(frozen=True, kw_only=True, slots=True)
class Quadrature:
    """How a witness wants φ summed: step and half-width of the strip, in standard deviations."""

    step: float
    strip: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A release's pair: ``above`` and ``below`` say whether a and b are mixtures or 1.

    ``distance`` is how far apart the means are, in clip norms; μ = distance / noise multiplier.
    """

    above: bool
    below: bool
    noise_multiplier: float
    probability: float
    distance: int = 1

    @cached_property
    def _mu(self) -> arb:
        return arb(self.distance) / arb(self.noise_multiplier)

    def moments(self, s: arb, end: arb, rule: Quadrature) -> Moments:
        """Moments φ(s + it) for 0 ≤ t ≤ ``end``; raises ``Unproved`` if the rule gives none."""
        step, strip = arb(rule.step), arb(rule.strip)
        if not (step > 0 and strip > 0 and 2 * self._mu * strip < arb.pi()):
            raise _bad("the strip must lie between 0 and π/(2μ), and the step above 0")
        reach = arb(2 * _CUT).sqrt()
        left = _ceiling(reach / step)
        right = _ceiling((reach + self._shift(s)) / step)
        if left + right > MOST_POINTS:
            raise _bad("the quadrature has too many points")
        error = self._cut(s, step * left, step * right) + self._rule_error(s, end, step, strip)
        return Moments(points=list(self._points(s, step, left, right)), end=end, error=error)

    def _points(self, s: arb, step: arb, left: int, right: int) -> Iterator[tuple[arb, arb]]:
        """Weights n a^{s+1} b^{-s} step and losses log a/b of the points of the trapezoid rule."""
        scale = step / (2 * arb.pi()).sqrt()
        for j in range(-left, right + 1):
            x = step * j
            a, b = self._log_a(x), self._log_b(x)
            yield scale * ((s + 1) * a - s * b - x * x / 2).exp(), a - b

    def _log_a(self, x: arb) -> arb:
        return self._log(self._mu * x) if self.above else arb(0)

    def _log_b(self, x: arb) -> arb:
        return self._log(-self._mu * x) if self.below else arb(0)

    def _log(self, exponent: arb) -> arb:
        q = arb(self.probability)
        return (q * (exponent - self._mu**2 / 2).expm1()).log1p()

    def _shift(self, s: arb) -> arb:
        """Where the tilt moves the part of the integrand that grows with a."""
        return (s + 1) * self._mu if self.above else arb(0)

    def _floor(self, s: arb) -> arb:
        """(1-q)^{-s}, at least b^{-s}, or 1 where b is 1."""
        return (1 - arb(self.probability)) ** -s if self.below else arb(1)

    def _tail(self, s: arb, left: arb, right: arb) -> arb:
        """At least ∫ n a^{s+1} b^{-s} over x < -left and x > right."""
        upper, mu = _above(right), self._mu
        if self.above:
            most = arb(self.probability)
            most += (1 - most) * (mu**2 / 2 - mu * right).exp()
            lifted = ((s + 1) * most.log() + s * (s + 1) * mu**2 / 2).exp()
            upper = lifted * _above(right - self._shift(s))
        return self._floor(s) * (_above(left) + upper)

    def _cut(self, s: arb, left: arb, right: arb) -> arb:
        """At least what the points beyond ``left`` and ``right`` would add to the sum."""
        if not right > self._shift(s):
            raise _bad("the quadrature ends before the integrand decreases")
        return self._tail(s, left, right)

    def _rule_error(self, s: arb, t: arb, step: arb, strip: arb) -> arb:
        """2M / (e^{2πa/h} - 1): at least the trapezoid rule's error for every |Im z| ≤ ``t``."""
        mu, q = self._mu, arb(self.probability)
        sine, cosine = (mu * strip).sin(), (mu * strip).cos()
        turn = t * mu * strip * ((1 if self.above else 0) + (1 if self.below else 0))
        end = (2 * (turn + 2 * _CUT)).sqrt() + self._shift(s)
        cells = _ceiling(end / _CELL)
        if cells > 20_000:
            raise _bad("the strip is too wide for such frequencies")
        total = turn.exp() * self._tail(s, _CELL * arb(cells), _CELL * arb(cells))
        for cell in range(-cells, cells):
            low, high = _CELL * arb(cell), _CELL * arb(cell + 1)
            nearest = max(cell, -(cell + 1), 0) * arb(_CELL)
            exponent = -nearest * nearest / 2
            if self.above:
                exponent += (s + 1) * self._log(mu * high)
                exponent += t * _smaller(mu * strip, _odds(q, mu * high - mu**2 / 2) * sine)
            if self.below:
                least = 1 - q + q * cosine * (-mu * high - mu**2 / 2).exp()
                exponent -= s * least.log()
                exponent += t * _smaller(mu * strip, _odds(q, -mu * low - mu**2 / 2) * sine)
            total += _CELL * exponent.exp() / (2 * arb.pi()).sqrt()
        bound = (strip * strip / 2).exp() * total
        return 2 * bound / (2 * arb.pi() * strip / step).expm1()


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """A law's moments: weights and losses of the points, and what their sum may be wrong by."""

    points: list[tuple[arb, arb]]
    end: arb
    error: arb

    def at(self, first: arb, gap: arb, count: int) -> list[acb]:
        """Balls of φ(s + i(first + k gap)) for k = 0..count-1, as a product of two matrices.

        Raises ``Unproved`` beyond ``end``, or where there are too many.
        """
        if not first + gap * (count - 1) <= self.end or len(self.points) * count > MOST_PRODUCTS:
            raise _bad("the frequencies are too high or too many")
        stride = max(1, round(count**0.5))
        rows = -(-count // stride)
        small, large = [], []
        for weight, loss in self.points:
            start = weight * acb(0, first * loss).exp()
            small.append([start * power for power in _powers(acb(0, gap * loss).exp(), stride)])
            large.append(_powers(acb(0, gap * loss * stride).exp(), rows))
        product = acb_mat([list(row) for row in zip(*large, strict=True)]) * acb_mat(small)
        ball = acb(arb(0, self.error.upper()), arb(0, self.error.upper()))
        return [product[k // stride, k % stride] + ball for k in range(count)]


def _powers(ratio: acb, count: int) -> list[acb]:
    """The first powers, each from two halves: rotated again and again, a ball would grow."""
    result = [acb(1), ratio]
    for k in range(2, count):
        result.append(result[k // 2] * result[k - k // 2])
    return result[:count]


def _odds(q: arb, exponent: arb) -> arb:
    return q / (1 - q) * exponent.exp()


def _smaller(left: arb, right: arb) -> arb:
    return left if left < right else right


def _above(x: arb) -> arb:
    """The standard normal mass above ``x``."""
    return (x / arb(2).sqrt()).erfc() / 2


def _ceiling(x: arb) -> int:
    if not x < 10_000_000:
        raise _bad("the quadrature has too many points")
    return int(float(x.upper())) + 2


def _bad(message: str) -> Unproved:
    return Unproved("bad_witness", f"The witness proves nothing: {message}.", "Search again.")


def at_precision() -> None:
    """Set the precision of every ball that follows in this process."""
    ctx.prec = PRECISION
