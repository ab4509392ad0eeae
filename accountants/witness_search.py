"""The search for a witness: floating point, and trusted with nothing.

A witness says how finely losses are cut and added up. The search tries finer and finer ones, until
the bound that ``affidavit.accountants.checker`` proves is close to the one that was computed.
"""

from __future__ import annotations

import math

from flint import arb

from affidavit.accountants.bracket import Bracket, decimal_up
from affidavit.accountants.checker import (
    Cuts,
    Direction,
    Grid,
    Law,
    Measure,
    Proof,
    Rule,
    RunWitness,
    Unproved,
    Witness,
    composed,
    concluded,
    laws,
    needs_no_witness,
)
from affidavit.plan import Event

_TRIES = ((64, 0.06), (256, 0.02), (512, 0.015), (1024, 0.01), (2048, 0.005), (4096, 0.003))
"""Nodes of a lattice on one side of zero, and how far apart the losses' places are."""
QUICK_TRIES = 3
"""So many of them mostly take less than dp-accounting's PLD, which is asked where they prove too
little."""
_HALVINGS = 10
_LOSS_BITS, _RATIO_BITS = 128, 176
_REACH = 12.5
"""Normal tails that are cut off (standard deviations) are below 1e-35."""


def search_witness(
    event: Event, epsilon: Bracket, delta: float, tries: int = len(_TRIES)
) -> tuple[Witness, Proof]:
    """A witness that ``event`` is (ε, ``delta``)-DP, and its proof, for the least ε found.

    ε (nats) lies in ``epsilon``, about what an engine computed. Raises ``Unproved`` where no
    statement covers a release, or ``tries`` finer and finer lattices prove too little.
    """
    directions = laws(event)
    measured: list[tuple[RunWitness, Measure]] = []
    if not needs_no_witness(directions):
        measured = [_direction(d, epsilon.upper, delta, tries) for d in directions]
    least, most = epsilon.lower, epsilon.upper
    witness, proof = _concluded(directions, measured, most, delta)
    for _ in range(_HALVINGS):
        try:
            witness, proof = _concluded(directions, measured, (least + most) / 2, delta)
            most = (least + most) / 2
        except Unproved:
            least = (least + most) / 2
    return witness, proof


def _concluded(
    directions: tuple[Direction, ...],
    measured: list[tuple[RunWitness, Measure]],
    epsilon: float,
    delta: float,
) -> tuple[Witness, Proof]:
    """The witness and proof of this ε; raises ``Unproved`` where nothing found proves it."""
    witness = Witness(
        epsilon=decimal_up(epsilon, 12),
        delta=decimal_up(delta, 17),
        runs=tuple(run for run, _ in measured),
    )
    return witness, concluded(witness, directions, [measure for _, measure in measured])


def _direction(
    direction: Direction, epsilon: float, delta: float, tries: int
) -> tuple[RunWitness, Measure]:
    """What proves one direction; raises ``Unproved``."""
    for reach, spacing in _TRIES[:tries]:
        run = _witness(direction, epsilon, reach, spacing)
        measure = composed(direction, run)
        if measure.delta(arb(epsilon)) <= arb(delta):
            return run, measure
    raise Unproved("not_proved", "The search for a witness failed.", "Rest on the accountants.")


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
    weight, distance = max(
        (float(weight), abs(mean))
        for piece in law.pieces
        for mean, weight in (*piece.over.items(), *piece.under.items())
        if mean
    )
    return max(1e-9, min(1.0, weight)) * min(1.0, _deviation(mu * distance))


def _deviation(mu: float) -> float:
    """Of e^{μz - μ²/2}."""
    return math.sqrt(math.expm1(min(mu * mu, 600.0)))
