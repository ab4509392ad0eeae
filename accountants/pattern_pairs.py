"""Moments at whole orders of runs that sample columns, by pairs of patterns.

The moment of order α of a run is a mean over α independent patterns π_a of one record,

    E exp(Σ_{a<b} Γ(π_a, π_b))  <=  (E e^{(α - 1) Γ(π, ρ)})^{α/2} ,

by a Hölder inequality in which each pattern is in α - 1 pairs (Finner, 1992). With as many
participations in all patterns both sides agree but for where they are, so that this is close where
columns meet for long. A pattern ρ with l participations at least b apart is bounded in two ways:
all of them count as one of l times the strength, or each by the steps that are nearest to it. In a
third way the waits of two records are a Markov chain: exact for memories of up to b steps.

>>> run = events.SampledColumns(
...     products=(0.2, 0.1), beyond=0.1, sampling_probability=0.005, separation=100, steps=400,
...     noise_multiplier=1.0,
... )
>>> round(log_moment_of_pairs(run, 4), 2)
1.52

Reference: docs/theorems/correlated-noise.md, Theorem 28; Finner, "A generalization of Hölder's
inequality and some probability inequalities", Annals of Probability 20 (1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import bdtrc, logsumexp

from affidavit.accountants.rounding import Array
from affidavit.plan import events

ORDERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
"""Orders of moments that an accountant computes."""
_MAX_PARTICIPATIONS = 128
"""Participations of a record above which moments of pairs are not computed."""
_MAX_STEPS = 1 << 13
_MAX_VALUES = 1 << 20
"""About how many values one order may take."""
_MAX_STATES = 1 << 25
"""States of two records, over all steps and orders, up to which they are followed."""
_PLACES = 8, 64
"""Least and most ranges of steps, each of which counts as its worst one."""
_NODES = 20
"""Numbers of participations between which the cost of as many in one place is a chord."""
_MAX_EXPONENT = 600.0
_TAIL_ROUNDING = 1e-9
"""Relative allowance for a binomial tail."""


def log_moment_of_pairs(run: events.SampledColumns, order: int) -> float:
    """Return an upper bound of log E L^α at whole ``order`` α >= 2, infinite if not computed."""
    most = -(-run.steps // run.separation)
    if most > _MAX_PARTICIPATIONS or run.steps > _MAX_STEPS:
        return math.inf
    products = _products(run)
    strength, numbers = (order - 1.0) * run.records_per_unit, np.arange(1, most + 1)
    # A logarithm of a moment is convex: below its chords.
    nodes = np.unique(np.ceil(np.geomspace(1, most, _NODES)))
    in_one_place = np.append(0.0, _in_one_place(run, products, strength * nodes))
    costs = np.interp(numbers, np.append(0.0, nodes), in_one_place)
    costs = np.minimum(costs, _in_cells(run, products, strength, most))
    # More participations never cost less.
    costs = np.maximum.accumulate(np.append(0.0, costs))
    size = float(np.abs(costs).max()) + abs(math.log(run.sampling_probability)) + 16
    total = float(logsumexp(np.log(_chances(run, most)) + costs))
    orders = ORDERS if order in ORDERS else (order,)
    total = min(total, _by_waits(run, orders)[orders.index(order)])
    return run.records_per_unit * order / 2 * (total + (run.steps + 64) * 2.0**-50 * size)


def _products(run: events.SampledColumns) -> Array:
    """Return X_d for all lags d that matter, none of which is above an earlier one."""
    most = -(-run.steps // run.separation)
    sizes = np.append(run.products, run.beyond) / run.noise_multiplier**2
    reach = max(run.steps, (most + 2) * run.separation) + run.separation
    lags = np.minimum(np.arange(reach), len(sizes) - 1)
    return np.asarray(np.maximum.accumulate(sizes[::-1])[::-1][lags])


@lru_cache(maxsize=16)
def _by_waits(run: events.SampledColumns, orders: tuple[int, ...]) -> tuple[float, ...]:
    """Return bounds of log E e^{(α - 1) Γ(π, ρ)} by the steps that both records still wait.

    Participations that are closer than b steps meet as they do. Those of π meet all others of ρ,
    which are b steps apart on either side, as if there were as many as there can be.
    """
    steps, separation, p = run.steps, run.separation, run.sampling_probability
    most = -(-steps // separation)
    if steps * separation * len(orders) > _MAX_STATES:
        return (math.inf,) * len(orders)
    products, strengths = _products(run), run.records_per_unit * (np.array(orders) - 1.0)
    far = strengths * products[(np.arange(most) // 2 + 1) * separation].sum()
    waits = np.arange(1, separation)
    # A record that waits for w more steps was drawn b - w steps ago.
    near = np.multiply.outer(products[separation - waits], strengths)
    with np.errstate(over="ignore", invalid="ignore"):
        beside, met = np.exp(far), p * np.exp(near)
        same = p * p * np.exp(strengths * products[0]) * beside
        # Means from a step on of a record that waits no longer, by how long the other one waits:
        # first those where it is π that waits no longer. A row stands for every b + 1-th step.
        number = separation + 1
        first = np.ones((number, separation, len(orders)))
        second = first.copy()
        for step in range(steps - 1, -1, -1):
            now, following = step % number, (step + 1) % number
            once_drawn = first[(step + separation) % number, 0]
            one = beside * second[following, -1] + first[following, -1]
            both = (1 - p) ** 2 * first[following, 0] + p * (1 - p) * one + same * once_drawn
            freed = (step + waits) % number, separation - waits
            drawn_first, drawn_second = met * beside * second[freed], met * first[freed]
            first[now, 1:] = (1 - p) * first[following, :-1] + drawn_first
            second[now, 1:] = (1 - p) * second[following, :-1] + drawn_second
            first[now, 0] = second[now, 0] = both
        logs = np.log(np.maximum(first[0].max(axis=0), second[0].max(axis=0)))
    logs = logs + (steps + 64) * 2.0**-50 * (2 * far + strengths * products[0] + 16)
    return tuple(float(log) if math.isfinite(log) else math.inf for log in logs)


def _chances(run: events.SampledColumns, most: int) -> Array:
    """Return the chance of 0, 1, ..., ``most`` participations of a record that waits for no step.

    No other start has more of them.
    """
    counts = np.arange(most + 1)
    free = run.steps - counts * (run.separation - 1)
    more = np.where(
        free > counts,
        bdtrc(counts, np.maximum(free, counts + 1), run.sampling_probability),
        0.0,
    )
    tails = np.minimum(more * (1 + _TAIL_ROUNDING), 1.0)
    law = np.maximum(np.append(1.0, tails[:-1]) * (1 + _TAIL_ROUNDING) - more, 0.0)
    return np.maximum(law, 1e-300)


def _in_one_place(run: events.SampledColumns, products: Array, strengths: Array) -> Array:
    """Return log max_s E exp(κ Σ_{i∈π} X_|i-s|) for ``strengths`` κ, shape (n,)."""
    steps, separation = run.steps, run.separation
    least, most = _PLACES
    number = max(least, min(most, _MAX_VALUES // (steps * len(strengths))))
    width = -(-steps // number)
    number = -(-steps // width)
    # Each range of steps counts as its last one, in a run that begins as much earlier and is as
    # much longer: that only adds participations.
    longer = steps + width - 1
    places = np.arange(1, number + 1) * width - 1
    values = _means_from(
        run, longer, lambda step: products[np.abs(step - places)][:, None] * strengths
    )
    return np.asarray(values[: width + separation].max(axis=(0, 1)))


def _means_from(run: events.SampledColumns, steps: int, met: Callable[[int], Array]) -> Array:
    """Return log E e^m, m the sum of ``met`` at a record's participations from each step on.

    The record waits for no step then. The shape is that of ``met`` after ``steps`` and b more.
    """
    drawn, left = math.log(run.sampling_probability), math.log1p(-run.sampling_probability)
    values = np.zeros((steps + run.separation, *met(0).shape))
    for step in range(steps - 1, -1, -1):
        values[step] = np.logaddexp(
            left + values[step + 1], drawn + met(step) + values[step + run.separation]
        )
    return values


def _in_cells(run: events.SampledColumns, products: Array, strength: float, most: int) -> Array:
    """Return the log of a bound of E e^{λΓ(π, ρ)} for ρ with 1, ..., ``most`` participations.

    In the b steps about a participation of ρ a record takes part once at most.
    """
    steps, separation = run.steps, run.separation
    half = -(-separation // 2)
    numbers = np.arange(1, most + 1)
    apart = (numbers * separation + 1) // 2
    others = np.append(0.0, np.cumsum(products[apart]))
    tilts = strength * (products[half] + others[numbers - 1])
    values = _means_from(run, steps, lambda _: tilts)
    rounding = (steps + 64) * 2.0**-50 * (float(np.abs(values).max()) + 16)
    logs = math.log(run.sampling_probability) + tilts + values[separation:] - values[:steps]
    hazards = np.minimum(np.exp(np.minimum(logs.max(axis=0) + rounding, 0.0)), 1.0)
    best = np.ones(len(numbers))
    for place in range(separation // 2, separation // 2 - separation, -1):
        exponent = strength * max(float(products[abs(place)] - products[half]), 0.0)
        if exponent > _MAX_EXPONENT:
            return np.full(len(numbers), math.inf)
        best = np.maximum(best, hazards * math.exp(exponent) + (1 - hazards) * best)
    return np.asarray(values.max(axis=0) + numbers * (np.log(best) + rounding))
