"""The best λ of bidiagonal noise w_t = z_t - λ z_{t-1} for a workload and a participation.

Error and sensitivity are both closed in λ. With N = I - λS and S the shift, the variance of
step t of A·N·z is a quadratic r_t - 2λ q_t + λ² p_t, where r_t = Σ_j A[t,j]²,
q_t = Σ_j A[t,j] A[t,j+1] and p_t = r_t - A[t,0]²; for the prefix sum the rms² is
1 + (1-λ)² (T-1)/2. The three sums need one pass over the steps, O(T), and every λ is then
O(1) (for the largest error of a workload with learning rates, O(T)). The sensitivity is
the closed form of ``bidiagonal``, evaluated in O(log k).

A is not negative, so that λ < 0 has a larger error at the sensitivity of |λ|: only 0 ≤ λ ≤ 1
is searched. The product is not convex in λ: it is scanned on a grid that is dense towards 1,
and every grid minimum is refined, so that a local minimum is not mistaken for the best.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> from affidavit.mechanisms.strategies.workload import Workload
>>> epochs = Participation.fixed_epoch(participations=10, separation=100)
>>> round(best_lambda(1000, Workload(), epochs), 3)
0.953

References: Wang, *An Optimization View of DP LLM Fine-tuning*, Theorems 7 and 9;
Kalinin, McKenna, Pagh and Lampert, arXiv:2601.22334 (one scalar λ).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from affidavit.mechanisms.strategies.filtering import lfilter
from affidavit.mechanisms.strategies.optimal_loss import at_unit_rate
from affidavit.mechanisms.strategies.optimal_sums import cross, ladder
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.workload import Workload

Array = NDArray[np.float64]
Objective = Literal["rms", "max"]

GRID = np.concatenate([np.linspace(0.0, 0.99, 100), 1 - np.geomspace(0.01, 1e-9, 71)[1:], [1.0]])
"""Values of λ that are tried first; the optimum moves towards 1 like 1 - c/b."""

DIGITS = 4
"""Of 1 - λ that are kept. The loss is flat at its least, where more of them change it by less
than 1e-6 of itself, differ from machine to machine, and burden whoever writes λ down."""


def best_lambda(
    steps: int,
    workload: Workload,
    participation: Participation,
    objective: Objective = "rms",
) -> float:
    """λ in [0, 1] with the least error times sensitivity; O(T) once, O(1) for the prefix sum."""
    error = squared_error(steps, workload, objective)

    def loss(rate: float) -> float:
        return error(rate) * squared_sensitivity(rate, steps, participation)

    losses = [loss(float(rate)) for rate in GRID]
    best, least = float(GRID[int(np.argmin(losses))]), min(losses)
    for place in range(len(GRID)):
        left, right = max(place - 1, 0), min(place + 1, len(GRID) - 1)
        if losses[place] > min(losses[left], losses[right]):
            continue
        found = minimize_scalar(
            loss, bounds=(GRID[left], GRID[right]), method="bounded", options={"xatol": 1e-12}
        )
        if found.fun < least:
            best, least = float(found.x), float(found.fun)
    return float(1 - Decimal(f"{1 - best:.{DIGITS}g}"))


def squared_sensitivity(rate: float, steps: int, participation: Participation) -> float:
    """sens(L⁻¹)² at ``rate`` λ in [0, 1], in O(log T); an estimate for searching, not a bound."""
    with np.errstate(divide="ignore"):
        decay = -np.log(np.asarray([rate], dtype=np.float64))
    most, separation = participation.most(steps), participation.separation
    last, _ = ladder(2 * decay, steps - (most - 1) * separation)
    if most == 1:
        return float(last[0])
    earlier = cross(separation * decay, most - 1)
    whole, _ = ladder(2 * decay, separation)
    stacked, _ = ladder(separation * decay, most)
    return float(whole[0] * earlier.products[0, 0] + stacked[0] ** 2 * last[0])


def squared_error(steps: int, workload: Workload, objective: Objective) -> Callable[[float], float]:
    """λ ↦ mean (``rms``) or largest (``max``) variance over the steps, at unit noise."""
    if workload.is_prefix_sum:
        weight = (steps - 1) / 2 if objective == "rms" else steps - 1
        return lambda rate: 1 + (1 - rate) ** 2 * weight
    own, shifted, later = _row_products(steps, at_unit_rate(workload))
    if objective == "rms":
        a, b, c = float(np.mean(own)), float(np.mean(shifted)), float(np.mean(later))
        return lambda rate: a - 2 * rate * b + rate * rate * c
    return lambda rate: float(np.max(own - 2 * rate * shifted + rate * rate * later))


def _row_products(steps: int, workload: Workload) -> tuple[Array, Array, Array]:
    """r_t, q_t and p_t of every row of A, in O(T).

    From A[t,j] = A[t-1,j] + η_t β^{t-j} = η_j + β A[t,j+1].
    """
    beta, rates = workload.momentum, workload.rates(steps)
    powers = _filtered(np.ones(steps), beta * beta)  # Σ_{j≤t} β^{2(t-j)}
    aligned = _filtered(rates * powers, beta)  # Σ_j β^{t-j} A[t,j]
    before = beta * np.concatenate([[0.0], aligned[:-1]])
    own = np.cumsum(2 * rates * before + rates**2 * powers)
    first = np.cumsum(rates * beta ** np.arange(steps))  # A[t,0]
    later = own - first**2
    # Σ_j A[t,j] A[t,j+1] = Σ_j η_j A[t,j+1] + β p_t, and the first sum grows by
    # η_t Σ_{j<t} η_j β^{t-1-j} from row to row.
    weighted = np.cumsum(rates * np.concatenate([[0.0], _filtered(rates, beta)[:-1]]))
    return own, weighted + beta * later, later


def _filtered(values: Array, rate: float) -> Array:
    """y_t = rate · y_{t-1} + values_t."""
    return np.asarray(lfilter([1.0], [1.0, -rate], values))
