"""δ of a composition of Gaussian releases by inverting its transform, without a lattice.

With s = λ + iθ and M(s) = Π E[e^{sL}]^T over the releases, for any λ > 0,

    v(ε) = e^{λε} δ(ε) = (1/2π) ∫ M(s) e^{-iθε} / (s (s + 1)) dθ.

The sum over θ = 2πk/W in place of the integral is exactly Σ_n v(ε + nW). If many releases are
composed, M falls fast and some dozens of frequencies remain, so that the bracket is as narrow as
rounding allows.

Errors bounded here, each added (upper) or subtracted (lower):

* places left out: their probability counts as an infinite loss;
* the transforms (``quadrature.py``), T-fold;
* the other images, n ≠ 0, by Chernoff's bound. Those below ε may be 1 - e^x and little more: then
  that is subtracted, and the remainder bounded;
* the frequencies left out: uniform laws that are parts of a law bound its transform, and that bound
  falls with θ;
* rounding of phases and sums.

If these are too large, as for few releases, the method has no answer, and a lattice gives one.

Reference: docs/theorems/direct-inversion.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.dominating_pairs import Direction
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array
from affidavit.accountants.fourier.quadrature import POINTS, AnalyticLaw, Unanswered
from affidavit.accountants.fourier.tilting import (
    Composition,
    Saddle,
    at_delta,
    at_epsilon,
    at_order,
    bounded_exp,
    log_peak,
)

Releases = Sequence[tuple[AnalyticLaw, int]]

_LEFT_OUT_SHARE = 1e-9
"""Share of δ that the places, images and frequencies left out may each have."""
_MAX_FREQUENCIES = 6000
_ORDER_LADDER, _MAX_ORDERS_ONLY = 2.0 ** (np.arange(-14, 8) / 2), 5
"""Orders in units of the saddle's, and the number of the highest that are not tried as tilts."""
_TRANSFORM_ROUNDING = 2e-8
"""About a million times the rounding of a release's transform."""
_LAST_FREQUENCIES = 3.0 * 2.0 ** (np.arange(40) / 5)
"""Frequencies that may be the last, in units of one over the tilted deviation."""
_FREQUENCIES_AT_ONCE = 8
_SINC_MONOTONE_END, _MAX_SINC_BEYOND = 2.6, 0.2173
"""sin(x)/x decreases up to the first, and is at most the second beyond it."""
_NARROW_WIDTH = 1e-5
"""Relative width of a bracket from which on a better starting ε does not pay."""
_FAR_EPSILON_SHARE = 0.8
"""Share of another direction's ε below which a direction is ruled out without a transform."""
_MAX_ROUNDS = 3
_MAX_MOMENT_ERROR = 1e-7
"""Largest difference of the log of a moment from the moment of which layers are shares."""


