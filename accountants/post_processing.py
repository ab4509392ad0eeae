"""Lower bounds of ε from post-processed runs, for runs without lower bounds of their own.

Leaving out releases, adding noise to them, and observing one bin of many or one repetition of
several are post-processing, so the result costs at most as much as the run. ε decreases in δ, so
the ε of a larger δ is a lower bound too. The exact Gaussian accountant or the Fourier accountant
accounts the result, with the least additional noise that is in their range. A selection costs at
least what an attack on it gains (``affidavit.accountants.selection``).

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=0.1)
>>> curve = PostProcessedCurve(event=Repeated(event=step, count=1000))
>>> 100 < curve.epsilon(1e-6).lower < 1000
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import close_bracket
from affidavit.accountants.composition import parts
from affidavit.accountants.fourier.dominating_pairs import MIN_NOISE_MULTIPLIER
from affidavit.accountants.fourier.refinement import MIN_RESOLVED_DELTA
from affidavit.accountants.participations import CountingAttack
from affidavit.accountants.protocol import (
    Accountant,
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import accountant
from affidavit.plan import events

MAX_DOUBLINGS = 13
"""How often the least noise multiplier is doubled."""
MIN_RATE, MAX_STEPS, MAX_NOISE = 1e-6, 1_000_000, 1000.0
"""Range of the sampling probability, steps and noise multiplier for the Fourier accountant."""
GRAM_EXCESS = 1e-5
"""Relative bound of a Gram matrix's entry above the true product."""

