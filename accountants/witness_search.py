"""The search for a witness: floating point, and trusted with nothing.

The tilt is the saddle point of Λ(s) - sε - log s(s+1), Λ = log Φ; the window is where the
aliased terms are small; the extra noise moves ε by a small part of it; step and strip make the
quadrature's error small. ``affidavit.accountants.checker`` then proves the bound, or does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from affidavit.accountants.bracket import decimal_up
from affidavit.accountants.checker import Quadrature, RunWitness, Transform, Unproved, Witness, laws
from affidavit.accountants.checker.dominating_pairs import Direction
from affidavit.accountants.checker.enclosures import Mixture
from affidavit.accountants.fourier.normal_masses import Array
from affidavit.plan import Event

_EPSILON_SHIFTS = (5e-5, 1e-5)
"""Parts of ε by which the extra noise may move it, by the tilt. Where δ falls faster in ε than the
tilt says, as for few rare losses, less noise is needed, and a longer sum."""
_ALIASED = 12.0
"""What is neglected is smaller than δ by e to the power of this."""
_MOST_TERMS = 20_000
_WIDEST = 1e-4
"""Part of ε within which the bound that is proved must lie above the one that was computed."""


def search_witness(event: Event, epsilon: float, delta: float) -> Witness:
    """A witness that ``event`` is (about ``epsilon``, ``delta``)-DP, for the least ε it proves.

    ``epsilon`` (nats) is what an engine computed; the witness's is at most 0.01 % more. Raises
    ``Unproved`` where there is no statement about a release, or the search finds no witness.
    """
    directions = laws(event)
    runs, proved = [], epsilon
    for direction in directions:
        if all(law.mixture is None for law, _ in direction):
            break
        run, least = _direction(direction, epsilon, delta)
        proved = max(proved, least)
        runs.append(run)
    return Witness(epsilon=decimal_up(proved, 12), delta=decimal_up(delta, 17), runs=tuple(runs))


def _direction(direction: Direction, epsilon: float, delta: float) -> tuple[RunWitness, float]:
    """What proves one direction, and the least ε that it proves; raises ``Unproved``."""
    mixtures = [(law.mixture, times) for law, times in direction if law.mixture is not None]
    gaussian = float(sum(law.mu_squared * times for law, times in direction))
    failures = []
    for shift in _EPSILON_SHIFTS:
        try:
            run = _run(mixtures, gaussian, epsilon, delta, shift)
            return run, _least(Transform(direction, run), epsilon, delta)
        except Unproved as failure:
            failures.append(failure)
    raise failures[0]


def _least(transform: Transform, epsilon: float, delta: float) -> float:
    """The least ε from ``epsilon`` up at which ``transform`` proves δ ≤ ``delta``."""
    low, high = 0.0, _WIDEST
    if transform.proves(epsilon, delta):
        return epsilon
    if not transform.proves(epsilon * (1 + high), delta):
        raise Unproved("not_proved", "The search for a witness failed.", "Rest on the accountants.")
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if transform.proves(epsilon * (1 + middle), delta) else (middle, high)
        )
    return epsilon * (1 + high)


def _run(
    mixtures: list[tuple[Mixture, int]],
    gaussian: float,
    epsilon: float,
    delta: float,
    shift: float,
) -> RunWitness:
    def rate(s: float) -> float:
        """Λ(s) = log Φ(s)."""
        exponents = sum(times * _log_moment(mixture, s) for mixture, times in mixtures)
        return exponents + gaussian * (s * s + s) / 2

    def chernoff(s: float) -> float:
        return rate(s) - s * epsilon - math.log(s * (s + 1))

    saddle = _minimum(chernoff)
    # Where losses reach no further than ε the least is at infinity; a small one is enough.
    enough = math.log(delta) - _ALIASED
    saddle = next((s for s in saddle * np.geomspace(1e-3, 1, 40) if chernoff(s) < enough), saddle)
    chosen = []
    for tilt in saddle * np.array((1.0, 0.85, 0.7)):
        window = _window(rate, float(tilt), epsilon, delta)
        noise = math.sqrt(max(0.0, 2 * shift * epsilon / (tilt + 1) - gaussian))
        excess = max(rate(tilt) - tilt * epsilon - math.log(delta), 0.0) + _ALIASED
        last = math.sqrt(2 * excess / (noise * noise + gaussian))
        chosen.append((last * window / (2 * math.pi), float(tilt), window, noise, excess))
    length, tilt, window, noise, excess = min(chosen)
    terms, mu_squared = math.ceil(length) + 1, gaussian + noise * noise
    if terms > _MOST_TERMS:
        raise Unproved("not_proved", "The sum would be too long.", "Rest on the accountants.")
    count, blocks = _sizes(mixtures, mu_squared, tilt, 2 * math.pi / window, terms, excess)
    last = 2 * math.pi / window * (count + sum(size * number for size, number in blocks))
    rules = tuple(_rule(mixture, times, tilt, last) for mixture, times in mixtures)
    return RunWitness(
        tilt=tilt, window=window, noise=noise, frequencies=count, blocks=blocks, rules=rules
    )


def _window(rate: Callable[[float], float], tilt: float, epsilon: float, delta: float) -> float:
    """The window (nats) outside which G is below e^-``_ALIASED`` of G(ε)."""
    level = tilt * epsilon + math.log(delta) - _ALIASED
    orders = tilt * np.geomspace(1.02, 8, 24)
    rates = np.array([rate(float(s)) for s in orders])
    window = max(epsilon - level / tilt, 1e-3)
    while float(np.min(rates - (orders - tilt) * (epsilon + window))) > level:
        window *= 1.05
    return window


def _sizes(
    mixtures: list[tuple[Mixture, int]],
    gaussian: float,
    tilt: float,
    eta: float,
    terms: int,
    excess: float,
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """How many of ``terms`` to sum, and the blocks in which to bound the rest."""
    laws_used = [(*_atoms(mixture, tilt), times) for mixture, times in mixtures]

    def sizes(k: NDArray[np.int_]) -> list[Array]:
        """|ψ| of each law at kη."""
        return [
            np.abs(np.exp(1j * eta * np.outer(k, losses)) @ weights)
            for weights, losses, _ in laws_used
        ]

    def small(k: int, half: int, spreads: list[float]) -> bool:
        exponent = -gaussian * (eta * (k - half)) ** 2 / 2
        for (value,), spread, (_, _, times) in zip(
            sizes(np.array([k])), spreads, laws_used, strict=True
        ):
            exponent += times * math.log(min(value + spread, 1.0))
        return exponent < -excess

    def spreads(half: int) -> list[float]:
        near = sizes(np.arange(0, half + 1, max(1, half // 50)))
        return [math.sqrt(2 * max(0.0, 1 - float(values.min()))) for values in near]

    blocks: list[tuple[int, int]] = []
    count, size = 8, 2
    while count < terms and not small(count, 0, [s / 2 for s in spreads(1)]):
        count = math.ceil(count * 1.05)
    start = count
    while start < terms:
        while size // 2 < count // 2 and small(start + size, size, spreads(size)):
            size *= 2
        while size > 2 and not small(start + size // 2, size // 2, spreads(size // 2)):
            size //= 2
        if not small(start + size // 2, size // 2, spreads(size // 2)):
            # Not even a block of two terms is small here: sum them.
            if blocks:
                return terms, ()
            count = start = min(terms, math.ceil(count * 1.1))
            continue
        number = max(1, min(24, (terms - start) // size + 1))
        blocks.append((size, number))
        start += size * number
    return count, tuple(blocks)


def _atoms(mixture: Mixture, tilt: float) -> tuple[Array, Array]:
    """Weights, summing to one, and losses of the tilted law."""
    mu = mixture.distance / mixture.noise_multiplier
    x = np.linspace(-10.0, 10.0 + (tilt + 1) * mu, 4000)
    up, down = _logs(mixture, x)
    exponents = (tilt + 1) * up - tilt * down - x * x / 2
    weights = np.exp(exponents - exponents.max())
    return weights / weights.sum(), up - down


def _minimum(function: Callable[[float], float]) -> float:
    """Where a function of s > 0 that is convex in s is least, to a few digits."""
    from scipy.optimize import minimize_scalar

    least = minimize_scalar(
        lambda power: function(math.exp(power)), bounds=(-7, 9), method="bounded"
    )
    return float(math.exp(least.x))


def _logs(mixture: Mixture, x: Array) -> tuple[Array, Array]:
    mu, q = mixture.distance / mixture.noise_multiplier, mixture.probability
    zero = np.zeros_like(x)
    up = _log_mixture(mu * x - mu * mu / 2, q) if mixture.above else zero
    down = _log_mixture(-mu * x - mu * mu / 2, q) if mixture.below else zero
    return up, down


def _log_mixture(exponent: Array, q: float) -> Array:
    return np.logaddexp(math.log1p(-q), math.log(q) + exponent)


def _log_moment(mixture: Mixture, s: float) -> float:
    mu = mixture.distance / mixture.noise_multiplier
    step = min(0.1, 0.25 / mu)
    x = np.arange(-10.0, 10.0 + (s + 1) * mu, step)
    up, down = _logs(mixture, x)
    return float(logsumexp((s + 1) * up - s * down - x * x / 2)) + math.log(
        step / math.sqrt(2 * math.pi)
    )


def _rule(mixture: Mixture, times: int, tilt: float, last: float) -> Quadrature:
    """The longest step, and its strip, whose error is small at frequencies up to ``last``."""
    mu, q = mixture.distance / mixture.noise_multiplier, mixture.probability
    best = Quadrature(step=1e-9, strip=1e-9)
    needed = math.log(times) + 26.0
    for strip in 1.57 / mu * np.geomspace(1e-3, 1.0, 60):
        if strip > 14:
            break
        reach = math.sqrt(2 * (2 * last * mu * strip + 90)) + (tilt + 1) * mu
        cells = np.arange(-reach, reach, max(0.0625, reach / 5000))
        high, low = cells + 0.0625, cells
        up, down = _logs(mixture, high)
        exponent = (tilt + 1) * up - tilt * down - cells * cells / 2
        for used, ends in ((mixture.above, mu * high), (mixture.below, -mu * low)):
            if used:
                odds = math.log(q / (1 - q)) + ends - mu * mu / 2
                sine = math.log(math.sin(mu * strip))
                exponent = exponent + last * np.exp(np.minimum(math.log(mu * strip), odds + sine))
        bound = strip * strip / 2 + float(logsumexp(exponent)) + math.log(0.0625) + needed
        step = 2 * math.pi * strip / max(bound, 1.0)
        if step > best.step:
            best = Quadrature(step=float(step), strip=float(strip))
    return best