class Inversion:
    """δ(ε) of a composition near a saddle's ε (nats), where it is about ``delta``.

    Guarantees
    ----------
    * ``upper(ε)`` is at least, and ``lower(ε)`` at most, the hockey-stick curve at e^ε of the
      composition of the laws, for every ε; far from the saddle's they are loose.
    """

    def __init__(
        self, releases: Releases, atoms: Composition, saddle: Saddle, delta: float
    ) -> None:
        """Compute the transform; raises ``Unanswered`` if an error or the work is too large."""
        order, above, below, width = _window(atoms, saddle, delta)
        self._width = 1.002 * width
        log_moments = [one.log_moment(order) for one, _ in atoms]
        log_scale = sum(count * m for (_, count), m in zip(atoms, log_moments, strict=True))
        room = math.log(_LEFT_OUT_SHARE * delta) - log_scale + order * saddle.epsilon
        deviation = math.sqrt(at_order(atoms, order).variance)
        theta, left_out = _last_frequency(releases, log_moments, order, deviation, room)
        frequencies = math.ceil(theta * self._width / (2 * math.pi))
        if frequencies > _MAX_FREQUENCIES:
            raise Unanswered
        self._thetas = 2 * math.pi / self._width * np.arange(frequencies + 1, dtype=np.float64)
        steps = sum(count for _, count in releases)
        bar = min(-36.0, room + math.log(order / steps))
        orders = np.array([order, above, below])
        spectrum = np.zeros(frequencies + 1, dtype=np.complex128)
        log_sizes, wrong = np.zeros((2, frequencies + 1))
        moments, self._wrong = np.zeros((2, 3))
        self._centre = apart = 0.0
        for (law, count), about in zip(releases, log_moments, strict=True):
            transform = law.transform(orders, self._thetas, bar)
            if (
                not abs(transform.log_moments[0] - about) + transform.moment_errors[0]
                < _MAX_MOMENT_ERROR
            ):
                raise Unanswered  # the layers are shares of a smaller moment
            log, errors = count * transform.logs, transform.errors
            spectrum += log
            most = np.abs(np.exp(transform.logs)) + errors
            log_sizes += count * np.log(most)
            wrong += count * errors / most + 8 * UNIT_ROUNDOFF * np.abs(log)
            moments += count * transform.log_moments
            self._wrong += count * transform.moment_errors
            self._centre += count * transform.centre
            apart += count * abs(transform.centre)
        if not self._wrong.max() < 0.01:
            raise Unanswered
        outside = [(count, *law.outside, law.signed) for law, count in releases]
        self._outside = sum(count * p for count, p, _, _ in outside)
        self._outside_q = sum(count * q for count, _, q, _ in outside)
        self._added = sum(count * p for count, p, _, signed in outside if signed)
        self._order, self._log_moment = order, float(moments[0])
        self._sizes = sum(count * abs(m) for (_, count), m in zip(atoms, log_moments, strict=True))
        s = order + 1j * self._thetas
        kernel = np.full(s.size, 2.0 / self._width) / (s + 1)
        kernel[0] /= 2
        self._slopes = kernel * np.exp(spectrum)
        self._terms = self._slopes / s
        sizes = np.abs(kernel / s) * np.exp(log_sizes)
        wrong += UNIT_ROUNDOFF * (128.0 + s.size + 8.0 * apart * self._thetas)
        self._error = 1.1 * (float(sizes @ wrong) + bounded_exp(left_out))
        self._turned = 8.0 * UNIT_ROUNDOFF * float(sizes @ self._thetas)
        # exp(log - order · ε) is Chernoff's bound of all images on one side.
        logs = moments[1:] + self._wrong[1:] + 1e-9 * (1 + 1e-5 * np.abs(moments[1:]))
        self._images = [
            (o, float(log) + log_peak(o if o > 0 else -o - 1) - _log_expm1(abs(o - order) * width))
            for o, log in zip((above, below), logs, strict=True)
        ]
        self._known = below < 0
        self._rounded = 64 * UNIT_ROUNDOFF * (1 + (order + 1) * self._width)
        numbers = self._terms.real.sum(), self._terms.imag.sum(), self._error, *logs
        if not all(map(math.isfinite, numbers)):
            raise Unanswered

    def _read(self, epsilon: float) -> tuple[float, float]:
        """Return the sum over frequencies at ``epsilon``, and minus its slope."""
        turn = np.exp(1j * (self._centre - epsilon) * self._thetas)
        return float((self._terms @ turn).real), float((self._slopes @ turn).real)

    def _below(self, epsilon: float) -> tuple[float, float]:
        """Return Σ e^{-λnW} and Σ e^{-λnW} e^{ε-nW} over n >= 1, the images 1 - e^x below ε."""
        if not self._known:
            return 0.0, 0.0
        return (
            1 / math.expm1(self._order * self._width),
            math.exp(epsilon) / math.expm1((self._order + 1) * self._width),
        )

    def _scale(self, epsilon: float, sign: float) -> float:
        exponent = self._log_moment - self._order * epsilon
        size = 1 + self._sizes + abs(self._order * epsilon)
        return bounded_exp(
            exponent + sign * (16 * UNIT_ROUNDOFF * size + 1.1 * float(self._wrong[0]))
        )

    def upper(self, epsilon: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), at most 1."""
        total = self._read(epsilon)[0] + self._error + self._turned * abs(epsilon)
        one, other = self._below(epsilon)
        result = self._scale(epsilon, 1.0) * max(0.0, total) + self._rounded * (one + other)
        result += other - one * (1 - self._outside)
        if not result < 1.0:
            return 1.0
        return min(1.0, max(0.0, result) + self._outside * (1 + 1e-12))

    def lower(self, epsilon: float) -> float:
        """Return a lower bound of δ at ``epsilon`` (nats), at least 0."""
        total = self._read(epsilon)[0] - self._error - self._turned * abs(epsilon)
        one, other = self._below(epsilon)
        result = self._scale(epsilon, -1.0) * max(0.0, total) - self._rounded * (one + other)
        result -= one - other * (1 - self._outside_q)
        result -= sum(bounded_exp(log - o * epsilon) for o, log in self._images) + self._added
        return result if result > 0 else 0.0

    def crossing(self, delta: float, start: float) -> Bracket:
        """Return the ε (nats) at which δ(ε) crosses ``delta``, by Newton's method from ``start``.

        Raises ``Unanswered`` if it is not found, or is 0.
        """
        at = start
        for _ in range(20):
            total, slope = self._read(at)
            scale, (one, other) = self._scale(at, 0.0), self._below(at)
            value, fall = scale * total - one + other, scale * slope - other
            if value <= 0 or fall <= 0:
                at /= 2
                continue
            move = math.log(value / delta) * value / fall
            at += max(-at / 2, min(at, move))
            if abs(move) <= 1e-10 * at:
                break
        if not (at > 0 and fall > 0):
            raise Unanswered
        margin = max(1e-12 * at, 1.01 * (self.upper(at) - delta) / fall)
        while self.upper(at + margin) > delta:
            margin *= 2
            if not margin < at + 1:
                raise Unanswered
        high = at + margin
        margin = max(1e-12 * at, 1.01 * (delta - self.lower(at)) / fall)
        while self.lower(at - margin) <= delta:
            margin *= 2
            if not margin < at:
                return Bracket(lower=0.0, upper=high)
        return Bracket(lower=at - margin, upper=high)


def invert_epsilon(directions: Sequence[Direction], delta: float) -> Bracket | None:
    """Return ε (nats) at ``delta`` over all ``directions``; None if the method has no answer."""
    return _bracket(directions, lambda pairs: _worst_epsilon(pairs, delta))


def invert_delta(directions: Sequence[Direction], epsilon: float) -> Bracket | None:
    """Return δ at ``epsilon`` (nats) over all ``directions``; None if the method has no answer."""
    return _bracket(directions, lambda pairs: _worst_delta(pairs, epsilon))


def _bracket(
    directions: Sequence[Direction], bracket: Callable[[Sequence[Direction]], Bracket]
) -> Bracket | None:
    """Return the upper end of dominating laws and the lower end of attained laws, or None."""
    try:
        with np.errstate(all="ignore"):
            if not any(direction.has_gap for direction in directions):
                return bracket(directions)
            above, below = zip(*(direction.one_sided for direction in directions), strict=True)
            # The method may have no answer for the dominating laws, so they come first.
            upper = bracket(above).upper
            return Bracket(lower=bracket(below).lower, upper=upper)
    except (Unanswered, ArithmeticError, ValueError):
        return None


def _worst_epsilon(directions: Sequence[Direction], delta: float) -> Bracket:
    sides = []
    for direction in directions:
        releases = _analytic_laws(direction, delta)
        atoms = [(law.atoms(POINTS[0]), count) for law, count in releases]
        sides.append((at_delta(atoms, delta), releases, atoms))
    sides.sort(key=lambda side: -side[0].epsilon)
    best = Bracket(lower=0.0, upper=0.0)
    for saddle, releases, atoms in sides:
        far = saddle.epsilon < _FAR_EPSILON_SHARE * best.lower
        if far and _is_ruled_out(releases, saddle.order, best.lower, delta):
            continue
        curve = _curve(releases, atoms, saddle, delta)
        if best.lower == 0.0 or curve.upper(best.lower) > delta:
            best = best.larger(_epsilon(curve, releases, atoms, saddle, delta))
    return best


def _curve(releases: Releases, atoms: Composition, saddle: Saddle, delta: float) -> Inversion:
    if not saddle.epsilon > 0:
        raise Unanswered
    return Inversion(releases, atoms, saddle, delta)


def _epsilon(
    curve: Inversion, releases: Releases, atoms: Composition, saddle: Saddle, delta: float
) -> Bracket:
    """Return ε by ``curve``, and by curves near the result if that is far from the saddle's ε."""
    result = curve.crossing(delta, saddle.epsilon)
    for _ in range(_MAX_ROUNDS):
        moved = abs(result.upper - saddle.epsilon) * saddle.order
        if result.width <= _NARROW_WIDTH * result.upper or moved < 0.5:
            break
        saddle = at_epsilon(atoms, result.upper)
        curve = _curve(releases, atoms, saddle, delta)
        result = result.intersect(curve.crossing(delta, saddle.epsilon))
    return result


