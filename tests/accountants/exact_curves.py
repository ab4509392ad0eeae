"""Hockey-stick curves δ(ε) to 60 digits, without the checker's code, of random small runs.

One release is a pair of mixtures of normals, whose curve is P(A) - e^ε Q(A) on the set A where
P/Q is above e^ε. Any other set gives less, so that a root that is missed makes a comparison weaker
and never wrong. Two releases and two bins take one integral by quadrature, to 25 digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import mpmath
from mpmath import mpf

from affidavit.plan import events

DIGITS = 60
Weights = dict[int, mpf]
Curve = Callable[[mpf], mpf]


@dataclass(frozen=True)
class ExactRun:
    """``event``, and δ(ε) of one direction: 0 a removal, 1 an addition where they differ."""

    event: events.Event
    direction: int
    delta: Curve


def stick(over: Weights, under: Weights, mu: mpf, alpha: mpf) -> mpf:
    """∫ (P - α Q)_+ for mixtures of N(m μ, 1)."""

    def gap(x: mpf) -> mpf:
        return sum(w * mpmath.npdf(x, m * mu) for m, w in over.items()) - alpha * sum(
            w * mpmath.npdf(x, m * mu) for m, w in under.items()
        )

    def mass(law: Weights, a: mpf, b: mpf) -> mpf:
        total = mpf(0)
        for m, w in law.items():
            low, high = (a - m * mu, b - m * mu) if a < m * mu else (m * mu - b, m * mu - a)
            total += w * (mpmath.ncdf(high) - mpmath.ncdf(low))
        return total

    # A root that is itself a place would be missed.
    places = [(k + mpf(2) / 7) / 4 for k in range(-80, 81)]
    signs = [gap(x) for x in places]
    edges = [-mpmath.inf]
    for left, right, a, b in zip(places, places[1:], signs, signs[1:], strict=False):
        if a * b < 0:
            edges.append(mpmath.findroot(gap, (left, right), solver="anderson", verify=False))
    edges.append(mpmath.inf)
    gains = (mass(over, a, b) - alpha * mass(under, a, b) for a, b in pairwise(edges))
    return sum((gain for gain in gains if gain > 0), mpf(0))


def of_pair(over: Weights, under: Weights, sigma: float, *, removed: bool) -> Curve:
    """The curve of a pair in clip norms, or of the pair exchanged."""
    pair = (over, under) if removed else (under, over)
    return lambda epsilon: stick(*pair, 1 / mpf(sigma), mpmath.exp(epsilon))


def gaussian_run(draw: random.Random) -> ExactRun:
    """Several Gaussian releases, which are one."""
    parts = [(draw.uniform(0.5, 9), draw.randrange(1, 5)) for _ in range(draw.randrange(1, 4))]
    mu = mpmath.sqrt(sum(count / mpf(sigma) ** 2 for sigma, count in parts))
    members = (
        events.Repeated(event=events.Gaussian(noise_multiplier=s), count=n) for s, n in parts
    )

    def delta(epsilon: mpf) -> mpf:
        low = mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - low

    return ExactRun(events.Composed(events=tuple(members)), 0, delta)


def poisson_run(draw: random.Random) -> ExactRun:
    """One Poisson sample, also with q near 0 and 1, under both pairs."""
    q = draw.choice((10 ** draw.uniform(-6, -0.01), draw.random(), 1 - 2.0**-53))
    sigma, removed = draw.uniform(0.4, 6), draw.random() < 0.5
    replaced = draw.random() < 0.4
    event = events.PoissonSubsampledGaussian(
        sampling_probability=q,
        noise_multiplier=sigma,
        pair="replace_one" if replaced else "add_remove",
    )
    over = {0: 1 - mpf(q), 1: mpf(q)}
    under = {0: 1 - mpf(q), -1: mpf(q)} if replaced else {0: mpf(1)}
    direction = 0 if removed or replaced else 1
    return ExactRun(event, direction, of_pair(over, under, sigma, removed=removed))


def fixed_size_run(draw: random.Random) -> ExactRun:
    """One sample of a fixed size: the worse of both orders."""
    size, sigma = draw.randrange(2, 200), draw.uniform(0.8, 6)
    lot = draw.randrange(1, size)
    event = events.WithoutReplacementGaussian(
        dataset_size=size, sample_size=lot, noise_multiplier=sigma
    )
    q = mpf(lot) / size
    orders = [
        of_pair({0: 1 - q, 2: q}, {0: mpf(1)}, sigma, removed=removed) for removed in (True, False)
    ]
    return ExactRun(event, 0, lambda epsilon: max(order(epsilon) for order in orders))


def cut_run(draw: random.Random) -> ExactRun:
    """One Poisson sample that is cut, by the bound of docs/theorems/truncated-poisson.md."""
    size, q, sigma = draw.randrange(5, 60), draw.uniform(0.02, 0.7), draw.uniform(0.6, 5)
    lot = max(1, min(size, round(size * q + draw.uniform(-1, 3) * (size * q) ** 0.5)))
    neighbours: events.Neighbours = draw.choice(("add_remove", "zero_out", "replace_one"))
    removed = neighbours == "replace_one" or draw.random() < 0.5
    event = events.TruncatedPoissonGaussian(
        dataset_size=size,
        sampling_probability=q,
        max_lot_size=lot,
        noise_multiplier=sigma,
        neighbours=neighbours,
    )
    others = size if neighbours == "add_remove" else size - 1
    u, w, p = lot_probabilities(others, mpf(q), lot)
    r, replaced = 1 - u - w, neighbours == "replace_one"
    plain = {0: r * (1 - q), 1: r * q}, {0: r * (1 - q), -1: r * q} if replaced else {0: r}

    def full(y: int, x: int, absent: int) -> tuple[Weights, Weights]:
        def mixture(place: int) -> Weights:
            weights: Weights = {}
            for m, weight in ((0, u * (1 - q)), (place, u * q), (y, w * (1 - p)), (place, w * p)):
                weights[m] = weights.get(m, mpf(0)) + weight
            return weights

        return mixture(x), mixture(absent)

    if neighbours == "add_remove":
        over = {0: u * (1 - q), -1: w * (1 - q), 1: q * (u + w)}
        pairs = [(over, {0: u, -1: w})]
    else:
        away = -1 if replaced else 0
        pairs = [full(-1, 1, away), full(1, 1, away)]
    curves = [of_pair(*pair, sigma, removed=removed) for pair in pairs]
    rest = of_pair(*plain, sigma, removed=removed)
    return ExactRun(
        event,
        0 if removed else 1,
        lambda epsilon: max(curve(epsilon) for curve in curves) + rest(epsilon),
    )


def lot_probabilities(others: int, q: mpf, lot: int) -> tuple[mpf, ...]:
    """u, w and p of docs/theorems/truncated-poisson.md, term by term."""

    def term(n: int, k: int) -> mpf:
        return comb(n, k) * q**k * (1 - q) ** (n - k) if 0 <= k <= n else mpf(0)

    u = term(others, lot - 1)
    w = sum((term(others, k) for k in range(lot, others + 1)), mpf(0))
    in_a_cut = sum((term(others + 1, k) for k in range(lot + 1, others + 2)), mpf(0))
    return u, w, in_a_cut * lot / (others + 1) / w if w else q


def stopped_pass_run(draw: random.Random) -> ExactRun:
    """A pass that ends after one of its bins is a Poisson sample of rate 1/b."""
    bins, sigma, removed = draw.randrange(2, 9), draw.uniform(0.8, 6), draw.random() < 0.5
    event = events.RandomAllocationGaussian(bins=bins, noise_multiplier=sigma, released=1)
    q = mpf(1) / bins
    curve = of_pair({0: 1 - q, 1: q}, {0: mpf(1)}, sigma, removed=removed)
    return ExactRun(event, 0 if removed else 1, curve)


def two_bins_run(draw: random.Random) -> ExactRun:
    """E (S - α)_+ or E (1 - αS)_+ of two bins: one z by quadrature, one in closed form."""
    sigma, removed = draw.uniform(1, 4), draw.random() < 0.5
    mu = 1 / mpf(sigma)

    def delta(epsilon: mpf) -> mpf:
        alpha = mpmath.exp(epsilon if removed else -epsilon)

        def integrand(z: mpf) -> mpf:
            # E (X - k)_+ or E (k - X)_+ of a lognormal X of mean one.
            k = 2 * alpha - mpmath.exp(mu * z - mu * mu / 2)
            if k <= 0:
                return (1 - k if removed else mpf(0)) * mpmath.npdf(z)
            place = (mpmath.log(k) + mu * mu / 2) / mu
            call = mpmath.ncdf(mu - place) - k * mpmath.ncdf(-place)
            return (call if removed else call - 1 + k) * mpmath.npdf(z)

        kink = (mpmath.log(2 * alpha) + mu * mu / 2) / mu
        with mpmath.workdps(25):
            mean = mpmath.quad(integrand, sorted([mpf(-15), mpf(-5), mpf(0), kink, mpf(16)])) / 2
        return mean if removed else mean / alpha

    event = events.RandomAllocationGaussian(bins=2, noise_multiplier=sigma)
    return ExactRun(event, 0 if removed else 1, delta)


def two_steps_run(draw: random.Random) -> ExactRun:
    """Two Poisson samples: one loss by quadrature, the other's curve in closed form."""
    sigma = draw.uniform(0.8, 4)
    q, mu = mpf(draw.uniform(0.05, 0.9)), 1 / mpf(sigma)

    def one(alpha: mpf) -> mpf:
        if alpha <= 1 - q:
            return 1 - alpha
        place = (mpmath.log((alpha - (1 - q)) / q) + mu**2 / 2) / mu
        mixed = (1 - q) * mpmath.ncdf(-place) + q * mpmath.ncdf(mu - place)
        return mixed - alpha * mpmath.ncdf(-place)

    def delta(epsilon: mpf) -> mpf:
        def integrand(x: mpf) -> mpf:
            ratio = 1 - q + q * mpmath.exp(mu * x - mu**2 / 2)
            return ratio * mpmath.npdf(x) * one(mpmath.exp(epsilon) / ratio)

        with mpmath.workdps(25):
            kink = mpmath.log((mpmath.exp(epsilon) / (1 - q) - (1 - q)) / q) / mu + mu / 2
            return mpmath.quad(
                integrand, sorted([mpf(-12), mpf(-3), mpf(0), mpf(3), kink, 12 + mu])
            )

    event = events.PoissonSubsampledGaussian(sampling_probability=float(q), noise_multiplier=sigma)
    return ExactRun(events.Repeated(event=event, count=2), 0, delta)


CLOSED = (gaussian_run, poisson_run, fixed_size_run, cut_run, stopped_pass_run)
BY_QUADRATURE = (two_bins_run, two_steps_run)
