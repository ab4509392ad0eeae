"""An accountant with dp-accounting's interface, which translates its events into ours.

A noise multiplier is the noise over the bound on one record's contribution, as ``GaussianDpEvent``
and ``LaplaceDpEvent`` define it: under replace_one a release moves by twice that bound. (In
dp-accounting, PLD accounting reads it so, but RDP accounting reads it as over the distance of a
replacement.) Gaussians inside one sample are one joint release. Events without a two-sided bound
are refused: a ρ of zCDP has no lower bound, and a record drawn with replacement changes which
others are drawn.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event

from affidavit.accountants import Bracket, EventCurve, PrivacyCurve
from affidavit.importers import DP_EVENT_REMEDIES
from affidavit.library.certification import Bound, bound_of
from affidavit.mechanisms import joint_multiplier_of_blocks
from affidavit.plan import (
    Adjacency,
    events,
)

ADJACENCY: dict[NeighboringRelation, Adjacency] = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add_remove",
    NeighboringRelation.REPLACE_ONE: "replace_one",
    NeighboringRelation.REPLACE_SPECIAL: "zero_out",
}


class PrivacyAccountant(dp_accounting.PrivacyAccountant):  # type: ignore[misc]
    """A ``dp_accounting.PrivacyAccountant`` with proved upper and lower bounds.

    Supports Gaussian and Laplace releases, Gaussians on samples (Poisson, truncated Poisson, fixed
    size), mixtures of Gaussians, single-epoch trees and selections among repetitions.
    ``get_epsilon`` and ``get_delta`` return upper bounds with a ``lower``. A noise multiplier is
    the noise over the clip norm, also under REPLACE_ONE.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    ) -> None:
        super().__init__(neighboring_relation)
        self._counts: Counter[events.Event] = Counter()
        self._without_noise = False

    def compose(self, event: Any, count: int = 1) -> PrivacyAccountant:
        """Add ``event``, composed ``count`` times.

        Raises ``UnsupportedEventError``, ``TypeError`` if ``event`` is no event, and ``ValueError``
        for a count below 1.
        """
        if count < 1:
            raise ValueError(f"count is {count}; give a whole number of 1 or more.")
        super().compose(event, count)
        return self

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            repeated = event.count if count == 0 and not do_compose else event.count * count
            return self._maybe_compose(event.event, repeated, do_compose)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            parts = [self._maybe_compose(part, count, do_compose) for part in event.events]
            return next((error for error in parts if error is not None), None)
        if count < 0:
            return self.CompositionErrorDetails(event, f"it is composed {count} times.")
        if releases_nothing(event):
            return None
        if adds_no_noise(event):
            self._without_noise |= do_compose
            return None
        try:
            released = translate_event(event, ADJACENCY[self.neighboring_relation])
        except (UntranslatableEvent, ValueError, TypeError, ArithmeticError) as error:
            return self.CompositionErrorDetails(event, str(error))
        if do_compose:
            self._counts[released] += count
        return None

    def get_epsilon(self, target_delta: float) -> Bound:
        """Return the proved ε in nats at ``target_delta``; infinite if no finite ε is proved.

        Raises ``ValueError`` for a δ outside [0, 1].
        """
        if not 0 <= target_delta <= 1:
            raise ValueError(f"δ is {target_delta}; give a probability.")
        if self._without_noise or target_delta == 0:
            return Bound(math.inf if self._without_noise or self._counts else 0.0)
        if target_delta == 1:
            return Bound(0.0)
        return self._bound(lambda curve: curve.epsilon(target_delta), math.inf)

    def get_delta(self, target_epsilon: float) -> Bound:
        """Return the proved δ at ``target_epsilon`` nats; raises ``ValueError`` below 0."""
        if not target_epsilon >= 0:
            raise ValueError(f"ε is {target_epsilon}; give 0 or more.")
        if target_epsilon == math.inf:
            return Bound(1.0 if self._without_noise else 0.0)
        return self._bound(lambda curve: curve.delta(target_epsilon), 1.0)

    def _bound(self, query: Callable[[PrivacyCurve], Bracket], worst: float) -> Bound:
        if self._without_noise:
            return Bound(worst)
        released = [
            events.Repeated(event=event, count=count) for event, count in self._counts.items()
        ]
        if not released:
            return Bound(0.0)
        return bound_of(query(EventCurve(events.Composed(events=tuple(released)))))