def _delta(direction: Direction, epsilon: float) -> Bracket:
    result, delta = Bracket(lower=0.0, upper=1.0), 1e-10
    for _ in range(_MAX_ROUNDS):
        releases = _analytic_laws(direction, delta)
        atoms = [(law.atoms(POINTS[0]), count) for law, count in releases]
        saddle = at_epsilon(atoms, epsilon)
        about = min(math.exp(max(-460.0, min(-1e-3, saddle.log_delta))), result.upper)
        try:
            curve = Inversion(releases, atoms, saddle, about)
        except Unanswered:
            if result.upper < 1.0:
                break
            raise
        result = result.intersect(Bracket(lower=curve.lower(epsilon), upper=curve.upper(epsilon)))
        if result.width <= _NARROW_WIDTH * result.upper:
            break
        delta = min(about, result.upper)  # The next places are those that matter there.
    return result


def _worst_delta(directions: Sequence[Direction], epsilon: float) -> Bracket:
    best, unanswered = Bracket(lower=0.0, upper=0.0), []
    for direction in directions:
        try:
            best = best.larger(_delta(direction, epsilon))
        except (Unanswered, ArithmeticError, ValueError):
            unanswered.append(direction)
    if not all(_is_below(direction, epsilon, best.lower) for direction in unanswered):
        raise Unanswered
    return best


