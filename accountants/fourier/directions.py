"""What one event asks of the method: laws to compose, one list for each direction.

A bound from above needs laws that dominate every step of every adaptive run, in each
direction of the adjacency; a bound from below needs laws that some pair of data sets
really produces. ``lower_directions`` names them and refuses what has no theorem.

===========================  ==============================  ========================
leaf                         upper bound                     lower bound
===========================  ==============================  ========================
Gaussian                     N(μ) against N(0)               the same
Poisson, add_remove          both orders of the pair         the same
Poisson, replace_one         the symmetric pair              the same
without replacement          the convex profile of both      both orders of the pair
===========================  ==============================  ========================

The two orders are taken for the composition as a whole: every add/remove step of one run
has the record on the same side. References: docs/theorems/poisson-add-remove.md,
poisson-replace-one.md, without-replacement.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.losses import Kind, LossLaw, NormalMixtureLaw
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.plan.events import (
    Event,
    Gaussian,
    Leaf,
    PoissonSubsampledGaussian,
    WithoutReplacementGaussian,
)

Side = Literal["remove", "add"]

NOISE_MULTIPLIERS = (0.2, 1000.0)
SAMPLING_PROBABILITIES = (1e-6, 1.0)
MOST_STEPS = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """One order of the hypotheses: the laws of the steps with their counts."""

    laws: tuple[tuple[LossLaw, int], ...]


def lower_directions(event: Event) -> tuple[Direction, ...]:
    """The directions of ``event``, none for the empty composition.

    Raises ``Unsupported`` for a leaf without a theorem and ``OutOfReach`` for one outside
    the range in which the bounds were verified.
    """
    parts = leaves(event)
    check_range(parts)
    if not parts:
        return ()
    sides: Sequence[Side] = ("remove", "add") if any(map(_has_sides, parts)) else ("remove",)
    return tuple(
        Direction(laws=tuple((_law(leaf, side), count) for leaf, count in parts)) for side in sides
    )


def check_range(parts: Sequence[tuple[Leaf, int]]) -> None:
    """Refuse parameters outside the range of the method."""
    steps = sum(count for _, count in parts)
    if steps > MOST_STEPS:
        raise OutOfReach(f"{steps} steps, at most {MOST_STEPS}", "account for fewer steps")
    for leaf, _ in parts:
        low, high = NOISE_MULTIPLIERS
        if not low <= leaf.noise_multiplier <= high:
            raise OutOfReach(
                f"noise multiplier {leaf.noise_multiplier:g} is outside [{low:g}, {high:g}]",
                "use another accountant for such noise",
            )
        if isinstance(leaf, PoissonSubsampledGaussian):
            least = SAMPLING_PROBABILITIES[0]
            if leaf.sampling_probability < least:
                raise OutOfReach(
                    f"sampling probability {leaf.sampling_probability:g} is below {least:g}",
                    "round the sampling probability up",
                )


def _has_sides(part: tuple[Leaf, int]) -> bool:
    leaf, _ = part
    match leaf:
        case Gaussian():
            return False
        case PoissonSubsampledGaussian(pair=pair):
            return pair == "add_remove"
        case WithoutReplacementGaussian():
            return True
        case _:
            assert_never(leaf)


def _law(leaf: Leaf, side: Side) -> LossLaw:
    match leaf:
        case Gaussian(noise_multiplier=sigma):
            return NormalMixtureLaw(kind="gaussian", noise_multiplier=sigma)
        case PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=pair):
            kind: Kind = "replace" if pair == "replace_one" else side
            return NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
        case WithoutReplacementGaussian():
            raise Unsupported("sampling without replacement has no proved pair here")
        case _:
            assert_never(leaf)