# ---- events


ROUNDING = 2.0**-51
"""Relative rounding error of a quotient of decimals."""
ABSENT_WEIGHT = 1e-300
"""Weight of a multiple that a mixture omits, below the rounding of the other weights."""


class UntranslatableEvent(Exception):
    """An event of dp-accounting that we do not support; the message says what to do."""


def translate_event(event: Any, adjacency: Adjacency) -> events.Event:
    """Translate an event of dp-accounting; a release without any effect is an empty composition.

    Raises ``UntranslatableEvent``, and ``ValueError`` for numbers out of range.
    """
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return events.Repeated(
            event=translate_event(event.event, adjacency), count=_integer(event.count)
        )
    if isinstance(event, dp_event.ComposedDpEvent):
        return events.Composed(
            events=tuple(translate_event(part, adjacency) for part in event.events)
        )
    translate = _TRANSLATIONS.get(type(event))
    if translate is None:
        name = type(event).__name__
        raise UntranslatableEvent(
            f"{name} is not supported. {DP_EVENT_REMEDIES.get(name, '')}".rstrip()
        )
    return translate(event, adjacency)


def adds_no_noise(event: Any) -> bool:
    """Whether a part of ``event`` has no noise, as at the start of a calibration."""
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return True
    if releases_nothing(event):
        return False
    parts = (*getattr(event, "events", ()), *filter(None, (getattr(event, "event", None),)))
    noise = [getattr(event, name, None) for name in ("noise_multiplier", "standard_deviation")]
    return 0 in noise or any(map(adds_no_noise, parts))


def releases_nothing(event: Any) -> bool:
    """Whether ``event``, of a known kind, is independent of every record."""
    if type(event) not in (dp_event.ComposedDpEvent, dp_event.SelfComposedDpEvent, *_TRANSLATIONS):
        return False
    sizes = ("sampling_probability", "truncated_batch_size", "dataset_size", "sample_size")
    sensitivities = getattr(event, "sensitivities", None)
    return (
        isinstance(event, dp_event.NoOpDpEvent)
        or any(getattr(event, name, None) == 0 for name in sizes)
        or (sensitivities is not None and not any(sensitivities))
        or getattr(event, "step_counts", None) in (0, [])
        or (hasattr(event, "event") and releases_nothing(event.event))
        or (hasattr(event, "events") and all(map(releases_nothing, event.events)))
    )


def _gaussian(event: Any, adjacency: Adjacency) -> events.Event:
    return events.Gaussian(noise_multiplier=float(event.noise_multiplier) / _distance(adjacency))


def _laplace(event: Any, adjacency: Adjacency) -> events.Event:
    return events.Laplace(noise_multiplier=float(event.noise_multiplier) / _distance(adjacency))


def _poisson(event: Any, adjacency: Adjacency) -> events.Event:
    joint = joint_multiplier_of_blocks(_blocks(event.event))
    if event.sampling_probability == 1:
        return events.Gaussian(noise_multiplier=joint / _distance(adjacency))
    return events.PoissonSubsampledGaussian(
        sampling_probability=float(event.sampling_probability),
        noise_multiplier=joint,
        pair="replace_one" if adjacency == "replace_one" else "add_remove",
    )


def _fixed_size(event: Any, adjacency: Adjacency) -> events.Event:
    if adjacency != "replace_one":
        raise UntranslatableEvent("a SampledWithoutReplacementDpEvent needs REPLACE_ONE.")
    size, lot = _integer(event.source_dataset_size), _integer(event.sample_size)
    joint = joint_multiplier_of_blocks(_blocks(event.event))
    if lot == size:
        return events.Gaussian(noise_multiplier=joint / _distance(adjacency))
    return events.WithoutReplacementGaussian(
        dataset_size=size, sample_size=lot, noise_multiplier=joint
    )


