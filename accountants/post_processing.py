"""Lower ends of ε from runs that a run contains, where no method bounds the run itself from below.

Leaving releases out, adding noise to them, looking at one bin of many and at one repetition of
several are post-processing: what is left costs at most as much as the run. ε falls with δ, so that
the ε of a larger δ is a lower bound too. Whatever remains is answered by the exact Gaussian
accountant or by the Fourier one, with the least noise added that these reach. A selection costs
at least what an attack on it gains (``affidavit.accountants.selection``).

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
from affidavit.accountants.composition import parts
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
from affidavit.plan import (
    BallsInBinsGaussian,
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    Repeated,
    ReplacedAllocationGaussian,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
)

MIN_NOISE, DOUBLINGS = 0.2, 12
"""The Fourier accountant's least noise multiplier, and how often it is doubled at most."""
MIN_RATE, MAX_STEPS = 1e-6, 1_000_000
"""The least sampling probability, and the most steps, that it is asked for at once."""

MAX_NOISE = 1000.0
"""The largest noise multiplier that it is asked for."""
BELOW_PRODUCTS = 1e-5
"""How far, at most and relative to it, a Gram matrix's entry lies above the true product."""

Known = (
    Gaussian
    | Laplace
    | PoissonSubsampledGaussian
    | PoissonSampledGroupGaussian
    | WithoutReplacementGaussian
    | WithoutReplacementGroupGaussian
    | GaussianMixture
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PostProcessedCurve:
    """Lower ends of what ``event`` contains; its upper ends are infinite, or 1 for δ."""

    event: Event

    def epsilon(self, delta: float) -> Bracket:
        """``[lower end, ∞]`` of ε (nats) at ``delta``; raises ``ValueError`` unless 0 < δ < 1."""
        require_delta(delta)
        chance = math.prod(_chance_of_a_run(part) for part, _ in parts(self.event))
        near = delta / chance * (1 + 1e-12)
        lower = self._highest(lambda curve: _epsilon(curve, near)) if near < 1 else 0.0
        attacked = self._attacked(lambda curve: curve.epsilon(delta))
        return Bracket(lower=max(lower, attacked), upper=math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """``[lower end, 1]`` of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        chance = math.prod(_chance_of_a_run(part) for part, _ in parts(self.event))
        lower = chance * self._highest(lambda curve: curve.delta(epsilon)) * (1 - 1e-12)
        attacked = self._attacked(lambda curve: curve.delta(epsilon))
        return Bracket(lower=max(lower, attacked), upper=1.0)

    def _attacked(self, ask: Callable[[PrivacyCurve], Bracket]) -> float:
        """The most that an attack on one of the selections gains, or 0."""
        selections = [part for part, _ in parts(self.event) if isinstance(part, RepeatAndSelect)]
        if not selections:
            return 0.0
        # Nothing else here needs it.
        from affidavit.accountants.selection import SelectionAttacks

        best = 0.0
        for selection in selections:
            louder = map(_composed, _louder(list(_known(selection, 1))))
            for run in chain((selection.event,), louder):
                try:
                    curve = SelectionAttacks.of(replace(selection, event=run))
                    best = max(best, ask(curve).lower)
                except AccountantError:
                    continue
                break
        return best

    def _highest(self, ask: Callable[[PrivacyCurve], Bracket]) -> float:
        known = [item for part, times in parts(self.event) for item in _known(part, times)]
        gaussian = [(leaf, times) for leaf, times in known if isinstance(leaf, Gaussian)]
        exact = _lower(accountant("gaussian"), _composed(gaussian), ask) or 0.0
        if len(gaussian) == len(known):
            return exact
        counted = [
            CountingAttack(leaf, times)
            for leaf, times in known
            if isinstance(leaf, Laplace | PoissonSubsampledGaussian | WithoutReplacementGaussian)
        ]
        exact = max([exact, *(ask(curve).lower for curve in counted)])
        for releases in _louder(known):
            result = _lower(accountant("fourier"), _composed(releases), ask)
            if result is not None:
                return max(exact, result)
        return exact


def _epsilon(curve: PrivacyCurve, delta: float) -> Bracket:
    """ε at ``delta``, or at the least δ that the curve surely answers for."""
    try:
        return curve.epsilon(delta)
    except OutOfReach:
        return curve.epsilon(max(delta, MIN_RESOLVED_DELTA))


def _louder(known: Sequence[tuple[Known, int]]) -> Iterator[Sequence[tuple[Known, int]]]:
    """What is ``known`` with the least noise that the Fourier accountant reaches, or with more.

    Without what it does not reach with any noise, unless all is Gaussian, and then without Laplace
    releases.
    """
    if not all(isinstance(leaf, Gaussian) for leaf, _ in known):
        known = [(leaf, times) for leaf, times in known if _is_reached(leaf)]
    normal = [(leaf, times) for leaf, times in known if not isinstance(leaf, Laplace)]
    for doubling in range(DOUBLINGS if normal else 0):
        least = MIN_NOISE * 2**doubling
        for releases in [known, normal] if len(normal) < len(known) else [known]:
            yield [(_with_noise(leaf, least), min(times, MAX_STEPS)) for leaf, times in releases]


def _with_noise(leaf: Known, least: float) -> Known:
    """``leaf`` with at least so much noise over what all records of a unit add."""
    if isinstance(leaf, PoissonSampledGroupGaussian | WithoutReplacementGroupGaussian):
        least *= leaf.records * (1 + 1e-9)
    return replace(leaf, noise_multiplier=max(leaf.noise_multiplier, least))


def _lower(
    engine: Accountant, event: Event, ask: Callable[[PrivacyCurve], Bracket]
) -> float | None:
    try:
        return ask(engine.curve(event)).lower
    except AccountantError:
        return None


def _composed(releases: Sequence[tuple[Known, int]]) -> Composed:
    return Composed(events=tuple(Repeated(event=leaf, count=times) for leaf, times in releases))


def _known(part: Leaf | RepeatAndSelect, times: int) -> Iterator[tuple[Known, int]]:
    """Releases that ``part``, so many ``times``, contains and that our accountants know."""
    match part:
        case RepeatAndSelect(event=run):
            for inner, count in parts(run):
                yield from _known(inner, count * times)
        case RandomAllocationGaussian(bins=bins, attained_at=attained, released=released):
            sigma = part.noise_multiplier
            if attained is not None and released is None:  # else its first bin is one of them
                sigma = attained
            if not math.isfinite(sigma):
                return
            if bins == 1:
                yield Gaussian(noise_multiplier=sigma), times
            else:
                yield from _known(
                    PoissonSubsampledGaussian(
                        sampling_probability=1 / bins * (1 - 2.0**-52), noise_multiplier=sigma
                    ),
                    times,
                )
        case BallsInBinsGaussian(gram=gram):
            # One bin's mean, as if none of the others came near it.
            square = max(row[place] for place, row in enumerate(gram.rows)) * (1 - BELOW_PRODUCTS)
            yield from _known(
                RandomAllocationGaussian(
                    bins=len(gram.rows), noise_multiplier=part.noise_multiplier / math.sqrt(square)
                ),
                times,
            )
        case (
            TruncatedPoissonGaussian()
            | TruncatedPoissonGroupGaussian()
            | ReplacedAllocationGaussian()
        ):
            return  # Bounds of a run, which no record attains.
        case GaussianMixture(conceded=conceded) if conceded > 0:
            return
        case _:
            yield part, times


def _is_reached(leaf: Known) -> bool:
    """Whether the Fourier accountant answers for ``leaf`` with enough noise, in milliseconds."""
    records = getattr(leaf, "records", 1)
    if isinstance(leaf, GaussianMixture):
        records = len(leaf.weights) - 1
    if leaf.noise_multiplier > MAX_NOISE * records:
        return False
    return not isinstance(leaf, PoissonSubsampledGaussian) or leaf.sampling_probability >= MIN_RATE


def _chance_of_a_run(part: Leaf | RepeatAndSelect) -> float:
    """That a selection has a run to release: 1 but where their number is Poisson."""
    if isinstance(part, RepeatAndSelect) and math.isinf(part.shape):
        return -math.expm1(-part.mean) * (1 - 2.0**-50)
    return 1.0
