"""The table of dominating pairs: which statement covers which release, and with what law.

``DOMINATING_PAIRS`` is data: docs/theorems/checker.md is checked against it, and a certificate
names the rows that it rests on. A release without a row is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from flint import arb

from affidavit.accountants.checker.enclosures import Mixture, Unproved
from affidavit.plan import (
    Composed,
    Event,
    Gaussian,
    Leaf,
    PoissonSubsampledGaussian,
    RepeatAndSelect,
    Repeated,
)

MOST_KINDS = 20
"""Different releases of one run; each costs a second at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One statement: the pair that dominates ``release`` where ``requires`` holds.

    ``source`` is its page in docs/theorems.
    """

    release: str
    requires: str
    pairs: tuple[str, ...]
    source: str


DOMINATING_PAIRS: dict[str, Row] = {
    "gaussian": Row(
        release="Gaussian",
        requires="σ > 0",
        pairs=("N(μ) against N(0)",),
        source="correlated-noise",
    ),
    "poisson_add_remove": Row(
        release="PoissonSubsampledGaussian",
        requires="add_remove or zero_out, σ > 0, 0 < q < 1",
        pairs=("(1-q) N(0) + q N(μ) against N(0)", "N(0) against (1-q) N(0) + q N(-μ)"),
        source="poisson-add-remove",
    ),
    "poisson_replace_one": Row(
        release="PoissonSubsampledGaussian",
        requires="replace_one, σ > 0, 0 < q < 1",
        pairs=("(1-q) N(0) + q N(μ) against (1-q) N(0) + q N(-μ)",),
        source="poisson-replace-one",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of one release: plainly Gaussian with ``mu_squared``, or a ``mixture``."""

    theorem: str
    mu_squared: arb
    mixture: Mixture | None = None


Direction = tuple[tuple[Law, int], ...]


def laws(event: Event) -> tuple[Direction, ...]:
    """The laws of ``event`` with their counts, for each direction of the adjacency.

    Raises ``Unproved`` with the code ``no_statement`` for a release without a row.
    """
    counts: Counter[Leaf] = Counter()
    _count(event, 1, counts)
    if len(counts) > MOST_KINDS:
        raise Unproved(
            "too_many_kinds",
            f"The run has {len(counts)} kinds of release; at most {MOST_KINDS} are proved.",
            "Use fewer phases.",
        )
    parts = sorted(((leaf, times) for leaf, times in counts.items() if times), key=repr)
    both = any(
        isinstance(leaf, PoissonSubsampledGaussian) and leaf.pair == "add_remove"
        for leaf, _ in parts
    )
    sides: tuple[Literal["remove", "add"], ...] = ("remove", "add") if both else ("remove",)
    return tuple(tuple((_law(leaf, side), times) for leaf, times in parts) for side in sides)


def _law(leaf: Leaf, side: Literal["remove", "add"]) -> Law:
    match leaf:
        case Gaussian(noise_multiplier=sigma):
            return Law(theorem="gaussian", mu_squared=1 / arb(sigma) ** 2)
        case PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=pair):
            replace = pair == "replace_one"
            mixture = Mixture(
                above=replace or side == "remove",
                below=replace or side == "add",
                noise_multiplier=sigma,
                probability=q,
            )
            return Law(theorem=f"poisson_{pair}", mu_squared=arb(0), mixture=mixture)
        case _:
            raise _without_statement(type(leaf).__name__)


def _count(event: Event, times: int, counts: Counter[Leaf]) -> None:
    match event:
        case Repeated(event=inner, count=count):
            _count(inner, times * count, counts)
        case Composed(events=events):
            for inner in events:
                _count(inner, times, counts)
        case RepeatAndSelect():
            raise _without_statement("RepeatAndSelect")
        case _:
            counts[event] += times


def _without_statement(name: str) -> Unproved:
    return Unproved(
        "no_statement",
        f"The checker has no statement about {name}.",
        "Rest on the accountants of the certificate, or use a release of docs/theorems/checker.md.",
    )