def _truncated(event: Any, adjacency: Adjacency) -> events.Event:
    if event.truncated_batch_size > event.dataset_size:  # no sample is truncated
        gaussian = dp_event.GaussianDpEvent(event.noise_multiplier)
        return _poisson(
            dp_event.PoissonSampledDpEvent(event.sampling_probability, gaussian), adjacency
        )
    return events.TruncatedPoissonGaussian(
        dataset_size=_integer(event.dataset_size),
        sampling_probability=float(event.sampling_probability),
        max_lot_size=_integer(event.truncated_batch_size),
        noise_multiplier=float(event.noise_multiplier),
        neighbours=adjacency,
    )


def _mixture(event: Any, adjacency: Adjacency) -> events.Event:
    if adjacency == "replace_one":
        raise UntranslatableEvent(
            "a MixtureOfGaussiansDpEvent does not define sensitivities under REPLACE_ONE."
        )
    if len(event.sensitivities) != len(event.sampling_probs):
        raise ValueError("sensitivities and sampling_probs have different lengths")
    if not all(map(math.isfinite, event.sensitivities)):
        raise ValueError("a sensitivity is not finite")
    weights: defaultdict[Fraction, float] = defaultdict(float)
    for sensitivity, weight in zip(event.sensitivities, event.sampling_probs, strict=True):
        weights[Fraction(repr(float(sensitivity)))] += float(weight)
    unit = Fraction(
        gcd(*(value.numerator for value in weights)), lcm(*(value.denominator for value in weights))
    )
    multiples = {int(value / unit): weight for value, weight in weights.items()}
    if min(multiples) < 0 or 0 not in multiples or max(multiples) >= events.MAX_WEIGHTS:
        raise UntranslatableEvent(
            "the sensitivities of a MixtureOfGaussiansDpEvent must be 0 and multiples of one "
            f"number up to {events.MAX_WEIGHTS - 1}; round them up to multiples."
        )
    noise = float(event.standard_deviation / unit) * (1 - ROUNDING)
    if multiples.keys() == {0, 1} and math.fsum(multiples.values()) == 1:
        return events.PoissonSubsampledGaussian(
            sampling_probability=multiples[1], noise_multiplier=noise
        )
    return events.GaussianMixture(
        weights=tuple(multiples.get(n) or ABSENT_WEIGHT for n in range(max(multiples) + 1)),
        noise_multiplier=noise,
    )


def _tree(event: Any, adjacency: Adjacency) -> events.Event:
    """Translate a tree: a record is in one leaf, so in one node per level of the deepest tree."""
    if adjacency != "zero_out":
        raise UntranslatableEvent("a SingleEpochTreeAggregationDpEvent needs REPLACE_SPECIAL.")
    steps = event.step_counts
    longest = max(map(_integer, steps)) if isinstance(steps, list | tuple) else _integer(steps)
    nodes = longest.bit_length()
    return events.Gaussian(
        noise_multiplier=joint_multiplier_of_blocks([(float(event.noise_multiplier), nodes)])
    )


def _selection(event: Any, adjacency: Adjacency) -> events.Event:
    return events.RepeatAndSelect(
        event=translate_event(event.event, adjacency),
        mean=float(event.mean),
        shape=float(event.shape),
    )


_TRANSLATIONS: dict[type[Any], Callable[[Any, Adjacency], events.Event]] = {
    dp_event.NoOpDpEvent: lambda *_: events.Composed(events=()),
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
    """Yield the noise multipliers of the Gaussians of one sample, with their counts."""
    match event:
        case dp_event.GaussianDpEvent():
            yield float(event.noise_multiplier), times
        case dp_event.SelfComposedDpEvent():
            yield from _blocks(event.event, times * _integer(event.count))
        case dp_event.ComposedDpEvent():
            for part in event.events:
                yield from _blocks(part, times)
        case _:
            raise UntranslatableEvent(f"{type(event).__name__} inside a sample is not supported.")


def _distance(adjacency: Adjacency) -> float:
    """Return the distance that one record moves a sum, in bounds on its contribution."""
    return 2.0 if adjacency == "replace_one" else 1.0


def _integer(value: Any) -> int:
    if not (math.isfinite(value) and value == int(value) and value >= 0):
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return int(value)
