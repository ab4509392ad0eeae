"""An account: what somebody would have told an accountant about a plan.

The true account of a plan and every mistaken one have the same few numbers (noise of each
block, sampling probability, steps, participations, distance, δ), so that a mistake is a
change of some of them and two mistakes are one change after the other. ``parts`` turns an
account into what the readings evaluate: releases with a noise multiplier in units of what
one record moves, each so often.

Nothing here bounds anything. A certified number never passes through an account.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from affidavit.plan import (
    Composed,
    Event,
    Gaussian,
    PoissonSubsampledGaussian,
    Repeated,
    WithoutReplacementGaussian,
)

Blocks = Literal["joint", "independent", "alone"]
"""How the blocks of a step are counted: as one release, as K sampled ones, or only one."""
Pair = Literal["add_remove", "replace_one", "without_replacement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of release; ``probability`` is None where nothing is sampled.

    ``noise_multiplier`` is over what one record moves for ``add_remove``, and over the clip
    norm for the two other pairs, whose distance is in the pair itself.
    """

    noise_multiplier: float
    probability: float | None = None
    pair: Pair = "add_remove"


Parts = tuple[tuple[Part, int], ...]
"""Releases with how often each runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseAccount:
    """One phase as it would be accounted.

    ``sigmas`` are the blocks' multipliers with their counts; ``lone`` is the one that counts
    where the others are forgotten. ``scale`` multiplies the noise. ``distance`` is how far
    a record moves one sum, in clip norms. ``probability`` is None for a run without
    amplification, in which a record takes part ``participations`` times. ``sensitivity``
    is that of a strategy over the whole run, which then is one release. ``known`` is False
    for a run that no reading here can take as it is, until a mistake makes it one that is.
    ``several`` records of a user are drawn one by one, which is no pair at a distance.
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
        """The phase's releases; None where it cannot be accounted as it stands."""
        if not self.known or (self.several and self.probability is not None):
            return None
        over = self.distance if self.pair == "add_remove" else 1.0
        if self.sensitivity is not None:
            over *= self.sensitivity
        times = self.participations if self.probability is None else self.steps
        if self.sensitivity is not None and self.probability is None:
            times = 1
        return tuple(
            (
                Part(
                    noise_multiplier=self.scale * sigma / over,
                    probability=self.probability,
                    pair=self.pair,
                ),
                count * times,
            )
            for sigma, count in self._releases()
        )

    def _releases(self) -> tuple[tuple[float, int], ...]:
        match self.blocks:
            case "joint":
                return ((self.joint, 1),)
            case "independent":
                return self.sigmas
            case "alone":
                return ((self.lone, 1),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """A whole run as it would be accounted; ``extra`` are Gaussian events outside training.

    ``extra`` is None where something else happens there, which no reading here can take.
    """

    phases: tuple[PhaseAccount, ...]
    extra: Parts | None
    delta: float

    def parts(self) -> Parts | None:
        """All releases, equal ones merged; None where one cannot be accounted.

        A phase of no steps has none.
        """
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


def event_of(parts: Parts) -> Event:
    """The event that our own accountants read."""
    return Composed(events=tuple(Repeated(event=_leaf(part), count=times) for part, times in parts))


def _leaf(part: Part) -> Event:
    q, sigma = part.probability, part.noise_multiplier
    if q is None or q >= 1:
        distance = 1.0 if part.pair == "add_remove" else 2.0
        return Gaussian(noise_multiplier=sigma / distance)
    if part.pair == "without_replacement":
        share = Fraction(q).limit_denominator(10**9)
        return WithoutReplacementGaussian(
            dataset_size=share.denominator, sample_size=share.numerator, noise_multiplier=sigma
        )
    return PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=part.pair)
