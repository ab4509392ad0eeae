"""Two different steps, composed by 30-digit quadrature that shares nothing with the engine.

δ of two steps is the mean, over the first step's loss under its own P, of the second step's
closed-form hockey-stick curve at what is left of ε.
"""

from __future__ import annotations

import random
from typing import Literal

import mpmath
import pytest

from affidavit.accountants.registry import accountant
from affidavit.plan import events
from tests.support.random_seeds import seeded

Side = Literal["remove", "add", "replace"]
Mixture = list[tuple[mpmath.mpf, int]]
Step = tuple[mpmath.mpf, mpmath.mpf]


def hypotheses(side: Side, q: mpmath.mpf) -> tuple[Mixture, Mixture]:
    sampled: Mixture = [(1 - q, 0), (q, 1)]
    match side:
        case "remove":
            return sampled, [(mpmath.mpf(1), 0)]
        case "add":
            return [(mpmath.mpf(1), 0)], sampled
        case "replace":
            return sampled, [(1 - q, 0), (q, -1)]


def density(mixture: Mixture, sigma: mpmath.mpf, x: mpmath.mpf) -> mpmath.mpf:
    return sum(weight * mpmath.npdf(x, mean, sigma) for weight, mean in mixture)


def hockey_stick(side: Side, step: Step, epsilon: mpmath.mpf) -> mpmath.mpf:
    """sup over half-lines of P - e^ε Q; the loss is monotone, so its level set is one."""
    q, sigma = step
    alpha = mpmath.exp(epsilon)
    if side == "replace":
        k = mpmath.exp(-1 / (2 * sigma**2))
        a, b = q * k, (1 - q) * (1 - alpha)
        threshold = sigma**2 * mpmath.log(
            (mpmath.sqrt(b * b + 4 * a * a * alpha) - b) / (2 * a)
            if b <= 0
            else 2 * a * alpha / (b + mpmath.sqrt(b * b + 4 * a * a * alpha))
        )
    else:
        ratio = ((alpha if side == "remove" else 1 / alpha) - 1 + q) / q
        if ratio <= 0:
            return 1 - alpha if side == "remove" else mpmath.mpf(0)
        threshold = sigma**2 * mpmath.log(ratio) + mpmath.mpf(1) / 2
    sign = -1 if side == "add" else 1
    p_side, q_side = (
        sum(weight * mpmath.ncdf(sign * (mean - threshold) / sigma) for weight, mean in mixture)
        for mixture in hypotheses(side, q)
    )
    return max(p_side - alpha * q_side, mpmath.mpf(0))


def delta_of_two(side: Side, one: Step, other: Step, epsilon: float) -> mpmath.mpf:
    # The gentler step outside: the sharper one's curve is closed, and the rest is smooth.
    second, first = sorted((one, other), key=lambda step: step[1])
    p, q = hypotheses(side, first[0])
    sigma = first[1]

    def integrand(x: mpmath.mpf) -> mpmath.mpf:
        here, there = density(p, sigma, x), density(q, sigma, x)
        return here * hockey_stick(side, second, epsilon - mpmath.log(here / there))

    points = sorted({place * sigma for place in range(-14, 15, 2)} | {1 + 3 * sigma, 1 - 3 * sigma})
    return mpmath.quad(integrand, points, maxdegree=6)


@pytest.mark.soak
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6))]
)
def test_two_different_steps_lie_in_the_bracket(seed: int) -> None:
    drawn = random.Random(seeded(seed))
    sides: tuple[Side, ...] = ("replace",) if seed % 3 == 0 else ("remove", "add")
    delta = 10 ** drawn.uniform(-13, -2)
    with mpmath.workdps(30):
        steps = [
            (mpmath.mpf(10 ** drawn.uniform(-3, -0.05)), mpmath.mpf(10 ** drawn.uniform(-0.5, 0.8)))
            for _ in range(2)
        ]
        event = events.Composed(
            events=tuple(
                events.PoissonSubsampledGaussian(
                    sampling_probability=float(q),
                    noise_multiplier=float(sigma),
                    pair="replace_one" if sides == ("replace",) else "add_remove",
                )
                for q, sigma in steps
            )
        )
        bracket = accountant("fourier").curve(event).epsilon(delta)
        at_upper = max(delta_of_two(side, *steps, bracket.upper) for side in sides)
        assert at_upper <= delta * (1 + mpmath.mpf(10) ** -9)
        if bracket.lower > 0:
            at_lower = max(delta_of_two(side, *steps, bracket.lower) for side in sides)
            assert at_lower >= delta * (1 - mpmath.mpf(10) ** -9)


@pytest.mark.parametrize(
    ("steps", "delta"),
    [
        ([(0.857, 3.37, 1), (0.01246, 0.3653, 8), (0.2198, 412.2, 183)], 3.35e-13),
        ([(3.16e-05, 0.657, 1), (8.22e-06, 0.2124, 172)], 1.15e-08),
    ],
    ids=["mass far from the order's peak", "a peak between samples"],
)
def test_laws_of_very_different_widths_compose(
    steps: list[tuple[float, float, int]], delta: float
) -> None:
    event = events.Composed(
        events=tuple(
            events.Repeated(
                event=events.PoissonSubsampledGaussian(
                    sampling_probability=q, noise_multiplier=sigma
                ),
                count=count,
            )
            for q, sigma, count in steps
        )
    )
    ours = accountant("fourier").curve(event).epsilon(delta)
    assert 0 <= ours.lower <= ours.upper
    assert ours.lower <= accountant("rdp").curve(event).epsilon(delta).upper