def _is_below(direction: Direction, epsilon: float, delta: float) -> bool:
    """Return whether Chernoff's bound proves that δ at ``epsilon`` (nats) is at most ``delta``."""
    if delta == 0:
        return False
    releases = _analytic_laws(direction, delta)
    saddle = at_delta([(law.atoms(POINTS[0]), count) for law, count in releases], delta)
    return saddle.epsilon < epsilon and _is_ruled_out(releases, saddle.order, epsilon, delta)


def _analytic_laws(direction: Direction, delta: float) -> list[tuple[AnalyticLaw, int]]:
    """Return the laws on places that matter at ``delta``; raises ``Unanswered`` for others."""
    rare = _LEFT_OUT_SHARE * delta / direction.steps
    return [(AnalyticLaw.of(law, rare), count) for law, count in direction.laws]


def _is_ruled_out(releases: Releases, order: float, epsilon: float, delta: float) -> bool:
    """Return whether Chernoff's bound at ``order`` proves δ(``epsilon``) <= ``delta``."""
    log = log_peak(order) - order * epsilon
    for law, count in releases:
        transform = law.transform(np.array([order]), np.zeros(1), -36.0)
        log += count * float(transform.log_moments[0] + transform.moment_errors[0])
    outside = sum(count * law.outside[0] for law, count in releases)
    return bounded_exp(log + 1e-9 * (1 + abs(log))) + outside <= delta


