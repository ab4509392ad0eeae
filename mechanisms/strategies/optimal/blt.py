"""Optimal buffered linear Toeplitz noise, at a cost that does not grow with the steps.

C has generating function Π (1 - θ̂_i x) / Π (1 - θ_i x) and N = C⁻¹ its reciprocal. With interlaced
poles 1 > θ_1 > θ̂_1 > θ_2 > θ̂_2 > ... > 0 the scales of C are positive,

    ω_i = Π_j (θ_i - θ̂_j) / Π_{j≠i} (θ_i - θ_j),    Σ ω_i = Σ (θ_i - θ̂_i) < 1,

so its coefficients are positive and decrease, and the sensitivity is exact for every schema. rms²,
max² and sens² are sums of geometric series over pairs of poles (``loss``), in O(d² log T) for d
buffers, without cancellation; heavy-ball momentum adds one pole, β. Learning rates use the
quadratic form of ``loss``, up to its limit of steps.

The search is over the rates s = -log θ: log s_1, then the logarithms of the gaps in log s between
neighbouring poles, so every point is a valid strategy. Gradients are complex-step derivatives.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> from affidavit.mechanisms.strategies.workload import Workload
>>> decays, scales = optimal_blt(1000, 2, Workload(), Participation.single())
>>> decays.round(2), bool(scales.sum() < 1)
(array([1.  , 0.87]), True)

References: Dvijotham, McMahan, Pillutla, Steinke and Thakurta, arXiv:2404.16706, Lemmas 5.2
to 5.4; McMahan, Xu and Zhang, arXiv:2408.08868 (several participations, pairs of poles).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from affidavit.mechanisms.strategies.geometric_sums import (
    Numbers,
    cross_sums,
    geometric_sums,
    outer,
    pairs,
)
from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.optimal.loss import (
    DIVERGED_LOSS,
    Objective,
    ToeplitzLoss,
    UnsupportedObjective,
    minimize_loss,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.workload import Workload

MAX_RATE = 300.0
"""The largest rate that is evaluated; e^-300 is no memory at all."""
MIN_LOG_GAP, MAX_LOG_GAP = -9.0, 3.0
"""Logarithms of the least and largest gap between neighbouring poles, in log s."""
COMPLEX_STEP = 1e-30
"""The imaginary step, whose square vanishes beside every real part."""


def optimal_blt(
    steps: int,
    buffers: int,
    workload: Workload,
    participation: Participation,
    *,
    objective: Objective = "rms",
) -> tuple[Array, Array]:
    """Return decays θ in (0, 1), decreasing, and scales ω > 0 with Σ ω < 1, shape (buffers,) each.

    Raises ``UnsupportedObjective`` for the largest error under learning rates, and ``TooLarge`` for
    learning rates over too many steps.
    """
    if buffers < 1:
        raise ValueError("a buffered strategy needs at least one buffer")
    error = _squared_error(steps, workload, participation, objective)

    def loss(points: Numbers) -> Numbers:
        rates, inverse = _rates(points)
        size = squared_sensitivity(rates, scales_of(rates, inverse), steps, participation)
        return np.asarray(np.log(error(rates, inverse)) + np.log(size))

    def derived(point: Array) -> tuple[float, Array]:
        if _rates(point)[1][-1] > MAX_RATE:
            return DIVERGED_LOSS, np.zeros(len(point))
        shifted = point + 1j * COMPLEX_STEP * np.eye(len(point))
        values = loss(shifted)
        return float(values[0].real), values.imag / COMPLEX_STEP

    bounds = _bounds(steps, buffers)
    results = [
        minimize_loss(derived, start, bounds=bounds, precision=1e-12, iterations=200)
        for start in _starts(steps, buffers)
    ]
    best = min(results, key=lambda result: result.value)
    rates, inverse = _rates(best.point)
    return np.exp(-rates), scales_of(rates, inverse)


def scales_of(rates: Numbers, inverse: Numbers) -> Numbers:
    """Return ω of the series with poles e^{-rates} and zeros e^{-inverse}, shapes (..., d)."""
    poles = np.exp(-rates)
    above = poles[..., :, None] * -np.expm1(rates[..., :, None] - inverse[..., None, :])
    below = poles[..., :, None] * -np.expm1(rates[..., :, None] - rates[..., None, :])
    places = np.arange(rates.shape[-1])
    below[..., places, places] = 1.0
    # Factor by factor, because the products alone may underflow.
    return np.asarray(np.diagonal(above, axis1=-2, axis2=-1) * _ratios(above, below))


def squared_sensitivity(
    rates: Numbers, scales: Numbers, steps: int, participation: Participation
) -> Numbers:
    """Return sens² of C for poles e^{-rates}, shapes (..., d) to (...,), in O(d² log T).

    At offset u of the m-th range of b steps, the stacked columns hold
    Σ_i a_i e^{-s_i u} g_{m+1}(s_i b) with a_i = ω_i e^{s_i}, plus 1 - Σ a_i at u = 0. The last
    range has τ = T - (k-1) b steps.
    """
    most, separation = participation.max_participations(steps), participation.separation
    amplitudes = scales * np.exp(rates)
    weights, sums = outer(amplitudes, amplitudes), pairs(rates)
    first = 1 - np.sum(amplitudes, axis=-1)
    stacked, _ = geometric_sums(separation * rates, most)
    tail, _ = geometric_sums(sums, steps - (most - 1) * separation)
    begun = np.sum(amplitudes * stacked, axis=-1)
    total = np.sum(weights * outer(stacked, stacked) * tail, axis=(-2, -1))
    total = total + first * (2 * begun + first)
    if most > 1:
        earlier = cross_sums(separation * rates, most - 1)
        whole, _ = geometric_sums(sums, separation)
        begun = np.sum(amplitudes * earlier.total, axis=-1)
        total = total + np.sum(weights * earlier.products * whole, axis=(-2, -1))
        total = total + first * (2 * begun + (most - 1) * first)
    return np.asarray(total)


def squared_error(
    rates: Numbers, inverse: Numbers, steps: int, momentum: float, objective: Objective
) -> Numbers:
    """Return rms² or max² at unit noise, shapes (..., d) to (...,), in O(d² log T).

    The learning rate is constant.
    """
    poles, final = inverse, np.prod(np.expm1(-rates) / np.expm1(-inverse), axis=-1)
    # Transient of pole θ̂_i: its scale in N, over 1 - 1/θ̂_i of the cumulative sum.
    amplitudes = scales_of(inverse, rates) / np.expm1(-inverse)
    if momentum:
        final = final / (1 - momentum)
        beta = np.full((*rates.shape[:-1], 1), -np.log(momentum), dtype=rates.dtype)
        amplitudes = amplitudes / -np.expm1(inverse - beta)
        # The pole β: Π (1 - θ_i/β) / Π (1 - θ̂_i/β), over 1 - 1/β.
        added = np.prod(np.expm1(beta - rates) / np.expm1(beta - inverse), axis=-1)
        added = added * momentum / (momentum - 1)
        poles = np.concatenate([poles, beta], axis=-1)
        amplitudes = np.concatenate([amplitudes, added[..., None]], axis=-1)
    poles = np.concatenate([0 * poles[..., :1], poles], axis=-1)
    amplitudes = np.concatenate([final[..., None], amplitudes], axis=-1)
    last, total = geometric_sums(pairs(poles), steps)
    sums = last if objective == "max" else total / steps
    return np.asarray(np.sum(outer(amplitudes, amplitudes) * sums, axis=(-2, -1)))


def _squared_error(
    steps: int, workload: Workload, participation: Participation, objective: Objective
) -> Callable[[Numbers, Numbers], Numbers]:
    if workload.learning_rates is None:
        return lambda rates, inverse: squared_error(
            rates, inverse, steps, workload.momentum, objective
        )
    if objective == "max":
        raise UnsupportedObjective(
            "only dense strategies minimise the largest error under learning rates"
        )
    loss = ToeplitzLoss.of(steps=steps, workload=workload, participation=participation)
    quadratic = loss.quadratic
    assert quadratic is not None

    def error(rates: Numbers, inverse: Numbers) -> Numbers:
        noise = _noise(rates, inverse, steps)
        return np.asarray(np.sum((noise @ quadratic) * noise, axis=-1))

    return error


def _noise(rates: Numbers, inverse: Numbers, steps: int) -> Numbers:
    """Return the first column of N: 1, then Σ ω̂_i θ̂_i^{t-1}; shape (..., T)."""
    times = np.arange(steps - 1, dtype=np.float64)
    scales = scales_of(inverse, rates)
    later = np.einsum("...i,...it->...t", scales, np.exp(-inverse[..., None] * times))
    return np.concatenate([np.ones_like(later, shape=(*later.shape[:-1], 1)), later], axis=-1)


def _rates(point: Numbers) -> tuple[Numbers, Numbers]:
    """Return s of the poles of C and of N from log s_1 and the logarithms of the gaps in log s."""
    gaps = np.concatenate([point[..., :1], np.exp(point[..., 1:])], axis=-1)
    rates = np.exp(np.cumsum(gaps, axis=-1))
    return rates[..., 0::2], rates[..., 1::2]


def _starts(steps: int, buffers: int) -> list[Array]:
    """Return poles evenly spaced in log s, from 1/T or 10/T up to 2."""
    result = []
    for longest in (1.0, 10.0):
        places = np.linspace(np.log(min(longest / steps, 0.5)), np.log(2.0), 2 * buffers)
        result.append(np.concatenate([places[:1], np.log(np.diff(places))]))
    return result


def _bounds(steps: int, buffers: int) -> list[tuple[float, float]]:
    return [(np.log(1e-3 / steps), 1.0)] + [(MIN_LOG_GAP, MAX_LOG_GAP)] * (2 * buffers - 1)


def _ratios(above: Numbers, below: Numbers) -> Numbers:
    """Return Π_{j≠i} above_ij / below_ij."""
    ratios = above / below
    places = np.arange(above.shape[-1])
    ratios[..., places, places] = 1.0
    return np.asarray(np.prod(ratios, axis=-1))
