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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from flint import arb

from affidavit.accountants.checker.dominating_pairs import Direction, laws
from affidavit.accountants.checker.lattice import (
    Grid,
    Measure,
    Unproved,
    bad_witness,
    power_product,
)
from affidavit.accountants.checker.measures import Rule, measure
from affidavit.plan import Event

_DECIMAL = re.compile(r"\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)


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
    curves = [composed(*pair) for pair in zip_longest(directions, witness.runs)]
    return concluded(witness, directions, curves)


def concluded(
    witness: Witness, directions: tuple[Direction, ...], curves: Sequence[Measure | GaussianCurve]
) -> Proof:
    """What follows from ``curves``, those that ``composed`` returned, one for each direction.

    Raises ``Unproved`` where that is not what the witness claims.
    """
    epsilon, delta = _decimal(witness.epsilon), _decimal(witness.delta)
    if not delta > 0:
        raise bad_witness("δ is not positive")
    for _, curve in zip(directions, curves, strict=True):
        bound = curve.delta(epsilon)
        if not bound <= delta:
            raise Unproved(
                "not_proved",
                f"The witness proves δ ≤ {bound.upper().str(6, radius=False)} at "
                f"ε = {witness.epsilon}, which is above {witness.delta}.",
                "Search for another witness, or state a larger ε.",
            )
    names = {law.statement for direction in directions for law, _ in direction}
    return Proof(epsilon=witness.epsilon, delta=witness.delta, theorems=tuple(sorted(names)))


def composed(direction: Direction | None, witness: RunWitness | None) -> Measure | GaussianCurve:
    """What dominates the run in one direction; a lone Gaussian mechanism needs no witness.

    Raises ``Unproved`` where the witness is for other releases, or is no good.
    """
    if direction is not None and all(law.statement == "gaussian" for law, _ in direction):
        return GaussianCurve(mu=sum((law.mu for law, _ in direction), arb(0)))
    if direction is None or witness is None or len(witness.rules) != len(direction):
        raise bad_witness("it is for other releases")
    if witness.grid.linear:
        raise bad_witness("losses are composed on a grid of ratios")
    parts = zip(direction, witness.rules, strict=True)
    return power_product([(measure(law, rule, witness.grid), n) for (law, n), rule in parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianCurve:
    """N(μ, 1) against N(0, 1); μ = 0 is the empty run."""

    mu: arb

    def delta(self, epsilon: arb) -> arb:
        """Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), a ball."""
        if self.mu == 0:
            return arb(0)
        mu, root = self.mu, arb(2).sqrt()
        high, low = (epsilon / mu - mu / 2) / root, (epsilon / mu + mu / 2) / root
        return (high.erfc() - epsilon.exp() * low.erfc()) / 2


def _decimal(text: str) -> arb:
    if not (isinstance(text, str) and _DECIMAL.fullmatch(text)):
        raise bad_witness("ε or δ is no decimal number")
    return arb(text)