def _window(atoms: Composition, saddle: Saddle, delta: float) -> tuple[float, float, float, float]:
    """Return the tilt, the orders that bound the images above and below, and the width they need.

    Chernoff's bound of an image at a distance W falls by the distance of its order from the tilt
    times W. The saddle is near the best tilt if many losses add up, and far above it if one rare
    loss decides. A tilt that loses more digits than rounding leaves is avoided.
    """
    ladder = saddle.order * _ORDER_LADDER
    orders = np.concatenate((-1 - ladder[::-1], ladder))
    logs = sum((count * one.log_moments(orders) for one, count in atoms), np.zeros(1))
    logs -= orders * saddle.epsilon
    past = np.where(orders > 0, orders, -orders - 1)
    peaks = -np.log1p(past) - past * np.log1p(1 / past)
    needed = np.logaddexp(0.0, logs + peaks - math.log(_LEFT_OUT_SHARE * delta))
    tilts = ladder[:-_MAX_ORDERS_ONLY]
    apart = orders - tilts[:, None]
    widths = needed / np.maximum(np.abs(apart), 1e-300)
    high, low = np.where(apart > 0, widths, np.inf), np.where(apart < 0, widths, np.inf)
    above, below, row = np.argmin(high, axis=1), np.argmin(low, axis=1), np.arange(tilts.size)
    both = np.maximum(high[row, above], low[row, below])
    steps = sum(count for _, count in atoms)
    lost = (
        logs[ladder.size :][: tilts.size]
        - np.log(tilts)
        + math.log(steps * _TRANSFORM_ROUNDING / delta)
    )
    best = int(np.argmin(both * np.exp(np.clip(lost, 0.0, 300.0))))
    tilt, width = float(tilts[best]), float(both[best])
    return tilt, float(orders[above[best]]), float(orders[below[best]]), width


def _last_frequency(
    releases: Releases, log_moments: Sequence[float], order: float, deviation: float, room: float
) -> tuple[float, float]:
    """Return a frequency from which on all are left out, and log of a bound of their sum."""
    layers = [
        (*law.layers(order, log_moment), count)
        for (law, count), log_moment in zip(releases, log_moments, strict=True)
    ]
    # Where many releases are composed, one of the first is enough.
    for start in range(0, _LAST_FREQUENCIES.size, _FREQUENCIES_AT_ONCE):
        thetas = _LAST_FREQUENCIES[start : start + _FREQUENCIES_AT_ONCE] / deviation
        logs = -np.log(math.pi * thetas)
        for halves, weights, count in layers:
            less = (1.0 - _sinc_bound(np.outer(thetas, halves))) @ weights
            logs += count * np.log1p(-less.clip(0.0, 1.0) * (1 - 2 * _MAX_MOMENT_ERROR))
        enough = int(np.argmax(logs <= room))
        if logs[enough] <= room:
            return float(thetas[enough]), float(logs[enough])
    raise Unanswered


def _sinc_bound(x: Array) -> Array:
    """Return an upper bound of |sin(y)/y| over y >= x >= 0; both have shape (n, m)."""
    x = np.maximum(x, 1e-9)
    return np.where(
        x < _SINC_MONOTONE_END, np.sin(x) / x * (1 + 1e-9), np.minimum(_MAX_SINC_BEYOND, 1 / x)
    )


def _log_expm1(x: float) -> float:
    return x * (1 - 1e-12) + math.log(-math.expm1(-x * (1 - 1e-12)))
