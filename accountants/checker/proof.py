"""δ(ε) ≤ x, proved from a witness in ball arithmetic.

The witness says where to cut the losses of each release and on which lattices to add them up;
the checker then composes measures that dominate the releases and reads off δ. Bad places and
lattices make the bound larger, never wrong. docs/theorems/checker.md has the proof. Nothing here
comes from the engines: only events do.

>>> from affidavit.plan import Gaussian
>>> prove(Witness(epsilon="4.4", delta="1e-5", runs=()), Gaussian(noise_multiplier=1.0)).theorems
('gaussian',)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from operator import index
from typing import Any

from flint import arb

from affidavit.accountants.checker.dominating_pairs import Direction, Law, laws
from affidavit.accountants.checker.lattice import (
    Grid,
    Measure,
    Unproved,
    at_precision,
    bad_witness,
    power_product,
)
from affidavit.accountants.checker.measures import Cuts, allocation_points, pair_points
from affidavit.plan import Event

_DECIMAL = re.compile(r"\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one release is cut; ``sums`` is where the ratios of an allocation are added up."""

    cuts: Cuts
    sums: Grid | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWitness:
    """What a search found for one direction of the adjacency; none of it needs to be right.

    Losses are composed on ``grid``; ``rules`` are one for each law of the direction, in order.
    """

    grid: Grid
    rules: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """The bound claimed, as decimals, and a ``RunWitness`` for each direction.

    One Gaussian mechanism needs none.
    """

    epsilon: str
    delta: str
    runs: tuple[RunWitness, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A run is (``epsilon``, ``delta``)-DP by the rows of the table named by ``theorems``."""

    epsilon: str
    delta: str
    theorems: tuple[str, ...]


def prove(witness: Witness, event: Event) -> Proof:
    """The bound that ``witness`` claims, where it proves it of ``event``.

    Raises ``Unproved`` where it does not, or where no theorem here covers the event.
    """
    directions = laws(event)
    if needs_no_witness(directions):
        return concluded(witness, directions, [])
    if len(witness.runs) != len(directions):
        raise bad_witness(f"{len(directions)} directions are needed")
    return concluded(witness, directions, [*map(composed, directions, witness.runs)])


def concluded(
    witness: Witness, directions: tuple[Direction, ...], measures: list[Measure]
) -> Proof:
    """What follows from ``measures``, those that ``composed`` returned, one for each direction.

    Raises ``Unproved`` where that is not what the witness claims.
    """
    epsilon, delta = _decimal(witness.epsilon), _decimal(witness.delta)
    if not (epsilon >= 0 and delta > 0):
        raise Unproved("bad_witness", "ε must not be negative, and δ positive.", "Search again.")
    for direction, measure in zip_longest(directions, measures):
        bound = measure.delta(epsilon) if measure else _gaussian_delta(direction, epsilon)
        if not bound <= delta:
            raise Unproved(
                "not_proved",
                f"The witness proves δ ≤ {bound.upper().str(6, radius=False)} at "
                f"ε = {witness.epsilon}, which is above {witness.delta}.",
                "Search for another witness, or state a larger ε.",
            )
    names = {law.statement for direction in directions for law, _ in direction}
    return Proof(epsilon=witness.epsilon, delta=witness.delta, theorems=tuple(sorted(names)))


def needs_no_witness(directions: tuple[Direction, ...]) -> bool:
    """Whether the run is one Gaussian mechanism, or empty."""
    return all(law.statement == "gaussian" for law, _ in directions[0])


def composed(direction: Direction, witness: RunWitness) -> Measure:
    """A measure on losses that dominates the run in one direction.

    Raises ``Unproved`` where the witness is for other releases, or is no good.
    """
    at_precision()
    if len(witness.rules) != len(direction) or witness.grid.linear:
        raise bad_witness("it is for other releases")
    return power_product(
        [
            (_measure(law, rule, witness.grid), times)
            for (law, times), rule in zip(direction, witness.rules, strict=True)
        ]
    )


def _measure(law: Law, rule: Rule, grid: Grid) -> Measure:
    if not law.bins:
        return grid.measure(*pair_points(law.pieces, law.mu, rule.cuts))
    if rule.sums is None:
        raise bad_witness("an allocation is summed on no grid")
    share = arb(law.share.numerator) / law.share.denominator
    points = allocation_points(law.bins, share, law.mu, rule.cuts, rule.sums, removed=law.removed)
    return grid.measure(*points)


def _gaussian_delta(direction: Direction, epsilon: arb) -> arb:
    """N(μ, 1) against N(0, 1): Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ); 0 for the empty run."""
    if not direction:
        return arb(0)
    ((law, _),) = direction
    mu, root = law.mu, arb(2).sqrt()
    high, low = (epsilon / mu - mu / 2) / root, (epsilon / mu + mu / 2) / root
    return (high.erfc() - epsilon.exp() * low.erfc()) / 2


def _decimal(text: str) -> arb:
    if not (isinstance(text, str) and _DECIMAL.fullmatch(text)):
        raise bad_witness("ε or δ is no decimal number")
    return arb(text)


def witness_document(witness: Witness) -> dict[str, Any]:
    """``witness`` as JSON data, its doubles as the hexadecimal text of ``float.hex``."""
    return {
        "epsilon": witness.epsilon,
        "delta": witness.delta,
        "runs": [
            {
                "grid": _grid_document(run.grid),
                "rules": [
                    {"spacing": rule.cuts.spacing.hex(), "reach": rule.cuts.reach.hex()}
                    | ({} if rule.sums is None else {"sums": _grid_document(rule.sums)})
                    for rule in run.rules
                ],
            }
            for run in witness.runs
        ],
    }


def witness_from(document: Mapping[str, Any]) -> Witness:
    """The witness of ``witness_document``; raises ``Unproved`` for what is none."""
    try:
        return Witness(
            epsilon=document["epsilon"],
            delta=document["delta"],
            runs=tuple(
                RunWitness(
                    grid=_grid(run["grid"], linear=False),
                    rules=tuple(
                        Rule(
                            cuts=Cuts(
                                spacing=float.fromhex(rule["spacing"]),
                                reach=float.fromhex(rule["reach"]),
                            ),
                            sums=_grid(rule["sums"], linear=True) if "sums" in rule else None,
                        )
                        for rule in run["rules"]
                    ),
                )
                for run in document["runs"]
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unproved("bad_witness", f"This is no witness: {error}.", "Search again.") from None


def _grid_document(grid: Grid) -> dict[str, Any]:
    return {
        "step": grid.step.hex(),
        "reach": grid.reach,
        "scales": grid.scales,
        "bits": grid.bits,
    }


def _grid(document: Mapping[str, Any], *, linear: bool) -> Grid:
    return Grid(
        step=float.fromhex(document["step"]),
        reach=index(document["reach"]),
        scales=index(document["scales"]),
        bits=index(document["bits"]),
        linear=linear,
    )
