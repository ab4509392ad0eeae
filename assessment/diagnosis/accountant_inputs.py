"""An account: the few numbers of a plan that a user passes to an accountant.

The correct account of a plan and every mistaken one have the same numbers (noise of each block,
sampling probability, steps, participations, distance, δ), so that a mistake is a change of some of
them, and two mistakes are two changes. ``parts`` converts an account to releases with counts, which
the readings evaluate.

Nothing here is a bound. A certified number never depends on an account.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from affidavit.plan import events

Blocks = Literal["joint", "independent", "alone"]
"""How the blocks of a step are counted: as one release, as K sampled ones, or only one of them."""
Pair = Literal["add_remove", "replace_one", "without_replacement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of release; ``probability`` is None if nothing is sampled.

    ``noise_multiplier`` is relative to the distance that one record moves the sum for
    ``add_remove``, and to the clip norm for the two other pairs, which include the distance.
    """

    noise_multiplier: float
    probability: float | None = None
    pair: Pair = "add_remove"


Parts = tuple[tuple[Part, int], ...]
"""Releases with the number of times that each runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseAccount:
    """The account of one phase.

    ``sigmas`` are the blocks' multipliers with their counts; ``lone`` is the multiplier of the only
    counted block if ``blocks`` is ``alone``. ``scale`` multiplies the noise. ``distance`` is how
    far a record moves one sum, in clip norms. ``probability`` is None for a run without
    amplification, in which a record takes part ``participations`` times. ``sensitivity`` is that of
    a strategy over the whole run, which is then one release. ``known`` is False if no reading
    covers the run unless a mistake changes it, and ``several`` is True if several records of a user
    are drawn separately, which no pair covers.
    """

    sigmas: tuple[tuple[float, int], ...]
    joint: float
    steps: int
    participations: int
    probability: float | None = None
    pair: Pair = "add_remove"
    distance: float = 1.0
    sensitivity: float | None = None
    blocks: Blocks = "joint"
    lone: float = math.inf
    scale: float = 1.0
    known: bool = True
    several: bool = False

    def parts(self) -> Parts | None:
        """Return the phase's releases, or None if no reading covers them."""
        if not self.known or (self.several and self.probability is not None):
            return None
        moved = self.distance if self.pair == "add_remove" else 1.0
        if self.sensitivity is not None:
            moved *= self.sensitivity
        times = self.participations if self.probability is None else self.steps
        if self.sensitivity is not None and self.probability is None:
            times = 1
        sigmas = self.sigmas
        if self.blocks != "independent":
            sigmas = ((self.joint if self.blocks == "joint" else self.lone, 1),)
        return tuple(
            (
                Part(
                    noise_multiplier=self.scale * sigma / moved,
                    probability=self.probability,
                    pair=self.pair,
                ),
                count * times,
            )
            for sigma, count in sigmas
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The account of a run; ``extra`` are Gaussian releases outside training.

    ``extra`` is None if there are other releases outside training, which no reading covers.
    """

    phases: tuple[PhaseAccount, ...]
    extra: Parts | None
    delta: float

    def parts(self) -> Parts | None:
        """Return all releases, with equal ones merged, or None if no reading covers them."""
        if self.extra is None:
            return None
        counts: Counter[Part] = Counter()
        for phase in self.phases:
            if phase.steps == 0:
                continue
            result = phase.parts()
            if result is None:
                return None
            for part, times in result:
                counts[part] += times
        for part, times in self.extra:
            counts[part] += times
        return tuple(counts.items())


def event_of(parts: Parts) -> events.Event:
    """Return the event of ``parts`` for Affidavit's own accountants."""
    return events.Composed(
        events=tuple(events.Repeated(event=_leaf(part), count=times) for part, times in parts)
    )


def _leaf(part: Part) -> events.Event:
    q, sigma = part.probability, part.noise_multiplier
    if q is None or q >= 1:
        distance = 1.0 if part.pair == "add_remove" else 2.0
        return events.Gaussian(noise_multiplier=sigma / distance)
    if part.pair == "without_replacement":
        share = Fraction(q).limit_denominator(10**9)
        return events.WithoutReplacementGaussian(
            dataset_size=share.denominator, sample_size=share.numerator, noise_multiplier=sigma
        )
    return events.PoissonSubsampledGaussian(
        sampling_probability=q, noise_multiplier=sigma, pair=part.pair
    )
