"""dp-accounting's events as ours, release by release.

A noise multiplier is the noise over the bound on one record's contribution, as ``GaussianDpEvent``
and ``LaplaceDpEvent`` define it: under replace_one a release moves by twice that bound. (Of
dp-accounting's accountants PLD takes it so, and RDP as over the distance of a replacement.)
Gaussians inside one sample are one joint release. What no theorem of ours bounds on both sides is
refused: a ρ of zCDP says nothing of what is attained, and a record that is drawn with replacement
changes who else is drawn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from dp_accounting import dp_event

from affidavit.importers import DP_EVENT_REMEDIES
from affidavit.mechanisms import joint_multiplier_of_blocks
from affidavit.plan import (
    MAX_WEIGHTS,
    Adjacency,
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    PoissonSubsampledGaussian,
    RepeatAndSelect,
    Repeated,
    TruncatedPoissonGaussian,
    WithoutReplacementGaussian,
)

ROUNDING = 2.0**-51
"""Relative, of a quotient of numbers that are read as decimals."""
ABSENT = 1e-300
"""The weight of a multiple that a mixture leaves out, below the rounding of every other."""


class NotTranslated(Exception):
    """An event that no event of ours stands for; the message says what to do."""


def event_of(event: Any, adjacency: Adjacency) -> Event:
    """What ``event`` releases; a release without any effect is an empty composition.

    Raises ``NotTranslated``, and ``ValueError`` for numbers out of range.
    """
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return Repeated(event=event_of(event.event, adjacency), count=_whole(event.count))
    if isinstance(event, dp_event.ComposedDpEvent):
        return Composed(events=tuple(event_of(part, adjacency) for part in event.events))
    translate = _TRANSLATIONS.get(type(event))
    if translate is None:
        name = type(event).__name__
        raise NotTranslated(f"{name} is not supported. {DP_EVENT_REMEDIES.get(name, '')}".rstrip())
    return translate(event, adjacency)


def adds_no_noise(event: Any) -> bool:
    """Whether a part of ``event`` releases without noise, as where a search begins."""
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return True
    if releases_nothing(event):
        return False
    parts = (*getattr(event, "events", ()), *filter(None, (getattr(event, "event", None),)))
    noise = [getattr(event, name, None) for name in ("noise_multiplier", "standard_deviation")]
    return 0 in noise or any(map(adds_no_noise, parts))


def releases_nothing(event: Any) -> bool:
    """Whether no record has any effect on what ``event``, of a known kind, releases."""
    if type(event) not in (dp_event.ComposedDpEvent, dp_event.SelfComposedDpEvent, *_TRANSLATIONS):
        return False
    empty = ("sampling_probability", "truncated_batch_size", "dataset_size", "sample_size")
    moves = getattr(event, "sensitivities", None)
    return (
        isinstance(event, dp_event.NoOpDpEvent)
        or any(getattr(event, name, None) == 0 for name in empty)
        or (moves is not None and not any(moves))
        or getattr(event, "step_counts", None) in (0, [])
        or (hasattr(event, "event") and releases_nothing(event.event))
        or (hasattr(event, "events") and all(map(releases_nothing, event.events)))
    )


def _gaussian(event: Any, adjacency: Adjacency) -> Event:
    return Gaussian(noise_multiplier=float(event.noise_multiplier) / _distance(adjacency))


def _laplace(event: Any, adjacency: Adjacency) -> Event:
    return Laplace(noise_multiplier=float(event.noise_multiplier) / _distance(adjacency))


def _poisson(event: Any, adjacency: Adjacency) -> Event:
    joint = joint_multiplier_of_blocks(_blocks(event.event))
    if event.sampling_probability == 1:
        return Gaussian(noise_multiplier=joint / _distance(adjacency))
    return PoissonSubsampledGaussian(
        sampling_probability=float(event.sampling_probability),
        noise_multiplier=joint,
        pair="replace_one" if adjacency == "replace_one" else "add_remove",
    )


def _fixed_size(event: Any, adjacency: Adjacency) -> Event:
    if adjacency != "replace_one":
        raise NotTranslated("a SampledWithoutReplacementDpEvent needs REPLACE_ONE.")
    size, lot = _whole(event.source_dataset_size), _whole(event.sample_size)
    joint = joint_multiplier_of_blocks(_blocks(event.event))
    if lot == size:
        return Gaussian(noise_multiplier=joint / _distance(adjacency))
    return WithoutReplacementGaussian(dataset_size=size, sample_size=lot, noise_multiplier=joint)


def _truncated(event: Any, adjacency: Adjacency) -> Event:
    if event.truncated_batch_size > event.dataset_size:  # no sample is cut
        gaussian = dp_event.GaussianDpEvent(event.noise_multiplier)
        return _poisson(
            dp_event.PoissonSampledDpEvent(event.sampling_probability, gaussian), adjacency
        )
    return TruncatedPoissonGaussian(
        dataset_size=_whole(event.dataset_size),
        sampling_probability=float(event.sampling_probability),
        max_lot_size=_whole(event.truncated_batch_size),
        noise_multiplier=float(event.noise_multiplier),
        neighbours=adjacency,
    )


def _mixture(event: Any, adjacency: Adjacency) -> Event:
    if adjacency == "replace_one":
        raise NotTranslated("a MixtureOfGaussiansDpEvent does not say what REPLACE_ONE moves.")
    if len(event.sensitivities) != len(event.sampling_probs):
        raise ValueError("sensitivities and sampling_probs are not equally many")
    if not all(map(math.isfinite, event.sensitivities)):
        raise ValueError("a sensitivity is not finite")
    weights: defaultdict[Fraction, float] = defaultdict(float)
    for move, weight in zip(event.sensitivities, event.sampling_probs, strict=True):
        weights[Fraction(repr(float(move)))] += float(weight)
    unit = Fraction(
        gcd(*(move.numerator for move in weights)), lcm(*(m.denominator for m in weights))
    )
    places = {int(move / unit): weight for move, weight in weights.items()}
    if min(places) < 0 or 0 not in places or max(places) >= MAX_WEIGHTS:
        raise NotTranslated(
            "the sensitivities of a MixtureOfGaussiansDpEvent are 0 and multiples of one number up "
            f"to {MAX_WEIGHTS - 1}; round them up to such, and account for the larger mixture."
        )
    noise = float(event.standard_deviation / unit) * (1 - ROUNDING)
    if places.keys() == {0, 1} and math.fsum(places.values()) == 1:
        return PoissonSubsampledGaussian(sampling_probability=places[1], noise_multiplier=noise)
    return GaussianMixture(
        weights=tuple(places.get(place) or ABSENT for place in range(max(places) + 1)),
        noise_multiplier=noise,
    )


def _tree(event: Any, adjacency: Adjacency) -> Event:
    """A record is in one leaf, and so in as many nodes as the deepest tree has complete levels."""
    if adjacency != "zero_out":
        raise NotTranslated("a SingleEpochTreeAggregationDpEvent needs REPLACE_SPECIAL.")
    steps = event.step_counts
    most = max(map(_whole, steps)) if isinstance(steps, list | tuple) else _whole(steps)
    nodes = most.bit_length()
    return Gaussian(
        noise_multiplier=joint_multiplier_of_blocks([(float(event.noise_multiplier), nodes)])
    )


def _selection(event: Any, adjacency: Adjacency) -> Event:
    return RepeatAndSelect(
        event=event_of(event.event, adjacency), mean=float(event.mean), shape=float(event.shape)
    )


_TRANSLATIONS: dict[type[Any], Callable[[Any, Adjacency], Event]] = {
    dp_event.NoOpDpEvent: lambda *_: Composed(events=()),
    dp_event.GaussianDpEvent: _gaussian,
    dp_event.LaplaceDpEvent: _laplace,
    dp_event.PoissonSampledDpEvent: _poisson,
    dp_event.SampledWithoutReplacementDpEvent: _fixed_size,
    dp_event.TruncatedSubsampledGaussianDpEvent: _truncated,
    dp_event.MixtureOfGaussiansDpEvent: _mixture,
    dp_event.SingleEpochTreeAggregationDpEvent: _tree,
    dp_event.RepeatAndSelectDpEvent: _selection,
}


def _blocks(event: Any, times: int = 1) -> Iterator[tuple[float, int]]:
    """The noise multipliers of the Gaussians of one sample, each with its number."""
    match event:
        case dp_event.GaussianDpEvent():
            yield float(event.noise_multiplier), times
        case dp_event.SelfComposedDpEvent():
            yield from _blocks(event.event, times * _whole(event.count))
        case dp_event.ComposedDpEvent():
            for part in event.events:
                yield from _blocks(part, times)
        case _:
            raise NotTranslated(f"{type(event).__name__} inside a sample is not supported.")


def _distance(adjacency: Adjacency) -> float:
    """How far one record moves a sum, in bounds on its contribution."""
    return 2.0 if adjacency == "replace_one" else 1.0


def _whole(value: Any) -> int:
    if not (math.isfinite(value) and value == int(value) and value >= 0):
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return int(value)