Accountable = (
    events.Gaussian
    | events.Laplace
    | events.PoissonSubsampledGaussian
    | events.PoissonSampledGroupGaussian
    | events.WithoutReplacementGaussian
    | events.WithoutReplacementGroupGaussian
    | events.GaussianMixture
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PostProcessedCurve:
    """Lower bounds of what ``event`` contains; the upper bounds are infinity, or 1 for δ."""

    event: events.Event

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[lower, ∞]`` of ε (nats); raises ``ValueError`` unless 0 < ``delta`` < 1."""
        require_delta(delta)
        probability = math.prod(_run_probability(part) for part, _ in parts(self.event))
        run_delta = delta / probability * (1 + 1e-12)
        lower = 0.0
        if run_delta < 1:
            lower = self._contained(lambda curve: _epsilon(curve, run_delta))
        gain = self._attack_gain(lambda curve: curve.epsilon(delta))
        shown = close_bracket(math.inf, self._bins_shown, lambda curve: curve.epsilon(delta))
        return Bracket(lower=max(lower, gain, shown.lower), upper=math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[lower, 1]`` of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        probability = math.prod(_run_probability(part) for part, _ in parts(self.event))
        lower = probability * self._contained(lambda curve: curve.delta(epsilon)) * (1 - 1e-12)
        gain = self._attack_gain(lambda curve: curve.delta(epsilon))
        shown = close_bracket(1.0, self._bins_shown, lambda curve: curve.delta(epsilon))
        return Bracket(lower=max(lower, gain, shown.lower), upper=1.0)

    @property
    def _bins_shown(self) -> tuple[PrivacyCurve, ...]:
        """Curves of what all bins of a run show together."""
        if not any(isinstance(part, events.BallsInBinsGaussian) for part, _ in parts(self.event)):
            return ()
        # Imported here because few runs have bins of which a Gram matrix is known.
        from affidavit.accountants.largest_bin import LargestBinAccountant

        return LargestBinAccountant().curves_below(self.event)

    def _attack_gain(self, ask: Callable[[PrivacyCurve], Bracket]) -> float:
        """Return the largest gain of an attack on one of the selections, or 0."""
        selections = [
            part for part, _ in parts(self.event) if isinstance(part, events.RepeatAndSelect)
        ]
        if not selections:
            return 0.0
        # Imported here because only selections need it.
        from affidavit.accountants.selection import SelectionAttacks

        best = 0.0
        for selection in selections:
            noisier = map(_composed, _with_more_noise(list(_accountable(selection, 1))))
            for run in chain((selection.event,), noisier):
                try:
                    curve = SelectionAttacks.of(replace(selection, event=run))
                    best = max(best, ask(curve).lower)
                except AccountantError:
                    continue
                break
        return best

    def _contained(self, ask: Callable[[PrivacyCurve], Bracket]) -> float:
        known = [item for part, times in parts(self.event) for item in _accountable(part, times)]
        gaussian = [(leaf, times) for leaf, times in known if isinstance(leaf, events.Gaussian)]
        exact = _lower_bound(accountant("gaussian"), _composed(gaussian), ask) or 0.0
        if len(gaussian) == len(known):
            return exact
        counted = [
            CountingAttack(leaf, times)
            for leaf, times in known
            if isinstance(
                leaf,
                events.Laplace
                | events.PoissonSubsampledGaussian
                | events.WithoutReplacementGaussian,
            )
        ]
        exact = max([exact, *(ask(curve).lower for curve in counted)])
        for releases in _with_more_noise(known):
            result = _lower_bound(accountant("fourier"), _composed(releases), ask)
            if result is not None:
                return max(exact, result)
        return exact


def _epsilon(curve: PrivacyCurve, delta: float) -> Bracket:
    """Return ε at ``delta``, or at the least δ for which every curve answers."""
    try:
        return curve.epsilon(delta)
    except OutOfReach:
        return curve.epsilon(max(delta, MIN_RESOLVED_DELTA))


def _with_more_noise(
    known: Sequence[tuple[Accountable, int]],
) -> Iterator[Sequence[tuple[Accountable, int]]]:
    """Yield ``known`` with the least noise in the Fourier accountant's range, then with more.

    Unless all releases are Gaussian, those out of its range are left out. Each noise level is
    tried with and without Laplace releases.
    """
    if not all(isinstance(leaf, events.Gaussian) for leaf, _ in known):
        known = [(leaf, times) for leaf, times in known if _is_in_range(leaf)]
    normal = [(leaf, times) for leaf, times in known if not isinstance(leaf, events.Laplace)]
    for doubling in range(MAX_DOUBLINGS if normal else 0):
        least = MIN_NOISE_MULTIPLIER * 2**doubling
        for releases in [known, normal] if len(normal) < len(known) else [known]:
            yield [(_with_noise(leaf, least), min(times, MAX_STEPS)) for leaf, times in releases]


def _with_noise(leaf: Accountable, least: float) -> Accountable:
    """Return ``leaf`` with at least the noise ``least`` over the sum of a unit's records."""
    if isinstance(
        leaf, events.PoissonSampledGroupGaussian | events.WithoutReplacementGroupGaussian
    ):
        least *= leaf.records * (1 + 1e-9)
    return replace(leaf, noise_multiplier=max(leaf.noise_multiplier, least))


def _lower_bound(
    engine: Accountant, event: events.Event, ask: Callable[[PrivacyCurve], Bracket]
) -> float | None:
    try:
        return ask(engine.curve(event)).lower
    except AccountantError:
        return None


def _composed(releases: Sequence[tuple[Accountable, int]]) -> events.Composed:
    return events.Composed(
        events=tuple(events.Repeated(event=leaf, count=times) for leaf, times in releases)
    )


def _accountable(
    part: events.Leaf | events.RepeatAndSelect, times: int
) -> Iterator[tuple[Accountable, int]]:
    """Yield releases that ``times`` of ``part`` contain and that our accountants bound."""
    match part:
        case events.RepeatAndSelect(event=run):
            for inner, count in parts(run):
                yield from _accountable(inner, count * times)
        case events.RandomAllocationGaussian(bins=bins, attained_at=attained, released=released):
            sigma = part.noise_multiplier
            if attained is not None and released is None:  # else its first bin is released
                sigma = attained
            if not math.isfinite(sigma):
                return
            if bins == 1:
                yield events.Gaussian(noise_multiplier=sigma), times
            else:
                yield from _accountable(
                    events.PoissonSubsampledGaussian(
                        sampling_probability=1 / bins * (1 - 2.0**-52), noise_multiplier=sigma
                    ),
                    times,
                )
        case events.BallsInBinsGaussian(gram=gram):
            # The mean of one bin, as if all others were far from it.
            square = max(row[place] for place, row in enumerate(gram.rows)) * (1 - GRAM_EXCESS)
            yield from _accountable(
                events.RandomAllocationGaussian(
                    bins=len(gram.rows), noise_multiplier=part.noise_multiplier / math.sqrt(square)
                ),
                times,
            )
        case (
            events.TruncatedPoissonGaussian()
            | events.TruncatedPoissonGroupGaussian()
            | events.ReplacedAllocationGaussian()
        ):
            return  # These are bounds that no record attains.
        case events.GaussianMixture(conceded=conceded) if conceded > 0:
            return
        case _:
            yield part, times


def _is_in_range(leaf: Accountable) -> bool:
    """Return whether the Fourier accountant bounds ``leaf`` with enough noise quickly."""
    records = getattr(leaf, "records", 1)
    if isinstance(leaf, events.GaussianMixture):
        records = len(leaf.weights) - 1
    if leaf.noise_multiplier > MAX_NOISE * records:
        return False
    return (
        not isinstance(leaf, events.PoissonSubsampledGaussian)
        or leaf.sampling_probability >= MIN_RATE
    )


def _run_probability(part: events.Leaf | events.RepeatAndSelect) -> float:
    """Return the probability that a selection has a run, 1 unless their number is Poisson."""
    if isinstance(part, events.RepeatAndSelect) and math.isinf(part.shape):
        return -math.expm1(-part.mean) * (1 - 2.0**-50)
    return 1.0
