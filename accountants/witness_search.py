"""The search for a witness: floating point, and trusted with nothing.

A witness says how finely losses are cut and added up. The search tries finer and finer ones, until
the bound that ``affidavit.accountants.checker`` proves is close to the one that was computed.
"""

from __future__ import annotations

import math

from flint import arb

from affidavit.accountants.bracket import decimal_up
from affidavit.accountants.checker import (
    Cuts,
    Direction,
    Grid,
    Law,
    Measure,
    Rule,
    RunWitness,
    Unproved,
    Witness,
    composed,
    laws,
    needs_no_witness,
)
from affidavit.plan import Event

_TRIES = ((512, 0.015), (1024, 0.01), (2048, 0.005), (4096, 0.003))
"""Nodes of a lattice on one side of zero, and how far apart the losses' places are."""
_LOSS_BITS, _RATIO_BITS = 128, 176
_WIDEST = 1e-4
"""Part of ε within which the bound that is proved must lie above the one that was computed."""
_REACH = 12.5
"""Normal tails that are cut off (standard deviations) are below 1e-35."""


def search_witness(event: Event, epsilon: float, delta: float) -> Witness:
    """A witness that ``event`` is (about ``epsilon``, ``delta``)-DP, for the least ε it proves.

    ``epsilon`` (nats) is what an engine computed; the witness's is at most 0.01 % more. Raises
    ``Unproved`` where there is no statement about a release, or the search finds no witness.
    """
    directions = laws(event)
    runs_proved: list[tuple[RunWitness, float]] = []
    if not needs_no_witness(directions):
        runs_proved = [_direction(direction, epsilon, delta) for direction in directions]
    proved = max((least for _, least in runs_proved), default=epsilon)
    runs = tuple(run for run, _ in runs_proved)
    return Witness(epsilon=decimal_up(proved, 12), delta=decimal_up(delta, 17), runs=runs)


def _direction(direction: Direction, epsilon: float, delta: float) -> tuple[RunWitness, float]:
    """What proves one direction, and the least ε that it proves; raises ``Unproved``."""
    for reach, spacing in _TRIES:
        run = _witness(direction, epsilon, reach, spacing)
        measure = composed(direction, run)
        if _proves(measure, epsilon * (1 + _WIDEST), delta):
            return run, _least(measure, epsilon, delta)
    raise Unproved("not_proved", "The search for a witness failed.", "Rest on the accountants.")


def _least(measure: Measure, epsilon: float, delta: float) -> float:
    """The least ε from ``epsilon`` up at which ``measure`` proves δ ≤ ``delta``."""
    if _proves(measure, epsilon, delta):
        return epsilon
    low, high = 0.0, _WIDEST
    for _ in range(8):
        middle = (low + high) / 2
        if _proves(measure, epsilon * (1 + middle), delta):
            high = middle
        else:
            low = middle
    return epsilon * (1 + high)


def _proves(measure: Measure, epsilon: float, delta: float) -> bool:
    return bool(measure.delta(arb(epsilon)) <= arb(delta))


def _witness(direction: Direction, epsilon: float, reach: int, spacing: float) -> RunWitness:
    finest = 2 * min(_spread(law) for law, _ in direction) / reach
    grid = _grid(finest, reach, 2 * epsilon + 30, _LOSS_BITS)
    rules = []
    for law, _ in direction:
        sums = None
        if law.bins:
            mu = float(law.mu)
            largest = law.bins * math.exp(min(mu * (mu + _REACH), 600.0))
            # One is a node, so that no ratio is carried below zero.
            width = 4.0 ** math.ceil(math.log(1 / min(1.0, _deviation(mu)), 4) + 1)
            sums = _grid(1 / (reach * width), reach, largest, _RATIO_BITS, linear=True)
        rules.append(Rule(cuts=Cuts(spacing=spacing, reach=_REACH), sums=sums))
    return RunWitness(grid=grid, rules=tuple(rules))


def _grid(step: float, reach: int, largest: float, bits: int, *, linear: bool = False) -> Grid:
    scales = max(1, math.ceil(math.log(largest / (step * (reach - 2)), 4)) + 1)
    return Grid(step=step, reach=reach, scales=min(scales, 60), bits=bits, linear=linear)


def _spread(law: Law) -> float:
    """About how far the frequent losses of one release lie from zero (nats)."""
    mu = float(law.mu)
    if law.bins:
        return min(1.0, _deviation(mu) / math.sqrt(law.bins)) * float(law.share)
    if law.statement == "gaussian":
        return mu
    piece = law.pieces[0]
    weight, distance = max(
        (float(weight), abs(mean)) for mean, weight in {**piece.over, **piece.under}.items() if mean
    )
    return min(1.0, weight) * min(1.0, _deviation(mu * distance))


def _deviation(mu: float) -> float:
    """Of e^{μz - μ²/2}."""
    return math.sqrt(math.expm1(min(mu * mu, 600.0)))
